"""The program of the agents' fork server: import once, fork agents on request.

Run as ``python -u fork_server_main.py DESCRIPTOR PARENT``. It dies with its parent, and its forks die with
it. A simulated node needs seconds for the imports of its agent and again for those of its workers' fork
server; on one machine all nodes share them. A forked agent runs `elastic_resume.cli` with its own command,
environment, directory, network and output. Its first workers' fork server is forked with it, before it has
any thread.

Variables that only a new interpreter reads (`forkserver.PROCESS_START_ENV_PREFIXES`) must be equal in all;
the caller checks that.
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
    del sys.path[0]  # scripts must not import the modules of this directory

from elastic_resume import failpoints
from elastic_resume.agent.workers import forkserver, forkserver_manager, run_main

PR_SET_PDEATHSIG = 1
CLONE_NEWNET = 0x40000000
LENGTH_BYTES = 4
MAX_REQUEST_BYTES = 16 << 20
POLL_S = 0.005  # poll interval on kernels without pidfd
_LIBC = ctypes.CDLL(None, use_errno=True)


class ForkedProcess:
    """A process that another process forked, with the methods of `subprocess.Popen` that agents need."""

    def __init__(self, pid: int, reap: Callable[[int], int | None]) -> None:
        """Wrap a process; ``reap`` returns its exit code, as `waitpid` with WNOHANG."""
        self.pid = pid
        self.returncode: int | None = None
        self._reap = reap
        self._lock = threading.Lock()  # guards the reaping, which succeeds only once

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
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
            os.kill(self.pid, number)  # the process is not reaped, so its pid is not reused

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _sleep_until_end(pid: int, timeout_s: float | None) -> None:
    if has_ended(pid, timeout_s) is None:
        time.sleep(POLL_S)


def has_ended(pid: int, timeout_s: float | None = 0.0) -> bool | None:
    """Whether an unreaped process ends within this time; None if the kernel has no pidfd."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        return bool(select.select([descriptor], [], [], timeout_s)[0])
    finally:
        os.close(descriptor)


def reap(pid: int) -> int | None:
    """Return the exit code of a child that has ended, or None if it runs."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


# ---- messages ------------------------------------------------------------------------------------------


def send(connection: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send one message, prefixed with its length, and descriptors with it."""
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
    """Import, then serve until the socket is closed. It returns only in a fork, at the fork's end."""
    connection, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    if not _die_with_parent(parent):
        return
    connection.set_inheritable(False)
    run_main.set_process_name("er-agent-forks")
    before = forkserver.read_environment()
    gc.disable()
    level = os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # `elastic-resume run` sets the same level
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
    become = _serve(connection, imported)
    gc.enable()
    become()


def _die_with_parent(parent: int) -> bool:
    """Ask the kernel to kill this process with its parent; return whether the parent still lives."""
    _LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    return os.getppid() == parent


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about native threads: see forkserver.py
        return os.fork()


def _serve(connection: socket.socket, import_environment: dict[str, str]) -> Callable[[], None]:
    """Serve requests. It returns only in a fork: the function that the fork runs."""
    server_pid = os.getpid()
    while True:
        try:
            request, descriptors = receive(connection, 1)
        except (EOFError, OSError):
            os._exit(0)  # the kernel ends the forked processes
        if "reap" in request:
            send(connection, {"code": reap(request["reap"])})
            continue
        pid = _fork()
        if pid == 0:
            connection.close()
            return _set_up_agent(server_pid, request, descriptors[0], import_environment)
        os.close(descriptors[0])
        send(connection, {"pid": pid})


def _set_up_agent(
    parent: int, request: dict[str, Any], output: int, import_environment: dict[str, str]
) -> Callable[[], None]:
    """In the fork: apply the request and fork the workers' fork server; return the function to run."""
    if not _die_with_parent(parent):
        os._exit(1)
    os.setsid()
    empty = os.open(os.devnull, os.O_RDONLY)
    for stream, number in ((empty, 0), (output, 1), (output, 2)):
        os.dup2(stream, number)
    os.close(empty)
    os.close(output)
    _replace_environment({**import_environment, **request["env"]})
    tempfile.tempdir = None  # computed anew from the changed environment
    failpoints.arm()
    if request["network"]:
        _enter_network(request["network"])
    os.chdir(request["cwd"])
    ours, child = socket.socketpair()
    agent = os.getpid()
    pid = _fork()
    if pid == 0:
        ours.close()
        return lambda: _become_fork_server(child, agent)
    child.close()
    forkserver_manager.spawn = _PreforkedForkServer(pid, ours)
    command = request["command"]
    run_main.set_process_name("er-agent")
    command[1:1] = ["-u"]  # this process runs with -u too; the environment asks for the same
    run_main.set_argv_and_path(command)
    return lambda: _run_command(command)


def _run_command(command: list[str]) -> None:
    """Run the command and exit without freeing memory, which takes a quarter of a second."""
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
    """Starts the workers' first fork server from the waiting fork, and later ones as new processes."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self._pid = pid
        self._connection: socket.socket | None = connection
        self._environ = forkserver.read_environment()

    def __call__(self, argv: list[str], *, pass_fds: tuple[int, ...], **others: Any) -> Any:
        """Start the fork server, with the signature of `subprocess.Popen`."""
        connection, self._connection = self._connection, None
        environ = forkserver.read_environment()
        if connection is None or forkserver.list_differing_variables(self._environ, environ):
            return subprocess.Popen(argv, pass_fds=pass_fds, **others)
        with connection:
            send(connection, {"argv": argv[2:], "env": environ}, pass_fds)
        return ForkedProcess(self._pid, reap)


def _become_fork_server(connection: socket.socket, agent: int) -> None:
    if not _die_with_parent(agent):
        return
    try:
        request, descriptors = receive(connection, 2)
    except (EOFError, OSError):
        os._exit(0)
    connection.close()
    os.setsid()
    _replace_environment(request["env"])
    name, *numbers_and_rest = request["argv"]
    sys.argv = [name, *map(str, descriptors), *numbers_and_rest[len(descriptors) :]]
    forkserver.main()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
