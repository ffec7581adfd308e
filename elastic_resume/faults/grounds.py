"""What simulated nodes stand on: how much of a machine each has for itself.

`Loopback` gives a node a loopback address and nothing else, `Wired` an interface on a network whose links
can be cut, `Housed` (`housed.py`) a machine with all of that and a disk. Where a ground lacks what is asked
of it, it says what that takes.

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
from elastic_resume.faults.disks import Disk
from elastic_resume.faults.hosts import INTERFACE, Namespaces
from elastic_resume.faults.housed import PORT, Housed
from elastic_resume.faults.ports import claim_network, free_port

Hosts = Literal["loopback", "namespaces"]
TAKES = 'these nodes are processes that share {}: make the Cluster with hosts="namespaces", which takes root.'


class Loopback:
    """Nodes that are processes of this machine, each with a loopback address that no other cluster has."""

    interface = "lo"

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

    def boot(self, indices: Collection[int]) -> None:
        """Start what is below these nodes, all at once."""

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
        """Let nodes fall silent, and then die: no peer hears of it."""
        for index in indices:
            self.network.cut(index)
        self.crash(indices)

    def disk(self, index: int) -> Disk:
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


class Wired(Loopback):
    """Nodes with a network each, which its maker closes, and all else in common."""

    interface = INTERFACE

    def __init__(self, network: Namespaces) -> None:
        """Stand on ``network``."""
        self._given = network
        self._agents = {}

    def address(self, index: int) -> str:
        """The node's IPv4 address."""
        return self._given.address(index)

    def port(self, index: int) -> int:
        """Where the node's agent may listen: it is alone there."""
        del index
        return PORT

    @property
    def network(self) -> Namespaces:
        """Links that can be cut."""
        return self._given

    def close(self) -> None:
        """Leave the network to its maker."""

    def _network(self, index: int) -> str:
        return self._given.path(index)

    def _command(self, index: int, command: list[str]) -> list[str]:
        return self._given.command(index, command)


Ground = Loopback | Housed


def ground(hosts: Hosts | Namespaces, directory: Path, nodes: int, **sizes: int) -> Ground:
    """Make what is asked for.

    Raises:
        UsageError: there is no such ground, or it has no such sizes.
        MachineError: it cannot be had here, and why.

    """
    if hosts == "namespaces":
        return Housed(directory, nodes, **sizes)
    if sizes:
        raise UsageError(f'{", ".join(sizes)}: nodes have sizes of their own with hosts="namespaces".')
    if isinstance(hosts, Namespaces):
        return Wired(hosts)
    if hosts != "loopback":
        raise UsageError(f'hosts={hosts!r}: simulated hosts are "loopback" or "namespaces".')
    return Loopback()
