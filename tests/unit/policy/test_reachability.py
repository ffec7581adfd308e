"""Which nodes a view leaves out, by table: nodes in rank order and pairs in, nodes left out out."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.policy.reachability import choose_left_out

CASES = [
    ("no pair", "abcd", "", {}),
    ("of equals the one with the highest rank", "abcd", "cd", {"d": ["c"]}),
    ("the rank counts, not the name", "badc", "cd", {"c": ["d"]}),
    ("the one with more pairs, whatever its rank", "abcd", "ab ac", {"a": ["b", "c"]}),
    ("two pairs that share nobody", "abcd", "ab cd", {"d": ["c"], "b": ["a"]}),
    ("two halves that cannot reach each other", "abcd", "ac ad bc bd", {"d": ["a", "b"], "c": ["a", "b"]}),
    ("nobody reaches another", "abc", "ab ac bc", {"c": ["a", "b"], "b": ["a"]}),
    ("a chain", "abcde", "ab bc cd de", {"d": ["c", "e"], "b": ["a", "c"]}),
    ("a node that has left", "abc", "cd", {}),
    ("a node that misses itself", "abc", "bb", {}),
]


@pytest.mark.parametrize(
    ("nodes", "pairs", "left_out"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_choice_follows_pairs_and_ranks(nodes: str, pairs: str, left_out: dict[str, list[str]]) -> None:
    """Each row of the table above."""
    known = [frozenset(pair) for pair in pairs.split()]
    assert choose_left_out(nodes, "", known) == choose_left_out("", nodes, known) == left_out


def test_newcomer_costs_no_member_its_place() -> None:
    """It has more pairs than others, but none with a member; the second newcomer has one with the first."""
    pairs = [frozenset(pair) for pair in ("de", "df", "ef", "ae")]
    assert choose_left_out("abc", "def", pairs) == {"e": ["a", "d"], "f": ["d"]}


@given(st.sets(st.sampled_from([frozenset(pair) for pair in itertools.combinations("abcdefg", 2)])))
def test_nodes_that_remain_reach_each_other(pairs: set[frozenset[str]]) -> None:
    """A member always remains, and each node that is left out could not reach another."""
    left_out = choose_left_out("abcd", "efg", pairs)
    assert not any(pair.isdisjoint(left_out) for pair in pairs)
    assert all(frozenset((node, other)) in pairs for node, others in left_out.items() for other in others)
    assert all(left_out.values())
    assert not left_out.keys() >= set("abcd")
