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

from elastic_resume.rendezvous.core.candidate import Seeker, Verdict
from elastic_resume.rendezvous.core.events import (
    Digested,
    Effect,
    EndJob,
    Event,
    ForceQuorum,
    GiveUp,
    JobFailed,
    JoinRequested,
    Leave,
    Memory,
    MessageArrived,
    PeerConnected,
    PeerLost,
    Persisted,
    Settings,
    Telling,
    WorkerFailed,
    WorkersFinished,
)
from elastic_resume.rendezvous.core.failure_log import received
from elastic_resume.rendezvous.core.follower import Follower
from elastic_resume.rendezvous.core.leader import Leader
from elastic_resume.rendezvous.core.messages import Hello, JobEnd, Report, Stamp
from elastic_resume.rendezvous.core.quorum import Incarnation, World
from elastic_resume.rendezvous.core.state import Body, Link

NO_STAMP = Stamp(0, 0)


class Agent:
    """The state machine. `handle` takes one event; call it with a `Tick` no later than `next_deadline`."""

    def __init__(
        self, settings: Settings, me: Incarnation, memory: Memory | None, now: float, seen: int = 0
    ) -> None:
        """``memory``: what a former life left. ``seen``: a generation that this node knows from elsewhere."""
        self.body = Body(settings, me, memory, now, seen)
        self.role: Seeker | Follower | Leader | None = Seeker(self.body)
        self.next_deadline = now
        """When to call `handle` with a `Tick` at the latest."""
        self.over = ""
        """Why this agent takes no part any more; empty while it does."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event at the time `now`, in seconds since boot; return what is to be done, in order."""
        body = self.body
        self._wake(now)
        body.effects = []
        if self.over:
            self._after_the_end(event)
            self.next_deadline = float("inf")
            return body.effects
        self._dispatch(event)
        if not self.over:
            self._advance()
        body.flush()
        self.next_deadline = self._deadline()
        return body.effects

    def _wake(self, now: float) -> None:
        """Take the time. After a pause of this process, what others sent meanwhile still waits to be read.

        To wait longer before we count somebody silent is always safe.
        """
        body = self.body
        late = now - max(body.now, self.next_deadline)
        body.now = max(now, body.now)
        if late > body.settings.beat_s:
            for link in body.links.values():
                link.heard_at += late

    def _dispatch(self, event: Event) -> None:
        body, role = self.body, self.role
        if isinstance(event, MessageArrived):
            self._message(event)
        elif isinstance(event, PeerConnected):
            self._connected(event)
        elif isinstance(event, PeerLost):
            link = body.links.pop(event.conn, None)
            body.witnesses.pop(event.conn, None)
            if link and link.address in body.settings.candidates:
                body.unreached[link.address] = event.why[:120]
            if event.refused and link and link.known:
                body.nobody_at(link.address, link.known)
            if link and role:
                role.lost(link, refused=event.refused)
        elif isinstance(event, Persisted):
            body.durable = max(body.durable, event.number)
        elif isinstance(event, JoinRequested):
            body.stop("torchelastic stopped its workers")
            body.join, body.join_since = event.join, body.now
            if isinstance(role, (Follower, Leader)):
                role.joined()
        elif isinstance(event, WorkersFinished):
            self._finished()
        elif isinstance(event, WorkerFailed):
            self._failed(event)
        elif isinstance(event, JobFailed):
            body.failed = event.reason
            if isinstance(role, Follower):
                role.report()
        elif isinstance(event, Digested):
            body.digested(event.told)
        elif isinstance(event, Telling):
            body.outbox.put(event.pulse, event.lines)
        elif isinstance(event, ForceQuorum):
            self._force_quorum(event.generation)
        elif isinstance(event, Leave):
            self._leave(event)

    def _message(self, event: MessageArrived) -> None:
        link = self.body.links.get(event.conn)
        if link and self.role:
            link.note(event.stamp, self.body.now)
            self.role.answer(link, event.stamp, event.message)

    def _connected(self, event: PeerConnected) -> None:
        body = self.body
        link = body.links.get(event.conn)
        if link is None and event.conn < 0:
            body.links[event.conn] = Link(event.conn)
        elif link and self.role:
            link.host = event.host
            self.role.connected(link)

    def _finished(self) -> None:
        body = self.body
        # They may have ended just before a restart of their world was heard of.
        world = body.running or body.last
        if world is None or body.join is not None:
            return
        body.finished, body.running = world.generation, None
        if isinstance(self.role, (Follower, Leader)):
            self.role.finished()

    def _failed(self, event: WorkerFailed) -> None:
        body = self.body
        body.report = Report(event.generation, event.failure)
        body.heard(body.me, body.report)  # should we lead, now or next
        if isinstance(self.role, Follower):
            self.role.report()

    def _force_quorum(self, generation: int) -> None:
        if isinstance(self.role, Follower):
            self.role.force_quorum(generation)
        else:
            running = isinstance(self.role, Leader) and self.role.world is not None
            self.body.force_quorum(generation, running=running)

    def _leave(self, event: Leave) -> None:
        if isinstance(self.role, (Follower, Leader)):
            self.role.leave(event.reason)
        self._finish(f"left: {event.reason}")

    def _advance(self) -> None:
        """Let the role act; change roles until one stays."""
        body = self.body
        body.expire_witnesses()
        before = None
        while self.role is not before and not self.over:
            before = self.role
            if self.role:
                self.role.advance()
            self._change_role()
        waited = body.now - body.join_since
        if body.join and not self.over and waited >= body.settings.join_timeout_s and self.role:
            reason = f"no world within {body.settings.join_timeout_s:g} s: {self.role.why_waiting()}"
            if isinstance(self.role, (Follower, Leader)):
                self.role.leave(reason)
            body.effects.append(GiveUp(reason))
            self._finish(reason)

    def _change_role(self) -> None:
        body, role = self.body, self.role
        if body.ended:
            self._end_job(body.ended)
        elif isinstance(role, Seeker):
            self._end_of_search(role)
        elif isinstance(role, Follower) and role.over:
            self.role = Seeker(body, role.hint)
        elif isinstance(role, Leader) and role.stepped_down:
            role.retire()
            self.role = Seeker(body, role.yield_to)

    def _end_job(self, end: JobEnd) -> None:
        self.body.ended = end
        if end.settled:
            self.body.forget()
        done = "every node has finished"
        if end.missing:
            done = f"all that are left have finished; not there at the end: {', '.join(end.missing)}"
        self.body.effects.append(EndJob(end.failed or done, bool(end.failed), received(end.failures)))
        self._finish("ended")

    def _end_of_search(self, role: Seeker) -> None:
        body = self.body
        alone = body.finished and body.now >= role.since + body.settings.node_timeout_s
        if role.verdict is Verdict.FOLLOW and role.link and role.welcome:
            role.retire()
            body.learn(role.welcome.knowledge)
            role.link.who = role.welcome.who
            if body.known != role.welcome.knowledge:
                # A call was refused after we had said hello: the leader may wait for somebody who is dead.
                body.send(role.link, body.hello())
            self.role = Follower(body, role.link, role.welcome.who)
            self.role.report()
            for conn, hello in role.waiters.items():
                self._pass_on(conn, hello)
        elif role.verdict is Verdict.LEAD:
            role.retire()
            self.role = Leader(body, role.waiters)
        elif role.verdict is Verdict.REFUSED:
            body.effects.append(GiveUp(role.refusal, final=True))
            self._finish(role.refusal)
        elif alone:
            self._end_job(JobEnd(body.finished))

    def _pass_on(self, conn: int, hello: Hello) -> None:
        """Tell one that waited for us who leads."""
        link = self.body.links.get(conn)
        if link and self.role:
            self.role.answer(link, NO_STAMP, hello)

    def _finish(self, reason: str) -> None:
        """Take no part any more."""
        self.body.stop(reason)
        self.over = reason
        if self.role:
            self.role.retire()
        self.role = None

    def _after_the_end(self, event: Event) -> None:
        """Tell those who still ask that the job has ended; close what else comes."""
        body = self.body
        if isinstance(event, Persisted):
            body.durable = max(body.durable, event.number)
            body.flush()
        elif isinstance(event, PeerConnected):
            body.links[event.conn] = Link(event.conn)
        elif isinstance(event, PeerLost):
            body.links.pop(event.conn, None)
        elif isinstance(event, MessageArrived) and event.conn in body.links:
            link = body.links[event.conn]
            if isinstance(event.message, Hello) and body.ended:
                body.send(link, body.ended)
            body.hang_up(link)

    def _deadline(self) -> float:
        body = self.body
        if self.role is None:
            return float("inf")
        waits = [self.role.deadline(), *body.witnesses.values()]
        if body.join:
            waits.append(body.join_since + body.settings.join_timeout_s)
        if isinstance(self.role, Seeker) and body.finished:
            waits.append(self.role.since + body.settings.node_timeout_s)
        return min(waits)

    # What the shell reads after every event.

    @property
    def fence_at(self) -> float:
        """Until when workers may run without another word from here; for their own watch as well."""
        return self.body.fence_at

    @property
    def running(self) -> World | None:
        """The world whose workers run on this node."""
        return self.body.running

    @property
    def is_heard(self) -> bool:
        """Whether a goodbye would reach those who might wait for this agent: its leader, or its followers."""
        role, present = self.role, {self.body.me}
        if isinstance(role, Follower):
            return not role.broken
        if isinstance(role, Leader):
            present |= set(role.roster.parts) - set(role.roster.broken)
        return not self.body.rivals(present)

    @property
    def can_force_quorum(self) -> bool:
        """Whether to hand in `ForceQuorum` now: not while a search goes on that will end soon."""
        return not isinstance(self.role, Seeker) or self.role.elders() is None

    @property
    def leads(self) -> bool:
        """Whether this agent leads."""
        return isinstance(self.role, Leader)
