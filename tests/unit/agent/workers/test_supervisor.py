"""The worker supervisor: its states, and what it does between fork and start of its worker."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

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
                **dict.fromkeys(["parking", "parked", "waiting", "starting"], "agent ended"),
                **dict.fromkeys(["stopping", "copying"], "late"),
            },
        ),
        ({"is_parked": True}, {"parking": "parked", "starting": "parked"}),
        ({"is_parked": True, "is_restartable": False}, {"parking": "parked", "starting": "parked"}),
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
    """And nothing comes after the kill. A worker that starts early has no step to save."""
    for event in supervisor.KILLING_EVENTS:
        assert supervisor.find_transition(state, event) == ("killing", "")
    assert {supervisor.find_transition("killing", event) for event in EVENTS} == {("killing", "")}
    assert supervisor.find_transition("starting", "signal") == ("killing", "")
    assert supervisor.find_transition("starting", "parked") == ("waiting", "release")


def test_states_that_wait_for_a_worker_have_an_end() -> None:
    """A running worker has its lease; a parked one waits for its agent."""
    ends = {state for state, event in supervisor.TRANSITIONS if event == "late"}
    assert ends == STATES - {"running", "parked", "waiting", "starting", "killing"}


# ---- what it reads and writes ----------------------------------------------------------------------------


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
