"""Being a member: heartbeats under a lease, acknowledging proposals, and noticing that the leader is lost."""

from __future__ import annotations

from elastic_resume.rendezvous.core.events import DeliverPeerStatus, ReportDivergence
from elastic_resume.rendezvous.core.messages import (
    EndView,
    FailJob,
    ForceQuorumRequest,
    Header,
    Heartbeat,
    Hello,
    InstallView,
    JobEnd,
    JoinRequest,
    LeaderAnnouncement,
    LeaveNotice,
    Message,
    NodeFinished,
    ProposalAck,
    ProposeView,
    Redirect,
    Refused,
    ReplicasDiverged,
    WaitReason,
    Welcome,
)
from elastic_resume.rendezvous.core.quorum import Incarnation, View
from elastic_resume.rendezvous.core.state import NEVER, Link, NodeState

FIRST_REDIAL_PAUSE_S = 0.005
"""Before the second call to a lost leader; each later pause is twice as long, up to `probe_s`."""
MAX_PAUSE_DOUBLINGS = 10


class Follower:
    """The role of an agent that has a leader."""

    def __init__(self, state: NodeState, link: Link, leader: Incarnation) -> None:
        self.state = state
        self.link = link
        self.leader = leader
        self.has_ended = False
        """The relation to the leader has ended."""
        self.next_leader_address = ""
        self.wait_reason = ""
        self.standby_generation = 0
        """The generation that runs without this node."""
        self.next_heartbeat_at = state.now
        # The leader includes us only after it receives our first reply. Until then it may form worlds without
        # us, so its death would prove nothing.
        link.acked_sent_at = link.leader_lease_until = NEVER
        self.proposal: View | None = None
        self.proposal_version = 0
        self.acknowledged_proposal: View | None = None
        self.is_disconnected = False
        """The link to the leader broke: it is called again until it answers, is dead, or is given up."""
        self.redial_link: Link | None = None
        self.redial_count = 0
        """How many since the link broke."""
        self.redial_at = state.now
        """When the call under way has taken too long; without one, when to make the next."""
        state.unreachable.discard(leader)

    def handle_message(self, link: Link, header: Header, message: Message) -> None:
        """Take in a message; only the leader's counts."""
        if isinstance(message, (Hello, LeaderAnnouncement)):
            if isinstance(message, LeaderAnnouncement):
                self.state.record_announced_generation(message)
            self.state.send(link, Redirect(self.leader.address))
        elif link is self.redial_link:
            self._handle_redial_reply(link, message)
        elif link is self.link and not self.is_disconnected:
            self._handle_leader_message(header, message)
            self._renew_lease(header)
            self._extend_join_timeout(header)

    def _handle_leader_message(self, header: Header, message: Message) -> None:
        body = self.state
        if isinstance(message, Heartbeat):
            if message.status_update:
                body.effects.append(
                    DeliverPeerStatus(self.leader, message.status_update, body.installed_generation)
                )
        elif isinstance(message, ProposeView):
            body.merge_quorum_state(message.quorum_state)
            body.set_quorum_state(body.quorum_state.with_proposal(message.view))
            self.proposal, self.proposal_version = message.view, body.version
        elif isinstance(message, InstallView):
            self._install_view(header, message)
        elif isinstance(message, EndView):
            body.merge_quorum_state(message.quorum_state)
            body.stop_workers(message.reason)
        elif isinstance(message, WaitReason):
            self.wait_reason = message.reason
            body.emit_event("waiting", message.reason)
        elif isinstance(message, ReplicasDiverged):
            body.effects.append(ReportDivergence(message))
        elif isinstance(message, JobEnd):
            body.job_end = message
        elif isinstance(message, (Redirect, Refused)):
            self.next_leader_address = message.address if isinstance(message, Redirect) else ""
            self._end_following("the leader stepped down")
        elif isinstance(message, LeaveNotice):
            body.merge_quorum_state(message.quorum_state)
            self._end_following(f"{self.leader}, which led, left ({message.reason})", dead=True)

    def _install_view(self, header: Header, message: InstallView) -> None:
        body = self.state
        world = (
            self.acknowledged_proposal
            if body.settings.rules.two_phase
            else self.acknowledged_proposal or self.proposal
        )
        if world is None or world.generation != message.generation:
            return
        self.acknowledged_proposal = self.proposal = None
        body.set_quorum_state(body.quorum_state.with_installed(world))
        fence_at = self._compute_lease_until(header)
        if world.rank(body.incarnation) is None:
            return
        if fence_at <= body.now:
            # Not a reason to hang up: the leader might take that for our end, and we live.
            body.emit_event(
                "lease-expired", f"generation {world.generation} began too long ago to start workers in it"
            )
            self.handle_join_requested()
        elif body.join is not None:
            body.start_workers(world, message, fence_at)

    def _extend_join_timeout(self, header: Header) -> None:
        """A world that runs without this node is no reason to give up waiting: a spare waits for long."""
        body = self.state
        if not header.generation or body.running_view or body.join is None:
            return
        body.join_since = body.now
        if self.standby_generation != header.generation:
            self.standby_generation = header.generation
            body.emit_event(
                "spare", f"generation {header.generation} runs without this node, which stands by"
            )

    def _compute_lease_until(self, header: Header) -> float:
        return self.link.acked_sent_at + min(header.lease_s, self.state.settings.lease_s)

    def _renew_lease(self, header: Header) -> None:
        body = self.state
        if body.running_view and body.running_view.generation == header.generation:
            body.lease_until = max(body.lease_until, self._compute_lease_until(header))

    def _handle_redial_reply(self, link: Link, message: Message) -> None:
        if isinstance(message, Welcome):
            self.state.disconnect(self.link)
            link.acked_sent_at = link.leader_lease_until = NEVER
            if message.leader == self.leader:
                link.inherit_lease(self.link)
            self.next_heartbeat_at = self.state.now
            self.leader = link.peer = message.leader
            self.link, self.redial_link, self.is_disconnected = link, None, False
            self.state.merge_quorum_state(message.quorum_state)
            if not message.resumes_view:
                self.state.stop_workers("the leader has no running world with this node")
            self.send_reports()
        elif isinstance(message, JobEnd):
            self.state.job_end = message
        else:
            self.next_leader_address = (
                message.address if isinstance(message, Redirect) else self.leader.address
            )
            self._end_following("the leader does not take this node back")

    def handle_connected(self, link: Link) -> None:
        """The leader is there again: go on as before."""
        if link is self.redial_link:
            self.redial_at = self.state.now + self.state.settings.redial_timeout_s
            self.state.send(link, self.state.make_hello())

    def handle_disconnected(self, link: Link, *, refused: bool) -> None:
        """Call the leader again when the link broke; take only a refused call for its death."""
        body = self.state
        if link is self.link:
            self.is_disconnected = True
            self.proposal = None
            self.acknowledged_proposal = None
            self.redial_count = 0
            self._redial_leader()
        elif link is self.redial_link and refused:
            gone = body.proves_death(self.link, refused=True)
            self._end_following(f"{self.leader}, which led, died", dead=gone, unreachable=not gone)
        elif link is self.redial_link:
            # A dying process may still take a call in the moment before its host refuses all.
            pause_s = min(
                body.settings.probe_interval_s,
                FIRST_REDIAL_PAUSE_S * 2 ** min(self.redial_count - 1, MAX_PAUSE_DOUBLINGS),
            )
            self.redial_link, self.redial_at = None, body.now + pause_s

    def _redial_leader(self) -> None:
        """Redial the leader; alternate its last IP address, which needs no DNS, with its name.

        A slow name server must not cost the world, and the name may have another address now.
        """
        body = self.state
        if self.redial_link:
            body.disconnect(self.redial_link)
        self.redial_count += 1
        self.redial_link = body.dial(
            self.leader.address, self.link.ip_address if self.redial_count % 2 else ""
        )
        self.redial_at = body.now + body.settings.redial_timeout_s

    def _end_following(self, reason: str, *, dead: bool = False, unreachable: bool = False) -> None:
        body, timeout_s = self.state, self.state.settings.node_timeout_s
        self.has_ended = True
        if body.now < min(self.link.last_received_at, self.link.leader_lease_until) + timeout_s:
            body.extend_grace(timeout_s)  # other followers may run until their leases end
        body.stop_workers(reason)
        body.emit_event("leader-lost", reason)
        if dead or unreachable:
            body.record_lost_member(self.leader, reason.removeprefix(f"{self.leader}, which led, "))
        if dead:
            body.set_quorum_state(body.quorum_state.with_dead([self.leader]))
            body.extend_grace(timeout_s)  # its other followers may not know yet
            body.view_current_until = body.compute_view_current_until(self.link)
        if unreachable:
            body.unreachable.add(self.leader)
        body.disconnect(self.link)
        if self.redial_link:
            body.disconnect(self.redial_link)

    def advance(self) -> None:
        """Fence ourselves before anything else; then beat, acknowledge, and watch the leader."""
        body = self.state
        if body.running_view and body.now >= body.lease_until:
            body.stop_workers(
                f"no word from {self.leader}, which leads, for as long as the lease", immediately=True
            )
        if self.has_ended or body.job_end:
            return
        if body.now >= self.link.last_received_at + body.settings.node_timeout_s:
            what = "cannot be reached" if self.is_disconnected else "is silent"
            self._end_following(f"{self.leader}, which led, {what}", unreachable=True)
            return
        if self.is_disconnected:
            if body.now >= self.redial_at:
                self._redial_leader()
            return
        if self.proposal and body.durable_version >= self.proposal_version and not body.pending_closes:
            body.send(self.link, ProposalAck(self.proposal.generation))
            self.acknowledged_proposal, self.proposal = self.proposal, None
        if body.now >= self.next_heartbeat_at:
            body.send(self.link, Heartbeat(body.take_digest(), body.status_outbox.take(self.leader)))
            self.next_heartbeat_at = body.now + body.settings.heartbeat_interval_s

    def send_reports(self) -> None:
        """Say again what may have changed since our hello was sent."""
        if self.state.failure_report and not self.is_disconnected:
            self.state.send(self.link, self.state.failure_report)
        if self.state.job_failure and not self.is_disconnected:
            self.state.send(self.link, FailJob(self.state.job_failure))
        if self.state.join:
            self.handle_join_requested()
        elif self.state.finished_generation:
            self.handle_workers_finished()

    def handle_join_requested(self) -> None:
        """Tell the leader that this node's workers are stopped and it wants to be in the next world."""
        if self.state.join and not self.is_disconnected:
            self.state.send(self.link, JoinRequest(self.state.join))

    def force_quorum(self, generation: int) -> None:
        """Hand an operator's declaration on to the leader, which judges it."""
        if not self.is_disconnected:
            self.state.send(self.link, ForceQuorumRequest(generation))

    def handle_workers_finished(self) -> None:
        """Tell the leader that this node's workers have succeeded."""
        if not self.is_disconnected:
            self.state.send(self.link, NodeFinished(self.state.finished_generation))

    def leave(self, reason: str) -> None:
        """Say goodbye."""
        if not self.is_disconnected:
            self.state.send(self.link, LeaveNotice(reason, self.state.quorum_state))

    def close(self) -> None:
        """Nothing of a member's outlives its relation."""

    def next_deadline(self) -> float:
        """When to look again."""
        body = self.state
        fence_at = body.lease_until if body.running_view else float("inf")
        due = self.redial_at if self.is_disconnected else self.next_heartbeat_at
        return min(fence_at, due, self.link.last_received_at + body.settings.node_timeout_s)

    def explain_wait(self) -> str:
        """One clause for the error after the join timeout."""
        because = f": {self.wait_reason}" if self.wait_reason else ""
        return f"the leader {self.leader} formed no world with this node{because}"
