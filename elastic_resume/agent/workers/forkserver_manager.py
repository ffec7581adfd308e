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

ZYGOTE = Path(__file__).with_name("forkserver.py")
MAX_FAILURES = 3  # of zygotes in a row that never were ready
BACKLOG = 1024  # stubs of one node that ask while it still imports
LOOK_S = 1.0  # between two looks at whether somebody has stopped it; and before another is started
SAY_S = 15.0  # of importing, after which it is said that workers wait for it
spawn: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen  # simulated nodes share what it imports


class Warmth:
    """The zygote of one agent: from `start` to `close` there is one, or workers start cold."""

    def __init__(
        self, command: list[str], preload: list[str], *, say: Callable[[str], None], tell: Callable[..., Any]
    ) -> None:
        """``command`` is the worker's; ``say`` gets lines for people, ``tell`` events by kind and fields."""
        self._command = command
        self._preload = preload
        self._say = say
        self._tell = tell
        self._name = f"elastic_resume-{secrets.token_hex(16)}"
        self._process: subprocess.Popen[bytes] | None = None
        self._refused = {""}  # reasons that have been said
        self._closing = threading.Event()
        # The kernel kills a zygote when the thread that started it ends: this one lives as long as we do.
        self._thread = threading.Thread(target=self._live, name="warmth", daemon=True)
        self._bound = threading.Event()
        self._settled = threading.Event()

    def start(self) -> None:
        """Start the zygote; stubs may ask it from now on, and wait while it imports."""
        os.environ[constants.ENV_ZYGOTE] = self._name  # torchelastic hands its environment to stubs
        self._thread.start()
        self._bound.wait()

    def wait(self, limit_s: float) -> None:
        """Wait until workers start as fast as they ever will: all is imported, or they start cold."""
        self._settled.wait(limit_s)

    @property
    def pid(self) -> int | None:
        """The zygote's, None while there is none."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def close(self) -> None:
        """End it; workers that it has forked live on until their stubs end."""
        self._closing.set()
        os.environ.pop(constants.ENV_ZYGOTE, None)
        with contextlib.suppress(ProcessLookupError, AttributeError):
            self._process.kill()  # type: ignore[union-attr]
        self._thread.join()

    def _live(self) -> None:
        try:
            self._keep()
        finally:
            self._settled.set()

    def _keep(self) -> None:
        failures = 0
        while not self._closing.is_set():
            try:
                control = self._spawn()
            except OSError as error:
                self._say(f"workers start cold, there is no zygote: {error}")
                return
            finally:
                self._bound.set()
            news = self._attend(control)
            code = self._process.wait() if self._process else 0
            if self._closing.is_set():
                return
            failures = 0 if "ready" in news else failures + 1
            if not self._heed_end(news, code, failures):
                return
            self._closing.wait(LOOK_S)

    def _heed_end(self, news: dict[str, Any], code: int, failures: int) -> bool:
        """Say why the zygote ended; whether there is to be another."""
        if "spoiled" in news:
            name = str(news["spoiled"])
            if name in self._preload:
                self._preload.remove(name)
                self._say(f"--preload {name} is left out: {news['why']}.")
                return True
            self._say(f"workers start cold: importing {name} cannot be shared, since {news['why']}.")
            return False
        how = f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self._tell("zygote-exit", exit_code=code)
        if failures >= MAX_FAILURES:
            self._say(f"workers start cold from now on: {failures} zygotes in a row failed (last: {how}).")
            return False
        self._say(f"the zygote was {how}: workers start cold until another is ready.")
        return True

    def _spawn(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        ours, its = socket.socketpair()
        with listener, its:
            listener.bind("\0" + self._name)
            listener.listen(BACKLOG)
            spec = {"command": self._command, "preload": self._preload}
            words = [str(listener.fileno()), str(its.fileno()), str(os.getpid()), json.dumps(spec)]
            self._process = spawn(
                [sys.executable, "-u", str(ZYGOTE), *words],
                pass_fds=(listener.fileno(), its.fileno()),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        return ours

    def _attend(self, control: socket.socket) -> dict[str, Any]:
        """Wait for the zygote's end; give what it said."""
        said = b""
        news: dict[str, Any] = {}
        stopped_s = waited_s = 0.0
        with control:
            while True:
                # Looked at first: what it said before its end is there to be read then.
                ended = self._process is None or self._process.poll() is not None
                readable, _, _ = select.select([control], [], [], 0 if ended else LOOK_S)
                if readable:
                    part = control.recv(65536)
                    if not part:
                        return news
                    said += part
                    *lines, said = said.split(b"\n")
                    for line in lines:
                        news = {**news, **json.loads(line)}
                        self._hear(json.loads(line))
                    continue
                if self._process is None or ended:
                    return news  # a process that it left behind may hold its end of the line
                waited_s += LOOK_S
                if waited_s == SAY_S and "ready" not in news:
                    names = ", ".join(["torch", *self._preload])
                    self._say(f"workers wait until {names} are imported, {SAY_S:.0f} s so far.")
                stopped_s = stopped_s + LOOK_S if self._is_stopped() else 0.0
                # Stubs would wait for one that is stopped.
                if stopped_s > 2 * LOOK_S or self._closing.is_set():
                    self._process.kill()

    def _hear(self, news: dict[str, Any]) -> None:
        if "ready" in news:
            self._settled.set()
            self._tell("zygote-ready", seconds=news["ready"], left_out=news["left_out"])
            for name, why in news["left_out"].items():
                self._say(f"cannot import {name} ahead of workers, so it is left out: {why}")

        if news.get("refused", "") not in self._refused:
            self._refused.add(news["refused"])
            self._say(f"a worker starts cold: {news['refused']}.")

    def _is_stopped(self) -> bool:
        try:
            return (
                psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED
                if self._process
                else False
            )
        except psutil.NoSuchProcess:
            return False
