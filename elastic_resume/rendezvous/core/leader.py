"""Being the leader: taking members in, noticing losses, restarting worlds and settling the end of the job.

How a world forms is `forming`'s; who else leads is `calling`'s.

Whom a leader takes in: settings that must agree, names that must be unique, former lives that are gone.

A leader's calls to those who may not know it, and the settling of two who lead.

Every few seconds a leader calls at the candidates' addresses and at members of the last worlds that are not
its followers, and tells whoever answers who leads. So newcomers find the job even when no candidate is left
in it, and two leaders learn of each other: the one with the lesser claim (`messages.Claim.weight`) steps
down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from elastic_resume.rendezvous.core.divergence import Comparer
from elastic_resume.rendezvous.core.events import Heard
from elastic_resume.rendezvous.core.messages import (
    Acknowledge,
    Beat,
    Claim,
    Failed,
    Finished,
    Force,
    Goodbye,
    Hello,
    Message,
    Ready,
    Redirect,
    Refused,
    Report,
    Restart,
    Stamp,
    Waiting,
    Welcome,
)
from elastic_resume.rendezvous.core.peers import Part, Roster
from elastic_resume.rendezvous.core.quorum import Incarnation, Knowledge, World
from elastic_resume.rendezvous.core.state import NEVER, Body, Link
from elastic_resume.rendezvous.core.view_change import Former


class Gate:
    """The gate of one leader."""

    def __init__(self, body: Body, roster: Roster, lose: Callable[[Part, str], None]) -> None:
        """``lose`` is called for followers whose node is back as a new process."""
        self.body = body
        self.roster = roster
        self.lose = lose
        self._indexed: Knowledge | None = None
        self._lives: dict[str, set[Incarnation]] = {}

    def check(self, hello: Hello) -> Refused | None:
        """Take over what the other knows; return why it may not join, or None."""
        body = self.body
        at_odds = self._at_odds(hello)
        if at_odds:
            return Refused(at_odds, final=True)
        before = body.known
        body.learn(hello.knowledge, hello.seen)
        if body.known != before:
            self._count_former_lives()
        body.grace(hello.others_s)
        if hello.who in body.known.gone:
            return Refused("gone")
        if self._name_taken(hello):
            return Refused(f"another live agent is called {hello.who.node}: give one another --node-name")
        return None

    def _at_odds(self, hello: Hello) -> str:
        """Say which setting that safety rests on differs between us; empty when none does."""
        ours, theirs = self.body.settings.node_timeout_s, hello.node_timeout_s
        if theirs != ours:
            return (
                f"--node-timeout is {theirs:g} s there and {ours:g} s at the leader: give all nodes the same"
            )
        settings = self.body.settings
        shape, said = (settings.min_nodes, settings.max_nodes), (hello.min_nodes, hello.max_nodes)
        if said != shape:
            ours_and_theirs = f"{said[0]}:{said[1]} here and {shape[0]}:{shape[1]} there"
            return f"--nnodes is {ours_and_theirs}: give all nodes the same"
        count, told = self.body.known.candidates, hello.knowledge.candidates
        if told != count:
            return (
                f"--rdzv-endpoint lists {told} nodes there and {count} at the leader: give all the same list"
            )
        return ""

    def _count_former_lives(self) -> None:
        """Count former lives of those who follow us gone, in whatever world we just heard of.

        A follower that was not heard lately, or is known gone, may itself be the former life.
        """
        body = self.body
        lives = {
            part.who.node: part.who
            for part in self.roster
            if body.is_fresh(part.link) and part.who not in body.known.gone
        }
        members = {m for w in body.known.worlds for m in body.known.alive(w)}
        former = [one for one in members if lives.get(one.node, one) != one]
        if former and body.settings.rules.incarnations:
            body.believe(body.known.with_gone(former))

    def _name_taken(self, hello: Hello) -> bool:
        """Count the former lives of a node gone when it is back as a new process; refuse a namesake."""
        body, who = self.body, hello.who
        if who.node == body.me.node:
            return True
        former = {one for one in self._lives_of(who.node) if one != who}
        for one in former:
            part = self.roster.parts.get(one)
            if part and part.lost_at is None and one not in hello.knowledge.gone:
                return True
        if body.settings.rules.incarnations:
            body.believe(body.known.with_gone(former))
        for one in former & set(self.roster.parts):
            self.lose(self.roster.parts[one], f"{who} is back as a new process")
        return False

    def _lives_of(self, node: str) -> set[Incarnation]:
        """Every incarnation of a node that we have heard of."""
        if self._indexed is not self.body.known:
            self._indexed = self.body.known
            self._lives = {}
            for world in self._indexed.worlds:
                for member in world.members:
                    self._lives.setdefault(member.node, set()).add(member)
        part = self.roster.named(node)
        return self._lives.get(node, set()) | ({part.who} if part else set())


CALLS_AT_ONCE = 16
"""A job of a thousand nodes that lost half of them does not dial five hundred addresses every two seconds."""


class Caller:
    """The calls of one leader."""

    def __init__(self, body: Body, claim: Callable[[], Claim], known: Callable[[], set[str]]) -> None:
        self.body = body
        self.claim = claim
        self.known = known
        self.next_at = body.now
        self.calls: dict[int, float] = {}
        self._busy: dict[str, int] = {}
        """The number of the call at an address."""
        self._turn = 0

    def targets(self) -> list[str]:
        """Addresses at which somebody may be who does not know that we lead."""
        known = self.body.known
        members = [m.address for w in known.worlds for m in known.alive(w)]
        own = self.known() | {self.body.me.address}
        return [one for one in dict.fromkeys([*self.body.settings.candidates, *members]) if one not in own]

    def advance(self) -> None:
        """Make the calls that are due and end those that were not answered."""
        body = self.body
        while self.calls and body.now >= self._first_due():
            self.end(next(iter(self.calls)))
        if body.now < self.next_at:
            return
        self.next_at = body.now + body.settings.claim_s
        targets = self.targets()
        if len(targets) > CALLS_AT_ONCE:
            start = self._turn % len(targets)
            targets = (targets[start:] + targets[:start])[:CALLS_AT_ONCE]
            self._turn += CALLS_AT_ONCE
        for address in targets:
            self.call(address)

    def call(self, address: str) -> None:
        """Call one address, unless a call there is under way."""
        if address not in self._busy:
            conn = self.body.dial(address).conn
            self.calls[conn], self._busy[address] = self.body.now, conn

    def probe(self, addresses: Iterable[str]) -> None:
        """Probe addresses round-robin, at most `CALLS_AT_ONCE` at a time.

        A switch failure breaks many links at once.
        """
        turn = list(addresses)
        room = CALLS_AT_ONCE - sum(address in self._busy for address in turn)
        start = self._turn % len(turn)
        for address in [one for one in turn[start:] + turn[:start] if one not in self._busy][: max(0, room)]:
            self.call(address)
            self._turn += 1

    def over(self, link: Link) -> None:
        """Forget a call that has ended."""
        self.calls.pop(link.conn, None)
        if self._busy.get(link.address) == link.conn:
            del self._busy[link.address]

    def connected(self, link: Link) -> None:
        """Tell who leads."""
        if link.conn in self.calls:
            self.body.send(link, self.claim())

    def answer(self, link: Link, message: Message) -> None:
        """Follow a redirect to the other leader; its claim is for the leader to weigh."""
        if link.conn in self.calls and isinstance(message, Redirect):
            self.end(link.conn)
            if message.address not in {"", self.body.me.address} | self.known():
                self.call(message.address)

    def parted(self, link: Link, who: Incarnation, message: Goodbye) -> bool:
        """One that we called wants to be counted gone: it cannot take part, and nobody should wait for it."""
        body = self.body
        self.end(link.conn)
        if who.address != link.address:
            return False
        body.learn(message.knowledge)
        if who not in body.rivals([]):
            return False
        body.believe(body.known.with_gone([who]))
        body.log("lost", f"{who} takes no part ({message.reason})")
        return True

    def end(self, conn: int) -> None:
        """End one call."""
        link = self.body.links.get(conn)
        if link:
            self.over(link)
            self.body.hang_up(link)
        self.calls.pop(conn, None)

    def retire(self) -> None:
        """End all calls."""
        for conn in list(self.calls):
            self.end(conn)

    def deadline(self) -> float:
        """When to look again."""
        return min(self.next_at, self._first_due()) if self.calls else self.next_at

    def _first_due(self) -> float:
        """When the call that was made first has waited long enough: they are kept in that order."""
        return next(iter(self.calls.values())) + self.body.settings.dial_s


class Leader:
    """The role of the agent that leads. It is a member too, without a link to itself."""

    def __init__(self, body: Body, waiters: dict[int, Hello]) -> None:
        self.body = body
        self.roster = Roster()
        self.world: World | None = None
        self.stepped_down = False
        self.yield_to = ""
        self.former = Former(body, self.roster)
        self.caller = Caller(body, self.claim, self.roster.addresses)
        self.comparer = Comparer(body, self.roster, self._tell)
        self.next_scan = body.now
        self.lease_until = NEVER
        self.finished_in = 0
        """The newest generation in which a node has finished."""
        self.gate = Gate(body, self.roster, self._replace)
        self.pending: dict[int, tuple[Hello, bool]] = {}
        """Who was welcomed on a connection and has not answered there, and whether it was told to go on."""
        self.unanswered: set[Incarnation] = set()
        """Who did not answer its last welcome: nobody waits for it again."""
        self.probe_at = body.now
        body.log("leading", f"{body.me} leads")
        for conn, hello in waiters.items():
            if conn in body.links:
                self._hello(body.links[conn], hello)

    # What the others hear.

    def claim(self) -> Claim:
        """Say how much weight our lead has."""
        body, begun = self.body, self.body.known.begun
        active = self.world.generation if self.world and self.lease_until > body.now else 0
        rank = begun.rank(body.me) if begun else None
        seats = len(begun.members) if begun else 0
        return Claim(body.me, active, body.known.generation, seats if rank is None else rank)

    def _tell(self, part: Part, message: Message) -> None:
        body = self.body
        if self.world is None:
            body.send(part.link, message)
            return
        left = max(0.0, min(body.settings.lease_s, self.lease_until - body.now))
        body.send(part.link, message, self.world.generation, left)

    def _tell_all(self, message: Message) -> None:
        for part in self.roster:
            if part.lost_at is None:
                self._tell(part, message)
        for conn in self.pending:
            self.body.send(self.body.links[conn], message)

    # What the leader hears.

    def answer(self, link: Link, stamp: Stamp, message: Message) -> None:
        """Take in a message."""
        del stamp
        if isinstance(message, Hello):
            self._hello(link, message)
        elif isinstance(message, Claim):
            self._weigh(link, message)
        elif isinstance(message, Redirect):
            self.caller.answer(link, message)
        elif isinstance(message, Goodbye) and message.who and link.conn in self.caller.calls:
            if self.caller.parted(link, message.who, message):
                self.former.stir()
        else:
            if link.conn in self.pending:
                self._take_in(link)
            part = self.roster.of(link)
            if part and part.lost_at is None:
                self._heed(part, message)

    def _heed(self, part: Part, message: Message) -> None:
        body = self.body
        if isinstance(message, Beat):
            self._tell(part, body.echo(part.who, self.world, self.roster.parts))
            self.comparer.told(part.who, message.told)
            if message.tidings:
                body.effects.append(Heard(part.who, message.tidings, body.newest))
        elif isinstance(message, Ready):
            self._ready(part, message)
        elif isinstance(message, Acknowledge):
            self.former.acknowledged(part.who, message.generation)
        elif isinstance(message, Finished):
            part.finished, part.running = message.generation, 0
            self.finished_in = max(self.finished_in, message.generation)
            self.former.stir()
        elif isinstance(message, Report):
            body.heard(part.who, message)
        elif isinstance(message, Failed):
            body.failed = message.reason
        elif isinstance(message, Force):
            body.force_quorum(message.generation, running=self.world is not None)
        elif isinstance(message, Goodbye):
            body.learn(message.knowledge)
            self._lose(part, f"{part.who} left ({message.reason})", gone=True)

    def _ready(self, part: Part, message: Ready) -> None:
        part.join, part.running = message.join, 0
        if self.world and part.who in self.world.members:
            self.restart(f"the workers of {part.who} stopped")
        self.former.arrived(part.who, self.world)

    def _hello(self, link: Link, hello: Hello) -> None:
        refused = self.gate.check(hello)
        link.who = hello.who
        if refused:
            self.body.send(link, refused)
        else:
            self._welcome(link, hello)
        newest = self.body.known.begun
        if self.world and newest and newest.generation > self.world.generation:
            self.restart(f"generation {newest.generation} has begun elsewhere")

    def _welcome(self, link: Link, hello: Hello) -> None:
        """Send Welcome. The node counts as a follower after its first reply.

        The reply proves that the link works both ways. A one-way link would otherwise delay every world:
        forming waits for the first reply once, and not long.
        """
        body, part = self.body, self.roster.parts.get(hello.who)
        if part and part.link is not link and part.lost_at is None:
            body.hang_up(part.link)
            self._break(part)
        resumed = bool(self.world and part and hello.running == part.running == self.world.generation)
        self.pending[link.conn] = hello, resumed
        if hello.who not in self.unanswered:
            self.former.welcomed[link.conn] = body.now + body.settings.dial_s
        body.send(link, Welcome(body.me, body.known, resumed))

    def _take_in(self, link: Link) -> None:
        """Count a node that has answered our welcome among the followers."""
        hello, resumed = self.pending.pop(link.conn)
        self.former.welcomed.pop(link.conn, None)
        self.former.stir()
        body, who = self.body, hello.who
        self.unanswered.discard(who)
        refused = self.gate.check(hello)
        if refused:
            body.send(link, refused)
            return
        body.silent.discard(who)
        part = self.roster.parts.get(who)
        if part:
            self.roster.mend(part, link)
        else:
            part = Part(who, link)
            self.roster.add(part)
        part.join, part.finished = hello.join, hello.finished
        self.finished_in = max(self.finished_in, hello.finished)
        if not (resumed and self.world and self.world.generation == hello.running):
            ran, part.running = part.running, hello.running
            if resumed:  # its world ended while our welcome was under way
                self._tell(
                    part,
                    Restart(
                        hello.running,
                        f"generation {hello.running} ended while this node was reconnecting",
                        body.known,
                    ),
                )
            # Of our world, and neither in it nor through: its workers failed, or it never heard of it.
            idle = self.world and not hello.finished and (ran == self.world.generation or hello.join)
            if idle and self.world and who in self.world.members:
                self.restart(f"the workers of {who} stopped")
        self.comparer.remind(part)
        if self.world is None and self.former.told:
            self._tell(part, Waiting(self.former.told))
        if part.join:
            self.former.arrived(who, self.world)
        self.former.stir()

    def _weigh(self, link: Link, claim: Claim) -> None:
        self.body.hear_claim(claim)
        own = self.claim()
        if claim.who == self.body.me:
            self.caller.end(link.conn)
        elif claim.weight > own.weight:
            self.yield_to = claim.who.address
        elif link.conn in self.caller.calls:
            self.caller.end(link.conn)
        else:
            self.body.send(link, own)

    def connected(self, link: Link) -> None:
        """One of our calls was answered."""
        self.caller.connected(link)

    def lost(self, link: Link, *, refused: bool) -> None:
        """A follower's link broke, or a call failed: only a refused call proves a death."""
        self.caller.over(link)
        if link.conn in self.pending:
            self._never_answered(link)
        part = self.roster.of(link)
        if part and part.lost_at is None:
            self._break(part)
        elif refused:
            for one in list(self.roster.broken.values()):
                if one.who.address == link.address and link.dialled_at >= (one.lost_at or 0.0):
                    self._lose(one, f"{one.who} died", gone=self.body.proves_end(one.link, refused=True))

    def _break(self, part: Part) -> None:
        self.roster.mark_broken(part, self.body.now)
        self.former.disturbed(part.who)
        self.probe_at = self.body.now

    def _lose(self, part: Part, reason: str, *, gone: bool) -> None:
        body = self.body
        self.roster.drop(part.who)
        if gone:
            body.believe(body.known.with_gone([part.who]))
        else:
            body.silent.add(part.who)
        if part.link.conn in body.links:
            body.hang_up(part.link)
        body.log("lost", reason)
        body.lost(part.who, reason.removeprefix(f"{part.who} "))
        self.former.disturbed(part.who)
        world = self.world
        if world is None or part.who not in world.members:
            return
        runs = body.running or any(one.running == world.generation for one in self.roster)
        if not self.somebody_finished() or (part.finished != world.generation and runs):
            # Those who still run would wait for it in their next collective.
            self.restart(reason)

    def _replace(self, part: Part, reason: str) -> None:
        self._lose(part, reason, gone=True)

    def somebody_finished(self) -> bool:
        """Whether a node of the newest world is through: the others have no more than their end to reach."""
        newest = self.body.known.begun
        return newest is not None and newest.generation in {self.finished_in, self.body.finished}

    # What the leader does.

    def restart(self, reason: str, *, at_once: bool = False) -> None:
        """End the running world; those who were in it join again."""
        world = self.world
        if world is None:
            return
        message = Restart(world.generation, reason, self.body.known)  # one, so it is put into words once
        for part in self.roster:
            if part.running == world.generation and part.lost_at is None:
                self._tell(part, message)
        self.world, self.lease_until = None, NEVER
        self.comparer.over()
        self.body.stop(reason, at_once=at_once)
        self.former.since = self.body.now
        self.former.stir()
        self.body.log("restart", f"generation {world.generation} is over: {reason}")

    def advance(self) -> None:
        """Fence ourselves before anything else; then look for losses, and for a world to form."""
        body = self.body
        if self.yield_to or (self.world is None and body.disk_is_late):
            self._step_down()
            return
        if self.world:
            self._stand_by()
            self._renew()
            if body.now >= self.lease_until:
                self.restart("the leader has lost its quorum", at_once=True)
        if body.now >= self.next_scan:
            self.next_scan = body.now + body.settings.beat_s / 2
            self._find_silent()
            self.comparer.told(body.me, body.take_print())
        unequal = self.comparer.advance()
        if unequal and not self.somebody_finished():
            self.restart(unequal)
        self._probe_broken()
        self.caller.advance()
        if body.failed or self._is_end():
            self._end()
            return
        if self.world is None:
            self._form()
            self._tell_why_waiting()
        elif body.now >= self.former.more_at:
            self.former.more_at = float("inf")
            if not self.somebody_finished():
                self.restart("newcomers are here")

    def _stand_by(self) -> None:
        """A world that runs without this node is no reason to give up waiting: a spare waits for long."""
        if self.body.join:
            self.body.join_since = self.body.now

    def _tell_why_waiting(self) -> None:
        reason = self.former.news() if self.world is None else ""
        if reason:
            self.body.log("waiting", reason)
            self._tell_all(Waiting(reason))

    def _renew(self, *, fresh: bool = False) -> None:
        """Count how long enough of our members surely still follow us; that bounds every lease we grant."""
        body = self.body
        if self.world is None or not (fresh or body.now >= self.next_scan):
            return
        self.lease_until = self.former.lease_until()
        if self.world.rank(body.me) is not None and body.running:
            body.fence_at = self.lease_until

    def _find_silent(self) -> None:
        body = self.body
        for part in self.roster:
            if body.now >= part.link.heard_at + body.settings.node_timeout_s:
                what = "is silent" if part.lost_at is None else "cannot be reached"
                self._lose(part, f"{part.who} {what}", gone=False)
        for link in [body.links[conn] for conn in self.pending]:
            if body.now >= link.heard_at + body.settings.node_timeout_s:
                self._never_answered(link)
                body.hang_up(link)

    def _never_answered(self, link: Link) -> None:
        """Record that the node ignored a Welcome; forming waits for it only once."""
        hello, _ = self.pending.pop(link.conn)
        self.unanswered.add(hello.who)
        self.former.welcomed.pop(link.conn, None)
        self.former.stir()

    def _probe_broken(self) -> None:
        """Probe members with broken links. A live member also calls us; a refused call proves a death."""
        body = self.body
        if not self.roster.broken or body.now < self.probe_at:
            return
        self.probe_at = body.now + body.settings.probe_s
        self.caller.probe(part.who.address for part in self.roster.broken.values())

    def _form(self) -> None:
        begun = self.former.advance()
        if begun is None:
            return
        body = self.body
        world, message = begun
        body.believe(body.known.with_begun(world))
        self.world = world
        self.former.began(world)
        self.comparer.began(world)
        self._renew(fresh=True)
        members = frozenset(world.members)
        for part in self.roster:
            if part.who in members:
                part.join, part.running, part.finished = None, world.generation, 0
            self._tell(part, message)
        body.begin(world, message, self.lease_until)

    def _is_end(self) -> bool:
        """Whether some have finished and nobody who could is left."""
        body, newest = self.body, self.body.known.begun
        if newest is None or self.former.forming:
            return False
        if not self.somebody_finished():
            return self._is_past_end()
        if body.me in newest.members and body.finished != newest.generation:
            return False
        present = {part.who for part in self.roster} | {body.me}
        if any(p.who in newest.members and p.finished != newest.generation for p in self.roster):
            return False
        absent = body.rivals(present) - body.silent
        return not absent or body.now >= self.former.since + body.settings.node_timeout_s

    def _is_past_end(self) -> bool:
        """Whether all who are here have finished, and the newest world was of others, who have been lost.

        A node that was cut off while the others finished goes on alone; should it die, nobody waits for it.
        """
        body, newest = self.body, self.body.known.begun
        present = {part.who for part in self.roster} | {body.me}
        through = body.finished and all(part.finished and not part.join for part in self.roster)
        if not through or body.join or newest is None or present.intersection(newest.members):
            return False
        return not self.roster.broken and body.now >= self.former.since + body.settings.node_timeout_s

    def _end(self) -> None:
        here = {part.who for part in self.roster if part.lost_at is None}
        self.body.ended = self.body.end_of_job(here, {part.who: part.finished for part in self.roster})
        self._tell_all(self.body.ended)

    def _step_down(self) -> None:
        body = self.body
        if self.world or body.now < self.former.since + body.settings.node_timeout_s:
            body.grace(body.settings.node_timeout_s)  # who does not hear this may run until its lease ends
        why = f"{self.yield_to} leads" if self.yield_to else "the leader's disk takes no writes"
        self.stepped_down = True
        self.restart(why, at_once=True)
        self.former.abort(why)
        for part in self.roster:
            if part.lost_at is None:
                body.part(part.link, self.yield_to)
            else:
                body.let_go(part.link)
        for conn in self.pending:
            body.send(body.links[conn], Redirect(self.yield_to))
        body.log("step-down", f"{body.me} leads no more: {why}")

    def retire(self) -> None:
        """End what only a leader does."""
        self.caller.retire()

    def joined(self) -> None:
        """Our own node's workers are stopped."""
        if self.world and self.world.rank(self.body.me) is not None:
            self.restart("the workers of the leader stopped")
        self.former.arrived(self.body.me, self.world)

    def finished(self) -> None:
        """Our own node's workers have succeeded."""
        self.former.stir()

    def leave(self, reason: str) -> None:
        """Say goodbye to all: they turn to another leader at once."""
        self.former.abort("the leader leaves")
        self._tell_all(Goodbye(reason, self.body.known))

    def deadline(self) -> float:
        """When to look again."""
        body = self.body
        waits = [self.next_scan, self.caller.deadline()]
        if self.roster.broken:
            waits.append(self.probe_at)
        if self.world:
            waits += [self.lease_until, self.former.more_at]
        else:
            waits += [self.former.deadline(), body.disk_late_at]
        return min(waits)

    def why_waiting(self) -> str:
        """One clause for the error after the join timeout."""
        return self.former.waiting_for
