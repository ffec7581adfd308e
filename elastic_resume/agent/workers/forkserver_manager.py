"""The agent's side of the zygote: it starts it, replaces one that died, and says what workers will get.

Promise: whatever becomes of the zygote, workers start: without one, cold. Does not know how it forks.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from elastic_resume import constants

FORK_SERVER_PATH = Path(__file__).with_name("forkserver.py")
MAX_FAILURES = 3  # of zygotes in a row that never were ready
BACKLOG = 1024  # stubs of one node that ask while it still imports
POLL_INTERVAL_S = 1.0  # between two looks at whether somebody has stopped it; and before another is started
SLOW_IMPORT_S = 15.0  # of importing, after which it is said that workers wait for it
spawn: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen  # simulated nodes share what it imports


class ForkServerManager:
    """The zygote of one agent: from `start` to `close` there is one, or workers start cold."""

    def __init__(
        self, command: list[str], preload: list[str], *, log: Callable[[str], None], emit: Callable[..., Any]
    ) -> None:
        """``command`` is the worker's; ``say`` gets lines for people, ``tell`` events by kind and fields."""
        self._command = command
        self._preload = preload
        self._log = log
        self._emit = emit
        self._socket_name = f"elastic_resume-{secrets.token_hex(16)}"
        self._process: subprocess.Popen[bytes] | None = None
        self._logged_refusals = {""}  # reasons that have been said
        self._closing = threading.Event()
        # The kernel kills a zygote when the thread that started it ends: this one lives as long as we do.
        self._thread = threading.Thread(target=self._run, name="warmth", daemon=True)
        self._listening = threading.Event()
        self._ready_or_given_up = threading.Event()

    def start(self) -> None:
        """Start the zygote; stubs may ask it from now on, and wait while it imports."""
        os.environ[constants.ENV_FORK_SERVER] = (
            self._socket_name
        )  # torchelastic hands its environment to stubs
        self._thread.start()
        self._listening.wait()

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until workers start as fast as they ever will: all is imported, or they start cold."""
        self._ready_or_given_up.wait(timeout_s)

    @property
    def pid(self) -> int | None:
        """The zygote's, None while there is none."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def close(self) -> None:
        """End it; workers that it has forked live on until their stubs end."""
        self._closing.set()
        os.environ.pop(constants.ENV_FORK_SERVER, None)
        with contextlib.suppress(ProcessLookupError, AttributeError):
            self._process.kill()  # type: ignore[union-attr]
        self._thread.join()

    def _run(self) -> None:
        try:
            self._run_fork_servers()
        finally:
            self._ready_or_given_up.set()

    def _run_fork_servers(self) -> None:
        failures = 0
        while not self._closing.is_set():
            try:
                control = self._start_process()
            except OSError as error:
                self._log(f"workers start cold, there is no zygote: {error}")
                return
            finally:
                self._listening.set()
            news = self._wait_for_exit(control)
            code = self._process.wait() if self._process else 0
            if self._closing.is_set():
                return
            failures = 0 if "ready" in news else failures + 1
            if not self._handle_exit(news, code, failures):
                return
            self._closing.wait(POLL_INTERVAL_S)

    def _handle_exit(self, status: dict[str, Any], exit_code: int, failures: int) -> bool:
        """Say why the zygote ended; whether there is to be another."""
        if "fork_unsafe_module" in status:
            name = str(status["fork_unsafe_module"])
            if name in self._preload:
                self._preload.remove(name)
                self._log(f"--preload {name} is left out: {status['why']}.")
                return True
            self._log(f"workers start cold: importing {name} cannot be shared, since {status['why']}.")
            return False
        how = f"killed by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"
        self._emit("fork-server-exit", exit_code=exit_code)
        if failures >= MAX_FAILURES:
            self._log(f"workers start cold from now on: {failures} zygotes in a row failed (last: {how}).")
            return False
        self._log(f"the zygote was {how}: workers start cold until another is ready.")
        return True

    def _start_process(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        ours, its = socket.socketpair()
        with listener, its:
            listener.bind("\0" + self._socket_name)
            listener.listen(BACKLOG)
            spec = {"command": self._command, "preload": self._preload}
            words = [str(listener.fileno()), str(its.fileno()), str(os.getpid()), json.dumps(spec)]
            self._process = spawn(
                [sys.executable, "-u", str(FORK_SERVER_PATH), *words],
                pass_fds=(listener.fileno(), its.fileno()),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        return ours

    def _wait_for_exit(self, control: socket.socket) -> dict[str, Any]:
        """Wait for the zygote's end; give what it said."""
        said = b""
        news: dict[str, Any] = {}
        stopped_s = waited_s = 0.0
        with control:
            while True:
                # Looked at first: what it said before its end is there to be read then.
                ended = self._process is None or self._process.poll() is not None
                readable, _, _ = select.select([control], [], [], 0 if ended else POLL_INTERVAL_S)
                if readable:
                    part = control.recv(65536)
                    if not part:
                        return news
                    said += part
                    *lines, said = said.split(b"\n")
                    for line in lines:
                        news = {**news, **json.loads(line)}
                        self._handle_message(json.loads(line))
                    continue
                if self._process is None or ended:
                    return news  # a process that it left behind may hold its end of the line
                waited_s += POLL_INTERVAL_S
                if waited_s == SLOW_IMPORT_S and "ready" not in news:
                    names = ", ".join(["torch", *self._preload])
                    self._log(f"workers wait until {names} are imported, {SLOW_IMPORT_S:.0f} s so far.")
                stopped_s = stopped_s + POLL_INTERVAL_S if self._is_stopped() else 0.0
                # Stubs would wait for one that is stopped.
                if stopped_s > 2 * POLL_INTERVAL_S or self._closing.is_set():
                    self._process.kill()

    def _handle_message(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self._ready_or_given_up.set()
            self._emit("fork-server-ready", seconds=message["ready"], left_out=message["skipped_modules"])
            for name, why in message["skipped_modules"].items():
                self._log(f"cannot import {name} ahead of workers, so it is left out: {why}")

        if message.get("refused", "") not in self._logged_refusals:
            self._logged_refusals.add(message["refused"])
            self._log(f"a worker starts cold: {message['refused']}.")

    def _is_stopped(self) -> bool:
        try:
            return (
                psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED
                if self._process
                else False
            )
        except psutil.NoSuchProcess:
            return False
