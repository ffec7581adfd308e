"""What the report of an exception says about the exceptions that led to it."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic_resume import constants, errors
from elastic_resume.agent.workers import forkserver
from elastic_resume.policy.failure_classification import GPU, classify_failures
from elastic_resume.policy.restart import GaveUp, SameErrorAgain
from elastic_resume.policy.restart import is_worth_requeue as is_worth_requeue_of_job
from elastic_resume.training import worker_exit

ECC = "CUDA error: uncorrectable ECC error encountered"


class Odd(Exception):  # noqa: N818 - a script's own
    """One that has no hash and no text."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        """Be equal to everything."""
        return True

    def __str__(self) -> str:
        """Fail."""
        raise ValueError("no text")


def test_gpu_error_that_led_to_another_one_is_reported() -> None:
    """Also through an exception of the script's that cannot be compared or printed."""
    odd, last = Odd(), KeyError("x")
    odd.__cause__, last.__context__ = RuntimeError(f"{ECC}\nCompile with `TORCH_USE_CUDA_DSA`"), odd
    fields = worker_exit._describe_error(last, None)
    (failure,) = classify_failures([{"t": 1.0, "event": "failure", "rank": 0, **fields}], "a")
    assert (failure.kind, failure.type) == (GPU, "KeyError")
    assert failure.message == f"'x' (from: {ECC})"


def test_error_that_is_only_quoted_is_not_reported() -> None:
    """It may be another rank's."""
    fields = worker_exit._describe_error(ValueError(f"rank 3 failed: {ECC}"), None)
    (failure,) = classify_failures([{"t": 1.0, "event": "failure", "rank": 0, **fields}], "a")
    assert (failure.kind, failure.gpu_error) == ("exception", None)


class ArchiveOutageError(Exception):
    """A script's own."""


@pytest.mark.parametrize(
    ("error", "is_worth_requeue"),
    [
        (errors.ArchiveOutageError("it was away for 10 min."), True),
        (errors.ArchiveError("no such bucket."), False),
        (ArchiveOutageError("it has that name."), False),
    ],
)
def test_error_that_a_later_start_may_not_meet_is_reported(
    error: Exception, *, is_worth_requeue: bool
) -> None:
    """The property of the error decides, and no name."""
    fields = worker_exit._describe_error(error, None)
    (failure,) = classify_failures([{"t": 1.0, "event": "failure", "rank": 0, **fields}], "a")
    assert failure.is_worth_requeue is is_worth_requeue
    assert is_worth_requeue_of_job(GaveUp("a", SameErrorAgain(failure))) is is_worth_requeue


def test_exception_that_the_script_has_caught_before_it_exits_with_1_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Hydra prints it and exits. An exit with another code is the script's own decision."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    path = tmp_path / "events.jsonl"
    events = worker_exit.open_event_log(path, "a", 0)
    worker_exit.install_hook(events)
    for code in (0, 2, 1, 1):
        try:
            try:
                raise KeyError(f"code {code}")
            except KeyError:
                sys.exit(code)
        except SystemExit as end:
            monkeypatch.setattr(sys, "last_value", end, raising=False)
        worker_exit.report_caught_error()
        worker_exit.report_caught_error()
    events.close()
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [each["message"] for each in found] == ["'code 1'", "'code 1'"]
    assert {each["event"] for each in found} == {"failure"}


def test_next_generation_takes_sigterm_from_one_that_failed_at_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The failed generation restores no handler; a drain must reach the one that trains."""
    monkeypatch.setenv(constants.ENV_AGENT_PID, str(os.getpid()))
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        worker_exit.DrainRequest()
        current = worker_exit.DrainRequest()
        signal.raise_signal(signal.SIGTERM)
        assert current.requested
    finally:
        worker_exit.DrainRequest.current = None
        signal.signal(signal.SIGTERM, before)


def test_startup_hook_of_a_standby_reads_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A standby that reads RANK ends with a sentence about it, in place of the error of `er.resume()`."""

    def end(code: int) -> None:
        raise AssertionError(f"the standby ended with {code}")

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.delenv("RANK", raising=False)
    variables: Any = os.environ
    of_standby = forkserver._EarlyVariables(variables._data)
    monkeypatch.setattr(variables, "_data", of_standby)
    monkeypatch.setenv(constants.ENV_EARLY_START, "1")
    worker_exit.install_startup_hook()
