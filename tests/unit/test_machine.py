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
