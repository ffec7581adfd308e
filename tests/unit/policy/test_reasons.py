"""Reasons in words."""

from __future__ import annotations

from elastic_resume.policy.reasons import VotesMissing, describe, name_nodes


def test_many_names_are_cut() -> None:
    """A reason carries sixteen names at most, and their number."""
    nodes = [f"n{number:02}" for number in range(18)]
    reason = VotesMissing(1, 2, 10, name_nodes(nodes), len(nodes))
    assert len(reason.missing_nodes) == 16
    assert describe(reason).endswith("n15 and 2 more")
