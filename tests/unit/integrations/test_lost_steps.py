"""What a library wrote in steps that are repeated is set aside until it is written again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_resume.errors import MachineError
from elastic_resume.integrations import lost_steps


def write(base: Path, name: str, order: int | None, *, is_folder: bool = False) -> None:
    """Write a file, or a file in a folder, that belongs to ``order``; with None nobody notes it."""
    if order is not None:
        lost_steps.note(base, name, order)
    place = base / name / "weights" if is_folder else base / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(f"{name} of {order}")


def list_files(base: Path) -> list[str]:
    """List the files, without the journal."""
    found = (path.relative_to(base) for path in base.rglob("*") if path.is_file())
    return sorted(str(path) for path in found if path.name != lost_steps.JOURNAL)


@pytest.mark.parametrize("is_folder", [False, True])
def test_newer_is_set_aside_until_written_again(tmp_path: Path, is_folder: bool) -> None:
    """And nothing else: what nobody noted, and what was written first before the state."""
    names = ("a", "runs/b", "other")
    for name, order in ((names[0], 3), (names[1], 6), (names[0], 7), (names[2], None)):
        write(tmp_path, name, order, is_folder=is_folder)
    whole = list_files(tmp_path)
    lost_steps.set_newer_aside(tmp_path, 5)
    lost = "lost-steps/runs/b" + "/weights" * is_folder
    assert list_files(tmp_path) == sorted([*(one for one in whole if "b" not in one), lost])
    write(tmp_path, names[1], 6, is_folder=is_folder)
    lost_steps.drop_replaced(tmp_path, names[1])
    assert list_files(tmp_path) == whole
    assert not (tmp_path / "lost-steps").exists()


def test_step_that_is_lost_twice_keeps_the_newer_loss(tmp_path: Path) -> None:
    """A folder cannot be moved onto another one."""
    for text in ("first", "second"):
        write(tmp_path, "step-9", 18, is_folder=True)
        (tmp_path / "step-9" / "weights").write_text(text)
        lost_steps.set_newer_aside(tmp_path, 16)
    assert (tmp_path / "lost-steps" / "step-9" / "weights").read_text() == "second"


def test_several_nodes_set_aside_at_once(tmp_path: Path) -> None:
    """Each has read the journal; one finds the folder gone, and must not remove what the other moved."""
    write(tmp_path, "step-9", 18, is_folder=True)
    journal = (tmp_path / lost_steps.JOURNAL).read_text()
    lost_steps.set_newer_aside(tmp_path, 16)
    (tmp_path / lost_steps.JOURNAL).write_text(journal)
    lost_steps.set_newer_aside(tmp_path, 16)
    assert list_files(tmp_path) == ["lost-steps/step-9/weights"]


def test_forgotten_files_of_a_former_job_stay(tmp_path: Path) -> None:
    """Another job begins in the same directory."""
    write(tmp_path, "a", 9)
    lost_steps.forget(tmp_path)
    lost_steps.set_newer_aside(tmp_path, 1)
    assert list_files(tmp_path) == ["a"]


def test_journal_names_nothing_outside_its_directory(tmp_path: Path) -> None:
    """A journal is read from a directory of the user."""
    base = tmp_path / "base"
    write(tmp_path, "a", None)
    base.mkdir()
    for text in ("[]", "{", json.dumps({"../a": 9, str(tmp_path / "a"): 9, "": 9, "b": "9"})):
        (base / lost_steps.JOURNAL).write_text(text)
        lost_steps.set_newer_aside(base, 1)
    assert list_files(tmp_path) == ["a"]


def test_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But nothing is written without a need."""
    write(tmp_path, "a", 9)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    lost_steps.set_newer_aside(tmp_path, 9)
    with pytest.raises(MachineError, match=rf"cannot write {tmp_path}/\.elastic_resume\.json: No space"):
        lost_steps.forget(tmp_path)
