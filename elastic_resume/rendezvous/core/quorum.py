"""Decide which nodes may form the next view: dynamic voting with knowledge of deaths.

The package's docstring gives the four rules and their reasons. `QuorumState` is what a node knows of views;
it is sent, merged and stored as a whole. This module knows no time and no messages.
"""

from __future__ import annotations

import functools
import heapq
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

MAX_NODES_NAMED = 16
"""Nodes named in one message for people."""


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One process of an agent: its node's name and a random id. Its address never changes.

    `candidate_index` is the place of its address in the list of candidates, or None.
    """

    node: str
    incarnation_id: str
    address: str = field(default="", compare=False)
    candidate_index: int | None = field(default=None, compare=False)

    def __hash__(self) -> int:
        """Hash the id alone, which is unique: a leader of 10,000 members hashes them all for a vote."""
        return hash(self.incarnation_id)

    def __str__(self) -> str:
        """Return the node's name."""
        return self.node

    def next_incarnation(self) -> Incarnation:
        """Return a new incarnation of the same process, after other nodes declared this one dead."""
        process_id, _, count = self.incarnation_id.partition("+")
        return replace(self, incarnation_id=f"{process_id}+{int(count or 0) + 1}")


@dataclass(frozen=True, slots=True)
class View:
    """The members of one generation in rank order, and the leader that proposed it."""

    generation: int
    members: tuple[Incarnation, ...]
    leader: Incarnation

    def rank(self, member: Incarnation) -> int | None:
        """Return the rank of a member, or None."""
        return _index_members(self)[0].get(member)

    def find_incarnations(self, node: str) -> tuple[Incarnation, ...]:
        """Return the members on the node of that name."""
        return _index_members(self)[1].get(node, ())

    def __hash__(self) -> int:
        """Hash what distinguishes views; hashing every member would be slow."""
        return hash((self.generation, self.leader))


@functools.lru_cache(maxsize=8)
def _index_members(view: View) -> tuple[dict[Incarnation, int], dict[str, tuple[Incarnation, ...]]]:
    """Index ranks by member and members by node, once for each of the newest views."""
    ranks: dict[Incarnation, int] = {}
    nodes: dict[str, tuple[Incarnation, ...]] = {}
    for rank, member in enumerate(view.members):
        ranks.setdefault(member, rank)
        nodes[member.node] = (*nodes.get(member.node, ()), member)
    return ranks, nodes


@dataclass(frozen=True, slots=True)
class QuorumState:
    """What a node knows of views.

    `installed` is the newest installed view, `proposals` are later proposals, `dead` their members known
    dead. `aborted` names proposals (generation, leader) that their own leader has aborted. `candidate_count`,
    the number of addresses of the job, never changes. The job had ended in all views up to
    `closed_generation`, so they no longer vote. An operator declared the missing members of the views up to
    `forced_generation` dead for good; these need not vote either. It is 0 again once a later view is
    installed.
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
        """The greatest generation known, installed or proposed; 0 before any."""
        installed = self.installed.generation if self.installed else 0
        return max([installed, *(view.generation for view in self.proposals)])

    @property
    def voting_views(self) -> tuple[View, ...]:
        """The views whose votes a new one needs: the newest installed view and each later proposal."""
        return (*((self.installed,) if self.installed else ()), *self.proposals)

    def live_members(self, view: View) -> tuple[Incarnation, ...]:
        """Return the members of a view that are not known dead, in rank order."""
        return _filter_live_members(view, self.dead) if self.dead else view.members

    def prune(self) -> QuorumState:
        """Drop proposals that a newer installed view or their own leader has made irrelevant."""
        installed = (
            self.installed if self.installed and self.installed.generation > self.closed_generation else None
        )
        floor = installed.generation if installed else self.closed_generation
        aborted = frozenset(proposal for proposal in self.aborted if proposal[0] > floor)
        forced = self.forced_generation if self.forced_generation >= floor else 0
        later = {
            view
            for view in self.proposals
            if view.generation > floor and (view.generation, view.leader) not in aborted
        }
        # Sorting a single view would cost as much as it has members.
        proposals = tuple(sorted(later, key=_view_sort_key) if len(later) > 1 else later)
        return replace(
            self, installed=installed, proposals=proposals, aborted=aborted, forced_generation=forced
        )

    def prune_dead(self) -> QuorumState:
        """Forget the dead of views that no longer vote, so that the state stays small over a long job.

        Only when a view is installed: a proposal made elsewhere meanwhile may still name them. Forgetting a
        death only ever asks for more votes, never for fewer.
        """
        if not self.dead:
            return self
        views = self.voting_views
        dead = (member for member in self.dead if any(view.rank(member) is not None for view in views))
        return replace(self, dead=frozenset(dead))

    def with_dead(self, incarnations: Iterable[Incarnation]) -> QuorumState:
        """Return this state with these members dead."""
        return replace(self, dead=self.dead | frozenset(incarnations)).prune()

    def with_proposal(self, view: View) -> QuorumState:
        """Return this state with a proposal."""
        return replace(self, proposals=(*self.proposals, view)).prune()

    def with_installed(self, view: View) -> QuorumState:
        """Return this state with an installed view."""
        newer = self.installed is None or view.generation > self.installed.generation
        return replace(self, installed=view).prune().prune_dead() if newer else self

    def with_aborted(self, view: View) -> QuorumState:
        """Return this state with a proposal aborted; only its own leader may call this."""
        return replace(self, aborted=self.aborted | {(view.generation, view.leader)}).prune()

    def merge(self, other: QuorumState) -> QuorumState:
        """Return what both states know. Idempotent, commutative, and associative up to `prune`."""
        if other == self:
            return self
        installed = max(
            (view for view in (self.installed, other.installed) if view),
            key=lambda view: view.generation,
            default=None,
        )
        both = replace(
            self,
            installed=installed,
            proposals=self.proposals + other.proposals,
            dead=self.dead | other.dead,
            aborted=self.aborted | other.aborted,
            closed_generation=max(self.closed_generation, other.closed_generation),
            forced_generation=max(self.forced_generation, other.forced_generation),
        ).prune()
        return both if installed == self.installed else both.prune_dead()


@functools.lru_cache(maxsize=8)
def _filter_live_members(view: View, dead: frozenset[Incarnation]) -> tuple[Incarnation, ...]:
    dead_ids = {member.incarnation_id for member in dead}  # comparing ids first takes a third of the time
    return tuple(
        member for member in view.members if member.incarnation_id not in dead_ids or member not in dead
    )


def _view_sort_key(view: View) -> tuple[int, tuple[tuple[str, str], ...]]:
    """Order views independently of the order in which a node learned of them."""
    return view.generation, tuple(
        (member.node, member.incarnation_id) for member in (view.leader, *view.members)
    )


@dataclass(frozen=True, slots=True)
class MissingQuorum:
    """Why a set of nodes may not form a view: which view's votes are missing, and whose."""

    generation: int
    """The view whose votes are missing; 0 stands for the first view's rule."""
    votes: int
    votes_needed: int
    missing_members: tuple[Incarnation, ...]

    def __str__(self) -> str:
        """Return one clause for the log."""
        if self.generation == 0:
            return f"{self.votes} of the {self.votes_needed} candidates required to start are here"
        return (
            f"generation {self.generation} may still run elsewhere: {self.votes} of the {self.votes_needed} "
            f"required votes are here; waiting for {format_node_names(self.missing_members)} "
            "(if dead for good: elastic-resume force-quorum)"
        )

    @staticmethod
    def parse_missing_names(text: str) -> tuple[str, ...]:
        """Return the nodes named in a clause of `__str__`, at most `MAX_NODES_NAMED`; else nothing."""
        match = re.search(r"; waiting for (\S.*?)( and \d+ more)? \(if dead for good: ", text)
        return tuple(match[1].split(", ")) if match else ()


def format_node_names(incarnations: Iterable[Incarnation]) -> str:
    """List node names for people, at most `MAX_NODES_NAMED` of them."""
    names = [member.node for member in incarnations]
    more = len(names) - MAX_NODES_NAMED
    return ", ".join(heapq.nsmallest(MAX_NODES_NAMED, names)) + (f" and {more} more" if more > 0 else "")


def find_missing_quorum(present: Iterable[Incarnation], quorum_state: QuorumState) -> MissingQuorum | None:
    """Return the newest view without a quorum of votes; None if the present nodes may form the next view."""
    nodes = frozenset(present)
    for view in reversed(quorum_state.voting_views):
        if view.generation > quorum_state.forced_generation:
            missing = _check_view(view, nodes, quorum_state)
            if missing:
                return missing
    if quorum_state.installed is None and not quorum_state.forced_generation:
        return _check_candidates(nodes, quorum_state)
    return None


def has_quorum(present: Iterable[Incarnation], quorum_state: QuorumState) -> bool:
    """Return whether the present nodes may form the next view."""
    return find_missing_quorum(present, quorum_state) is None


def _check_candidates(present: frozenset[Incarnation], quorum_state: QuorumState) -> MissingQuorum | None:
    indices = {member.candidate_index for member in present if member.candidate_index is not None}
    needed = quorum_state.candidate_count // 2 + 1
    return None if len(indices) >= needed else MissingQuorum(0, len(indices), needed, ())


def _check_view(
    view: View, present: frozenset[Incarnation], quorum_state: QuorumState
) -> MissingQuorum | None:
    live = quorum_state.live_members(view)
    if not live:
        return _check_candidates(present, quorum_state)
    votes = [member for member in live if member in present]
    if 2 * len(votes) > len(live) or (2 * len(votes) == len(live) and votes[0] is live[0]):
        return None
    missing = tuple(member for member in live if member not in present)
    return MissingQuorum(view.generation, len(votes), len(live) // 2 + 1, missing)
