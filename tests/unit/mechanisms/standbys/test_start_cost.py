"""Tables of cases for the start of workers before their node joins a view."""

from __future__ import annotations

import pytest

from elastic_resume.events import Event
from elastic_resume.mechanisms.standbys.judge import (
    STANDBY_AFTER_S,
    StartCost,
    choose_standby_ranks,
    find_start_cost,
)

SLOW = StartCost(20.0, 1 << 30)


@pytest.mark.parametrize(
    ("cost", "parked", "is_possible", "expected"),
    [
        (SLOW, (), True, (0, 1, 2)),  # a newcomer, a spare, or a node that lost all workers
        (SLOW, (0, 2), True, (1,)),
        (SLOW, (0, 1, 2), True, ()),
        (StartCost(STANDBY_AFTER_S), (), True, ()),  # a restart costs the others no more than that
        (StartCost(STANDBY_AFTER_S + 0.1), (), True, (0, 1, 2)),
        (None, (), True, ()),  # the first start of the job, or no restartable script
        (SLOW, (), False, ()),  # workers start cold, or a standby has failed
    ],
)
def test_choose_standby_ranks(
    cost: StartCost | None, parked: tuple[int, ...], is_possible: bool, expected: tuple[int, ...]
) -> None:
    """The missing local ranks start ahead where that saves the others time."""
    assert choose_standby_ranks(cost, parked, 3, is_possible=is_possible) == expected


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], None),
        ([{"event": "worker-start", "start_s": 9.0}], None),
        ([{"event": "restartable", "start_s": 9.0, "state_bytes": 5}], StartCost(9.0, 5)),
        ([{"event": "restartable", "start_s": s} for s in (9.0, 11.0, 10.0)], StartCost(11.0)),
        ([{"event": "restartable", "start_s": "long", "state_bytes": -1}], StartCost(0.0)),
    ],
)
def test_find_start_cost(events: list[Event], expected: StartCost | None) -> None:
    """The slowest worker counts, because a view waits for all."""
    assert find_start_cost(events) == expected
