"""Simulate machines that have their own processes, names, memory and disks, and can lose them.

`VirtualNetwork` gives each a network; this module adds namespaces for process ids, mounts, host name and
shared memory. Process 1 of each is `machine_init.py` or a given command, as in a container. If it is killed,
the kernel kills all other processes at once, and everything in memory is lost.

A machine sees the host's files under their names, as nodes see a shared file system. Its own are /tmp,
/scratch and /dev/shm (in memory and of limited size), /etc/hosts and /proc. Nothing on the host is changed,
except that a memory limit makes a control group. When the maker exits, the kernel ends all machines. This
needs root. Clocks, users and the kernel are the host's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO

from elastic_resume.errors import MachineError, UsageError
from elastic_resume.testing import fork_server
from elastic_resume.testing.virtual_network import VirtualNetwork
from tests.support import namespaces
from tests.support.namespaces import MemoryLimit
from tests.support.paths import ROOT

MB = 1 << 20
DISKS = {"/tmp": 256 * MB, "/scratch": 256 * MB, "/dev/shm": 64 * MB}  # noqa: S108  the machine's own
"""Folders in memory and their sizes in bytes; /dev/shm as containers have it."""

_INIT_PROGRAM = Path(__file__).with_name("machine_init.py")
_NAMESPACE_KINDS = (
    "mnt",
    "uts",
    "ipc",
)  # and net, which is there before the machine is; pid is entered by a fork
_UNSHARE_FLAGS = {"mnt": "mount", "uts": "uts", "ipc": "ipc"}
# Words: folder, control group or nothing, command.
_ENTER_SCRIPT = """
cd / && cd "$1" 2>/dev/null
[ -z "$2" ] || echo 0 > "$2/cgroup.procs" || exit 126
shift 2
exec "$@"
"""
_File = int | IO[bytes] | None


@dataclass
class _RunningMachine:
    """A running machine: its process 1, and descriptors of its namespaces and its /etc/hosts."""

    init_process: subprocess.Popen[bytes]
    namespaces: dict[str, int]
    hosts_file_fd: int | None  # its file of names; None where it ended before that could be opened
    memory_limit: MemoryLimit
    started_processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """What came from outside: process 1 ends only when their parents have waited for them."""


class Machines:
    """Several machines on one network; use it as a context manager or call `close`."""

    def __init__(
        self,
        names: Sequence[str] = ("n0", "n1", "n2"),
        *,
        disks: Mapping[str, int] | None = None,
        bind: Mapping[str, str | Path] | None = None,
    ) -> None:
        """Lay the network; `boot` starts a machine.

        Args:
            names: the machines' host names; they are known to each other by them.
            disks: folders in memory with their sizes in bytes, of every machine; default: `DISKS`.
            bind: path inside -> file or folder of the host that is to be there, of every machine.

        Raises:
            MachineError: `hosts.available` says why not.

        """
        self._names = list(names)
        self._disks = dict(DISKS if disks is None else disks)
        self._bind = {
            **_interpreter_dirs(self._disks),
            **{to: str(source) for to, source in (bind or {}).items()},
        }
        self._running_machines: dict[int, _RunningMachine] = {}
        self._name_tables: dict[int, str] = {}
        self.network = VirtualNetwork(len(self._names))
        """The machines' network, for partitions and links that are lost in one direction."""
        # The kernel binds a process's life to the thread that made it, and a namespace for process ids to
        # the thread that entered it: so one thread makes all processes, and lives as long as the machines.
        self._process_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="machines")
        namespaces.remove_stale_groups()

    def __len__(self) -> int:
        return len(self._names)

    def __enter__(self) -> Machines:  # noqa: PYI034  typing.Self needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def name(self, index: int) -> str:
        """The machine's host name."""
        return self._names[index]

    def address(self, index: int) -> str:
        """The machine's IPv4 address."""
        return self.network.address(index)

    def is_up(self, index: int) -> bool:
        """Whether the machine runs."""
        up = self._running_machines.get(index)
        return up is not None and up.init_process.poll() is None

    # ---- life ----------------------------------------------------------------------------------------

    def boot(
        self,
        *indices: int,
        name: str = "",
        new_address: bool = False,
        disks: Mapping[str, int] | None = None,
        bind: Mapping[str, str | Path] | None = None,
        memory_bytes: int = 0,
        argv: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdout: _File = subprocess.DEVNULL,
        stderr: _File = subprocess.DEVNULL,
    ) -> list[subprocess.Popen[bytes]]:
        """Start machines that are down (all, where none is named), with empty disks; give their process 1.

        Args:
            indices: which.
            name: a host name other than before; it stays.
            new_address: take an address that no machine had; the former one answers no more.
            disks: folders in memory, added to those of all machines; size 0 takes one of those away.
            bind: path inside -> file or folder of the host, added to that of all machines.
            memory_bytes: what its processes may use together; the kernel kills one that takes more.
            argv: what is to be process 1 in the reaper's place, as in a container; with it, the machine ends.
            env: the environment of ``argv``; default: of this process.
            cwd: the folder of ``argv``; default: this process's where it is seen inside, else /.
            stdout: where ``argv`` prints to, as for Popen.
            stderr: likewise.

        Raises:
            MachineError: what could not be made, and why; the others are up.

        """
        started, found, failures = [], [], []
        for index in indices or range(len(self)):
            if self.is_up(index):
                raise UsageError(f"{self.name(index)} is up: crash it or switch it off before it boots.")
            self._reap_machine(index)
            if name:
                self._names[index] = name
            if new_address:
                self.network.change_address(index)
            self.network.restore_link(index)
            told = {
                "disks": {to: size for to, size in {**self._disks, **(disks or {})}.items() if size},
                "bind": {**self._bind, **{to: str(source) for to, source in (bind or {}).items()}},
                "argv": list(argv),
                "cwd": str(cwd or Path.cwd()),
                "name": self.name(index),
            }
            files = (stdout, stderr) if argv else (subprocess.DEVNULL, None)
            started.append(
                (index, self._process_thread.submit(self._start_init, index, told, memory_bytes, files, env))
            )
        for index, future in started:
            try:
                found.append(self._wait_until_ready(index, *future.result()))
            except MachineError as error:
                failures.append(error)
        if name or new_address:
            for index in self._running_machines:
                self._write_hosts_file(index)
        if failures:
            raise failures[0]
        return found

    def run(
        self,
        index: int,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdin: _File = subprocess.DEVNULL,
        stdout: _File = None,
        stderr: _File = None,
    ) -> subprocess.Popen[bytes]:
        """Start a process on a machine; the id that is given back is the one to signal.

        Args:
            index: where.
            argv: the command, found on the machine; exit code 127 says that there is none.
            env: its environment; default: of this process.
            cwd: its folder; default: this process's where it is seen on the machine, else /.
            stdin: as for Popen.
            stdout: as for Popen.
            stderr: as for Popen.

        Raises:
            UsageError: the machine is down.

        """
        up = self._require_running(index)
        # No Python runs between fork and exec: one fork in thousands of a process with threads would hang.
        nsenter, network, _ = self.network.wrap_command(index, [])
        doors = [
            f"--{_UNSHARE_FLAGS[kind]}=/proc/{os.getpid()}/fd/{up.namespaces[kind]}"
            for kind in _NAMESPACE_KINDS
        ]
        words = [str(cwd or Path.cwd()), up.memory_limit.group_path, *argv]

        def start() -> subprocess.Popen[bytes]:
            with namespaces.children_in_pid_namespace(up.namespaces["pid"]):
                return subprocess.Popen(
                    [nsenter, network, *doors, "--", "/bin/sh", "-c", _ENTER_SCRIPT, "sh", *words],
                    env=None if env is None else dict(env),
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    start_new_session=True,
                )

        up.started_processes = [each for each in up.started_processes if each.poll() is None]
        started = self._process_thread.submit(start).result()
        up.started_processes.append(started)
        return started

    def init_pid(self, index: int) -> int:
        """Give the id of a machine's process 1.

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
        """Cut the power of machines: links become silent, then all processes end, and peers get no packet."""
        for index in indices:
            self.network.cut(index)
        self.crash(*indices)

    def cut(self, index: int) -> None:
        """Make a machine's link silent."""
        self.network.cut(index)

    def path(self, index: int, path_inside: str) -> Path:
        """Return where the maker finds a file of a running machine."""
        if not self.is_up(index):
            raise UsageError(f"{self.name(index)} is down, and its disks are gone.")
        return Path(f"/proc/{self._running_machines[index].init_process.pid}/root") / path_inside.lstrip("/")

    def oom_kill_count(self, index: int) -> int:
        """Return how many processes the kernel killed for exceeding the machine's memory limit."""
        up = self._running_machines.get(index)
        return up.memory_limit.oom_kill_count() if up is not None else 0

    def set_known_names(self, index: int, names: Mapping[str, str]) -> None:
        """Make a machine know these names (name -> address) and no others, also after it boots again."""
        self._name_tables[index] = "".join(f"{address} {name}\n" for name, address in names.items())
        self._write_hosts_file(index)

    def close(self) -> None:
        """End all machines; a second call does nothing."""
        self.crash(*self._running_machines)
        self.network.close()
        self._process_thread.shutdown()

    # ---- inside --------------------------------------------------------------------------------------

    def _start_init(
        self,
        index: int,
        config: dict[str, object],
        memory_bytes: int,
        files: tuple[_File, _File],
        env: Mapping[str, str] | None,
    ) -> tuple[subprocess.Popen[bytes], int, namespaces.MemoryLimit]:
        """Start process 1; return it, the pipe on which it reports, and its memory limit."""
        limit = namespaces.MemoryLimit(memory_bytes)
        here, there = os.pipe()
        config = {**config, "line": there, "hosts": self._hosts_file_text(index), "group": limit.group_path}
        unshare = [
            "unshare",
            *(f"--{_UNSHARE_FLAGS[kind]}" for kind in _NAMESPACE_KINDS),
            "--propagation",
            "unchanged",
        ]
        python = [sys.executable, "-I", "-S", str(_INIT_PROGRAM), json.dumps(config)]
        try:
            with namespaces.children_in_pid_namespace(None):
                first = subprocess.Popen(
                    self.network.wrap_command(index, [*unshare, "--", *python]),
                    env=None if env is None else dict(env),
                    stdin=subprocess.DEVNULL,
                    stdout=files[0],
                    stderr=files[1],
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
        self, index: int, init_process: subprocess.Popen[bytes], status_fd: int, limit: namespaces.MemoryLimit
    ) -> subprocess.Popen[bytes]:
        with open(status_fd, "rb") as said:
            word = said.readline().decode().strip()
        if word != "ready":
            init_process.kill()
            init_process.wait()
            limit.close()
            raise MachineError(f"{self.name(index)} does not start: {word or 'its first process died'}.")
        spaces = {
            kind: os.open(f"/proc/{init_process.pid}/ns/{kind}", os.O_RDONLY)
            for kind in (*_NAMESPACE_KINDS, "pid")
        }
        self._running_machines[index] = _RunningMachine(
            init_process, spaces, _open_hosts_file(init_process), limit
        )
        return init_process

    def _require_running(self, index: int) -> _RunningMachine:
        if not self.is_up(index):
            raise UsageError(f"{self.name(index)} is down: boot it before something runs there.")
        return self._running_machines[index]

    def _reap_machine(self, index: int) -> None:
        up = self._running_machines.pop(index, None)
        if up is None:
            return
        try:
            for each in (*up.started_processes, up.init_process):
                each.wait(fork_server.KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise MachineError(
                f"{self.name(index)}: a process sleeps in the kernel and does not end."
            ) from None
        for descriptor in (
            *up.namespaces.values(),
            *([] if up.hosts_file_fd is None else [up.hosts_file_fd]),
        ):
            os.close(descriptor)
        up.memory_limit.close()

    def _write_hosts_file(self, index: int) -> None:
        """Write the machine's /etc/hosts if it runs."""
        up = self._running_machines.get(index)
        if up is not None and up.hosts_file_fd is not None:
            text = self._hosts_file_text(index).encode()
            os.pwrite(up.hosts_file_fd, text, 0)
            os.ftruncate(up.hosts_file_fd, len(text))

    def _hosts_file_text(self, index: int) -> str:
        # No machine is 127.0.1.1, as Debian has it: who asks for its own name is to get what others get.
        known = self._name_tables.get(index)
        if known is None:
            known = "".join(f"{self.address(each)} {self.name(each)}\n" for each in range(len(self)))
        return f"127.0.0.1 localhost\n{known}"


def _open_hosts_file(init_process: subprocess.Popen[bytes]) -> int | None:
    """Open a machine's /etc/hosts once.

    Its path may later lead to the host's file: a rename over it on the host removes the mounts on it in every
    namespace.
    """
    try:
        found = os.open(f"/proc/{init_process.pid}/root/etc/hosts", os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # a container may end at any moment
        return None
    if os.fstat(found).st_nlink:  # `pid1` takes the name of its own away: this is the host's
        os.close(found)
        return None
    return found


def _interpreter_dirs(disks: Mapping[str, int]) -> dict[str, str]:
    """Return the directories of Python and this package that the machine's own disks would hide."""
    folders = (sys.prefix, sys.base_prefix, str(ROOT))
    return {each: each for each in folders if any(Path(each).is_relative_to(disk) for disk in disks)}
