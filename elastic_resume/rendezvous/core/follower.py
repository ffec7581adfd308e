"""Follow a leader: send heartbeats, vote, renew the lease, and detect the loss of the leader.

If the link breaks, the follower dials its leader again. A refused connection proves that the leader's process
has ended; otherwise the leader counts as unreachable after the node timeout.
"""

from __future__ import annotations

from typing import ClassVar

from elastic_resume.policy.reasons import (
    CandidatesMissing,
    DepartureReason,
    LeaderWaits,
    Loss,
    NodeLost,
    TooFewNodes,
    ViewEnd,
    ViewEndOf,
    ViewEndReason,
    VotesMissing,
    WaitReason,
)
from elastic_resume.rendezvous.core import interface, messages
from elastic_resume.rendezvous.core.peers import NEVER, Link
from elastic_resume.rendezvous.core.state import Handlers, NodeState, Role, Search
from elastic_resume.rendezvous.core.world import Ballot, JobEnd, Proposal, ProposalAck, View
from elastic_resume.rendezvous.facts import Fact

FIRST_REDIAL_PAUSE_S = 0.005
"""Before the second call to a lost leader. Each later pause doubles, up to `probe_interval_s`."""
MAX_PAUSE_DOUBLINGS = 10
PATIENT_NODE_TIMEOUTS = 2
"""A follower stays so long with a leader that lacks nodes or votes, while another leader announces itself."""


class Follower(Role):
    """The role of a node that has a leader."""

    def __init__(self, state: NodeState, link: Link, welcome: messages.Welcome) -> None:
        super().__init__(state)
        self.link = link
        self.leader = welcome.leader
        self.wait_reason: WaitReason | None = None
        self.spare_generation = 0
        """The generation that runs without this node."""
        self.idle_since = state.now
        """Since when the leader says that it lacks nodes or votes."""
        self.next_heartbeat_at = state.now
        # The leader includes this node only after its first reply, so its lease does not count before.
        link.acked_sent_at = NEVER
        self.request: messages.RequestVote | None = None
        self.voted_in: tuple[int, Ballot, str] | None = None
        """The slot and ballot of the vote that the leader has, and to whom it is handed."""
        self.proposal: Proposal | None = None
        self.has_acknowledged = False
        """The leader knows that this node has accepted the proposal."""
        self.is_disconnected = False
        """The link broke, and this node dials until the leader answers, has ended, or is unreachable."""
        self.redial_link: Link | None = None
        self.redial_count = 0
        """Calls since the link broke."""
        self.redial_at = state.now
        """When the call in progress times out; without one, when to make the next."""
        state.unreachable.discard(self.leader)
        state.contacts.mark_former_ended(self.leader)
        state.contacts.note_leader_link(self.leader, link)
        state.contacts.note_leader(self.leader)
        state.outbox.renew()

    def handle_message(self, link: Link, message: messages.Message) -> None:
        """Handle one message. Those of other nodes are answered, and may name another leader."""
        if self.dispatch(self._HANDLERS, link, message):
            return
        if link is self.redial_link:
            self._handle_redial_reply(link, message)
        elif link is self.link and not self.is_disconnected:
            self.dispatch(self._LEADER_HANDLERS, link, message)
            self._renew_lease()
            self._extend_join_timeout()

    def _handle_hello(self, link: Link, hello: messages.Hello) -> None:
        is_restarted_leader = (
            hello.sender.disk_id == self.leader.disk_id
            and hello.sender.boot > self.leader.boot
            and not self.state.contacts.answers(self.leader)
        )
        if is_restarted_leader:
            self._end_following(NodeLost(self.leader.node, Loss.RESTARTED))
        self.state.send(link, messages.Redirect("" if is_restarted_leader else self.leader.address))

    def _handle_announcement(self, link: Link, announcement: messages.LeaderAnnouncement) -> None:
        """Follow another leader if the own one has no running view, and perhaps cannot reach enough nodes.

        Of leaders that reach each other only one stays, so another is beyond a partition.
        """
        state, other = self.state, announcement.leader
        own_runs = state.running_view or self.link.generation
        patient_until = self.idle_since + PATIENT_NODE_TIMEOUTS * state.settings.node_timeout_s
        is_better = announcement.active_generation or state.now >= patient_until
        if is_better and not own_runs and other != self.leader:
            self._end_following(ViewEndOf(ViewEnd.LEADER_IDLE, (self.leader.node, other.node)), other.address)
        else:
            state.send(link, messages.Redirect(self.leader.address))

    def _handle_vote_request(self, _: Link, request: messages.RequestVote) -> None:
        self.request = request
        if self.state.acceptor.is_voter:
            self.state.acceptor.promise(request.ballot)

    def _handle_vote_held(self, *_: object) -> None:
        self.state.is_vote_held = bool(self.state.acceptor.known.handed_to)

    def _handle_proposal(self, _: Link, message: messages.Propose) -> None:
        if message.generation == self.state.view.generation:
            self.proposal, self.has_acknowledged = message.proposal, False

    def _handle_start(self, _: Link, message: messages.StartView) -> None:
        state, proposal = self.state, self.proposal
        if proposal is None or proposal.view.generation != message.generation:
            return
        self._adopt(proposal.view)
        state.started_generation = message.generation
        state.backoff.note_start(state.now, message.newest_step)
        lease_until = self._compute_lease_until()
        if state.view != proposal.view or state.view.rank(state.incarnation) is None:
            return
        if lease_until <= state.now:
            # Stay connected: this node is not unreachable, only late.
            state.emit_event("lease-expired", generation=state.view.generation)
            self._send_status()
        elif state.status.join:
            state.start_workers(state.view, message, lease_until)

    def _handle_heartbeat(self, _: Link, message: messages.Heartbeat) -> None:
        state = self.state
        # A leader that knows less may follow one that has found something about the whole job.
        kept = {topic: fact for topic, fact in state.verdicts.items() if not fact.generation}
        verdicts = kept | {fact.topic: fact for fact in message.facts}
        if verdicts != state.verdicts:
            state.verdicts = verdicts

    def _handle_waiting(self, _: Link, message: messages.Waiting) -> None:
        self.wait_reason = message.reason
        self.state.emit_event("waiting", message.reason)

    def _handle_redirect(self, _: Link, message: messages.Redirect) -> None:
        self._end_following(ViewEnd.LEADER_STEPPED_DOWN, message.address)

    def _handle_refusal(self, _: Link, message: messages.Refused) -> None:
        self._end_following(message.refusal)

    def _handle_leave_notice(self, _: Link, message: messages.LeaveNotice) -> None:
        self._end_following(NodeLost(self.leader.node, Loss.LEFT, message.departure))

    def _adopt(self, view: View) -> None:
        self.state.adopt_view(view, self.leader)
        self.proposal = None
        self.state.contacts.note_leader(self.leader)

    def _extend_join_timeout(self) -> None:
        """Restart the join timeout while a view runs without this node: a spare may wait for long."""
        state, generation = self.state, self.link.generation
        if not generation or state.running_view:
            return
        state.join_since = state.now
        if state.status.join and self.spare_generation != generation:
            self.spare_generation = generation
            state.emit_event("spare", generation=generation)

    def _compute_lease_until(self) -> float:
        return self.link.acked_sent_at + self.state.settings.lease_s

    def _renew_lease(self) -> None:
        state = self.state
        if state.running_view and state.running_view.generation == self.link.generation:
            state.lease_until = max(state.lease_until, self._compute_lease_until())

    def _handle_redial_reply(self, link: Link, message: messages.Message) -> None:
        if isinstance(message, messages.Welcome) and message.leader == self.leader:
            self.state.disconnect(self.link)
            link.acked_sent_at, link.generation = self.link.acked_sent_at, self.link.generation
            self.next_heartbeat_at = self.state.now
            link.peer = self.leader
            self.link, self.redial_link, self.is_disconnected = link, None, False
            self.state.contacts.leader_links[self.leader] = link
            self.state.adopt_view(message.view, self.leader)
            self.state.contacts.note_leader(self.leader)
            self.state.outbox.renew()
            self.send_reports()
        elif isinstance(message, JobEnd):
            self.state.learn_end(message)
        else:
            address = message.address if isinstance(message, messages.Redirect) else self.leader.address
            self._end_following(ViewEnd.NOT_READMITTED, address)

    def handle_connected(self, link: Link) -> None:
        """Introduce this node again after a successful redial."""
        if link is self.redial_link:
            self.redial_at = self.state.now + self.state.settings.redial_timeout_s
            self.state.send(link, self.state.make_hello())

    def handle_disconnected(self, link: Link) -> None:
        """Redial the leader after its link broke, unless it has ended for certain."""
        state = self.state
        if link is self.link:
            self.is_disconnected = True
            self.proposal = self.request = self.voted_in = None
            self.redial_count = 0
            self._redial_leader()
        elif link is self.redial_link and self.leader in state.contacts.ended:
            self._end_following(NodeLost(self.leader.node, Loss.DIED))
        elif link is self.redial_link:
            # A dying process may still accept a call just before its host refuses all.
            pause_s = min(
                state.settings.probe_interval_s,
                FIRST_REDIAL_PAUSE_S * 2 ** min(self.redial_count - 1, MAX_PAUSE_DOUBLINGS),
            )
            self.redial_link, self.redial_at = None, state.now + pause_s

    def _redial_leader(self) -> None:
        """Dial the leader; alternate between its last IP address, which needs no DNS, and its name.

        A slow name server must not cost the view, and the name may resolve to another address now.
        """
        state = self.state
        if self.redial_link:
            state.disconnect(self.redial_link)
        self.redial_count += 1
        self.redial_link = state.dial(
            self.leader.address, self.link.ip_address if self.redial_count % 2 else ""
        )
        self.redial_at = state.now + state.settings.redial_timeout_s

    def _end_following(self, reason: ViewEndReason, next_leader_address: str = "") -> None:
        state = self.state
        if state.next_role:
            return
        state.end_role(Search(next_leader_address))
        generation = state.running_view.generation if state.running_view else 0
        state.stop_workers(reason)
        state.emit_event("leader-lost", reason, generation)
        if isinstance(reason, NodeLost):
            state.record_lost_member(self.leader, reason)
            if state.view.rank(self.leader) is not None:
                state.backoff.note_end(self.leader, state.now)
            if reason.loss is Loss.UNREACHABLE:
                state.unreachable.add(self.leader)
            else:
                state.contacts.mark_ended(self.leader)
        state.disconnect(self.link)
        if self.redial_link:
            state.disconnect(self.redial_link)

    def advance(self) -> None:
        """Check the own lease first; then vote, send heartbeats, and watch the leader."""
        state = self.state
        if state.running_view and state.now >= state.lease_until:
            state.stop_workers(ViewEndOf(ViewEnd.LEASE_EXPIRED, (self.leader.node,)), immediately=True)
        lacks_nodes = isinstance(self.wait_reason, (TooFewNodes, VotesMissing, CandidatesMissing))
        if state.running_view or self.link.generation or not lacks_nodes:
            self.idle_since = state.now
        if state.next_role:
            return
        if state.now >= self.link.last_received_at + state.settings.node_timeout_s:
            self._end_following(NodeLost(self.leader.node, Loss.UNREACHABLE))
            return
        if self.is_disconnected:
            if state.now >= self.redial_at:
                self._redial_leader()
            return
        if self.request and state.acceptor.is_voter and state.status.can_vote:
            self._vote(self.request)
        if self.proposal and not state.acceptor.is_voter and not self.has_acknowledged:
            self._acknowledge(self.proposal.ballot)
        if state.now >= self.next_heartbeat_at:
            state.send(self.link, messages.Heartbeat(state.outbox.take()))
            self.next_heartbeat_at = state.now + state.settings.heartbeat_interval_s

    def _vote(self, request: messages.RequestVote) -> None:
        """Vote, and accept the leader's proposal, when this node may and all that it says is durable."""
        state, acceptor, proposal = self.state, self.state.acceptor, self.proposal
        if (request.generation, request.ballot) != (acceptor.view.generation, acceptor.known.promised):
            return
        if not state.contacts.may_vote_for(self.leader, heir_cannot_take=request.heir_cannot_take):
            return
        if proposal and acceptor.known.accepted != proposal and proposal.ballot == acceptor.known.promised:
            acceptor.accept(proposal)
        if state.now >= state.hand_over_at:
            acceptor.hand_over(self.leader)
        if not state.acceptor.is_durable:
            return
        vote_id = request.generation, request.ballot, acceptor.known.handed_to
        if self.voted_in != vote_id:
            state.send(self.link, acceptor.make_vote())
            self.voted_in = vote_id
        if proposal and acceptor.known.accepted == proposal and not self.has_acknowledged:
            self._acknowledge(request.ballot)

    def _acknowledge(self, ballot: Ballot) -> None:
        state = self.state
        message = ProposalAck(state.view.generation, ballot, is_accepted=state.acceptor.is_voter)
        state.send(self.link, message)
        self.has_acknowledged = True

    def _send(self, message: messages.Message) -> None:
        if not self.is_disconnected:
            self.state.send(self.link, message)

    def send_reports(self) -> None:
        """Repeat what may have changed since the hello was sent."""
        state = self.state
        reports = (
            # First, since the leader may form a view as soon as it knows that this node has joined.
            messages.Heartbeat(facts) if (facts := state.outbox.take()) else None,
            state.failure_report,
            messages.FailJob(state.job_failure) if state.job_failure else None,
            state.status,
        )
        for report in reports:
            if report:
                self._send(report)

    def _send_facts(self) -> None:
        self.next_heartbeat_at = self.state.now

    def _send_status(self, *_: object) -> None:
        self._send(self.state.status)

    def leave(self, departure: DepartureReason) -> None:
        """Send the leader a leave notice."""
        self._send(messages.LeaveNotice(departure))

    def next_deadline(self) -> float:
        """Return when to advance next."""
        state = self.state
        lease_until = state.lease_until if state.running_view else float("inf")
        due = self.redial_at if self.is_disconnected else self.next_heartbeat_at
        if self.request and not self.voted_in:
            # The vote may have to wait until a node timeout after another node's last message.
            due = min(due, state.now + state.settings.heartbeat_interval_s)
        return min(lease_until, due, self.link.last_received_at + state.settings.node_timeout_s)

    def explain_wait(self) -> LeaderWaits:
        """Return what this node waits for."""
        return LeaderWaits(self.leader.node, self.wait_reason)

    _HANDLERS: ClassVar[Handlers] = {
        messages.Hello: _handle_hello,
        messages.LeaderAnnouncement: _handle_announcement,
    }
    _LEADER_HANDLERS: ClassVar[Handlers] = {
        messages.Heartbeat: _handle_heartbeat,
        messages.RequestVote: _handle_vote_request,
        messages.VoteHeld: _handle_vote_held,
        messages.Propose: _handle_proposal,
        messages.StartView: _handle_start,
        messages.Decided: lambda self, _, decided: self._adopt(decided.view),
        messages.EndView: lambda self, _, end: self.state.stop_workers(end.reason),
        messages.Waiting: _handle_waiting,
        messages.Redirect: _handle_redirect,
        messages.Refused: _handle_refusal,
        messages.LeaveNotice: _handle_leave_notice,
        JobEnd: lambda self, _, end: self.state.learn_end(end),
    }
    _OWN_HANDLERS: ClassVar[Handlers] = {
        interface.JoinRequest: _send_status,
        interface.Preparation: _send_status,
        messages.FailureReport: lambda self, *_: self.send_reports(),
        Fact: lambda self, *_: self._send_facts(),
        messages.FailJob: lambda self, *_: self.send_reports(),
        interface.WorkersFinished: _send_status,
        interface.Leave: _send_status,
    }
