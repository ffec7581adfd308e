"""Directories of agents that were killed are removed by the next agent, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_resume.agent.temporary_dir import make_temporary_dir
from elastic_resume.errors import MachineError

OWNER = """
import sys
from elastic_resume.agent.temporary_dir import make_temporary_dir
with make_temporary_dir() as path:
    open(path + "/error.json", "w").close()
    print(path, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that owns a directory in ``tmp_path``, and that directory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command, env = [sys.executable, "-c", OWNER], {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        assert path.parent == tmp_path
        yield process, path
        process.kill()


def next_agent_finds(path: Path) -> bool:
    """Return whether ``path`` exists while the next agent runs."""
    with make_temporary_dir():
        return path.exists()


def test_directory_of_killed_agent_is_removed(owner: tuple[subprocess.Popen[str], Path]) -> None:
    """While the agent runs, its directory stays."""
    process, path = owner
    assert next_agent_finds(path)
    process.kill()
    process.wait()
    assert not next_agent_finds(path)
    assert list(path.parent.iterdir()) == []


def test_directories_that_may_have_an_owner_are_kept(
    owner: tuple[subprocess.Popen[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another boot, machine or container; another user; a link; names of another form."""
    process, path = owner
    process.kill()
    process.wait()
    boot, namespace, rest = path.name.removeprefix("elastic_resume_").split("_", 2)
    others = [f"{boot[:-1]}x_{namespace}_{rest}", f"{boot}_{namespace}1_{rest}", f"{boot}_{namespace}_x", "y"]
    for name in others:
        (path.parent / f"elastic_resume_{name}").mkdir()
    link = path.with_name(f"{path.name}x")
    link.symlink_to(path.parent / "elastic_resume_y")
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert next_agent_finds(path)
    assert not next_agent_finds(path)
    assert {entry.name for entry in path.parent.iterdir()} == {
        link.name,
        *(f"elastic_resume_{name}" for name in others),
    }


def test_later_process_with_the_same_pid_is_not_the_owner(tmp_path: Path, owner: tuple[object, Path]) -> None:
    """The start time differs."""
    _, path = owner
    boot, namespace, pid, _, rest = path.name.removeprefix("elastic_resume_").split("_", 4)
    earlier = tmp_path / f"elastic_resume_{boot}_{namespace}_{pid}_1_{rest}"
    earlier.mkdir()
    assert not next_agent_finds(earlier)
    assert path.exists()


def test_no_place_for_temporary_files_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container with a read-only root that is a traceback of Python's own."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "missing")])
    text = (
        r"No usable temporary directory found in .*missing'\]\. Set TMPDIR to a directory that can be written"
    )
    with pytest.raises(MachineError, match=text), make_temporary_dir():
        pass
