"""Test the threads that write to trackers: each alone, and what people read of one that fails."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastic_resume.errors import ConfigError, MachineError
from elastic_resume.mechanisms.curves import description, journal, writer
from elastic_resume.mechanisms.curves.exporter import Exporter, Point
from elastic_resume.mechanisms.curves.journal import Moment
from elastic_resume.mechanisms.curves.writer import CurveWriter, Tracker, parse_trackers
from elastic_resume.policy.reasons import JobFinished
from tests.support.agent_parts import make_agent_context
from tests.support.processes import wait_for


class Memory(Exporter):
    """A tracker in memory; `act` is called before each of its methods."""

    def __init__(self, act: Callable[[str], object] = lambda _: None) -> None:
        self.act, self.steps = act, list[int]()
        self.went_back_to = list[int | None]()

    def open(self, last_written: int, go_back_to: int | None = None) -> int:
        """Open."""
        del last_written
        self.went_back_to.append(go_back_to)
        self.act("open")
        return self.steps[-1] if self.steps else -1

    def write(self, points: Sequence[Point]) -> None:
        """Write."""
        self.act("write")
        self.steps += [point.step for point in points]

    def has(self, step: int) -> bool:
        """Return whether a step was written."""
        return step in self.steps

    def flush(self) -> int:
        """Flush."""
        return self.steps[-1] if self.steps else -1

    def close(self) -> None:
        """Close."""


def _give(tracker: Memory, _: str) -> Exporter:
    return tracker


class Job:
    """A job on one node that has logged some steps, and its part of the agent."""

    def __init__(self, node_dir: Path, *trackers: Memory, steps: int = 5) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        node_dir.mkdir()
        named = tuple(Tracker(f"t{at}", partial(_give, tracker)) for at, tracker in enumerate(trackers))
        context = make_agent_context(
            node_dir=node_dir,
            emit=lambda kind, **fields: self.events.append((kind, fields)),
            settings={"log_metrics": named},
        )
        self.client = SimpleNamespace(
            address="127.0.0.1:29400", run_id="job", job_end=None, restart_requested=False
        )
        self.part = CurveWriter(context)
        self.part.start(cast("Any", self.client))
        path = journal.record_path(node_dir, 1)
        lines = [journal.format_line([step, 0, 1.0, {"loss": 1.0}]) for step in range(1, steps + 1)]
        path.write_bytes(journal.format_begin(Moment(0, 0), 0, goes_back=False) + b"".join(lines))
        self.part.begin_generation(cast("Any", SimpleNamespace(generation=1, rank=0)))

    def finish(self) -> None:
        """End the job in success."""
        self.client.job_end = SimpleNamespace(reason=JobFinished())
        self.part.close()

    def kinds(self) -> list[str]:
        """Return the kinds of its events."""
        return [kind for kind, _ in self.events]


def test_tracker_that_does_not_answer_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named once, and the end of the job after a signal waits for it a moment only."""
    monkeypatch.setattr(writer, "SILENT_S", 0.0)
    monkeypatch.setattr(writer, "STOP_TIMEOUT_S", 0.0)
    released, entered = threading.Event(), threading.Event()

    def block(_: str) -> None:
        entered.set()
        released.wait(60)

    answering = Memory()
    job = Job(tmp_path / "n0", Memory(block), answering)
    wait_for(lambda: len(answering.steps) >= 4, "the steps in the other tracker")
    entered.wait(60)
    for _ in range(2):
        status = job.part.update(cast("Any", None))
    assert status is not None
    assert description.STATUS.describe(status).startswith("t0 cannot be written: it has not answered for 0 s")
    assert job.kinds() == ["curves-failed"]
    assert job.events[0][1]["tracker"] == "t0"
    assert "has not answered" in job.events[0][1]["error"]
    job.part.begin_stop("SIGTERM")
    job.finish()
    assert answering.steps == [1, 2, 3, 4, 5]
    assert "t0: still being written" in caplog.text
    released.set()


def test_file_that_the_former_writer_still_holds_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It closes it within a moment. What lasts is named, and so is its end."""
    monkeypatch.setattr(writer, "RETRY_S", 0.01)
    refusals = iter([True])

    def refuse(_: str) -> None:
        if next(refusals, False):
            raise MachineError("t0 is being written by another process.")

    tracker = Memory(refuse)
    job = Job(tmp_path / "n0", tracker)
    wait_for(lambda: tracker.steps, "the first steps")
    assert job.part.update(cast("Any", None)) is None
    job.finish()
    assert (tracker.steps, job.kinds()) == ([1, 2, 3, 4, 5], [])
    monkeypatch.setattr(writer, "HANDOVER_S", 0.0)
    refusals = iter([True, True])
    job = Job(tmp_path / "n1", tracker := Memory(refuse))
    wait_for(lambda: tracker.steps, "the first steps")
    wait_for(lambda: job.part.update(cast("Any", None)) is None, "no failing tracker in the status")
    job.finish()
    assert job.kinds() == ["curves-failed", "curves-recovered"]


def test_tracker_that_refuses_for_good_is_named_at_once_and_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The last line says what it lacks, and how to get it there."""

    def refuse(_: str) -> None:
        raise ConfigError("t0 is a file of another job.")

    caplog.set_level(logging.WARNING)
    job = Job(tmp_path / "n0", Memory(refuse))
    wait_for(job.kinds, "the event")
    job.finish()
    first, last = caplog.messages
    assert first.startswith("t0 is not written, and is tried again: t0 is a file of another job. The values")
    assert "t0 lacks the values of 5 steps after step 0: t0 is a file of another job. They wait in" in last
    assert "the same command writes them" in last


def test_restart_before_the_first_snapshot_keeps_what_is_written(tmp_path: Path) -> None:
    """Only what the tracker had before any writer of this job is another job's, and goes."""
    tracker = Memory()
    job = Job(tmp_path / "n0", tracker)
    wait_for(lambda: tracker.steps, "the first steps")
    wait_for(journal.written_path(tmp_path / "n0", 1).exists, "the record of what is written")
    path = journal.record_path(tmp_path / "n0", 2)
    lines = [journal.format_line([step, 0, 2.0, {"loss": 1.0}]) for step in range(1, 8)]
    path.write_bytes(journal.format_begin(Moment(0, 0), 0, goes_back=False) + b"".join(lines))
    job.part.begin_generation(cast("Any", SimpleNamespace(generation=2, rank=0)))
    wait_for(lambda: 6 in tracker.steps, "a step of the second generation")
    job.finish()
    assert tracker.steps == [1, 2, 3, 4, 5, 6, 7]
    assert tracker.went_back_to == [-1]


def test_values_whose_nodes_are_gone_are_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No node knows where the job of the third generation came from, and the wait for one is over."""
    monkeypatch.setattr(writer, "GATHER_TIMEOUT_S", 0.0)
    tracker = Memory()
    job = Job(tmp_path / "n0", tracker)
    wait_for(lambda: 4 in tracker.steps, "the first steps")
    for generation, begin in ((3, Moment(40, 1)), (4, Moment(41, 1))):
        steps = range(begin.step + 1, generation + 42)
        lines = [journal.format_line([step, 1, 2.0, {"loss": 1.0}]) for step in steps]
        head = journal.format_begin(begin, generation - 1, goes_back=False)
        journal.record_path(tmp_path / "n0", generation).write_bytes(head + b"".join(lines))
        job.part.begin_generation(cast("Any", SimpleNamespace(generation=generation, rank=0)))
        wait_for(partial(tracker.has, generation + 40), f"values of generation {generation}")
        assert job.events == [("curves-lost", {"first": 1, "last": 40, "of_generation": 2})]
    job.finish()
    assert tracker.steps == [1, 2, 3, 4, *range(41, 46)]
    assert "no living node has the values of steps 1 to 40" in caplog.text


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("csv:a.csv,csv:a.csv", "has csv:a.csv twice"),
        (",".join(f"csv:{at}.csv" for at in range(9)), "has 9 trackers; 8 is the most"),
    ],
)
def test_wrong_lists_of_trackers_are_refused(value: str, error: str) -> None:
    """Each text says one thing."""
    with pytest.raises(ConfigError, match=error):
        parse_trackers("--log-metrics", value)
