"""How long a heartbeat takes to the leader and back, as a follower sees it. Nothing is decided by it.

The leader answers each at once, and each message says which it answers (`Link`): so it is known anyway. Of
the newest `KEPT` the `LEFT_OUT` slowest do not count: a process that paused for once makes no slow link, nor
does one packet that was lost, and sent again a fifth of a second later. Several of them do.

A node that has more to do than processors is no slow link: what this thread ran, and waited for a processor,
since the heartbeat before, does not count. Too much is taken off rather than too little.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from elastic_resume.rendezvous.link import NEVER, Link

KEPT = 32
LEFT_OUT = 2


def own_s() -> float:
    """How long this thread has run, and waited for a processor, in seconds; 0 where no kernel says it."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            return sum(map(int, file.read().split()[:2])) / 1e9
    except (OSError, ValueError):
        return 0.0


class Beats:
    """Those of one agent."""

    def __init__(self, own_s: Callable[[], float] = own_s) -> None:
        """``own_s`` gives what the thread that notes them has taken itself."""
        self.round_s: float | None = None
        """What the slowest of those that count took; None until there are `KEPT`, and for who leads."""
        self._link: Link | None = None
        self._echoed_at = NEVER
        self._own_s_of = own_s
        self._own_s = 0.0
        self._newest: deque[float] = deque(maxlen=KEPT)

    def note(self, link: Link | None) -> None:
        """Look at the link to the leader, after each event; None: there is none."""
        if link is not self._link:
            self._link, self._echoed_at, self.round_s = link, NEVER, None
            self._newest.clear()
            self._own_s = self._own_s_of()
        if link is None or link.echoed_at == self._echoed_at:
            return
        self._echoed_at = link.echoed_at
        before, self._own_s = self._own_s, self._own_s_of()
        self._newest.append(max(0.0, link.heard_at - link.echoed_at - (self._own_s - before)))
        if len(self._newest) == KEPT:
            self.round_s = round(sorted(self._newest)[-1 - LEFT_OUT], 4)
