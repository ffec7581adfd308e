"""Mutation tests of the simulator: undo one bug fix at a time and check that a checker reports it.

Each entry of `CURES` restores one former bug by patching one or two methods of the core inside a ``with``
block. The core itself has no switch for any of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from elastic_resume.rendezvous.core.follower import Follower
from elastic_resume.rendezvous.core.leader import Leader
from elastic_resume.rendezvous.core.messages import Claim
from elastic_resume.rendezvous.core.state import Body, Link
from tests.support.rendezvous_sim.node import Node

Patch = tuple[type, str, Any]
"""A class, the name of one of its attributes, and what that is to be."""
IMPATIENT_S = 0.2
"""A broken connection that was not made again for so long used to count as a death."""


def _count_from_reading(self: Body, link: Link) -> float:
    late_s = link.heard_at - link.echoed_at
    return min(link.lease_end, link.echoed_at + self.settings.lease_s) + late_s


def _trust_any_leader(self: Body, link: Link) -> float:
    return link.echoed_at + self.settings.lease_s


def _spares_too(self: Body, link: Link) -> float:
    return min(link.lease_end, link.echoed_at + self.settings.lease_s)


def _no_grace_when_turning_early() -> list[Patch]:
    over = Follower._over

    def leave(self: Follower, reason: str, *, gone: bool = False, silent: bool = False) -> None:
        before = self.body.grace_until
        over(self, reason, gone=gone, silent=silent)
        if not gone:
            self.body.grace_until = before

    return [(Follower, "_over", leave), *_no_grace_when_stepping_down()]


def _ignore_claims(self: Body, claim: Claim) -> None:
    del self, claim


def _believe_every_refusal(self: Body, link: Link, *, refused: bool) -> bool:
    del self, link
    return refused


def _hasty_follower() -> list[Patch]:
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

    return [(Follower, "lost", note), (Follower, "advance", give_up)]


def _hasty_leader() -> list[Patch]:
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

    return [(Leader, "lost", note), (Leader, "advance", give_up)]


def _no_grace_when_stepping_down() -> list[Patch]:
    step_down = Leader._step_down

    def yield_at_once(self: Leader) -> None:
        before = self.body.grace_until
        step_down(self)
        self.body.grace_until = before
        self.body.witnesses.clear()

    return [(Leader, "_step_down", yield_at_once)]


CURES: dict[str, Callable[[], list[Patch]]] = {
    # A late reader counts `current_until` from when it read the leader's message, not from sending.
    "sent-not-read": lambda: [(Body, "current_for", _count_from_reading)],
    # `current_until` ignores whether the dead leader had a quorum.
    "leader-had-a-quorum": lambda: [(Body, "current_for", _trust_any_leader)],
    # A spare concludes that no world began without it, though nobody waits for a spare.
    "a-spare-is-not-asked": lambda: [(Body, "current_for", _spares_too)],
    # A node that leaves its leader early does not wait for the leases of the nodes it left.
    "grace-for-those-left-behind": _no_grace_when_turning_early,
    # A node does not note the generations in a leader's claim, and uses such a number again.
    "claims-tell-generations": lambda: [(Body, "hear_claim", _ignore_claims)],
    # A refused call proves a death however long ago the peer acknowledged a message.
    "refusal-in-time": lambda: [(Body, "proves_end", _believe_every_refusal)],
    # A follower takes its leader for dead when the connection stays closed for `IMPATIENT_S`.
    "reset-is-no-death-to-a-follower": _hasty_follower,
    # A leader takes a follower for dead when the connection stays closed for `IMPATIENT_S`.
    "reset-is-no-death-to-a-leader": _hasty_leader,
    # The clock of leases stands still while a machine is suspended.
    "clock-goes-on": lambda: [(Node, "clock_stops", True)],
}
"""The patches that undo a bug fix, by the name that `--break` takes."""


@contextlib.contextmanager
def without(cure: str) -> Iterator[None]:
    """Undo one bug fix; an empty name leaves the core as it is."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in CURES[cure]() if cure else []:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield
