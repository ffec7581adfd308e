"""How a leader makes a world: who is waited for, the proposal, its acknowledgements, the beginning.

A world forms when every live follower has joined, they are enough and have a quorum, and nobody is worth
waiting for: newcomers at a first start for the settle time, survivors at a restart until they are back or
silent, and worlds elsewhere until their last lease has surely ended.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_resume.rendezvous.core.messages import InstallView, JoinSpec, ProposeView
from elastic_resume.rendezvous.core.peers import PeerTable, rank_members
from elastic_resume.rendezvous.core.quorum import (
    Incarnation,
    View,
    find_missing_quorum,
    format_node_names,
    has_quorum,
)
from elastic_resume.rendezvous.core.state import NEVER, NodeState

REPORT_WAIT_AFTER_S = 1.0
"""A wait is worth telling when it lasts so long; most last for milliseconds."""
MANY_FOLLOWERS = 64
EVALUATION_S_PER_FOLLOWER = 2e-5
"""With a thousand followers, look every 20 ms at most: each look takes a millisecond."""
MAX_ACK_NODE_TIMEOUTS = 2
"""A live follower that has not acknowledged for so many node timeouts (a stuck disk) is sent away."""


@dataclass(slots=True)
class PendingProposal:
    """A proposal under way."""

    view: View
    joins: dict[Incarnation, JoinSpec]
    proposed_at: float
    version: int
    awaiting_ack: set[Incarnation]
    present: frozenset[Incarnation]


class ViewChange:
    """Forms one world after another for a leader."""

    def __init__(self, state: NodeState, peers: PeerTable) -> None:
        self.state = state
        self.peers = peers
        self.pending: PendingProposal | None = None
        self.started_at = state.now
        self.last_arrival_at = state.now
        self.evaluate_at = state.now
        self._evaluated_state = state.quorum_state
        self.wait_reason = "nobody has joined yet"
        self.scale_up_at = float("inf")
        """When newcomers to the running world are due to be taken in."""
        self.reply_deadlines: dict[int, float] = {}
        """Until when to wait for the first reply of a node that was welcomed on a connection."""
        self.waiting_since = state.now
        self.reported_reason = ""
        """What all followers were told that we wait for."""

    def reevaluate(self) -> None:
        """Something changed: look again. A look at many takes long, so at first more of them may come."""
        members = len(self.peers.by_incarnation)
        pause_s = members * EVALUATION_S_PER_FOLLOWER if members >= MANY_FOLLOWERS else 0.0
        self.evaluate_at = min(self.evaluate_at, self.state.now + pause_s) if pause_s else self.state.now

    def handle_join(self, incarnation: Incarnation, running_view: View | None) -> None:
        """Somebody joined; another newcomer may follow."""
        last = self.state.quorum_state.installed
        if last is None or last.rank(incarnation) is None:
            self.last_arrival_at = self.state.now
        if (
            running_view
            and len(running_view.members) < self.state.settings.max_nodes
            and running_view.rank(incarnation) is None
        ):
            self.scale_up_at = self.state.now + self.state.settings.scale_up_delay_s
        self.reevaluate()

    def handle_disconnected(self, incarnation: Incarnation) -> None:
        """A link broke: what was proposed to its peer will not be acknowledged by all."""
        if self.pending and incarnation in self.pending.present:
            self.abort(f"{incarnation} was lost before it acknowledged")
        self.reevaluate()

    def handle_ack(self, incarnation: Incarnation, generation: int) -> None:
        """The proposal is durable there."""
        if self.pending and self.pending.view.generation == generation:
            self.pending.awaiting_ack.discard(incarnation)

    def abort(self, reason: str) -> None:
        """Drop the proposal: it can never begin now, and whoever hears that need not ask its members."""
        if self.pending is None:
            return
        body, world = self.state, self.pending.view
        body.emit_event(
            "proposal-aborted", f"generation {world.generation} was proposed and dropped: {reason}"
        )
        self.pending = None
        body.set_quorum_state(body.quorum_state.with_aborted(world))
        self.reevaluate()

    def advance(self) -> tuple[View, InstallView] | None:
        """Propose a world when it is time; return one that begins now."""
        if (
            self.state.quorum_state is not self._evaluated_state
        ):  # whoever learnt it: a refused call proves a death, say
            self._evaluated_state = self.state.quorum_state
            self.reevaluate()
        if self.pending is None and self.state.now >= self.evaluate_at:
            self.evaluate_at = float("inf")
            joins = self._collect_joins()
            if joins:
                self._propose(joins)
        return self._install() if self.pending else None

    def _set_wait_reason(self, reason: str, until: float = float("inf")) -> dict[Incarnation, JoinSpec]:
        """Say whom or what we wait for; so far nobody forms a world."""
        self.evaluate_at = until
        if reason != self.wait_reason:
            self.wait_reason, self.waiting_since = reason, self.state.now
        return {}

    def take_wait_reason(self) -> str:
        """Return what we wait for if that lasts and has not been told."""
        if self.pending or self.reported_reason == self.wait_reason or self.state.now < self._report_due_at():
            return ""
        self.reported_reason = self.wait_reason
        return self.reported_reason

    def _report_due_at(self) -> float:
        return self.waiting_since + REPORT_WAIT_AFTER_S

    def _collect_joins(self) -> dict[Incarnation, JoinSpec]:
        """Return those who want to be in the next world; nobody when it cannot form yet."""
        body, settings = self.state, self.state.settings
        if body.join is None and not body.finished_generation:
            return self._set_wait_reason("this node's workers have not stopped")
        if self.peers.disconnected:
            return self._set_wait_reason("a link has just broken")
        answer_by = max(self.reply_deadlines.values(), default=NEVER)
        if body.now < answer_by:
            return self._set_wait_reason("waiting for the first reply of a node that was welcomed", answer_by)
        for part in self.peers.by_incarnation.values():
            if not part.has_stopped_workers:
                return self._set_wait_reason(f"the workers of {part.incarnation} have not stopped")
        joins = {part.incarnation: part.join for part in self.peers.by_incarnation.values() if part.join}
        if body.join:
            joins[body.incarnation] = body.join
        through = len(self.peers.by_incarnation) + 1 - len(joins)
        if not joins or (len(joins) < settings.min_nodes and not through):
            return self._set_wait_reason(f"{len(joins)} of at least {settings.min_nodes} nodes have joined")
        present = {body.incarnation, *self.peers.by_incarnation}
        lack = find_missing_quorum(present, body.quorum_state, settings.rules)
        if lack:
            absent = "" if lack.generation else f"; not here: {body.format_absent_candidates(present)}"
            return self._set_wait_reason(f"{lack}{absent}")
        until = self._compute_wait_deadline(present, full=len(joins) >= settings.max_nodes)
        if body.now < until:
            return self._set_wait_reason(self._describe_wait(joins, present), until)
        return joins

    def _describe_wait(self, joins: dict[Incarnation, JoinSpec], present: set[Incarnation]) -> str:
        rivals = self.state.find_absent_members(present)
        if rivals:
            return f"{format_node_names(rivals)} may be running yet: waiting until their leases have surely ended"
        settings = self.state.settings
        return (
            f"{len(joins)} of at most {settings.max_nodes} nodes have joined: waiting until nobody new has "
            f"come for {settings.last_call_s:g} s"
        )

    def _compute_wait_deadline(self, present: set[Incarnation], *, full: bool) -> float:
        """Return until when somebody may come, or run workers, whom we do not see."""
        body, settings, last = self.state, self.state.settings, self.state.quorum_state.installed
        until = NEVER
        rivals = body.find_absent_members(present)
        if rivals:
            until = body.grace_until
            if not rivals <= body.unreachable:
                until = max(until, self.started_at + settings.node_timeout_s)
        if last is None and not body.quorum_state.proposals and settings.max_nodes > 1:
            # Where disks were lost a world may run of which nobody here knows. Its leader calls soon.
            until = max(until, self.started_at + 2 * settings.announce_interval_s)
        survivors = last is not None and any(one in present for one in body.quorum_state.live_members(last))
        if not survivors and not full:
            until = max(until, self.last_arrival_at + settings.last_call_s)
        return until

    def _propose(self, joins: dict[Incarnation, JoinSpec]) -> None:
        body = self.state
        generation = 1 + max(body.max_generation, body.quorum_state.newest_generation)
        members = rank_members(body.quorum_state.voting_views, joins, body.settings.max_nodes)
        world = View(generation, members, body.incarnation)
        before = body.quorum_state
        body.set_quorum_state(before.with_proposal(world))
        others = {part.incarnation for part in self.peers.by_incarnation.values()}
        self.pending = PendingProposal(
            world,
            joins,
            body.now,
            body.version,
            set(others),
            frozenset({body.incarnation, *others}),
        )
        message = ProposeView(world, before)
        for part in self.peers.by_incarnation.values():
            body.send(part.link, message)

    def _install(self) -> tuple[View, InstallView] | None:
        body, forming = self.state, self.pending
        if forming is None:
            return None
        ready = (
            not forming.awaiting_ack and body.durable_version >= forming.version and not body.pending_closes
        )
        if not ready and body.settings.rules.two_phase:
            self._detach_stalled_members(forming)
            return None
        if not self._still_has_quorum(forming):
            self.abort("its members may have turned to another leader")
            return None
        self.pending = None
        self.reported_reason = self.wait_reason = ""
        stores = tuple(forming.joins[member].num_workers for member in forming.view.members)
        store = forming.joins[forming.view.members[0]].store_address
        before = body.quorum_state.installed
        return forming.view, InstallView(
            forming.view.generation,
            store,
            stores,
            max(join.newest_step for join in forming.joins.values()),
            body.failure_log.get_failures(before.generation) if before else (),
        )

    def _still_has_quorum(self, pending: PendingProposal) -> bool:
        """Whether those who acknowledged surely follow us still, and know of nothing that forbids this."""
        if not self.state.settings.rules.two_phase:
            return True
        fresh = {self.state.incarnation} | {
            part.incarnation
            for part in self.peers.by_incarnation.values()
            if part.incarnation in pending.present and self.state.has_recent_ack(part.link)
        }
        return has_quorum(fresh, self.state.quorum_state, self.state.settings.rules)

    def _detach_stalled_members(self, pending: PendingProposal) -> None:
        limit = MAX_ACK_NODE_TIMEOUTS * self.state.settings.node_timeout_s
        if self.state.now < pending.proposed_at + limit:
            return
        self.abort(f"{len(pending.awaiting_ack)} did not acknowledge within {limit:g} s")
        for part in self.peers:  # in its order: that of a set differs from process to process
            if part.incarnation in pending.awaiting_ack:
                self.peers.remove(part.incarnation)
                self.state.redirect(part.link, "")

    # The running world.

    def compute_lease_until(self) -> float:
        """Return until when enough members surely follow us for no other world to have a quorum.

        A member turns away a node timeout after it *received* our last message, also if its link breaks. We
        count from when we *sent* the last message that it has seen, and keep `drift` back.
        """
        body = self.state
        ends = sorted(
            ((part.link.acked_sent_at + body.settings.lease_s, part.incarnation) for part in self.peers),
            key=lambda end: -end[0],
        )
        low, high = 0, len(ends)
        here = [who for _, who in ends]
        if not has_quorum({body.incarnation, *here}, body.quorum_state, body.settings.rules):
            return NEVER
        while low < high:
            middle = (low + high) // 2
            if has_quorum({body.incarnation, *here[:middle]}, body.quorum_state, body.settings.rules):
                high = middle
            else:
                low = middle + 1
        return ends[low - 1][0] if low else body.now + body.settings.lease_s

    def handle_view_installed(self, view: View) -> None:
        """A world runs: those who joined too late for it want another, if it has room."""
        room = len(view.members) < self.state.settings.max_nodes
        members = frozenset(view.members)
        late = any(part.join and part.incarnation not in members for part in self.peers)
        self.scale_up_at = (
            self.last_arrival_at + self.state.settings.scale_up_delay_s if late and room else float("inf")
        )

    def next_deadline(self) -> float:
        """When to look again."""
        if self.pending:
            return self.pending.proposed_at + MAX_ACK_NODE_TIMEOUTS * self.state.settings.node_timeout_s
        return (
            self.evaluate_at
            if self.reported_reason == self.wait_reason
            else min(self.evaluate_at, self._report_due_at())
        )
