"""How long a heartbeat takes to the leader and back, as a follower sees it. Nothing is decided by it.

The leader answers each at once, and each message says which it answers (`Link`): so it is known anyway. Of
the newest `KEPT` the `LEFT_OUT` slowest do not count: a process that paused for once makes no slow link, nor
does one packet that was lost, and sent again a fifth of a second later. Several of them do.
"""

from __future__ import annotations

from collections import deque

from elastic_resume.rendezvous.link import NEVER, Link

KEPT = 32
LEFT_OUT = 2


class Beats:
    """Those of one agent."""

    def __init__(self) -> None:
        self.round_s: float | None = None
        """What the slowest of those that count took; None until there are `KEPT`, and for who leads."""
        self._link: Link | None = None
        self._echoed_at = NEVER
        self._newest: deque[float] = deque(maxlen=KEPT)

    def note(self, link: Link | None) -> None:
        """Look at the link to the leader, after each event; None: there is none."""
        if link is not self._link:
            self._link, self._echoed_at, self.round_s = link, NEVER, None
            self._newest.clear()
        if link is None or link.echoed_at == self._echoed_at:
            return
        self._echoed_at = link.echoed_at
        self._newest.append(link.heard_at - link.echoed_at)
        if len(self._newest) == KEPT:
            self.round_s = round(sorted(self._newest)[-1 - LEFT_OUT], 4)
