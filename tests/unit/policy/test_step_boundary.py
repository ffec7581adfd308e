"""Test what a local leader does at a step boundary."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_resume.policy.checkpoint_interval import BoundaryActions, StepBoundary, decide_actions

NOTHING = BoundaryActions()
SNAPSHOT = BoundaryActions(takes_snapshot=True, announces=True)
ALONE = BoundaryActions(takes_snapshot=True, announces=True, leader_only=True)
NEXT_STEP = BoundaryActions(announces_next_step=True)
SHARDED = {"is_sharded": True}
COMMIT_ONLY = BoundaryActions(takes_snapshot=True, commits=True, leader_only=True)


@pytest.mark.parametrize(
    ("announced", "slots", "more", "expected"),
    [
        (6, 3, {}, NOTHING),
        (5, 3, {}, SNAPSHOT),
        (4, 3, {}, SNAPSHOT),
        (None, 3, {}, ALONE),
        (6, 3, {"is_commit_due": True}, BoundaryActions(True, True, leader_only=True, announces=True)),
        (5, 3, {"is_commit_due": True}, BoundaryActions(True, True, announces=True)),
        (5, 3, {"is_reading_due": True}, BoundaryActions(True, is_read=True, announces=True)),
        (6, 2, {"is_reading_due": True}, BoundaryActions(True, False, True, True, announces=True)),
        (6, 3, {"is_epoch_over": True}, ALONE),
        (5, 3, {"is_epoch_over": True, "is_reading_due": True}, ALONE),
        (5, 1, {"is_reading_due": True, "is_epoch_over": True}, NOTHING),
        (6, 1, {"is_commit_due": True}, COMMIT_ONLY),
        (5, 1, {"is_commit_due": True}, BoundaryActions(True, True)),
        (5, 3, {"snapshots_off": True}, NOTHING),
        (None, 3, {"snapshots_off": True, "is_commit_due": True}, COMMIT_ONLY),
        (None, 0, {"is_epoch_over": True}, NOTHING),
        (5, 0, {"is_commit_due": True}, BoundaryActions(writes_directly=True)),
        (6, 3, SHARDED, NOTHING),
        (5, 3, SHARDED, SNAPSHOT),
        (None, 3, SHARDED, NEXT_STEP),
        (6, 3, SHARDED | {"is_commit_due": True}, NEXT_STEP),
        (5, 3, SHARDED | {"is_commit_due": True}, BoundaryActions(True, True, announces=True)),
        (6, 3, SHARDED | {"is_reading_due": True}, NOTHING),
        (6, 3, SHARDED | {"is_epoch_over": True}, SNAPSHOT),
        (None, 1, SHARDED | {"is_epoch_over": True}, NOTHING),
        (None, 1, SHARDED | {"is_commit_due": True}, NEXT_STEP),
        (None, 1, SHARDED | {"is_drained": True}, NEXT_STEP),
        (5, 1, SHARDED | {"is_drained": True}, BoundaryActions(True)),
        (5, 1, SHARDED | {"is_commit_due": True}, BoundaryActions(True, True)),
        (5, 1, SHARDED, NOTHING),
        (None, 0, SHARDED | {"is_commit_due": True}, BoundaryActions(writes_directly=True)),
        (6, 3, {"is_end_planned": True}, ALONE),
        (5, 3, {"is_end_planned": True}, SNAPSHOT),
        (6, 3, SHARDED | {"is_end_planned": True}, NEXT_STEP),
        (6, 1, {"is_end_planned": True}, NOTHING),
        (6, 3, {"is_end_planned": True, "snapshots_off": True}, NOTHING),
    ],
)
def test_actions_follow_from_what_is_due_and_what_fits(
    announced: int | None, slots: int, more: dict[str, Any], expected: BoundaryActions
) -> None:
    """Step 5 has ended."""
    assert decide_actions(StepBoundary(5, announced, slots, **more)) == expected
