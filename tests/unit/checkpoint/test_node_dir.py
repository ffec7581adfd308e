"""The small notes of a node's directory: this start of the job, and what has been committed."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_resume.checkpoint import node_dir
from elastic_resume.checkpoint.atomic_io import Disk
from elastic_resume.checkpoint.node_dir import COMMITTED_FILE, JOB_START_FILE
from elastic_resume.errors import MachineError, NodeFileError


def test_the_floor_is_that_of_the_supervisor_who_noted_it(tmp_path: Path) -> None:
    """Another one is another start of the job: all that is known then is older."""
    assert node_dir.read_min_generation(tmp_path, "7 1.5", 3) == (3, False)
    node_dir.record_job_start(tmp_path, "7 1.5", 3)
    assert node_dir.read_min_generation(tmp_path, "7 1.5", 5) == (3, True)
    assert node_dir.read_min_generation(tmp_path, "8 9.5", 5) == (5, False)


@pytest.mark.parametrize(
    "text",
    ["", "\0\0\0", "[]", "7", "[" * 4000, '{"floor": 1}', '{"launcher_id": "7", "floor": "1"}', "\xff"],
)
def test_a_damaged_note_is_an_error_that_a_restart_would_meet_again(tmp_path: Path, text: str) -> None:
    """Guessing would set aside what this start has saved, or go on from what was to be set aside."""
    (tmp_path / JOB_START_FILE).write_bytes(text.encode("latin-1"))
    with pytest.raises(NodeFileError, match=r"job-start.json: is damaged.*Remove the file") as caught:
        node_dir.read_min_generation(tmp_path, "7", 3)
    assert caught.value.is_deterministic


def test_a_note_that_cannot_be_read_is_the_machines_fault(tmp_path: Path) -> None:
    """Not taken for a missing one."""
    (tmp_path / JOB_START_FILE).mkdir()
    with pytest.raises(MachineError, match=r"cannot read .*job-start.json"):
        node_dir.read_min_generation(tmp_path, "7", 3)


def test_the_newest_generation_with_a_commit_is_known_after_its_copies_are_gone(tmp_path: Path) -> None:
    """Written once for a generation, and never taken back."""
    assert node_dir.read_committed_generation(tmp_path) == 0
    for generation, known in ((2, 2), (2, 2), (1, 2), (5, 5)):
        node_dir.record_committed_generation(tmp_path, generation)
        assert node_dir.read_committed_generation(tmp_path) == known
        assert [path.name for path in tmp_path.iterdir()] == [COMMITTED_FILE]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"generation": "7"}', '{"generation": -1}', '{"generation": 1e9}', "{"]
)
def test_a_damaged_note_of_commits_stops_nobody(tmp_path: Path, text: str) -> None:
    """It is a safety net; the next commit mends it."""
    (tmp_path / COMMITTED_FILE).write_text(text)
    assert node_dir.read_committed_generation(tmp_path) == 0
    node_dir.record_committed_generation(tmp_path, 3)
    assert node_dir.read_committed_generation(tmp_path) == 3


def test_a_disk_that_refuses_the_note_does_not_undo_the_commit(tmp_path: Path) -> None:
    """The checkpoint exists all the same."""

    class Full(Disk):
        def create(self, path: Path) -> int:
            raise MachineError(f"no room for {path}")

    node_dir.record_committed_generation(tmp_path, 3, Full())
    assert node_dir.read_committed_generation(tmp_path) == 0
