"""Test the small records of a node's directory: the start of the job, and what was committed."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_resume.checkpoint import node_dir
from elastic_resume.checkpoint.atomic_io import Disk
from elastic_resume.checkpoint.node_dir import COMMITTED_FILE, JOB_START_FILE
from elastic_resume.errors import MachineError, NodeFileError


def test_min_generation_is_that_recorded_by_same_launcher(tmp_path: Path) -> None:
    """Another launcher is another start of the job: all known generations are older."""
    assert node_dir.read_min_generation(tmp_path, "7 1.5", 3) == (3, False)
    node_dir.record_job_start(tmp_path, "7 1.5", 3)
    assert node_dir.read_min_generation(tmp_path, "7 1.5", 5) == (3, True)
    assert node_dir.read_min_generation(tmp_path, "8 9.5", 5) == (5, False)


@pytest.mark.parametrize(
    "text",
    ["", "\0\0\0", "[]", "7", "[" * 4000, '{"floor": 1}', '{"launcher_id": "7", "floor": "1"}', "\xff"],
)
def test_damaged_job_start_record_is_deterministic_error(tmp_path: Path, text: str) -> None:
    """A guess could ignore what this job saved, or resume from what it must ignore."""
    (tmp_path / JOB_START_FILE).write_bytes(text.encode("latin-1"))
    with pytest.raises(NodeFileError, match=r"job-start.json: is damaged.*Remove the file") as caught:
        node_dir.read_min_generation(tmp_path, "7", 3)
    assert caught.value.is_deterministic


def test_unreadable_job_start_record_is_machine_error(tmp_path: Path) -> None:
    """It is not taken for a missing record."""
    (tmp_path / JOB_START_FILE).mkdir()
    with pytest.raises(MachineError, match=r"cannot read .*job-start.json"):
        node_dir.read_min_generation(tmp_path, "7", 3)


def test_committed_generation_survives_its_checkpoints(tmp_path: Path) -> None:
    """It is written once per generation, and never decreases."""
    assert node_dir.read_committed_generation(tmp_path) == 0
    for generation, known in ((2, 2), (2, 2), (1, 2), (5, 5)):
        node_dir.record_committed_generation(tmp_path, generation)
        assert node_dir.read_committed_generation(tmp_path) == known
        assert [path.name for path in tmp_path.iterdir()] == [COMMITTED_FILE]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"generation": "7"}', '{"generation": -1}', '{"generation": 1e9}', "{"]
)
def test_damaged_commit_record_reads_as_zero_and_is_replaced(tmp_path: Path, text: str) -> None:
    """Only a safety check depends on it."""
    (tmp_path / COMMITTED_FILE).write_text(text)
    assert node_dir.read_committed_generation(tmp_path) == 0
    node_dir.record_committed_generation(tmp_path, 3)
    assert node_dir.read_committed_generation(tmp_path) == 3


def test_commit_record_ignores_full_disk(tmp_path: Path) -> None:
    """The checkpoint exists all the same."""

    class Full(Disk):
        def create(self, path: Path) -> int:
            raise MachineError(f"no room for {path}")

    node_dir.record_committed_generation(tmp_path, 3, Full())
    assert node_dir.read_committed_generation(tmp_path) == 0
