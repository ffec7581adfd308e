"""The follower's role: heartbeats under a lease, acknowledged proposals, and detection of a lost leader.

If the link breaks, the follower dials its leader again. Only a refused connection proves that the leader
died; otherwise the leader counts as unreachable after the node timeout.
"""

from __future__ import annotations

from elastic_resume.rendezvous.core import messages
from elastic_resume.rendezvous.core.events import DeliverPeerStatus
from elastic_resume.rendezvous.core.peers import NEVER, Link
from elastic_resume.rendezvous.core.quorum import Incarnation, View
from elastic_resume.rendezvous.core.state import NodeState

FIRST_REDIAL_PAUSE_S = 0.005
"""Before the second call to a lost leader. Each later pause doubles, up to `Settings.probe_interval_s`."""
MAX_PAUSE_DOUBLINGS = 10


class Follower:
    """The role of a node that has a leader."""

    def __init__(self, state: NodeState, link: Link, leader: Incarnation) -> None:
        self.state = state
        self.link = link
        self.leader = leader
        self.has_ended = False
        """This node follows the leader no longer."""
        self.next_leader_address = ""
        self.wait_reason = ""
        self.standby_generation = 0
        """The generation that runs without this node."""
        self.next_heartbeat_at = state.now
        # The leader includes this node only after its first reply. Until then it may form views without this
        # node, so its death would prove nothing.
        link.acked_sent_at = link.leader_lease_until = NEVER
        self.proposal: View | None = None
        self.proposal_version = 0
        self.acknowledged_proposal: View | None = None
        self.is_disconnected = False
        """The link broke, and this node dials until the leader answers, is dead, or is unreachable."""
        self.redial_link: Link | None = None
        self.redial_count = 0
        """Calls since the link broke."""
        self.redial_at = state.now
        """When the call in progress times out; without one, when to make the next."""
        state.unreachable.discard(leader)

    def handle_message(self, link: Link, header: messages.Header, message: messages.Message) -> None:
        """Handle one message; only the leader's has effects."""
        if isinstance(message, (messages.Hello, messages.LeaderAnnouncement)):
            if isinstance(message, messages.LeaderAnnouncement):
                self.state.record_announced_generation(message)
            self.state.send(link, messages.Redirect(self.leader.address))
        elif link is self.redial_link:
            self._handle_redial_reply(link, message)
        elif link is self.link and not self.is_disconnected:
            self._handle_leader_message(header, message)
            self._renew_lease(header)
            self._extend_join_timeout(header)

    def _handle_leader_message(self, header: messages.Header, message: messages.Message) -> None:
        state = self.state
        if isinstance(message, messages.Heartbeat):
            if message.status_update:
                state.effects.append(
                    DeliverPeerStatus(self.leader, message.status_update, state.installed_generation)
                )
        elif isinstance(message, messages.ProposeView):
            state.merge_quorum_state(message.quorum_state)
            state.set_quorum_state(state.quorum_state.with_proposal(message.view))
            self.proposal, self.proposal_version = message.view, state.version
        elif isinstance(message, messages.InstallView):
            self._install_view(header, message)
        elif isinstance(message, messages.EndView):
            state.merge_quorum_state(message.quorum_state)
            state.stop_workers(message.reason)
        elif isinstance(message, messages.WaitReason):
            self.wait_reason = message.reason
            state.emit_event("waiting", message.reason)
        elif isinstance(message, messages.ReplicasDiverged):
            state.effects.append(message)
        elif isinstance(message, messages.JobEnd):
            state.job_end = message
        elif isinstance(message, (messages.Redirect, messages.Refused)):
            self.next_leader_address = message.address if isinstance(message, messages.Redirect) else ""
            self._end_following("the leader stepped down")
        elif isinstance(message, messages.LeaveNotice):
            state.merge_quorum_state(message.quorum_state)
            self._end_following(f"the leader {self.leader} left ({message.reason})", dead=True)

    def _install_view(self, header: messages.Header, message: messages.InstallView) -> None:
        state, view = self.state, self.acknowledged_proposal
        if view is None or view.generation != message.generation:
            return
        self.acknowledged_proposal = self.proposal = None
        state.set_quorum_state(state.quorum_state.with_installed(view))
        lease_until = self._compute_lease_until(header)
        if view.rank(state.incarnation) is None:
            return
        if lease_until <= state.now:
            # Stay connected: the leader might take a closed connection for the death of this node.
            state.emit_event(
                "lease-expired",
                f"generation {view.generation}: the start message arrived after the lease expired; rejoining",
            )
            self.handle_join_requested()
        elif state.join is not None:
            state.start_workers(view, message, lease_until)

    def _extend_join_timeout(self, header: messages.Header) -> None:
        """Restart the join timeout while a view runs without this node: a spare may wait for long."""
        state = self.state
        if not header.generation or state.running_view or state.join is None:
            return
        state.join_since = state.now
        if self.standby_generation != header.generation:
            self.standby_generation = header.generation
            state.emit_event(
                "spare", f"generation {header.generation} runs without this node, which stands by"
            )

    def _compute_lease_until(self, header: messages.Header) -> float:
        return self.link.acked_sent_at + min(header.lease_s, self.state.settings.lease_s)

    def _renew_lease(self, header: messages.Header) -> None:
        state = self.state
        if state.running_view and state.running_view.generation == header.generation:
            state.lease_until = max(state.lease_until, self._compute_lease_until(header))

    def _handle_redial_reply(self, link: Link, message: messages.Message) -> None:
        if isinstance(message, messages.Welcome):
            self.state.disconnect(self.link)
            link.acked_sent_at = link.leader_lease_until = NEVER
            if message.leader == self.leader:
                link.inherit_lease(self.link)
            self.next_heartbeat_at = self.state.now
            self.leader = link.peer = message.leader
            self.link, self.redial_link, self.is_disconnected = link, None, False
            self.state.merge_quorum_state(message.quorum_state)
            if not message.resumes_view:
                self.state.stop_workers("the leader no longer runs the generation of this node")
            self.send_reports()
        elif isinstance(message, messages.JobEnd):
            self.state.job_end = message
        else:
            self.next_leader_address = (
                message.address if isinstance(message, messages.Redirect) else self.leader.address
            )
            self._end_following("the leader does not readmit this node")

    def handle_connected(self, link: Link) -> None:
        """Introduce this node again after a successful redial."""
        if link is self.redial_link:
            self.redial_at = self.state.now + self.state.settings.redial_timeout_s
            self.state.send(link, self.state.make_hello())

    def handle_disconnected(self, link: Link, *, refused: bool) -> None:
        """Redial the leader after its link broke; only a refused call proves its death."""
        state = self.state
        if link is self.link:
            self.is_disconnected = True
            self.proposal = None
            self.acknowledged_proposal = None
            self.redial_count = 0
            self._redial_leader()
        elif link is self.redial_link and refused:
            dead = state.proves_death(self.link, refused=True)
            self._end_following(f"the leader {self.leader} died", dead=dead, unreachable=not dead)
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

    def _end_following(self, reason: str, *, dead: bool = False, unreachable: bool = False) -> None:
        state, timeout_s = self.state, self.state.settings.node_timeout_s
        self.has_ended = True
        if state.now < min(self.link.last_received_at, self.link.leader_lease_until) + timeout_s:
            state.extend_grace(timeout_s)  # other followers may run until their leases expire
        state.stop_workers(reason)
        state.emit_event("leader-lost", reason)
        if dead or unreachable:
            state.record_lost_member(self.leader, reason.removeprefix(f"the leader {self.leader} "))
        if dead:
            state.set_quorum_state(state.quorum_state.with_dead([self.leader]))
            state.extend_grace(timeout_s)  # its other followers may not know yet
            # The lease of the leader before still counts: this leader may have died before it granted one.
            state.view_current_until = max(state.view_current_until, self.compute_view_current_until())
        if unreachable:
            state.unreachable.add(self.leader)
        state.disconnect(self.link)
        if self.redial_link:
            state.disconnect(self.redial_link)

    def compute_view_current_until(self) -> float:
        """Return until when no view can have been installed without this node.

        The dead leader had a quorum of followers until its lease expired. Its followers wait a node timeout
        for the members that they know, but never for a spare. The time counts from sending, because the
        leader's last message may have been queued here.
        """
        if self.state.is_spare:
            return NEVER
        return min(self.link.leader_lease_until, self.link.acked_sent_at + self.state.settings.lease_s)

    def advance(self) -> None:
        """Check the own lease first; then send heartbeats and acknowledgements, and watch the leader."""
        state = self.state
        if state.running_view and state.now >= state.lease_until:
            state.stop_workers(
                f"the lease expired: no message from the leader {self.leader}", immediately=True
            )
        if self.has_ended or state.job_end:
            return
        if state.now >= self.link.last_received_at + state.settings.node_timeout_s:
            self._end_following(f"the leader {self.leader} is unreachable", unreachable=True)
            return
        if self.is_disconnected:
            if state.now >= self.redial_at:
                self._redial_leader()
            return
        if self.proposal and state.durable_version >= self.proposal_version and not state.pending_closes:
            state.send(self.link, messages.ProposalAck(self.proposal.generation))
            self.acknowledged_proposal, self.proposal = self.proposal, None
        if state.now >= self.next_heartbeat_at:
            state.send(
                self.link, messages.Heartbeat(state.take_digest(), state.status_outbox.take(self.leader))
            )
            self.next_heartbeat_at = state.now + state.settings.heartbeat_interval_s

    def send_reports(self) -> None:
        """Repeat what may have changed since the hello was sent."""
        if self.state.failure_report and not self.is_disconnected:
            self.state.send(self.link, self.state.failure_report)
        if self.state.job_failure and not self.is_disconnected:
            self.state.send(self.link, messages.FailJob(self.state.job_failure))
        if self.state.join:
            self.handle_join_requested()
        elif self.state.finished_generation:
            self.handle_workers_finished()

    def handle_join_requested(self) -> None:
        """Report that this node's workers are stopped and that it joins the next view."""
        if self.state.join and not self.is_disconnected:
            self.state.send(self.link, messages.JoinRequest(self.state.join))

    def handle_imports_finished(self) -> None:
        """Report that this node, which has joined, imports nothing any more."""
        if not self.is_disconnected:
            self.state.send(self.link, messages.ImportsFinished())

    def force_quorum(self, generation: int) -> None:
        """Pass an operator's request to the leader."""
        if not self.is_disconnected:
            self.state.send(self.link, messages.ForceQuorumRequest(generation))

    def handle_workers_finished(self) -> None:
        """Report that this node's workers have finished."""
        if not self.is_disconnected:
            self.state.send(self.link, messages.NodeFinished(self.state.finished_generation))

    def leave(self, reason: str) -> None:
        """Send the leader a leave notice."""
        if not self.is_disconnected:
            self.state.send(self.link, messages.LeaveNotice(reason, self.state.quorum_state))

    def next_deadline(self) -> float:
        """Return when to advance next."""
        state = self.state
        lease_until = state.lease_until if state.running_view else float("inf")
        due = self.redial_at if self.is_disconnected else self.next_heartbeat_at
        return min(lease_until, due, self.link.last_received_at + state.settings.node_timeout_s)

    def explain_wait(self) -> str:
        """Return one clause for the error after the join timeout."""
        reason = f": {self.wait_reason}" if self.wait_reason else ""
        return f"the leader {self.leader} started no generation with this node{reason}"
