"""Test commits and ownership with real processes, real kills and a full disk."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_resume import constants, failpoints
from elastic_resume.checkpoint.catalog import Catalog
from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.checkpoint.reader import checkpoint_name
from elastic_resume.errors import MachineError, NodeLockedError, UsageError
from tests.support.checkpoint_samples import RUN, save_checkpoint
from tests.support.paths import ROOT

POINTS = [
    "commit.before-data",
    "commit.after-data",
    "commit.before-manifest",
    "commit.before-rename",
    "commit.after-rename",
]
SAVE = """
import sys
from pathlib import Path
from tests.support.checkpoint_samples import save_checkpoint
save_checkpoint(Path(sys.argv[1]), 1, 3)
"""


def python(code: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Start a Python process that can import the samples."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
    )


@pytest.mark.parametrize("point", POINTS)
def test_kill_during_commit_leaves_whole_checkpoints_only(tmp_path: Path, point: str) -> None:
    """Everything under a final name is whole, and `remove_unfinished` removes the rest."""
    for step in (1, 2):
        save_checkpoint(tmp_path, 1, step)
    with python(SAVE, str(tmp_path), **{constants.ENV_FAILPOINTS: f"{point}=kill"}) as process:
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    catalog = Catalog(tmp_path, RUN)
    steps = [3, 2, 1] if point == "commit.after-rename" else [2, 1]
    entries = catalog.list_entries(read_data=True)
    assert [(entry.step, entry.error) for entry in entries] == [(step, None) for step in steps]
    assert len(catalog.remove_unfinished()) == (point not in {"commit.before-data", "commit.after-rename"})
    assert {path.name for path in tmp_path.iterdir()} == {checkpoint_name(1, step) for step in steps}


@pytest.mark.parametrize("point", POINTS)
def test_error_during_commit_removes_temporary_directory(
    tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failing device raises MachineError."""
    save_checkpoint(tmp_path, 1, 2)
    monkeypatch.setenv(constants.ENV_FAILPOINTS, f"{point}=raise")
    failpoints.arm()
    try:
        with pytest.raises(MachineError, match="cannot commit") as caught:
            save_checkpoint(tmp_path, 1, 3)
    finally:
        monkeypatch.delenv(constants.ENV_FAILPOINTS)
        failpoints.arm()
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EIO
    steps = [3, 2] if point == "commit.after-rename" else [2]
    assert [entry.step for entry in Catalog(tmp_path, RUN).list_valid(read_data=True)] == steps
    assert len(list(tmp_path.iterdir())) == len(steps)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a file system of 256 KiB."""
    mounted = tmp_path / "small"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mounted)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs root")
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True)


def test_full_disk_raises_machine_error_and_keeps_older_checkpoints(small_disk: Path) -> None:
    """The failed commit leaves nothing behind, and pruning makes room again."""
    steps = iter(range(1, 100))
    with pytest.raises(MachineError, match="No space left on device; free space there") as caught:
        all(save_checkpoint(small_disk, 1, step) for step in steps)
    step = next(steps) - 1
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert str(small_disk) in str(caught.value)
    catalog = Catalog(small_disk, RUN)
    assert [entry.step for entry in catalog.list_valid(read_data=True)] == list(range(step - 1, 0, -1))
    assert len(list(small_disk.iterdir())) == step - 1
    assert len(catalog.prune(2)) == step - 3
    save_checkpoint(small_disk, 1, step)
    assert [entry.step for entry in catalog.list_valid(read_data=True)] == [step, step - 1, step - 2]


def test_ensure_free_space_reports_needed_and_free_bytes(small_disk: Path) -> None:
    """It fails as well where no file can be created."""
    node = NodeDir(small_disk)
    node.ensure_free_space(100_000)
    with pytest.raises(MachineError, match=r"5 GB are needed and \d+ kB are free; free space"):
        node.ensure_free_space(5_000_000_000)
    with contextlib.suppress(OSError), open(small_disk / "filler", "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    with pytest.raises(MachineError, match=r"cannot (create|write) .*No space left"):
        node.ensure_free_space(0)
    assert not list(small_disk.glob(".tmp-*"))


HOLD = """
import sys
from pathlib import Path
from elastic_resume.checkpoint.node_dir import NodeDir
node = NodeDir.claim(Path(sys.argv[1]), "run-1", "a")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that owns the node's directory."""
    with python(HOLD, str(tmp_path), "first-owner") as process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_claim_names_present_owner(tmp_path: Path, owner: subprocess.Popen[str]) -> None:
    """The error has process, host, command and advice; a kill of the owner frees the directory."""
    with pytest.raises(NodeLockedError) as caught:
        NodeDir.claim(tmp_path, RUN, "a", timeout_s=0.05)
    text = str(caught.value)
    assert f"node name 'a' is taken: {tmp_path / RUN / 'a'}" in text
    assert f"held by process {owner.pid} on host {os.uname().nodename} since 20" in text
    assert "first-owner" in text
    assert "another name: ELASTIC_RESUME_NODE_NAME" in text
    with NodeDir.claim(tmp_path, RUN, "b", timeout_s=0):
        pass
    owner.kill()
    with NodeDir.claim(tmp_path, RUN, "a", timeout_s=10):
        record = json.loads((tmp_path / RUN / "a" / constants.LOCK_OWNER_FILE).read_text())
        assert record["pid"] == os.getpid()


def test_second_claim_by_owner_is_usage_error(tmp_path: Path) -> None:
    """After the release it may claim again."""
    node = NodeDir.claim(tmp_path, RUN, "a")
    (tmp_path / "link").symlink_to(tmp_path)
    for root in (tmp_path, tmp_path / "link"):
        with pytest.raises(
            UsageError, match=r"already resumed job 'run-1' under .* 'a'; call run\.close\(\)"
        ):
            NodeDir.claim(root, RUN, "a", timeout_s=3600)
    assert NodeDir.attach(tmp_path, RUN, "a").path == node.path
    node.release()
    node.release()
    NodeDir.claim(tmp_path, RUN, "a", timeout_s=0).release()


@pytest.mark.usefixtures("owner")
def test_claim_reports_unknown_owner_if_its_record_is_damaged(tmp_path: Path) -> None:
    """The lock decides, not the record."""
    (tmp_path / RUN / "a" / constants.LOCK_OWNER_FILE).write_bytes(b"\xff not json")
    with pytest.raises(NodeLockedError, match=r"process \?"):
        NodeDir.claim(tmp_path, RUN, "a", timeout_s=0.05)


def run_in_fork(action: Callable[[], object]) -> None:
    """Run ``action`` in a forked child and require that it succeeds."""
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            action()
            code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def is_taken(tmp_path: Path) -> bool:
    """Return whether another process finds the directory owned."""
    with python(HOLD, str(tmp_path)) as other:
        _, err = other.communicate(timeout=60)
    return "NodeLockedError" in err


@pytest.mark.slow
def test_forked_child_cannot_release_lock(tmp_path: Path) -> None:
    """DataLoader workers are forks, which share the flock."""
    with NodeDir.claim(tmp_path, RUN, "a") as node:
        run_in_fork(lambda: None)
        assert is_taken(tmp_path)
        run_in_fork(node.release)
        assert is_taken(tmp_path)
        with pytest.raises(UsageError):
            NodeDir.claim(tmp_path, RUN, "a")


def test_release_works_while_forked_child_lives(tmp_path: Path) -> None:
    """The child has the lock's file open too."""
    with NodeDir.claim(tmp_path, RUN, "a") as node:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
        node.release()
        assert not is_taken(tmp_path)
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)


def test_file_in_place_of_directory_is_machine_error(tmp_path: Path) -> None:
    """The error has the path and advice."""
    (tmp_path / "ckpt").write_text("a file")
    with pytest.raises(MachineError, match=r"cannot .*ckpt.*: Not a directory; .*another --ckpt-dir"):
        NodeDir.claim(tmp_path / "ckpt", RUN, "a")


@pytest.mark.parametrize("mode", [0o555, 0o444], ids=["not to be written", "not to be entered"])
def test_directory_without_permission_is_machine_error(tmp_path: Path, mode: int) -> None:
    """Another user tries, because root may write anywhere."""
    code = """
import os, sys
from pathlib import Path
from elastic_resume.errors import MachineError
from elastic_resume.checkpoint.node_dir import NodeDir
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    NodeDir.claim(Path(sys.argv[1]), "run-1", "a")
except MachineError as error:
    print(error)
"""
    directory = tmp_path / "ckpt"
    directory.mkdir(mode=mode)
    for parent in [tmp_path, *list(tmp_path.parents)[:3]]:
        if parent.owner() == tmp_path.owner():
            parent.chmod(parent.stat().st_mode | 0o011)
    with python(code, str(directory)) as process:
        out, err = process.communicate()
    assert "Permission denied; give this user write permission there" in out, err
