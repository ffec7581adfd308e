"""Test what people read of a slow rank: in `status`, metrics and report."""

from __future__ import annotations

import pytest

from elastic_resume.commands.job_status import build_document, format_screen
from elastic_resume.mechanisms.mechanism import Gauge, Mechanism, encode_body
from elastic_resume.mechanisms.slow_ranks.description import STATUS, SlowRankStatus
from elastic_resume.report import metrics, summary
from tests.support.report_runs import Job
from tests.unit.commands.test_job_status import make_leader_status, make_members
from tests.unit.report.test_metrics import scrape

SLOW = SlowRankStatus(1, 0.15, 0.1, "GPU-7", "87 °C")


def test_status_and_metrics_name_the_slow_rank_of_a_node() -> None:
    """Another node has none, and no sample."""
    slow = make_leader_status(2, mechanisms=((STATUS.name, encode_body(SLOW)),))
    document = build_document("job", slow, make_members(2), {"n0:1": slow, "n1:1": make_leader_status(2)})
    assert [node["slow_rank"] and node["slow_rank"]["rank"] for node in document["nodes"]] == [1, None]
    lines = format_screen(document)
    assert any(line.startswith("node n0: rank 1 on GPU-7 (87 °C) is slow, and all") for line in lines)
    assert scrape(slow)["elastic_resume_slow_rank", ("n0", "1")] == pytest.approx(1.5)
    assert not [name for name, _ in scrape(make_leader_status(2)) if name == "elastic_resume_slow_rank"]


def test_metric_of_a_mechanism_needs_no_label_beside_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most are one number of a node."""
    gauge = Gauge("own_seconds", "Seconds.", lambda member: float(member["own_s"]))
    monkeypatch.setattr(metrics, "MECHANISMS", (Mechanism(status=STATUS, gauge=gauge),))
    status = make_leader_status(2, mechanisms=((STATUS.name, encode_body(SLOW)),))
    assert scrape(status)["elastic_resume_own_seconds", ("n0",)] == pytest.approx(0.15)


def test_rank_that_is_as_fast_again_is_no_hint() -> None:
    """It is in the list of what happened."""
    job = Job().begun()
    job.add(111, "slow-rank", "n1", generation=1, step=11, rank=1, own_s=0.2, others_s=0.1)
    slow = summary.build_run_report(job.events)
    job.add(112, "slow-rank-ended", "n1", generation=2, step=12, rank=1)  # of another slowness
    still = summary.build_run_report(job.events)
    job.add(112, "slow-rank-ended", "n1", generation=1, step=12, rank=1)
    ended = summary.build_run_report(job.events)
    assert any("rank 1 is slow" in hint for hint in slow.verdict.hints)
    assert any("rank 1 is slow" in hint for hint in still.verdict.hints)
    assert not any("rank 1 is slow" in hint for hint in ended.verdict.hints)
    assert [alert.severity for alert in ended.alerts] == ["note", "note"]
