"""Test the commands that inspect a run, as a user types them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_resume import constants
from elastic_resume.checkpoint.catalog import Catalog
from elastic_resume.cli import main
from elastic_resume.events import EventLog
from tests.support import checkpoint_samples
from tests.support.checkpoint_samples import RUN


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Create a finished run of two nodes with a checkpoint on each."""
    base = tmp_path / "ckpt"
    for rank, node in enumerate(("node-a", "node-b")):
        node_dir = base / RUN / node
        node_dir.mkdir(parents=True)
        checkpoint_samples.save_checkpoint(node_dir, step=10)
        log = EventLog(node_dir / constants.EVENTS_FILE, node=node, rank=rank)
        about = {"generation": 1, "world_size": 2}
        log.emit("worker-start", step=0, **about)
        if rank == 0:
            log.emit("resume", step=0, kind="cold", nodes=["node-a", "node-b"], recomputed_steps=0, **about)
        log.emit("step", step=1, **about)
        log.emit("run-end", step=10, **about)
        log.close()
    return base


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m elastic_resume``."""
    command = [sys.executable, "-m", "elastic_resume", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("below", [".", RUN])
def test_report_prints_table(root: Path, below: str) -> None:
    """A person gets the table."""
    done = run("report", str(root / below))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Finished at step 10")
    assert done.stdout.splitlines()[3].split() == ["1", "node-a", "node-b", "2", "1-10", "finished", "-", "-"]


def test_report_of_directory_without_events_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says what to give."""
    assert main(["report", str(tmp_path)]) == 1
    assert "no events of a run here; give CKPT_DIR/RUN_ID" in capsys.readouterr().err


def test_report_of_several_runs_names_them(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The user has to choose one."""
    other = root / "other" / "n0"
    other.mkdir(parents=True)
    EventLog(other / constants.EVENTS_FILE).emit("round")
    for newest, older in (("other", RUN), (RUN, "other")):
        for t, name in enumerate((older, newest)):
            for log in (root / name).glob(f"*/{constants.EVENTS_FILE}"):
                os.utime(log, (1e9 + t, 1e9 + t))
        assert main(["report", str(root)]) == 1
        text = f"holds 2 runs; give one of them, newest first: {newest}, {older}."
        assert text in capsys.readouterr().err


@pytest.mark.parametrize("is_set", [False, True])
def test_report_and_ls_without_directory_take_default(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, is_set: bool
) -> None:
    """The one run in the directory that `run` would use is meant."""
    monkeypatch.chdir(root.parent)
    if is_set:
        monkeypatch.setenv(constants.ENV_CKPT_DIR, str(root))
    else:
        monkeypatch.delenv(constants.ENV_CKPT_DIR, raising=False)
        root.rename(root.parent / "checkpoints")
    assert main(["report"]) == 0
    assert capsys.readouterr().out.startswith("Finished at step 10")
    assert main(["ls"]) == 0
    assert "node-b" in capsys.readouterr().out


def test_copied_directories_take_names_from_logs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Logs of two runs are refused."""
    for node in ("node-a", "node-b"):
        log = EventLog(root / RUN / node / constants.EVENTS_FILE, node=node)
        log.emit("agent-start", run_id=RUN)
        log.emit("commit", generation=1, step=10, path=f"/ckpt/{RUN}/{node}/g000001-s0000000010", bytes=9)
        log.close()
    node_b = root / RUN / "node-b"  # where a damaged copy has made room for the same once more
    Catalog(node_b, RUN).quarantine(node_b / "g000001-s0000000010", "torn")
    checkpoint_samples.save_checkpoint(node_b, step=10)
    (root / RUN / "node-a").rename(root / RUN / "copied")
    (root / RUN).rename(root / "last-night")
    assert main(["report", "--json", str(root / "last-night")]) == 0
    records = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(copy["node"], copy["state"], copy["step"]) for copy in records if copy["step"] == 10] == [
        ("node-a", "valid", 10),
        ("node-b", "valid", 10),
        ("node-b", "quarantined", 10),
    ]
    (root / "other" / "n0").mkdir(parents=True)
    other = EventLog(root / "other" / "n0" / constants.EVENTS_FILE, node="n0")
    other.emit("agent-start", run_id="other")
    other.close()
    assert main(["report", str(root / "last-night"), str(root / "other")]) == 1
    assert f"events of 2 runs: '{RUN}' (" in capsys.readouterr().err


def test_inspecting_commands_import_no_torch(root: Path) -> None:
    """`ls`, `verify` and `report` answer in a tenth of the time that torch takes to import."""
    code = (
        "import sys\n"
        "from elastic_resume.cli import main\n"
        f"for command in ('ls', 'verify', 'report'): main([command, {str(root)!r}])\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [["ls"], ["run", "--help"]])
def test_closed_stdout_pipe_is_no_error(root: Path, words: list[str]) -> None:
    """This is ``elastic-resume ls | head -0``."""
    command = [sys.executable, "-m", "elastic_resume", *words, *([str(root)] if words == ["ls"] else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0
