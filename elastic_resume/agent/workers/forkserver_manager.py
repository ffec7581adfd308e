"""Start the fork server from the agent, and start another when it dies.

Workers start in any case: without a fork server they start cold. The fork server sends lines of JSON::

    {"ready": SECONDS, "skipped_modules": {NAME: REASON}}    it has imported everything
    {"refused": REASON}                                      a worker has to start cold
    {"fork_unsafe_module": NAME, "reason": REASON}           it exits, since no worker can be forked any more
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from elastic_resume import constants
from elastic_resume.background import BackgroundThread

logger = logging.getLogger(__name__)

FORK_SERVER_PATH = Path(__file__).with_name("forkserver.py")
MAX_FAILURES = 3  # limit of consecutive fork servers that ended before they were ready
BACKLOG = 1024  # limit of launcher shims that wait while the fork server imports
POLL_INTERVAL_S = 1.0  # time between checks of the fork server, and before the next one starts
SLOW_IMPORT_S = 15.0  # imports that take longer are logged, since workers wait for them
spawn: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen  # simulated nodes replace it


class ForkServerManager:
    """Keep a fork server running from `start` to `close`, or give it up, so that workers start cold."""

    def __init__(
        self,
        command: list[str],
        preload: Sequence[str] = (),
        emit: Callable[..., Any] = lambda *_, **__: None,
    ) -> None:
        """Prepare a fork server for workers of ``command``. It imports torch and the ``preload`` modules."""
        self._command = command
        self._preload = list(preload)
        self._emit = emit
        self._socket_name = f"elastic_resume-{secrets.token_hex(16)}"
        self._process: subprocess.Popen[bytes] | None = None
        self._failures = 0
        self._logged_refusals: set[str] = set()
        self._listening = threading.Event()
        self._ready_or_given_up = threading.Event()
        # The kernel kills a fork server when the thread that started it ends, so one thread starts them all.
        self._thread = BackgroundThread("fork-server-manager", self._run_fork_server)

    def start(self) -> None:
        """Start the fork server. From now on launcher shims may connect; they wait while it imports."""
        # torchelastic passes its environment on to launcher shims.
        os.environ[constants.ENV_FORK_SERVER] = self._socket_name
        self._thread.start()
        self._listening.wait()

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until the fork server has imported everything, or has been given up."""
        self._ready_or_given_up.wait(timeout_s)

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
                self._ready_or_given_up.set()
        return POLL_INTERVAL_S if restarts else None

    def _start_process(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Start the process; return it with the socket to it."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        control, server_end = socket.socketpair()
        with listener, server_end:
            listener.bind("\0" + self._socket_name)
            listener.listen(BACKLOG)
            descriptors = (listener.fileno(), server_end.fileno())
            spec = {"command": self._command, "preload": self._preload}
            arguments = [*map(str, descriptors), str(os.getpid()), json.dumps(spec)]
            process = self._process = spawn(
                [sys.executable, "-u", str(FORK_SERVER_PATH), *arguments],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        return process, control

    def _wait_for_exit(
        self, process: subprocess.Popen[bytes], control: socket.socket
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
                    logger.warning("workers wait for the import of %s, %.0f s so far.", names, SLOW_IMPORT_S)
                stopped_s = stopped_s + POLL_INTERVAL_S if _is_stopped(process.pid) else 0.0
                # Launcher shims would wait for a stopped fork server.
                if stopped_s > 2 * POLL_INTERVAL_S or self._thread.is_closing:
                    process.kill()
        return fields, process.wait()

    def _handle_message(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self._ready_or_given_up.set()
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
