"""The nursery's process: imports what an agent and its workers import once, and forks agents on request.

Run by `nursery.py` as ``python -u brood.py LINE PARENT``; it dies with its parent, and what it has
forked dies with it. A simulated node costs seconds of importing, for its agent and again for its zygote. On
one machine all nodes can share that, as workers share their zygote's.

Promise: an agent that is forked here runs `elastic_resume.cli` with the command, environment, folder, network
and output that it was given, as a new process would, through `agent.script`. Its first zygote is forked
along with it, before it has any thread, and runs `agent.zygote` unchanged when the agent starts it.

Does not know what agents do. What only a new process heeds (`preflight.READ_AT_START`) is the same in all:
its caller sees to that.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # this directory: the names in it are not for scripts

from elastic_resume import failpoints
from elastic_resume.agent.workers import forkserver, forkserver_manager, run_main

PR_SET_PDEATHSIG = 1
CLONE_NEWNET = 0x40000000
LENGTH_BYTES = 4
MAX_REQUEST_BYTES = 16 << 20
POLL_S = 0.005  # between two looks at a child, where the kernel has no pidfd
_LIBC = ctypes.CDLL(None, use_errno=True)


class ForkedProcess:
    """A process that was forked elsewhere, with those of `subprocess.Popen`'s methods that agents need."""

    def __init__(self, pid: int, reap: Callable[[int], int | None]) -> None:
        """``reap`` gives the exit code of a process that has ended, as `waitpid` does with WNOHANG."""
        self.pid = pid
        self.returncode: int | None = None
        self._reap = reap
        self._lock = threading.Lock()  # it can be reaped once

    def poll(self) -> int | None:
        """Give the exit code, None while it runs."""
        with self._lock:
            if self.returncode is None:
                self.returncode = self._reap(self.pid)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it has not ended within ``timeout`` seconds.

        """
        limit = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = None if limit is None else limit - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            _sleep_until_end(self.pid, left)
        return self.returncode or 0

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it is known to have ended."""
        if self.poll() is None:
            os.kill(self.pid, number)  # not reaped, so the number is still its own

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _sleep_until_end(pid: int, timeout_s: float | None) -> None:
    if has_ended(pid, timeout_s) is None:
        time.sleep(POLL_S)


def has_ended(pid: int, timeout_s: float | None = 0.0) -> bool | None:
    """Whether a process that nobody has reaped ends within this time; None: the kernel has no pidfd."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        return bool(select.select([descriptor], [], [], timeout_s)[0])
    finally:
        os.close(descriptor)


def reap(pid: int) -> int | None:
    """Give the exit code of a child that has ended, None for one that runs."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


# ---- the line ------------------------------------------------------------------------------------------


def send(connection: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send one message with its length ahead, and descriptors along with it."""
    data = json.dumps(message).encode()
    socket.send_fds(connection, [len(data).to_bytes(LENGTH_BYTES, "big")], descriptors)
    connection.sendall(data)


def receive(connection: socket.socket, max_descriptors: int = 0) -> tuple[dict[str, Any], list[int]]:
    """Receive one message with at most so many descriptors.

    Raises:
        EOFError: the other side is gone.

    """
    head, descriptors, _, _ = (
        socket.recv_fds(connection, LENGTH_BYTES, max_descriptors)
        if max_descriptors
        else (connection.recv(4), [], 0, 0)
    )
    size = int.from_bytes(head, "big")
    data = b""
    while len(head) == LENGTH_BYTES and len(data) < size <= MAX_REQUEST_BYTES:
        part = connection.recv(size - len(data))
        if not part:
            break
        data += part
    if not data or len(data) != size:
        raise EOFError
    return json.loads(data), list(descriptors)


# ---- the process ---------------------------------------------------------------------------------------


def main() -> None:
    """Import, and serve until the line ends. Returns in a fork only, when that is at its end."""
    line, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    if not _die_with_parent(parent):
        return
    line.set_inheritable(False)
    run_main.set_process_name("er-agent-forks")
    before = forkserver.read_environment()
    gc.disable()
    level = os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as `elastic-resume run` has it
    for name in (
        "elastic_resume.agent.torchelastic",
        "elastic_resume.agent.main",
        *forkserver.TORCH_MODULES,
        *forkserver.OWN_MODULES,
    ):
        importlib.import_module(name)
    if "TORCH_CPP_LOG_LEVEL" not in before and level:
        del os.environ["TORCH_CPP_LOG_LEVEL"]
    gc.collect()
    gc.freeze()
    imported = {k: v for k, v in forkserver.read_environment().items() if before.get(k) != v}
    become = _serve(line, imported)
    gc.enable()
    become()


def _die_with_parent(parent: int) -> bool:
    """Ask the kernel to end this process with its parent; whether that still lives."""
    _LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    return os.getppid() == parent


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of native threads: see zygote.py
        return os.fork()


def _serve(connection: socket.socket, import_environment: dict[str, str]) -> Callable[[], None]:
    """Do what is asked. Returns in forks only: what such a one is to become."""
    nursery = os.getpid()
    while True:
        try:
            asked, descriptors = receive(connection, 1)
        except (EOFError, OSError):
            os._exit(0)  # the kernel ends what was forked
        if "reap" in asked:
            send(connection, {"code": reap(asked["reap"])})
            continue
        pid = _fork()
        if pid == 0:
            connection.close()
            return _set_up_agent(nursery, asked, descriptors[0], import_environment)
        os.close(descriptors[0])
        send(connection, {"pid": pid})


def _set_up_agent(
    parent: int, request: dict[str, Any], output: int, import_environment: dict[str, str]
) -> Callable[[], None]:
    """In the fork: take on what was asked for, and fork the zygote of it; give what to become."""
    if not _die_with_parent(parent):
        os._exit(1)
    os.setsid()
    empty = os.open(os.devnull, os.O_RDONLY)
    for stream, number in ((empty, 0), (output, 1), (output, 2)):
        os.dup2(stream, number)
    os.close(empty)
    os.close(output)
    _replace_environment({**import_environment, **request["env"]})
    tempfile.tempdir = None  # which follows the environment
    failpoints.arm()
    if request["network"]:
        _enter_network(request["network"])
    os.chdir(request["cwd"])
    ours, its = socket.socketpair()
    agent = os.getpid()
    pid = _fork()
    if pid == 0:
        ours.close()
        return lambda: _become_fork_server(its, agent)
    its.close()
    forkserver_manager.spawn = _PreforkedForkServer(pid, ours)
    command = request["command"]
    run_main.set_process_name("er-agent")
    command[1:1] = ["-u"]  # as this process is; the environment asks for the same
    run_main.set_argv_and_path(command)
    return lambda: _run_command(command)


def _run_command(command: list[str]) -> None:
    """Run it and end, without freeing what was imported: that takes a quarter of a second of a processor."""
    code = 0
    try:
        run_main.run(command)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            raise
        code = end.code or 0
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - as the interpreter does, in this order
    atexit._run_exitfuncs()  # noqa: SLF001
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def _replace_environment(environ: dict[str, str]) -> None:
    os.environ.clear()
    for name, value in environ.items():
        os.environb[name.encode("latin-1")] = value.encode("latin-1")


def _enter_network(path: str) -> None:
    space = os.open(path, os.O_RDONLY)
    if _LIBC.setns(space, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter the network {path}")
    os.close(space)


class _PreforkedForkServer:
    """Starts the agent's first zygote from the fork that waits for it, and later ones as new processes."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self._pid = pid
        self._connection: socket.socket | None = connection
        self._environ = forkserver.read_environment()

    def __call__(self, argv: list[str], *, pass_fds: tuple[int, ...], **others: Any) -> Any:
        """As `subprocess.Popen`, of the zygote's command."""
        line, self._connection = self._connection, None
        environ = forkserver.read_environment()
        if line is None or forkserver.list_differing_variables(self._environ, environ):
            return subprocess.Popen(argv, pass_fds=pass_fds, **others)
        with line:
            send(line, {"argv": argv[2:], "env": environ}, pass_fds)
        return ForkedProcess(self._pid, reap)


def _become_fork_server(connection: socket.socket, agent: int) -> None:
    if not _die_with_parent(agent):
        return
    try:
        asked, descriptors = receive(connection, 2)
    except (EOFError, OSError):
        os._exit(0)
    connection.close()
    os.setsid()
    _replace_environment(asked["env"])
    name, *numbers_and_rest = asked["argv"]
    sys.argv = [name, *map(str, descriptors), *numbers_and_rest[len(descriptors) :]]
    forkserver.main()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
