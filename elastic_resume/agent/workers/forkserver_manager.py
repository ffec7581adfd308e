"""Start the fork server from the agent, and start another when it dies.

The agent forks the first one right after it has imported torch (`prefork`), while it has one thread and no
file of its own open. Later ones are new processes. Workers start in any case: without a fork server they
start cold. The fork server sends lines of JSON::

    {"ready": SECONDS, "skipped_modules": {NAME: REASON}}    it has imported everything
    {"refused": REASON}                                      a worker has to start cold
    {"fork_unsafe_module": NAME, "reason": REASON}           it exits, since no worker can be forked any more
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import select
import signal
import site
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from elastic_resume import constants, linux
from elastic_resume.agent.workers import forkserver
from elastic_resume.background import BackgroundThread

logger = logging.getLogger(__name__)

FORK_SERVER_PATH = Path(__file__).with_name("forkserver.py")
MAX_FAILURES = 3  # limit of consecutive fork servers that ended before they were ready
BACKLOG = 1024  # limit of launcher shims that wait while the fork server imports
EXIT_POLL_S = 0.005  # poll interval on kernels without pidfd
POLL_INTERVAL_S = 1.0  # time between checks of the fork server, and before the next one starts
SLOW_IMPORT_S = 15.0  # imports that take longer are logged, since workers wait for them
RANK_VARIABLE = re.compile(r"""["'](LOCAL_)?RANK["']""")
spawn: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen  # tests replace it


class ForkedProcess:
    """A process that was forked without exec, with the methods of `subprocess.Popen` that agents need."""

    def __init__(self, pid: int, reap: Callable[[int], int | None]) -> None:
        """Wrap a process; ``reap`` returns its exit code, or None while it runs."""
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
            if has_ended(self.pid, left) is None:
                time.sleep(EXIT_POLL_S)
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


def has_ended(pid: int, timeout_s: float | None = 0.0) -> bool | None:
    """Return whether an unreaped process ends within this time; None if the kernel has no pidfd."""
    try:
        descriptor = linux.pidfd_open(pid)
    except OSError:
        return None
    try:
        waiting = select.poll()  # select() refuses descriptors above 1023
        waiting.register(descriptor, select.POLLIN)
        return bool(waiting.poll(None if timeout_s is None else timeout_s * 1000))
    finally:
        os.close(descriptor)


def reap(pid: int) -> int | None:
    """Return the exit code of a child that has ended, or None if it runs."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:  # SIGCHLD is ignored, so the kernel keeps no exit code
        return 0
    return os.waitstatus_to_exitcode(status) if ended else None


class PreforkedServer:
    """A fork server that was forked from this process and waits for `start`."""

    def __init__(self, pid: int, control: socket.socket, socket_name: str) -> None:
        """``control`` leads to the process, which serves launcher shims at ``socket_name``."""
        self.socket_name = socket_name
        self._process = ForkedProcess(pid, reap)
        self._control: socket.socket | None = control
        self._environ = forkserver.read_environment()

    def start(self, spec: Mapping[str, Any]) -> tuple[ForkedProcess, socket.socket] | None:
        """Let it serve; return the process and the socket to it.

        Return None if it has ended, or if variables have changed that only a new process reads.
        """
        environ = forkserver.read_environment()
        control, differing = self._control, forkserver.list_differing_variables(self._environ, environ)
        if differing:
            logger.debug("the fork server is a new process, which reads %s anew.", ", ".join(differing))
        if control is None or differing:
            return None
        try:
            control.sendall(json.dumps({**spec, "environ": environ}).encode() + b"\n")
        except OSError:
            return None
        self._control = None
        return self._process, control

    def close(self) -> None:
        """End the process, unless it was started."""
        if self._control is not None:
            self._control.close()
            self._control = None
            self._process.kill()
            self._process.wait()


def prefork() -> PreforkedServer | None:
    """Fork a fork server from this process.

    Return None if the system refuses, or if this process has other threads, which a fork would lack. A worker
    returns by SystemExit, at the end of its script.
    """
    if threading.active_count() > 1:
        return None
    agent, socket_name = os.getpid(), _choose_socket_name()
    try:
        listener, control, server_end = _open_sockets(socket_name)
    except OSError:
        return None
    with listener, server_end:
        try:
            pid = forkserver.fork()
        except OSError:
            control.close()
            return None
        if pid == 0:
            control.close()
            forkserver.run_preforked(listener, server_end, agent)
    return PreforkedServer(pid, control, socket_name)


def _choose_socket_name() -> str:
    return f"elastic_resume-{secrets.token_hex(16)}"


def _open_sockets(socket_name: str) -> tuple[socket.socket, socket.socket, socket.socket]:
    """Return a fork server's listener, and both ends of its connection to the agent: ours, then its own."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("\0" + socket_name)
    listener.listen(BACKLOG)
    return listener, *socket.socketpair()


def find_start_hook() -> str | None:
    """Return the file of a hook of Python's start that reads a rank: a forked worker would not run it again.

    `site` runs sitecustomize, usercustomize, and the lines of ``.pth`` files that begin with ``import``.
    """
    modules = ["sitecustomize", "usercustomize"]
    texts: dict[str, str] = {}
    for directory in [*site.getsitepackages(), site.getusersitepackages()]:
        for path in Path(directory).glob("*.pth"):
            lines = [
                line for line in _read_text(path).splitlines() if line.startswith(("import ", "import\t"))
            ]
            texts[str(path)] = "\n".join(lines)
            modules += [line.split()[1].rstrip(";,") for line in lines]
    for name in modules:
        path_of = getattr(sys.modules.get(name), "__file__", None)
        if path_of:
            texts[path_of] = _read_text(Path(path_of))
    return next((path for path, text in texts.items() if RANK_VARIABLE.search(text)), None)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


class ForkServerManager:
    """Keep a fork server running from `start` to `close`, or give it up, so that workers start cold."""

    def __init__(
        self,
        command: list[str],
        preload: Sequence[str] = (),
        emit: Callable[..., Any] = lambda *_, **__: None,
        preforked: PreforkedServer | None = None,
        *,
        import_first: bool = True,
    ) -> None:
        """Prepare a fork server for workers of ``command``. It imports torch and the ``preload`` modules.

        ``preforked`` is the first one, if there is one. Without ``import_first`` it starts the first workers
        before it imports what it lacks.
        """
        self._command = command
        self._preload = list(preload)
        self._emit = emit
        self._preforked = preforked
        self._import_first = import_first
        self._socket_name = preforked.socket_name if preforked is not None else _choose_socket_name()
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._failures = 0
        self._logged_refusals: set[str] = set()
        self._listening = threading.Event()
        self._is_ready = False  # new workers need not wait for imports
        self._on_ready: Callable[[], None] = lambda: None
        self._ready_lock = threading.Lock()
        # The kernel kills a fork server when the thread that started it ends. So the main thread forks the
        # first one, and one thread starts the others.
        self._thread = BackgroundThread("fork-server-manager", self._run_fork_server)

    def start(self) -> None:
        """Start the fork server. From now on launcher shims may connect."""
        # torchelastic passes its environment on to launcher shims.
        os.environ[constants.ENV_FORK_SERVER] = self._socket_name
        self._thread.start()
        self._listening.wait()

    def call_when_ready(self, action: Callable[[], None]) -> None:
        """Call ``action`` once a fork server has imported everything or all were given up; in any thread."""
        with self._ready_lock:
            self._on_ready = action
            if self._is_ready:
                action()

    def _set_ready(self) -> None:
        with self._ready_lock:
            self._is_ready, was_ready = True, self._is_ready
            if not was_ready:
                self._on_ready()

    @property
    def pid(self) -> int | None:
        """Process ID of the fork server, None while there is none."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def close(self) -> None:
        """Stop the fork server. Workers that it has forked keep running until their launcher shims end."""
        self._thread.request_close()
        os.environ.pop(constants.ENV_FORK_SERVER, None)
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        self._thread.close()

    def _run_fork_server(self) -> float | None:
        """Run a fork server until it ends; return the seconds until the next, None if there is none."""
        restarts = False
        try:
            process, control = self._start_process()
            self._listening.set()
            status, exit_code = self._wait_for_exit(process, control)
            restarts = not self._thread.is_closing and self._handle_exit(status, exit_code)
        except OSError as error:
            logger.warning("workers start cold: the fork server cannot be started: %s.", error)
        finally:
            self._listening.set()
            if not restarts:
                self._set_ready()
        return POLL_INTERVAL_S if restarts else None

    def _start_process(self) -> tuple[subprocess.Popen[bytes] | ForkedProcess, socket.socket]:
        """Start the process; return it with the socket to it."""
        spec = {
            "command": self._command,
            "preload": self._preload,
            "import_first": self._import_first or self._is_ready or self._failures > 0,
        }
        preforked, self._preforked = self._preforked, None
        if preforked is not None:
            started = preforked.start(spec)
            preforked.close()
            if started is not None:
                self._process = started[0]
                return started
        listener, control, server_end = _open_sockets(self._socket_name)
        with listener, server_end:
            descriptors = (listener.fileno(), server_end.fileno())
            arguments = [*map(str, descriptors), str(os.getpid()), json.dumps(spec)]
            process = self._process = spawn(
                [sys.executable, "-u", str(FORK_SERVER_PATH), *arguments],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        return process, control

    def _wait_for_exit(
        self, process: subprocess.Popen[bytes] | ForkedProcess, control: socket.socket
    ) -> tuple[dict[str, Any], int]:
        """Handle the messages of the fork server until it ends; return their fields and its exit code."""
        fields: dict[str, Any] = {}
        unread = b""
        waited_s = stopped_s = 0.0
        with control:
            while True:
                # Check the end before reading: all that the process sent before its end can then be read.
                has_ended = process.poll() is not None
                readable, _, _ = select.select([control], [], [], 0 if has_ended else POLL_INTERVAL_S)
                if readable:
                    data = control.recv(65536)
                    if not data:
                        break
                    *lines, unread = (unread + data).split(b"\n")
                    for message in map(json.loads, lines):
                        fields |= message
                        self._handle_message(message)
                    continue
                if has_ended:
                    break  # a process that it left behind may keep the socket open
                waited_s += POLL_INTERVAL_S
                if waited_s == SLOW_IMPORT_S and "ready" not in fields:
                    names = ", ".join(["torch", *self._preload])
                    text = (
                        "the fork server still imports %s after %.0f s; workers that start now wait for it."
                    )
                    logger.warning(text, names, SLOW_IMPORT_S)
                stopped_s = stopped_s + POLL_INTERVAL_S if _is_stopped(process.pid) else 0.0
                # Launcher shims would wait for a stopped fork server.
                if stopped_s > 2 * POLL_INTERVAL_S or self._thread.is_closing:
                    process.kill()
        return fields, process.wait()

    def _handle_message(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self._set_ready()
            self._emit(
                "fork-server-ready", seconds=message["ready"], skipped_modules=message["skipped_modules"]
            )
            for name, reason in message["skipped_modules"].items():
                level = logging.WARNING if name in self._preload else logging.DEBUG
                logger.log(level, "the fork server cannot import %s, so it is left out: %s", name, reason)
        refusal = message.get("refused", "")
        if refusal and refusal not in self._logged_refusals:
            self._logged_refusals.add(refusal)
            logger.debug("a worker starts cold: %s.", refusal)

    def _handle_exit(self, status: dict[str, Any], exit_code: int) -> bool:
        """Log why the fork server ended; return whether to start another."""
        self._failures = 0 if "ready" in status else self._failures + 1
        if "fork_unsafe_module" in status:
            name = str(status["fork_unsafe_module"])
            if name in self._preload:
                self._preload.remove(name)
                logger.warning("--preload %s is left out: %s.", name, status["reason"])
                return True
            logger.warning(
                "workers start cold: they cannot share an imported %s, since %s.", name, status["reason"]
            )
            return False
        how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"
        self._emit("fork-server-exit", exit_code=exit_code)
        if self._failures >= MAX_FAILURES:
            text = "workers start cold from now on: %d fork servers in a row failed; the last %s."
            logger.warning(text, self._failures, how)
            return False
        logger.debug("the fork server %s: workers start cold until another is ready.", how)
        return True


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False
