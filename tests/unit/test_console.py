"""Test the handler of elastic_resume's log lines."""

from __future__ import annotations

import logging
import logging.config
import sys

import pytest

from elastic_resume import console

LOGGER = logging.getLogger("elastic_resume.training.run")


@pytest.fixture(autouse=True)
def no_handlers() -> None:
    """Begin as in a new process; tests/conftest.py restores the logger."""
    console.PACKAGE_LOGGER.handlers.clear()
    console.PACKAGE_LOGGER.setLevel(logging.NOTSET)


def test_log_is_printed_once_with_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    """A second call, by a second run, adds no second handler."""
    console.show_log("elastic_resume: ")
    console.show_log("elastic_resume: ")
    LOGGER.info("resumed at step %d", 3)
    assert capsys.readouterr().err == "elastic_resume: resumed at step 3\n"


def test_script_that_configured_logging_after_the_import_sees_the_log(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By default dictConfig disables every logger that exists."""
    logging.config.dictConfig({"version": 1})
    assert LOGGER.disabled
    console.show_log("elastic_resume: ")
    LOGGER.warning("step 5 was not saved")
    assert "step 5 was not saved" in capsys.readouterr().err


def test_handler_of_the_script_takes_precedence(capsys: pytest.CaptureFixture[str]) -> None:
    """A level that the script has set stays, too."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    console.PACKAGE_LOGGER.addHandler(handler)
    console.PACKAGE_LOGGER.setLevel(logging.WARNING)
    console.show_log("elastic_resume: ")
    LOGGER.info("resumed")
    LOGGER.warning("a snapshot failed")
    assert lines == ["a snapshot failed"]
    assert capsys.readouterr().err == ""


def test_traceback_of_logged_exception_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """The cause of a failure is in it."""
    console.show_log("elastic_resume: ")
    try:
        raise ValueError("boom")
    except ValueError:
        LOGGER.exception("a snapshot failed")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["elastic_resume: a snapshot failed", "Traceback (most recent call last):"]
    assert lines[-1] == "ValueError: boom"


def test_closed_stream_costs_the_line_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler uses no lock either, as a signal handler may interrupt it."""
    console.show_log("elastic_resume: ")
    stream = open("/dev/full", "w")  # noqa: SIM115 - closed below
    monkeypatch.setattr(sys, "stderr", stream)
    LOGGER.info("resumed")
    assert console.PACKAGE_LOGGER.handlers[0].lock is None
    monkeypatch.undo()
    with pytest.raises(OSError, match="No space"):
        stream.close()
