"""How a leader makes a world: who is waited for, the proposal, its acknowledgements, the beginning.

A world forms when every live follower has joined, they are enough and have a quorum, and nobody is worth
waiting for: newcomers at a first start for the settle time, survivors at a restart until they are back or
silent, and worlds elsewhere until their last lease has surely ended.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_resume.rendezvous.core.messages import Begin, Join, Propose
from elastic_resume.rendezvous.core.peers import Roster, rank_members
from elastic_resume.rendezvous.core.quorum import Incarnation, World, has_quorum, listed, shortfall
from elastic_resume.rendezvous.core.state import NEVER, Body

NEWS_AFTER_S = 1.0
"""A wait is worth telling when it lasts so long; most last for milliseconds."""
MANY = 64
LOOK_S_EACH = 2e-5
"""With a thousand followers, look every 20 ms at most: each look takes a millisecond."""
STALLED_TIMEOUTS = 2
"""A live follower that has not acknowledged for so many node timeouts (a stuck disk) is sent away."""


@dataclass(slots=True)
class Forming:
    """A proposal under way."""

    world: World
    joins: dict[Incarnation, Join]
    since: float
    change: int
    awaited: set[Incarnation]
    present: frozenset[Incarnation]


class Former:
    """Forms one world after another for a leader."""

    def __init__(self, body: Body, roster: Roster) -> None:
        self.body = body
        self.roster = roster
        self.forming: Forming | None = None
        self.since = body.now
        self.arrived_at = body.now
        self.look_at = body.now
        self._looked_at = body.known
        self.waiting_for = "nobody has joined yet"
        self.more_at = float("inf")
        """When newcomers to the running world are due to be taken in."""
        self.welcomed: dict[int, float] = {}
        """Until when to wait for the first reply of a node that was welcomed on a connection."""
        self.waiting_since = body.now
        self.told = ""
        """What all followers were told that we wait for."""

    def stir(self) -> None:
        """Something changed: look again. A look at many takes long, so at first more of them may come."""
        members = len(self.roster.parts)
        pause_s = members * LOOK_S_EACH if members >= MANY else 0.0
        self.look_at = min(self.look_at, self.body.now + pause_s) if pause_s else self.body.now

    def arrived(self, who: Incarnation, world: World | None) -> None:
        """Somebody joined; another newcomer may follow."""
        last = self.body.known.begun
        if last is None or last.rank(who) is None:
            self.arrived_at = self.body.now
        if world and len(world.members) < self.body.settings.max_nodes and world.rank(who) is None:
            self.more_at = self.body.now + self.body.settings.scale_up_s
        self.stir()

    def disturbed(self, who: Incarnation) -> None:
        """A link broke: what was proposed to its peer will not be acknowledged by all."""
        if self.forming and who in self.forming.present:
            self.abort(f"{who} was lost before it acknowledged")
        self.stir()

    def acknowledged(self, who: Incarnation, generation: int) -> None:
        """The proposal is durable there."""
        if self.forming and self.forming.world.generation == generation:
            self.forming.awaited.discard(who)

    def abort(self, reason: str) -> None:
        """Drop the proposal: it can never begin now, and whoever hears that need not ask its members."""
        if self.forming is None:
            return
        body, world = self.body, self.forming.world
        body.log("dropped", f"generation {world.generation} was proposed and dropped: {reason}")
        self.forming = None
        body.believe(body.known.with_void(world))
        self.stir()

    def advance(self) -> tuple[World, Begin] | None:
        """Propose a world when it is time; return one that begins now."""
        if self.body.known is not self._looked_at:  # whoever learnt it: a refused call proves a death, say
            self._looked_at = self.body.known
            self.stir()
        if self.forming is None and self.body.now >= self.look_at:
            self.look_at = float("inf")
            joins = self._joiners()
            if joins:
                self._propose(joins)
        return self._begin() if self.forming else None

    def _wait(self, reason: str, until: float = float("inf")) -> dict[Incarnation, Join]:
        """Say whom or what we wait for; so far nobody forms a world."""
        self.look_at = until
        if reason != self.waiting_for:
            self.waiting_for, self.waiting_since = reason, self.body.now
        return {}

    def news(self) -> str:
        """Return what we wait for if that lasts and has not been told."""
        if self.forming or self.told == self.waiting_for or self.body.now < self._news_at():
            return ""
        self.told = self.waiting_for
        return self.told

    def _news_at(self) -> float:
        return self.waiting_since + NEWS_AFTER_S

    def _joiners(self) -> dict[Incarnation, Join]:
        """Return those who want to be in the next world; nobody when it cannot form yet."""
        body, settings = self.body, self.body.settings
        if body.join is None and not body.finished:
            return self._wait("this node's workers have not stopped")
        if self.roster.broken:
            return self._wait("a link has just broken")
        answer_by = max(self.welcomed.values(), default=NEVER)
        if body.now < answer_by:
            return self._wait("waiting for the first reply of a node that was welcomed", answer_by)
        for part in self.roster.parts.values():
            if not part.settled:
                return self._wait(f"the workers of {part.who} have not stopped")
        joins = {part.who: part.join for part in self.roster.parts.values() if part.join}
        if body.join:
            joins[body.me] = body.join
        through = len(self.roster.parts) + 1 - len(joins)
        if not joins or (len(joins) < settings.min_nodes and not through):
            return self._wait(f"{len(joins)} of at least {settings.min_nodes} nodes have joined")
        present = {body.me, *self.roster.parts}
        lack = shortfall(present, body.known, settings.rules)
        if lack:
            absent = "" if lack.generation else f"; not here: {body.not_here(present)}"
            return self._wait(f"{lack}{absent}")
        until = self._patience(present, full=len(joins) >= settings.max_nodes)
        if body.now < until:
            return self._wait(self._for_whom(joins, present), until)
        return joins

    def _for_whom(self, joins: dict[Incarnation, Join], present: set[Incarnation]) -> str:
        rivals = self.body.rivals(present)
        if rivals:
            return f"{listed(rivals)} may be running yet: waiting until their leases have surely ended"
        settings = self.body.settings
        return (
            f"{len(joins)} of at most {settings.max_nodes} nodes have joined: waiting until nobody new has "
            f"come for {settings.settle_s:g} s"
        )

    def _patience(self, present: set[Incarnation], *, full: bool) -> float:
        """Return until when somebody may come, or run workers, whom we do not see."""
        body, settings, last = self.body, self.body.settings, self.body.known.begun
        until = NEVER
        rivals = body.rivals(present)
        if rivals:
            until = body.grace_until
            if not rivals <= body.silent:
                until = max(until, self.since + settings.node_timeout_s)
        if last is None and not body.known.proposals and settings.max_nodes > 1:
            # Where disks were lost a world may run of which nobody here knows. Its leader calls soon.
            until = max(until, self.since + 2 * settings.claim_s)
        survivors = last is not None and any(one in present for one in body.known.alive(last))
        if not survivors and not full:
            until = max(until, self.arrived_at + settings.settle_s)
        return until

    def _propose(self, joins: dict[Incarnation, Join]) -> None:
        body = self.body
        generation = 1 + max(body.seen, body.known.generation)
        members = rank_members(body.known.worlds, joins, body.settings.max_nodes)
        world = World(generation, members, body.me)
        before = body.known
        body.believe(before.with_proposal(world))
        others = {part.who for part in self.roster.parts.values()}
        self.forming = Forming(
            world,
            joins,
            body.now,
            body.changes,
            set(others),
            frozenset({body.me, *others}),
        )
        message = Propose(world, before)
        for part in self.roster.parts.values():
            body.send(part.link, message)

    def _begin(self) -> tuple[World, Begin] | None:
        body, forming = self.body, self.forming
        if forming is None:
            return None
        ready = not forming.awaited and body.durable >= forming.change and not body.witnesses
        if not ready and body.settings.rules.two_steps:
            self._send_stalled_away(forming)
            return None
        if not self._still_ours(forming):
            self.abort("its members may have turned to another leader")
            return None
        self.forming = None
        self.told = self.waiting_for = ""
        stores = tuple(forming.joins[member].workers for member in forming.world.members)
        store = forming.joins[forming.world.members[0]].store
        before = body.known.begun
        return forming.world, Begin(
            forming.world.generation,
            store,
            stores,
            max(join.step for join in forming.joins.values()),
            body.ledger.of(before.generation) if before else (),
        )

    def _still_ours(self, forming: Forming) -> bool:
        """Whether those who acknowledged surely follow us still, and know of nothing that forbids this."""
        if not self.body.settings.rules.two_steps:
            return True
        fresh = {self.body.me} | {
            part.who
            for part in self.roster.parts.values()
            if part.who in forming.present and self.body.is_fresh(part.link)
        }
        return has_quorum(fresh, self.body.known, self.body.settings.rules)

    def _send_stalled_away(self, forming: Forming) -> None:
        limit = STALLED_TIMEOUTS * self.body.settings.node_timeout_s
        if self.body.now < forming.since + limit:
            return
        self.abort(f"{len(forming.awaited)} did not acknowledge within {limit:g} s")
        for part in self.roster:  # in its order: that of a set differs from process to process
            if part.who in forming.awaited:
                self.roster.drop(part.who)
                self.body.part(part.link, "")

    # The running world.

    def lease_until(self) -> float:
        """Return until when enough members surely follow us for no other world to have a quorum.

        A member turns away a node timeout after it *received* our last message, also if its link breaks. We
        count from when we *sent* the last message that it has seen, and keep `drift` back.
        """
        body = self.body
        ends = sorted(
            ((part.link.echoed_at + body.settings.lease_s, part.who) for part in self.roster),
            key=lambda end: -end[0],
        )
        low, high = 0, len(ends)
        here = [who for _, who in ends]
        if not has_quorum({body.me, *here}, body.known, body.settings.rules):
            return NEVER
        while low < high:
            middle = (low + high) // 2
            if has_quorum({body.me, *here[:middle]}, body.known, body.settings.rules):
                high = middle
            else:
                low = middle + 1
        return ends[low - 1][0] if low else body.now + body.settings.lease_s

    def began(self, world: World) -> None:
        """A world runs: those who joined too late for it want another, if it has room."""
        room = len(world.members) < self.body.settings.max_nodes
        members = frozenset(world.members)
        late = any(part.join and part.who not in members for part in self.roster)
        self.more_at = self.arrived_at + self.body.settings.scale_up_s if late and room else float("inf")

    def deadline(self) -> float:
        """When to look again."""
        if self.forming:
            return self.forming.since + STALLED_TIMEOUTS * self.body.settings.node_timeout_s
        return self.look_at if self.told == self.waiting_for else min(self.look_at, self._news_at())
