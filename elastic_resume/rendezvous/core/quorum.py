"""Who may form the next world: dynamic voting with knowledge of the gone.

Yeger Lotem, Keidar and Dolev (PODC 1997) let each world vote for its successor, so that a job may shrink
from many nodes to one by single deaths, and yet no two halves of a partition both go on. Four rules:

1. A member is an incarnation. A restarted agent does not vote for its former self.
2. Forming has two steps, and every member makes the proposal durable before it acknowledges (`core`).
3. The first world needs more than half of the candidates. A later one needs, of the newest world begun and
   of every later proposal that anybody present knows, more than half of the members not known gone; an
   exact half counts if it holds the lowest rank among them; where none is left, the first world's rule.
4. Gone is knowledge, silence is not, and it never travels without what the gone one knew: `Knowledge` is
   sent, merged and made durable as a whole or not at all.

An operator may waive rule 3 for the worlds up to a generation: `Knowledge.forced`.

After a crash the same Knowledge is read back from disk. This module knows nothing of time or messages.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

NAMED = 16
"""So many nodes are named in one message for people."""


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One life of an agent: a node's name and a random id; where it listens does not change in a life.

    `candidate` is the place of its address in the list of candidates, None where it is in none.
    """

    node: str
    life: str
    address: str = field(default="", compare=False)
    candidate: int | None = field(default=None, compare=False)

    def __str__(self) -> str:
        """The node's name, as messages for people give it."""
        return self.node

    def reborn(self) -> Incarnation:
        """Return the next life of the same process, for one that was declared gone and is not."""
        life, _, turn = self.life.partition("+")
        return replace(self, life=f"{life}+{int(turn or 0) + 1}")


@dataclass(frozen=True, slots=True)
class World:
    """The members of one generation in rank order, and the leader that proposed it."""

    generation: int
    members: tuple[Incarnation, ...]
    leader: Incarnation

    def rank(self, who: Incarnation) -> int | None:
        """Return the rank of a member, None of another."""
        return _seats(self)[0].get(who)

    def lives_of(self, node: str) -> tuple[Incarnation, ...]:
        """Return the members of that name."""
        return _seats(self)[1].get(node, ())

    def __hash__(self) -> int:
        """Hash what tells worlds apart: all members would take as long as they are many."""
        return hash((self.generation, self.leader))


@functools.lru_cache(maxsize=8)
def _seats(world: World) -> tuple[dict[Incarnation, int], dict[str, tuple[Incarnation, ...]]]:
    """Look up ranks by member and members by node; worked out once for each of the newest worlds."""
    ranks: dict[Incarnation, int] = {}
    nodes: dict[str, tuple[Incarnation, ...]] = {}
    for rank, member in enumerate(world.members):
        ranks.setdefault(member, rank)
        nodes[member.node] = (*nodes.get(member.node, ()), member)
    return ranks, nodes


@dataclass(frozen=True, slots=True)
class Rules:
    """Which of the rules hold. All do; tests break one at a time to see that a checker notices."""

    incarnations: bool = True
    two_steps: bool = True
    later_proposals: bool = True
    gone_brings_knowledge: bool = True


ALL_RULES = Rules()


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What a node knows of worlds: the newest begun, proposals after it, and who is known gone.

    `void` names proposals (generation, leader) that their own leader has dropped and so can never begin.
    `candidates` is how many addresses the job was given; it never changes. Worlds up to the generation
    `settled` are over for good: the job had ended in all of them, and is not asked about them any more.
    `forced`: an operator declared the missing members of the worlds up to this generation dead for good, so
    that those worlds need not consent; 0 once a later world has begun.
    """

    candidates: int
    begun: World | None = None
    proposals: tuple[World, ...] = ()
    gone: frozenset[Incarnation] = frozenset()
    void: frozenset[tuple[int, Incarnation]] = frozenset()
    settled: int = 0
    forced: int = 0

    @property
    def generation(self) -> int:
        """The greatest generation known of, begun or proposed; 0 before any."""
        begun = self.begun.generation if self.begun else 0
        return max([begun, *(world.generation for world in self.proposals)])

    @property
    def worlds(self) -> tuple[World, ...]:
        """Every world whose consent a new one needs: the newest begun and each later proposal."""
        return (*((self.begun,) if self.begun else ()), *self.proposals)

    def alive(self, world: World) -> tuple[Incarnation, ...]:
        """Return the members of a world that are not known gone, in rank order."""
        return _alive(world, self.gone) if self.gone else world.members

    def tidy(self) -> Knowledge:
        """Drop proposals that a newer begun world or their own leader has made irrelevant."""
        begun = self.begun if self.begun and self.begun.generation > self.settled else None
        floor = begun.generation if begun else self.settled
        void = frozenset(one for one in self.void if one[0] > floor)
        forced = self.forced if self.forced >= floor else 0
        if not self.proposals:
            same = void == self.void and begun is self.begun and forced == self.forced
            return self if same else replace(self, begun=begun, void=void, forced=forced)
        later = {
            world
            for world in self.proposals
            if world.generation > floor and (world.generation, world.leader) not in void
        }
        # A world's place and hash take as long as it has members.
        proposals = tuple(sorted(later, key=_place) if len(later) > 1 else later)
        return replace(self, begun=begun, proposals=proposals, void=void, forced=forced)

    def relevant(self) -> Knowledge:
        """Forget those gone from worlds that count no more, so that knowledge stays small over a long job.

        Only done when a world begins: a proposal made elsewhere meanwhile may yet name them. Forgetting that
        someone is gone only ever asks for more votes, never for fewer.
        """
        if not self.gone:
            return self
        worlds = self.worlds
        gone = (one for one in self.gone if any(world.rank(one) is not None for world in worlds))
        return replace(self, gone=frozenset(gone))

    def with_gone(self, who: Iterable[Incarnation]) -> Knowledge:
        """Return this knowledge, and that these are gone."""
        return replace(self, gone=self.gone | frozenset(who)).tidy()

    def with_proposal(self, world: World) -> Knowledge:
        """Return this knowledge, and that a world was proposed."""
        return replace(self, proposals=(*self.proposals, world)).tidy()

    def with_begun(self, world: World) -> Knowledge:
        """Return this knowledge, and that a world has begun."""
        newer = self.begun is None or world.generation > self.begun.generation
        return replace(self, begun=world).tidy().relevant() if newer else self

    def with_void(self, world: World) -> Knowledge:
        """Return this knowledge, and that a proposal was dropped by its leader (who alone may say so)."""
        return replace(self, void=self.void | {(world.generation, world.leader)}).tidy()

    def merge(self, other: Knowledge) -> Knowledge:
        """Return what both know together. Idempotent, commutative, associative up to `tidy`."""
        if other == self:
            return self
        begun = max(
            (world for world in (self.begun, other.begun) if world),
            key=lambda world: world.generation,
            default=None,
        )
        both = replace(
            self,
            begun=begun,
            proposals=self.proposals + other.proposals,
            gone=self.gone | other.gone,
            void=self.void | other.void,
            settled=max(self.settled, other.settled),
            forced=max(self.forced, other.forced),
        ).tidy()
        return both if begun == self.begun else both.relevant()


@functools.lru_cache(maxsize=8)
def _alive(world: World, gone: frozenset[Incarnation]) -> tuple[Incarnation, ...]:
    lives = {one.life for one in gone}  # to look at these first takes a third of the time
    return tuple(one for one in world.members if one.life not in lives or one not in gone)


def _place(world: World) -> tuple[int, tuple[tuple[str, str], ...]]:
    """An order of worlds that does not depend on who heard of which first."""
    return world.generation, tuple((one.node, one.life) for one in (world.leader, *world.members))


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Why a set of nodes may not form a world: whose consent is lacking, and who could give it."""

    generation: int
    """The world that does not consent; 0 stands for the first world's rule."""
    present: int
    needed: int
    missing: tuple[Incarnation, ...]

    def __str__(self) -> str:
        """One clause for the log."""
        if self.generation == 0:
            return f"{self.present} of the {self.needed} candidates that a first world takes are here"
        names = listed(self.missing)
        votes = f"{self.present} of the {self.needed} votes it takes are here"
        wait = f"waiting for {names} (if dead for good: elastic-resume force-quorum)"
        return f"generation {self.generation} may live on elsewhere: {votes}; {wait}"


def listed(who: Iterable[Incarnation]) -> str:
    """Name some for people: a list of a thousand is too long to be sent, and nobody reads it."""
    names = [one.node for one in who]
    more = len(names) - NAMED
    return ", ".join(heapq.nsmallest(NAMED, names)) + (f" and {more} more" if more > 0 else "")


def shortfall(
    present: Iterable[Incarnation], knowledge: Knowledge, rules: Rules = ALL_RULES
) -> Shortfall | None:
    """Return the first consent that lacks, newest world first; None where these may form the next world."""
    here = frozenset(present)
    asked = knowledge.worlds
    if not rules.later_proposals:
        asked = (knowledge.begun,) if knowledge.begun else ()
    for world in reversed(asked):
        lack = _world_lacks(world, here, knowledge, rules) if world.generation > knowledge.forced else None
        if lack:
            return lack
    if knowledge.begun is None and not knowledge.forced:
        return _candidates_lack(here, knowledge)
    return None


def has_quorum(present: Iterable[Incarnation], knowledge: Knowledge, rules: Rules = ALL_RULES) -> bool:
    """Say whether these may form the next world."""
    return shortfall(present, knowledge, rules) is None


def _candidates_lack(here: frozenset[Incarnation], knowledge: Knowledge) -> Shortfall | None:
    places = {one.candidate for one in here if one.candidate is not None}
    needed = knowledge.candidates // 2 + 1
    return None if len(places) >= needed else Shortfall(0, len(places), needed, ())


def _world_lacks(
    world: World, here: frozenset[Incarnation], knowledge: Knowledge, rules: Rules
) -> Shortfall | None:
    alive = knowledge.alive(world)
    if not alive:
        return _candidates_lack(here, knowledge)
    if rules.incarnations:
        votes = [one for one in alive if one in here]
    else:
        nodes = {one.node for one in here}
        votes = [one for one in alive if one.node in nodes]
    if 2 * len(votes) > len(alive) or (2 * len(votes) == len(alive) and votes[0] is alive[0]):
        return None
    missing = tuple(one for one in alive if one not in here)
    return Shortfall(world.generation, len(votes), len(alive) // 2 + 1, missing)
