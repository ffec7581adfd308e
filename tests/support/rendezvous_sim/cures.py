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
from elastic_resume.rendezvous.core.messages import LeaderAnnouncement
from elastic_resume.rendezvous.core.peers import Link
from elastic_resume.rendezvous.core.state import NodeState
from tests.support.rendezvous_sim.node import SimulatedNode

Patch = tuple[type, str, Any]
"""A class, the name of one of its attributes, and what that is to be."""
HASTY_TIMEOUT_S = 0.2
"""A broken connection that was not made again for so long used to count as a death."""


def _count_from_reading(self: Follower) -> float:
    delay_s = self.link.last_received_at - self.link.acked_sent_at
    return _include_spares(self) + delay_s


def _trust_any_leader(self: Follower) -> float:
    return self.link.acked_sent_at + self.state.settings.lease_s


def _include_spares(self: Follower) -> float:
    return min(self.link.leader_lease_until, self.link.acked_sent_at + self.state.settings.lease_s)


def _no_grace_when_turning_early() -> list[Patch]:
    over = Follower._end_following

    def leave(self: Follower, reason: str, *, dead: bool = False, unreachable: bool = False) -> None:
        before = self.state.grace_until
        over(self, reason, dead=dead, unreachable=unreachable)
        if not dead:
            self.state.grace_until = before

    return [(Follower, "_end_following", leave), *_no_grace_when_stepping_down()]


def _ignore_announcements(self: NodeState, claim: LeaderAnnouncement) -> None:
    del self, claim


def _trust_every_refusal(self: NodeState, link: Link, *, refused: bool) -> bool:
    del self, link
    return refused


def _hasty_follower() -> list[Patch]:
    lost, advance = Follower.handle_disconnected, Follower.advance
    broken: dict[Follower, tuple[float, bool]] = {}

    def note(self: Follower, link: Link, *, refused: bool) -> None:
        if link is self.link:
            broken[self] = self.state.now, self.state.has_recent_ack(link)
        lost(self, link, refused=refused)

    def give_up(self: Follower) -> None:
        since, fresh = broken.get(self, (self.state.now, False))
        if self.is_disconnected and not self.has_ended and self.state.now >= since + HASTY_TIMEOUT_S:
            self._end_following(f"{self.leader}, which led, died", dead=fresh, unreachable=not fresh)
        advance(self)

    return [(Follower, "handle_disconnected", note), (Follower, "advance", give_up)]


def _hasty_leader() -> list[Patch]:
    lost, advance = Leader.handle_disconnected, Leader.advance
    fresh: dict[int, bool] = {}

    def note(self: Leader, link: Link, *, refused: bool) -> None:
        fresh[id(link)] = self.state.has_recent_ack(link)
        lost(self, link, refused=refused)

    def give_up(self: Leader) -> None:
        for part in list(self.peers.disconnected.values()):
            if part.disconnected_at is not None and self.state.now >= part.disconnected_at + HASTY_TIMEOUT_S:
                self._remove_peer(part, f"{part.incarnation} died", dead=fresh.get(id(part.link), False))
        advance(self)

    return [(Leader, "handle_disconnected", note), (Leader, "advance", give_up)]


def _no_grace_when_stepping_down() -> list[Patch]:
    step_down = Leader._step_down

    def yield_at_once(self: Leader) -> None:
        before = self.state.grace_until
        step_down(self)
        self.state.grace_until = before
        self.state.pending_closes.clear()

    return [(Leader, "_step_down", yield_at_once)]


MUTATIONS: dict[str, Callable[[], list[Patch]]] = {
    # A late reader counts `current_until` from when it read the leader's message, not from sending.
    "sent-not-read": lambda: [(Follower, "compute_view_current_until", _count_from_reading)],
    # `current_until` ignores whether the dead leader had a quorum.
    "leader-had-a-quorum": lambda: [(Follower, "compute_view_current_until", _trust_any_leader)],
    # A spare concludes that no world began without it, though nobody waits for a spare.
    "a-spare-is-not-asked": lambda: [(Follower, "compute_view_current_until", _include_spares)],
    # A node that leaves its leader early does not wait for the leases of the nodes it left.
    "grace-for-those-left-behind": _no_grace_when_turning_early,
    # A node does not note the generations in a leader's claim, and uses such a number again.
    "claims-tell-generations": lambda: [(NodeState, "record_announced_generation", _ignore_announcements)],
    # A refused call proves a death however long ago the peer acknowledged a message.
    "refusal-in-time": lambda: [(NodeState, "proves_death", _trust_every_refusal)],
    # A follower takes its leader for dead when the connection stays closed for `IMPATIENT_S`.
    "reset-is-no-death-to-a-follower": _hasty_follower,
    # A leader takes a follower for dead when the connection stays closed for `IMPATIENT_S`.
    "reset-is-no-death-to-a-leader": _hasty_leader,
    # The clock of leases stands still while a machine is suspended.
    "clock-goes-on": lambda: [(SimulatedNode, "clock_stops_in_suspend", True)],
}
"""The patches that undo a bug fix, by the name that `--break` takes."""


@contextlib.contextmanager
def undo_fix(fix_name: str) -> Iterator[None]:
    """Undo one bug fix; an empty name leaves the core as it is."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in MUTATIONS[fix_name]() if fix_name else []:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield
