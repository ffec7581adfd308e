"""Simulated nodes that are machines: each with a network, processes, a name, /dev/shm and a disk of its own.

All else of the host's files is there under the same names: scripts, data, the interpreter. A node's disk is
put where its checkpoints go (`disks.py`), outlives the machine, and is read from outside while the machine
runs and when it is down. Agents are forked from the nursery into the machine: that costs no import.

**Promises.** As `machines.py` and `disks.py`: nothing is mounted or named on the host, and whatever ends the
maker ends machines, processes, disks and links. Takes root.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO

import psutil

from elastic_resume.faults import disks, ending, hosts, nursery
from elastic_resume.faults.disks import Disk
from elastic_resume.faults.hosts import INTERFACE, Namespaces
from elastic_resume.faults.machines import MB, Machines

PORT = 29400  # each machine has all ports for itself
SHM_BYTES = 64 * MB  # of /dev/shm, as containers have it
DISK_BYTES = 256 * MB
TEMPORARY = "/node-tmp"


def available() -> str:
    """Why this process cannot have such nodes, in words; empty when it can."""
    return hosts.available() or disks.available()


class Housed:
    """The ground of nodes that are machines; see `grounds.Loopback` for what each method means."""

    interface = INTERFACE

    def __init__(
        self,
        directory: Path,
        nodes: int,
        *,
        disk_bytes: int = DISK_BYTES,
        shm_bytes: int = SHM_BYTES,
        memory_bytes: int = 0,
    ) -> None:
        """Lay the network and make the disks, whose bytes are kept in ``directory``; nodes see that too.

        Raises:
            MachineError: what it takes, and is not there.

        """
        names = [f"n{index}" for index in range(nodes)]
        with contextlib.ExitStack() as stack:
            self._machines = stack.enter_context(
                Machines(
                    names,
                    disks={"/dev/shm": shm_bytes, TEMPORARY: DISK_BYTES},  # noqa: S108  the machine's own
                    bind={"/tmp": "/tmp", str(directory): directory},  # noqa: S108  where tests lay scripts
                )
            )
            self._disks = [stack.enter_context(Disk(directory, disk_bytes)) for _ in names]
            self._undo = stack.pop_all()
        self._memory_bytes = memory_bytes
        self._places: dict[int, Path] = {}
        self._agents: dict[int, ending.Agent] = {}

    def address(self, index: int) -> str:
        """The node's IPv4 address, which only other nodes reach."""
        return self._machines.address(index)

    def port(self, index: int) -> int:
        """Where the node's agent may listen."""
        del index
        return PORT

    def root(self, index: int, ckpt_dir: Path) -> Path:
        """Put the node's disk at ``ckpt_dir`` of its machine, and say where this process finds it."""
        ckpt_dir.mkdir(parents=True, exist_ok=True)
        self._places[index] = ckpt_dir
        return self._disks[index].path

    def temporary(self, directory: Path) -> str:
        """Where nodes keep temporary files: in their machine's memory."""
        del directory
        return TEMPORARY

    def boot(self, indices: Collection[int]) -> None:
        """Start the machines that are down, each with its link and its disk, or not at all."""
        down = [index for index in indices if not self._machines.is_up(index)]
        try:
            if down:
                self._machines.boot(*down, memory_bytes=self._memory_bytes)
            for index in down if self._places else ():  # else they share a folder of the host
                self._disks[index].put(self._machines.first(index)[0], str(self._places[index]))
        except BaseException:  # older kernels put no disk in place that has failed, and the host's is none
            self._machines.crash(*down)
            raise

    def start(
        self, index: int, command: list[str], env: Mapping[str, str], log: IO[bytes], *, fresh: bool
    ) -> ending.Agent:
        """Start a node's agent, on a machine that boots where it is down."""
        self.boot([index])
        first, group = self._machines.first(index)
        forked = None if fresh else nursery.start(command, env, log, inside=first, group=group)
        if forked is None:
            agent = self._machines.run(index, command, env=env, stdout=log, stderr=log)
            self._agents[index] = agent
        else:
            self._machines.entered(index, forked)
            self._agents[index] = forked
        return self._agents[index]

    def processes(self, index: int) -> list[psutil.Process]:
        """All processes of the node's machine but its first: the agent before all others."""
        if not self._machines.is_up(index):
            return []
        roots = [self._agents[index].pid] if index in self._agents else []
        found: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [psutil.Process(pid) for pid in roots]
            found += found[0].children(recursive=True) if found else []
        with contextlib.suppress(psutil.NoSuchProcess):  # who has lost a parent there
            found += psutil.Process(self._machines.first(index)[0]).children(recursive=True)
        return found

    def crash(self, indices: Collection[int]) -> None:
        """Let machines die in one moment: every process is killed, and peers see their connections end."""
        self._machines.crash(*indices)

    @property
    def network(self) -> Namespaces:
        """Links that can be cut."""
        return self._machines.hosts

    def poweroff(self, indices: Collection[int]) -> None:
        """Let machines lose their power: links fall silent, processes end, disks lose what was not synced."""
        for index in indices:
            self.network.cut(index)
        for index in indices:
            self._disks[index].power_loss(secrets.randbelow(1 << 30))
        self.crash(indices)
        for index in indices:
            self._disks[index].mend()  # nobody is there to use it; so it can be read

    def disk(self, index: int) -> Disk:
        """The node's disk."""
        return self._disks[index]

    def close(self) -> None:
        """End everything. A second call does nothing."""
        self._undo.close()
