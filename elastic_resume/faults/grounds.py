"""What simulated nodes stand on: how much of a machine each has for itself.

`Loopback` gives a node a loopback address and nothing else. `Networked` gives it a network namespace, whose
links can be cut, and a small disk. A ground that lacks what is asked of it says what that takes.

**Promises.** What an agent has started dies with its node, and all of that with the ground's maker.

Does not know what agents do, nor what their events say.
"""

from __future__ import annotations

import os
import subprocess
import weakref
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, Literal

import psutil

from elastic_resume.errors import UsageError
from elastic_resume.faults import ending, nursery
from elastic_resume.faults.hosts import INTERFACE, Namespaces
from elastic_resume.faults.ports import claim_network, free_port
from elastic_resume.faults.small_disk import DISK_BYTES, SmallDisk

Hosts = Literal["loopback", "namespaces"]
PORT = 29400  # each node has all ports of its network for itself
TAKES = 'these nodes are processes that share {}: make the Cluster with hosts="namespaces", which takes root.'


class Loopback:
    """Nodes that are processes of this machine, each with a loopback address that no other cluster has."""

    interface = "lo"
    has_disks = False
    """Whether each node has a disk of its own, which goes with the ground."""

    def __init__(self) -> None:
        """Take a network of loopback addresses."""
        self._prefix, claim = claim_network()
        self._release = weakref.finalize(self, os.close, claim)
        self._agents: dict[int, ending.Agent] = {}

    def address(self, index: int) -> str:
        """The node's IPv4 address."""
        return f"{self._prefix}.{index + 1}"

    def port(self, index: int) -> int:
        """Where the node's agent may listen."""
        return free_port(self.address(index))

    def start(
        self, index: int, command: list[str], env: Mapping[str, str], log: IO[bytes], *, fresh: bool
    ) -> ending.Agent:
        """Start a node's agent: forked from the nursery where that can be, unless it is to be ``fresh``."""
        forked = None if fresh else nursery.start(command, env, log, network=self._network(index))
        self._agents[index] = forked or ending.start_to_last(
            lambda: subprocess.Popen(
                self._command(index, command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
                preexec_fn=ending.die_with_parent,  # noqa: PLW1509  one system call, before any thread matters
            )
        )
        return self._agents[index]

    def processes(self, index: int) -> list[psutil.Process]:
        """A node's agent and all of its descendants that are alive."""
        agent = self._agents.get(index)
        try:
            process = psutil.Process(agent.pid) if agent else None
            return [process, *process.children(recursive=True)] if process else []
        except psutil.NoSuchProcess:
            return []

    def crash(self, indices: Collection[int]) -> None:
        """Let nodes die in one moment: SIGKILL to every process; their kernels close their connections."""
        doomed = [process for index in indices for process in self.processes(index)]
        for process in doomed:
            ending.kill(process)
        for index in indices:
            if index in self._agents:
                self._agents[index].wait()
        # What was started between the two looks has lost its parent and ends by the kernel's hand.
        for process in doomed:
            ending.wait_for(process)

    @property
    def network(self) -> Namespaces:
        """The network of nodes that have one."""
        raise UsageError(TAKES.format("one network"))

    def poweroff(self, indices: Collection[int]) -> None:
        """Let nodes fall silent, and then die: no peer is told."""
        for index in indices:
            self.network.cut(index)
        self.crash(indices)

    def disk(self, index: int) -> SmallDisk:
        """The disk of a node that has one."""
        del index
        raise UsageError(TAKES.format("one disk"))

    def root(self, index: int, ckpt_dir: Path) -> Path:
        """Where this process finds what is in a node's ``ckpt_dir``."""
        del index
        return ckpt_dir

    def temporary(self, directory: Path) -> str:
        """Where nodes keep temporary files: in ``directory``, by a path short enough for sockets in it."""
        directory.mkdir(exist_ok=True)
        held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        self._held = weakref.finalize(self, os.close, held)
        return f"/proc/{os.getpid()}/fd/{held}"

    def close(self) -> None:
        """Give back what the nodes stood on; they are dead."""
        self._release()

    def _network(self, index: int) -> str:
        del index
        return ""

    def _command(self, index: int, command: list[str]) -> list[str]:
        del index
        return command


class Networked(Loopback):
    """Nodes with a network namespace and a small disk each, and all else in common. Takes root."""

    interface = INTERFACE
    has_disks = True

    def __init__(self, network: Namespaces | int, disk_bytes: int = DISK_BYTES) -> None:
        """Stand on ``network``, which its maker closes, or on a new one of so many nodes.

        Raises:
            MachineError: it cannot be had here, and why.

        """
        self._is_ours = isinstance(network, int)
        self._namespaces = Namespaces(network) if isinstance(network, int) else network
        self._disk_bytes = disk_bytes
        self._disks: dict[int, SmallDisk] = {}
        self._agents = {}
        self._off: set[int] = set()

    def address(self, index: int) -> str:
        """The node's IPv4 address, which only other nodes reach."""
        return self.network.address(index)

    def port(self, index: int) -> int:
        """Where the node's agent may listen: it is alone there."""
        del index
        return PORT

    def start(
        self, index: int, command: list[str], env: Mapping[str, str], log: IO[bytes], *, fresh: bool
    ) -> ending.Agent:
        """Start a node's agent; one whose power was off gets its link back."""
        if index in self._off:
            self._off.remove(index)
            self.network.restore(index)
        return super().start(index, command, env, log, fresh=fresh)

    def poweroff(self, indices: Collection[int]) -> None:
        """Let nodes fall silent, and then die, until they are started again."""
        self._off.update(indices)
        super().poweroff(indices)

    @property
    def network(self) -> Namespaces:
        """Links that can be cut."""
        return self._namespaces

    def root(self, index: int, ckpt_dir: Path) -> Path:
        """Make the node's disk, and let ``ckpt_dir`` lead to it."""
        self._disks[index] = SmallDisk(self._disk_bytes)
        ckpt_dir.parent.mkdir(parents=True, exist_ok=True)
        ckpt_dir.symlink_to(self._disks[index].path)
        return ckpt_dir

    def disk(self, index: int) -> SmallDisk:
        """The node's disk.

        Raises:
            UsageError: the nodes share a directory of this machine.

        """
        if index not in self._disks:
            raise UsageError("these nodes share one disk, that of this machine.")
        return self._disks[index]

    def close(self) -> None:
        """Give the disks back, and the network where it was made here. A second call does nothing."""
        for disk in self._disks.values():
            disk.close()
        if self._is_ours:
            self._namespaces.close()

    def _network(self, index: int) -> str:
        return self.network.path(index)

    def _command(self, index: int, command: list[str]) -> list[str]:
        return self.network.command(index, command)


def ground(hosts: Hosts | Namespaces | Loopback, nodes: int, disk_bytes: int | None) -> Loopback:
    """Make what is asked for.

    Raises:
        UsageError: there is no such ground, or it has no disks of a size.
        MachineError: it cannot be had here, and why.

    """
    if isinstance(hosts, Loopback):
        return hosts
    if hosts == "namespaces" or isinstance(hosts, Namespaces):
        return Networked(nodes if hosts == "namespaces" else hosts, disk_bytes or DISK_BYTES)
    if disk_bytes is not None:
        raise UsageError('disk_bytes: nodes have disks of their own with hosts="namespaces".')
    if hosts != "loopback":
        raise UsageError(f'hosts={hosts!r}: simulated hosts are "loopback" or "namespaces".')
    return Loopback()
