"""Distribute each node's status and event lines to the leader, for display only.

No decision depends on them.

Followers send status updates to the leader with heartbeats. The leader sends its own to one member, the
*deputy*, so that they survive the leader. A new status replaces the last. Event lines are numbered for the
life of an agent, so a receiver notices repeated and missing lines. A new receiver gets the lines that are
still kept.

A heartbeat carries at most `MAX_UPDATE_BYTES` of lines, and at most `MAX_QUEUED_BYTES` are kept; beyond that
the oldest lines are dropped.
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
"""Lines without line ends, as `are_event_lines` accepts."""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """The status of one node. Ages count from its creation; counts and sums from the start of its agent."""

    generation: int = 0
    """The generation whose workers run; 0 for none."""
    step: int = 0
    """The newest step that they have finished."""
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
    """Incidents of the whole job known to this node, from before its agent's start too."""
    problem: str = ""
    """A problem of its disk or memory; empty without one."""


@dataclass(frozen=True, slots=True)
class StatusUpdate:
    """One heartbeat's share: the status if it is new, and event lines from `first_line_number` on."""

    status: NodeStatus | None = None
    first_line_number: int = 0
    event_lines: EventLines = EventLines(())


def are_event_lines(lines: Collection[object]) -> bool:
    """Return whether these are texts without line ends and within the limits."""
    if len(lines) > MAX_UPDATE_LINES:
        return False
    texts = [line for line in lines if isinstance(line, str) and "\n" not in line]
    return len(texts) == len(lines) and sum(map(len, texts)) <= MAX_UPDATE_BYTES


class StatusOutbox:
    """The status and event lines to be delivered, and recent lines for a new receiver."""

    def __init__(self) -> None:
        self._status: NodeStatus | None = None
        self._sent: deque[str] = deque()
        self._queued: deque[str] = deque()
        self._queued_bytes = 0
        self._next_line_number = 0
        """Number of the first queued line."""
        self._receiver: Incarnation | None = None

    def add(self, status: NodeStatus | None, event_lines: Iterable[str]) -> None:
        """Add a status and lines; a line too long for a heartbeat becomes an empty line."""
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
        """Return the update for the next heartbeat to `receiver`; None if there is nothing new."""
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
        status, self._status = self._status, None
        return StatusUpdate(status, first, EventLines(tuple(lines)))


def find_deputy(
    view: View | None, leader: Incarnation, present: Collection[Incarnation]
) -> Incarnation | None:
    """Return the present member of lowest rank besides the leader; it leads next if the leader dies."""
    members = view.members if view else ()
    return next((member for member in members if member != leader and member in present), None)


def _max_encoded_bytes(line: str) -> int:
    """Return an upper bound of a line's size on the wire, JSON's escapes of quotes included."""
    return len(line.encode("utf-8", "surrogatepass")) + line.count('"') + line.count("\\") + 4
