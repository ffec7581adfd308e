"""Test when a node drains, and which exit code asks for another start of the job."""

from __future__ import annotations

import pytest

from elastic_resume.policy.restart import (
    AgentEnd,
    decide_exit_code,
    drain_margin_s,
    may_drained_worker_end,
)


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


@pytest.mark.parametrize(
    ("waited_s", "announced_at", "left_s", "step_s", "expected"),
    [
        (0.1, 100.6, 5.0, 0.1, False),
        (0.6, 100.6, 5.0, 0.1, True),
        (0.1, 99.0, 5.0, 0.1, True),  # newcomers were expected, so all nodes know already
        (0.1, None, 5.0, 0.1, False),
        (0.5, None, 5.0, 0.1, True),  # without an announcement nobody waits for long
        (0.1, 100.6, 5.0, 3.6, True),  # another step might not fit into the grace
        (0.1, 100.6, 5.0, 3.4, False),
        (0.1, 100.6, 1.4, 0.0, True),
        (0.1, 106.0, 5.0, 0.1, True),  # the announcement itself takes longer than the grace
    ],
)
def test_drained_worker_trains_on_until_all_nodes_know(
    waited_s: float, announced_at: float | None, left_s: float, step_s: float, expected: bool
) -> None:
    """The drain was requested at 100."""
    now = 100.0 + waited_s
    found = may_drained_worker_end(now, 100.0, announced_at=announced_at, left_s=left_s, step_s=step_s)
    assert found is expected


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, False),
        ({"boundaries": 2}, True),  # of a sharded model
        ({"snapshot_s": 0.3}, True),
    ],
)
def test_drained_worker_counts_further_steps_and_snapshots(more: dict[str, float], expected: bool) -> None:
    """3.9 s are left, and one more step takes 2 s."""
    found = may_drained_worker_end(
        100.0,
        100.0,
        announced_at=100.6,
        left_s=3.9,
        step_s=2.0,
        **more,  # type: ignore[arg-type]
    )
    assert found is expected
