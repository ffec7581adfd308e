"""What a node tells for people to see: how it does, and lines of its event log. Nothing is decided by it.

It rides on heartbeats, to the leader; and from the leader to one other member, its *deputy*, so that what a
leader saw is not lost with it. A `Pulse` replaces the one before. Lines are numbered through an agent's life:
a receiver knows what it has already and what it missed. A new receiver is told again what is still kept.

It promises that a heartbeat carries at most `MAX_NEWS_BYTES` of them, and that no more than `MAX_KEPT_BYTES`
are kept, told or not; of what has to go unsaid the oldest goes first. Does not know what a line says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NewType

from elastic_resume.rendezvous.core.quorum import Incarnation, World

MAX_NEWS_BYTES = 32 * 1024
MAX_NEWS_LINES = 1024
MAX_KEPT_BYTES = 1 << 20

News = NewType("News", tuple[str, ...])
"""Whole lines without their ends, `is_news`."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """How one node does. Ages count from when it was taken; counts and sums from its agent's start."""

    generation: int = 0
    """Of the workers that run; 0 where none do."""
    step: int = 0
    """The newest that they have finished."""
    steps_per_s: float = 0.0
    world_size: int = 0
    workers: int = 0
    snapshot_step: int | None = None
    snapshot_age_s: float = 0.0
    checkpoint_step: int | None = None
    checkpoint_age_s: float = 0.0
    commits: int = 0
    commit_s: float = 0.0
    commit_bytes: int = 0
    commit_failures: int = 0
    incidents: int = 0
    """Of the job, as far as this node knows; before its agent's start too."""
    trouble: str = ""
    """What is wrong with its disk or memory; empty while nothing is."""


@dataclass(frozen=True, slots=True)
class Tidings:
    """One heartbeat's part: a pulse, where there is a new one, and the lines from number ``first`` on."""

    pulse: Pulse | None = None
    first: int = 0
    news: News = News(())


def is_news(lines: Collection[object]) -> bool:
    """Whether these are few enough, and texts without line ends."""
    if len(lines) > MAX_NEWS_LINES:
        return False
    texts = [one for one in lines if isinstance(one, str) and "\n" not in one]
    return len(texts) == len(lines) and sum(map(len, texts)) <= MAX_NEWS_BYTES


class Outbox:
    """What one node has to tell."""

    def __init__(self) -> None:
        self._pulse: Pulse | None = None
        self._told: deque[str] = deque()
        self._waiting: deque[str] = deque()
        self._bytes = 0
        self._next = 0
        """Number of the first line that waits."""
        self._reader: Incarnation | None = None

    def put(self, pulse: Pulse | None, lines: Iterable[str]) -> None:
        """Take in what there is to tell; a line that no heartbeat can carry counts as one that was missed."""
        self._pulse = pulse or self._pulse
        for line in lines:
            fits = line if is_news([line]) and _size(line) <= MAX_NEWS_BYTES else ""
            self._waiting.append(fits)
            self._bytes += _size(fits)
        while self._bytes > MAX_KEPT_BYTES:
            self._bytes -= _size((self._told or self._waiting)[0])
            if self._told:
                self._told.popleft()
            else:
                self._waiting.popleft()
                self._next += 1

    def take(self, reader: Incarnation) -> Tidings | None:
        """Give what goes with this heartbeat to ``reader``; None where there is nothing to tell."""
        if reader != self._reader:
            self._reader = reader
            self._next -= len(self._told)
            self._waiting.extendleft(reversed(self._told))
            self._told.clear()
        if self._pulse is None and not self._waiting:
            return None
        first, room = self._next, MAX_NEWS_BYTES
        lines: list[str] = []
        while self._waiting and len(lines) < MAX_NEWS_LINES and _size(self._waiting[0]) <= room:
            line = self._waiting.popleft()
            room -= _size(line)
            lines.append(line)
        self._told.extend(lines)
        self._next += len(lines)
        pulse, self._pulse = self._pulse, None
        return Tidings(pulse, first, News(tuple(lines)))


def deputy(world: World | None, me: Incarnation, here: Collection[Incarnation]) -> Incarnation | None:
    """Who is told what this leader saw: the lowest rank besides it, who leads next if it dies."""
    members = world.members if world else ()
    return next((one for one in members if one != me and one in here), None)


def _size(line: str) -> int:
    """A bound of what a line takes on the wire and in memory, JSON's escapes of quotes included."""
    return len(line.encode("utf-8", "surrogatepass")) + line.count('"') + line.count("\\") + 4
