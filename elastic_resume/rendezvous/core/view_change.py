"""Carry out what `next_view` decides, as leader: propose a view, and start its workers.

::

    waiting ── joined, quorum of votes ──▶ proposed ── a quorum has accepted, all have it ──▶ running
      ▲  ▲                                    │                                              │
      │  └── decided, but a member was lost ──┘                                              │
      └── end_view: a member is lost, its workers failed, or newcomers are here ─────────────┘
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from elastic_resume.policy.reasons import (
    MAX_NODES_NAMED,
    CandidatesMissing,
    NodeArguments,
    NodesUnreachable,
    VotesMissing,
    Wait,
    WaitReason,
    name_nodes,
)
from elastic_resume.rendezvous.core.backoff import MAX_BACKOFF_S
from elastic_resume.rendezvous.core.messages import JoinSpec, RequestVote, StartView, WorkersStatus
from elastic_resume.rendezvous.core.next_view import (
    Plan,
    Situation,
    list_finished,
    rank_members,
    wait_for_workers,
)
from elastic_resume.rendezvous.core.peers import PeerTable
from elastic_resume.rendezvous.core.sequence import CastVotes, Proposer, find_counted
from elastic_resume.rendezvous.core.state import NodeState
from elastic_resume.rendezvous.core.world import Incarnation, JobEnd, Proposal, ProposalAck, View

REPORT_WAIT_AFTER_S = 1.0
"""A wait is reported when it lasts so long; most waits last milliseconds."""
MANY_FOLLOWERS = 64
EVALUATION_S_PER_FOLLOWER = 5e-5
"""With 1,000 followers, evaluate every 50 ms at most, because each evaluation takes 5 ms."""
MAX_ARGUMENTS_NAMED = 4
MAX_STOP_S = 60.0
"""Workers may take so long to stop. A node whose workers take longer has no part in the next view."""
MAX_ACK_NODE_TIMEOUTS = 2
"""A follower that has not acknowledged for so many node timeouts (a stuck disk, a lossy path) is detached."""


class ViewChange:
    """Forms one view after another for a leader."""

    def __init__(self, state: NodeState, proposer: Proposer, peers: PeerTable) -> None:
        self.state = state
        self.proposer = proposer
        self.peers = peers
        self.slot_since = state.now
        """Since when the votes for this slot are collected."""
        self.joins: dict[Incarnation, JoinSpec] = {}
        """The nodes of the proposal."""
        self.proposed_at = state.now
        self.awaiting: set[Incarnation] = set()
        """Members of the proposal that have not acknowledged it."""
        self.blocked_since: float | None = None
        """Since when another leader may be able to form a view, and this one is not."""
        self.broken_links: set[Incarnation] = set()
        """Members of the proposal whose link broke."""
        self.end: JobEnd | None = None
        """The end of the job that is to be decided."""
        self.apart: frozenset[frozenset[str]] = frozenset()
        """Pairs of nodes of which no view may have both, as they cannot reach each other."""
        self.left_out: Mapping[Incarnation, NodesUnreachable] = {}
        """The joined nodes that are left out because of `apart`, and why."""
        self.began_at = state.now
        self.last_arrival_at = state.now
        self.evaluate_at = state.now
        self.wait_reason: WaitReason | None = Wait.NOTHING_JOINED
        self.scale_up_at = float("inf")
        """When to end the running view to admit newcomers."""
        self.waiting_since = state.now
        self.reported_reason: WaitReason | None = None
        """The wait reason that all followers have received."""

    def reevaluate(self) -> None:
        """Schedule an evaluation; with many followers wait a moment for further changes, unless all voted."""
        followers = len(self.peers.by_incarnation)
        if followers >= MANY_FOLLOWERS and len(self.proposer.cast) <= followers:
            delay_s = followers * EVALUATION_S_PER_FOLLOWER
            self.evaluate_at = min(self.evaluate_at, self.state.now + delay_s)
        else:
            self.evaluate_at = self.state.now

    def begin_slot(self) -> None:
        """Collect the votes for the successor of a view that is newly known."""
        self.proposer.clear()
        self.slot_since = self.state.now

    def make_request(self) -> RequestVote:
        """Return what to ask of each voter.

        The heir takes no vote any more if it has ended, or followed this node in this slot: it has
        acknowledged a message that was sent after the view. An earlier follower may have left, and may have
        learned of the view from another leader.
        """
        heir = self.state.view.heir
        peer = self.peers.by_incarnation.get(heir) if heir else None
        has_followed = peer is not None and peer.link.acked_sent_at > self.slot_since
        cannot_take = heir in self.state.contacts.ended or has_followed
        return RequestVote(self.proposer.slot, self.proposer.ballot, cannot_take)

    def find_quorum(self, votes: CastVotes) -> CastVotes | None:
        """Return the votes that count if they are a quorum, else None."""
        return self.state.contacts.find_quorum(votes, self._find_replaced_nodes)

    def list_statuses(self) -> dict[Incarnation, WorkersStatus]:
        """Return what the workers of the followers and of this node do."""
        statuses = {node: peer.status for node, peer in self.peers.by_incarnation.items()}
        statuses[self.state.incarnation] = self.state.status
        return statuses

    def handle_join(self, node: Incarnation, active_view: View | None, *, is_new: bool) -> None:
        """Note that a node has joined, or is ready now; another newcomer may follow one that `is_new`."""
        if is_new and self.state.view.rank(node) is None:
            self.last_arrival_at = self.state.now
        self.schedule_scale_up(active_view)
        self.reevaluate()

    def schedule_scale_up(self, active_view: View | None) -> None:
        """Schedule the next view if newcomers are ready that the running view has room for."""
        if active_view is None or len(active_view.members) >= self.state.settings.max_nodes:
            return
        backoff, delay_s = self.state.backoff, self.state.settings.scale_up_delay_s
        # Workers of a view that has just started would leave it before they have all met.
        started_until = backoff.started_at + backoff.compute_scale_up_delay_s(delay_s)
        for node in self.list_ready_newcomers(active_view):
            ready_at = max(self.last_arrival_at + delay_s, started_until, backoff.wait_until(node))
            self.scale_up_at = min(self.scale_up_at, max(self.state.now, ready_at))

    def advance(self) -> None:
        """Make a proposal when it is time for one."""
        proposer = self.proposer
        if proposer.proposal or self.state.now < self.evaluate_at:
            return
        self.evaluate_at, self.proposed_at = float("inf"), self.state.now
        votes = self.find_quorum(proposer.cast)
        if votes is not None:
            earlier = proposer.find_proposal_to_repeat(votes)
            if earlier:
                self.joins, self.blocked_since = {}, None
                proposer.propose(earlier.view, earlier.end, is_repeated=True)
                return
            if self.end:
                generation, history = 1 + self.state.acceptor.known.max_generation, self.state.view.history
                end = replace(self.end, generation=generation, history=history)
                self.blocked_since = None
                proposer.propose(View(generation, (), self.state.incarnation, history), end)
                return
        if self.end:
            self._note_blocked()
            self.evaluate_at = self.state.now + self.state.settings.heartbeat_interval_s
            self.joins = {}
            return
        plan = self._plan(votes)
        self.left_out = plan.left_out
        if plan.is_blocked:
            self._note_blocked()
        elif votes is not None and self.state.status.can_vote:
            self.blocked_since = None
        if plan.reason:
            self.joins, self.evaluate_at = {}, plan.until
            if plan.reason != self.wait_reason:
                self.wait_reason, self.waiting_since = plan.reason, self.state.now
            return
        self.broken_links = set()
        view = self._make_view(plan.joins)
        self.joins = {member: plan.joins[member] for member in view.members}
        proposer.propose(view, None)
        self.awaiting = set(view.members) - {self.state.incarnation}

    def _note_blocked(self) -> None:
        if self.blocked_since is None:
            self.blocked_since = self.state.now

    def _plan(self, votes: CastVotes | None) -> Plan:
        state, nodes, stop_until = self.state, self.list_statuses(), self.began_at + MAX_STOP_S
        waits = wait_for_workers(
            state.incarnation, nodes, stop_until - state.now, has_broken_link=bool(self.peers.disconnected)
        )
        if waits:
            return replace(waits, until=stop_until if state.now < stop_until else float("inf"))
        joins = [status.join for status in nodes.values() if status.join]
        state.backoff.settle(max((join.newest_step for join in joins), default=0))
        missing_votes = self._find_missing_votes(nodes) if votes is None else None
        situation = Situation(
            state.settings,
            state.now,
            state.view,
            nodes,
            missing_votes=missing_votes,
            # Without enough votes the plan is to wait for them; finding these takes most of an evaluation.
            absent=set() if missing_votes else state.contacts.find_absent_members(nodes),
            unreachable=state.unreachable,
            has_replaced=not missing_votes and bool(self._find_replaced_nodes()),
            apart=self.apart,
            backoff=state.backoff,
            began_at=self.began_at,
            last_arrival_at=self.last_arrival_at,
        )
        return situation.plan()

    def _find_replaced_nodes(self) -> set[str]:
        """Return the names of members that are back with an empty disk, and have any proposal."""
        peers = self.peers.by_incarnation.values()
        present = [peer.incarnation for peer in peers if not peer.is_twin]
        if not self.state.acceptor.known.is_twin:
            present.append(self.state.incarnation)
        if self.awaiting:
            present = [node for node in present if node not in self.awaiting]
        return self.state.view.find_replaced(present)

    def handle_ack(self, incarnation: Incarnation, message: ProposalAck) -> None:
        """Note that a node has the proposal, and if it votes, has accepted it."""
        if self.proposer.add_accept(incarnation, message):
            self.awaiting.discard(incarnation)

    def handle_link_broken(self, incarnation: Incarnation) -> None:
        """Note that the link to a node broke: a view with it will not be started."""
        self.awaiting.discard(incarnation)
        if incarnation in self.joins and incarnation not in self.broken_links:
            self.broken_links.add(incarnation)
            self.state.backoff.add(incarnation, self.state.now)
        self.reevaluate()

    def handle_removed(self, incarnation: Incarnation) -> None:
        """Note that a node is lost."""
        self.proposer.remove(incarnation)
        self.handle_link_broken(incarnation)
        state = self.state
        if incarnation in self.joins or state.view.rank(incarnation) is None:
            return
        state.backoff.note_end(incarnation, state.now)

    def is_concluded(self) -> bool:
        """Return whether a quorum has accepted the proposal, and all members have received it or are lost."""
        if self.proposer.proposal is None or self.awaiting:
            return False
        return self.find_quorum(self.proposer.get_accepted()) is not None

    def is_stalled(self) -> bool:
        """Return whether a proposal has waited for so long that its ballot may never decide it.

        Members may not have acknowledged it. Or members that have restarted voted too late to count.
        """
        return self.proposer.proposal is not None and self.state.now >= self._stall_at

    @property
    def _stall_at(self) -> float:
        return self.proposed_at + MAX_ACK_NODE_TIMEOUTS * self.state.settings.node_timeout_s

    def conclude(self, proposal: Proposal) -> tuple[View, JobEnd | None, StartView | None]:
        """Go on to the next slot; return what is decided, and with what to start its workers.

        Nobody starts the view if a member was lost meanwhile, or if another leader may have started it.
        """
        is_repeated = self.proposer.is_repeated
        failures = self.state.failure_log.get_failures(self.state.failed_generation)
        before = self.state.view
        if self.joins:
            self._note_left_out(before)
        self.state.adopt_view(proposal.view, proposal.view.leader)
        self.begin_slot()
        view, joins = proposal.view, self.joins
        self.joins, self.awaiting, self.reported_reason, self.wait_reason = {}, set(), None, None
        self.began_at = self.state.now
        if proposal.end or self.end or is_repeated or self.broken_links:
            self.reevaluate()
            return view, proposal.end, None
        workers = tuple(joins[member].num_workers for member in view.members)
        newest_step = max(join.newest_step for join in joins.values())
        store_address = joins[view.members[0]].store_address
        arguments = compare_arguments(view, joins)
        statuses = self.list_statuses()
        finished = name_nodes(list_finished(statuses))
        preparing = tuple(
            node.node
            for node in before.members
            if view.rank(node) is None and node in statuses and statuses[node].is_preparing
        )
        return (
            view,
            None,
            StartView(
                view.generation, store_address, workers, newest_step, failures, arguments, finished, preparing
            ),
        )

    # Waiting.

    def take_wait_reason(self) -> WaitReason | None:
        """Return a wait reason that lasts and was not reported yet."""
        if (
            self.proposer.proposal
            or self.reported_reason == self.wait_reason
            or self.state.now < self._report_due_at()
        ):
            return None
        self.reported_reason = self.wait_reason
        return self.reported_reason

    def _report_due_at(self) -> float:
        return self.waiting_since + REPORT_WAIT_AFTER_S

    def is_cut_off(self, node: Incarnation, view: View) -> bool:
        """Return whether a node and a member of the view cannot reach each other."""
        pairs = (pair for pair in self.apart if node.node in pair)
        return any(view.find_node(other) for pair in pairs for other in pair - {node.node})

    def keep_apart(self, pairs: frozenset[frozenset[str]], active_view: View | None) -> None:
        """Form no view with both nodes of a pair; nodes that are in no pair any more may be newcomers."""
        self.apart = pairs
        self.schedule_scale_up(active_view)
        self.reevaluate()

    def _note_left_out(self, before: View) -> None:
        """Let members that lose their place wait longer each time, unless the last view lasted."""
        for node in before.members:
            if self.state.now >= self.state.backoff.started_at + MAX_BACKOFF_S:
                self.state.backoff.remove(node)
            if node in self.left_out:
                self.state.backoff.add(node, self.state.now)
                self.state.emit_event("left-out", self.left_out[node])

    def _find_missing_votes(self, present: Collection[Incarnation]) -> WaitReason:
        state = self.state
        counted = find_counted(self.proposer.cast)
        needed = state.acceptor.electorate.size // 2 + 1
        if not state.view.members:
            return CandidatesMissing(len(counted), needed, state.find_absent_candidates(present))
        missing = [member for member in state.view.members if member.disk_id not in counted]
        # A vote that is here may wait for that of another, who may have taken it: name only who is not here.
        disks = {node.disk_id for node in present}
        missing = [member for member in missing if member.disk_id not in disks] or missing
        names = tuple(member.node for member in missing[:MAX_NODES_NAMED])  # in rank order
        return VotesMissing(state.view.generation, len(counted), needed, names, len(missing))

    def _make_view(self, joins: Mapping[Incarnation, JoinSpec]) -> View:
        state = self.state
        members = rank_members(state.view, joins, state.settings.max_nodes)
        leader = state.incarnation if state.incarnation in members else members[0]
        ballot = self.proposer.ballot
        history = state.view.history or f"{ballot.disk_id}:{ballot.boot}:{ballot.number}"
        generation, is_strict = 1 + state.acceptor.known.max_generation, state.settings.is_strict
        return View(generation, members, leader, history, is_strict)

    def list_ready_newcomers(self, view: View) -> list[Incarnation]:
        """Return the joined nodes outside of a view that it could admit."""
        return [
            node
            for node, status in self.list_statuses().items()
            if status.join
            and not status.is_preparing
            and view.rank(node) is None
            and not self.is_cut_off(node, view)
        ]

    def next_deadline(self) -> float:
        """Return when to advance next."""
        if self.proposer.proposal:
            return self._stall_at
        if self.reported_reason == self.wait_reason:
            return self.evaluate_at
        return min(self.evaluate_at, self._report_due_at())


def compare_arguments(view: View, joins: dict[Incarnation, JoinSpec]) -> tuple[NodeArguments, ...]:
    """Return rank 0's arguments and those of nodes that differ; nothing if all are equal."""
    first = joins[view.members[0]].arguments
    differing = [node for node in view.members if joins[node].arguments != first][: MAX_ARGUMENTS_NAMED - 1]
    named = [view.members[0], *differing] if differing else []
    return tuple(NodeArguments(node.node, joins[node].arguments) for node in named)
