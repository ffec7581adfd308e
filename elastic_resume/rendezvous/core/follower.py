"""Being a member: heartbeats under a lease, acknowledging proposals, and noticing that the leader is lost."""

from __future__ import annotations

from elastic_resume.rendezvous.core.events import Heard, ReplicasDiffer
from elastic_resume.rendezvous.core.messages import (
    Acknowledge,
    Beat,
    Begin,
    Claim,
    Diverged,
    Failed,
    Finished,
    Force,
    Goodbye,
    Hello,
    JobEnd,
    Message,
    Propose,
    Ready,
    Redirect,
    Refused,
    Restart,
    Stamp,
    Waiting,
    Welcome,
)
from elastic_resume.rendezvous.core.quorum import Incarnation, World
from elastic_resume.rendezvous.core.state import NEVER, Body, Link

FIRST_PAUSE_S = 0.005
"""Before the second call to a lost leader; each later pause is twice as long, up to `probe_s`."""
MANY_CALLS = 10


class Follower:
    """The role of an agent that has a leader."""

    def __init__(self, body: Body, link: Link, leader: Incarnation) -> None:
        self.body = body
        self.link = link
        self.leader = leader
        self.over = False
        """The relation to the leader has ended."""
        self.hint = ""
        self.waiting_for = ""
        self.watched = 0
        """The generation that runs without this node."""
        self.next_beat = body.now
        # The leader includes us only after it receives our first reply. Until then it may form worlds without
        # us, so its death would prove nothing.
        link.echoed_at = link.lease_end = NEVER
        self.proposal: World | None = None
        self.proposal_change = 0
        self.begun_next: World | None = None
        self.broken = False
        """The link to the leader broke: it is called again until it answers, is dead, or is given up."""
        self.redial: Link | None = None
        self.calls = 0
        """How many since the link broke."""
        self.redial_at = body.now
        """When the call under way has taken too long; without one, when to make the next."""
        body.silent.discard(leader)

    def answer(self, link: Link, stamp: Stamp, message: Message) -> None:
        """Take in a message; only the leader's counts."""
        if isinstance(message, (Hello, Claim)):
            if isinstance(message, Claim):
                self.body.hear_claim(message)
            self.body.send(link, Redirect(self.leader.address))
        elif link is self.redial:
            self._remade(link, message)
        elif link is self.link and not self.broken:
            self._obey(stamp, message)
            self._renew(stamp)
            self._stand_by(stamp)

    def _obey(self, stamp: Stamp, message: Message) -> None:
        body = self.body
        if isinstance(message, Beat):
            if message.tidings:
                body.effects.append(Heard(self.leader, message.tidings, body.newest))
        elif isinstance(message, Propose):
            body.learn(message.knowledge)
            body.believe(body.known.with_proposal(message.world))
            self.proposal, self.proposal_change = message.world, body.changes
        elif isinstance(message, Begin):
            self._begin(stamp, message)
        elif isinstance(message, Restart):
            body.learn(message.knowledge)
            body.stop(message.reason)
        elif isinstance(message, Waiting):
            self.waiting_for = message.reason
            body.log("waiting", message.reason)
        elif isinstance(message, Diverged):
            body.effects.append(ReplicasDiffer(message))
        elif isinstance(message, JobEnd):
            body.ended = message
        elif isinstance(message, (Redirect, Refused)):
            self.hint = message.address if isinstance(message, Redirect) else ""
            self._over("the leader stepped down")
        elif isinstance(message, Goodbye):
            body.learn(message.knowledge)
            self._over(f"{self.leader}, which led, left ({message.reason})", gone=True)

    def _begin(self, stamp: Stamp, message: Begin) -> None:
        body = self.body
        world = self.begun_next if body.settings.rules.two_steps else self.begun_next or self.proposal
        if world is None or world.generation != message.generation:
            return
        self.begun_next = self.proposal = None
        body.believe(body.known.with_begun(world))
        fence_at = self._fence(stamp)
        if world.rank(body.me) is None:
            return
        if fence_at <= body.now:
            # Not a reason to hang up: the leader might take that for our end, and we live.
            body.log("late", f"generation {world.generation} began too long ago to start workers in it")
            self.joined()
        elif body.join is not None:
            body.begin(world, message, fence_at)

    def _stand_by(self, stamp: Stamp) -> None:
        """A world that runs without this node is no reason to give up waiting: a spare waits for long."""
        body = self.body
        if not stamp.generation or body.running or body.join is None:
            return
        body.join_since = body.now
        if self.watched != stamp.generation:
            self.watched = stamp.generation
            body.log("spare", f"generation {stamp.generation} runs without this node, which stands by")

    def _fence(self, stamp: Stamp) -> float:
        return self.link.echoed_at + min(stamp.lease_s, self.body.settings.lease_s)

    def _renew(self, stamp: Stamp) -> None:
        body = self.body
        if body.running and body.running.generation == stamp.generation:
            body.fence_at = max(body.fence_at, self._fence(stamp))

    def _remade(self, link: Link, message: Message) -> None:
        if isinstance(message, Welcome):
            self.body.hang_up(self.link)
            link.echoed_at = link.lease_end = NEVER
            if message.who == self.leader:
                link.succeed(self.link)
            self.next_beat = self.body.now
            self.leader = link.who = message.who
            self.link, self.redial, self.broken = link, None, False
            self.body.learn(message.knowledge)
            if not message.resumed:
                self.body.stop("the leader has no running world with this node")
            self.report()
        elif isinstance(message, JobEnd):
            self.body.ended = message
        else:
            self.hint = message.address if isinstance(message, Redirect) else self.leader.address
            self._over("the leader does not take this node back")

    def connected(self, link: Link) -> None:
        """The leader is there again: go on as before."""
        if link is self.redial:
            self.redial_at = self.body.now + self.body.settings.redial_s
            self.body.send(link, self.body.hello())

    def lost(self, link: Link, *, refused: bool) -> None:
        """Call the leader again when the link broke; take only a refused call for its death."""
        body = self.body
        if link is self.link:
            self.broken = True
            self.proposal = None
            self.begun_next = None
            self.calls = 0
            self._redial()
        elif link is self.redial and refused:
            gone = body.proves_end(self.link, refused=True)
            self._over(f"{self.leader}, which led, died", gone=gone, silent=not gone)
        elif link is self.redial:
            # A dying process may still take a call in the moment before its host refuses all.
            pause_s = min(body.settings.probe_s, FIRST_PAUSE_S * 2 ** min(self.calls - 1, MANY_CALLS))
            self.redial, self.redial_at = None, body.now + pause_s

    def _redial(self) -> None:
        """Redial the leader; alternate its last IP address, which needs no DNS, with its name.

        A slow name server must not cost the world, and the name may have another address now.
        """
        body = self.body
        if self.redial:
            body.hang_up(self.redial)
        self.calls += 1
        self.redial = body.dial(self.leader.address, self.link.host if self.calls % 2 else "")
        self.redial_at = body.now + body.settings.redial_s

    def _over(self, reason: str, *, gone: bool = False, silent: bool = False) -> None:
        body, timeout_s = self.body, self.body.settings.node_timeout_s
        self.over = True
        if body.now < min(self.link.heard_at, self.link.lease_end) + timeout_s:
            body.grace(timeout_s)  # other followers may run until their leases end
        body.stop(reason)
        body.log("leader-lost", reason)
        if gone or silent:
            body.lost(self.leader, reason.removeprefix(f"{self.leader}, which led, "))
        if gone:
            body.believe(body.known.with_gone([self.leader]))
            body.grace(timeout_s)  # its other followers may not know yet
            body.current_until = body.current_for(self.link)
        if silent:
            body.silent.add(self.leader)
        body.hang_up(self.link)
        if self.redial:
            body.hang_up(self.redial)

    def advance(self) -> None:
        """Fence ourselves before anything else; then beat, acknowledge, and watch the leader."""
        body = self.body
        if body.running and body.now >= body.fence_at:
            body.stop(f"no word from {self.leader}, which leads, for as long as the lease", at_once=True)
        if self.over or body.ended:
            return
        if body.now >= self.link.heard_at + body.settings.node_timeout_s:
            what = "cannot be reached" if self.broken else "is silent"
            self._over(f"{self.leader}, which led, {what}", silent=True)
            return
        if self.broken:
            if body.now >= self.redial_at:
                self._redial()
            return
        if self.proposal and body.durable >= self.proposal_change and not body.witnesses:
            body.send(self.link, Acknowledge(self.proposal.generation))
            self.begun_next, self.proposal = self.proposal, None
        if body.now >= self.next_beat:
            body.send(self.link, Beat(body.take_print(), body.outbox.take(self.leader)))
            self.next_beat = body.now + body.settings.beat_s

    def report(self) -> None:
        """Say again what may have changed since our hello was sent."""
        if self.body.report and not self.broken:
            self.body.send(self.link, self.body.report)
        if self.body.failed and not self.broken:
            self.body.send(self.link, Failed(self.body.failed))
        if self.body.join:
            self.joined()
        elif self.body.finished:
            self.finished()

    def joined(self) -> None:
        """Tell the leader that this node's workers are stopped and it wants to be in the next world."""
        if self.body.join and not self.broken:
            self.body.send(self.link, Ready(self.body.join))

    def force_quorum(self, generation: int) -> None:
        """Hand an operator's declaration on to the leader, which judges it."""
        if not self.broken:
            self.body.send(self.link, Force(generation))

    def finished(self) -> None:
        """Tell the leader that this node's workers have succeeded."""
        if not self.broken:
            self.body.send(self.link, Finished(self.body.finished))

    def leave(self, reason: str) -> None:
        """Say goodbye."""
        if not self.broken:
            self.body.send(self.link, Goodbye(reason, self.body.known))

    def retire(self) -> None:
        """Nothing of a member's outlives its relation."""

    def deadline(self) -> float:
        """When to look again."""
        body = self.body
        fence_at = body.fence_at if body.running else float("inf")
        due = self.redial_at if self.broken else self.next_beat
        return min(fence_at, due, self.link.heard_at + body.settings.node_timeout_s)

    def why_waiting(self) -> str:
        """One clause for the error after the join timeout."""
        because = f": {self.waiting_for}" if self.waiting_for else ""
        return f"the leader {self.leader} formed no world with this node{because}"
