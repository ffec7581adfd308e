"""Test the handler of elastic_resume's log lines."""

from __future__ import annotations

import logging
import logging.config
import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastic_resume import console
from elastic_resume.errors import ConfigError
from tests.support.processes import wait_for

LOGGER = logging.getLogger("elastic_resume.training.run")


@pytest.fixture(autouse=True)
def no_handlers() -> None:
    """Begin as in a new process; tests/conftest.py restores the logger."""
    console.PACKAGE_LOGGER.handlers.clear()
    console.PACKAGE_LOGGER.setLevel(logging.NOTSET)


def test_log_is_printed_once_with_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    """A second call, by a second run, adds no second handler."""
    console.show_log({})
    console.show_log({})
    LOGGER.info("resumed at step %d", 3)
    assert capsys.readouterr().err == "elastic_resume: resumed at step 3\n"


def test_script_that_configured_logging_after_the_import_sees_the_log(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By default dictConfig disables every logger that exists."""
    logging.config.dictConfig({"version": 1})
    assert LOGGER.disabled
    console.show_log({})
    LOGGER.warning("step 5 was not saved")
    assert "step 5 was not saved" in capsys.readouterr().err


@pytest.mark.parametrize("keeps_loggers", [True, False])
def test_log_after_later_configuration(keeps_loggers: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/guides/monitoring.md says how a script that configures logging after er.resume() sees the log."""
    console.show_log({})
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": not keeps_loggers})
    LOGGER.warning("step 5 was not saved")
    assert ("step 5 was not saved" in capsys.readouterr().err) == keeps_loggers


def test_handler_of_the_script_takes_precedence(capsys: pytest.CaptureFixture[str]) -> None:
    """A level that the script has set stays, too."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    console.PACKAGE_LOGGER.addHandler(handler)
    console.PACKAGE_LOGGER.setLevel(logging.WARNING)
    console.show_log({})
    LOGGER.info("resumed")
    LOGGER.warning("a snapshot failed")
    assert lines == ["a snapshot failed"]
    assert capsys.readouterr().err == ""


def test_own_handler_gets_lines_of_default_level(capsys: pytest.CaptureFixture[str]) -> None:
    """A handler alone does not raise the level to the root logger's WARNING."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    console.PACKAGE_LOGGER.addHandler(handler)
    console.show_log({})
    LOGGER.info("resumed")
    LOGGER.debug("details")
    assert lines == ["resumed"]
    assert capsys.readouterr().err == ""


def test_traceback_of_logged_exception_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """The cause of a failure is in it."""
    console.show_log({})
    try:
        raise ValueError("boom")
    except ValueError:
        LOGGER.exception("a snapshot failed")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["elastic_resume: a snapshot failed", "Traceback (most recent call last):"]
    assert lines[-1] == "ValueError: boom"


def test_line_begins_on_an_empty_line_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar ends without a newline."""
    console.show_log({})
    path = tmp_path / "log"
    with path.open("a") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        LOGGER.info("resumed")
        stream.write("\r 50%|##")
        LOGGER.info("killed")
        LOGGER.info("restarting")
        monkeypatch.undo()
    lines = ["resumed", "killed", "restarting"]
    first, *rest = [f"elastic_resume: {line}\n" for line in lines]
    assert path.read_bytes().decode() == f"{first}\r 50%|##\n{''.join(rest)}"


def test_line_begins_on_an_empty_line_of_a_pipe_with_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bars of tqdm are known in the process that draws them."""
    console.show_log({})
    bars = {object()}
    monkeypatch.setitem(
        sys.modules, "tqdm", cast("Any", SimpleNamespace(tqdm=SimpleNamespace(_instances=bars)))
    )
    LOGGER.info("resumed")
    bars.clear()
    LOGGER.info("ended")
    assert capsys.readouterr().err == "\nelastic_resume: resumed\nelastic_resume: ended\n"


@pytest.mark.parametrize(("kind", "start"), [("xterm", b"\r\x1b[K"), ("dumb", b"")])
def test_line_erases_a_bar_on_a_terminal(kind: str, start: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar is drawn again below it."""
    monkeypatch.setenv("TERM", kind)
    console.show_log({})
    reader, writer = os.openpty()
    with open(writer, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        LOGGER.info("resumed")
        monkeypatch.undo()
        printed = b""
        while not printed.endswith(b"\n"):  # the kernel hands a line over in parts
            printed += os.read(reader, 100)
        assert printed == start + b"elastic_resume: resumed\r\n"
    os.close(reader)


def test_closed_stream_costs_the_line_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler uses no lock either, as a signal handler may interrupt it."""
    console.show_log({})
    stream = open("/dev/full", "w")  # noqa: SIM115 - closed below
    monkeypatch.setattr(sys, "stderr", stream)
    LOGGER.info("resumed")
    assert console.PACKAGE_LOGGER.handlers[0].lock is None
    monkeypatch.undo()
    with pytest.raises(OSError, match="No space"):
        stream.close()


@pytest.mark.parametrize(
    ("environ", "level"),
    [
        ({}, logging.INFO),
        ({"ELASTIC_RESUME_QUIET": "1"}, logging.WARNING),
        ({"ELASTIC_RESUME_QUIET": "true", "ELASTIC_RESUME_LOG_LEVEL": "DEBUG"}, logging.WARNING),
        ({"ELASTIC_RESUME_QUIET": "0", "ELASTIC_RESUME_LOG_LEVEL": "debug"}, logging.DEBUG),
        ({"ELASTIC_RESUME_LOG_LEVEL": "ERROR"}, logging.ERROR),
    ],
)
def test_level_comes_from_environment(environ: dict[str, str], level: int) -> None:
    """Quiet takes precedence over a level."""
    console.show_log(environ)
    assert console.PACKAGE_LOGGER.level == level


@pytest.mark.parametrize("variable", ["ELASTIC_RESUME_QUIET", "ELASTIC_RESUME_LOG_LEVEL"])
def test_wrong_level_is_refused(variable: str) -> None:
    """The error has the variable's name."""
    with pytest.raises(ConfigError, match=rf"{variable} is 'LOUD'|{variable} is 'loud'"):
        console.read_level({variable: "loud"})


def show_progress(monkeypatch: pytest.MonkeyPatch, delay_s: float) -> console.ByteProgress:
    """Make an operation count as long after ``delay_s``."""
    monkeypatch.setattr(console, "LONG_OPERATION_S", delay_s)
    console.show_log({})
    return console.ByteProgress("reading", 2_000_000)


def test_long_operation_logs_its_begin_and_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a log file it is two lines, with size and speed."""
    printed = ""

    def has_printed() -> bool:
        nonlocal printed
        printed += capsys.readouterr().err
        return bool(printed)

    with show_progress(monkeypatch, 0.0) as progress:
        for _ in progress.track([memoryview(bytes(1_000_000))] * 2):
            wait_for(has_printed, "a line")
    printed += capsys.readouterr().err
    begun, ended = printed.splitlines()
    assert re.fullmatch(r"elastic_resume: reading: 0 B of 2 MB in 0\.\d s \(0 B/s\)", begun)
    assert re.fullmatch(r"elastic_resume: reading: ended, 2 MB of 2 MB in \d+\.\d s \(.*B/s\)", ended)


def test_short_operation_shows_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Most operations are short."""
    with show_progress(monkeypatch, 600.0) as progress:
        list(progress.track([memoryview(bytes(10))]))
    assert capsys.readouterr().err == ""


def test_time_left_follows_from_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is unknown before the first byte and at the end."""
    monkeypatch.setattr(time, "monotonic", iter([0.0, 10.0, 10.0, 10.0]).__next__)
    done = 0
    progress = console.ByteProgress("x", 4_000_000, lambda: done)
    assert progress._describe() == "0 B of 4 MB in 10.0 s (0 B/s)"
    done = 1_000_000
    assert progress._describe() == "1 MB of 4 MB in 10.0 s (100 kB/s, 30 s left)"
    done = 4_000_000
    assert progress._describe() == "4 MB of 4 MB in 10.0 s (400 kB/s)"
