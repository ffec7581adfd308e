"""The events of a worker's start and end."""

from __future__ import annotations

import contextlib
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from elastic_resume.agent.failure_evidence import FailureEvents
from elastic_resume.agent.workers import worker_events


@pytest.fixture
def event_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The environment of rank 3, whose script has recorded an error, and the node's log with a line."""
    path, recorded = tmp_path / "events.jsonl", tmp_path / "error.json"
    path.write_text('{"event": "earlier"}\n')
    recorded.write_text(json.dumps({"message": {"message": "recorded"}}))
    monkeypatch.delenv(worker_events.ENV_EVIDENCE, raising=False)
    monkeypatch.setenv(worker_events.ENV_EVENTS_PATH, str(path))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(recorded))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv(worker_events.ENV_LOCAL_RANK, "x1")
    return path


@pytest.mark.parametrize(
    ("status", "facts", "expected"),
    [
        (0, {}, {"exit_code": 0, "signal": None, "stopped": False}),
        (9, {}, {"exit_code": None, "signal": "SIGKILL", "message": "recorded"}),
        (1 << 8, {"message": "given"}, {"exit_code": 1, "message": "given"}),
        (1 << 8, {"stopped_at": 7.0}, {"exit_code": 1, "stopped": True, "stopped_at": 7.0}),
        (1, {"lease_expired": True}, {"signal": "SIGHUP", "lease_expired": True, "message": "recorded"}),
        (40, {"not_parked": True, "stuck": True}, {"signal": "SIG40", "not_parked": True, "stuck": True}),
    ],
)
def test_end_of_a_worker_is_appended_to_the_log(
    status: int, facts: dict[str, Any], expected: dict[str, Any], event_file: Path
) -> None:
    """A message belongs to a failure only. A number that is none is unknown."""
    worker_events.write_worker_exit(5, status, **{"stopped_at": None, "lease_expired": False} | facts)
    earlier, line = map(json.loads, event_file.read_text().splitlines())
    assert earlier == {"event": "earlier"}
    assert (line["rank"], line["local_rank"], line["worker_pid"]) == (3, None, 5)
    assert {name: line[name] for name in expected} == expected
    optional = {"message", "stopped_at", "lease_expired", "not_parked", "stuck"}
    assert optional & line.keys() - expected.keys() == ({"message"} if status == 40 else set())


@pytest.mark.parametrize("missing", ["RANK", worker_events.ENV_LOCAL_RANK, worker_events.ENV_GENERATION, ""])
def test_fork_of_a_worker_is_written_for_an_agent_only(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A standby has no rank yet."""
    with contextlib.closing(FailureEvents()) as evidence:
        monkeypatch.setenv(worker_events.ENV_EVIDENCE, evidence.path)
        for name in ("RANK", worker_events.ENV_LOCAL_RANK, worker_events.ENV_GENERATION):
            monkeypatch.setenv(name, "1")
        monkeypatch.delenv(missing, raising=False)
        worker_events.write_worker_forked(5)
        assert [event["worker_pid"] for event in evidence.read()] == ([] if missing else [5])


@pytest.mark.parametrize("number", [*signal.valid_signals()])
def test_signals_have_their_standard_names(number: int) -> None:
    """Signals with two names have the same one as in `signal`, and real-time signals have none."""
    known = {item.value: item.name for item in signal.Signals}
    assert worker_events.signal_name(number) == known.get(number, f"SIG{number}")
