"""The event log loses nothing but the line that a crash tore."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic_resume import events
from elastic_resume.events import MAX_LINE_BYTES, EventLog

TORN = b'{"t":1.0,"event":"step","ran'


def kinds(path: Path) -> list[str]:
    """What `read` finds."""
    return [event["event"] for event in events.read(path)]


def test_event_log_begins_new_line_after_torn_line(tmp_path: Path) -> None:
    """The next process to open the log does so, for the sake of all line readers."""
    path = tmp_path / "events.jsonl"
    EventLog(path).emit("first")
    with open(path, "ab") as file:
        file.write(TORN)
    log = EventLog(path)
    log.emit("second")
    log.emit("third")
    assert kinds(path) == ["first", "second", "third"]
    assert json.loads(path.read_bytes().splitlines()[-2])["event"] == "second"


def test_emit_skips_memory_path_of_foreign_process(tmp_path: Path) -> None:
    """The agent has ended, and another process has its pid."""
    path = tmp_path / "events.jsonl"
    with open(tmp_path / "strangers", "w") as file:
        EventLog(path, memory_path=f"/proc/{os.getpid()}/fd/{file.fileno()}").emit("worker-exit")
    assert (tmp_path / "strangers").read_text() == ""
    assert kinds(path) == ["worker-exit"]


@pytest.mark.parametrize("torn", [TORN, TORN * 3, b"\0" * 500, b"{", b'{"t":', TORN * 9000])
def test_read_finds_event_behind_torn_line(tmp_path: Path, torn: bytes) -> None:
    """A process that had the log open appends to the torn line."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(
        torn + b'{"t":2.0,"event":"worker-exit","message":"said {\\"t\\":1}"}\n{"t":3,"event":"b"}\n'
    )
    assert kinds(path) == ["worker-exit", "b"]


@pytest.mark.parametrize("t", ["1" + "0" * 400, "1e300", "true", "NaN", '"1"'])
def test_parse_line_refuses_line_without_time(t: str) -> None:
    """Callers rely on a time."""
    assert events.parse_line(f'{{"event":"x","t":{t}}}') is None


def test_emit_after_short_write_repeats_event_on_new_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk accepts a part of a line without an error."""
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.emit("first")
    whole = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda descriptor, line: whole(descriptor, line[:9]))
        log.emit("cut")
        assert log.unwritten_count == 1
    log.emit("second")
    assert kinds(path) == ["first", "cut", "second"]
    assert path.read_bytes().count(b"\n") == 4
    assert log.unwritten_count == 0


def test_age_follows_boot_clock_within_one_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A jump of the wall clock changes no age; across boots only the wall clock is left."""
    event = EventLog(tmp_path / "events.jsonl").emit("step")
    wall = time.time()
    for ahead_s in (3600.0, -3600.0):
        monkeypatch.setattr(time, "time", lambda ahead_s=ahead_s: wall + ahead_s)
        assert 0 <= events.age_s(event) < 1800
    monkeypatch.setattr(time, "time", lambda: wall + 3600)
    assert events.age_s({**event, "boot": "another"}) > 1800


def test_event_log_starts_without_empty_line(tmp_path: Path) -> None:
    """Neither a new file nor a reopened one has a torn line."""
    path = tmp_path / "events.jsonl"
    for _ in range(2):
        log = EventLog(path)
        log.emit("one")
        log.close()
        log.emit("two")
    assert b"\n\n" not in path.read_bytes()
    assert kinds(path) == ["one", "two"] * 2


@pytest.mark.parametrize(
    "line",
    [b"\xff" * 50, b"[1]", b'{"t":1}', b'{"t":"x","event":"a"}', b"", b"{" * 70000, b'{"t":' * 20000],
)
def test_read_skips_lines_that_are_no_events(tmp_path: Path, line: bytes) -> None:
    """The lines around them are read."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(line + b'\n{"t":1,"event":"kept"}\n' + b'{"t":2,"event":"unfinished"}')
    assert kinds(path) == ["kept"]
    assert len(line) < 2 * MAX_LINE_BYTES


# In a process of its own, which writes no bytecode: a cut .pyc file would stay and break all later imports.
FILLS_DISK = """
import resource, sys, time
from pathlib import Path
from elastic_resume.events import EventLog

path = Path(sys.argv[1])
time.time, time.clock_gettime = lambda: 1.5, lambda _: 2.5  # lines of equal length
log = EventLog(path, node="a")
log.emit("first")
size = path.stat().st_size
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (2 * size - 1, limits[1]))
log.emit("other")  # as long as the first
assert path.stat().st_size == 2 * size - 1
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
log.emit("third")
log.close()
"""


def test_emit_completes_line_that_lacks_newline(tmp_path: Path) -> None:
    """The next event ends the line; a repetition would count the event twice."""
    path = tmp_path / "events.jsonl"
    subprocess.run([sys.executable, "-B", "-c", FILLS_DISK, str(path)], check=True)
    assert kinds(path) == ["first", "other", "third"]
