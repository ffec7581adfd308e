"""The rendezvous state file: round trip, damage, the version before, another launch, another node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_resume.errors import NodeFileError
from elastic_resume.rendezvous.core.events import PersistentState
from elastic_resume.rendezvous.core.quorum import Incarnation, QuorumState, View
from elastic_resume.rendezvous.net.durable_state import (
    RENDEZVOUS_STATE_FILE,
    DurableStateFile,
    _compute_digest,
)
from elastic_resume.schedulers import environment

A, B = Incarnation("a", "1", "a:1", 0), Incarnation("b", "1", "b:1")
STATE = PersistentState(A, QuorumState(1, View(4, (A, B), A), dead=frozenset({B})), 5)


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
    record["memory"][2] += 1
    (tmp_path / RENDEZVOUS_STATE_FILE).write_text(json.dumps(record))
    with pytest.raises(NodeFileError):
        DurableStateFile(tmp_path)


def test_state_file_of_the_version_before_force_quorum_is_read(tmp_path: Path) -> None:
    """The member that it lacks has its default."""
    DurableStateFile(tmp_path).write(STATE)
    record = json.loads((tmp_path / RENDEZVOUS_STATE_FILE).read_text())
    del record["memory"][1][-1]
    assert len(record["memory"][1]) == 6
    record["digest"] = _compute_digest(record["memory"])
    (tmp_path / RENDEZVOUS_STATE_FILE).write_text(json.dumps(record))
    assert DurableStateFile(tmp_path).state == STATE


@pytest.mark.parametrize("removed", [2, 6])
def test_state_file_that_lacks_more_is_an_error(tmp_path: Path, removed: int) -> None:
    """No version wrote such a state."""
    DurableStateFile(tmp_path).write(STATE)
    record = json.loads((tmp_path / RENDEZVOUS_STATE_FILE).read_text())
    del record["memory"][1][-removed:]
    record["digest"] = _compute_digest(record["memory"])
    (tmp_path / RENDEZVOUS_STATE_FILE).write_text(json.dumps(record))
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
    """The scheduler ended their processes first. Generations continue to count."""
    DurableStateFile(tmp_path, launch_id=before).write(STATE)
    state = DurableStateFile(tmp_path, launch_id=now).state
    assert state is not None
    assert (state.quorum_state == QuorumState(1)) is forgotten
    assert (state.incarnation, state.max_generation) == (A, 5)


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
    """Used as ours, it would count the other node dead while it lives."""
    DurableStateFile(tmp_path).write(STATE)
    with pytest.raises(NodeFileError, match="belongs to node 'a', but this is node 'b'"):
        DurableStateFile(tmp_path, node="b")
    assert DurableStateFile(tmp_path, node="a").state == STATE
