"""Lead the job: admit followers, detect losses, end views, and settle the end of the job.

`view_change` decides when a view is proposed and installed, and `admission` who may follow.
"""

from __future__ import annotations

from typing import ClassVar

from elastic_resume.policy.reasons import (
    DepartureReason,
    Loss,
    NodeLost,
    ViewEnd,
    ViewEndOf,
    ViewEndReason,
    WaitReason,
    WorkersStopped,
    name_nodes,
)
from elastic_resume.rendezvous.core import interface, messages
from elastic_resume.rendezvous.core.admission import Admission
from elastic_resume.rendezvous.core.leader_announcer import LeaderAnnouncer
from elastic_resume.rendezvous.core.messages import Workers, WorkersStatus
from elastic_resume.rendezvous.core.next_view import list_finished
from elastic_resume.rendezvous.core.peers import Link, Peer, PeerTable
from elastic_resume.rendezvous.core.sequence import Proposer
from elastic_resume.rendezvous.core.state import Handlers, NodeState, Role, Search
from elastic_resume.rendezvous.core.view_change import MANY_FOLLOWERS, ViewChange
from elastic_resume.rendezvous.core.world import (
    Ballot,
    Incarnation,
    JobEnd,
    Proposal,
    ProposalAck,
    View,
    Vote,
)
from elastic_resume.rendezvous.facts import Fact, FactBoard, Scope

MAX_NODE_TIMEOUTS_WITHOUT_QUORUM = 2
"""A leader that has followers and no quorum for so long steps down."""


class Leader(Role):
    """The role of a node that leads. It is a member too, without a link to itself."""

    def __init__(self, state: NodeState, waiting_peers: dict[int, messages.Hello]) -> None:
        super().__init__(state)
        self.peers = PeerTable()
        self.active_view: View | None = None
        """The view that it has started and not ended. `state.running_view` is that of this node's workers."""
        self.new_leader_address = ""
        self.pending_welcomes: dict[int, tuple[messages.Hello, int]] = {}
        """Nodes that were welcomed on a connection and have not replied on it, and the newest view then."""
        scope = Scope(0, (), state.incarnation.node, state.settings.node_timeout_s)
        self.board = FactBoard(state.settings.topics, state.verdicts, scope)
        self.proposer = Proposer(state.acceptor)
        self.view_change = ViewChange(state, self.proposer, self.peers)
        self.discovery = LeaderAnnouncer(state, self.peers, self.make_announcement)
        self.heartbeat = messages.Heartbeat(tuple(self.board.verdicts.values()))
        """Shared by all followers, so that it is encoded once."""
        self.are_newcomers_expected = False
        """The judges know that the active view will end soon for newcomers."""
        self.admission = Admission(state, self.peers)
        self.request: messages.RequestVote | None = None
        """What the voters have been asked last."""
        self.sent: messages.Propose | None = None
        """What was proposed last, as the followers have it. It is on this node's disk before."""
        self.handed_votes: list[Peer] = []
        """Nodes that leave and have handed their votes to this one; they are told when that is on disk."""
        self.seen_durable_version = 0
        self.next_scan_at = state.now
        self.next_probe_at = state.now
        state.outbox.renew()
        self._add_facts(state.incarnation, state.outbox.take())
        self.finished_generation = state.status.generation if state.status.workers is Workers.FINISHED else 0
        """The newest generation in which a node has finished."""
        state.emit_event("leading")
        for conn_id, hello in waiting_peers.items():
            if conn_id in state.links:
                self._handle_hello(state.links[conn_id], hello)

    # Sending.

    def make_announcement(self) -> messages.LeaderAnnouncement:
        """Return an announcement of this leader with its priority."""
        state, view = self.state, self.state.view
        active = self.active_view.generation if self.active_view else 0
        rank = view.rank(state.incarnation)
        return messages.LeaderAnnouncement(
            state.incarnation,
            active,
            view.generation,
            state.acceptor.electorate.count((state.incarnation, *self.peers.by_incarnation)),
            len(view.members) if rank is None else rank,
            view.history if view.members else "",
        )

    def _send(self, peer: Peer, message: messages.Message) -> None:
        state = self.state
        state.send(peer.link, message, self.active_view.generation if self.active_view else 0)

    def _broadcast(self, message: messages.Message) -> None:
        for peer in self.peers:
            if peer.disconnected_at is None:
                self._send(peer, message)
        for conn_id in self.pending_welcomes:
            self.state.send(self.state.links[conn_id], message)

    # Receiving.

    def handle_message(self, link: Link, message: messages.Message) -> None:
        """Handle one message; the first reply to a welcome makes its sender a follower."""
        if self.dispatch(self._HANDLERS, link, message):
            return
        if link.conn_id in self.pending_welcomes:
            self._admit(link)
        peer = self.peers.find_by_link(link)
        if peer and peer.disconnected_at is None:
            self.dispatch(self._FOLLOWER_HANDLERS, peer, message)

    def is_routine(self, link: Link, message: messages.Message) -> bool:
        """See Role. As the first reply to a welcome a heartbeat adds a follower."""
        is_heartbeat = isinstance(message, messages.Heartbeat) and not message.facts
        return is_heartbeat and link.conn_id not in self.pending_welcomes

    def _handle_job_end(self, link: Link, end: JobEnd) -> None:
        # Only from a node that this one calls. Before a first view it may be the end of an earlier run.
        if link.conn_id in self.discovery.pending_calls and self.state.view.members:
            self.state.learn_end(end)

    def _handle_heartbeat(self, peer: Peer, message: messages.Heartbeat) -> None:
        self._send(peer, self.heartbeat)
        if message.facts:
            self._add_facts(peer.incarnation, message.facts)

    def _handle_status(self, peer: Peer, status: WorkersStatus) -> None:
        """Note what a follower's workers do, unless it sent this before it knew of the view that runs."""
        if status.generation >= peer.status.generation:
            self._take_status(peer, status)

    def _take_status(self, peer: Peer, status: WorkersStatus) -> None:
        former, peer.status = peer.status, status
        if self._refuse_other_script(peer):
            return
        if status.departure and not former.departure:
            self._note_leaving(peer.incarnation, status.departure)
        self._follow_status(peer.incarnation, status, is_new=not former.join)

    def _follow_status(self, node: Incarnation, status: WorkersStatus, *, is_new: bool) -> None:
        """Do what the status of a node asks for; a view ends when the workers of a member have ended."""
        if status.workers is Workers.FINISHED:
            self.finished_generation = max(self.finished_generation, status.generation)
        elif status.workers not in {Workers.RUNNING, Workers.LEAVING} and self._runs_on(node):
            self.end_view(WorkersStopped(node.node))
        if status.join:
            self.view_change.handle_join(node, self.active_view, is_new=is_new)
        self.view_change.reevaluate()

    def _refuse_other_script(self, peer: Peer) -> bool:
        refused = peer.status.join and self.admission.check_script(peer.status.join)
        if not refused:
            return False
        self._send(peer, refused)
        self._remove_peer(peer, Loss.REFUSED)
        return True

    def _handle_vote(self, peer: Peer, vote: Vote) -> None:
        self.proposer.add_vote(peer.incarnation, vote)
        self.view_change.reevaluate()
        if peer.is_leaving and not self.state.is_leaving:
            quorum = self.view_change.find_quorum(self.proposer.cast)  # not for each vote of thousands
            if self.proposer.take_over(peer.incarnation, vote, quorum):
                self.handed_votes.append(peer)

    def _handle_fail_job(self, _: Peer, message: messages.FailJob) -> None:
        self.state.job_failure = message.failure

    def _handle_leave_notice(self, peer: Peer, message: messages.LeaveNotice) -> None:
        self._remove_peer(peer, Loss.LEFT, message.departure)

    def _note_leaving(self, node: Incarnation, departure: DepartureReason) -> None:
        """Form a view without a follower, which leaves when that is decided."""
        lost = NodeLost(node.node, Loss.LEFT, departure)
        self.state.emit_event("lost", lost)
        self.state.record_lost_member(node, lost)
        self.state.backoff.note_end(node, self.state.now)
        if self._runs_on(node) and not self.has_finished_node():
            self.end_view(lost)

    def _handle_hello(self, link: Link, hello: messages.Hello) -> None:
        if link.address or link.conn_id in self.pending_welcomes or self.peers.find_by_link(link):
            # Only a defective node introduces itself twice on one connection, or on a call of this node.
            self.state.disconnect(link)
            self.handle_disconnected(link)
            return
        refused = self._check_hello(hello)
        link.peer = hello.sender
        if refused:
            self.state.send(link, refused)
        else:
            self._send_welcome(link, hello)
        newest = self.state.view.generation
        if self.active_view and newest > self.active_view.generation:
            self.end_view(ViewEndOf(ViewEnd.LATER_VIEW_DECIDED, (str(newest),)))

    def _check_hello(self, hello: messages.Hello) -> messages.Refused | None:
        return self.admission.check_hello(hello, is_running=self.active_view is not None)

    def _send_welcome(self, link: Link, hello: messages.Hello) -> None:
        """Welcome a node; its first reply makes it a follower and proves that the link works both ways.

        Over a one-way link it would otherwise delay every view.
        """
        state, peer = self.state, self.peers.by_incarnation.get(hello.sender)
        if peer and peer.link is not link and peer.disconnected_at is None:
            state.disconnect(peer.link)
            self._mark_disconnected(peer)
        self.pending_welcomes[link.conn_id] = hello, state.view.generation
        state.send(link, messages.Welcome(state.incarnation, state.view))

    def _admit(self, link: Link) -> None:
        """Add a node that has replied to its welcome to the followers."""
        hello, known_generation = self.pending_welcomes.pop(link.conn_id)
        self.view_change.reevaluate()
        state, sender = self.state, hello.sender
        refused = self._check_hello(hello)
        if refused:
            state.send(link, refused)
            return
        former = self.peers.by_node.get(sender.node)
        if former and former.incarnation != sender:
            is_restarted = former.incarnation.disk_id == sender.disk_id
            self._remove_peer(former, Loss.RESTARTED if is_restarted else Loss.REPLACED)
        peer = self._add_peer(link, hello)
        if hello.failure_report:
            state.record_failure_report(sender, hello.failure_report)
        if known_generation < state.view.generation:
            self._send(peer, messages.Decided(state.view))
        if self.request:
            self._send(peer, self.request)
        if self.sent and self.sent.proposal is self.proposer.proposal:
            self._send(peer, self.sent)
        if hello.status.workers is Workers.RUNNING:
            self._keep_or_end_workers(peer, hello.status)
        else:
            self._take_status(peer, hello.status)
        if self.active_view is None and self.view_change.reported_reason:
            self._send(peer, messages.Waiting(self.view_change.reported_reason))

    def _add_peer(self, link: Link, hello: messages.Hello) -> Peer:
        """Add a follower, or give a disconnected one its new link."""
        state, sender = self.state, hello.sender
        state.unreachable.discard(sender)
        peer = self.peers.by_incarnation.get(sender)
        if peer:
            self.peers.mark_reconnected(peer, link)
        else:
            peer = Peer(sender, link)
            self.peers.add(peer)
        state.contacts.note_follower(sender, link)
        peer.is_twin = hello.is_twin
        return peer

    def _keep_or_end_workers(self, peer: Peer, status: WorkersStatus) -> None:
        """Let the workers of a follower run on if they are those of the running view; else end them."""
        former, peer.status = peer.status, status
        if former == status and status.runs(self.active_view):
            return
        reason = ViewEndOf(ViewEnd.ENDED_MEANWHILE, (str(status.generation),))
        self._send(peer, messages.EndView(status.generation, reason))
        if former.runs(self.active_view):
            self.end_view(WorkersStopped(peer.incarnation.node))

    def _handle_announcement(self, link: Link, announcement: messages.LeaderAnnouncement) -> None:
        own = self.make_announcement()
        is_of_other_job = bool(own.history and announcement.history not in {"", own.history})
        if announcement.leader == self.state.incarnation:
            self.discovery.end_call(link.conn_id)
        elif announcement.priority > own.priority and (announcement.active_generation or not is_of_other_job):
            self.new_leader_address = announcement.leader.address
        elif link.conn_id in self.discovery.pending_calls:
            self.discovery.end_call(link.conn_id)
        else:
            self.state.send(link, own)

    def handle_connected(self, link: Link) -> None:
        """Announce this leader on a call that was answered."""
        self.discovery.handle_connected(link)

    def handle_disconnected(self, link: Link) -> None:
        """Handle a broken link or a failed call, which may have proved that a follower has ended."""
        self.discovery.pending_calls.pop(link.conn_id, None)
        self.pending_welcomes.pop(link.conn_id, None)
        peer = self.peers.find_by_link(link)
        if peer and peer.disconnected_at is None:
            self._mark_disconnected(peer)
            return
        for absent in list(self.peers.disconnected.values()):
            if absent.incarnation in self.state.contacts.ended:
                self._remove_peer(absent, Loss.DIED)

    def _mark_disconnected(self, peer: Peer) -> None:
        self.peers.mark_disconnected(peer, self.state.now)
        self.view_change.handle_link_broken(peer.incarnation)
        self.next_probe_at = self.state.now

    def _remove_peer(self, peer: Peer, loss: Loss, departure: DepartureReason | None = None) -> None:
        state, lost = self.state, NodeLost(peer.incarnation.node, loss, departure)
        self.peers.remove(peer.incarnation)
        if loss in {Loss.DIED, Loss.LEFT, Loss.RESTARTED}:
            state.contacts.mark_ended(peer.incarnation)
        elif state.view.rank(peer.incarnation) is not None:
            # Another machine of its name proves nothing: this one may run beyond a partition.
            state.unreachable.add(peer.incarnation)
        if peer.link.conn_id in state.links:
            state.disconnect(peer.link)
        if not peer.is_leaving:
            state.emit_event("lost", lost)
        state.record_lost_member(peer.incarnation, lost)
        self.board.remove(peer.incarnation.node)
        self.view_change.handle_removed(peer.incarnation)
        view = self.active_view
        if view is None or peer.incarnation not in view.members:
            return
        runs = state.running_view or any(follower.status.runs(view) for follower in self.peers)
        if not self.has_finished_node() or (not peer.status.has_finished(view.generation) and runs):
            # The remaining workers would wait for the lost ones in their next collective.
            self.end_view(lost)

    def _runs_on(self, node: Incarnation) -> bool:
        """Return whether a node is a member of the active view."""
        return self.active_view is not None and self.active_view.rank(node) is not None

    def has_finished_node(self) -> bool:
        """Return whether a node of the newest view has finished; then no other view is needed."""
        return self.state.view.generation == self.finished_generation > 0

    # Acting.

    def end_view(self, reason: ViewEndReason, *, immediately: bool = False) -> None:
        """End the active view; its members join again."""
        view = self.active_view
        if view is None:
            return
        message = messages.EndView(view.generation, reason)  # shared, so that it is encoded once
        for peer in self.peers:
            if peer.status.runs(view) and peer.disconnected_at is None:
                self._send(peer, message)
        self.active_view = None
        self.board.end_view()
        self.state.stop_workers(reason, immediately=immediately)
        self.view_change.began_at = self.state.now
        self.view_change.reevaluate()
        if reason is not ViewEnd.JOB_OVER:
            self.state.emit_event("view-ended", reason, view.generation)

    def advance(self) -> None:
        """Check the own lease first; then look for losses, the end of the job, and the next view."""
        state = self.state
        if state.next_role:
            return
        if self.new_leader_address:
            self._step_down(ViewEndOf(ViewEnd.OTHER_LEADS, (self.new_leader_address,)))
            return
        if self.active_view is None and state.is_disk_stalled:
            self._step_down(ViewEnd.DISK_STUCK)
            return
        if self._lacks_quorum():
            state.terms_without_quorum += 1
            self._step_down(ViewEnd.NO_QUORUM if state.status.can_vote else ViewEnd.WORKERS_STUCK)
            return
        if self.active_view:
            if state.running_view is None:  # a spare may wait for as long as a view runs without it
                state.join_since = state.now
            elif state.now >= state.lease_until:
                self.end_view(ViewEnd.PAUSED, immediately=True)
            else:
                state.lease_until = state.now + state.settings.lease_s
        if state.now >= self.next_scan_at:
            self.next_scan_at = state.now + state.settings.heartbeat_interval_s / 2
            self._remove_unreachable_peers()
            self._add_facts(state.incarnation, state.outbox.take())
            self.board.is_due = True
        self._expect_newcomers()
        if self.board.is_due:
            self._judge_facts()
        self._probe_disconnected()
        self.discovery.advance()
        if self.view_change.end is None and (state.job_failure or self._is_job_finished()):
            self._begin_end()
        if self.active_view is None:
            if self._is_view_change_due():
                self._advance_view_change()
            self._broadcast_wait_reason()
        elif state.now >= self.view_change.scale_up_at:
            if self.has_finished_node() or not self.view_change.list_ready_newcomers(self.active_view):
                self.view_change.scale_up_at = float("inf")
            elif not self.board.delays_newcomers:
                self.view_change.scale_up_at = float("inf")
                state.backoff.note_newcomers(state.now)
                self.end_view(ViewEnd.NEWCOMERS)

    def _expect_newcomers(self) -> None:
        """Let the judges know when the active view will end for newcomers within a scale-up delay."""
        is_near = self.state.now >= self.view_change.scale_up_at - self.state.settings.scale_up_delay_s
        are_expected = self.active_view is not None and is_near
        if are_expected is not self.are_newcomers_expected:
            self.are_newcomers_expected = are_expected
            self.board.expect_newcomers(self.state.now, are_expected=are_expected)

    def _add_facts(self, node: Incarnation, facts: tuple[Fact, ...]) -> None:
        self.board.add(node.node, facts, self.state.now, is_member=self._runs_on(node))

    def _judge_facts(self) -> None:
        """Do what the verdicts ask for, and send them with the next heartbeats."""
        state = self.state
        for verdict in self.board.judge(state.now):
            for failure in verdict.root_causes:
                state.failure_log.record(state.failed_generation, failure)
            state.job_failure = verdict.job_failure or state.job_failure
            if verdict.view_end:
                self.end_view(verdict.view_end)
        if self.view_change.apart != self.board.apart:
            self.view_change.keep_apart(self.board.apart, self.active_view)
        if state.verdicts is not self.board.verdicts:
            state.verdicts = self.board.verdicts
            self.heartbeat = messages.Heartbeat(tuple(state.verdicts.values()))

    def _lacks_quorum(self) -> bool:
        """Return whether others should lead: nodes that this one cannot reach may follow them."""
        since = self.view_change.blocked_since
        if self.active_view or since is None or not self.peers.by_incarnation:
            return False
        return self.state.now >= since + MAX_NODE_TIMEOUTS_WITHOUT_QUORUM * self.state.settings.node_timeout_s

    def _broadcast_wait_reason(self) -> None:
        reason = self.view_change.take_wait_reason() if self.active_view is None else None
        if reason:
            self.state.emit_event("waiting", reason)
            self._broadcast(messages.Waiting(reason))

    def _remove_unreachable_peers(self) -> None:
        """Give up followers a little earlier than they give up this leader, so that its workers end first."""
        state = self.state
        for peer in self.peers:
            if state.now >= peer.link.last_received_at + state.settings.lease_s:
                self._remove_peer(peer, Loss.UNREACHABLE)
        for link in [state.links[conn_id] for conn_id in self.pending_welcomes]:
            if state.now >= link.last_received_at + state.settings.node_timeout_s:
                del self.pending_welcomes[link.conn_id]
                state.disconnect(link)

    def _probe_disconnected(self) -> None:
        """Dial followers whose links broke. A live one also dials this node; a refusal proves a death."""
        state = self.state
        if not self.peers.disconnected or state.now < self.next_probe_at:
            return
        self.next_probe_at = state.now + state.settings.probe_interval_s
        self.discovery.call([node.address for node in self.peers.disconnected])

    def _is_view_change_due(self) -> bool:
        """Return whether the view change may go on: heartbeats of many followers alone are no reason."""
        state, view_change, proposer = self.state, self.view_change, self.proposer
        return (
            len(self.peers.by_incarnation) < MANY_FOLLOWERS
            or state.now >= view_change.next_deadline()
            or state.acceptor.durable_version != self.seen_durable_version
            or state.view.generation > proposer.slot
            or state.acceptor.newest_ballot > proposer.ballot
            or (proposer.proposal is not None and not view_change.awaiting)
        )

    def _advance_view_change(self) -> None:
        state, view_change, proposer = self.state, self.view_change, self.proposer
        self.seen_durable_version = state.acceptor.durable_version
        if state.view.generation > proposer.slot:  # a node that joined knew a newer view
            view_change.end = None
            view_change.begin_slot()
            self._broadcast(messages.Decided(state.view))
            view_change.reevaluate()
        if state.acceptor.newest_ballot > proposer.ballot:
            proposer.start_ballot()
            view_change.reevaluate()
        if state.acceptor.is_durable:
            for peer in self.handed_votes:
                if self.peers.by_incarnation.get(peer.incarnation) is peer and peer.disconnected_at is None:
                    self._send(peer, messages.VoteHeld())
            self.handed_votes.clear()
        state.contacts.take_vote()
        self._ask_votes(view_change.make_request())
        if state.status.can_vote and proposer.add_own():
            view_change.reevaluate()
        view_change.advance()
        proposal = proposer.proposal
        if proposal and not (self.sent and self.sent.proposal is proposal) and state.acceptor.is_durable:
            self.sent = messages.Propose(proposer.slot, proposal)  # shared: encoded once
            for peer in self.peers:
                self._send(peer, self.sent)
        is_stalled = view_change.is_stalled()
        if is_stalled:
            for peer in [self.peers.by_incarnation[member] for member in view_change.awaiting]:
                self._detach(peer)
        if proposal and view_change.is_concluded():
            self._announce_decision(proposal)
        elif is_stalled:
            proposer.start_ballot()
            view_change.reevaluate()

    def _detach(self, peer: Peer) -> None:
        """Go on without a follower that has not acknowledged a proposal for long; it may follow again."""
        self.state.send(peer.link, messages.Redirect())
        self._remove_peer(peer, Loss.UNRESPONSIVE)

    def _ask_votes(self, request: messages.RequestVote) -> None:
        """Ask the followers for their votes in a new slot or ballot."""
        # A ballot is promised by its own leader first, on disk.
        if request != self.request and (self.state.acceptor.is_durable or self._has_asked(request.ballot)):
            self.request = request
            self.view_change.reevaluate()
            for peer in self.peers:
                self._send(peer, request)

    def _has_asked(self, ballot: Ballot) -> bool:
        return self.request is not None and self.request.ballot == ballot

    def _announce_decision(self, proposal: Proposal) -> None:
        """Start the decided view, or end the job, or go on to the next slot."""
        state = self.state
        view, end, start = self.view_change.conclude(proposal)
        if end:
            state.end_role(end)
            self._broadcast(end)
            return
        # This process may have been paused for long, and its followers may run a later view by now.
        is_current = all(
            state.has_recent_ack(peer.link) for peer in self.peers if view.rank(peer.incarnation) is not None
        )
        if start is None or not is_current:
            self._broadcast(messages.Decided(view))
            self.view_change.reevaluate()
            return
        self.active_view, state.started_generation = view, view.generation
        state.backoff.note_start(state.now, start.newest_step)
        self.view_change.scale_up_at = float("inf")
        self.are_newcomers_expected = False
        self.board.start_view(view.generation, tuple(member.node for member in view.members))
        members = frozenset(view.members)
        for peer in self.peers:
            if peer.incarnation in members:
                peer.status = WorkersStatus(Workers.RUNNING, view.generation)
            self._send(peer, start)
        state.start_workers(view, start, state.now + state.settings.lease_s)
        self.view_change.schedule_scale_up(view)

    def _is_job_finished(self) -> bool:
        """Return whether every present node has finished and no absent one is worth waiting for.

        A partition may leave nodes that finished an earlier view. For them the job ends when all members of
        the newest view are lost, even if none of those finished.
        """
        state, newest = self.state, self.state.view
        if not newest.members or self.proposer.proposal:
            return False
        # This runs for every message. Nearly always the first member has not finished, so look no further.
        if not all(self._has_finished_or_is_absent(member, newest.generation) for member in newest.members):
            return False
        statuses = self.view_change.list_statuses()
        staying = {node: status for node, status in statuses.items() if not status.departure}
        timed_out = state.now >= self.view_change.began_at + state.settings.node_timeout_s
        if self.has_finished_node():
            return timed_out or not state.contacts.find_absent_members(staying) - state.unreachable
        is_idle = len(list_finished(staying)) == len(staying)
        return timed_out and is_idle and not self.peers.disconnected

    def _has_finished_or_is_absent(self, member: Incarnation, generation: int) -> bool:
        if member == self.state.incarnation:
            return self.state.status.has_finished(generation)
        peer = self.peers.by_incarnation.get(member)
        return peer is None or peer.is_leaving or peer.status.has_finished(generation)

    def _begin_end(self) -> None:
        """Stop the workers that still run, and let the end of the job be decided."""
        state, view = self.state, self.state.view
        finished = {peer.incarnation for peer in self.peers if peer.status.has_finished(view.generation)}
        finished.add(state.incarnation)
        unfinished = [str(member) for member in view.members if member not in finished]
        self.end_view(ViewEnd.JOB_OVER)
        self.view_change.end = JobEnd(
            0,  # not known before it is proposed
            state.job_failure,
            name_nodes(unfinished),
            len(unfinished),
            state.failure_log.get_failures(state.failed_generation),
        )
        self.view_change.reevaluate()

    def _step_down(self, reason: ViewEndReason) -> None:
        state = self.state
        state.end_role(Search(self.new_leader_address))
        self.end_view(reason, immediately=True)
        redirect = messages.Redirect(self.new_leader_address)
        for peer in self.peers:
            if peer.disconnected_at is None:
                state.send(peer.link, redirect)
                state.disconnect(peer.link)
        for conn_id in self.pending_welcomes:
            state.send(state.links[conn_id], redirect)
        state.emit_event("step-down", reason)

    def close(self) -> None:
        """End the calls to nodes that do not follow."""
        self.discovery.close()

    def _follow_own_status(self, *_: object, is_new: bool = False) -> None:
        self._follow_status(self.state.incarnation, self.state.status, is_new=is_new)

    def _handle_own_join(self, *_: object) -> None:
        self._follow_own_status(is_new=True)
        for peer in self.peers:
            self._refuse_other_script(peer)

    def hand_over(self, departure: DepartureReason) -> bool:
        """Step down for the lowest ranked follower that stays; return whether one is here or may come."""
        state, rank = self.state, self.state.view.rank
        connected = [peer for peer in self.peers if peer.disconnected_at is None]
        staying = [peer.incarnation for peer in connected if not peer.is_leaving]
        members = [node for node in staying if rank(node) is not None]
        if not staying:
            # This node has just begun to lead, or links have just broken: one that stays may lead instead.
            present = [state.incarnation, *(peer.incarnation for peer in connected)]
            may_come = bool(state.contacts.find_absent_members(present) - state.unreachable)
            if may_come:
                self._step_down(NodeLost(state.incarnation.node, Loss.LEFT, departure))
            return may_come
        successor = min(members, key=lambda node: rank(node) or 0) if members else staying[0]
        lost = NodeLost(state.incarnation.node, Loss.LEFT, departure)
        state.record_lost_member(state.incarnation, lost)
        self.end_view(lost)
        self.new_leader_address = successor.address
        return True

    def leave(self, departure: DepartureReason) -> None:
        """Send all followers a leave notice; they look for another leader at once."""
        self._broadcast(messages.LeaveNotice(departure))

    def next_deadline(self) -> float:
        """Return when to advance next."""
        state = self.state
        deadlines = [self.next_scan_at, self.discovery.next_deadline()]
        if self.peers.disconnected:
            deadlines.append(self.next_probe_at)
        if self.active_view:
            delay_s = 0.0 if self.are_newcomers_expected else state.settings.scale_up_delay_s
            if not self.board.delays_newcomers:  # else the next scan asks again
                deadlines.append(self.view_change.scale_up_at - delay_s)
        else:
            deadlines += [self.view_change.next_deadline(), state.disk_stalls_at]
        return min(deadlines)

    def explain_wait(self) -> WaitReason | None:
        """Return why no view is formed."""
        return self.view_change.wait_reason

    _HANDLERS: ClassVar[Handlers] = {
        messages.Hello: _handle_hello,
        messages.LeaderAnnouncement: _handle_announcement,
        messages.Redirect: lambda self, link, redirect: self.discovery.handle_redirect(link, redirect),
        JobEnd: _handle_job_end,
    }
    _FOLLOWER_HANDLERS: ClassVar[Handlers] = {
        messages.Heartbeat: _handle_heartbeat,
        WorkersStatus: _handle_status,
        messages.FailJob: _handle_fail_job,
        messages.LeaveNotice: _handle_leave_notice,
        Vote: _handle_vote,
        ProposalAck: lambda self, peer, ack: self.view_change.handle_ack(peer.incarnation, ack),
        messages.FailureReport: lambda self, peer, report: self.state.record_failure_report(
            peer.incarnation, report
        ),
    }
    _OWN_HANDLERS: ClassVar[Handlers] = {
        interface.JoinRequest: _handle_own_join,
        interface.Preparation: _follow_own_status,
        Fact: lambda self, *_: self._add_facts(self.state.incarnation, self.state.outbox.take()),
        messages.FailureReport: _follow_own_status,
        interface.WorkersFinished: _follow_own_status,
    }
