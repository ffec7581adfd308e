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

from elastic_resume.rendezvous.core.quorum import Incarnation, View

MAX_UPDATE_BYTES = 32 * 1024
MAX_UPDATE_LINES = 1024
MAX_QUEUED_BYTES = 1 << 20

EventLines = NewType("EventLines", tuple[str, ...])
"""Whole lines without their ends, `is_news`."""


@dataclass(frozen=True, slots=True)
class NodeStatus:
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
    problem: str = ""
    """What is wrong with its disk or memory; empty while nothing is."""


@dataclass(frozen=True, slots=True)
class StatusUpdate:
    """One heartbeat's part: a pulse, where there is a new one, and the lines from number ``first`` on."""

    status: NodeStatus | None = None
    first_line_number: int = 0
    event_lines: EventLines = EventLines(())


def are_event_lines(lines: Collection[object]) -> bool:
    """Whether these are few enough, and texts without line ends."""
    if len(lines) > MAX_UPDATE_LINES:
        return False
    texts = [one for one in lines if isinstance(one, str) and "\n" not in one]
    return len(texts) == len(lines) and sum(map(len, texts)) <= MAX_UPDATE_BYTES


class StatusOutbox:
    """What one node has to tell."""

    def __init__(self) -> None:
        self._status: NodeStatus | None = None
        self._sent: deque[str] = deque()
        self._queued: deque[str] = deque()
        self._queued_bytes = 0
        self._next_line_number = 0
        """Number of the first line that waits."""
        self._receiver: Incarnation | None = None

    def add(self, status: NodeStatus | None, event_lines: Iterable[str]) -> None:
        """Take in what there is to tell; a line that no heartbeat can carry counts as one that was missed."""
        self._status = status or self._status
        for line in event_lines:
            fits = line if are_event_lines([line]) and _max_encoded_bytes(line) <= MAX_UPDATE_BYTES else ""
            self._queued.append(fits)
            self._queued_bytes += _max_encoded_bytes(fits)
        while self._queued_bytes > MAX_QUEUED_BYTES:
            self._queued_bytes -= _max_encoded_bytes((self._sent or self._queued)[0])
            if self._sent:
                self._sent.popleft()
            else:
                self._queued.popleft()
                self._next_line_number += 1

    def take(self, receiver: Incarnation) -> StatusUpdate | None:
        """Give what goes with this heartbeat to ``reader``; None where there is nothing to tell."""
        if receiver != self._receiver:
            self._receiver = receiver
            self._next_line_number -= len(self._sent)
            self._queued.extendleft(reversed(self._sent))
            self._sent.clear()
        if self._status is None and not self._queued:
            return None
        first, room = self._next_line_number, MAX_UPDATE_BYTES
        lines: list[str] = []
        while self._queued and len(lines) < MAX_UPDATE_LINES and _max_encoded_bytes(self._queued[0]) <= room:
            line = self._queued.popleft()
            room -= _max_encoded_bytes(line)
            lines.append(line)
        self._sent.extend(lines)
        self._next_line_number += len(lines)
        pulse, self._status = self._status, None
        return StatusUpdate(pulse, first, EventLines(tuple(lines)))


def find_deputy(
    view: View | None, leader: Incarnation, present: Collection[Incarnation]
) -> Incarnation | None:
    """Who is told what this leader saw: the lowest rank besides it, who leads next if it dies."""
    members = view.members if view else ()
    return next((one for one in members if one != leader and one in present), None)


def _max_encoded_bytes(line: str) -> int:
    """A bound of what a line takes on the wire and in memory, JSON's escapes of quotes included."""
    return len(line.encode("utf-8", "surrogatepass")) + line.count('"') + line.count("\\") + 4
