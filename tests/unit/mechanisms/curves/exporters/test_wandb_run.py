from __future__ import annotations

import json
import math
import os
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic_resume.errors import MachineError
from elastic_resume.mechanisms.curves.exporter import Exporter, Point, parse_exporter
from elastic_resume.mechanisms.curves.exporters.wandb_file import StepReader
from tests.support.killed_writers import assert_equal_points, write_with_kills

pytestmark = pytest.mark.skipif(find_spec("wandb") is None, reason="needs wandb")


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))


def _open(last_written: int = -1, go_back_to: int | None = None) -> tuple[Exporter, int]:
    exporter = parse_exporter("--log-metrics", "wandb:curves")("job-1")
    return exporter, exporter.open(last_written, go_back_to)


def _read_records(file: Path) -> list[Any]:
    # Collecting tests takes seconds longer with it.
    from wandb.proto.wandb_internal_pb2 import Record  # noqa: PLC0415

    reader = StepReader(file)
    return [Record.FromString(data) for data in reader._read_entries()]


def _read(directory: Path) -> dict[int, dict[str, float]]:
    """Return what ``wandb sync`` would upload, in its order."""
    found: dict[int, dict[str, float]] = {}
    for file in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        for record in _read_records(file):
            kind = record.WhichOneof("record_type")
            if kind == "run" and record.run.HasField("branch_point"):
                found = {step: found[step] for step in found if step <= record.run.branch_point.value}
            if kind == "history":
                items = {
                    (item.key or ".".join(item.nested_key)): item.value_json for item in record.history.item
                }
                values = {
                    key: float(json.loads(text)) for key, text in items.items() if not key.startswith("_")
                }
                assert record.history.step.num == int(items["_step"]) > max(found, default=-1)
                found[record.history.step.num] = values
    return found


@pytest.mark.slow
def test_kills_leave_each_step_once(tmp_path: Path) -> None:
    """W&B's files of all writers have one row per step; the service is killed too."""
    write_with_kills("wandb:curves", tmp_path, 300)
    assert_equal_points(_read(tmp_path), 300)


@pytest.mark.slow
def test_all_writers_are_one_run_and_leave_no_process(tmp_path: Path) -> None:
    """Each writer begins a file of the same run, which says that it may be resumed."""
    for step in range(2):
        exporter, last = _open()
        assert last == step - 1
        exporter.write([Point(step, 1e9 + step, {"a": math.inf})])
        before = [process for process in psutil.process_iter() if _is_wandb(process)]
        assert len(before) == 2
        exporter.close()
        exporter.close()
        psutil.wait_procs(before, timeout=30)
        assert not [process for process in before if process.is_running()]
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    runs = [
        next(r.run for r in _read_records(file) if r.WhichOneof("record_type") == "run") for file in files
    ]
    assert [(run.run_id, run.project, run.resume) for run in runs] == [("job-1", "curves", True)] * 2
    assert "WANDB_SERVICE" not in os.environ


def _is_wandb(process: psutil.Process) -> bool:
    try:
        return any("wandb_process" in word or "wandb-core" in word for word in process.cmdline()) and (
            psutil.Process() in process.parents()
        )
    except psutil.Error:
        return False


@pytest.mark.slow
def test_flush_returns_what_the_file_has(tmp_path: Path) -> None:
    """W&B writes its file from time to time: what is not there yet is not reported."""
    exporter, _ = _open()
    exporter.write([Point(step, 1.0, {"a": 1.0}) for step in range(5)])
    while exporter.flush() < 4:
        assert exporter.flush() in {-1, 4}
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert StepReader(file).read() == 4
    exporter.close()


@pytest.mark.soak
def test_going_back_rewinds_the_run(tmp_path: Path) -> None:
    """The new file names the step; W&B drops the later ones."""
    exporter, _ = _open()
    exporter.write([Point(step, 1.0, {"a": step}) for step in range(5)])
    exporter.close()
    exporter, last = _open(4, go_back_to=2)
    assert last == 2
    exporter.write([Point(3, 1.0, {"a": -3.0})])
    exporter.close()
    assert _read(tmp_path) == {0: {"a": 0.0}, 1: {"a": 1.0}, 2: {"a": 2.0}, 3: {"a": -3.0}}
    for go_back_to, expected in ((None, 3), (-1, -1), (None, -1)):  # what was abandoned does not count
        exporter, last = _open(-1, go_back_to)
        assert last == expected
        exporter.close()


@pytest.mark.soak
def test_dead_process_is_an_error_and_open_begins_a_new_one() -> None:
    """The caller opens the exporter again, and sends again what is missing."""
    exporter, _ = _open()
    exporter.write([Point(0, 1.0, {"a": 1.0})])
    for process in psutil.Process().children():
        if _is_wandb(process):
            process.send_signal(signal.SIGKILL)
            process.wait()
    with pytest.raises(MachineError, match="W&B's process has ended"):
        exporter.flush()
    assert exporter.open(-1) in {-1, 0}
    exporter.close()


@pytest.mark.slow
def test_what_wandb_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is W&B's own."""
    monkeypatch.setenv("WANDB_MODE", "sideways")
    with pytest.raises(MachineError, match=r"W&B refuses the logged values: .*mode"):
        _open()
