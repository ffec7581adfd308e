"""The leader's view change: decide when to propose a view, collect acknowledgements, and install it.

::

    waiting ── joined, quorum, no lease elsewhere ──▶ proposed ── all acknowledged, durable ──▶ running
      ▲  ▲                                               │                                        │
      │  └── abort: a follower is lost or does not ack ──┘                                        │
      └── end_view: a member is lost, its workers failed, or newcomers are here ──────────────────┘

A view change waits for followers of the last view until they have stopped their workers, and for absent
members until their leases have expired. At the first start it waits until no newcomer has joined for the
last-call timeout.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from elastic_resume.rendezvous.core.messages import Hello, InstallView, JoinSpec, ProposeView
from elastic_resume.rendezvous.core.peers import NEVER, PeerTable
from elastic_resume.rendezvous.core.quorum import (
    Incarnation,
    View,
    find_missing_quorum,
    format_node_names,
    has_quorum,
)
from elastic_resume.rendezvous.core.state import NodeState

REPORT_WAIT_AFTER_S = 1.0
"""A wait is reported when it lasts so long; most waits last milliseconds."""
MANY_FOLLOWERS = 64
EVALUATION_S_PER_FOLLOWER = 2e-5
"""With 1,000 followers, evaluate every 20 ms at most, because each evaluation takes a millisecond."""
MAX_ACK_NODE_TIMEOUTS = 2
"""A follower that has not acknowledged for so many node timeouts (a stuck disk) is detached."""


@dataclass(frozen=True, slots=True)
class PendingWelcome:
    """A node that was welcomed and has not replied yet."""

    hello: Hello
    resumed: bool
    """The welcome told it to keep its workers running."""
    reply_until: float
    """Until when a view change waits for the reply."""


@dataclass(slots=True)
class PendingProposal:
    """A proposal that is not installed yet."""

    view: View
    joins: dict[Incarnation, JoinSpec]
    proposed_at: float
    version: int
    awaiting_ack: set[Incarnation]
    present: frozenset[Incarnation]


class ViewChange:
    """Forms one view after another for a leader."""

    def __init__(
        self, state: NodeState, peers: PeerTable, pending_welcomes: Mapping[int, PendingWelcome]
    ) -> None:
        self.state = state
        self.peers = peers
        self.pending_welcomes = pending_welcomes
        self.pending: PendingProposal | None = None
        self.started_at = state.now
        self.last_arrival_at = state.now
        self.evaluate_at = state.now
        self._evaluated_state = state.quorum_state
        self._followers_for_quorum = 0
        """How many followers had a quorum when the lease was last computed."""
        self.wait_reason = "no node has joined yet"
        self.scale_up_at = float("inf")
        """When to end the running view to admit newcomers."""
        self.waiting_since = state.now
        self.reported_reason = ""
        """The wait reason that all followers have received."""

    def reevaluate(self) -> None:
        """Schedule an evaluation; with many followers wait a moment for further changes."""
        followers = len(self.peers.by_incarnation)
        if followers >= MANY_FOLLOWERS:
            delay_s = followers * EVALUATION_S_PER_FOLLOWER
            self.evaluate_at = min(self.evaluate_at, self.state.now + delay_s)
        else:
            self.evaluate_at = self.state.now

    def handle_join(self, incarnation: Incarnation, join: JoinSpec, running_view: View | None) -> None:
        """Note that a node has joined; another newcomer may follow it."""
        last = self.state.quorum_state.installed
        if last is None or last.rank(incarnation) is None:
            self.last_arrival_at = self.state.now
        if not join.is_importing:
            self.handle_imports_finished(incarnation, running_view)
        self.reevaluate()

    def handle_imports_finished(self, incarnation: Incarnation, running_view: View | None) -> None:
        """Schedule the next view if a newcomer is ready that the running view has room for."""
        if (
            running_view
            and len(running_view.members) < self.state.settings.max_nodes
            and running_view.rank(incarnation) is None
        ):
            delay_s = self.state.settings.scale_up_delay_s
            self.scale_up_at = max(self.state.now, self.last_arrival_at + delay_s)

    def handle_disconnected(self, incarnation: Incarnation) -> None:
        """Abort the proposal that a disconnected follower can no longer acknowledge."""
        if self.pending and incarnation in self.pending.present:
            self.abort(f"{incarnation} was lost before it acknowledged")
        self.reevaluate()

    def handle_ack(self, incarnation: Incarnation, generation: int) -> None:
        """Note that a follower has stored the proposal."""
        if self.pending and self.pending.view.generation == generation:
            self.pending.awaiting_ack.discard(incarnation)

    def abort(self, reason: str) -> None:
        """Abort the proposal. It can never be installed, so its members' votes are no longer needed."""
        if self.pending is None:
            return
        state, view = self.state, self.pending.view
        state.emit_event(
            "proposal-aborted", f"the proposal of generation {view.generation} is aborted: {reason}"
        )
        self.pending = None
        state.set_quorum_state(state.quorum_state.with_aborted(view))
        self.reevaluate()

    def advance(self) -> tuple[View, InstallView] | None:
        """Propose a view when it is time; return a view to be installed now."""
        if self.state.quorum_state is not self._evaluated_state:  # a refused connection may prove a death
            self._evaluated_state = self.state.quorum_state
            self.reevaluate()
        if self.pending is None and self.state.now >= self.evaluate_at:
            self.evaluate_at = float("inf")
            joins = self._collect_joins()
            if joins:
                self._propose(joins)
        return self._install() if self.pending else None

    # Waiting.

    def _set_wait_reason(self, reason: str, until: float = float("inf")) -> dict[Incarnation, JoinSpec]:
        """Note why no view can be proposed; return no joins."""
        self.evaluate_at = until
        if reason != self.wait_reason:
            self.wait_reason, self.waiting_since = reason, self.state.now
        return {}

    def take_wait_reason(self) -> str:
        """Return a wait reason that lasts and was not reported yet; else an empty text."""
        if self.pending or self.reported_reason == self.wait_reason or self.state.now < self._report_due_at():
            return ""
        self.reported_reason = self.wait_reason
        return self.reported_reason

    def _report_due_at(self) -> float:
        return self.waiting_since + REPORT_WAIT_AFTER_S

    def _collect_joins(self) -> dict[Incarnation, JoinSpec]:
        """Return the nodes that want to be in the next view; none if it cannot be proposed yet."""
        state, settings = self.state, self.state.settings
        if state.join is None and not state.finished_generation:
            return self._set_wait_reason("this node's workers have not stopped")
        if self.peers.disconnected:
            return self._set_wait_reason("a connection has just broken")
        reply_until = max((welcome.reply_until for welcome in self.pending_welcomes.values()), default=NEVER)
        if state.now < reply_until:
            return self._set_wait_reason("a welcomed node has not replied yet", reply_until)
        for peer in self.peers.by_incarnation.values():
            if not peer.has_stopped_workers:
                return self._set_wait_reason(f"the workers of {peer.incarnation} have not stopped")
        joins = {peer.incarnation: peer.join for peer in self.peers.by_incarnation.values() if peer.join}
        if state.join:
            joins[state.incarnation] = state.join
        present = {state.incarnation, *self.peers.by_incarnation}
        has_finished_nodes = len(present) > len(joins)
        if not joins or (len(joins) < settings.min_nodes and not has_finished_nodes):
            return self._set_wait_reason(f"{len(joins)} of at least {settings.min_nodes} nodes have joined")
        missing = find_missing_quorum(present, state.quorum_state)
        if missing:
            absent = "" if missing.generation else f"; not here: {state.format_absent_candidates(present)}"
            return self._set_wait_reason(f"{missing}{absent}")
        until = self._compute_wait_deadline(present, full=len(joins) >= settings.max_nodes)
        if state.now < until:
            return self._set_wait_reason(self._describe_wait(joins, present), until)
        return self._leave_out_importing(joins)

    def _leave_out_importing(self, joins: dict[Incarnation, JoinSpec]) -> dict[Incarnation, JoinSpec]:
        """Leave out newcomers that still import, while survivors of the last view can do without them."""
        last = self.state.quorum_state.installed
        survivors = {member for member in joins if last and last.rank(member) is not None}
        ready = {
            member: join for member, join in joins.items() if not join.is_importing or member in survivors
        }
        return ready if survivors and len(ready) >= self.state.settings.min_nodes else joins

    def _describe_wait(self, joins: dict[Incarnation, JoinSpec], present: set[Incarnation]) -> str:
        absent = self.state.find_absent_members(present)
        if absent:
            return (
                f"{format_node_names(absent)} may still run workers: waiting until their leases have expired"
            )
        settings = self.state.settings
        return (
            f"{len(joins)} of at most {settings.max_nodes} nodes have joined: waiting until no new node has "
            f"joined for {settings.last_call_timeout_s:g} s"
        )

    def _compute_wait_deadline(self, present: set[Incarnation], *, full: bool) -> float:
        """Return until when absent nodes may come or may run workers."""
        state, settings, last = self.state, self.state.settings, self.state.quorum_state.installed
        until = NEVER
        absent = state.find_absent_members(present)
        if absent:
            until = state.grace_until
            if not absent <= state.unreachable:
                until = max(until, self.started_at + settings.node_timeout_s)
        if last is None and not state.quorum_state.proposals and settings.max_nodes > 1:
            # If disks were lost, a view may run that no present node knows. Its leader connects soon.
            until = max(until, self.started_at + 2 * settings.announce_interval_s)
        has_survivors = last is not None and any(
            member in present for member in state.quorum_state.live_members(last)
        )
        if not has_survivors and not full:
            until = max(until, self.last_arrival_at + settings.last_call_timeout_s)
        return until

    # Proposing and installing.

    def _propose(self, joins: dict[Incarnation, JoinSpec]) -> None:
        state = self.state
        generation = 1 + max(state.max_generation, state.quorum_state.newest_generation)
        members = rank_members(state.quorum_state.voting_views, joins, state.settings.max_nodes)
        view = View(generation, members, state.incarnation)
        before = state.quorum_state
        state.set_quorum_state(before.with_proposal(view))
        followers = set(self.peers.by_incarnation)
        self.pending = PendingProposal(
            view, joins, state.now, state.version, followers, frozenset({state.incarnation, *followers})
        )
        message = ProposeView(view, before)
        for peer in self.peers.by_incarnation.values():
            state.send(peer.link, message)

    def _install(self) -> tuple[View, InstallView] | None:
        state, proposal = self.state, self.pending
        if proposal is None:
            return None
        if not self._may_install(proposal):
            self._detach_stalled_members(proposal)
            return None
        if not self._still_has_quorum(proposal):
            self.abort("its members may follow another leader")
            return None
        self.pending = None
        self.reported_reason = self.wait_reason = ""
        before = state.quorum_state.installed
        return proposal.view, InstallView(
            proposal.view.generation,
            proposal.joins[proposal.view.members[0]].store_address,
            tuple(proposal.joins[member].num_workers for member in proposal.view.members),
            max(join.newest_step for join in proposal.joins.values()),
            state.failure_log.get_failures(before.generation) if before else (),
        )

    def _may_install(self, proposal: PendingProposal) -> bool:
        """Return whether all nodes have stored the proposal and no redirected one is still connected."""
        is_durable = not proposal.awaiting_ack and self.state.durable_version >= proposal.version
        return is_durable and not self.state.pending_closes

    def _still_has_quorum(self, proposal: PendingProposal) -> bool:
        """Return whether followers with a recent acknowledgement have a quorum by all that is known now."""
        following = {self.state.incarnation} | {
            peer.incarnation
            for peer in self.peers.by_incarnation.values()
            if peer.incarnation in proposal.present and self.state.has_recent_ack(peer.link)
        }
        return has_quorum(following, self.state.quorum_state)

    def _detach_stalled_members(self, proposal: PendingProposal) -> None:
        limit_s = MAX_ACK_NODE_TIMEOUTS * self.state.settings.node_timeout_s
        if self.state.now < proposal.proposed_at + limit_s:
            return
        self.abort(f"{format_node_names(proposal.awaiting_ack)} did not acknowledge within {limit_s:g} s")
        for peer in self.peers:  # keep the table's order; the order of a set differs between processes
            if peer.incarnation in proposal.awaiting_ack:
                self.peers.remove(peer.incarnation)
                self.state.redirect(peer.link, "")

    # The running view.

    def compute_lease_until(self) -> float:
        """Return until when so many members surely follow this leader that no other view can have a quorum.

        A follower turns away a node timeout after it *received* our last message. We count from when we
        *sent* the last message that it acknowledged, less `clock_drift`.
        """
        state = self.state
        peers = sorted(self.peers, key=lambda peer: -peer.link.acked_sent_at)
        followers = [peer.incarnation for peer in peers]

        def suffices(count: int) -> bool:
            return has_quorum({state.incarnation, *followers[:count]}, state.quorum_state)

        enough = self._followers_for_quorum
        is_fewest = enough <= len(followers) and suffices(enough) and not (enough and suffices(enough - 1))
        if not is_fewest:  # rarely: a vote costs as much as it has members
            enough = bisect_left(range(len(followers) + 1), True, key=suffices)
            if enough > len(followers):
                return NEVER
            self._followers_for_quorum = enough
        sent_at = peers[enough - 1].link.acked_sent_at if enough else state.now
        return sent_at + state.settings.lease_s

    def handle_view_installed(self, view: View) -> None:
        """Schedule the next view if it has room for nodes that joined too late for this one."""
        has_room = len(view.members) < self.state.settings.max_nodes
        members = frozenset(view.members)
        has_late_joins = any(
            peer.join and not peer.join.is_importing and peer.incarnation not in members
            for peer in self.peers
        )
        self.scale_up_at = (
            self.last_arrival_at + self.state.settings.scale_up_delay_s
            if has_late_joins and has_room
            else float("inf")
        )

    def next_deadline(self) -> float:
        """Return when to advance next."""
        if self.pending:
            return self.pending.proposed_at + MAX_ACK_NODE_TIMEOUTS * self.state.settings.node_timeout_s
        if self.reported_reason == self.wait_reason:
            return self.evaluate_at
        return min(self.evaluate_at, self._report_due_at())


def rank_members(
    views: tuple[View, ...], joins: dict[Incarnation, JoinSpec], max_members: int
) -> tuple[Incarnation, ...]:
    """Order the joined nodes by rank: members of `views` as before, then newcomers in the scheduler's order.

    `views` are the newest installed view and later proposals, of which one may have been installed elsewhere.
    Nodes beyond `max_members` are spares.
    """
    survivors = dict.fromkeys(member for view in views for member in view.members if member in joins)
    newcomers = [incarnation for incarnation in joins if incarnation not in survivors]
    newcomers.sort(
        key=lambda newcomer: (joins[newcomer].scheduler_order, newcomer.node, newcomer.incarnation_id)
    )
    return tuple([*survivors, *newcomers][:max_members])
