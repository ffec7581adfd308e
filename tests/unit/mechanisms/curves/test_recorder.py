"""Test what rank 0's worker writes down: a line per step, and one for what comes after its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic_resume.checkpoint.manifest import Position
from elastic_resume.errors import UsageError
from elastic_resume.mechanisms.curves import journal, recorder
from elastic_resume.mechanisms.curves.journal import Moment
from tests.support.agent_parts import make_worker_context

NOTES = (("n0", [["127.0.0.1", 1, "key"], [], [0, 0]]),)


def test_values_of_the_last_step_are_written_at_once(tmp_path: Path) -> None:
    """They are in the file before the next step ends, and take none of its values."""
    position = Position(0, 0, 0, 0)
    context = make_worker_context(tmp_path, notes=NOTES, read_position=lambda: position)
    observer = recorder.observe(context)
    observer.log({"eval/loss": 9.0}, of_last_step=True)  # before the first step
    observer.log({"loss": 1.0})
    position = Position(0, 1, 1, 8)
    observer.end_step(1)
    observer.log({"loss": 2.0})  # of step 2
    observer.log({"eval/loss": 3.0}, of_last_step=True)
    found = journal.read_records(tmp_path, 1)
    assert found is not None
    assert [(moment, values) for moment, _, values in found.lines] == [
        (Moment(0, 0), {"eval/loss": 9.0}),
        (Moment(1, 0), {"loss": 1.0}),
        (Moment(1, 0), {"eval/loss": 3.0}),
    ]
    position = Position(1, 0, 2, 16)
    observer.close_step(position)
    observer.close()
    found = journal.read_records(tmp_path, 1)
    assert found is not None
    assert found.closed == Moment(2, 1)
    points = journal.collect_points(journal.follow_chain(1, {1: found}), {1: found})
    assert {step: point.values for step, point in points.items()} == {
        0: {"eval/loss": 9.0},
        1: {"loss": 1.0, "eval/loss": 3.0},
        2: {"loss": 2.0},
    }


def test_values_of_the_last_step_are_checked(tmp_path: Path) -> None:
    """As those of the next one are; nothing is written of them."""
    observer = recorder.observe(make_worker_context(tmp_path, notes=NOTES))
    size = journal.record_path(tmp_path, 1).stat().st_size
    with pytest.raises(UsageError, match="the value of 'loss' is of the type str"):
        observer.log({"loss": "high"}, of_last_step=True)
    observer.close()
    observer.log({"loss": 1.0}, of_last_step=True)  # a closed one writes no more
    assert journal.record_path(tmp_path, 1).stat().st_size == size


def test_value_of_a_library_that_no_tracker_takes_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The other values are in one line, and the first one that is dropped is named."""
    observer = recorder.observe(make_worker_context(tmp_path, notes=NOTES))
    values = {"k" * 201: 0.5, "": 0.5} | {f"a{number}": 1.0 for number in range(1001)}
    observer.log(values, of_last_step=True, may_drop=True)
    observer.log({"b": 2.0, "k" * 300: 0.5}, may_drop=True)
    observer.end_step(1)
    found = journal.read_records(tmp_path, 1)
    assert found is not None
    assert [len(values) for _, _, values in found.lines] == [1000, 1]
    assert len(caplog.records) == 1
    assert "and others like it: run.log: the key 'kkk" in caplog.text


def test_node_of_rank_0_without_the_flag_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Else the curve would end in silence when rank 0 moves there; without any recorder nothing is said."""
    events: list[dict[str, Any]] = []
    for others, expected in (((("n1", None),), 0), ((("n1", NOTES[0][1]),), 1)):
        notes = (("n0", None), *others)
        context = make_worker_context(tmp_path, notes=notes, emit=lambda _, **fields: events.append(fields))
        recorder.observe(context)
        assert len(events) == expected
    assert "has no --log-metrics, and others have it" in events[0]["error"]
    assert "not recorded" in caplog.text
