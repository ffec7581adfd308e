"""The exception of the rule: whose votes count, and who may vote for whom."""

from __future__ import annotations

import pytest

from elastic_resume.rendezvous.core.taken_votes import (
    are_others_replaced,
    find_counted,
    find_restarted,
    may_take,
    may_vote,
)
from elastic_resume.rendezvous.core.world import Ballot, Incarnation, View, Vote

A, B, C, D = (Incarnation(name, f"disk of {name}") for name in "abcd")
A2, B2, C2 = (Incarnation(node.node, node.disk_id, boot=2) for node in (A, B, C))
VIEW = View(1, (A, B, C), A)


@pytest.mark.parametrize(
    ("taker", "dead", "expected"),
    [
        (A, B, True),
        (A, C, True),
        (B, A, True),  # the heir
        (B, C, False),
        (C, A, False),
        (A2, B, False),  # a later process of the leader
        (A, D, False),
        (A, B2, False),
    ],
)
def test_only_leader_and_heir_take_votes(taker: Incarnation, dead: Incarnation, expected: bool) -> None:
    """The leader any member's, the heir the leader's."""
    assert may_take(VIEW, taker, dead) is expected


def test_heir_is_the_lowest_rank_besides_the_leader() -> None:
    """Also if the leader is not rank 0."""
    assert View(1, (A, B, C), A).heir == B
    assert View(1, (A, B, C), C).heir == A
    assert View(1, (A,), A).heir is None


@pytest.mark.parametrize(
    ("voter", "proposer", "free_of", "expected"),
    [
        (C, A, "", True),  # its leader
        (C, B, "", False),
        (C, B, "a", True),  # the heir holds the leader's vote, say
        (C, C, "", False),  # its own ballot is another's too
        (C, C, "a", True),
        (A, A, "", True),
        (A, B, "", True),  # the heir takes its vote in the same ballots only
        (A, C, "", False),
        (A, C, "b", True),
        (C2, B, "", True),  # a later process: nobody takes its vote any more
        (D, B, "", True),
    ],
)
def test_votes_for_others_wait(
    voter: Incarnation, proposer: Incarnation, free_of: str, expected: bool
) -> None:
    """Until nobody can take the voter's vote."""
    is_free = {"a": A, "b": B}.get(free_of)
    assert may_vote(VIEW, voter, proposer, is_free_of=lambda process: process == is_free) is expected


def cast(
    *voters: Incarnation, taken: dict[Incarnation, set[str]] | None = None
) -> dict[str, tuple[Incarnation, Vote]]:
    """Make the votes of these processes."""
    taken_by = taken or {}
    return {
        voter.disk_id: (voter, Vote(1, Ballot(2), None, frozenset(taken_by.get(voter, ()))))
        for voter in voters
    }


@pytest.mark.parametrize(
    ("proposer", "votes", "is_free", "expected"),
    [
        (A, cast(A, B), False, "a b"),
        (A, cast(A, C), False, "c"),  # the heir may take the leader's vote
        (A, cast(A, C), True, "a c"),
        (A, cast(A, C, taken={A: {B.disk_id}}), False, "a b c"),
        (A, cast(A, taken={A: {C.disk_id}}), False, ""),
        (B, cast(B, taken={B: {A.disk_id}}), True, "a b"),
        (C, cast(C, B, taken={B: {A.disk_id}}), True, "a b c"),  # in every ballot
        (C, cast(C, B2, taken={B2: {A.disk_id}}), True, "c"),  # a may have taken b's vote
        (B, cast(B, C2), True, "b"),  # a may have taken c's vote
        (B, cast(B, C2, A2), True, "a b c"),  # a says that it has not; and b that it has not a's
        (B, cast(B, C2, A2, taken={A2: {C.disk_id}}), True, "a b c"),  # a's vote counts for both
        (C, cast(C, A2), True, "c"),  # b may have taken a's vote
        (C, cast(C, A2, B2), True, "a b c"),
    ],
)
def test_counted_votes(
    proposer: Incarnation, votes: dict[str, tuple[Incarnation, Vote]], is_free: bool, expected: str
) -> None:
    """Votes that arrived, taken ones, and those of restarted members if nobody has taken them."""
    restarted = find_restarted(VIEW, votes)
    counted = find_counted(VIEW, proposer, votes, restarted, is_free_of_heir=is_free)
    assert counted.keys() == {f"disk of {name}" for name in expected.split()}


def test_restarted_member_counts_only_from_before_the_proposal() -> None:
    """Its report would come too late for the choice of the proposal."""
    votes = cast(B, C2, A2)
    counted = find_counted(VIEW, B, votes, find_restarted(VIEW, cast(B, C2)), is_free_of_heir=True)
    assert counted.keys() == {B.disk_id}


def test_replaced_members_need_no_vote() -> None:
    """If each other member is back with an empty disk, one vote is enough; never none."""
    assert are_others_replaced(VIEW, {A.disk_id}, {"b", "c"})
    assert not are_others_replaced(VIEW, {A.disk_id}, {"b"})
    assert not are_others_replaced(VIEW, set(), {"a", "b", "c"})
    assert not are_others_replaced(View(0, ()), {A.disk_id}, set())
