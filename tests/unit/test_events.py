"""The event log loses nothing but the line that a crash tore."""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path

import pytest

from elastic_resume import events
from elastic_resume.events import MAX_LINE_BYTES, EventLog

TORN = b'{"t":1.0,"event":"step","ran'


def kinds(path: Path) -> list[str]:
    """What `read` finds."""
    return [event["event"] for event in events.read(path)]


def test_a_torn_last_line_does_not_swallow_the_next_event(tmp_path: Path) -> None:
    """Whoever opens the log next begins a new line, so every other reader of lines gets it too."""
    path = tmp_path / "events.jsonl"
    EventLog(path).emit("first")
    with open(path, "ab") as file:
        file.write(TORN)
    log = EventLog(path)
    log.emit("second")
    log.emit("third")
    assert kinds(path) == ["first", "second", "third"]
    assert json.loads(path.read_bytes().splitlines()[-2])["event"] == "second"


def test_event_is_not_written_into_a_file_that_is_not_an_agents(tmp_path: Path) -> None:
    """The agent has ended, and the descriptor in /proc is that of a process that got its pid."""
    path = tmp_path / "events.jsonl"
    with open(tmp_path / "strangers", "w") as file:
        EventLog(path, memory_path=f"/proc/{os.getpid()}/fd/{file.fileno()}").emit("worker-exit")
    assert (tmp_path / "strangers").read_text() == ""
    assert kinds(path) == ["worker-exit"]


@pytest.mark.parametrize("torn", [TORN, TORN * 3, b"\0" * 500, b"{", b'{"t":', TORN * 9000])
def test_an_event_glued_to_a_torn_one_is_found(tmp_path: Path, torn: bytes) -> None:
    """A writer that had the log open, or does not look, appends to the torn line itself."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(
        torn + b'{"t":2.0,"event":"worker-exit","message":"said {\\"t\\":1}"}\n{"t":3,"event":"b"}\n'
    )
    assert kinds(path) == ["worker-exit", "b"]


@pytest.mark.parametrize("t", ["1" + "0" * 400, "1e300", "true", "NaN", '"1"'])
def test_a_line_without_a_time_is_no_event(t: str) -> None:
    """Nobody who reckons with it has to look again."""
    assert events.parse_line(f'{{"event":"x","t":{t}}}') is None


def test_after_a_short_write_the_next_event_gets_a_line_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk takes a part of a line and no error is raised; that event is written again."""
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


def test_an_event_tells_of_a_clock_that_does_not_jump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour forth or back of the wall clock makes no event older; one of another boot has only that."""
    event = EventLog(tmp_path / "events.jsonl").emit("step")
    wall = time.time()
    for ahead_s in (3600.0, -3600.0):
        monkeypatch.setattr(time, "time", lambda ahead_s=ahead_s: wall + ahead_s)
        assert 0 <= events.age_s(event) < 1800
    monkeypatch.setattr(time, "time", lambda: wall + 3600)
    assert events.age_s({**event, "boot": "another"}) > 1800


def test_a_new_log_begins_without_an_empty_line(tmp_path: Path) -> None:
    """Nothing is torn there, nor after a close and a second start."""
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
def test_what_is_no_event_is_left_out(tmp_path: Path, line: bytes) -> None:
    """A line of rubbish costs itself only."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(line + b'\n{"t":1,"event":"kept"}\n' + b'{"t":2,"event":"unfinished"}')
    assert kinds(path) == ["kept"]
    assert len(line) < 2 * MAX_LINE_BYTES


def test_a_line_of_which_the_end_alone_was_refused_is_there_once(tmp_path: Path) -> None:
    """The next one ends it; written again, it would have happened twice."""
    path = tmp_path / "events.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    log = EventLog(path, node="a")
    log.emit("first")
    size = path.stat().st_size
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * size - 1, limits[1]))
        log.emit("other")  # as long as the first
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.stat().st_size == 2 * size - 1
    log.emit("third")
    log.close()
    assert kinds(path) == ["first", "other", "third"]
