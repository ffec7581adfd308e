"""Run one node's part in the rendezvous: a pure state machine that turns events into effects.

`RendezvousNode` dispatches events to the node's current role and changes the role; the package's docstring
describes the protocol. The state that outlives a role is `state.NodeState`. After a crash the node is a new
incarnation. It starts from its `PersistentState`, which holds all its promises and accepted proposals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

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
from elastic_resume.rendezvous.core.messages import Workers
from elastic_resume.rendezvous.core.peers import Link
from elastic_resume.rendezvous.core.searcher import Searcher
from elastic_resume.rendezvous.core.state import Lead, Left, NextRole, NodeState, Role, Search
from elastic_resume.rendezvous.core.world import Incarnation, JobEnd, PersistentState, View
from elastic_resume.rendezvous.facts import Fact

LEAVE_TIMEOUT_S = 2.0
"""How long a node that leaves waits for the decision of a view without it."""
HAND_OVER_AFTER_S = 1.5
"""A node that leaves hands its vote over then. If all leave at once, nobody stays, and all keep theirs."""


class RendezvousNode:
    """The state machine of one node. Call `handle` with a `Tick` no later than `next_deadline`."""

    def __init__(
        self,
        settings: interface.RendezvousSettings,
        incarnation: Incarnation,
        persistent_state: PersistentState | None,
        now: float,
        max_generation: int = 0,
    ) -> None:
        """Start as a searcher.

        `persistent_state` is that of the former process, `max_generation` a generation known from elsewhere.
        """
        self.state = NodeState(settings, incarnation, persistent_state, now, max_generation)
        self.role: Role = Searcher(self.state)
        self._leave_generation = 0
        """The newest view when this node was asked to leave."""
        self._leave_at = float("inf")
        """When it leaves although no view without it is decided."""
        self.next_deadline = now
        """When to call `handle` next, at the latest."""

    def handle(self, event: interface.Event, now: float) -> list[interface.Effect]:
        """Handle one event at the time `now`, in seconds since boot; return effects to carry out in order."""
        state = self.state
        self._advance_clock(now)
        state.effects = []
        is_routine = self._is_routine(event)
        handler = (self._HANDLERS_AFTER_END if self.end_reason else self._HANDLERS).get(type(event))
        if handler:
            handler(self, event)
        if is_routine:
            return state.effects
        if not self.end_reason:
            self._advance_role()
        write = state.request_write()
        if write:
            state.effects.append(write)
        self.next_deadline = self._compute_deadline()
        return state.effects

    def _is_routine(self, event: interface.Event) -> bool:
        """Return whether the role need not look at what is due before its next deadline.

        A leader of thousands spends most of its time on heartbeats.
        """
        if not isinstance(event, interface.MessageReceived) or self.state.now >= self.next_deadline:
            return False
        link = self.state.links.get(event.conn_id)
        return link is not None and self.role.is_routine(link, event.message)

    def _advance_clock(self, now: float) -> None:
        """Set the time; after a pause of this process, extend the timeouts of its links by the pause.

        Messages that arrived meanwhile still have to be read, and waiting longer is always safe.
        """
        state = self.state
        late_s = now - max(state.now, self.next_deadline)
        state.now = state.contacts.now = max(now, state.now)
        if late_s > state.settings.heartbeat_interval_s:
            for link in state.links.values():
                link.last_received_at += late_s

    # Events of the network and the disk.

    def _handle_message(self, event: interface.MessageReceived) -> None:
        link = self.state.links.get(event.conn_id)
        if link:
            link.record_header(event.header, self.state.now)
            self.role.handle_message(link, event.message)

    def _handle_connected(self, event: interface.PeerConnected) -> None:
        state = self.state
        link = state.links.get(event.conn_id)
        if link is None and event.conn_id < 0:
            state.links[event.conn_id] = Link(event.conn_id, ip_address=event.ip_address)
        elif link:
            link.ip_address = event.ip_address
            self.role.handle_connected(link)

    def _handle_disconnected(self, event: interface.PeerDisconnected) -> None:
        state = self.state
        link = state.links.pop(event.conn_id, None)
        if link is None:
            return
        link.is_open = False
        if link.address in state.settings.candidates:
            state.connection_errors[link.address] = event.reason[:120]
        if event.refused:
            link.refusing_ips = event.refusing_ips
            state.contacts.mark_ended_at(link)
        self.role.handle_disconnected(link)

    # Events of this node's agent, before the role handles them.

    def _handle_join_request(self, event: interface.JoinRequest) -> None:
        state = self.state
        if state.is_leaving:
            return  # the agent was about to join when it was asked to leave
        state.stop_workers(WorkersStopped(state.incarnation.node))
        state.set_workers(Workers.JOINED, join=event.join)
        state.join_since, state.script = state.now, event.join.script
        self.role.handle_own(event)

    def _handle_preparation(self, event: interface.Preparation) -> None:
        join = self.state.status.join
        if join:
            self.state.set_workers(Workers.JOINED, join=replace(join, is_preparing=event.is_running))
            self.role.handle_own(event)

    def _handle_workers_finished(self, event: interface.WorkersFinished) -> None:
        state = self.state
        # They may have finished just before EndView arrived.
        view = state.last_view
        if view is None or state.status.workers not in {Workers.RUNNING, Workers.STOPPED}:
            return
        state.status = messages.WorkersStatus(Workers.FINISHED, view.generation)
        state.join_since = state.now
        self.role.handle_own(event)

    def _handle_failure_report(self, event: messages.FailureReport) -> None:
        # It waits before it joins: until then the leader must not take its workers for running ones.
        self.state.stop_workers(WorkersStopped(self.state.incarnation.node))
        self.state.failure_report = event
        self.state.record_failure_report(self.state.incarnation, event)  # this node may lead, now or later
        self.role.handle_own(event)

    def _handle_fact(self, fact: Fact) -> None:
        if self.state.outbox.add(fact):
            self.role.handle_own(fact)

    def _handle_fail_job(self, event: messages.FailJob) -> None:
        self.state.job_failure = event.failure
        self.state.stop_workers(ViewEnd.JOB_OVER)
        if not self.state.is_leaving:
            self.state.set_workers(Workers.FAILED)
        self.role.handle_own(event)

    def _handle_leave(self, event: interface.Leave) -> None:
        """Vote for a view without this node before it leaves, if others are here."""
        state = self.state
        waits = state.acceptor.is_voter and not state.settings.single_node
        if not waits or not self.role.hand_over(event.departure):
            self._leave(event.departure)
            return
        self._leave_at, state.hand_over_at = state.now + LEAVE_TIMEOUT_S, state.now + HAND_OVER_AFTER_S
        self._leave_generation = state.view.generation
        state.stop_workers(NodeLost(state.incarnation.node, Loss.LEFT, event.departure))
        state.set_workers(Workers.LEAVING, departure=event.departure)
        self.role.handle_own(event)

    # Roles.

    def _advance_role(self) -> None:
        """Advance the role, and each new role after it."""
        state = self.state
        self.role.advance()
        while state.next_role:
            self._change_role(state.next_role)
            if self.end_reason:
                return
            self.role.advance()
        departure = state.status.departure
        if departure:
            # A view that was proposed before may still have this node.
            is_decided = state.view.generation > self._leave_generation
            is_left_out = is_decided and state.view.rank(state.incarnation) is None
            if is_left_out or state.is_vote_held or state.now >= self._leave_at:
                self._leave(departure)
                return
        if state.now >= self._give_up_at():
            reason = JoinTimeout(state.settings.join_timeout_s, self.role.explain_wait())
            self.role.leave(Departure.NO_RENDEZVOUS)
            self._give_up(interface.EndMembership(reason))

    def _give_up_at(self) -> float:
        waits = self.state.status.workers in {Workers.JOINED, Workers.FINISHED}
        return self.state.join_since + self.state.settings.join_timeout_s if waits else float("inf")

    def _change_role(self, next_role: NextRole) -> None:
        state, role = self.state, self.role
        if isinstance(next_role, JobEnd):
            self._end_job(next_role)
            return
        if isinstance(next_role, interface.EndMembership):
            self._give_up(next_role)
            return
        role.close()
        state.next_role = None
        if isinstance(next_role, Search):
            self.role = Searcher(state, next_role.first_address)
        elif isinstance(next_role, Lead):
            self.role = Leader(state, next_role.waiting_peers)
        else:
            next_role.link.peer = next_role.welcome.leader
            state.adopt_view(next_role.welcome.view, next_role.welcome.leader)
            self.role = follower = Follower(state, next_role.link, next_role.welcome)
            follower.send_reports()
            for conn_id, hello in next_role.waiting_peers.items():
                if conn_id in state.links:
                    follower.handle_message(state.links[conn_id], hello)

    def _end_job(self, end: JobEnd) -> None:
        self.state.adopt_view(View(end.generation, (), history=end.history))
        reason = end.failure or JobFinished(end.unfinished_nodes, end.unfinished_count)
        self.state.effects.append(interface.EndJob(reason, bound_failures(end.failures)))
        self._close(ViewEnd.JOB_OVER, end)

    def _give_up(self, effect: interface.EndMembership) -> None:
        self.state.effects.append(effect)
        self._close(effect.reason)

    def _leave(self, departure: DepartureReason) -> None:
        self.role.leave(departure)
        self._close(NodeLost(self.state.incarnation.node, Loss.LEFT, departure))

    def _close(self, reason: interface.StopReason, end: JobEnd | None = None) -> None:
        """Leave the rendezvous."""
        self.state.stop_workers(reason)
        self.role.close()
        self.role = Left(self.state, reason, end)

    def _compute_deadline(self) -> float:
        if self.end_reason:
            return float("inf")
        hand_over_at = self.state.hand_over_at if self.state.now < self.state.hand_over_at else self._leave_at
        return min(self.role.next_deadline(), hand_over_at, self._leave_at, self._give_up_at())

    # Read by the shell after every event.

    @property
    def end_reason(self) -> interface.StopReason | None:
        """Why this node has left the rendezvous; None before."""
        return self.role.reason if isinstance(self.role, Left) else None

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

    _HANDLERS_AFTER_END: ClassVar[dict[type[Any], Callable[[RendezvousNode, Any], None]]] = {
        interface.MessageReceived: _handle_message,
        interface.PeerConnected: _handle_connected,
        interface.PeerDisconnected: _handle_disconnected,
        interface.Persisted: lambda self, event: self.state.acceptor.handle_written(event.version),
    }
    _HANDLERS = _HANDLERS_AFTER_END | {
        interface.JoinRequest: _handle_join_request,
        interface.Preparation: _handle_preparation,
        messages.FailureReport: _handle_failure_report,
        messages.FailJob: _handle_fail_job,
        Fact: _handle_fact,
        interface.WorkersFinished: _handle_workers_finished,
        interface.Leave: _handle_leave,
    }
    """By the class of the event; a `Tick` only advances the role."""
