"""Test what people read of replicas that differ."""

from __future__ import annotations

from elastic_resume.report import summary
from tests.support.report_runs import Job


def test_replicas_that_differ_are_the_first_hint() -> None:
    """The numbers are wrong, whatever else happened."""
    job = Job().begun()
    job.add(110, "commit-failed", "n0", generation=1, step=11, error="no space left")
    fields = {"agreed_step": 8, "nodes": [["n0"], ["n1"]], "diverged_nodes": []}
    job.add(111, "replicas-differ", "n1", generation=1, step=12, **fields)
    hints = summary.build_run_report(job.events).verdict.hints
    assert "n1: replicas differ, and there is no majority; the job ends" in hints[0]
    assert len(hints) > 1
