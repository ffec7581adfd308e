"""Test which rank is named as slow, from the own times of all ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_resume.mechanisms.slow_ranks.judge import MIN_COMPARISONS, SlowRank, find_slow_rank

NAMED = SlowRank("a", 0, 140_000, 100_000, MIN_COMPARISONS)
OwnTimes = dict[str, tuple[int, ...]]


@pytest.mark.parametrize(
    ("times_ms", "expected"),
    [
        ({"a": (100,), "b": (130,)}, ("b", 0)),
        ({"a": (100,), "b": (129,)}, None),
        ({"a": (100, 102), "b": (101, 200)}, ("b", 1)),
        ({"a": (100, 90, 100), "b": (190, 190, 200)}, ("b", 2)),  # half of the ranks are fast
        ({"a": (100,), "b": (150,), "c": (155,)}, None),  # the others are slow too
        ({"a": (10,), "b": (15,)}, ("b", 0)),
        ({"a": (10,), "b": (14,)}, None),  # too little time
        ({"a": (100, 0), "b": (101, 200)}, None),  # one is unknown
        ({"a": (), "b": (200,)}, None),
        ({"a": (200,)}, None),
        ({}, None),
    ],
)
def test_slowest_rank_is_found_by_median_of_others(
    times_ms: OwnTimes, expected: tuple[str, int] | None
) -> None:
    """It is slower than the median of all other ranks, by factor and by time."""
    times_us = {node: tuple(1000 * time_ms for time_ms in times) for node, times in times_ms.items()}
    found = find_slow_rank(times_us, None)
    assert (found and (found.node, found.local_rank)) == expected


def test_rank_is_named_after_comparisons_in_a_row() -> None:
    """Another slowest rank begins anew."""
    slow: OwnTimes = {"a": (140_000,), "b": (100_000,)}
    found = None
    for number in range(1, MIN_COMPARISONS + 1):
        found = find_slow_rank(slow, found)
        assert found
        assert found.is_named == (number == MIN_COMPARISONS)
    assert found == NAMED
    assert find_slow_rank(slow, found) == NAMED
    for last in (None, replace(NAMED, node="b", comparisons=MIN_COMPARISONS - 1)):
        assert find_slow_rank(slow, last) == replace(NAMED, comparisons=1)


@pytest.mark.parametrize(
    ("times_ms", "named"),
    [
        ((120, 100, 100), "a"),  # not slow enough to be named now
        ((114, 100, 100), None),
        ((150, 100, 160), "a"),  # another is slower
        ((0, 100, 100), None),
    ],
)
def test_named_rank_stays_named_while_it_is_slow(times_ms: tuple[int, ...], named: str | None) -> None:
    """A rank near the limit does not come and go."""
    times_us: OwnTimes = {node: (1000 * time_ms,) for node, time_ms in zip("abc", times_ms, strict=True)}
    found = find_slow_rank(times_us, NAMED)
    assert (found.node if found and found.is_named else None) == named
