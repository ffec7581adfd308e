"""One connection as the core sees it: which messages the other side has seen, and when they were sent.

Two clocks are never compared. A lease counts from when its holder sent the message that was acknowledged;
the one who waits for a lease to end counts from when it received. So the holder stops first, whatever the
delay, if the clocks run at the same rate up to `Settings.drift`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from elastic_resume.rendezvous.messages import Stamp
from elastic_resume.rendezvous.quorum import Incarnation, Knowledge

NEVER = float("-inf")
UNSEEN_LIMIT = 64
"""So many messages are remembered until the other side has seen them; to forget one shortens a lease."""


@dataclass(slots=True)
class Link:
    """A connection, dialled (`address` set) or accepted."""

    conn: int
    address: str = ""
    who: Incarnation | None = None
    known: Knowledge | None = None
    """What we knew when we dialled: a refused call proves the end of nobody who came later."""
    dialled_at: float = NEVER
    host: str = ""
    """The IP address that answered, where we dialled."""
    heard_at: float = NEVER
    echoed_at: float = NEVER
    """When the newest of our messages that the other side has seen was sent."""
    lease_end: float = NEVER
    """Until when the other side, if it leads, counted on a quorum that follows it."""
    seq: int = 0
    heard: int = 0
    unseen: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=UNSEEN_LIMIT))

    def stamp(self, now: float, generation: int, lease_s: float) -> Stamp:
        """Number the next message to be sent."""
        self.seq += 1
        self.unseen.append((self.seq, now))
        return Stamp(self.seq, self.heard, generation, lease_s)

    def succeed(self, broken: Link) -> None:
        """Inherit `echoed_at` and `lease_end` from the broken link to the same process."""
        self.echoed_at, self.lease_end = broken.echoed_at, broken.lease_end

    def note(self, stamp: Stamp, now: float) -> None:
        """Take in the stamp of a message that arrived."""
        self.heard = stamp.seq
        self.heard_at = now
        while self.unseen and self.unseen[0][0] <= stamp.echo:
            seq, sent_at = self.unseen.popleft()
            if seq == stamp.echo:
                self.echoed_at = sent_at
        if stamp.lease_s > 0:
            self.lease_end = max(self.lease_end, self.echoed_at + stamp.lease_s)
