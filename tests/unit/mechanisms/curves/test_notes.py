"""Test which states a restore passes over, because no node has their step's values."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_resume.mechanisms.curves import notes
from elastic_resume.policy.resume_plan import Inventory, ResumePlan, SavedState

ENDPOINT = ("127.0.0.1", 4000, "key")


def state(generation: int, step: int, epoch: int = 0) -> SavedState:
    """Return a snapshot of a node."""
    return SavedState("n0", generation, step, 0, "memory", epoch=epoch)


def note(*closed: tuple[int, int, int]) -> object:
    """Return a node's note."""
    return [ENDPOINT, closed, (0, 0)]


CASES: dict[str, tuple[list[SavedState], list[Any], tuple[int, int, int]]] = {
    "recorded": ([state(1, 9), state(1, 8)], [note((1, 9, 0))], (1, 9, 0)),
    "on another node": ([state(1, 9), state(1, 8)], [note((1, 7, 0)), note((1, 9, 0))], (1, 9, 0)),
    "one ahead": ([state(1, 9), state(1, 8)], [note((1, 8, 0))], (1, 8, 0)),
    "two ahead": ([state(1, 9), state(1, 8), state(1, 7)], [note((1, 7, 0))], (1, 7, 0)),
    "too far": ([state(1, step) for step in (9, 8, 7, 6)], [note((1, 6, 0))], (1, 9, 0)),
    "no older state": ([state(1, 9)], [note((1, 8, 0))], (1, 9, 0)),
    "not recorded": ([state(2, 3), state(1, 9)], [note((1, 9, 0))], (2, 3, 0)),
    "begin of the next": ([state(2, 9), state(1, 9)], [note((1, 9, 0), (2, 8, 0))], (1, 9, 0)),
    "before the epoch's end": ([state(1, 9, 1), state(1, 9)], [note((1, 9, 0))], (1, 9, 0)),
    "after the epoch's end": ([state(1, 9, 1), state(1, 9)], [note((1, 9, 1))], (1, 9, 1)),
    "no recording": ([state(1, 287), state(1, 286), state(1, 150)], [note((1, 159, 0))], (1, 287, 0)),
    "a checkpoint long before": ([state(1, 287), state(1, 150)], [note((1, 286, 0))], (1, 150, 0)),
    "malformed": ([state(1, 9)], [{"x": 1}], (1, 9, 0)),
}


@pytest.mark.parametrize("case", CASES)
def test_newest_state_with_its_values_is_left(case: str) -> None:
    """Of the newest three moments; further back, recomputing costs more than the values are worth."""
    states, encoded, expected = CASES[case]
    (left,) = notes.pass_over_unrecorded([Inventory("n0", 0, tuple(states))], encoded)
    assert max(each.moment for each in left.saved_states) == expected


def test_rank_0_node_records_if_its_agent_does() -> None:
    """Notes are in the order of ranks."""
    with_agent: list[object] = [ENDPOINT, [], (0, 0)]
    without: list[object] = [None, [], (0, 0)]
    assert notes.find_recorder([("n1", with_agent), ("n0", without)]) == "n1"
    assert notes.find_recorder([("n1", without), ("n0", with_agent)]) is None
    assert notes.find_recorder([("n1", None), ("n0", with_agent)]) is None
    assert notes.find_recorder([]) is None


def test_recomputed_steps_outlive_generations_that_do_not_reach_them() -> None:
    """Of all that was finished before, unless the job goes back on purpose."""
    plan = ResumePlan("resumed", generation=3, step=90, recomputed_steps=5)
    earlier: list[tuple[str, object]] = [("n0", None), ("n1", [None, [], (2, 100)])]
    assert notes.find_recomputed(earlier, plan) == 100
    assert notes.find_recomputed([("n0", None)], plan) == 95
    back = ResumePlan("resumed", generation=3, step=90, goes_back=True)
    assert notes.find_recomputed(earlier, back) == 90
