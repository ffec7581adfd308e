"""The restart policy, by table: a history of rounds in, a decision out."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_resume.policy.restart import (
    Failure,
    Limits,
    Round,
    decide,
    describe,
    first_failure,
    rounds_without_progress,
    summarize,
)

KILLED = Failure(rank=1, exit_code=None, signal="SIGKILL", message="", frame="", at_fault=False)
OWN_FAULT = Failure(rank=0, exit_code=1, signal=None, message="ImportError: no", frame="", at_fault=True)


def failed(start: int | None, newest: int | None, failure: Failure = KILLED) -> Round:
    """A round that started from step ``start``, reached ``newest`` and lost a worker."""
    return Round(failed=True, first_step=start, newest_step=newest, failure=failure)


def left(start: int, newest: int) -> Round:
    """A round that ended because nodes came or went."""
    return Round(failed=False, first_step=start, newest_step=newest)


NO_STEP = failed(None, None)

HISTORIES: list[tuple[str, list[Round], bool]] = [
    ("one failed start is tried again", [NO_STEP], False),
    ("two failed starts are tried again", [NO_STEP] * 2, False),
    ("the third failed start in a row ends the job", [NO_STEP] * 3, True),
    ("an error of the job's own ends it at once", [failed(0, 50, OWN_FAULT)], True),
    ("failures cost nothing while steps advance", [failed(i, i + 1) for i in range(50)], False),
    ("a step that kills every time ends the job", [failed(0, 19)] + [failed(10, 19)] * 3, True),
    ("twice at the same step is tried again", [failed(0, 19)] + [failed(10, 19)] * 2, False),
    ("progress in between starts the count anew", [NO_STEP, NO_STEP, failed(0, 1), NO_STEP, NO_STEP], False),
    ("a change of membership costs nothing", [left(5, 5)] * 50, False),
    ("a change of membership forgives nothing", [NO_STEP, NO_STEP, Round(failed=False), NO_STEP], True),
    (
        "steps seen before count again after copies were lost",
        [failed(90, 99), *(failed(i, i + 5) for i in (0, 3, 6, 9))],
        False,
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("history", "gives_up"), [row[1:] for row in HISTORIES], ids=[row[0] for row in HISTORIES]
)
def test_decision(history: list[Round], gives_up: bool) -> None:
    """Each row of the table above."""
    assert decide(history, Limits()).give_up is gives_up


def test_the_limit_can_be_set() -> None:
    """One failed start is too many when the user says so."""
    assert decide([NO_STEP], Limits(max_no_progress=1)).give_up


def test_the_reason_names_what_happened_last() -> None:
    """Whoever reads the last line learns how often, where, and which rank."""
    reason = decide([failed(0, 7), failed(7, 7), failed(7, 7), failed(7, 7)], Limits()).reason
    assert (
        reason == "3 starts in a row failed without progress, at step 7. Last: rank 1 was killed by SIGKILL."
    )


def test_no_progress_counts_only_failed_rounds_since_the_newest_step() -> None:
    """A round that reached a new step is not counted, the ones after it are."""
    assert rounds_without_progress([failed(0, 5), failed(5, 5), left(5, 5), failed(5, 5)]) == 2


def event(kind: str, t: float, **fields: Any) -> dict[str, Any]:
    """One event of node a."""
    return {"t": t, "event": kind, "node": "a", "pid": 1} | fields


def test_summary_takes_first_and_newest_step() -> None:
    """Starts, steps and commits all say how far the round came."""
    events = [
        event("worker-start", 1, step=10),
        event("step", 2, step=11),
        event("commit", 3, step=14),
        event("step", 4, step=13),
    ]
    this = summarize(events, failed=True)
    assert (this.first_step, this.newest_step, this.failure) == (10, 14, None)


def test_a_worker_that_was_told_to_stop_did_not_fail() -> None:
    """Of two that died in one round only the one that nobody stopped is named."""
    events = [
        event("worker-exit", 1, rank=0, exit_code=None, signal="SIGTERM", stopped=True),
        event("worker-exit", 2, rank=1, exit_code=7, signal=None, stopped=False),
    ]
    assert describe(first_failure(events)) == "rank 1 ended with exit code 7"


def test_an_error_of_the_jobs_own_goes_before_an_earlier_consequence() -> None:
    """A peer that saw its connection close is not the cause."""
    events = [
        event("failure", 1, rank=0, type="RuntimeError", message="closed by peer", at_fault=False),
        event("worker-exit", 2, rank=0, exit_code=1, signal=None, stopped=False),
        event("failure", 3, rank=1, type="MismatchError", message="fc.weight", frame="t.py:3", at_fault=True),
        event("worker-exit", 4, rank=1, exit_code=1, signal=None, stopped=False),
    ]
    failure = first_failure(events)
    assert describe(failure) == "rank 1 ended with exit code 1: MismatchError: fc.weight (t.py:3)"
    assert failure is not None
    assert failure.at_fault


def test_a_killed_worker_goes_before_what_its_peers_report_later() -> None:
    """The order of events decides between failures that are nobody's own fault."""
    events = [
        event("worker-exit", 1, rank=1, exit_code=None, signal="SIGKILL", stopped=False),
        event("failure", 2, rank=0, type="RuntimeError", message="closed by peer", at_fault=False),
        event("worker-exit", 3, rank=0, exit_code=1, signal=None, stopped=False),
    ]
    assert describe(first_failure(events)) == "rank 1 was killed by SIGKILL"


def test_a_worker_that_does_not_know_its_rank_yet_is_found_by_its_process() -> None:
    """A wrong argument of er.resume() is told before the world is joined; the stub knows the rank."""
    events = [
        event("failure", 1, pid=71, type="ConfigError", message="keep is 1. Write 2 or more.", at_fault=True),
        event("worker-exit", 2, rank=0, worker_pid=70, exit_code=None, signal="SIGKILL", stopped=False),
        event("worker-exit", 3, rank=1, worker_pid=71, exit_code=1, signal=None, stopped=False),
    ]
    this = summarize(events, failed=True)
    assert decide([this], Limits()).reason == (
        "rank 1 ended with exit code 1: ConfigError: keep is 1. Write 2 or more. "
        "Starting again would meet the same error."
    )


def test_a_round_that_finished_has_no_failure() -> None:
    """Exit code 0 is not a failure."""
    assert first_failure([event("worker-exit", 1, rank=0, exit_code=0, signal=None, stopped=False)]) is None
