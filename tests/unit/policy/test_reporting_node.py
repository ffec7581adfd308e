"""Which node reports a restart or the end of the job."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from elastic_resume.policy.failure_classification import EXIT, Failure
from elastic_resume.policy.reasons import JobFinished
from elastic_resume.policy.reporting_node import reports_end, reports_restart, reports_stop
from elastic_resume.policy.restart import GaveUp, JobFailure, JudgedFailure, RestartsExhausted

NODES = ("n0", "n1", "n2")
GAVE_UP = GaveUp("n1", RestartsExhausted(Failure(EXIT, "n1", 1)))
JUDGED = JudgedFailure("digests", 3, "", "replicas differ")


@pytest.mark.parametrize(
    ("former", "members", "reporter"),
    [
        (NODES, NODES, "n0"),
        (NODES, ("n1", "n2"), "n1"),
        (("n1", "n2"), NODES, "n1"),  # n0 is back, and knows nothing of the loss
        (NODES, ("n3", "n2"), "n2"),
        (("n1",), ("n0", "n2"), None),
    ],
)
def test_restart_is_reported_by_first_member_that_was_there(
    former: Sequence[str], members: Sequence[str], reporter: str | None
) -> None:
    """Exactly one node, also where the first one is lost or new."""
    reporting = [node for node in members if reports_restart(node, members, former)]
    assert reporting == ([reporter] if reporter else [])


@pytest.mark.parametrize(
    ("end", "reporter"),
    [
        (JobFinished(), "n0"),
        (JobFinished(unfinished=("n0",), unfinished_count=1), "n1"),
        (GAVE_UP, "n1"),
        (JUDGED, "n0"),
    ],
)
def test_end_of_job_is_reported_by_one_node(end: JobFinished | JobFailure, reporter: str) -> None:
    """By the one that gave up, else by the first of the last view that is there; by no spare."""
    assert [node for node in NODES if reports_end(node, NODES, end)] == [reporter]
    assert not reports_end("n3", (), end)


def test_own_end_is_reported_by_each_node() -> None:
    """As when no view is found: no other node may know of this one. A stop is reported by the first."""
    assert reports_end("n2", NODES, None)
    assert reports_end("n2", (), None)
    assert [node for node in NODES if reports_stop(node, NODES)] == ["n0"]
    assert not reports_stop("n0", ())
