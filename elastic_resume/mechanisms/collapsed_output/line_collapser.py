"""Decide which lines of one stream of several ranks are printed once. Pure.

A complete line is held until all ranks have printed it or its time is over. What may be a progress bar, or is
no text, is printed at once. An unfinished line is printed soon, when no line before it is held; then the rest
of it is printed at once. Each rank's lines stay in their order.
"""

from __future__ import annotations

import re
from collections import deque

WINDOW_S = 1.0
PARTIAL_S = 0.1  # an unbuffered print() writes a line's end by itself
MAX_PARTIAL_BYTES = 1 << 16
MAX_HELD_BYTES = 1 << 20  # of one rank
# Colours (which end with m) move no cursor; all else of a terminal may.
_CONTROL = re.compile(rb"[\r\b\v\f]|\x1b(?!\[[0-9;:]*m)")


class LineCollapser:
    """What is held of each rank; no line is held of all ranks."""

    def __init__(self, ranks: int) -> None:
        self._ranks = range(ranks)
        self._held: list[deque[tuple[bytes, float]]] = [deque() for _ in self._ranks]
        self._held_bytes = [0] * ranks
        self._counts: dict[bytes, list[int]] = {}
        """How often each held line is held of each rank."""
        self._partial = [b""] * ranks
        self._partial_until = [0.0] * ranks
        self._is_passing = [False] * ranks
        """Whether a part of the rank's unfinished line is printed."""
        self._output: list[bytes] = []

    def feed(self, rank: int, data: bytes, now: float) -> bytes:
        """Note what a rank has written, and return what to print now."""
        self._expire(now)
        *lines, rest = (self._partial[rank] + data).split(b"\n")
        if lines or not self._partial[rank]:
            self._partial_until[rank] = now + PARTIAL_S
        self._partial[rank] = b""
        for line in lines:
            if self._is_passing[rank] or not _is_plain(line):
                self._release(rank)
                self._output += (line, b"\n")
                self._is_passing[rank] = False
            else:
                self._hold(rank, line, now + WINDOW_S)
        self._partial[rank] = rest
        if rest and (self._is_passing[rank] or len(rest) > MAX_PARTIAL_BYTES or _CONTROL.search(rest)):
            self._release(rank)
        return self._take_output()

    def find_deadline(self) -> float | None:
        """Return when to call `expire`; None if nothing is held."""
        times = [held[0][1] for held in self._held if held]
        times += [
            self._partial_until[rank] for rank in self._ranks if self._partial[rank] and not self._held[rank]
        ]
        return min(times, default=None)

    def expire(self, now: float) -> bytes:
        """Return the lines whose time is over."""
        self._expire(now)
        return self._take_output()

    def flush(self) -> bytes:
        """Return all that is held."""
        for rank in self._ranks:
            self._release(rank)
        return self._take_output()

    def _expire(self, now: float) -> None:
        for rank, held in enumerate(self._held):
            while held and held[0][1] <= now:
                self._print_first(rank)
            if self._partial[rank] and not held and self._partial_until[rank] <= now:
                self._release(rank)

    def _hold(self, rank: int, line: bytes, deadline: float) -> None:
        self._held[rank].append((line, deadline))
        self._held_bytes[rank] += len(line) + 1
        counts = self._counts.setdefault(line, [0] * len(self._ranks))
        counts[rank] += 1
        if all(counts):
            for each in self._ranks:
                while self._held[each][0][0] != line:
                    self._print_first(each)
                self._pop(each)
            self._output.append(line + b" [%d ranks]\n" % len(self._ranks))
        while self._held_bytes[rank] > MAX_HELD_BYTES:
            self._print_first(rank)

    def _pop(self, rank: int) -> bytes:
        line, _ = self._held[rank].popleft()
        self._held_bytes[rank] -= len(line) + 1
        counts = self._counts[line]
        counts[rank] -= 1
        if not any(counts):
            del self._counts[line]
        return line

    def _print_first(self, rank: int) -> None:
        self._output += (self._pop(rank), b"\n")

    def _release(self, rank: int) -> None:
        """Print all that is held of a rank."""
        while self._held[rank]:
            self._print_first(rank)
        if self._partial[rank]:
            self._output.append(self._partial[rank])
            self._partial[rank], self._is_passing[rank] = b"", True

    def _take_output(self) -> bytes:
        output, self._output = b"".join(self._output), []
        return output


def _is_plain(line: bytes) -> bool:
    if _CONTROL.search(line):
        return False
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True
