"""Who may form the next world: the third rule by table, and what merging knowledge may not lose."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.rendezvous.core.quorum import (
    Incarnation,
    QuorumState,
    SafetyRules,
    View,
    find_missing_quorum,
    has_quorum,
)

A, B, C, D, E = (
    Incarnation(name, "1", f"{name}:1", candidate_index=place if place < 3 else None)
    for place, name in enumerate("abcde")
)
A2 = Incarnation("a", "2", "a:1", candidate_index=0)


def world(generation: int, *members: Incarnation) -> View:
    """A world whose rank 0 proposed it."""
    return View(generation, members, members[0])


def knows(
    begun: View | None = None,
    *proposals: View,
    gone: tuple[Incarnation, ...] = (),
    candidates: int = 3,
    forced: int = 0,
) -> QuorumState:
    """Knowledge with three candidates unless told."""
    return QuorumState(candidates, begun, proposals, frozenset(gone), forced_generation=forced)


FIVE = world(1, A, B, C, D, E)
TABLE = [
    ("two of three candidates make the first world", (A, C), knows(), True),
    ("one of three candidates does not", (A, D, E), knows(), False),
    ("one candidate is enough where there is one", (A,), knows(candidates=1), True),
    ("a crowd without a candidate is not enough", (D, E), knows(candidates=1), False),
    ("a restarted candidate is a candidate", (A2, B), knows(), True),
    ("one node at two addresses is counted by address", (A, A2), knows(), False),
    ("more than half of the last world", (C, D, E), knows(FIVE), True),
    ("less than half of it", (A, B), knows(FIVE), False),
    ("an exact half with the lowest rank", (A, D), knows(world(1, A, B, C, D)), True),
    ("an exact half without it", (C, D), knows(world(1, A, B, C, D)), False),
    ("the lowest rank that is not gone", (B, C), knows(FIVE, gone=(A,)), True),
    ("the gone do not count", (E,), knows(FIVE, gone=(A, B, C, D)), True),
    ("the gone do not vote", (A, B, C), knows(FIVE, gone=(A, B)), False),
    ("a new process does not vote for its former self", (A2, C), knows(world(1, A, B, C)), False),
    ("where all are gone the candidates decide", (A2, B), knows(world(1, A), gone=(A,)), True),
    ("where all are gone one candidate is too few", (A2,), knows(world(1, A), gone=(A,)), False),
    ("a later proposal must consent too", (A, B, C), knows(FIVE, world(2, C, D, E)), False),
    ("and may", (B, C, D), knows(FIVE, world(2, C, D, E)), True),
    ("a forced world need not consent", (E,), knows(FIVE, forced=1), True),
    ("nor need its restarted members", (A2,), knows(FIVE, gone=(A,), forced=1), True),
    ("a later proposal must consent", (A,), knows(FIVE, world(2, C, D, E), forced=1), False),
    ("a proposal for the first world must consent", (B, C), knows(None, world(1, A, B)), False),
    ("a proposal of the first world does not waive its rule", (B,), knows(None, world(1, B)), False),
]


@pytest.mark.parametrize(("name", "present", "knowledge", "expected"), TABLE, ids=[row[0] for row in TABLE])
def test_quorum(name: str, present: tuple[Incarnation, ...], knowledge: QuorumState, expected: bool) -> None:
    """The third rule, one row a case."""
    del name
    assert has_quorum(present, knowledge) is expected


def test_no_two_disjoint_sets_have_a_quorum_of_the_same_knowledge() -> None:
    """Whatever is known, two sides of a partition that know it are not both the heir."""
    everyone = (A, B, C, D, E)
    for gone in itertools.chain.from_iterable(itertools.combinations(everyone, n) for n in range(5)):
        known = knows(FIVE, gone=gone)
        for size in range(6):
            for side in itertools.combinations(everyone, size):
                other = tuple(one for one in everyone if one not in side)
                assert not (has_quorum(side, known) and has_quorum(other, known)), (side, gone)


def test_a_shortfall_names_who_is_waited_for() -> None:
    """The log says how many votes are here and whose are not."""
    lack = find_missing_quorum((A, B), knows(FIVE))
    assert str(lack) == (
        "generation 1 may still run elsewhere: 2 of the 3 required votes are here; waiting for c, d, e "
        "(if dead for good: elastic-resume force-quorum)"
    )
    assert str(find_missing_quorum((A,), knows())) == "1 of the 2 candidates required to start are here"


def test_each_broken_rule_lets_somebody_in_who_may_not() -> None:
    """The switches that the simulator's tests use do what their names say."""
    assert has_quorum((A2, C), knows(world(1, A, B, C)), SafetyRules(distinguish_incarnations=False))
    assert has_quorum((A, B, C), knows(FIVE, world(2, C, D, E)), SafetyRules(count_later_proposals=False))


def test_a_void_proposal_asks_for_nobody() -> None:
    """What its leader dropped can never begin, and so holds nobody back."""
    late = world(2, A, D, E)
    known = knows(world(1, A), late)
    assert not has_quorum((A,), known)
    assert has_quorum((A,), known.with_aborted(late))
    assert has_quorum((A,), known.merge(known.with_aborted(late)))


def test_a_begun_world_ends_what_came_before_it() -> None:
    """Proposals and the gone that no longer matter are forgotten: knowledge stays small."""
    known = knows(FIVE, world(2, C, D, E), gone=(A, B)).with_installed(world(3, C, D))
    assert known == knows(world(3, C, D))


def test_a_forced_generation_counts_until_a_later_world_begins() -> None:
    """It reaches others with all else that is known, and a later world ends it."""
    forced = knows(FIVE, forced=1)
    assert knows(FIVE).merge(forced) == forced == forced.prune()
    assert forced.with_installed(world(2, A)).forced_generation == 0
    assert forced.merge(knows(world(2, C, D, E))) == knows(world(2, C, D, E))


def test_a_reborn_agent_is_another_incarnation() -> None:
    """One that was declared gone by mistake comes back as somebody new, at the same address."""
    again = A.next_incarnation()
    assert again not in (A, A2)
    assert again.next_incarnation() not in (A, again)
    assert (again.node, again.address, again.candidate_index) == ("a", "a:1", 0)


everybody = st.sampled_from((A, B, C, D, E))
worlds = st.builds(
    lambda generation, members: world(generation, *members),
    st.integers(1, 4),
    st.lists(everybody, min_size=1, max_size=5, unique=True),
)
knowledges = st.builds(
    lambda proposals, gone: knows(None, *proposals, gone=tuple(gone)).prune(),
    st.lists(worlds, max_size=3, unique_by=lambda one: (one.generation, one.leader)),
    st.lists(everybody, unique=True),
)


@given(knowledges, knowledges)
def test_merging_is_the_same_from_both_sides_and_once_is_enough(one: QuorumState, other: QuorumState) -> None:
    """Knowledge may arrive twice and in any order."""
    both = one.merge(other)
    assert set(both.proposals) == set(other.merge(one).proposals)
    assert both.dead >= (one.dead | other.dead) & {m for w in both.voting_views for m in w.members}
    assert both.merge(one) == both == both.merge(other)
