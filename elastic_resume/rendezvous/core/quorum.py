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

MAX_NODES_NAMED = 16
"""So many nodes are named in one message for people."""


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One life of an agent: a node's name and a random id; where it listens does not change in a life.

    `candidate` is the place of its address in the list of candidates, None where it is in none.
    """

    node: str
    incarnation_id: str
    address: str = field(default="", compare=False)
    candidate_index: int | None = field(default=None, compare=False)

    def __str__(self) -> str:
        """The node's name, as messages for people give it."""
        return self.node

    def next_incarnation(self) -> Incarnation:
        """Return the next life of the same process, for one that was declared gone and is not."""
        life, _, turn = self.incarnation_id.partition("+")
        return replace(self, incarnation_id=f"{life}+{int(turn or 0) + 1}")


@dataclass(frozen=True, slots=True)
class View:
    """The members of one generation in rank order, and the leader that proposed it."""

    generation: int
    members: tuple[Incarnation, ...]
    leader: Incarnation

    def rank(self, member: Incarnation) -> int | None:
        """Return the rank of a member, None of another."""
        return _index_members(self)[0].get(member)

    def find_incarnations(self, node: str) -> tuple[Incarnation, ...]:
        """Return the members of that name."""
        return _index_members(self)[1].get(node, ())

    def __hash__(self) -> int:
        """Hash what tells worlds apart: all members would take as long as they are many."""
        return hash((self.generation, self.leader))


@functools.lru_cache(maxsize=8)
def _index_members(view: View) -> tuple[dict[Incarnation, int], dict[str, tuple[Incarnation, ...]]]:
    """Look up ranks by member and members by node; worked out once for each of the newest worlds."""
    ranks: dict[Incarnation, int] = {}
    nodes: dict[str, tuple[Incarnation, ...]] = {}
    for rank, member in enumerate(view.members):
        ranks.setdefault(member, rank)
        nodes[member.node] = (*nodes.get(member.node, ()), member)
    return ranks, nodes


@dataclass(frozen=True, slots=True)
class SafetyRules:
    """Which of the rules hold. All do; tests break one at a time to see that a checker notices."""

    distinguish_incarnations: bool = True
    two_phase: bool = True
    count_later_proposals: bool = True
    merge_state_with_deaths: bool = True


ALL_RULES = SafetyRules()


@dataclass(frozen=True, slots=True)
class QuorumState:
    """What a node knows of worlds: the newest begun, proposals after it, and who is known gone.

    `void` names proposals (generation, leader) that their own leader has dropped and so can never begin.
    `candidates` is how many addresses the job was given; it never changes. Worlds up to the generation
    `settled` are over for good: the job had ended in all of them, and is not asked about them any more.
    `forced`: an operator declared the missing members of the worlds up to this generation dead for good, so
    that those worlds need not consent; 0 once a later world has begun.
    """

    candidate_count: int
    installed: View | None = None
    proposals: tuple[View, ...] = ()
    dead: frozenset[Incarnation] = frozenset()
    aborted: frozenset[tuple[int, Incarnation]] = frozenset()
    closed_generation: int = 0
    forced_generation: int = 0

    @property
    def newest_generation(self) -> int:
        """The greatest generation known of, begun or proposed; 0 before any."""
        begun = self.installed.generation if self.installed else 0
        return max([begun, *(world.generation for world in self.proposals)])

    @property
    def voting_views(self) -> tuple[View, ...]:
        """Every world whose consent a new one needs: the newest begun and each later proposal."""
        return (*((self.installed,) if self.installed else ()), *self.proposals)

    def live_members(self, view: View) -> tuple[Incarnation, ...]:
        """Return the members of a world that are not known gone, in rank order."""
        return _filter_live_members(view, self.dead) if self.dead else view.members

    def prune(self) -> QuorumState:
        """Drop proposals that a newer begun world or their own leader has made irrelevant."""
        begun = (
            self.installed if self.installed and self.installed.generation > self.closed_generation else None
        )
        floor = begun.generation if begun else self.closed_generation
        void = frozenset(one for one in self.aborted if one[0] > floor)
        forced = self.forced_generation if self.forced_generation >= floor else 0
        if not self.proposals:
            same = void == self.aborted and begun is self.installed and forced == self.forced_generation
            return self if same else replace(self, installed=begun, aborted=void, forced_generation=forced)
        later = {
            world
            for world in self.proposals
            if world.generation > floor and (world.generation, world.leader) not in void
        }
        # A world's place and hash take as long as it has members.
        proposals = tuple(sorted(later, key=_view_sort_key) if len(later) > 1 else later)
        return replace(self, installed=begun, proposals=proposals, aborted=void, forced_generation=forced)

    def prune_dead(self) -> QuorumState:
        """Forget those gone from worlds that count no more, so that knowledge stays small over a long job.

        Only done when a world begins: a proposal made elsewhere meanwhile may yet name them. Forgetting that
        someone is gone only ever asks for more votes, never for fewer.
        """
        if not self.dead:
            return self
        worlds = self.voting_views
        gone = (one for one in self.dead if any(world.rank(one) is not None for world in worlds))
        return replace(self, dead=frozenset(gone))

    def with_dead(self, incarnations: Iterable[Incarnation]) -> QuorumState:
        """Return this knowledge, and that these are gone."""
        return replace(self, dead=self.dead | frozenset(incarnations)).prune()

    def with_proposal(self, view: View) -> QuorumState:
        """Return this knowledge, and that a world was proposed."""
        return replace(self, proposals=(*self.proposals, view)).prune()

    def with_installed(self, view: View) -> QuorumState:
        """Return this knowledge, and that a world has begun."""
        newer = self.installed is None or view.generation > self.installed.generation
        return replace(self, installed=view).prune().prune_dead() if newer else self

    def with_aborted(self, view: View) -> QuorumState:
        """Return this knowledge, and that a proposal was dropped by its leader (who alone may say so)."""
        return replace(self, aborted=self.aborted | {(view.generation, view.leader)}).prune()

    def merge(self, other: QuorumState) -> QuorumState:
        """Return what both know together. Idempotent, commutative, associative up to `tidy`."""
        if other == self:
            return self
        begun = max(
            (world for world in (self.installed, other.installed) if world),
            key=lambda world: world.generation,
            default=None,
        )
        both = replace(
            self,
            installed=begun,
            proposals=self.proposals + other.proposals,
            dead=self.dead | other.dead,
            aborted=self.aborted | other.aborted,
            closed_generation=max(self.closed_generation, other.closed_generation),
            forced_generation=max(self.forced_generation, other.forced_generation),
        ).prune()
        return both if begun == self.installed else both.prune_dead()


@functools.lru_cache(maxsize=8)
def _filter_live_members(view: View, dead: frozenset[Incarnation]) -> tuple[Incarnation, ...]:
    lives = {one.incarnation_id for one in dead}  # to look at these first takes a third of the time
    return tuple(one for one in view.members if one.incarnation_id not in lives or one not in dead)


def _view_sort_key(view: View) -> tuple[int, tuple[tuple[str, str], ...]]:
    """An order of worlds that does not depend on who heard of which first."""
    return view.generation, tuple((one.node, one.incarnation_id) for one in (view.leader, *view.members))


@dataclass(frozen=True, slots=True)
class MissingQuorum:
    """Why a set of nodes may not form a world: whose consent is lacking, and who could give it."""

    generation: int
    """The world that does not consent; 0 stands for the first world's rule."""
    votes: int
    votes_needed: int
    missing_members: tuple[Incarnation, ...]

    def __str__(self) -> str:
        """One clause for the log."""
        if self.generation == 0:
            return f"{self.votes} of the {self.votes_needed} candidates that a first world takes are here"
        names = format_node_names(self.missing_members)
        votes = f"{self.votes} of the {self.votes_needed} votes it takes are here"
        wait = f"waiting for {names} (if dead for good: elastic-resume force-quorum)"
        return f"generation {self.generation} may live on elsewhere: {votes}; {wait}"


def format_node_names(incarnations: Iterable[Incarnation]) -> str:
    """Name some for people: a list of a thousand is too long to be sent, and nobody reads it."""
    names = [one.node for one in incarnations]
    more = len(names) - MAX_NODES_NAMED
    return ", ".join(heapq.nsmallest(MAX_NODES_NAMED, names)) + (f" and {more} more" if more > 0 else "")


def find_missing_quorum(
    present: Iterable[Incarnation], quorum_state: QuorumState, rules: SafetyRules = ALL_RULES
) -> MissingQuorum | None:
    """Return the first consent that lacks, newest world first; None where these may form the next world."""
    here = frozenset(present)
    asked = quorum_state.voting_views
    if not rules.count_later_proposals:
        asked = (quorum_state.installed,) if quorum_state.installed else ()
    for world in reversed(asked):
        lack = (
            _check_view(world, here, quorum_state, rules)
            if world.generation > quorum_state.forced_generation
            else None
        )
        if lack:
            return lack
    if quorum_state.installed is None and not quorum_state.forced_generation:
        return _check_candidates(here, quorum_state)
    return None


def has_quorum(
    present: Iterable[Incarnation], quorum_state: QuorumState, rules: SafetyRules = ALL_RULES
) -> bool:
    """Say whether these may form the next world."""
    return find_missing_quorum(present, quorum_state, rules) is None


def _check_candidates(present: frozenset[Incarnation], quorum_state: QuorumState) -> MissingQuorum | None:
    places = {one.candidate_index for one in present if one.candidate_index is not None}
    needed = quorum_state.candidate_count // 2 + 1
    return None if len(places) >= needed else MissingQuorum(0, len(places), needed, ())


def _check_view(
    view: View, present: frozenset[Incarnation], quorum_state: QuorumState, rules: SafetyRules
) -> MissingQuorum | None:
    alive = quorum_state.live_members(view)
    if not alive:
        return _check_candidates(present, quorum_state)
    if rules.distinguish_incarnations:
        votes = [one for one in alive if one in present]
    else:
        nodes = {one.node for one in present}
        votes = [one for one in alive if one.node in nodes]
    if 2 * len(votes) > len(alive) or (2 * len(votes) == len(alive) and votes[0] is alive[0]):
        return None
    missing = tuple(one for one in alive if one not in present)
    return MissingQuorum(view.generation, len(votes), len(alive) // 2 + 1, missing)
