"""The background thread of the agent: repetition, errors and end."""

from __future__ import annotations

import logging
import threading

import pytest

from elastic_resume.background import BackgroundThread
from tests.support.processes import wait_for


def test_thread_calls_work_until_closed() -> None:
    """`close` waits for the thread."""
    calls: list[int] = []

    def work() -> float:
        calls.append(threading.get_ident())
        return 0.001

    thread = BackgroundThread("test", work)
    thread.start()
    wait_for(lambda: len(calls) >= 3, "three calls")
    thread.close()
    assert thread.is_closing
    assert not set(calls) & {other.ident for other in threading.enumerate()}


def test_thread_ends_when_work_returns_none() -> None:
    """`close` may be called afterwards."""
    before = threading.active_count()
    thread = BackgroundThread("test", lambda: None)
    thread.start()
    wait_for(lambda: threading.active_count() == before, "the end of the thread")
    thread.close()


def test_thread_runs_again_after_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """The error is logged with the name of the thread, or passed to ``on_error``."""
    errors: list[Exception] = []
    results = [True, False]

    def work() -> None:
        if results.pop():
            return
        raise ValueError("defect")

    for on_error in (None, errors.append):
        results[:] = [True, False]
        thread = BackgroundThread("memory-pressure", work, retry_s=0.0, on_error=on_error)
        with caplog.at_level(logging.ERROR):
            thread.start()
            wait_for(lambda: not results, "a second call")
            thread.close()
    assert [str(error) for error in errors] == ["defect"]
    (record,) = caplog.records
    assert "thread memory-pressure failed" in record.getMessage()


def test_unstarted_thread_can_be_closed() -> None:
    """Nothing is waited for."""
    BackgroundThread("test", lambda: None).close()
