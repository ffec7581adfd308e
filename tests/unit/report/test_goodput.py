"""Test where the time of made-up runs went."""

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
    node_returns,
    record_steps,
    run_steps,
    worker_killed,
)


def test_goodput_parts_of_killed_run() -> None:
    """Each second belongs to one part."""
    report = summary.build_run_report(killed().events)
    assert report.goodput == goodput.Goodput(
        total_s=37.0,
        productive_s=8.0 + 12.0 + 1.0,  # steps 1 to 8 and 9 to 20, and what came before the end
        starting_s=5.0 + 1.5 + 2.0,  # imports; then from the world to the state, in both generations
        restoring_s=0.5 + 1.0,
        stalled_s=0.0,
        recomputed_s=2.0,
        interrupted_s=0.5,  # the half of a step that was cut off
        waiting_s=3.0 + 0.5,  # for others at first; from the kill to the next world
    )


def test_steps_given_up_on_request_are_not_lost_to_a_failure() -> None:
    """The job goes back from step 10 to 4; a later failure costs its own two steps."""
    job = run_steps(*range(1, 11))
    job.finish(111, 10)
    begin_at(job, 121, 124, 4, seconds=1.0, resume_from="best", given_up_steps=6)
    record_steps(job, 125, *range(5, 9))
    job.exit(128.5, 1, signal="SIGKILL")
    job.stop(128.8, 0, 2)
    begin_at(job, 129, 132, 6, seconds=1.0, recomputed_steps=2)
    record_steps(job, 133, *range(7, 11))
    job.finish(137, 10)
    report = summary.build_run_report(job.events)
    rows = report.history.generations
    assert [(row.recomputed_steps, row.resume_from, row.given_up_steps) for row in rows] == [
        (0, "", 0),
        (2, "best", 6),
        (None, "", 0),
    ]
    assert report.goodput.recomputed_s == 2.0
    assert report.goodput.productive_s >= 10.0 + 2.0 + 4.0
    note = "went back to step 4, as --resume-from best requested; 6 newer steps given up"
    assert f"generation 2: {note}" in summary.format_text(report).replace("\n  ", " ")


def test_way_back_that_is_interrupted_and_repeated_loses_no_step() -> None:
    """The generation that was killed before its first step ran none."""
    job = run_steps(*range(1, 11))
    job.stop(111, 0, 1, 2)
    for formed_t in (121, 131):
        begin_at(job, formed_t, formed_t + 3, 4, seconds=1.0, resume_from="best", given_up_steps=6)
        if formed_t == 121:
            job.exit(125, 1, signal="SIGKILL")
            job.stop(125.2, 0, 2)
    record_steps(job, 135, *range(5, 11))
    job.finish(141, 10)
    rows = summary.build_run_report(job.events).history.generations
    assert [(row.first_step, row.last_step, row.recomputed_steps) for row in rows] == [
        (1, 10, 0),
        (None, 4, 0),
        (5, 10, None),
    ]


def test_downtime_is_what_a_failure_costs() -> None:
    """From the kill to the next first step, and two steps and a half that were lost; a step is no loss."""
    report = summary.build_run_report(killed().events)
    assert report.downtimes == {1: pytest.approx(5.0 + 2.0 + 0.5 - 0.5 - 1.0)}


def test_failures_without_step_between_share_one_downtime() -> None:
    """The first of them carries all of it."""
    job = run_steps(*range(1, 11))
    job.exit(110, 1, signal="SIGKILL")
    job.stop(110.2, 0, 2)
    begin_at(job, 111, 114, 10, seconds=1.0)
    job.exit(115, 1, signal="SIGKILL")
    job.stop(115.2, 0, 2)
    begin_at(job, 116, 119, 10, seconds=1.0)
    record_steps(job, 120, *range(11, 21))
    job.finish(130, 20)
    report = summary.build_run_report(job.events)
    assert report.downtimes == {1: pytest.approx(119.0 - 110.0)}
    assert "2 failures, 9.0 s downtime" in report.verdict.text


def test_generation_with_one_recorded_step_counts_as_training() -> None:
    """Ranks record the first step, then one in five seconds; the next resume has the last step."""
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


def test_failure_without_recovery_costs_until_the_end() -> None:
    """The job gave up, or ended while it was down."""
    job = run_steps(*range(1, 11))
    job.exit(110, 1, signal="SIGKILL")
    job.stop(130.0, 0, 2)
    assert summary.build_run_report(job.events).downtimes == {1: pytest.approx(130.0 - 110.0)}


def test_snapshot_stalls_are_not_productive() -> None:
    """The rank that waited longest counts."""
    job = killed()
    for item in job.events:
        if item["event"] == "step":
            item["stalled_s"] = 0.1 * item["step"] * (1 + item["rank"]) if item["generation"] == 1 else 0.0
    spent = summary.build_run_report(job.events).goodput
    assert (spent.stalled_s, spent.productive_s, spent.total_s) == (3.0, 18.0, 37.0)


def test_hanging_step_is_not_productive() -> None:
    """Nothing happened between the last step and the kill."""
    job = run_steps(*range(1, 11))
    job.exit(150, 1, signal="SIGKILL")
    job.stop(150.2, 0, 2)
    begin_at(job, 151, 152, 10, seconds=0.5)
    record_steps(job, 153, 11, 12, 13)
    job.finish(155, 13)
    spent = summary.build_run_report(job.events).goodput
    assert spent.productive_s == 13.0
    assert spent.interrupted_s == 1.0  # as much as a step may have taken
    assert spent.waiting_s == 3.0 + 39.0 + 1.0


def test_discarded_steps_are_not_productive() -> None:
    """The third generation starts before the second one's first step."""
    job = run_steps(*range(1, 11))
    job.exit(110, 1, signal="SIGKILL")
    begin_at(job, 111, 112, 10, seconds=0.5)
    record_steps(job, 113, 11, 12)
    job.exit(114, 1, signal="SIGKILL")
    begin_at(job, 115, 116, 4, seconds=0.5, recomputed_steps=8)
    record_steps(job, 117, *range(5, 16))
    job.finish(127, 15)
    report = summary.build_run_report(job.events)
    assert report.goodput.productive_s == 4.0 + 11.0
    assert report.goodput.recomputed_s == 6.0 + 2.0
    assert [
        item.activity for item in report.slices if item.generation == 2 and item.activity == "productive"
    ] == []


def test_hour_without_agents_is_waiting() -> None:
    """The whole job was killed and started again."""
    spent = summary.build_run_report(job_killed().events).goodput
    assert spent.waiting_s > 3500
    assert spent.total_s == pytest.approx(3620.5)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([killed, worker_killed, node_returns, job_killed]), st.randoms(), st.floats(0, 1))
def test_slices_have_no_gap_if_events_are_missing(make: Callable[[], Job], random: Any, share: float) -> None:
    """Missing events move time from one part to another."""
    events = [item for item in make().events if random.random() > share]
    report = summary.build_run_report(events)
    for item, following in zip(report.slices, report.slices[1:], strict=False):
        assert item.start_t < item.end_t == following.start_t
    assert report.goodput.total_s == pytest.approx(sum(spent for _, spent in report.goodput.parts))
    assert all(spent >= 0 for _, spent in report.goodput.parts)
