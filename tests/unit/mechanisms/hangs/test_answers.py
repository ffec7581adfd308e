"""Test what a worker answers about its collectives."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_resume.mechanisms.hangs.answers import MAX_ENTRIES_BYTES, MAX_FIELD_BYTES, dump_flight_recorders


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
