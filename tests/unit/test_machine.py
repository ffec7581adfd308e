"""What a folder may still take: of a volume whose limit nobody but the environment tells, and /dev/shm."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from elastic_resume import constants, machine
from elastic_resume.errors import ConfigError


def test_a_volumes_limit_counts_what_lies_in_it(tmp_path: Path) -> None:
    """Each file once, in blocks of the disk; folders elsewhere are not the volume's."""
    environ = {constants.ENV_CKPT_DIR: str(tmp_path), constants.ENV_CKPT_LIMIT: "10Mi"}
    node = tmp_path / "job" / "node"
    node.mkdir(parents=True)
    (node / "state").write_bytes(b"x" * (4 << 20))
    os.link(node / "state", node / "again")
    (node / "elsewhere").symlink_to("/")
    assert machine.free_disk_bytes(node, environ) == 6 << 20
    (node / "more").write_bytes(b"x" * (7 << 20))
    assert machine.free_disk_bytes(node, environ) == 0
    assert machine.free_disk_bytes(Path("/"), environ) > 10 << 20


def test_without_a_limit_the_file_system_tells(tmp_path: Path) -> None:
    """As a memory emptyDir does, which is a tmpfs of its size."""
    assert abs(machine.free_disk_bytes(tmp_path, {}) - shutil.disk_usage(tmp_path).free) < 64 << 20


def test_a_limit_that_is_no_size_is_an_error(tmp_path: Path) -> None:
    """It names the variable."""
    with pytest.raises(ConfigError, match=constants.ENV_CKPT_LIMIT):
        machine.free_disk_bytes(tmp_path, {constants.ENV_CKPT_LIMIT: "lots"})


def test_too_little_shared_memory_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's default has 64 MB."""
    assert machine.check_shared_memory(tmp_path) == ""
    assert "medium: Memory" in machine.check_shared_memory(tmp_path / "none")
    monkeypatch.setattr(machine, "MIN_SHARED_MEMORY_BYTES", 1 << 62)
    assert "--shm-size" in machine.check_shared_memory(tmp_path)


@pytest.mark.parametrize("version", [1, 2])
def test_small_limit_of_processes_is_described(version: int, tmp_path: Path) -> None:
    """The limit of an ancestor counts; the root has none."""
    proc, mount = tmp_path / "proc/self", tmp_path / "groups"
    pod, task = mount / "pod", mount / "pod/task"
    for directory in (proc, task):
        directory.mkdir(parents=True)
    kind = ("cgroup", "rw,pids") if version == 1 else ("cgroup2", "rw")
    (proc / "mountinfo").write_text(f"35 31 0:32 / {mount} rw - {kind[0]} {kind[0]} {kind[1]}\n")
    (proc / "cgroup").write_text("8:pids:/pod/task\n" if version == 1 else "0::/pod/task\n")
    for directory, used, limit in ((task, 7, "max"), (pod, 30, "61"), (mount, 900, "max")):
        (directory / "pids.current").write_text(f"{used}\n")
        (directory / "pids.max").write_text(f"{limit}\n")
        (directory / "pids.events").write_text("max 4\n" if directory == pod else "max 0\n")
    own = machine.ProcessLimit.find_own(tmp_path / "proc")
    assert own is not None
    assert (own.directory, own.read_usage(), own.read_refusals()) == (task, (30, 61), 4)
    assert own.describe_shortage(0) == ""
    assert own.describe_shortage(1).startswith("the control group of 30 processes and threads may have 61 (")
    (pod / "pids.max").unlink()
    assert own.describe_shortage(1000) == ""
