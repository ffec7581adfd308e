"""Mutation tests of the simulator: break one quorum rule or undo one bug fix, and check that it is found.

Each entry of `MUTATIONS` patches a few functions of the core inside a ``with`` block. The core itself has no
switch for any of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

from elastic_resume.rendezvous.core import view_change
from elastic_resume.rendezvous.core.follower import Follower
from elastic_resume.rendezvous.core.leader import Leader
from elastic_resume.rendezvous.core.messages import Header, InstallView, LeaderAnnouncement
from elastic_resume.rendezvous.core.peers import Link
from elastic_resume.rendezvous.core.quorum import Incarnation, MissingQuorum, QuorumState, find_missing_quorum
from elastic_resume.rendezvous.core.state import NodeState
from tests.support.rendezvous_sim.simulated_node import SimulatedNode

Patch = tuple[object, str, Any]
"""A class or module, the name of one of its attributes, and the attribute's value under the mutation."""
RECONNECT_LIMIT_S = 0.2
"""Formerly a connection that stayed broken for so long proved a death."""


def _patch_quorum(change: Callable[[set[Incarnation], QuorumState], QuorumState]) -> list[Patch]:
    """Change the nodes and the knowledge by which a leader decides about a quorum."""

    def find_missing(present: Iterable[Incarnation], known: QuorumState) -> MissingQuorum | None:
        nodes = set(present)
        return find_missing_quorum(nodes, change(nodes, known))

    def has_quorum(present: Iterable[Incarnation], known: QuorumState) -> bool:
        return find_missing(present, known) is None

    return [(view_change, "find_missing_quorum", find_missing), (view_change, "has_quorum", has_quorum)]


def _let_nodes_vote(present: set[Incarnation], known: QuorumState) -> QuorumState:
    nodes = {member.node for member in present}
    present.update(member for view in known.voting_views for member in view.members if member.node in nodes)
    return known


def _install_without_acknowledgement() -> list[Patch]:
    install_view = Follower._install_view

    def install_any(self: Follower, header: Header, message: InstallView) -> None:
        proposal = self.acknowledged_proposal or self.proposal
        if proposal and proposal.generation == message.generation:
            self.acknowledged_proposal = proposal
        install_view(self, header, message)

    return [
        (Follower, "_install_view", install_any),
        (view_change.ViewChange, "_may_install", lambda *_: True),
        (view_change.ViewChange, "_still_has_quorum", lambda *_: True),
    ]


def _merge_deaths_alone() -> list[Patch]:
    merge = NodeState.merge_quorum_state

    def merge_deaths(self: NodeState, known: QuorumState, max_generation: int = 0) -> None:
        merge(self, self.quorum_state.with_dead(known.dead), max(max_generation, known.newest_generation))

    return [(NodeState, "merge_quorum_state", merge_deaths)]


def _count_from_receipt(self: Follower) -> float:
    delay_s = self.link.last_received_at - self.link.acked_sent_at
    return min(self.link.leader_lease_until, self.link.acked_sent_at + self.state.settings.lease_s) + delay_s


def _trust_any_leader(self: Follower) -> float:
    return self.link.acked_sent_at + self.state.settings.lease_s


def _no_grace_after_leaving() -> list[Patch]:
    end_following = Follower._end_following

    def end_without_grace(
        self: Follower, reason: str, *, dead: bool = False, unreachable: bool = False
    ) -> None:
        before = self.state.grace_until
        end_following(self, reason, dead=dead, unreachable=unreachable)
        if not dead:
            self.state.grace_until = before

    step_down = Leader._step_down

    def step_down_without_grace(self: Leader) -> None:
        before = self.state.grace_until
        step_down(self)
        self.state.grace_until = before
        self.state.pending_closes.clear()

    return [(Follower, "_end_following", end_without_grace), (Leader, "_step_down", step_down_without_grace)]


def _ignore_announcement(self: NodeState, announcement: LeaderAnnouncement) -> None:
    del self, announcement


def _trust_every_refusal(self: NodeState, link: Link, *, refused: bool) -> bool:
    del self, link
    return refused


def _reset_kills_leader() -> list[Patch]:
    handle_disconnected, advance = Follower.handle_disconnected, Follower.advance
    broken: dict[Follower, tuple[float, bool]] = {}

    def record(self: Follower, link: Link, *, refused: bool) -> None:
        if link is self.link:
            broken[self] = self.state.now, self.state.has_recent_ack(link)
        handle_disconnected(self, link, refused=refused)

    def give_up(self: Follower) -> None:
        since, dead = broken.get(self, (self.state.now, False))
        if self.is_disconnected and not self.has_ended and self.state.now >= since + RECONNECT_LIMIT_S:
            self._end_following(f"the leader {self.leader} died", dead=dead, unreachable=not dead)
        advance(self)

    return [(Follower, "handle_disconnected", record), (Follower, "advance", give_up)]


def _reset_kills_follower() -> list[Patch]:
    handle_disconnected, advance = Leader.handle_disconnected, Leader.advance
    dead: dict[int, bool] = {}

    def record(self: Leader, link: Link, *, refused: bool) -> None:
        dead[id(link)] = self.state.has_recent_ack(link)
        handle_disconnected(self, link, refused=refused)

    def give_up(self: Leader) -> None:
        for peer in list(self.peers.disconnected.values()):
            since = peer.disconnected_at
            if since is not None and self.state.now >= since + RECONNECT_LIMIT_S:
                self._remove_peer(peer, f"{peer.incarnation} died", dead=dead.get(id(peer.link), False))
        advance(self)

    return [(Leader, "handle_disconnected", record), (Leader, "advance", give_up)]


BROKEN_RULES: dict[str, Callable[[], list[Patch]]] = {
    # Rule 1: a new process votes in the place of the former one.
    "incarnations": lambda: [
        *_patch_quorum(_let_nodes_vote),
        (NodeState, "mark_former_dead", lambda *_: None),
    ],
    # Rule 2: a view is installed before its members have stored it.
    "two-phase": _install_without_acknowledgement,
    # Rule 3: only the newest installed view has votes.
    "later-proposals": lambda: _patch_quorum(lambda _, known: replace(known, proposals=())),
    # Rule 4: a death is passed on without what the dead node knew.
    "deaths-carry-state": _merge_deaths_alone,
}
BUGS: dict[str, Callable[[], list[Patch]]] = {
    # `view_current_until` counts from when this node read the leader's last message, not from sending.
    "currency-from-receipt": lambda: [(Follower, "compute_view_current_until", _count_from_receipt)],
    # `view_current_until` ignores whether the dead leader had a quorum.
    "currency-without-quorum": lambda: [(Follower, "compute_view_current_until", _trust_any_leader)],
    # A spare concludes that no view was installed without it, though no leader waits for a spare.
    "spares-prove-deaths": lambda: [(NodeState, "is_spare", False)],
    # A node that leaves its leader early does not wait for the leases of the nodes it left.
    "no-grace-after-leaving": _no_grace_after_leaving,
    # A node does not note the generations in a leader's announcement, and reuses one.
    "announcements-ignored": lambda: [(NodeState, "record_announced_generation", _ignore_announcement)],
    # A refused connection proves a death however long ago the peer acknowledged a message.
    "late-refusal-proves-death": lambda: [(NodeState, "proves_death", _trust_every_refusal)],
    # A follower counts its leader as dead when the connection stays broken for `RECONNECT_LIMIT_S`.
    "reset-kills-leader": _reset_kills_leader,
    # A leader counts a follower as dead when the connection stays broken for `RECONNECT_LIMIT_S`.
    "reset-kills-follower": _reset_kills_follower,
    # The clock of leases stands still while a machine is suspended.
    "clock-stops-in-suspend": lambda: [(SimulatedNode, "clock_stops_in_suspend", True)],
}
MUTATIONS = BROKEN_RULES | BUGS
"""The patches that break a rule or undo a bug fix, by the name that `--break` takes."""


@contextlib.contextmanager
def apply_mutation(name: str) -> Iterator[None]:
    """Apply one mutation; an empty name leaves the core as it is."""
    with contextlib.ExitStack() as stack:
        for owner, attribute, value in MUTATIONS[name]() if name else []:
            stack.enter_context(mock.patch.object(owner, attribute, value))
        yield
