"""What a worker prints and writes of the exception that ends it: real processes, each dying of one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic_resume import constants, events
from elastic_resume.agent.round_events import RoundEvents
from elastic_resume.events import MAX_LINE_BYTES

pytestmark = pytest.mark.cluster

SCRIPT = """
import sys
from elastic_resume.training import worker_exit
worker_exit.install_startup_hook()
worker_exit.install_startup_hook()  # as er.resume does after the start did
{body}
"""


def die(tmp_path: Path, body: str, **environ: str) -> tuple[str, list[dict[str, Any]]]:
    """Run a script to its end: what it printed and its events."""
    script, log, path = tmp_path / "train.py", tmp_path / "log", tmp_path / "events.jsonl"
    script.write_text(SCRIPT.format(body=body))
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ELASTIC_RESUME_")}
    with open(log, "w") as output:
        subprocess.run(
            [sys.executable, str(script)],
            stderr=output,
            env={**clean, "RANK": "3", constants.ENV_EVENTS_PATH: str(path), **environ},
            timeout=60,
            check=False,
        )
    return log.read_text(), list(events.read(path))


def test_crash_without_agent_prints_traceback_and_one_event(tmp_path: Path) -> None:
    """The event has the same traceback."""
    printed, (event,) = die(tmp_path, "raise ValueError('boom')")
    assert printed.startswith("Traceback (most recent call last)")
    assert printed.endswith("ValueError: boom\n")
    assert (event["event"], event["rank"], event["type"], event["message"]) == (
        "failure",
        3,
        "ValueError",
        "boom",
    )
    assert event["traceback"] == printed


def test_crash_through_two_hooks_emits_one_event(tmp_path: Path) -> None:
    """Torch wraps the startup hook, and er.resume wraps torch's hook."""
    body = (
        "inner = sys.excepthook; sys.excepthook = lambda *error: inner(*error)\n"
        "worker_exit.install_startup_hook(); raise ValueError('boom')"
    )
    printed, (event,) = die(tmp_path, body)
    assert event["message"] == "boom"
    assert printed.count("ValueError: boom") == 1


def agent_of(log: Path) -> subprocess.Popen[bytes]:
    """A process that prints to that file, for an agent."""
    with open(log, "a") as output:
        return subprocess.Popen(["sleep", "60"], stderr=output)


@pytest.mark.parametrize("shared", [True, False])
def test_crash_prints_one_line_if_agent_shares_stderr(tmp_path: Path, shared: bool) -> None:
    """Otherwise the full traceback is printed."""
    agent = agent_of(tmp_path / ("log" if shared else "other"))
    with agent:
        environ = {constants.ENV_AGENT_PID: str(agent.pid), constants.ENV_ROUND: "1"}
        printed, (event,) = die(tmp_path, "raise ValueError('boom')", **environ)
        agent.kill()
    assert "Traceback" in event["traceback"]
    if shared:
        (line,) = printed.splitlines()
        assert line.startswith("elastic_resume: rank 3: ValueError: boom (")
    else:
        assert printed == event["traceback"]


def test_nothing_is_hidden_that_could_not_be_written(tmp_path: Path) -> None:
    """The disk refuses the event, so the traceback is printed."""
    agent = agent_of(tmp_path / "log")
    with agent:
        environ = {constants.ENV_AGENT_PID: str(agent.pid), constants.ENV_ROUND: "1"}
        environ[constants.ENV_EVENTS_PATH] = str(tmp_path / "no such directory" / "events.jsonl")
        printed, _ = die(tmp_path, "raise ValueError('boom')", **environ)
        agent.kill()
    assert printed.endswith("ValueError: boom\n")


def test_an_exception_is_in_the_agents_memory_though_the_disk_is_full(tmp_path: Path) -> None:
    """With all that decides what follows."""
    with contextlib.closing(RoundEvents()) as told:
        die(
            tmp_path,
            "raise ValueError('boom')",
            **{constants.ENV_EVENTS_PATH: "/dev/full", constants.ENV_ROUND_EVENTS: told.path},
        )
        (event,) = told.read()
    assert (event["event"], event["rank"], event["message"]) == ("failure", 3, "boom")
    assert event["traceback"].endswith("ValueError: boom\n")


def test_a_long_traceback_keeps_its_ends_and_fits_a_line(tmp_path: Path) -> None:
    """Of an error text of a megabyte, in characters that JSON writes as six bytes."""
    _, (event,) = die(tmp_path, "raise ValueError('first\\n' + '\\u4f60' * 1_000_000 + 'last')")
    assert event["message"] == "first"
    assert event["traceback"].startswith("Traceback")
    assert event["traceback"].endswith("last\n")
    assert (tmp_path / "events.jsonl").stat().st_size < MAX_LINE_BYTES


@pytest.mark.parametrize(
    ("body", "frame"),
    [
        ("import nothing_of_that_name", "train.py:6 in <module>"),
        ("compile('def f(:', 'model.py', 'exec')", "model.py:1"),
        ("import json; json.loads('{')", "json/decoder.py"),
        (
            "from elastic_resume.policy import failure_classification as failures; failures.judge(7)",
            "train.py:6 in <module>",
        ),
    ],
)
def test_crash_event_names_frame_of_user_code(tmp_path: Path, body: str, frame: str) -> None:
    """Frames of libraries are skipped."""
    _, (event,) = die(tmp_path, body)
    assert frame in event["frame"]


def test_an_interrupt_is_no_failure(tmp_path: Path) -> None:
    """Somebody wanted it."""
    printed, told = die(tmp_path, "raise KeyboardInterrupt")
    assert told == []
    assert "KeyboardInterrupt" in printed
