"""The rule by which votes decide: quorums, votes handed over, the exception, proposals to be repeated."""

from __future__ import annotations

from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.rendezvous.core.dead_leader import breaks_tie, find_replacing_quorum, may_take, may_vote
from elastic_resume.rendezvous.core.sequence import (
    CastVotes,
    Electorate,
    find_counted,
    find_proposal_to_repeat,
)
from elastic_resume.rendezvous.core.world import NO_VIEW, Ballot, Incarnation, Proposal, View, Vote

A, B, C, D = (Incarnation(name, f"disk of {name}") for name in "abcd")
A2, B2, C2 = (Incarnation(node.node, node.disk_id, boot=2) for node in (A, B, C))
VIEW = View(1, (A, B, C, D), A)


def cast(
    *voters: Incarnation,
    taken: str = "",
    held: dict[str, str] | None = None,
    handed: dict[str, str] | None = None,
) -> CastVotes:
    """Make the votes of these processes; `held` and `handed` are by node."""
    held, handed = held or {}, handed or {}
    return {
        voter.disk_id: (
            voter,
            Vote(
                1,
                Ballot(2),
                has_taken=voter.node in taken,
                held=frozenset(f"disk of {name}" for name in held.get(voter.node, "")),
                handed_to=f"disk of {handed[voter.node]}" if voter.node in handed else "",
            ),
        )
        for voter in voters
    }


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        (cast(A, B), "a b"),
        (cast(B, held={"b": "a"}), "a b"),
        (cast(A2, B, held={"b": "a"}, handed={"a": "b"}), "a b"),  # a is back; b's vote counts for both
        (cast(A2, C, handed={"a": "b"}), "c"),  # b may hold it
        (cast(A2, B, C, handed={"a": "b"}), "a b c"),  # b has promised a later ballot without it
        (cast(B, C, held={"b": "a"}, handed={"b": "c"}), "a b c"),  # c has not got it
        (cast(B, D, held={"b": "a"}, handed={"b": "c"}), "d"),
        (cast(B, C, held={"b": "a", "c": "ab"}, handed={"b": "c"}), "a b c"),  # handed on together
    ],
)
def test_handed_vote_counts_with_its_holder(votes: CastVotes, expected: str) -> None:
    """It counts once, wherever it is."""
    assert find_counted(votes).keys() == {f"disk of {name}" for name in expected.split()}


def test_only_heir_takes_and_only_the_leaders_vote() -> None:
    """The heir is the lowest rank besides the leader; later processes take nothing."""
    assert may_take(VIEW, B, A)
    assert not any(may_take(VIEW, *pair) for pair in ((A, B), (C, A), (B2, A), (B, A2), (B, C)))
    assert View(1, (A, B, C), C).heir == A
    assert View(1, (A,), A).heir is None


@pytest.mark.parametrize(
    ("voter", "proposer", "is_free", "expected"),
    [
        (C, B, False, True),  # nobody takes a follower's vote
        (A, A, False, True),
        (A, B, False, True),  # the heir takes its vote in the same ballots only
        (A, C, False, False),
        (A, C, True, True),
        (A2, C, False, True),  # a later process
    ],
)
def test_leader_votes_for_others_when_its_heir_cannot_take_its_vote(
    voter: Incarnation, proposer: Incarnation, is_free: bool, expected: bool
) -> None:
    """Other members vote at once."""
    assert may_vote(VIEW, voter, proposer, is_free_of_heir=is_free) is expected


@pytest.mark.parametrize(
    ("proposer", "votes", "is_free", "expected"),
    [
        (A, cast(A, B), False, True),
        (A, cast(A, C), False, False),  # the heir may take the leader's vote
        (A, cast(A, C), True, True),
        (B, cast(B, C), True, False),
        (B, cast(B, C, taken="b"), True, True),
        (C, cast(B2, C, taken="b"), True, True),  # in every ballot
        (C, cast(C, D), True, False),
        (C, cast(A2, C), True, False),  # b may have taken a's vote
        (C, cast(A2, B2), True, True),
    ],
)
def test_half_is_a_quorum_where_the_leaders_vote_is(
    proposer: Incarnation, votes: CastVotes, is_free: bool, expected: bool
) -> None:
    """Of four members."""
    assert breaks_tie(VIEW, proposer, votes, is_free_of_heir=is_free) is expected


def test_replaced_members_need_no_vote() -> None:
    """If each other member is back with an empty disk, one vote is enough; never none, nor less than half."""
    three = Electorate(View(1, (A, B, C), A), 1)
    assert find_replacing_quorum(three, cast(A), {"b", "c"})
    assert not find_replacing_quorum(three, cast(A), {"b"})
    assert not find_replacing_quorum(three, {}, {"a", "b", "c"})
    assert find_replacing_quorum(three, cast(B, taken="b"), {"c"})
    assert not find_replacing_quorum(Electorate(NO_VIEW, 1), cast(A), set())


@pytest.mark.parametrize(
    ("votes", "replaced", "expected"),
    [
        (cast(A2, C, handed={"a": "b"}), {"b"}, "a:a c:c"),  # b's disk is lost
        (cast(A2, C, handed={"a": "b"}), {"c"}, ""),  # b may hold it
        (cast(A2, handed={"a": "b"}), {"b"}, ""),  # b may have handed it on to c
        (cast(A2, handed={"a": "b"}), {"b", "c"}, "a:a"),
        (cast(A2, C, held={"c": "ab"}, handed={"a": "b"}), {"b"}, "a:c b:c c:c"),  # b has handed it on
        (cast(A2, B2, held={"b": "a"}, handed={"a": "b", "b": "c"}), {"c"}, "a:b b:b"),
    ],
)
def test_vote_handed_to_a_lost_disk_is_its_givers_again(
    votes: CastVotes, replaced: set[str], expected: str
) -> None:
    """It is so only where all members are here or lost: then nobody else can hold it.

    `expected` names the members whose votes count, and who casts them. What its newest holder has accepted is
    what counts.
    """
    counted = find_replacing_quorum(Electorate(View(1, (A, B, C), A), 0), votes, replaced) or {}

    found = {f"{key.removeprefix('disk of ')}:{voter.node}" for key, (voter, _) in counted.items()}
    assert found == set(expected.split())


def make_view(count: int, generation: int = 1) -> View:
    """Make a view of nodes n0, n1 and so on."""
    members = tuple(Incarnation(f"n{rank}", f"d{rank}") for rank in range(count))
    return View(generation, members, members[0])


def list_quorums(electorate: Electorate) -> list[frozenset[str]]:
    """Return every set of voters that is a quorum."""
    members = [member.disk_id for member in electorate.view.members]
    keys = members or [f"candidate {place}" for place in range(electorate.candidate_count)]
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
def test_half_of_a_view_needs_the_leaders_vote(voters: str, expected: bool) -> None:
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
        ({"d1": None, "d2": None, "d0": accepted(1, 2)}, None),  # d0 alone is less than half
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
