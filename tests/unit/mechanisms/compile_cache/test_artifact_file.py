"""Test that artifacts come back as they were written, and that no foreign or damaged file is code for us."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_resume import constants
from elastic_resume.errors import CorruptError
from elastic_resume.mechanisms.compile_cache import artifact_file
from elastic_resume.mechanisms.compile_cache.artifact_file import ArtifactFile, Origin

HERE = Origin.here("job")
ARTIFACTS = bytes(range(256)) * 20


@pytest.fixture(name="written")
def write(tmp_path: Path) -> ArtifactFile:
    """A file of this job."""
    file = ArtifactFile(tmp_path, 0, HERE)
    file.write(ARTIFACTS)
    return file


def test_artifacts_come_back_and_are_private(tmp_path: Path, written: ArtifactFile) -> None:
    """A second write replaces the first one, and removes what a killed process has left."""
    assert ArtifactFile(tmp_path, 0, HERE).read() == ARTIFACTS
    assert ArtifactFile(tmp_path, 1, HERE).read() is None
    assert written.path.stat().st_mode & 0o777 == 0o600
    (written.path.parent / f"{constants.TEMPORARY_PREFIX}rank0-1-ab").write_bytes(b"half")
    other = written.path.parent / f"{constants.TEMPORARY_PREFIX}rank1-1-ab"
    other.write_bytes(b"of another rank, which may be writing it")
    written.write(b"newer")
    assert written.read() == b"newer"
    assert sorted(path.name for path in written.path.parent.iterdir()) == [other.name, "rank0"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("job", "another"),
        ("torch", "2.9.0 abc"),
        ("python", "CPython 3.9.1"),
        ("processor", "x86_64 AVX2 0"),
        ("gpu", "H200"),
    ],
)
def test_file_of_another_origin_is_refused(written: ArtifactFile, field: str, value: str) -> None:
    """A node's directory may be a copy, and torch may be another one since."""
    origin = replace(HERE, **{field: value})
    with pytest.raises(CorruptError, match=f"its {field} is '.*', and here it is '{value}'"):
        ArtifactFile(written.path.parents[1], 0, origin).read()
    assert origin.digest != HERE.digest


def flip_a_bit(path: Path) -> None:
    """Change a byte of the artifacts."""
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def let_others_write(path: Path) -> None:
    """As a careless chmod does."""
    path.chmod(0o660)


def replace_by_fifo(path: Path) -> None:
    """To read it would wait for ever."""
    path.unlink()
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (flip_a_bit, "damaged: its digest"),
        (
            lambda path: os.truncate(path, path.stat().st_size - 1),
            "it is damaged: it has 5119 bytes, not 5120",
        ),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "it is damaged: it has 5121 bytes"),
        (lambda path: os.truncate(path, 0), "first line"),
        (lambda path: path.write_bytes(b"[" * 100_000), "first line"),
        (lambda path: path.write_bytes(b'{"format": 1}\n'), "its job is 'None'"),
        (let_others_write, "may write to it"),
        (replace_by_fifo, "no regular file"),
    ],
)
def test_damaged_file_is_refused(written: ArtifactFile, damage: Callable[[Path], None], error: str) -> None:
    """It is code, so no byte of it may be another one."""
    damage(written.path)
    with pytest.raises(CorruptError, match=error):
        written.read()


def test_file_that_is_too_large_is_refused_unread(
    written: ArtifactFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size is looked at first."""
    monkeypatch.setattr(artifact_file, "MAX_BYTES", 100)
    monkeypatch.setattr(artifact_file, "MAX_HEADER_BYTES", 1000)
    with pytest.raises(CorruptError, match="too much"):
        written.read()


def test_link_and_file_of_another_user_are_refused(
    written: ArtifactFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write into the directory could name any file."""
    moved = written.path.rename(written.path.with_name("moved"))
    written.path.symlink_to(moved)
    with pytest.raises(OSError, match="symbolic"):
        written.read()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    moved.rename(written.path)
    with pytest.raises(CorruptError, match="another user owns it"):
        written.read()


def test_processors_that_execute_the_same_are_equal(tmp_path: Path) -> None:
    """Their flags count, in any order, and not their clocks."""
    texts = ["MHz : 1\nflags\t\t: avx2 amx\n", "MHz : 2\nflags : amx avx2\n", "MHz : 1\nflags : avx2\n", ""]
    digests = []
    for text in texts:
        (tmp_path / "cpuinfo").write_text(text)
        digests.append(artifact_file._digest_processor_flags(tmp_path / "cpuinfo"))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
    assert artifact_file._digest_processor_flags(tmp_path / "none") == digests[3] == "unknown"
