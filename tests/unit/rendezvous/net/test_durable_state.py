"""The rendezvous state file: round trip, damage, another launch, another node."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_resume.errors import NodeFileError
from elastic_resume.rendezvous.core.world import NO_VIEW, Ballot, Incarnation, PersistentState, Proposal, View
from elastic_resume.rendezvous.net.durable_state import (
    RENDEZVOUS_STATE_FILE,
    DurableStateFile,
    _compute_digest,
)
from elastic_resume.schedulers import environment

A, B = Incarnation("a", "1", 2, "a:1", 0), Incarnation("b", "2", 1, "b:1")
BALLOT = Ballot(3, "1", 2)
STATE = PersistentState(
    A, View(4, (A, B), A), BALLOT, Proposal(BALLOT, View(5, (A,), A)), 5, held=frozenset({"2"})
)


def test_state_file_returns_what_was_written(tmp_path: Path) -> None:
    """The next agent of the node reads it."""
    assert DurableStateFile(tmp_path).state is None
    DurableStateFile(tmp_path).write(STATE)
    assert DurableStateFile(tmp_path).state == STATE


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{}",
        b"[]",
        b'{"memory": 1, "digest": ""}',
        b'{"memory": [], "digest": "x"}',
        b"\xff",
        b"[" * 100_000,
    ],
)
def test_damaged_state_file_is_an_error(tmp_path: Path, damage: bytes) -> None:
    """Taking it for no knowledge could lead to two views at a time."""
    (tmp_path / RENDEZVOUS_STATE_FILE).write_bytes(damage)
    with pytest.raises(NodeFileError, match="remove the file"):
        DurableStateFile(tmp_path)


def test_state_file_with_a_changed_digit_is_an_error(tmp_path: Path) -> None:
    """The digest covers the whole state."""
    DurableStateFile(tmp_path).write(STATE)
    record = json.loads((tmp_path / RENDEZVOUS_STATE_FILE).read_text())
    record["memory"][5] += 1
    (tmp_path / RENDEZVOUS_STATE_FILE).write_text(json.dumps(record))
    with pytest.raises(NodeFileError):
        DurableStateFile(tmp_path)


def write_memory(directory: Path, memory: object) -> None:
    """Write a state file with this value and its digest."""
    record = {"memory": memory, "digest": _compute_digest(memory), "launch": ""}
    (directory / RENDEZVOUS_STATE_FILE).write_text(json.dumps(record))


@pytest.mark.parametrize("removed", [1, 2, 3, 4])
def test_state_file_that_lacks_fields_is_an_error(tmp_path: Path, removed: int) -> None:
    """No version wrote such a state."""
    DurableStateFile(tmp_path).write(STATE)
    memory = json.loads((tmp_path / RENDEZVOUS_STATE_FILE).read_text())["memory"]
    write_memory(tmp_path, memory[:-removed])
    with pytest.raises(NodeFileError, match="is damaged"):
        DurableStateFile(tmp_path)


@pytest.mark.parametrize(
    ("before", "now", "forgotten"),
    [
        ("slurm 7 0", "slurm 7 1", True),
        ("slurm 7 0", "slurm 7 0", False),
        ("", "slurm 7 0", False),
        ("x", "", False),
    ],
)
def test_new_launch_of_the_whole_job_forgets_earlier_views(
    tmp_path: Path, before: str, now: str, forgotten: bool
) -> None:
    """The scheduler ended their processes first. Generations and ballots continue to count."""
    DurableStateFile(tmp_path, launch_id=before).write(STATE)
    state = DurableStateFile(tmp_path, launch_id=now).state
    assert state is not None
    expected = replace(STATE, view=NO_VIEW, accepted=None, held=frozenset()) if forgotten else STATE
    assert state == expected


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        ({}, ""),
        ({"SLURM_JOB_ID": "7"}, "slurm 7 0"),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, "slurm 7 2"),
        ({"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "1"}, "slurm 6_1 0"),
    ],
)
def test_slurm_launch_id_differs_between_starts_of_a_job(environ: dict[str, str], launch: str) -> None:
    """An element of an array is requeued alone."""
    assert environment.read_context(environ).launch_id == launch


def test_state_file_of_another_node_is_refused(tmp_path: Path) -> None:
    """Used as ours, two nodes would cast the vote of one disk."""
    DurableStateFile(tmp_path).write(STATE)
    with pytest.raises(NodeFileError, match="belongs to node 'a', but this is node 'b'"):
        DurableStateFile(tmp_path, node="b")
    assert DurableStateFile(tmp_path, node="a").state == STATE
