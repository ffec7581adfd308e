"""One agent's part in the rendezvous, as a pure state machine: events and the time in, effects out.

Theory. Worlds follow one another by dynamic voting (Yeger Lotem, Keidar, Dolev: "Dynamic voting for
consistent primary components", PODC 1997), extended by knowledge of the gone (`quorum`). Two quorums of what
anybody present knows share a live member, so of two sides of a partition one at most forms a world. That a
cut-off side has *stopped* before the other starts is the business of leases (`link`, `following`, `forming`).

An agent plays one role at a time; each role is a module::

                         everybody before us fails to answer
              ┌────────────────────────────────────────────────────┐
              │                                                    ▼
    start ─▶ SEEKING ── Welcome ──▶ FOLLOWING                   LEADING ── JobEnd told ──▶ over
              ▲  ▲                    │  │                         │
              │  └ leader lost, left, ┘  └── JobEnd ──▶ over       │
              │    or stepped down                                 │
              └──────────── a greater claim (`calling`) ───────────┘

and its node's workers are in one state::

    stopped ── JoinRequested ──▶ joined ── proposed, durable, acknowledged, begun ──▶ running
       ▲                                                                                │
       └── Restart, or the leader lost (RestartWorkers), or the lease out (StopWorkers) ┘

A broken link proves nothing: both sides call the other's address again. The peer is dead if its host refuses
the call, and gone if that happens while the peer could have done nothing that we do not know of
(`Body.proves_end`): every follower acknowledges a proposal before it begins, spares too, and one that we sent
away must first have let go (`Body.part`). A peer that does not answer is unreachable, and is lost after the
node timeout. A dead leader's other followers may run until their leases end: `Body.grace` has the next world
wait for those it can neither see nor count gone.

After a crash an agent is a new incarnation that recalls `Memory`, and all it acknowledged is in there. This
module knows no clock, socket, disk, random number or torch; `simulate` plays it through faults.
"""

from __future__ import annotations

from elastic_resume.rendezvous.core.candidate import Candidate, SearchResult
from elastic_resume.rendezvous.core.events import (
    Effect,
    EndJob,
    Event,
    ForceQuorum,
    GiveUp,
    JobFailed,
    JoinRequested,
    Leave,
    MessageReceived,
    PeerConnected,
    PeerDisconnected,
    Persisted,
    PersistentState,
    Settings,
    StateDigested,
    StatusPublished,
    WorkerFailed,
    WorkersFinished,
)
from elastic_resume.rendezvous.core.failure_log import bound_failures
from elastic_resume.rendezvous.core.follower import Follower
from elastic_resume.rendezvous.core.leader import Leader
from elastic_resume.rendezvous.core.messages import FailureReport, Header, Hello, JobEnd
from elastic_resume.rendezvous.core.quorum import Incarnation, View
from elastic_resume.rendezvous.core.state import Link, NodeState

EMPTY_HEADER = Header(0, 0)


class RendezvousNode:
    """The state machine. `handle` takes one event; call it with a `Tick` no later than `next_deadline`."""

    def __init__(
        self,
        settings: Settings,
        incarnation: Incarnation,
        persistent_state: PersistentState | None,
        now: float,
        max_generation: int = 0,
    ) -> None:
        """``memory``: what a former life left. ``seen``: a generation that this node knows from elsewhere."""
        self.state = NodeState(settings, incarnation, persistent_state, now, max_generation)
        self.role: Candidate | Follower | Leader | None = Candidate(self.state)
        self.next_deadline = now
        """When to call `handle` with a `Tick` at the latest."""
        self.end_reason = ""
        """Why this agent takes no part any more; empty while it does."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event at the time `now`, in seconds since boot; return what is to be done, in order."""
        body = self.state
        self._advance_clock(now)
        body.effects = []
        if self.end_reason:
            self._handle_after_end(event)
            self.next_deadline = float("inf")
            return body.effects
        self._dispatch(event)
        if not self.end_reason:
            self._advance_role()
        body.request_persist()
        self.next_deadline = self._compute_deadline()
        return body.effects

    def _advance_clock(self, now: float) -> None:
        """Take the time. After a pause of this process, what others sent meanwhile still waits to be read.

        To wait longer before we count somebody silent is always safe.
        """
        body = self.state
        late = now - max(body.now, self.next_deadline)
        body.now = max(now, body.now)
        if late > body.settings.heartbeat_interval_s:
            for link in body.links.values():
                link.last_received_at += late

    def _dispatch(self, event: Event) -> None:
        body, role = self.state, self.role
        if isinstance(event, MessageReceived):
            self._handle_message(event)
        elif isinstance(event, PeerConnected):
            self._handle_connected(event)
        elif isinstance(event, PeerDisconnected):
            link = body.links.pop(event.conn_id, None)
            body.pending_closes.pop(event.conn_id, None)
            if link and link.address in body.settings.candidates:
                body.unreachable_reasons[link.address] = event.reason[:120]
            if event.refused and link and link.state_at_dial:
                body.mark_dead_at(link.address, link.state_at_dial)
            if link and role:
                role.handle_disconnected(link, refused=event.refused)
        elif isinstance(event, Persisted):
            body.durable_version = max(body.durable_version, event.version)
        elif isinstance(event, JoinRequested):
            body.stop_workers("torchelastic stopped its workers")
            body.join, body.join_since = event.join, body.now
            if isinstance(role, (Follower, Leader)):
                role.handle_join_requested()
        elif isinstance(event, WorkersFinished):
            self._handle_workers_finished()
        elif isinstance(event, WorkerFailed):
            self._handle_worker_failed(event)
        elif isinstance(event, JobFailed):
            body.job_failure = event.reason
            if isinstance(role, Follower):
                role.send_reports()
        elif isinstance(event, StateDigested):
            body.queue_digest(event.state_digest)
        elif isinstance(event, StatusPublished):
            body.status_outbox.add(event.status, event.event_lines)
        elif isinstance(event, ForceQuorum):
            self._force_quorum(event.generation)
        elif isinstance(event, Leave):
            self._handle_leave(event)

    def _handle_message(self, event: MessageReceived) -> None:
        link = self.state.links.get(event.conn_id)
        if link and self.role:
            link.record_header(event.header, self.state.now)
            self.role.handle_message(link, event.header, event.message)

    def _handle_connected(self, event: PeerConnected) -> None:
        body = self.state
        link = body.links.get(event.conn_id)
        if link is None and event.conn_id < 0:
            body.links[event.conn_id] = Link(event.conn_id)
        elif link and self.role:
            link.ip_address = event.ip_address
            self.role.handle_connected(link)

    def _handle_workers_finished(self) -> None:
        body = self.state
        # They may have ended just before a restart of their world was heard of.
        world = body.running_view or body.last_view
        if world is None or body.join is not None:
            return
        body.finished_generation, body.running_view = world.generation, None
        if isinstance(self.role, (Follower, Leader)):
            self.role.handle_workers_finished()

    def _handle_worker_failed(self, event: WorkerFailed) -> None:
        body = self.state
        body.failure_report = FailureReport(event.generation, event.failure)
        body.record_failure_report(body.incarnation, body.failure_report)  # should we lead, now or next
        if isinstance(self.role, Follower):
            self.role.send_reports()

    def _force_quorum(self, generation: int) -> None:
        if isinstance(self.role, Follower):
            self.role.force_quorum(generation)
        else:
            running = isinstance(self.role, Leader) and self.role.view is not None
            self.state.force_quorum(generation, running=running)

    def _handle_leave(self, event: Leave) -> None:
        if isinstance(self.role, (Follower, Leader)):
            self.role.leave(event.reason)
        self._close(f"left: {event.reason}")

    def _advance_role(self) -> None:
        """Let the role act; change roles until one stays."""
        body = self.state
        body.expire_pending_closes()
        before = None
        while self.role is not before and not self.end_reason:
            before = self.role
            if self.role:
                self.role.advance()
            self._change_role()
        waited = body.now - body.join_since
        if body.join and not self.end_reason and waited >= body.settings.join_timeout_s and self.role:
            reason = f"no world within {body.settings.join_timeout_s:g} s: {self.role.explain_wait()}"
            if isinstance(self.role, (Follower, Leader)):
                self.role.leave(reason)
            body.effects.append(GiveUp(reason))
            self._close(reason)

    def _change_role(self) -> None:
        body, role = self.state, self.role
        if body.job_end:
            self._end_job(body.job_end)
        elif isinstance(role, Candidate):
            self._finish_search(role)
        elif isinstance(role, Follower) and role.has_ended:
            self.role = Candidate(body, role.next_leader_address)
        elif isinstance(role, Leader) and role.has_stepped_down:
            role.close()
            self.role = Candidate(body, role.new_leader_address)

    def _end_job(self, end: JobEnd) -> None:
        self.state.job_end = end
        if end.is_final:
            self.state.drop_all_views()
        done = "every node has finished"
        if end.unfinished_nodes:
            done = f"all that are left have finished; not there at the end: {', '.join(end.unfinished_nodes)}"
        self.state.effects.append(
            EndJob(end.failure_reason or done, bool(end.failure_reason), bound_failures(end.failures))
        )
        self._close("ended")

    def _finish_search(self, role: Candidate) -> None:
        body = self.state
        alone = body.finished_generation and body.now >= role.started_at + body.settings.node_timeout_s
        if role.result is SearchResult.FOLLOW and role.link and role.welcome:
            role.close()
            body.merge_quorum_state(role.welcome.quorum_state)
            role.link.peer = role.welcome.leader
            if body.quorum_state != role.welcome.quorum_state:
                # A call was refused after we had said hello: the leader may wait for somebody who is dead.
                body.send(role.link, body.make_hello())
            self.role = Follower(body, role.link, role.welcome.leader)
            self.role.send_reports()
            for conn, hello in role.waiting_peers.items():
                self._forward_hello(conn, hello)
        elif role.result is SearchResult.LEAD:
            role.close()
            self.role = Leader(body, role.waiting_peers)
        elif role.result is SearchResult.REFUSED:
            body.effects.append(GiveUp(role.refusal_reason, is_permanent=True))
            self._close(role.refusal_reason)
        elif alone:
            self._end_job(JobEnd(body.finished_generation))

    def _forward_hello(self, conn_id: int, hello: Hello) -> None:
        """Tell one that waited for us who leads."""
        link = self.state.links.get(conn_id)
        if link and self.role:
            self.role.handle_message(link, EMPTY_HEADER, hello)

    def _close(self, reason: str) -> None:
        """Take no part any more."""
        self.state.stop_workers(reason)
        self.end_reason = reason
        if self.role:
            self.role.close()
        self.role = None

    def _handle_after_end(self, event: Event) -> None:
        """Tell those who still ask that the job has ended; close what else comes."""
        body = self.state
        if isinstance(event, Persisted):
            body.durable_version = max(body.durable_version, event.version)
            body.request_persist()
        elif isinstance(event, PeerConnected):
            body.links[event.conn_id] = Link(event.conn_id)
        elif isinstance(event, PeerDisconnected):
            body.links.pop(event.conn_id, None)
        elif isinstance(event, MessageReceived) and event.conn_id in body.links:
            link = body.links[event.conn_id]
            if isinstance(event.message, Hello) and body.job_end:
                body.send(link, body.job_end)
            body.disconnect(link)

    def _compute_deadline(self) -> float:
        body = self.state
        if self.role is None:
            return float("inf")
        waits = [self.role.next_deadline(), *body.pending_closes.values()]
        if body.join:
            waits.append(body.join_since + body.settings.join_timeout_s)
        if isinstance(self.role, Candidate) and body.finished_generation:
            waits.append(self.role.started_at + body.settings.node_timeout_s)
        return min(waits)

    # What the shell reads after every event.

    @property
    def lease_until(self) -> float:
        """Until when workers may run without another word from here; for their own watch as well."""
        return self.state.lease_until

    @property
    def running_view(self) -> View | None:
        """The world whose workers run on this node."""
        return self.state.running_view

    @property
    def can_announce_leave(self) -> bool:
        """Whether a goodbye would reach those who might wait for this agent: its leader, or its followers."""
        role, present = self.role, {self.state.incarnation}
        if isinstance(role, Follower):
            return not role.is_disconnected
        if isinstance(role, Leader):
            present |= set(role.peers.by_incarnation) - set(role.peers.disconnected)
        return not self.state.find_absent_members(present)

    @property
    def can_force_quorum(self) -> bool:
        """Whether to hand in `ForceQuorum` now: not while a search goes on that will end soon."""
        return not isinstance(self.role, Candidate) or self.role.find_higher_priority() is None

    @property
    def is_leader(self) -> bool:
        """Whether this agent leads."""
        return isinstance(self.role, Leader)
