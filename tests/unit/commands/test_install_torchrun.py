"""``elastic-resume install-torchrun``: the file that it writes, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_resume import cli


def test_installed_file_starts_its_python_from_any_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A #! line could hold neither its length nor its spaces. A second installation replaces the first."""
    python = tmp_path / f"it's {'x' * 200}" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    directory = tmp_path / "new" / "bin"
    assert cli.main(["install-torchrun", str(directory)]) == 0
    with open(directory / "torchrun") as running:
        assert cli.main(["install-torchrun", str(directory)]) == 0
        assert running.read() == (directory / "torchrun").read_text()  # not written in place
        assert os.fstat(running.fileno()).st_ino != (directory / "torchrun").stat().st_ino
    assert [path.name for path in directory.iterdir()] == ["torchrun"]
    assert f"export PATH={directory}:$PATH" in capsys.readouterr().out
    path = f"{directory}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["torchrun", "a b", ""], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [str(directory / "torchrun"), "a b", ""]


def test_another_torchrun_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """PyTorch's own in an environment's directory, say; or the directory is none."""
    (tmp_path / "torchrun").write_text("another")
    assert cli.main(["install-torchrun", str(tmp_path)]) == 1
    assert "was not written by install-torchrun" in capsys.readouterr().err
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "torchrun").symlink_to(tmp_path / "nowhere")
    assert cli.main(["install-torchrun", str(tmp_path / "bin")]) == 1
    assert not (tmp_path / "nowhere").exists()
    assert (tmp_path / "torchrun").read_text() == "another"
    assert cli.main(["install-torchrun", str(tmp_path / "torchrun")]) == 1
    assert "cannot be written: " in capsys.readouterr().err
