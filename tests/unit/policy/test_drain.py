"""Test when a node drains, and which exit code asks for another start of the job."""

from __future__ import annotations

import pytest

from elastic_resume.policy.restart import AgentEnd, decide_exit_code, drain_margin_s


@pytest.mark.parametrize("code", [0, 1, 75, 130, 143])
@pytest.mark.parametrize(
    ("end", "for_job", "for_node"),
    [(AgentEnd.OTHER, None, None), (AgentEnd.JOB_DRAINED, 75, 75), (AgentEnd.NODE_LEFT, 75, 0)],
)
def test_only_node_that_leaves_others_ends_as_if_done(
    end: AgentEnd, code: int, for_job: int | None, for_node: int | None
) -> None:
    """None: the agent keeps its code."""
    for speaks_for_job, expected in ((True, for_job), (False, for_node)):
        decided = decide_exit_code(end, code, speaks_for_job=speaks_for_job)
        assert decided == (code if expected is None else expected)


@pytest.mark.parametrize(
    ("grace_s", "commit_s", "life_s", "expected"),
    [
        (5, 0.0, 3600, 20),  # nothing is known of commits yet
        (5, 4.9, 3600, 20),
        (5, 5.1, 3600, 30),
        (60, 25.0, 86400, 145),
        (5, 1e9, 1e9, 5130),
        (5, 0.0, 30, 15),  # a short life is half the job's
        (5, 0.0, -1, 0),
    ],
)
def test_drain_margin_covers_commit(grace_s: float, commit_s: float, life_s: float, expected: float) -> None:
    """The margin has steps, so nodes with similar commits drain together."""
    assert drain_margin_s(grace_s, commit_s, life_s) == expected
