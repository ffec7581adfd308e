"""The text and the event of the exception that ends a worker: one real process for each."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic_resume import constants, events
from elastic_resume.agent.failure_evidence import FailureEvents
from elastic_resume.events import MAX_LINE_BYTES

pytestmark = pytest.mark.cluster

SCRIPT = """
import sys
from elastic_resume.training import worker_exit
worker_exit.install_startup_hook()
worker_exit.install_startup_hook()  # the fork server and er.resume both install it
{body}
"""


def crash(tmp_path: Path, body: str, **environ: str) -> tuple[str, list[dict[str, Any]]]:
    """Run a script to its end; return its output and its events."""
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
    printed, (event,) = crash(tmp_path, "raise ValueError('boom')")
    assert printed.startswith("Traceback (most recent call last)")
    assert printed.endswith("ValueError: boom\n")
    assert (event["event"], event["rank"]) == ("failure", 3)
    assert (event["type"], event["message"]) == ("ValueError", "boom")
    assert event["traceback"] == printed


def test_crash_through_two_hooks_emits_one_event(tmp_path: Path) -> None:
    """Torch wraps the startup hook, and er.resume wraps torch's hook."""
    body = (
        "inner = sys.excepthook; sys.excepthook = lambda *error: inner(*error)\n"
        "worker_exit.install_startup_hook(); raise ValueError('boom')"
    )
    printed, (event,) = crash(tmp_path, body)
    assert event["message"] == "boom"
    assert printed.count("ValueError: boom") == 1


FORKED = """
import os
child = os.fork()
if child == 0:
    raise worker_exit.UsageError("of a helper process")
print("child status", os.waitpid(child, 0)[1], file=sys.stderr)
"""


def test_crash_of_a_forked_child_is_not_the_ranks(tmp_path: Path) -> None:
    """The child's traceback is printed, also where the agent would print the rank's."""
    with (
        open(tmp_path / "log", "a") as output,
        subprocess.Popen(["sleep", "60"], stderr=output) as agent,
    ):
        environ = {constants.ENV_AGENT_PID: str(agent.pid), constants.ENV_GENERATION: "1"}
        printed, found = crash(tmp_path, FORKED, **environ)
        agent.kill()
    assert printed.startswith("Traceback")
    assert printed.splitlines()[-2:] == [
        "elastic_resume.errors.UsageError: of a helper process",
        "child status 256",
    ]
    assert found == []


BOOM = "raise ValueError('boom')"
BEHIND_TORCHS_HOOK = (
    "inner = sys.excepthook; sys.excepthook = lambda *error: inner(*error)\n"
    "worker_exit.install_startup_hook(); raise worker_exit.UsageError({!r})"
)


@pytest.mark.parametrize(
    ("agent_log", "events_path", "body", "printed_start"),
    [
        ("log", "events.jsonl", BOOM, ""),
        ("another log", "events.jsonl", BOOM, "Traceback"),
        ("log", "no such directory/events.jsonl", BOOM, "Traceback"),  # the event was not written
        ("log", "events.jsonl", BEHIND_TORCHS_HOOK.format("boom"), ""),
        (
            "log",
            "events.jsonl",
            BEHIND_TORCHS_HOOK.format("long" * 200 + "boom"),
            "elastic_resume: error: long",
        ),
    ],
)
def test_crash_prints_nothing_if_agent_prints_it(
    tmp_path: Path, agent_log: str, events_path: str, body: str, printed_start: str
) -> None:
    """The agent shares standard error and can read the whole event. Otherwise the full text is printed."""
    with (
        open(tmp_path / agent_log, "a") as output,
        subprocess.Popen(["sleep", "60"], stderr=output) as agent,
    ):
        environ = {constants.ENV_AGENT_PID: str(agent.pid), constants.ENV_GENERATION: "1"}
        environ[constants.ENV_EVENTS_PATH] = str(tmp_path / events_path)
        printed, _ = crash(tmp_path, body, **environ)
        agent.kill()
    if printed_start:
        assert printed.startswith(printed_start)
        assert printed.endswith("boom\n")
    else:
        assert printed == ""


def test_crash_event_reaches_agents_memory_if_disk_is_full(tmp_path: Path) -> None:
    """It has everything that decides about a restart."""
    with contextlib.closing(FailureEvents()) as memory:
        environ = {constants.ENV_EVENTS_PATH: "/dev/full", constants.ENV_EVIDENCE: memory.path}
        crash(tmp_path, "raise ValueError('boom')", **environ)
        (event,) = memory.read()
    assert (event["event"], event["rank"], event["message"]) == ("failure", 3, "boom")
    assert event["traceback"].endswith("ValueError: boom\n")


def test_long_traceback_keeps_its_ends_and_fits_a_line(tmp_path: Path) -> None:
    """The error text has a megabyte, in characters that JSON writes as six bytes."""
    _, (event,) = crash(tmp_path, "raise ValueError('first\\n' + '\\u4f60' * 1_000_000 + 'last')")
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
    _, (event,) = crash(tmp_path, body)
    assert frame in event["frame"]


def test_interrupt_is_no_failure(tmp_path: Path) -> None:
    """A person asked for it."""
    printed, found = crash(tmp_path, "raise KeyboardInterrupt")
    assert found == []
    assert "KeyboardInterrupt" in printed


DAMAGED = """
import pathlib, py_compile
module = pathlib.Path(__file__).with_name("damaged.py")
module.write_text("x = 'a text that is long enough to be cut'")
compiled = pathlib.Path(py_compile.compile(str(module)))
compiled.write_bytes(compiled.read_bytes()[:{bytes}])
import damaged
"""


@pytest.mark.parametrize("size", [16, 17, 40])
def test_import_of_damaged_bytecode_names_the_file(tmp_path: Path, size: int) -> None:
    """Python itself says "marshal data too short", at every start until the file is removed."""
    printed, (event,) = crash(tmp_path, DAMAGED.format(bytes=size))
    (compiled,) = (tmp_path / "__pycache__").glob("damaged.*.pyc")
    for text in (printed.splitlines()[-1], event["message"]):
        assert f"the compiled Python file {compiled} is damaged" in text
        assert "Free space on its disk and remove the file" in text
    compiled.unlink()
    subprocess.run([sys.executable, "-c", "import damaged"], cwd=tmp_path, check=True)
