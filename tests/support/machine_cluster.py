"""Provide a `Cluster` of simulated machines, each with its own network, processes, name, /dev/shm and disk.

All other files are the host's, under the same names. A node's disk (`disks.py`) is mounted where its
checkpoints go. It outlives the machine, and can be read from outside at any time. Agents are new processes
that import torch themselves, unless the cluster is to fork them. Nothing is mounted or named on the host,
and everything ends with its maker. This needs root.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, Any

import psutil

from elastic_resume import constants, events
from elastic_resume.errors import UsageError
from elastic_resume.events import Event
from elastic_resume.testing import fork_server
from elastic_resume.testing.backends import AGENT_PORT, LoopbackBackend
from elastic_resume.testing.cluster import Cluster
from elastic_resume.testing.virtual_network import INTERFACE, VirtualNetwork
from tests.support.agent_fork_server import ShimAgentServer
from tests.support.disks import SimulatedDisk
from tests.support.machines import MB, Machines

SHM_BYTES = 64 * MB  # of /dev/shm, as containers have it
DISK_BYTES = 256 * MB
TEMPORARY_DIR = "/node-tmp"


class MachineBackend(LoopbackBackend):
    """Run each node on a simulated machine with a simulated disk."""

    interface = INTERFACE
    has_disks = True

    def __init__(
        self,
        directory: Path,
        nodes: int,
        *,
        disk_bytes: int = DISK_BYTES,
        shm_bytes: int = SHM_BYTES,
        memory_bytes: int = 0,
        forks_agents: bool = False,
    ) -> None:
        """Make the network and the disks, whose bytes are kept in ``directory``.

        With ``forks_agents``, `processes` does not see the agents, and no limit of memory holds for them.

        Raises:
            MachineError: a requirement is missing.

        """
        names = [f"n{index}" for index in range(nodes)]
        with contextlib.ExitStack() as stack:
            self._machines = stack.enter_context(
                Machines(
                    names,
                    disks={"/dev/shm": shm_bytes, TEMPORARY_DIR: DISK_BYTES},  # noqa: S108  the machine's own
                    bind={"/tmp": "/tmp", str(directory): directory},  # noqa: S108  tests write scripts there
                )
            )
            self._disks = [stack.enter_context(SimulatedDisk(directory, disk_bytes)) for _ in names]
            self._exit_stack = stack.pop_all()
        self._memory_bytes = memory_bytes
        self._fork_server: ShimAgentServer | None = None
        if forks_agents:
            self._fork_server = ShimAgentServer(directory, os.environ)
            self._exit_stack.callback(self._fork_server.close)
        self._ckpt_dirs: dict[int, Path] = {}
        self._agents: dict[int, fork_server.AgentProcess] = {}

    def address(self, index: int) -> str:
        """Return the node's IPv4 address, which only other nodes reach."""
        return self._machines.address(index)

    def port(self, index: int) -> int:
        """Return the port of the node's agent."""
        del index
        return AGENT_PORT

    def prepare_disk(self, index: int, ckpt_dir: Path) -> Path:
        """Mount the node's disk at ``ckpt_dir`` of its machine; return its path for this process."""
        ckpt_dir.mkdir(parents=True, exist_ok=True)
        self._ckpt_dirs[index] = ckpt_dir
        return self._disks[index].path

    def temporary_dir(self, directory: Path) -> str:
        """Return the directory of nodes' temporary files, in their machine's memory."""
        del directory
        return TEMPORARY_DIR

    def boot(self, indices: Collection[int]) -> None:
        """Start the machines that are down, each with its link and disk, or none of them."""
        down = [index for index in indices if not self._machines.is_up(index)]
        try:
            if down:
                self._machines.boot(*down, memory_bytes=self._memory_bytes)
            for index in down if self._ckpt_dirs else ():  # otherwise they share a directory of the host
                self._disks[index].mount_in_namespace(
                    self._machines.init_pid(index), str(self._ckpt_dirs[index])
                )
        except BaseException:  # older kernels cannot mount a failed disk
            self._machines.crash(*down)
            raise

    def start(
        self, index: int, command: list[str], env: Mapping[str, str], log: IO[bytes], *, fresh: bool
    ) -> fork_server.AgentProcess:
        """Start a node's agent, and its machine if it is down."""
        del fresh
        self.boot([index])
        if self._fork_server is not None:
            own = command.index("elastic_resume") + 1  # after `python -m`
            command = [str(self._fork_server.bin_dir / "elastic-resume"), *command[own:]]
        self._agents[index] = self._machines.run(index, command, env=env, stdout=log, stderr=log)
        return self._agents[index]

    def processes(self, index: int) -> list[psutil.Process]:
        """Return all processes of the node's machine except the first, the agent before all others."""
        if not self._machines.is_up(index):
            return []
        roots = [self._agents[index].pid] if index in self._agents else []
        found: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [psutil.Process(pid) for pid in roots]
            found += found[0].children(recursive=True) if found else []
        with contextlib.suppress(psutil.NoSuchProcess):  # processes without their parent
            found += psutil.Process(self._machines.init_pid(index)).children(recursive=True)
        return found

    def crash(self, indices: Collection[int]) -> None:
        """Kill all processes of machines at once; peers see their connections end."""
        self._machines.crash(*indices)

    @property
    def network(self) -> VirtualNetwork:
        """Return the virtual network of the machines."""
        return self._machines.network

    def poweroff(self, indices: Collection[int]) -> None:
        """Cut the power of machines: links become silent, processes end, disks lose unsynced data."""
        for index in indices:
            self.network.cut(index)
        for victim in [process for index in indices for process in self.processes(index)]:
            fork_server.kill(victim)  # before the disks: no process without power sees an error of its disk
        for index in indices:
            self._disks[index].lose_power(secrets.randbelow(1 << 30))
        self.crash(indices)
        for index in indices:
            self._disks[index].mend()  # so that this process can read it

    def disk(self, index: int) -> SimulatedDisk:  # type: ignore[override]  # it has more methods
        """Return the node's disk."""
        return self._disks[index]

    def close(self) -> None:
        """End everything; a second call does nothing."""
        self._exit_stack.close()


class MachineCluster(Cluster):
    """A cluster of simulated machines, whose disks fail like hardware and lose unsynced data."""

    def __init__(self, directory: Path, *, nodes: int = 3, **options: Any) -> None:
        """Describe the cluster; ``options`` are arguments of `MachineBackend` and `Cluster`."""
        directory.mkdir(parents=True, exist_ok=True)
        ours = ("disk_bytes", "shm_bytes", "memory_bytes", "forks_agents")
        own = {name: options.pop(name) for name in ours if name in options}
        self.backend = MachineBackend(directory, nodes, **own)
        super().__init__(directory, nodes=nodes, hosts=self.backend, **options)
        self._events_before_fault: dict[int, bytes] = {}
        self._lost_events: dict[int, list[Event]] = {}

    def __enter__(self) -> MachineCluster:  # noqa: PYI034  typing.Self needs Python 3.11
        return self

    def node_events(self, index: int, kind: str | None = None) -> list[Event]:
        """Return one node's events by time, including those that its disk has lost."""
        lost = [event for event in self._lost_events.get(index, []) if kind in (None, event["event"])]
        return sorted([*super().node_events(index, kind), *lost], key=lambda event: event["t"])

    def process(self, index: int, pid: int) -> psutil.Process | None:
        """Return the process with this pid in the node's namespace; None if it has ended."""
        return next((one for one in self.processes(index) if pid_in_namespace(one) == pid), None)

    def poweroff(self, index: int) -> None:
        """Cut a node's power; its disk loses unsynced data, but `events` keeps the events."""
        self._read_events_before_fault(index)
        super().poweroff(index)
        self._keep_lost_events(index)

    def break_disk(self, index: int) -> None:
        """Fail all operations of a node's disk with EIO until `mend_disk`."""
        self._read_events_before_fault(index)
        self.backend.disk(index).fail()

    def turn_disk_read_only(self, index: int) -> None:
        """Turn a node's file system read-only (EROFS), as after an error, until `mend_disk`."""
        self._read_events_before_fault(index)
        self.backend.disk(index).turn_read_only()

    def mend_disk(self, index: int) -> None:
        """Repair a node's disk with its synced data; open files keep failing."""
        self.backend.disk(index).mend()
        self._keep_lost_events(index)

    def limit_disk_rate(self, index: int, bytes_per_s: float) -> None:
        """Limit the rate of a node's disk; 0 removes the limit."""
        disk = self.backend.disk(index)
        disk.limit_rate(bytes_per_s) if bytes_per_s else disk.remove_rate_limit()

    def wipe(self, index: int) -> None:
        """Empty a dead node's disk."""
        super().wipe(index)
        self._lost_events.pop(index, None)

    def stop(self) -> None:
        """Repair the disks, so that their content can be kept, and end everything."""
        self.kill_nodes(range(len(self.nodes)))
        for index in range(len(self.nodes)):
            with contextlib.suppress(UsageError):  # stopped before
                self.limit_disk_rate(index, 0)
                self.mend_disk(index)
        super().stop()

    def _read_events_before_fault(self, index: int) -> None:
        """Remember the node's events: a report needs those that were never synced."""
        with contextlib.suppress(OSError):
            self._events_before_fault[index] = (
                self.nodes[index].directory / constants.EVENTS_FILE
            ).read_bytes()

    def _keep_lost_events(self, index: int) -> None:
        """Save the events that the disk has lost beside the nodes' directories."""
        there: set[bytes] = set()
        with contextlib.suppress(OSError):
            path = self.nodes[index].directory / constants.EVENTS_FILE
            there = set(path.read_bytes().splitlines(keepends=True))
        written = self._events_before_fault.pop(index, b"").splitlines(keepends=True)
        lost = [line for line in written if line not in there and line.endswith(b"\n")]
        if lost:
            with open(self.run_dir / constants.FAULTS_FILE, "ab") as log:
                log.write(b"".join(lost))
        found = map(events.parse_line, lost)
        self._lost_events.setdefault(index, []).extend(event for event in found if event is not None)


def pid_in_namespace(process: psutil.Process) -> int:
    """Return the process's pid in its own namespace; 0 if it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return 0
