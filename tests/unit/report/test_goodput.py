"""Where the time of made-up runs went, and how long each phase of their recoveries took."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_resume.report import goodput, summary
from tests.support.report_runs import (
    Job,
    begin_at,
    job_killed,
    killed,
    march,
    node_returns,
    run_steps,
    worker_killed,
)


def test_the_parts_of_a_run() -> None:
    """Each second is where one would look for it."""
    told = summary.build_run_report(killed().events)
    assert told.goodput == goodput.Goodput(
        total_s=37.0,
        productive_s=8.0 + 12.0 + 1.0,  # steps 1 to 8 and 9 to 20, and what came before the end
        starting_s=5.0 + 1.5 + 2.0,  # imports; then from the world to the state, in both generations
        restoring_s=0.5 + 1.0,
        stalled_s=0.0,
        recomputed_s=2.0 + 0.5,  # and the half of a step that was cut off
        waiting_s=3.0 + 0.5,  # for others at first; from the kill to the next world
    )


def test_the_phases_of_a_recovery() -> None:
    """From the last step before to the first one after, without a gap."""
    told = summary.build_run_report(killed().events)
    (phases,) = told.recoveries.values()
    assert phases.known == [
        ("detected", 0.5),
        ("stopped", pytest.approx(0.3)),
        ("rendezvous", pytest.approx(0.2)),
        ("started", 2.0),
        ("restored", 1.0),
        ("step", 1.0),
    ]
    assert phases.total_s == pytest.approx(5.0)
    # What that cost is another thing: two steps and a half were lost too, and a step is no loss.
    assert told.downtimes == {1: pytest.approx(5.0 + 2.0 + 0.5 - 0.5 - 1.0)}


def test_failures_without_a_step_between_them_cost_until_the_next_step() -> None:
    """The first of them is charged with it all."""
    job = run_steps(*range(1, 11))
    job.exit(110, 1, signal="SIGKILL")
    job.stop(110.2, 0, 2)
    begin_at(job, 111, 114, 10, seconds=1.0)
    job.exit(115, 1, signal="SIGKILL")
    job.stop(115.2, 0, 2)
    begin_at(job, 116, 119, 10, seconds=1.0)
    march(job, 120, *range(11, 21))
    job.finish(130, 20)
    told = summary.build_run_report(job.events)
    assert told.downtimes == {1: pytest.approx(119.0 - 110.0)}
    assert "2 failures, 9.0 s downtime" in told.verdict.text


def test_generations_that_end_before_a_second_mark_have_trained() -> None:
    """Ranks mark the first step and then one in five seconds; each next generation tells the last step."""
    job = run_steps(1)
    for began in (104, 112, 120):
        job.exit(began, 1, signal="SIGKILL")
        job.stop(began + 0.2, 0, 2)
        step = (began - 104) // 8 * 3 + 3
        begin_at(job, began + 1, began + 4, step, seconds=1.0)
        job.steps(began + 5, step + 1)
    job.exit(127, 1, signal="SIGKILL")
    job.stop(127.2, 0, 2)
    # Three steps each, of 1.5 s at the most: what lies between the first mark and the end.
    assert summary.build_run_report(job.events).goodput.productive_s > 3 * 3.0


def test_a_failure_after_which_nobody_trained_costs_until_the_end() -> None:
    """A job that gives up, or is drained while it is down."""
    job = run_steps(*range(1, 11))
    job.exit(110, 1, signal="SIGKILL")
    job.stop(130.0, 0, 2)
    assert summary.build_run_report(job.events).downtimes == {1: pytest.approx(130.0 - 110.0)}


def test_waiting_for_copies_is_no_training() -> None:
    """Workers say how long they waited; the one that waited longest kept the others."""
    job = killed()
    for one in job.events:
        if one["event"] == "step":
            one["stalled_s"] = 0.1 * one["step"] * (1 + one["rank"]) if one["generation"] == 1 else 0.0
    spent = summary.build_run_report(job.events).goodput
    assert (spent.stalled_s, spent.productive_s, spent.total_s) == (3.0, 18.0, 37.0)


def test_a_step_that_hangs_is_not_training() -> None:
    """Nothing was done from the last step until the watch killed."""
    job = run_steps(*range(1, 11))
    job.exit(150, 1, signal="SIGKILL")
    job.stop(150.2, 0, 2)
    begin_at(job, 151, 152, 10, seconds=0.5)
    march(job, 153, 11, 12, 13)
    job.finish(155, 13)
    spent = summary.build_run_report(job.events).goodput
    assert spent.productive_s == 13.0
    assert spent.recomputed_s == 1.0  # as much as a step may have taken
    assert spent.waiting_s == 3.0 + 39.0 + 1.0


def test_a_lineage_that_was_left_counts_for_nothing() -> None:
    """The third generation begins before the second one's first step: all that one did is repeated."""
    job = run_steps(*range(1, 11))
    job.exit(110, 1, signal="SIGKILL")
    begin_at(job, 111, 112, 10, seconds=0.5)
    march(job, 113, 11, 12)
    job.exit(114, 1, signal="SIGKILL")
    begin_at(job, 115, 116, 4, seconds=0.5, recomputed_steps=8)
    march(job, 117, *range(5, 16))
    job.finish(127, 15)
    told = summary.build_run_report(job.events)
    assert told.goodput.productive_s == 4.0 + 11.0
    assert told.goodput.recomputed_s == 6.0 + 2.0
    assert [one.activity for one in told.slices if one.generation == 2 and one.activity == "productive"] == []


def test_the_hour_in_which_nobody_ran_is_waiting() -> None:
    """A job that was killed as a whole and started again."""
    spent = summary.build_run_report(job_killed().events).goodput
    assert spent.waiting_s > 3500
    assert spent.total_s == pytest.approx(3620.5)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([killed, worker_killed, node_returns, job_killed]), st.randoms(), st.floats(0, 1))
def test_slices_have_no_gap_whatever_is_missing(make: Callable[[], Job], random: Any, share: float) -> None:
    """Events that are lost move time from one part to another, and never out of the whole."""
    events = [one for one in make().events if random.random() > share]
    told = summary.build_run_report(events)
    for one, following in zip(told.slices, told.slices[1:], strict=False):
        assert one.start_t < one.end_t == following.start_t
    assert told.goodput.total_s == pytest.approx(sum(spent for _, spent in told.goodput.parts))
    assert all(spent >= 0 for _, spent in told.goodput.parts)
    assert all(value >= 0 for phases in told.recoveries.values() for _, value in phases.known)
