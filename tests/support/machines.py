"""Simulate machines that have their own processes, names, memory and disks, and can lose them.

`VirtualNetwork` gives each a network; this module adds namespaces for process ids, mounts, host name and
shared memory. Process 1 of each is `machine_init.py`. If it is killed, the kernel kills all other processes
at once, and everything in memory is lost.

A machine sees the host's files under their names, as nodes see a shared file system. Its own are /tmp,
/scratch and /dev/shm (in memory and of limited size), /etc/hosts and /proc. Nothing on the host is changed,
except that each /etc/hosts is a temporary file and a memory limit makes a control group. When the maker
exits, the kernel ends all machines. This needs root. Clocks, users and the kernel are the host's.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from elastic_resume.errors import MachineError, UsageError
from elastic_resume.testing import fork_server, virtual_network
from elastic_resume.testing.virtual_network import VirtualNetwork
from tests.support import namespaces
from tests.support.namespaces import MemoryLimit
from tests.support.paths import ROOT

MB = 1 << 20
DISKS = {"/tmp": 256 * MB, "/scratch": 256 * MB, "/dev/shm": 64 * MB}  # noqa: S108  of the machine
"""Directories in memory and their sizes in bytes; /dev/shm has the size that containers have."""

_INIT_PROGRAM = Path(__file__).with_name("machine_init.py")
_NAMESPACE_KINDS = ("mnt", "uts", "ipc")  # `VirtualNetwork` makes net; a fork enters pid
_UNSHARE_FLAGS = {"mnt": "mount", "uts": "uts", "ipc": "ipc"}
# Arguments: working directory, control group or "", command.
_ENTER_SCRIPT = """
cd / && cd "$1" 2>/dev/null
[ -z "$2" ] || echo 0 > "$2/cgroup.procs" || exit 126
shift 2
exec "$@"
"""
_File = int | IO[bytes] | None


@dataclass
class _RunningMachine:
    """A running machine: its process 1, and descriptors of its namespaces."""

    init_process: subprocess.Popen[bytes]
    namespaces: dict[str, int]
    memory_limit: MemoryLimit
    started_processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """Processes of `Machines.run`. Process 1 ends only when this process has waited for them."""


class Machines(contextlib.AbstractContextManager["Machines"]):
    """Several machines on one network; use it as a context manager or call `close`."""

    def __init__(
        self,
        names: Sequence[str] = ("n0", "n1", "n2"),
        *,
        disks: Mapping[str, int] | None = None,
        bind: Mapping[str, str | Path] | None = None,
    ) -> None:
        """Create the network; `boot` starts a machine.

        Args:
            names: the machines' host names, which all machines can resolve.
            disks: directories in memory of every machine, with their sizes in bytes; default: `DISKS`.
            bind: path inside every machine -> file or directory of the host.

        Raises:
            MachineError: `virtual_network.unavailable_reason` says why.

        """
        self._names = list(names)
        self._disks = dict(DISKS if disks is None else disks)
        self._bind = {
            **_interpreter_dirs(self._disks),
            **{to: str(source) for to, source in (bind or {}).items()},
        }
        self._running_machines: dict[int, _RunningMachine] = {}
        self._name_tables: dict[int, str] = {}
        self._hosts_files = tempfile.TemporaryDirectory()
        self.network = VirtualNetwork(len(self._names))
        # The kernel kills a process when the thread that forked it ends, and a thread enters a pid namespace
        # for its children only. So one thread starts all processes and lasts as long as the machines.
        self._process_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="machines")
        namespaces.remove_stale_groups()

    def __len__(self) -> int:
        return len(self._names)

    def name(self, index: int) -> str:
        """Return the machine's host name."""
        return self._names[index]

    def address(self, index: int) -> str:
        """Return the machine's IPv4 address."""
        return self.network.address(index)

    def is_up(self, index: int) -> bool:
        """Whether the machine runs."""
        running = self._running_machines.get(index)
        return running is not None and running.init_process.poll() is None

    # ---- life ----------------------------------------------------------------------------------------

    def boot(
        self,
        *indices: int,
        new_address: bool = False,
        memory_bytes: int = 0,
    ) -> None:
        """Start machines that are down (default: all) with empty disks.

        Args:
            indices: indices of the machines.
            new_address: take an address that no machine had; the former one no longer answers.
            memory_bytes: memory limit of all processes together; the kernel kills one that exceeds it.

        Raises:
            MachineError: a machine could not be started; the others are up.

        """
        started, failures = [], []
        for index in indices or range(len(self)):
            if self.is_up(index):
                raise UsageError(f"{self.name(index)} is up: crash it or switch it off before it boots.")
            self._reap_machine(index)
            if new_address:
                change_address(self.network, index)
            self.network.restore_link(index)
            started.append((index, self._process_thread.submit(self._start_init, index, memory_bytes)))
        for index, future in started:
            try:
                self._wait_until_ready(index, *future.result())
            except MachineError as error:
                failures.append(error)
        if new_address:
            for index in self._running_machines:
                self._write_hosts_file(index)
        if failures:
            raise failures[0]

    def run(
        self,
        index: int,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdout: _File = None,
        stderr: _File = None,
    ) -> subprocess.Popen[bytes]:
        """Start a process on a machine; signals to the returned process reach the command itself.

        Exit code 127: the machine has no such command. ``cwd`` defaults to the directory of this process if
        it exists inside, else /. The other arguments are those of Popen.

        Raises:
            UsageError: the machine is down.

        """
        running = self._require_running(index)
        # No Python runs between fork and exec: one of thousands of forks of a threaded process would hang.
        nsenter, network, _ = self.network.wrap_command(index, [])
        entered = [
            f"--{_UNSHARE_FLAGS[kind]}=/proc/{os.getpid()}/fd/{running.namespaces[kind]}"
            for kind in _NAMESPACE_KINDS
        ]
        words = [str(cwd or Path.cwd()), running.memory_limit.group_path, *argv]

        def start() -> subprocess.Popen[bytes]:
            with namespaces.children_in_pid_namespace(running.namespaces["pid"]):
                return subprocess.Popen(
                    [nsenter, network, *entered, "--", "/bin/sh", "-c", _ENTER_SCRIPT, "sh", *words],
                    env=None if env is None else dict(env),
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    start_new_session=True,
                )

        running.started_processes = [each for each in running.started_processes if each.poll() is None]
        started = self._process_thread.submit(start).result()
        running.started_processes.append(started)
        return started

    def init_pid(self, index: int) -> int:
        """Return the process id of a machine's process 1.

        Raises:
            UsageError: the machine is down.

        """
        return self._require_running(index).init_process.pid

    def crash(self, *indices: int) -> None:
        """Kill all processes of machines at once; peers see their connections end."""
        for index in indices:
            if self.is_up(index):
                self._running_machines[index].init_process.kill()
        for index in indices:
            self._reap_machine(index)

    def poweroff(self, *indices: int) -> None:
        """Drop all packets of machines, then kill their processes; peers see no connection end."""
        for index in indices:
            self.network.cut(index)
        self.crash(*indices)

    def path(self, index: int, path_inside: str) -> Path:
        """Return the path of a running machine's file for this process."""
        if not self.is_up(index):
            raise UsageError(f"{self.name(index)} is down, and its disks are gone.")
        return Path(f"/proc/{self._running_machines[index].init_process.pid}/root") / path_inside.lstrip("/")

    def set_known_names(self, index: int, names: Mapping[str, str]) -> None:
        """Let a machine resolve these names (name -> address) and no others, also after a reboot."""
        self._name_tables[index] = "".join(f"{address} {name}\n" for name, address in names.items())
        if index in self._running_machines:
            self._write_hosts_file(index)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all machines; a second call does nothing."""
        self.crash(*self._running_machines)
        self.network.close()
        self._process_thread.shutdown()
        self._hosts_files.cleanup()

    # ---- inside --------------------------------------------------------------------------------------

    def _start_init(self, index: int, memory_bytes: int) -> tuple[subprocess.Popen[bytes], int, MemoryLimit]:
        """Start process 1; return it, the pipe on which it reports, and its memory limit."""
        self._hosts_file(index).touch()
        self._write_hosts_file(index)
        limit = MemoryLimit(memory_bytes)
        here, there = os.pipe()
        config = {
            "disks": self._disks,
            "bind": {**self._bind, "/etc/hosts": str(self._hosts_file(index))},
            "name": self.name(index),
            "line": there,
            "group": limit.group_path,
        }
        flags = (f"--{_UNSHARE_FLAGS[kind]}" for kind in _NAMESPACE_KINDS)
        unshare = ["unshare", *flags, "--propagation", "unchanged"]
        python = [sys.executable, "-I", "-S", str(_INIT_PROGRAM), json.dumps(config)]
        try:
            with namespaces.children_in_pid_namespace(None):
                first = subprocess.Popen(
                    self.network.wrap_command(index, [*unshare, "--", *python]),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[there],
                    start_new_session=True,
                )
        except (OSError, subprocess.SubprocessError) as error:
            os.close(here)
            limit.close()
            raise MachineError(f"{self.name(index)} does not start: {error}.") from error
        finally:
            os.close(there)
        return first, here, limit

    def _wait_until_ready(
        self, index: int, init_process: subprocess.Popen[bytes], status_fd: int, limit: MemoryLimit
    ) -> None:
        with open(status_fd, "rb") as pipe:
            status = pipe.readline().decode().strip()
        if status != "ready":
            init_process.kill()
            init_process.wait()
            limit.close()
            raise MachineError(f"{self.name(index)} does not start: {status or 'its first process died'}.")
        spaces = {
            kind: os.open(f"/proc/{init_process.pid}/ns/{kind}", os.O_RDONLY)
            for kind in (*_NAMESPACE_KINDS, "pid")
        }
        self._running_machines[index] = _RunningMachine(init_process, spaces, limit)

    def _require_running(self, index: int) -> _RunningMachine:
        if not self.is_up(index):
            raise UsageError(f"{self.name(index)} is down: boot it before something runs there.")
        return self._running_machines[index]

    def _reap_machine(self, index: int) -> None:
        running = self._running_machines.pop(index, None)
        if running is None:
            return
        try:
            for each in (*running.started_processes, running.init_process):
                each.wait(fork_server.KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise MachineError(
                f"{self.name(index)}: a process sleeps in the kernel and does not end."
            ) from None
        for descriptor in running.namespaces.values():
            os.close(descriptor)
        running.memory_limit.close()

    def _hosts_file(self, index: int) -> Path:
        return Path(self._hosts_files.name, str(index))

    def _write_hosts_file(self, index: int) -> None:
        """Write the machine's /etc/hosts in place: a new file would not be the one that is mounted."""
        # Unlike Debian, without 127.0.1.1: a machine resolves its own name to the address that others use.
        known = self._name_tables.get(index)
        if known is None:
            known = "".join(f"{self.address(each)} {self.name(each)}\n" for each in range(len(self)))
        with self._hosts_file(index).open("r+") as file:
            file.write(f"127.0.0.1 localhost\n{known}")
            file.truncate()


def _interpreter_dirs(disks: Mapping[str, int]) -> dict[str, str]:
    """Return the directories of Python and this package that the machine's own disks would hide."""
    folders = (sys.prefix, sys.base_prefix, str(ROOT))
    return {each: each for each in folders if any(Path(each).is_relative_to(disk) for disk in disks)}


def change_address(network: VirtualNetwork, index: int) -> None:
    """Give a node of the network an address that no node had before; the former one no longer answers."""
    former = network.address(index)
    network._host_numbers[index] += len(network)
    device, others = virtual_network.INTERFACE, [each for each in range(len(network)) if each != index]
    # With its last address an interface forgets its neighbours.
    lines = [f"addr del {former}/24 dev {device}", f"addr add {network.address(index)}/24 dev {device}"]
    lost = network._applied_silent_pairs
    lines += [network._neighbor_command(other, lost=(index, other) in lost) for other in others]
    virtual_network._run_ip(network._namespaces[index], lines)
    unused = virtual_network._UNUSED_HARDWARE_ADDRESS
    for other in others:
        forget = f"neigh replace {former} lladdr {unused} nud permanent dev {device}"
        reach = network._neighbor_command(index, lost=(other, index) in lost)
        virtual_network._run_ip(network._namespaces[other], [forget, reach])
