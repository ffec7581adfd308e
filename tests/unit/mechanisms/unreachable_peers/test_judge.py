"""Test which nodes the leader keeps apart, and when it ends a view for it."""

from __future__ import annotations

import pytest

from elastic_resume.mechanisms.mechanism import encode_body
from elastic_resume.mechanisms.unreachable_peers.judge import UNREACHABLE, PeerJudge, UnreachablePeers
from elastic_resume.policy.reasons import NodesUnreachable
from elastic_resume.rendezvous.facts import Fact, Scope


@pytest.fixture
def judge() -> PeerJudge:
    """Judge a view of a, b and c in generation 7."""
    made = PeerJudge(Scope(0, (), "a", 3.0))
    made.start_view(7, ("a", "b", "c"))
    return made


def report(judge: PeerJudge, node: str, nodes: str, generation: int = 7) -> None:
    """Let a node report those that it cannot reach."""
    judge.add(node, Fact(UNREACHABLE.name, generation, encode_body(UnreachablePeers(tuple(nodes)))), 0.0)


def find_pairs(judge: PeerJudge) -> set[str]:
    """Return the pairs that the judge keeps apart, if the view goes on."""
    found = judge.judge(0.0)
    assert found.view_end is None
    return {"".join(sorted(pair)) for pair in found.apart}


def test_view_ends_if_a_member_cannot_reach_another(judge: PeerJudge) -> None:
    """The pair is kept apart until the next view has both: their workers try again."""
    report(judge, "b", "cx")
    found = judge.judge(0.0)
    assert found.view_end == NodesUnreachable("b", ("c", "x"))
    assert found.apart == {frozenset("bc"), frozenset("bx")}
    judge.start_view(0, ())
    assert find_pairs(judge) == {"bc", "bx"}
    judge.start_view(8, ("b", "c"))
    assert find_pairs(judge) == {"bx"}


def test_report_of_another_generation_or_of_another_node_ends_no_view(judge: PeerJudge) -> None:
    """The first says nothing about members, and the second is about a node that is left out."""
    report(judge, "b", "cx", generation=6)
    report(judge, "s", "c")
    assert find_pairs(judge) == {"bx", "cs"}


def test_node_that_reaches_all_again_or_is_lost_is_kept_apart_no_more(judge: PeerJudge) -> None:
    """A lost node reports again when it is back."""
    report(judge, "b", "x")
    report(judge, "s", "c")
    report(judge, "b", "")
    judge.remove("s")
    assert find_pairs(judge) == set()
