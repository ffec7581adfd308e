"""Run the user's command with one notice after the other, in a thread for which nothing waits.

As of systemd's ``ExecStart`` and git's hooks, no shell is between: a quote or a dollar in an event can never
become a command. Each run is a process group of its own, which is killed at its end or after `LIMIT_S`. If
the agent is killed, the kernel kills the command. The notice is the content of its standard input, a file in
memory, so that the command need not read it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, cast

from elastic_resume import constants, linux
from elastic_resume.background import BackgroundThread, lower_priority
from elastic_resume.errors import ConfigError
from elastic_resume.mechanisms.on_event.notices import mask
from elastic_resume.units import to_printable

logger = logging.getLogger(__name__)
MAX_WAITING = 32
LIMIT_S = 30.0
END_LIMIT_S = 10.0
"""For all commands together, once the agent has ended."""
MIN_END_S = 0.5
"""Of it after a signal whose grace is over: a message of the end is worth that."""
POLL_S = 0.02
READ_BYTES = 1 << 16
MAX_LAST_READS = 16  # of a pipe, which holds 64 KiB; a process that is left may write for ever
MAX_SHOWN_BYTES = 2000
_ADDRESS = re.compile(r"(https?://[^/\s]+)/[^\s\"'<>]+")
_BEARER = re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]+", re.IGNORECASE)


def parse_command(setting: str, text: str) -> tuple[str, ...]:
    """Split a command into its words, and find its program.

    Raises:
        ConfigError: it is empty, a quote is not closed, it has a NUL, or its program is not there.

    """
    reason = "it has a NUL character" if "\0" in text else ""
    try:
        program, *words = shlex.split(text)
    except ValueError as error:
        reason = "it is empty" if not text.strip() else str(error).rstrip(".").lower()
    if reason:
        raise ConfigError(
            f"{setting} cannot be split into words: {reason}. Write a program and its arguments; a pipe or a "
            "variable needs sh -c 'COMMAND'."
        )
    path = shutil.which(program)
    if path is None:
        raise ConfigError(
            f"{setting}: no program {program[:200]!r} can be run on this machine. Write its path, or make it "
            "executable."
        )
    return (str(Path(path).absolute()), *words)


class CommandQueue:
    """Runs the command for each notice in turn; `put` never waits, and drops the oldest of too many."""

    def __init__(self, words: Sequence[str]) -> None:
        """Start the thread; ``words`` are those of `parse_command`."""
        self._words = words
        self._waiting: deque[dict[str, Any]] = deque()
        self._dropped = 0  # since the last notice that was taken
        self._changed = threading.Condition()  # guards all of these
        self._end: float | None = None  # of the agent's wait, in seconds of the monotonic clock
        self._limit = 0.0  # when the present run is killed
        self._done = threading.Event()
        self._has_warned = False
        self._thread = BackgroundThread("elastic-resume-on-event", self._run_next)
        self._thread.start()

    def put(self, notice: dict[str, Any]) -> None:
        """Run the command for a notice once those before it are done."""
        with self._changed:
            if len(self._waiting) >= MAX_WAITING:
                self._waiting.popleft()
                self._dropped += 1
            self._waiting.append(notice)
            self._changed.notify()

    def finish(self, left_s: float | None = None) -> None:
        """Wait for the notices that are left; each gets an equal share of `END_LIMIT_S`.

        ``left_s``: until this node must end, if it must; the commands get `MIN_END_S` all the same.
        """
        limit_s = END_LIMIT_S if left_s is None else min(END_LIMIT_S, max(MIN_END_S, left_s))
        with self._changed:
            now = time.monotonic()
            self._end = now + limit_s
            self._limit = min(self._limit, now + self._share_s(now))
            self._changed.notify()
        self._done.wait(limit_s + 1)

    def _share_s(self, now: float) -> float:
        """Return how long one run may take, beside those that wait."""
        return LIMIT_S if self._end is None else (self._end - now) / (len(self._waiting) + 1)

    def _run_next(self) -> float | None:
        lower_priority()
        with self._changed:
            while not self._waiting:
                if self._end is not None:
                    self._done.set()
                    return None
                self._changed.wait()
            notice = {**self._waiting.popleft(), "dropped": self._dropped}
            self._dropped = 0
            now = time.monotonic()
            self._limit = now + self._share_s(now)
        problem = run_command(self._words, notice, lambda: time.monotonic() > self._limit)
        if problem and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "on-event: the command for the event %r %s. The job does not depend on it; later "
                "failures of the command are not logged.",
                notice["kind"],
                problem,
            )
        return 0.0


def run_command(words: Sequence[str], notice: dict[str, Any], is_over: Callable[[], bool]) -> str:
    """Run the command until it ends or ``is_over``; return a clause about its failure, or an empty text."""
    try:
        process = _start(words, json.dumps(notice).encode() + b"\n")
    except OSError as error:
        return f"could not be started: {error.strerror}"
    with process:
        output = _OutputEnd(cast("IO[bytes]", process.stdout))
        while not (has_ended := _has_ended(process.pid)) and not is_over():
            output.read()  # 64 KiB each time, so that a flood costs little
            time.sleep(POLL_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # before the process is reaped: the number is its own
        for _ in range(MAX_LAST_READS):
            output.read()
    code = process.returncode
    if has_ended and code == 0:
        return ""
    how = f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}"
    return (how if has_ended else "took too long and was killed") + output.describe()


def _start(words: Sequence[str], content: bytes) -> subprocess.Popen[bytes]:
    with os.fdopen(linux.create_anonymous_file("elastic_resume-event"), "w+b") as stdin:
        stdin.write(content)
        stdin.seek(0)
        return subprocess.Popen(
            words,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={k: v for k, v in os.environ.items() if not k.startswith(constants.ENV_PREFIX)},
            start_new_session=True,
            preexec_fn=functools.partial(linux.die_with_parent, os.getpid()),  # noqa: PLW1509  one system call
        )


def _has_ended(pid: int) -> bool:
    """Return whether a child has ended, and leave it a zombie: so no other process gets its number."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


class _OutputEnd:
    """The end of what a command prints."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._descriptor = pipe.fileno()
        os.set_blocking(self._descriptor, False)
        self._tail = b""

    def read(self) -> None:
        """Read what is there, at most `READ_BYTES`."""
        with contextlib.suppress(BlockingIOError):
            self._tail = (self._tail + os.read(self._descriptor, READ_BYTES))[-MAX_SHOWN_BYTES:]

    def describe(self) -> str:
        """Return a clause with it; empty if nothing was printed. A webhook's path is a secret."""
        text = _ADDRESS.sub(r"\1/***", mask(self._tail.decode(errors="replace").strip()))
        text = to_printable(_BEARER.sub(r"\1 ***", text), MAX_SHOWN_BYTES)
        return f", and printed: {text.rstrip('.')}" if text else ""
