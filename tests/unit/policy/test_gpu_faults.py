"""Real error texts of workers on GPUs: whose fault each is, and what follows."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_resume.policy.failure_classification import (
    GPU,
    Failure,
    FailureVerdict,
    classify_failures,
    separate_root_causes,
)
from elastic_resume.policy.gpu_faults import find_gpu_error
from elastic_resume.policy.restart import (
    Continue,
    Exclude,
    GpuBroken,
    MachineBroken,
    RestartDecision,
    RestartLimits,
    WorldSummary,
    decide_own_exclusion,
    decide_restart,
    summarize_generation,
)
from elastic_resume.policy.wording import explain_verdict
from tests.unit.policy.gpu_error_texts import ERROR_TEXTS, ErrorText

ABORTED = [row for row in ERROR_TEXTS if row.kind == "signal"]
RAISED = [row for row in ERROR_TEXTS if row.kind == "exception"]
LOST_PEER = {"t": 1.0, "event": "failure", "rank": 9, "type": "RuntimeError", "message": "Connection closed"}


def events_of(row: ErrorText) -> list[dict[str, Any]]:
    """Return the events of a worker that raised the text of a row, as its hook writes them."""
    kind, _, text = row.text.partition(": ")
    message, _, detail = text.partition("\n")
    report = {"type": kind.rpartition(".")[2], "message": message[:500], "detail": detail}
    end = {"event": "worker-exit", "exit_code": 1, "signal": None, "stopped": False}
    return [
        {"t": 1.0, "event": "worker-start", "rank": 4, "local_rank": 1, "gpu": "GPU-5f3a", "step": 3},
        {"t": 2.0, "event": "failure", "rank": 4, "step": 7, **report},
        {"t": 3.0, "rank": 4, **end},
    ]


def decide(row: ErrorText, *, newest_step: int = 0, times: int = 1) -> RestartDecision:
    """Return what is decided after node b failed so, in a world of three."""
    result = summarize_generation(events_of(row), node="b", num_nodes=3)
    alone = decide_own_exclusion("b", result.failures)
    if not isinstance(alone, Continue):
        return alone
    return decide_restart([result] * times, RestartLimits(), WorldSummary(("a", "b", "c"), newest_step))


@pytest.mark.parametrize("row", ABORTED, ids=lambda row: row.text[-40:])
def test_aborted_worker_is_a_root_cause_if_it_was_first(row: ErrorText) -> None:
    """Nobody reads what it wrote to stderr. That its GPU is broken is known only from the driver."""
    assert find_gpu_error("", row.text) is None
    start = events_of(RAISED[0])[0]
    abort = {"t": 3.0, "event": "worker-exit", "rank": 4, "exit_code": None, "signal": "SIGABRT"}
    xid = {"t": 2.0, "event": "gpu-fault", "local_rank": 1, "uuid": "GPU-5f3a", "xid": 48}
    (failure,) = classify_failures([start, abort], "b")
    (known,) = classify_failures([start, xid, abort], "b")
    (peer,) = classify_failures([LOST_PEER], "a")
    assert separate_root_causes([failure, peer]).root_causes == (failure,)
    assert separate_root_causes([peer, failure]).root_causes == (peer,)
    assert separate_root_causes([peer, known]).root_causes == (known,)
    assert known.kind == GPU


@pytest.mark.parametrize("row", RAISED, ids=lambda row: row.text[-40:])
def test_error_is_judged_by_whose_fault_it_is(row: ErrorText) -> None:
    """A peer that lost its connection just before is the root cause only if a peer caused this error, too."""
    (failure,) = classify_failures(events_of(row), "b")
    assert failure.is_secondary is row.is_secondary
    assert (failure.gpu_error.value if failure.gpu_error else "") == row.gpu_error
    (peer,) = classify_failures([LOST_PEER], "a")
    verdict = separate_root_causes([peer, failure])
    assert verdict == FailureVerdict((peer,) if row.is_secondary else (failure,), verdict.secondary_failures)
    is_excluded = isinstance(decide(row), Exclude)
    has_hint = len(explain_verdict(FailureVerdict((failure,)))) > 1
    follows = "node excluded" if is_excluded else "restart, hint" if has_hint else "restart"
    assert follows == row.next


@pytest.mark.parametrize("row", [row for row in RAISED if row.fault_of == "machine" and row.gpu_error])
def test_machine_at_fault_is_excluded_once_the_job_has_trained(row: ErrorText) -> None:
    """A missing GPU at the second time."""
    decision = decide(row, newest_step=9, times=2)
    assert isinstance(decision, Exclude)
    assert isinstance(decision.reason, GpuBroken)
    failure: Failure = decision.reason.failure
    assert (failure.kind == GPU) is (row.gpu_error == "hardware")


def test_machine_that_computes_wrongly_is_excluded_by_its_own_node() -> None:
    """The error that the worker raises is the root cause, whatever arrived before it."""
    events = [
        {"t": 1.0, "event": "failure", "rank": 4, "type": "HardwareError", "message": "wrong gradients"}
    ]
    (failure,) = classify_failures(events, "b")
    (peer,) = classify_failures([LOST_PEER], "a")
    assert separate_root_causes([peer, failure]).root_causes == (failure,)
    assert decide_own_exclusion("b", [peer, failure]) == Exclude("b", MachineBroken(failure))


ECC = "CUDA error: uncorrectable ECC error encountered"
THREAD = (
    "Caught RuntimeError in pin memory thread for device 0.\nOriginal Traceback (most recent call last):\n"
)


@pytest.mark.parametrize(
    ("exception_type", "text", "is_own"),
    [
        ("RuntimeError", ECC, True),
        ("RuntimeError", f'{THREAD}  File "pin_memory.py", line 37\nRuntimeError: {ECC}\nmore', True),
        ("RuntimeError", f"rank 1 failed: {ECC}", False),
        ("RuntimeError", f"On WorkerInfo(id=1, name=worker1):\nRuntimeError('{ECC}')", False),
        ("CheckpointException", f"CheckpointException ranks:dict_keys([1])\n{ECC}", False),
        ("ValueError", ECC, False),
    ],
)
def test_only_an_error_of_this_process_counts(exception_type: str, text: str, is_own: bool) -> None:
    """Every rank may raise a text that quotes another rank's error, and then all nodes would leave."""
    assert (find_gpu_error(exception_type, text) is not None) is is_own
