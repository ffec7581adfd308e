"""One node's part in the rendezvous: a pure state machine that turns events into effects.

`RendezvousNode` dispatches events to the node's current role and changes the role; the package's docstring
describes the protocol. The state that outlives a role is `state.NodeState`. After a crash the node is a new
incarnation that starts from its `PersistentState`, which holds all that it ever acknowledged.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_resume.rendezvous.core import events, messages
from elastic_resume.rendezvous.core.candidate import Candidate, SearchResult
from elastic_resume.rendezvous.core.follower import Follower
from elastic_resume.rendezvous.core.leader import Leader
from elastic_resume.rendezvous.core.peers import Link
from elastic_resume.rendezvous.core.quorum import Incarnation, View
from elastic_resume.rendezvous.core.state import NodeState, bound_failures

EMPTY_HEADER = messages.Header(0, 0)


class RendezvousNode:
    """The state machine of one node. Call `handle` with a `Tick` no later than `next_deadline`."""

    def __init__(
        self,
        settings: events.Settings,
        incarnation: Incarnation,
        persistent_state: events.PersistentState | None,
        now: float,
        max_generation: int = 0,
    ) -> None:
        """Start as a candidate.

        `persistent_state` is that of the former process, `max_generation` a generation known from elsewhere.
        """
        self.state = NodeState(settings, incarnation, persistent_state, now, max_generation)
        self.role: Candidate | Follower | Leader | None = Candidate(self.state)
        self.next_deadline = now
        """When to call `handle` next, at the latest."""
        self.end_reason = ""
        """Why this node has left the rendezvous; empty before."""

    def handle(self, event: events.Event, now: float) -> list[events.Effect]:
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
        state.now = max(now, state.now)
        if late_s > state.settings.heartbeat_interval_s:
            for link in state.links.values():
                link.last_received_at += late_s

    def _dispatch(self, event: events.Event) -> None:
        state, role = self.state, self.role
        if isinstance(event, events.MessageReceived):
            self._handle_message(event)
        elif isinstance(event, events.PeerConnected):
            self._handle_connected(event)
        elif isinstance(event, events.PeerDisconnected):
            link = state.links.pop(event.conn_id, None)
            state.pending_closes.pop(event.conn_id, None)
            if link and link.address in state.settings.candidates:
                state.unreachable_reasons[link.address] = event.reason[:120]
            if event.refused and link and link.state_at_dial:
                state.mark_dead_at(link.address, link.state_at_dial)
            if link and role:
                role.handle_disconnected(link, refused=event.refused)
        elif isinstance(event, events.Persisted):
            state.durable_version = max(state.durable_version, event.version)
        elif isinstance(event, messages.JoinRequest):
            state.stop_workers("torchelastic stopped its workers")
            state.join, state.join_since = event.join, state.now
            if isinstance(role, (Follower, Leader)):
                role.handle_join_requested()
        elif isinstance(event, messages.ImportsFinished):
            if state.join and state.join.is_importing:
                state.join = replace(state.join, is_importing=False)
                if isinstance(role, (Follower, Leader)):
                    role.handle_imports_finished()
        elif isinstance(event, events.WorkersFinished):
            self._handle_workers_finished()
        elif isinstance(event, messages.FailureReport):
            state.failure_report = event
            state.record_failure_report(state.incarnation, event)  # this node may be the leader, now or later
            if isinstance(role, Follower):
                role.send_reports()
        elif isinstance(event, messages.FailJob):
            state.job_failure = event.reason
            if isinstance(role, Follower):
                role.send_reports()
        elif isinstance(event, messages.StateDigest):
            state.queue_digest(event)
        elif isinstance(event, events.StatusPublished):
            state.status_outbox.add(event.status, event.event_lines)
        elif isinstance(event, messages.ForceQuorumRequest):
            self._force_quorum(event.generation)
        elif isinstance(event, events.Leave):
            self._handle_leave(event)

    def _handle_message(self, event: events.MessageReceived) -> None:
        link = self.state.links.get(event.conn_id)
        if link and self.role:
            link.record_header(event.header, self.state.now)
            self.role.handle_message(link, event.header, event.message)

    def _handle_connected(self, event: events.PeerConnected) -> None:
        state = self.state
        link = state.links.get(event.conn_id)
        if link is None and event.conn_id < 0:
            state.links[event.conn_id] = Link(event.conn_id)
        elif link and self.role:
            link.ip_address = event.ip_address
            self.role.handle_connected(link)

    def _handle_workers_finished(self) -> None:
        state = self.state
        # They may have finished just before EndView arrived.
        view = state.running_view or state.last_view
        if view is None or state.join is not None:
            return
        state.finished_generation, state.running_view = view.generation, None
        if isinstance(self.role, (Follower, Leader)):
            self.role.handle_workers_finished()

    def _force_quorum(self, generation: int) -> None:
        if isinstance(self.role, Follower):
            self.role.force_quorum(generation)
        else:
            running = isinstance(self.role, Leader) and self.role.view is not None
            self.state.force_quorum(generation, running=running)

    def _handle_leave(self, event: events.Leave) -> None:
        if isinstance(self.role, (Follower, Leader)):
            self.role.leave(event.reason)
        self._close(f"left: {event.reason}")

    def _advance_role(self) -> None:
        """Advance the role, and each new role after it."""
        state = self.state
        state.expire_pending_closes()
        before = None
        while self.role is not before and not self.end_reason:
            before = self.role
            if self.role:
                self.role.advance()
            self._change_role()
        waited_s = state.now - state.join_since
        if state.join and waited_s >= state.settings.join_timeout_s and self.role:
            reason = f"no rendezvous within {state.settings.join_timeout_s:g} s: {self.role.explain_wait()}"
            if isinstance(self.role, (Follower, Leader)):
                self.role.leave(reason)
            state.effects.append(events.GiveUp(reason))
            self._close(reason)

    def _change_role(self) -> None:
        state, role = self.state, self.role
        if state.job_end:
            self._end_job(state.job_end)
        elif isinstance(role, Candidate):
            self._finish_search(role)
        elif isinstance(role, Follower) and role.has_ended:
            self.role = Candidate(state, role.next_leader_address)
        elif isinstance(role, Leader) and role.has_stepped_down:
            role.close()
            self.role = Candidate(state, role.new_leader_address)

    def _end_job(self, end: messages.JobEnd) -> None:
        self.state.job_end = end
        if end.is_final:
            self.state.drop_all_views()
        done = "every node has finished"
        if end.unfinished_nodes:
            done = f"all remaining nodes have finished; absent at the end: {', '.join(end.unfinished_nodes)}"
        self.state.effects.append(
            events.EndJob(end.failure_reason or done, bool(end.failure_reason), bound_failures(end.failures))
        )
        self._close("ended")

    def _finish_search(self, role: Candidate) -> None:
        state = self.state
        is_alone = state.finished_generation and state.now >= role.started_at + state.settings.node_timeout_s
        if role.result is SearchResult.FOLLOW and role.link and role.welcome:
            role.close()
            state.merge_quorum_state(role.welcome.quorum_state)
            role.link.peer = role.welcome.leader
            if state.quorum_state != role.welcome.quorum_state:
                # A refused call proved a death after our hello: the leader may wait for the dead node.
                state.send(role.link, state.make_hello())
            self.role = Follower(state, role.link, role.welcome.leader)
            self.role.send_reports()
            for conn_id, hello in role.waiting_peers.items():
                if conn_id in state.links:
                    self.role.handle_message(state.links[conn_id], EMPTY_HEADER, hello)
        elif role.result is SearchResult.LEAD:
            role.close()
            self.role = Leader(state, role.waiting_peers)
        elif role.result is SearchResult.REFUSED:
            state.effects.append(events.GiveUp(role.refusal_reason, is_permanent=True))
            self._close(role.refusal_reason)
        elif is_alone:
            self._end_job(messages.JobEnd(state.finished_generation))

    def _close(self, reason: str) -> None:
        """Leave the rendezvous."""
        self.state.stop_workers(reason)
        self.end_reason = reason
        if isinstance(self.role, (Candidate, Leader)):
            self.role.close()
        self.role = None

    def _handle_after_end(self, event: events.Event) -> None:
        """Answer each hello with the end of the job, and close all connections."""
        state = self.state
        if isinstance(event, events.Persisted):
            state.durable_version = max(state.durable_version, event.version)
            state.request_persist()
        elif isinstance(event, events.PeerConnected):
            state.links[event.conn_id] = Link(event.conn_id)
        elif isinstance(event, events.PeerDisconnected):
            state.links.pop(event.conn_id, None)
        elif isinstance(event, events.MessageReceived) and event.conn_id in state.links:
            link = state.links[event.conn_id]
            if isinstance(event.message, messages.Hello) and state.job_end:
                state.send(link, state.job_end)
            state.disconnect(link)

    def _compute_deadline(self) -> float:
        state = self.state
        if self.role is None:
            return float("inf")
        deadlines = [self.role.next_deadline(), *state.pending_closes.values()]
        if state.join:
            deadlines.append(state.join_since + state.settings.join_timeout_s)
        if isinstance(self.role, Candidate) and state.finished_generation:
            deadlines.append(self.role.started_at + state.settings.node_timeout_s)
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
    def can_announce_leave(self) -> bool:
        """Whether a leave notice would reach every node that might wait for this one."""
        role, present = self.role, {self.state.incarnation}
        if isinstance(role, Follower):
            return not role.is_disconnected
        if isinstance(role, Leader):
            present |= set(role.peers.by_incarnation) - set(role.peers.disconnected)
        return not self.state.find_absent_members(present)

    @property
    def can_force_quorum(self) -> bool:
        """Whether to send `ForceQuorumRequest` now: not during a search that will end soon."""
        return not isinstance(self.role, Candidate) or self.role.find_higher_priority() is None

    @property
    def is_leader(self) -> bool:
        """Whether this node leads."""
        return isinstance(self.role, Leader)
