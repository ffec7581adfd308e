"""How often to snapshot and to save: the setting's forms, what is due when, and the bounds that hold."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.errors import ConfigError
from elastic_resume.policy.checkpoint_interval import (
    ASSUMED_MTBF_S,
    AUTO,
    MAX_DISK_DUTY,
    MAX_OVERHEAD_SHARE,
    MAX_SAVE_INTERVAL_S,
    MAX_SNAPSHOT_INTERVAL_S,
    IntervalSetting,
    SaveCost,
    commit_interval_s,
    estimate_mtbf_s,
    is_commit_due,
    next_snapshot_step,
    optimal_interval_s,
    snapshot_interval_steps,
)

ANY = st.floats()  # infinite, negative and not a number included
SECONDS = st.floats(min_value=1e-6, max_value=1e6)
HOUR = 3600.0


# ---- the setting ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["auto", "1", "100", "30s", "1.5s", "off"])
def test_setting_survives_parse_and_str(text: str) -> None:
    """`parse` reads what `str` writes."""
    assert str(IntervalSetting.parse(text, "snapshot-every", allow_off=True)) == text


@pytest.mark.parametrize("text", ["", "0", "-3", "0s", "5 m", "s", "1e3", "nan", "infs", "100 steps", "off"])
def test_malformed_setting_is_refused(text: str) -> None:
    """The error lists the valid forms."""
    with pytest.raises(ConfigError, match=r"number of steps \(100\), a time \(30s, 5m\) or auto"):
        IntervalSetting.parse(text)


def test_seconds_are_refused_if_nodes_must_count_alike() -> None:
    """The error does not offer them."""
    with pytest.raises(
        ConfigError, match=r"check-replicas is '30s': write a number of steps \(100\) or auto"
    ):
        IntervalSetting.parse("30s", "check-replicas", allow_seconds=False)


# ---- failures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failures", "uptime_s", "found"),
    [
        (0, 0.0, ASSUMED_MTBF_S),
        (0, 100 * HOUR, 104 * HOUR),
        (1, 60.0, (ASSUMED_MTBF_S + 60) / 2),
        (99, 100 * 15.0, (ASSUMED_MTBF_S + 1500) / 100),
        (-1, math.nan, ASSUMED_MTBF_S),
    ],
)
def test_mtbf_estimate_adds_one_assumed_failure(failures: int, uptime_s: float, found: float) -> None:
    """The estimate is finite before the first failure and moderate after it."""
    assert estimate_mtbf_s(failures, uptime_s) == pytest.approx(found)


# ---- snapshots -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "step_s", "cost_s", "mtbf", "gap"),
    [
        ("7", None, None, HOUR, 7),
        ("7", 100.0, 100.0, HOUR, 7),
        ("2s", None, 1.0, HOUR, 1),
        ("2s", 0.5, None, HOUR, 4),
        ("2s", 0.3, None, HOUR, 4),  # six steps, and nodes hold common ones
        ("2s", 9.0, None, HOUR, 1),
        ("0.9s", 0.03, None, HOUR, 16),
        ("0.96s", 0.03, None, HOUR, 32),
        ("30s", 0.9, None, HOUR, 32),  # 28.8 s
        ("30s", 0.95, None, HOUR, 16),  # not 30.4 s
        ("30s", 15.1, None, HOUR, 1),  # not 30.2 s
        ("auto", None, 0.01, HOUR, 1),
        ("auto", 0.1, None, HOUR, 1),
        ("auto", 0.1, 0.0, HOUR, 1),
        ("auto", 0.1, 0.001, HOUR, 1),  # exactly 1 %
        ("auto", 0.1, 0.0011, HOUR, 2),
        ("auto", 0.1, 0.1, HOUR, 128),  # 1 %: 100 steps; at the optimum it would be 267
        ("auto", 0.1, 0.1, 15.0, 32),  # 17 steps: sqrt(2 * 0.1 * 15) - 0.1 = 1.63 s
        ("auto", 0.1, 50.0, 24 * HOUR, 512),  # the bound: 60 s
        ("auto", 0.9, 50.0, 24 * HOUR, 64),  # 57.6 s, not 115 s
        ("auto", 70.0, 50.0, 24 * HOUR, 1),  # a step that is longer than the bound
        ("auto", 0.1, 1.0, 1.0, 8),  # half the time between failures
    ],
)
def test_snapshot_interval_is_shorter_of_one_percent_and_optimum(
    every: str, step_s: float | None, cost_s: float | None, mtbf: float, gap: int
) -> None:
    """The shorter of 1 % and Young's optimum, within the bounds."""
    assert (
        snapshot_interval_steps(IntervalSetting.parse(every), step_s=step_s, cost_s=cost_s, mtbf_s=mtbf)
        == gap
    )


@given(st.one_of(st.none(), ANY), st.one_of(st.none(), ANY), ANY, st.sampled_from(["auto", "3", "2.5s"]))
def test_any_measurement_gives_snapshot_interval(
    step_s: float | None, cost_s: float | None, mtbf: float, every: str
) -> None:
    """A clock that jumped gives a gap, and not an exception in the training loop."""
    assert (
        snapshot_interval_steps(IntervalSetting.parse(every), step_s=step_s, cost_s=cost_s, mtbf_s=mtbf) >= 1
    )


@given(SECONDS, SECONDS, SECONDS, st.floats(min_value=1e-3, max_value=1e6), st.integers(0, 10**6))
def test_failure_costs_no_more_than_the_bound(
    step_s: float, cost_s: float, mtbf: float, bound_s: float, step: int
) -> None:
    """It costs one step if that takes longer."""
    for every, most_s in ((AUTO, MAX_SNAPSHOT_INTERVAL_S), (IntervalSetting(seconds=bound_s), bound_s)):
        gap = snapshot_interval_steps(every, step_s=step_s, cost_s=cost_s, mtbf_s=mtbf)
        assert (next_snapshot_step(step, gap) - step) * step_s <= max(most_s, step_s) * (1 + 1e-8)


@given(SECONDS, SECONDS, SECONDS)
def test_snapshots_cost_no_more_than_allowed(step_s: float, cost_s: float, mtbf: float) -> None:
    """The greatest of 1 %, the optimum's share, and what two in a minute cost."""
    gap = snapshot_interval_steps(AUTO, step_s=step_s, cost_s=cost_s, mtbf_s=mtbf)
    least_s = min(
        cost_s / MAX_OVERHEAD_SHARE,
        optimal_interval_s(cost_s, mtbf),
        max(MAX_SNAPSHOT_INTERVAL_S / 2, step_s),
    )
    assert gap * step_s >= least_s * (1 - 1e-8)


@given(SECONDS, SECONDS, SECONDS, SECONDS)
def test_costlier_snapshots_are_not_more_frequent(
    step_s: float, one: float, other: float, mtbf: float
) -> None:
    """Also where Young's approximation has ended."""
    cheap, dear = sorted([one, other])
    at = [
        snapshot_interval_steps(AUTO, step_s=step_s, cost_s=cost_s, mtbf_s=mtbf) for cost_s in (cheap, dear)
    ]
    assert at[0] <= at[1]


@given(SECONDS, SECONDS, SECONDS, SECONDS)
def test_more_failures_give_no_fewer_snapshots(
    step_s: float, cost_s: float, one: float, other: float
) -> None:
    """Monotone in the time between failures."""
    often, rare = sorted([one, other])
    at = [snapshot_interval_steps(AUTO, step_s=step_s, cost_s=cost_s, mtbf_s=mtbf) for mtbf in (often, rare)]
    assert at[0] <= at[1]


# ---- saves ---------------------------------------------------------------------------------------------


def test_steps_setting_saves_at_its_multiples() -> None:
    """After a resume in between, the next multiple is due, not the next N steps."""
    every, cost = IntervalSetting(steps=10), SaveCost(0.0)
    due = [
        s for s in range(14, 41) if is_commit_due(every, step=s, committed_step=13, elapsed_s=0, cost=cost)
    ]
    assert due[0] == 20
    assert not is_commit_due(every, step=9, committed_step=0, elapsed_s=99, cost=None)
    assert is_commit_due(every, step=23, committed_step=13, elapsed_s=0, cost=cost), (
        "20 passed while the disk was busy"
    )


def test_seconds_setting_counts_from_last_save() -> None:
    """No step is saved twice."""
    every = IntervalSetting(seconds=30)
    found = [
        is_commit_due(every, step=2, committed_step=1, elapsed_s=s, cost=SaveCost(99)) for s in (29.9, 30.0)
    ]
    assert found == [False, True]
    assert not is_commit_due(every, step=2, committed_step=2, elapsed_s=31.0, cost=None)
    assert not is_commit_due(IntervalSetting(is_off=True), step=2, committed_step=0, elapsed_s=1e9, cost=None)


def test_auto_saves_after_first_step_then_by_cost() -> None:
    """A state that cannot be stored fails early."""
    cost = SaveCost(0.001)
    assert is_commit_due(AUTO, step=1, committed_step=0, elapsed_s=0.0, cost=None)
    assert not is_commit_due(AUTO, step=2, committed_step=1, elapsed_s=0.1, cost=cost)
    assert is_commit_due(AUTO, step=2, committed_step=1, elapsed_s=commit_interval_s(cost), cost=cost)
    assert not is_commit_due(AUTO, step=1, committed_step=1, elapsed_s=1e9, cost=cost), "nothing new to save"


@pytest.mark.parametrize(
    ("cost", "mtbf", "interval_s"),
    [
        (SaveCost(0.05), ASSUMED_MTBF_S, math.sqrt(2 * 0.05 * ASSUMED_MTBF_S) - 0.05),
        (SaveCost(0.0, 0.0, cpu_s=0.4, cores=8), ASSUMED_MTBF_S, math.sqrt(2 * 0.05 * ASSUMED_MTBF_S) - 0.05),
        (SaveCost(0.0, 0.0, cpu_s=0.4, cores=0), HOUR, math.sqrt(2 * 0.4 * HOUR) - 0.4),
        (SaveCost(1000.0), 100 * HOUR, MAX_SAVE_INTERVAL_S),
        (SaveCost(0.0, commit_s=3.0), HOUR, 30.0),  # of the disk's time not more than a tenth
        (SaveCost(0.05, commit_s=3.0), HOUR, 30.0),
        (SaveCost(0.05, commit_s=1.0), HOUR, math.sqrt(2 * 0.05 * HOUR) - 0.05),
        (SaveCost(0.0, commit_s=100.0), HOUR, 1000.0),  # which may be longer than the longest interval
        (SaveCost(0.0), HOUR, 0.0),
    ],
)
def test_auto_save_interval_is_youngs_optimum_within_bounds(
    cost: SaveCost, mtbf: float, interval_s: float
) -> None:
    """sqrt(2 w M) - w, where w is the stall and the committer's share of the cores."""
    assert commit_interval_s(cost, mtbf) == pytest.approx(interval_s)


@given(st.builds(SaveCost, ANY, ANY, ANY, ANY), ANY, ANY)
def test_any_cost_gives_save_decision(cost: SaveCost, mtbf: float, since_s: float) -> None:
    """The interval is finite."""
    assert 0 <= commit_interval_s(cost, mtbf) < math.inf
    assert is_commit_due(AUTO, step=2, committed_step=1, elapsed_s=since_s, cost=cost, mtbf_s=mtbf) in {
        True,
        False,
    }


@given(SECONDS, SECONDS, SECONDS, SECONDS)
def test_save_interval_keeps_bounds(stall_s: float, commit_s: float, cpu_s: float, mtbf: float) -> None:
    """The disk is mostly idle; otherwise ten minutes is the longest interval."""
    interval_s = commit_interval_s(SaveCost(stall_s, commit_s, cpu_s), mtbf)
    assert commit_s <= interval_s * MAX_DISK_DUTY * (1 + 1e-9)
    assert interval_s <= max(MAX_SAVE_INTERVAL_S, commit_s / MAX_DISK_DUTY)


@given(SECONDS, SECONDS, SECONDS, SECONDS)
def test_optimum_grows_with_cost_and_mtbf(one: float, other: float, cost_s: float, mtbf: float) -> None:
    """This also holds where the formula itself decreases."""
    low, high = sorted([one, other])
    assert optimal_interval_s(low, mtbf) <= optimal_interval_s(high, mtbf) * (1 + 1e-9)
    assert optimal_interval_s(cost_s, low) <= optimal_interval_s(cost_s, high) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("step", "gap", "then"),
    [(6, 6, 12), (7, 6, 12), (7, 1, 8), (7, 4, 8), (8, 4, 12), (8, 8, 16), (17, 16, 32)],
)
def test_next_snapshot_is_next_multiple(step: int, gap: int, then: int) -> None:
    """Nodes with different intervals hold common steps."""
    assert next_snapshot_step(step, gap) == then


@given(SECONDS, SECONDS, SECONDS, st.sampled_from(["auto", "30s", "2.5s"]))
def test_measured_interval_is_power_of_two(step_s: float, cost_s: float, mtbf: float, every: str) -> None:
    """Nodes that measure different costs hold common steps: nothing is sent after a failure."""
    gap = snapshot_interval_steps(IntervalSetting.parse(every), step_s=step_s, cost_s=cost_s, mtbf_s=mtbf)
    assert gap.bit_count() == 1
