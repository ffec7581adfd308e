"""Decisions of the core taken back one at a time, to see that the simulator's checkers notice.

Each entry of `CURES` puts back what the core once did wrong, as a patch of one method or two. The core has no
switch for any of them: it is patched for as long as a block lasts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from elastic_resume.rendezvous.body import Body
from elastic_resume.rendezvous.following import Follower
from elastic_resume.rendezvous.leading import Leader
from elastic_resume.rendezvous.link import Link
from elastic_resume.rendezvous.messages import Claim
from elastic_resume.rendezvous.simnode import Node

IMPATIENT_S = 0.2
"""A broken connection that was not made again for so long used to count as a death."""


def _count_from_reading(self: Body, link: Link) -> float:
    late_s = link.heard_at - link.echoed_at
    return min(link.lease_end, link.echoed_at + self.settings.lease_s) + late_s


def _trust_any_leader(self: Body, link: Link) -> float:
    return link.echoed_at + self.settings.lease_s


def _ignore_claims(self: Body, claim: Claim) -> None:
    del self, claim


def _believe_every_refusal(self: Body, link: Link, *, refused: bool) -> bool:
    del self, link
    return refused


def _hasty_follower() -> dict[str, Callable[..., Any]]:
    lost, advance = Follower.lost, Follower.advance
    broken: dict[Follower, tuple[float, bool]] = {}

    def note(self: Follower, link: Link, *, refused: bool) -> None:
        if link is self.link:
            broken[self] = self.body.now, self.body.is_fresh(link)
        lost(self, link, refused=refused)

    def give_up(self: Follower) -> None:
        since, fresh = broken.get(self, (self.body.now, False))
        if self.broken and not self.over and self.body.now >= since + IMPATIENT_S:
            self._over(f"{self.leader}, which led, died", gone=fresh, silent=not fresh)
        advance(self)

    return {"lost": note, "advance": give_up}


def _hasty_leader() -> dict[str, Callable[..., Any]]:
    lost, advance = Leader.lost, Leader.advance
    fresh: dict[int, bool] = {}

    def note(self: Leader, link: Link, *, refused: bool) -> None:
        fresh[id(link)] = self.body.is_fresh(link)
        lost(self, link, refused=refused)

    def give_up(self: Leader) -> None:
        for part in list(self.roster.broken.values()):
            if part.lost_at is not None and self.body.now >= part.lost_at + IMPATIENT_S:
                self._lose(part, f"{part.who} died", gone=fresh.get(id(part.link), False))
        advance(self)

    return {"lost": note, "advance": give_up}


CURES: dict[str, tuple[type, Callable[[], dict[str, Any]]]] = {
    "sent-not-read": (Body, lambda: {"current_for": _count_from_reading}),
    "leader-had-a-quorum": (Body, lambda: {"current_for": _trust_any_leader}),
    "claims-tell-generations": (Body, lambda: {"hear_claim": _ignore_claims}),
    "refusal-in-time": (Body, lambda: {"proves_end": _believe_every_refusal}),
    "reset-is-no-death-to-a-follower": (Follower, _hasty_follower),
    "reset-is-no-death-to-a-leader": (Leader, _hasty_leader),
    "clock-goes-on": (Node, lambda: {"clock_stops": True}),
}
"""What to patch, by the name that `--break` takes: a class and its former attributes."""


@contextlib.contextmanager
def without(cure: str) -> Iterator[None]:
    """Take one cure out; an empty name leaves the core as it is."""
    with contextlib.ExitStack() as stack:
        if cure:
            owner, former = CURES[cure]
            for name, value in former().items():
                stack.enter_context(mock.patch.object(owner, name, value))
        yield
