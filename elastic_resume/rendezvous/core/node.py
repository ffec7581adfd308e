"""One node's part in the rendezvous: a pure state machine that turns events into effects.

`RendezvousNode` dispatches events to the node's current role and changes the role; the package's docstring
describes the protocol. The state that outlives a role is `state.NodeState`. After a crash the node is a new
incarnation that starts from its `PersistentState`, which holds all that it ever promised and accepted.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_resume.policy.failure_classification import bound_failures
from elastic_resume.policy.reasons import (
    Departure,
    DepartureReason,
    JobFinished,
    JoinTimeout,
    Loss,
    NodeLost,
    ViewEnd,
    WorkersStopped,
)
from elastic_resume.rendezvous.core import interface, messages
from elastic_resume.rendezvous.core.follower import Follower
from elastic_resume.rendezvous.core.leader import Leader
from elastic_resume.rendezvous.core.peers import Link
from elastic_resume.rendezvous.core.searcher import Searcher, SearchResult
from elastic_resume.rendezvous.core.state import NodeState
from elastic_resume.rendezvous.core.world import Incarnation, JobEnd, View

LEAVE_TIMEOUT_S = 2.0
"""How long a node that leaves waits for the decision of a view without it."""


class RendezvousNode:
    """The state machine of one node. Call `handle` with a `Tick` no later than `next_deadline`."""

    def __init__(
        self,
        settings: interface.RendezvousSettings,
        incarnation: Incarnation,
        persistent_state: interface.PersistentState | None,
        now: float,
        max_generation: int = 0,
    ) -> None:
        """Start as a candidate.

        `persistent_state` is that of the former process, `max_generation` a generation known from elsewhere.
        """
        self.state = NodeState(settings, incarnation, persistent_state, now, max_generation)
        self.role: Searcher | Follower | Leader | None = Searcher(self.state)
        self.next_deadline = now
        """When to call `handle` next, at the latest."""
        self.end_reason: interface.StopReason | None = None
        """Why this node has left the rendezvous."""

    def handle(self, event: interface.Event, now: float) -> list[interface.Effect]:
        """Handle one event at the time `now`, in seconds since boot; return effects to carry out in order."""
        state = self.state
        self._advance_clock(now)
        state.effects = []
        if self.end_reason:
            self._handle_after_end(event)
            self.next_deadline = float("inf")
            return state.effects
        self._dispatch(event)
        if not self.end_reason:
            self._advance_role()
        state.request_persist()
        self.next_deadline = self._compute_deadline()
        return state.effects

    def _advance_clock(self, now: float) -> None:
        """Set the time; after a pause of this process, extend the timeouts of its links by the pause.

        Messages that arrived meanwhile still have to be read, and waiting longer is always safe.
        """
        state = self.state
        late_s = now - max(state.now, self.next_deadline)
        state.now = state.voter.now = max(now, state.now)
        if late_s > state.settings.heartbeat_interval_s:
            for link in state.links.values():
                link.last_received_at += late_s

    def _dispatch(self, event: interface.Event) -> None:
        state, role = self.state, self.role
        if isinstance(event, interface.MessageReceived):
            self._handle_message(event)
        elif isinstance(event, interface.PeerConnected):
            self._handle_connected(event)
        elif isinstance(event, interface.PeerDisconnected):
            link = state.links.pop(event.conn_id, None)
            if link and link.address in state.settings.candidates:
                state.connection_errors[link.address] = event.reason[:120]
            if link and event.refused:
                link.refusing_ips = event.refusing_ips
                state.voter.mark_ended_at(link)
            if link and role:
                role.handle_disconnected(link)
        elif isinstance(event, interface.Persisted):
            state.durable_version = max(state.durable_version, event.version)
        elif isinstance(event, messages.JoinRequest):
            state.stop_workers(WorkersStopped(state.incarnation.node))
            state.join, state.join_since = event.join, state.now
            if isinstance(role, (Follower, Leader)):
                role.handle_join_requested()
        elif isinstance(event, messages.ImportsFinished):
            if state.join and state.join.is_importing:
                state.join = replace(state.join, is_importing=False)
                if isinstance(role, (Follower, Leader)):
                    role.handle_imports_finished()
        elif isinstance(event, interface.WorkersFinished):
            self._handle_workers_finished()
        elif isinstance(event, messages.FailureReport):
            state.failure_report = event
            state.record_failure_report(state.incarnation, event)  # this node may be the leader, now or later
            if isinstance(role, Follower):
                role.send_reports()
        elif isinstance(event, messages.UnreachablePeers):
            state.unreachable_peers = event
            if isinstance(role, Follower):
                role.send_reports()
            elif isinstance(role, Leader):
                role.handle_unreachable_peers(state.incarnation, event)
        elif isinstance(event, messages.FailJob):
            state.job_failure, state.has_failed_job = event.failure, True
            state.stop_workers(ViewEnd.JOB_OVER)
            if isinstance(role, Follower):
                role.send_reports()
        elif isinstance(event, messages.StateDigest):
            state.queue_digest(event)
        elif isinstance(event, interface.Leave):
            self._handle_leave(event)

    def _handle_message(self, event: interface.MessageReceived) -> None:
        link = self.state.links.get(event.conn_id)
        if link and self.role:
            link.record_header(event.header, self.state.now)
            self.role.handle_message(link, event.message)

    def _handle_connected(self, event: interface.PeerConnected) -> None:
        state = self.state
        link = state.links.get(event.conn_id)
        if link is None and event.conn_id < 0:
            state.links[event.conn_id] = Link(event.conn_id, ip_address=event.ip_address)
        elif link and self.role:
            link.ip_address = event.ip_address
            self.role.handle_connected(link)

    def _handle_workers_finished(self) -> None:
        state = self.state
        # They may have finished just before EndView arrived.
        view = state.running_view or state.last_view
        if view is None or state.join is not None:
            return
        state.finished_generation, state.running_view, state.join_since = view.generation, None, state.now
        if isinstance(self.role, (Follower, Leader)):
            self.role.handle_workers_finished()

    def _handle_leave(self, event: interface.Leave) -> None:
        """Vote for a view without this node before it leaves, if others are here."""
        state, role = self.state, self.role
        waits = state.voter.is_voter and not state.settings.single_node
        if isinstance(role, Leader):
            # A follower whose link has just broken may be back in time for the notice.
            waits = waits and (role.hand_over(event.departure) or bool(role.peers.disconnected))
        if not waits or role is None:
            self._leave(event.departure)
            return
        state.leaving, state.leave_at = event.departure, state.now + LEAVE_TIMEOUT_S
        state.leave_generation = state.view.generation
        state.join = None
        state.stop_workers(NodeLost(state.incarnation.node, Loss.LEFT, event.departure))
        if isinstance(role, Follower):
            role.send_reports()
        elif isinstance(role, Searcher):
            role.send_away_waiting_peers()

    def _leave(self, departure: DepartureReason) -> None:
        if isinstance(self.role, (Follower, Leader)):
            self.role.leave(departure)
        self._close(NodeLost(self.state.incarnation.node, Loss.LEFT, departure))

    def _advance_role(self) -> None:
        """Advance the role, and each new role after it."""
        state = self.state
        before = None
        while self.role is not before and not self.end_reason:
            before = self.role
            if self.role:
                self.role.advance()
            self._change_role()
        # A view that was proposed before may still have this node.
        is_decided = state.view.generation > state.leave_generation
        is_left_out = is_decided and state.view.rank(state.incarnation) is None
        if self.role and state.leaving and (is_left_out or state.now >= state.leave_at):
            self._leave(state.leaving)
            return
        waited_s = state.now - state.join_since
        waits = state.join or state.finished_generation
        if waits and waited_s >= state.settings.join_timeout_s and self.role:
            reason = JoinTimeout(state.settings.join_timeout_s, self.role.explain_wait())
            if isinstance(self.role, (Follower, Leader)):
                self.role.leave(Departure.NO_RENDEZVOUS)
            state.effects.append(interface.EndMembership(reason))
            self._close(reason)

    def _change_role(self) -> None:
        state, role = self.state, self.role
        if state.job_end:
            self._end_job(state.job_end)
        elif isinstance(role, Searcher):
            self._finish_search(role)
        elif isinstance(role, Follower) and role.has_ended:
            self.role = Searcher(state, role.next_leader_address)
        elif isinstance(role, Leader) and role.has_stepped_down:
            role.close()
            self.role = Searcher(state, role.new_leader_address)

    def _end_job(self, end: JobEnd) -> None:
        self.state.job_end = end
        self.state.adopt_view(View(end.generation, ()))
        reason = end.failure or JobFinished(end.unfinished_nodes, end.unfinished_count)
        self.state.effects.append(interface.EndJob(reason, bound_failures(end.failures)))
        self._close(ViewEnd.JOB_OVER)

    def _finish_search(self, role: Searcher) -> None:
        state = self.state
        if role.result is SearchResult.FOLLOW and role.link and role.welcome:
            role.close()
            role.link.peer = role.welcome.leader
            state.adopt_view(role.welcome.view, role.welcome.leader)
            self.role = Follower(state, role.link, role.welcome)
            self.role.send_reports()
            for conn_id, hello in role.waiting_peers.items():
                if conn_id in state.links:
                    self.role.handle_message(state.links[conn_id], hello)
        elif role.result is SearchResult.LEAD:
            role.close()
            self.role = Leader(state, role.waiting_peers)
        elif role.result is SearchResult.REFUSED and role.refusal:
            state.effects.append(interface.EndMembership(role.refusal))
            self._close(role.refusal)

    def _close(self, reason: interface.StopReason) -> None:
        """Leave the rendezvous."""
        self.state.stop_workers(reason)
        self.end_reason = reason
        if isinstance(self.role, (Searcher, Leader)):
            self.role.close()
        self.role = None

    def _handle_after_end(self, event: interface.Event) -> None:
        """Answer each searcher and each leader with the end of the job, and close all connections."""
        state = self.state
        if isinstance(event, interface.Persisted):
            state.durable_version = max(state.durable_version, event.version)
            state.request_persist()
        elif isinstance(event, interface.PeerConnected):
            state.links[event.conn_id] = Link(event.conn_id)
        elif isinstance(event, interface.PeerDisconnected):
            state.links.pop(event.conn_id, None)
        elif isinstance(event, interface.MessageReceived) and event.conn_id in state.links:
            link = state.links[event.conn_id]
            if isinstance(event.message, (messages.Hello, messages.LeaderAnnouncement)) and state.job_end:
                state.send(link, state.job_end)
            state.disconnect(link)

    def _compute_deadline(self) -> float:
        state = self.state
        if self.role is None:
            return float("inf")
        deadlines = [self.role.next_deadline(), state.leave_at]
        if state.join or state.finished_generation:
            deadlines.append(state.join_since + state.settings.join_timeout_s)
        return min(deadlines)

    # Read by the shell after every event.

    @property
    def lease_until(self) -> float:
        """Until when workers may run unless the lease is renewed; their supervisors watch it too."""
        return self.state.lease_until

    @property
    def running_view(self) -> View | None:
        """The view whose workers run on this node."""
        return self.state.running_view

    @property
    def is_leader(self) -> bool:
        """Whether this node leads."""
        return isinstance(self.role, Leader)
