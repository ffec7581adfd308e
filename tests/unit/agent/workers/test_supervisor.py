"""The worker supervisor: its states, and what it does between fork and start of its worker."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic_resume.agent.failure_evidence import FailureEvents
from elastic_resume.agent.workers import supervisor

# The supervisor ends at once, or when its worker runs, or after it. The output ends when both have ended.
CODE = """
import _socket, json, os, signal, sys, time
from elastic_resume.agent.workers import supervisor
fork, death = os.fork, sys.argv[1]
def fork_late():
    parent, pid = os.getpid(), fork()
    if pid and death == "before":
        os._exit(0)
    while not pid and death == "before" and os.getppid() == parent:
        time.sleep(0.001)
    return pid
if fork() == 0:
    os.fork, (shim, connection) = fork_late, _socket.socketpair()
    numbers = set(os.listdir("/proc/self/fd")) - {str(connection.fileno())}
    supervisor.fork_supervised_worker(connection, set())
    leaders = [os.getsid(pid) == pid for pid in (os.getpid(), os.getppid())]
    listed = set(os.listdir("/proc/self/fd")) - numbers
    inherited = [number for number in listed if os.path.exists("/proc/self/fd/" + number)]
    os.write(1, json.dumps([leaders, inherited]).encode())
    if death == "while it runs":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(0.5)  # nothing to wait for, should the worker live
        os.write(1, b"alive")
    os._exit(0)
"""


@pytest.mark.parametrize("death", ["before", "while it runs", "after"])
def test_worker_ends_with_its_supervisor_and_inherits_nothing_of_it(death: str) -> None:
    """The kernel sends the signal of a parent's death only to a worker that has asked for it before."""
    output = subprocess.run([sys.executable, "-c", CODE, death], capture_output=True, check=True).stdout
    if death == "before":
        assert output == b""
    else:
        assert json.loads(output) == [[True, True], []]


EVENTS = {event for _, event in supervisor.TRANSITIONS} | supervisor.KILLING_EVENTS
STATES = {state for state, _ in supervisor.TRANSITIONS} | {supervisor.KILLING}


@pytest.mark.parametrize(
    ("events", "states", "actions"),
    [
        # A drain, which is repeated: one SIGTERM. The grace period ends.
        (["signal", "signal", "late"], ["stopping", "stopping", "killing"], ["terminate"]),
        # A failure elsewhere: the worker parks, its launcher shim goes at torchelastic's signal.
        (
            ["over, can park", "signal", "parked", "signal", "resumed", "signal"],
            ["parking", "parking", "parked", "waiting", "running", "stopping"],
            ["ask to park", "listen", "release", "terminate"],
        ),
        (["over, can park", "late"], ["parking", "killing"], ["ask to park"]),
        (["over, can park", "cannot park", "copied"], ["parking", "copying", "killing"], ["ask to park"]),
        (["over", "parked", "copied"], ["copying", "copying", "killing"], []),
        # What has got SIGTERM does not park: it may be saving.
        (["signal", "over, can park", "late"], ["stopping", "copying", "killing"], ["terminate"]),
        # The next launcher shim starts a new worker.
        (
            ["over, can park", "parked", "signal", "refused", "resumed"],
            ["parking", "parked", "waiting", "killing", "killing"],
            ["ask to park", "listen", "release"],
        ),
    ],
)
def test_worker_goes_through_these_states(events: list[str], states: list[str], actions: list[str]) -> None:
    """Each line is one worker, from its start in a generation."""
    state, seen, done = supervisor.RUNNING, [], []
    for event in events:
        state, action = supervisor.find_transition(state, event)
        seen.append(state)
        done += [action] if action else []
    assert (seen, done) == (states, actions)


QUIET = {  # of a worker that goes on
    "is_over": False,
    "has_lease": True,
    "has_agent": True,
    "is_parked": False,
    "is_restartable": True,
    "stop_requested": False,
    "is_copying": True,
    "is_late": False,
}


@pytest.mark.parametrize(
    ("facts", "events"),
    [
        ({}, {}),
        ({"is_over": True}, {"running": "over, can park", "stopping": "over, can park"}),
        ({"is_over": True, "has_lease": False}, {"running": "over", "stopping": "over"}),
        (
            {"is_over": True, "is_restartable": False},
            {"running": "over", "stopping": "over", "parking": "cannot park"},
        ),
        (
            {"has_agent": False, "is_parked": True, "is_late": True},
            {
                **dict.fromkeys(["parking", "parked", "waiting", "standby"], "agent ended"),
                **dict.fromkeys(["stopping", "copying"], "late"),
            },
        ),
        ({"is_parked": True}, {"parking": "parked", "standby": "parked"}),
        ({"is_parked": True, "is_restartable": False}, {"parking": "parked", "standby": "parked"}),
        ({"stop_requested": True}, {"parked": "signal"}),
        ({"is_copying": False}, {"copying": "copied"}),
        (
            {"is_copying": False, "is_late": True},
            {"copying": "copied", "stopping": "late", "parking": "late"},
        ),
    ],
)
def test_events_are_found_in_their_states_only(facts: dict[str, bool], events: dict[str, str]) -> None:
    """What is not named has no event then."""
    found = {state: supervisor.find_event(state, **QUIET | facts) for state in STATES}
    assert {state: event for state, event in found.items() if event} == events


@pytest.mark.parametrize("state", sorted(STATES))
def test_no_state_outlives_agent_or_launcher_shim(state: str) -> None:
    """And nothing comes after the kill. A standby that is stopped has no step to save."""
    for event in supervisor.KILLING_EVENTS:
        assert supervisor.find_transition(state, event) == ("killing", "")
    assert {supervisor.find_transition("killing", event) for event in EVENTS} == {("killing", "")}
    assert supervisor.find_transition("standby", "signal") == ("killing", "")
    assert supervisor.find_transition("standby", "parked") == ("waiting", "release")


def test_states_that_wait_for_a_worker_have_an_end() -> None:
    """A running worker has its lease; a parked one waits for its agent."""
    ends = {state for state, event in supervisor.TRANSITIONS if event == "late"}
    assert ends == STATES - {"running", "parked", "waiting", "standby", "killing"}


# ---- what it reads and writes ----------------------------------------------------------------------------


@pytest.fixture
def event_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The environment of rank 3, whose script has recorded an error, and the node's log with a line."""
    path, recorded = tmp_path / "events.jsonl", tmp_path / "error.json"
    path.write_text('{"event": "earlier"}\n')
    recorded.write_text(json.dumps({"message": {"message": "recorded"}}))
    monkeypatch.delenv(supervisor.ENV_EVIDENCE, raising=False)
    monkeypatch.setenv(supervisor.ENV_EVENTS_PATH, str(path))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(recorded))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv(supervisor.ENV_LOCAL_RANK, "x1")
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
    supervisor.write_worker_exit(5, status, **{"stopped_at": None, "lease_expired": False} | facts)
    earlier, line = map(json.loads, event_file.read_text().splitlines())
    assert earlier == {"event": "earlier"}
    assert (line["rank"], line["local_rank"], line["worker_pid"]) == (3, None, 5)
    assert {name: line[name] for name in expected} == expected
    optional = {"message", "stopped_at", "lease_expired", "not_parked", "stuck"}
    assert optional & line.keys() - expected.keys() == ({"message"} if status == 40 else set())


@pytest.mark.parametrize("missing", ["RANK", supervisor.ENV_LOCAL_RANK, supervisor.ENV_GENERATION, ""])
def test_fork_of_a_worker_is_written_for_an_agent_only(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A standby has no rank yet."""
    with contextlib.closing(FailureEvents()) as evidence:
        monkeypatch.setenv(supervisor.ENV_EVIDENCE, evidence.path)
        for name in ("RANK", supervisor.ENV_LOCAL_RANK, supervisor.ENV_GENERATION):
            monkeypatch.setenv(name, "1")
        monkeypatch.delenv(missing, raising=False)
        supervisor.write_worker_forked(5)
        assert [event["worker_pid"] for event in evidence.read()] == ([] if missing else [5])


@pytest.mark.parametrize(
    ("rank", "word", "is_copying"),
    [
        ("1", 0, False),
        ("1", 7, True),
        ("1", supervisor.AWAITING_SLOT, False),
        ("0", 7, False),
        ("", 7, False),
        (str(supervisor.MAX_LOCAL_RANKS), 7, False),
    ],
)
def test_copy_is_read_from_the_ranks_own_word(
    rank: str, word: int, is_copying: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that waits for its local leader copies nothing yet."""
    words = [0] * (supervisor.COPYING_START + supervisor.MAX_LOCAL_RANKS)
    words[supervisor.COPYING_START + 1] = word
    (tmp_path / "slots").write_bytes(struct.pack(f"{len(words)}Q", *words))
    monkeypatch.setenv(supervisor.ENV_SLOTS, str(tmp_path / "slots"))
    monkeypatch.setenv(supervisor.ENV_LOCAL_RANK, rank)
    assert supervisor.SnapshotCopyMonitor().is_copying() is is_copying
    assert supervisor.ENV_SLOTS not in os.environ, "a job that the worker starts has other slots"


def test_lease_page_of_another_agent_is_not_ours(tmp_path: Path) -> None:
    """Its descriptor may have the number that ours had."""
    path = tmp_path / "page"
    path.touch()
    view = supervisor.LeaseView(memoryview(bytearray(16)).cast("d"), str(path), path.stat())
    assert not view.has_agent_ended()
    path.rename(tmp_path / "old")
    path.touch()
    assert view.has_agent_ended()
    path.unlink()
    assert view.has_agent_ended()
    assert supervisor.LeaseView(None, str(tmp_path / "old")).has_agent_ended()
