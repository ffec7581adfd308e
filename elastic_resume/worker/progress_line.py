"""A line for people who wait while many bytes come or go: how many, how fast, how much longer.

Nothing for `FIRST_S`: most restores are over by then. After that the line is drawn again and again, and taken
away at the end, since what came of it is told anyway. Where standard error is no terminal there is nothing.
Workers inherit the agent's, so whoever starts a job by hand sees it. A terminal that is gone costs the line
and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

FIRST_S = 2.0
REDRAW_S = 0.2
WINDOW_S = 3.0
"""A rate is one over so many seconds: what a person sees should be what happens now."""
CLOSE_S = 1.0


class Pace:
    """How fast a count of bytes grows. Pure: the time comes in."""

    def __init__(self, total: int) -> None:
        """``total``: what the count grows to."""
        self._total = total
        self._seen: deque[tuple[float, int]] = deque()

    def note(self, now: float, done: int) -> None:
        """Take in how many there are at the time ``now``."""
        self._seen.append((now, done))
        while len(self._seen) > 2 and self._seen[1][0] <= now - WINDOW_S:
            self._seen.popleft()

    @property
    def rate(self) -> float:
        """Bytes a second."""
        (began, first), (now, done) = self._seen[0], self._seen[-1]
        return (done - first) / (now - began) if now > began else 0.0

    @property
    def text(self) -> str:
        """``1.20 GB of 3.40 GB (35 %), 0.76 GB/s, 3 s left``."""
        done = self._seen[-1][1]
        share = 100 * done // self._total if self._total else 100
        told = f"{_size(done)} of {_size(self._total)} ({share} %)"
        if self.rate <= 0:
            return f"{told}, nothing comes just now"
        return f"{told}, {_size(self.rate)}/s, {_left((self._total - done) / self.rate)} left"


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _left(seconds: float) -> str:
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 7200 else f"{whole // 3600} h {whole % 3600 // 60:02} min"


@contextlib.contextmanager
def shown(what: str, total: int, done: Callable[[], int]) -> Iterator[None]:
    """Show how far it is, while the context lasts.

    Args:
        what: is done, in words.
        total: of bytes; with none there is nothing to show.
        done: tells how many; where it raises there is nothing to show any more. Called in a thread.

    """
    if total <= 0 or not _is_terminal():
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_show, args=(what, total, done, over), name="progress-line", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(CLOSE_S)


def _show(what: str, total: int, done: Callable[[], int], over: threading.Event) -> None:
    pace = Pace(total)
    drawn = False
    with contextlib.suppress(Exception):  # whatever it is, it is told by who meets it too
        pace.note(time.monotonic(), done())
        if over.wait(FIRST_S):
            return
        while not over.is_set():
            pace.note(time.monotonic(), done())
            drawn = True
            _draw(f"elastic_resume: {what}: {pace.text}")
            over.wait(REDRAW_S)
    if drawn:
        with contextlib.suppress(OSError, ValueError):
            _draw("")


def _is_terminal() -> bool:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.isatty(sys.stderr.fileno()) and os.environ.get("TERM") != "dumb"
    return False


def _draw(text: str) -> None:
    """Put it in the place of the line with the cursor; one that is too wide could not be taken away."""
    width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
    sys.stderr.write(f"\r{text[: width - 1]}\x1b[K")
    sys.stderr.flush()
