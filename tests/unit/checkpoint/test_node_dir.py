"""Test the small records of a node's directory, and moving an earlier run aside."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_resume import constants
from elastic_resume.checkpoint import dir_lock, node_dir
from elastic_resume.checkpoint.atomic_io import Disk, temporary_name
from elastic_resume.checkpoint.catalog import scan_run
from elastic_resume.checkpoint.node_dir import COMMITTED_FILE, MOVED_ASIDE_FILE, NodeDir
from elastic_resume.errors import ConfigError, MachineError, NodeFileError, NodeLockedError
from tests.support.checkpoint_samples import RUN, save_checkpoint


def test_earlier_run_is_moved_aside_once_per_launcher(tmp_path: Path) -> None:
    """Generation and identity stay. Nodes share an old run's directory; each takes the first free number."""
    for name in ("a", "b"):
        with NodeDir.claim(tmp_path, RUN, name) as node:
            node.persist_generation(3)
            identity = node.read_identity()
            for launcher, step in (("7 1.5", 1), ("7 1.5", 2), ("8 9.5", 3)):
                save_checkpoint(node.path, 3, step)
                (node.path / constants.EVENTS_FILE).write_text("x")
                node.move_earlier_run_aside(launcher)
            assert (node.read_generation(), node.read_identity()) == (3, identity)
            assert not (node.path / constants.EVENTS_FILE).exists()
        moved = [scan_run(tmp_path / f"{RUN}.old-{n}", RUN)[name] for n in (1, 2)]
        assert [[entry.step for entry in entries] for entries in moved] == [[1], [3, 2]]
        assert [entry.error for entries in moved for entry in entries] == [None] * 3
    node.move_earlier_run_aside()  # an agent, without a record
    assert not (node.path / MOVED_ASIDE_FILE).exists()


def test_move_aside_leaves_nothing_behind_without_an_earlier_run(tmp_path: Path) -> None:
    """A temporary file may be that of a live writer, and is no run."""
    with NodeDir.claim(tmp_path, RUN, "a") as node:
        unfinished = node.path / temporary_name("x")
        unfinished.write_text("x")
        node.move_earlier_run_aside()
        assert [path.name for path in tmp_path.iterdir()] == [RUN]
        save_checkpoint(node.path, 1, 1)
        node.move_earlier_run_aside()
        assert unfinished.exists()


def test_move_aside_is_durable_before_it_is_recorded(tmp_path: Path) -> None:
    """After a power cut a recorded launcher would continue from what it should have moved."""
    calls = []

    class ListingDisk(Disk):
        def rename(self, source: Path, target: Path) -> None:
            super().rename(source, target)
            calls.append(("rename", target.relative_to(tmp_path).parts[0]))

        def sync_dir(self, path: Path) -> None:
            super().sync_dir(path)
            calls.append(("sync", os.path.relpath(path, tmp_path).split("/")[0]))

    node = NodeDir.attach(tmp_path, RUN, "a")
    save_checkpoint(node.path, 1, 1)
    NodeDir(node.path, ListingDisk()).move_earlier_run_aside("7")
    old = f"{RUN}.old-1"
    assert calls[calls.index(("rename", old)) :] == [
        ("rename", old),
        ("sync", old),
        ("sync", RUN),
        ("rename", RUN),  # the record
        ("sync", RUN),
    ]


def test_owner_holds_one_descriptor(tmp_path: Path) -> None:
    """A failed claim, a release and a probe of the disk leave none."""

    def count() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    before = count()
    with NodeDir.claim(tmp_path, RUN, "a") as node:
        assert count() == before + 1
        node.ensure_free_space(0)
        assert count() == before + 1
    assert count() == before
    assert not list(node.path.glob(".tmp-*"))


def test_release_unlocks_though_another_process_has_the_file(tmp_path: Path) -> None:
    """A process that a library forks inherits it until its exec."""
    node = NodeDir.claim(tmp_path, RUN, "a")
    descriptor = dir_lock._locks[node.path.resolve()]._descriptor
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[descriptor]):
        node.release()
        NodeDir.claim(tmp_path, RUN, "a", timeout_s=0).release()


@pytest.mark.parametrize(
    ("limit", "text"), [("1Mi", "of the volume's 1.05 MB are free"), ("", r"kB|B are f")]
)
def test_too_little_space_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, text: str
) -> None:
    """It names the volume's limit, if there is one."""
    monkeypatch.setenv(constants.ENV_CKPT_DIR, str(tmp_path))
    monkeypatch.setenv(constants.ENV_CKPT_LIMIT, limit)
    node = NodeDir.attach(tmp_path, RUN, "a")
    node.ensure_free_space(1000)
    with pytest.raises(MachineError, match=text):
        node.ensure_free_space(1 << 60)


@pytest.mark.parametrize("generation", [-1, 1 << 60])
def test_impossible_generation_is_not_persisted(tmp_path: Path, generation: int) -> None:
    """It could not be read back."""
    with pytest.raises(ValueError, match="out of range"):
        NodeDir.attach(tmp_path, RUN, "a").persist_generation(generation)


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ('{"pid": 7, "since": 0}', "process 7 on host ? since 1970-01-01 00:00:00 UTC (command unknown)"),
        ('{"pid": 7, "since": "x", "command": "c"}', "process 7 on host ? (c)"),
        ('{"since": 1e300}', "process ? on host ? (command unknown)"),
        ("[]", "process ? on host ? (command unknown)"),
    ],
)
def test_taken_node_is_reported_whatever_its_record_says(tmp_path: Path, record: str, text: str) -> None:
    """The lock decides, not the record."""
    path = NodeDir.attach(tmp_path, RUN, "a").path
    with open(path / constants.LOCK_FILE, "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        (path / constants.LOCK_OWNER_FILE).write_text(record)
        with pytest.raises(NodeLockedError, match=re.escape(text)):
            NodeDir.claim(tmp_path, RUN, "a", timeout_s=0)


@pytest.mark.parametrize("text", ["{", "[]", '{"launcher_id": 7, "words": []}', '{"launcher_id": "7"}'])
def test_damaged_script_arguments_are_unknown(tmp_path: Path, text: str) -> None:
    """They are for a report only."""
    (tmp_path / node_dir.SCRIPT_ARGUMENTS_FILE).write_text(text)
    assert node_dir.read_script_arguments(tmp_path) == ("", [])


@pytest.mark.parametrize(
    "text", ["", "[]", "[" * 4000, "{}", "\0" * 46, "\xff", '{"id": 3, "launcher_id": 7}']
)
def test_damaged_record_is_deterministic_error(tmp_path: Path, text: str) -> None:
    """A guess could let an outdated node take part, or move away what this start has saved."""
    node = NodeDir.attach(tmp_path, RUN, "a")
    read_by_name: dict[str, Callable[[], object]] = {
        constants.IDENTITY_FILE: lambda: NodeDir.claim(tmp_path, RUN, "a", timeout_s=0),
        constants.GENERATION_FILE: lambda: node.persist_generation(9),
        MOVED_ASIDE_FILE: lambda: node.move_earlier_run_aside("7"),
    }
    for name, read in read_by_name.items():
        (node.path / name).write_bytes(text.encode("latin-1"))
        for _ in range(2):  # a failed claim releases the lock
            with pytest.raises(
                NodeFileError, match=rf"{name}: is damaged.* remove the file|Remove"
            ) as caught:
                read()
            assert caught.value.is_deterministic
    (node.path / constants.IDENTITY_FILE).unlink()
    NodeDir.claim(tmp_path, RUN, "a", timeout_s=0).release()


def test_generation_of_run_is_that_of_its_newest_node(tmp_path: Path) -> None:
    """A job that starts again on other machines goes on counting; a damaged file is left out."""
    for name, generation in (("a", 7), ("b", 3), ("c", 9)):
        NodeDir.attach(tmp_path, RUN, name).persist_generation(generation)
    (tmp_path / RUN / "c" / constants.GENERATION_FILE).write_text("damaged")
    fresh = NodeDir.attach(tmp_path, RUN, "d")
    assert (fresh.read_generation(), fresh.read_generation_of_run()) == (0, 7)


def test_identity_and_generation_last(tmp_path: Path) -> None:
    """All owners read the same identity; the generation never decreases."""
    node = NodeDir.attach(tmp_path, RUN, "a")
    assert (node.read_identity(), node.read_generation()) == ("", 0)
    identities = []
    for path in (tmp_path, tmp_path, tmp_path / "other-host"):
        with NodeDir.claim(path, RUN, "a") as owned:
            identities.append(owned.read_identity())
    assert identities[0] == identities[1] == node.read_identity() != identities[2]
    assert [node.persist_generation(g) for g in (3, 2, 3, 5)] == [3, 3, 3, 5]
    assert NodeDir.attach(tmp_path, RUN, "a").read_generation() == 5


@pytest.mark.parametrize("name", ["../up", "", "a/b", ".hidden", "-rf", "x" * 129, "a\n"])
def test_unsafe_name_is_refused_before_directory_is_created(tmp_path: Path, name: str) -> None:
    """Names become directories and occur in shell commands."""
    for run_id, node in ((name, "a"), ("ok", name)):
        with pytest.raises(ConfigError, match="cannot be the name of a directory"):
            NodeDir.claim(tmp_path / "ckpt", run_id, node)
    assert list(tmp_path.iterdir()) == []


def test_failing_move_is_an_error_that_names_the_directory(tmp_path: Path) -> None:
    """The node's directory may be a file system of its own."""

    class OtherDevice(Disk):
        def rename(self, source: Path, target: Path) -> None:
            raise MachineError(f"cannot rename {source} to {target}: Invalid cross-device link.")

    (tmp_path / RUN / "a").mkdir(parents=True)
    node = NodeDir(tmp_path / RUN / "a", OtherDevice())
    save_checkpoint(node.path, 1, 1)
    with pytest.raises(MachineError, match=r"--resume never could not.*cross-device.*Or move .*/a elsewhere"):
        node.move_earlier_run_aside()


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


def test_first_start_needs_inodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them the agent would try for ever to record its first view. A later start replaces files."""

    def few(_: object) -> Any:
        return SimpleNamespace(f_files=1000, f_favail=7)

    monkeypatch.setattr(os, "statvfs", few)
    with pytest.raises(MachineError, match=r"takes 7 more files, and a run needs 16 at least \(df -i "):
        NodeDir.claim(tmp_path, "job", "a")
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_files=0, f_favail=0))  # btrfs
    NodeDir.claim(tmp_path, "job", "a").release()
    monkeypatch.setattr(os, "statvfs", few)
    NodeDir.claim(tmp_path, "job", "a").release()
