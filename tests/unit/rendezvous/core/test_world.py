"""Quorums of a view, and the proposal that has to be repeated."""

from __future__ import annotations

from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.rendezvous.core.world import (
    NO_VIEW,
    Ballot,
    Electorate,
    Incarnation,
    Proposal,
    View,
    find_proposal_to_repeat,
)


def make_view(count: int, generation: int = 1) -> View:
    """Make a view of nodes n0, n1 and so on."""
    members = tuple(Incarnation(f"n{rank}", f"d{rank}") for rank in range(count))
    return View(generation, members, members[0])


def list_quorums(electorate: Electorate) -> list[frozenset[str]]:
    """Return every set of voters that is a quorum."""
    keys = sorted(electorate.keys)
    subsets = chain.from_iterable(combinations(keys, size) for size in range(len(keys) + 1))
    return [frozenset(subset) for subset in subsets if electorate.has_quorum(set(subset))]


@pytest.mark.parametrize("count", range(1, 8))
def test_any_two_quorums_share_a_voter(count: int) -> None:
    """Of a view, and of the candidates."""
    for electorate in (Electorate(make_view(count), 1), Electorate(NO_VIEW, count)):
        quorums = list_quorums(electorate)
        assert quorums
        assert all(first & second for first, second in combinations(quorums, 2))


@pytest.mark.parametrize(
    ("voters", "expected"),
    [("d0 d1", True), ("d1 d2", False), ("d1 d2 d3", True), ("d0", False), ("", False)],
)
def test_half_of_a_view_needs_rank_0(voters: str, expected: bool) -> None:
    """Of four members."""
    assert Electorate(make_view(4), 1).has_quorum(set(voters.split())) is expected


def test_exactly_half_of_the_candidates_is_no_quorum() -> None:
    """A candidate that lost its disk must not begin the job anew alone."""
    assert not Electorate(NO_VIEW, 2).has_quorum({"candidate 0"})


def test_newcomer_is_no_voter() -> None:
    """A restarted member is one, in any later process; before the first view the candidates are."""
    view = make_view(2)
    electorate = Electorate(view, 1)
    assert electorate.find_key(Incarnation("n0", "d0", boot=7)) == "d0"
    assert electorate.find_key(Incarnation("n0", "other disk")) is None
    assert Electorate(NO_VIEW, 1).find_key(Incarnation("a", "x", candidate_index=0)) == "candidate 0"
    assert Electorate(NO_VIEW, 1).find_key(Incarnation("b", "y")) is None


def accepted(number: int, generation: int) -> Proposal:
    """Make a proposal of a ballot."""
    return Proposal(Ballot(number, "d0", 1), make_view(2, generation))


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        ({"d0": None, "d1": None}, None),
        ({"d0": accepted(1, 2), "d1": None}, 2),  # d0 and d2 may have decided it
        ({"d1": None, "d2": None, "d0": accepted(1, 2)}, None),  # d0 alone is no quorum
        ({"d0": accepted(1, 2), "d1": accepted(2, 3)}, 3),
        ({"d0": accepted(2, 2), "d1": accepted(1, 2)}, 2),  # the same view of two ballots
        ({"d0": accepted(2, 3), "d1": accepted(1, 2), "d2": accepted(1, 2)}, None),
    ],
)
def test_bound_proposal_is_the_newest_that_may_be_decided(
    votes: dict[str, Proposal | None], expected: int | None
) -> None:
    """Of three members."""
    bound = find_proposal_to_repeat(Electorate(make_view(3), 1), votes)
    assert (bound and bound.view.generation) == expected


@given(st.data())
def test_decided_proposal_is_always_bound(data: st.DataObject) -> None:
    """Whatever quorum accepted a proposal, and whatever quorum votes later in a greater ballot."""
    electorate = Electorate(make_view(data.draw(st.integers(1, 6))), 1)
    quorums = list_quorums(electorate)
    decided = accepted(data.draw(st.integers(1, 5)), 2)
    acceptors, voters = data.draw(st.sampled_from(quorums)), data.draw(st.sampled_from(quorums))
    older = st.none() | st.integers(0, decided.ballot.number - 1).map(lambda number: accepted(number, 3))
    votes = {key: decided if key in acceptors else data.draw(older) for key in voters}
    bound = find_proposal_to_repeat(electorate, votes)
    assert bound is not None
    assert bound.view == decided.view
