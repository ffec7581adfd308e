"""Test what people read of compute checks, and what an agent's part keeps for `status`."""

from __future__ import annotations

from typing import Any, cast

import pytest

from elastic_resume.mechanisms.compute_check import COMPUTE_CHECK
from elastic_resume.mechanisms.compute_check.description import (
    ALERTS,
    GAUGE,
    ComputeCheckStatus,
    describe_off,
    describe_status,
)
from elastic_resume.mechanisms.compute_check.judge import ComputeComparison, Outcome
from elastic_resume.mechanisms.compute_check.reporter import ComputeCheckReporter
from tests.support.agent_parts import make_agent_context

NAMED = {
    "event": "gradients-differ",
    "step": 9,
    "rank": 1,
    "node": "n1",
    "gpu": "GPU-5f",
    "name": "layer.weight",
    "agreed_step": 6,
    "times": 2,
}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            NAMED,
            (
                "rank 1 on n1 (GPU-5f) computes other gradients than the majority at step 9, for the second "
                "time, from the same parameters and batch: layer.weight differs (all ranks agreed at step "
                "6); its machine most likely computes wrongly, and what the job has learned since is "
                "in doubt: --resume-from goes back to an earlier checkpoint"
            ),
        ),
        (
            NAMED | {"gpu": "", "times": 1, "agreed_step": 0},
            (
                "rank 1 on n1 computes other gradients than the majority at step 9, from the same parameters "
                "and batch: layer.weight differs (no check of this generation agreed before); its machine "
                "computes wrongly, or the model computes something else on this rank, and what the job has "
                "learned since is in doubt: --resume-from goes back to an earlier checkpoint"
            ),
        ),
        (
            NAMED | {"gpu": "", "times": 1, "agreed_step": 0, "has_other_inputs": True},
            (
                "rank 1 on n1 computes other gradients than the majority at step 9, but from other "
                "parameters or another batch: its replica or its network is wrong (no check of this "
                "generation agreed before)"
            ),
        ),
        (
            {"event": "gradients-differ", "step": 9, "rank": None, "ranks": ["0 on n0", "1 on n1"]},
            (
                "ranks compute different gradients from the same batch at step 9, and there is no majority: "
                "0 on n0, 1 on n1; it is unknown which is wrong (no check of this generation agreed before)"
            ),
        ),
    ],
)
def test_event_is_described(fields: dict[str, Any], text: str) -> None:
    """An event may lack any field."""
    alert = ALERTS[0]
    assert alert.describe(cast("Any", fields)) == text
    assert alert.describe(cast("Any", {"event": "gradients-differ"}))
    assert ALERTS[1].describe(cast("Any", {})) == "compute checks are off: no reason recorded"


def test_reason_of_no_checks_is_described() -> None:
    """A model that is not deterministic looks like a broken machine, if all were equal before."""
    text = describe_off(ComputeComparison(Outcome.UNSTABLE, (0, 2)), 12)
    assert "(rank 0, 2), though all ranks agreed at step 12: the model is not deterministic" in text
    assert "depends on its rank" in describe_off(ComputeComparison(Outcome.ALL_DIFFERENT, (0, 1, 2)), 0)


def test_agent_keeps_the_newest_check_and_counts_wrong_ones() -> None:
    """A difference without a majority names no rank of this node."""
    reporter, client = ComputeCheckReporter(make_agent_context()), cast("Any", None)
    assert reporter.update(client) is None
    for event in (
        {"event": "compute-check", "step": 4, "is_equal": True},
        {"event": "step", "step": 5},
        {**NAMED, "step": 8},
        {"event": "gradients-differ", "step": 12, "rank": None},
        {"event": "compute-check", "step": 12, "is_equal": False},
    ):
        reporter.observe(cast("Any", event))
    status = reporter.update(client)
    assert status == ComputeCheckStatus(12, is_equal=False, wrong=1)
    text = "compute check at step 12: ranks differ; wrong results on this node: 1"
    assert describe_status(status) == text
    assert GAUGE.sample({"step": 12, "is_equal": False, "wrong": 1}) == 1


@pytest.mark.parametrize("every", [0, None])
def test_nothing_is_observed_unless_it_is_asked_for(every: int | None) -> None:
    """The modules that compute are not even imported then."""
    make = COMPUTE_CHECK.make_observer
    assert make is not None
    context = cast("Any", type("Context", (), {"settings": {"check_compute_every": every}}))
    assert make(context) is None
