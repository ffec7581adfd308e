"""What a node keeps on disk of the rendezvous."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_resume.errors import NodeFileError
from elastic_resume.rendezvous.core.events import PersistentState
from elastic_resume.rendezvous.core.quorum import Incarnation, QuorumState, View
from elastic_resume.rendezvous.net.durable_state import RENDEZVOUS_STATE_FILE, DurableStateFile
from elastic_resume.schedulers import environment

A, B = Incarnation("a", "1", "a:1", 0), Incarnation("b", "1", "b:1")
MEMORY = PersistentState(A, QuorumState(1, View(4, (A, B), A), dead=frozenset({B})), 5)


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    """By the next life."""
    DurableStateFile(tmp_path).write(MEMORY)
    assert DurableStateFile(tmp_path).state == MEMORY


@pytest.mark.parametrize("damage", [b"", b"{}", b"[]", b'{"memory": 1, "digest": ""}', b"\xff", b"[" * 9999])
def test_a_record_that_cannot_be_read_is_an_error(tmp_path: Path, damage: bytes) -> None:
    """To take it for "knows nothing" could make two worlds."""
    (tmp_path / RENDEZVOUS_STATE_FILE).write_bytes(damage)
    with pytest.raises(NodeFileError, match="remove the file"):
        DurableStateFile(tmp_path)


def test_a_flipped_digit_is_noticed(tmp_path: Path) -> None:
    """The digest covers all of the memory."""
    DurableStateFile(tmp_path).write(MEMORY)
    told = json.loads((tmp_path / RENDEZVOUS_STATE_FILE).read_text())
    told["memory"][2] += 1
    (tmp_path / RENDEZVOUS_STATE_FILE).write_text(json.dumps(told))
    with pytest.raises(NodeFileError):
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
def test_a_start_of_the_whole_job_by_its_scheduler_asks_no_former_world(
    tmp_path: Path, before: str, now: str, forgotten: bool
) -> None:
    """Its processes were ended first. Generations count on."""
    DurableStateFile(tmp_path, launch_id=before).write(MEMORY)
    memory = DurableStateFile(tmp_path, launch_id=now).state
    assert memory is not None
    assert (memory.quorum_state == QuorumState(1)) is forgotten
    assert (memory.incarnation, memory.max_generation) == (A, 5)


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        ({}, ""),
        ({"SLURM_JOB_ID": "7"}, "slurm 7 0"),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, "slurm 7 2"),
        ({"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "1"}, "slurm 6_1 0"),
    ],
)
def test_slurm_tells_one_start_of_a_job_from_the_next(environ: dict[str, str], launch: str) -> None:
    """An array's element is requeued alone."""
    assert environment.read_context(environ).launch_id == launch


def test_another_nodes_record_is_refused(tmp_path: Path) -> None:
    """Taken for our own it would count the other gone while it lives."""
    DurableStateFile(tmp_path).write(MEMORY)
    with pytest.raises(NodeFileError, match="belongs to node 'a', and this is 'b'"):
        DurableStateFile(tmp_path, node="b")
    assert DurableStateFile(tmp_path, node="a").state == MEMORY
