"""Test what a worker records for the hang detector, and what it answers about its collectives."""

from __future__ import annotations

import inspect
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastic_resume.mechanisms.hangs.detector import take_sample
from elastic_resume.ranks.rank_context import RankContext
from elastic_resume.slots.progress_page import ProgressPage, WorkerProcess, read_records
from elastic_resume.training.heartbeat import (
    BUSY_LIMIT_S,
    MAX_ENTRIES_BYTES,
    MAX_FIELD_BYTES,
    RankHeartbeat,
    dump_flight_recorders,
)
from elastic_resume.training.run import Run


def pretend(monkeypatch: pytest.MonkeyPatch, **functions: Callable[..., bytes]) -> None:
    """Give torch these functions, and no other."""
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", SimpleNamespace(**functions))


def trace(*numbers: int, **more: object) -> bytes:
    """Return a dump with such entries."""
    return json.dumps({"version": "2.10", "entries": [{"id": number} for number in numbers], **more}).encode()


def ids(dump: dict[str, Any]) -> list[int]:
    """Return the entries of a dump."""
    return [entry["id"] for entry in dump["entries"]]


def test_flight_recorders_of_all_backends_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's is another than gloo's; torch 2.15 has one for each of its newer backends, 2.13 has none."""
    by_backend = {"gloo": trace(7), "nccl2": trace(9)}
    nccl = {"_dump_nccl_trace_json": lambda: trace(8)}
    pretend(monkeypatch, _dump_fr_trace_json=lambda backend="gloo": by_backend.get(backend, b"{}"), **nccl)
    found = dump_flight_recorders()
    assert {name: ids(dump) for name, dump in found.items()} == {"gloo": [7], "nccl": [8], "nccl2": [9]}
    pretend(monkeypatch, _dump_fr_trace_json=lambda: trace(7), **nccl)
    assert dump_flight_recorders().keys() == {"gloo", "nccl"}


def test_long_dump_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest entries remain."""
    long = trace(*range(60_000), pg_config="x" * MAX_FIELD_BYTES)
    pretend(monkeypatch, _dump_fr_trace_json=lambda: long)
    found = dump_flight_recorders()["gloo"]
    assert found.keys() == {"version", "entries"}
    assert ids(found) == list(range(ids(found)[0], 60_000))
    assert MAX_ENTRIES_BYTES / 2 < len(json.dumps(found["entries"])) < 2 * MAX_ENTRIES_BYTES


@pytest.mark.parametrize("answer", [b"", b"[]", b"1", b'{"entries": 7}', b'{"entries": []}', b"\xff"])
def test_unreadable_recorder_is_left_out(monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    """As is one that a build lacks, or that is off."""
    pretend(monkeypatch, _dump_fr_trace_json=lambda: answer)
    assert dump_flight_recorders() == {}
    pretend(monkeypatch)
    assert dump_flight_recorders() == {}


def test_busy_rank_is_judged_again_after_four_hours(tmp_path: Path) -> None:
    """Within it ranks may wait for one that never comes. With a limit of 0 it is never judged."""
    page = ProgressPage(tmp_path / "page")
    worker = WorkerProcess(0, 0, 1, 77, 0, 0, 0)
    page.start_generation(0, generation=1, step=0, world_size=1, worker=worker)
    page.finish_step(0, 1)
    heartbeat = RankHeartbeat(page, cast("RankContext", SimpleNamespace(local_rank=0)))

    def is_busy_after(hours: float) -> bool:
        (record,) = read_records(tmp_path / "page", 1)
        return take_sample(record, time.monotonic_ns() + int(hours * 3600e9)).is_busy

    with heartbeat.busy():
        assert is_busy_after(3.9)
        assert not is_busy_after(4.1)
    with heartbeat.busy(0.0):
        assert is_busy_after(1000.0)
    assert inspect.signature(Run.busy).parameters["limit_s"].default == BUSY_LIMIT_S == 4 * 3600
