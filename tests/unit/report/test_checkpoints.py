"""Test `ls` and `verify` on whatever a directory may hold."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from elastic_resume import constants
from elastic_resume.checkpoint.catalog import Catalog
from elastic_resume.cli import main
from elastic_resume.errors import UsageError
from elastic_resume.events import EventLog
from elastic_resume.milestone import Milestone
from elastic_resume.report import checkpoints
from elastic_resume.report.formatting import WIDTH
from tests.support import checkpoint_samples
from tests.support.checkpoint_samples import RUN

NOW = 1_700_000_060.5  # a minute after the samples were written


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Create two nodes of one run: node-a with three checkpoints, one of them torn, and node-b with one."""
    base = tmp_path / "ckpt"
    for node, steps in (("node-a", (5, 10, 15)), ("node-b", (10,))):
        (base / RUN / node).mkdir(parents=True)
        for step in steps:
            checkpoint_samples.save_checkpoint(base / RUN / node, step=step)
    os.truncate(base / RUN / "node-a" / "g000001-s0000000015" / constants.STATE_FILE, 7)
    return base


def test_ls_names_milestones_that_count(root: Path) -> None:
    """The one with the lesser metric is kept by --keep alone."""
    catalog = Catalog(root / RUN / "node-a", RUN)
    for step, label in ((5, Milestone("best", 0.75)), (10, Milestone("best", 0.5)), (5, Milestone("eval"))):
        catalog.add_milestone(catalog.list_valid()[step == 5].path, label)
    rows = listed(root)
    assert rows[1][-2:] == ["milestones", "valid"]
    assert [row[6:] for row in rows[3:5]] == [["yes"], ["best 0.75, eval", "yes"]]


def listed(path: Path) -> list[list[str]]:
    """Return the rows of `ls`, split into cells."""
    return [
        re.split(r"\s{2,}", line.strip())
        for line in checkpoints.format_checkpoints(checkpoints.find_node_dirs(path), NOW).splitlines()
    ]


def test_ls_lists_each_checkpoint_with_validity(root: Path) -> None:
    """Each node's newest checkpoint comes first; an invalid one has its reason."""
    assert listed(root) == [
        [f"run {RUN}"],
        ["node", "gen", "step", "world", "size", "age", "valid"],
        ["node-a", "1", "15", *listed(root)[2][3:5], listed(root)[2][5], listed(root)[2][6]],
        ["node-a", "1", "10", "2", "8.98 kB", "60 s", "yes"],
        ["node-a", "1", "5", "2", "8.98 kB", "60 s", "yes"],
        ["node-b", "1", "10", "2", "8.98 kB", "60 s", "yes"],
    ]
    assert listed(root)[2][6].startswith("NO: state.safetensors has 7 bytes of ")


@pytest.mark.parametrize(("level", "below"), [("root", "."), ("run", RUN), ("node", f"{RUN}/node-a")])
def test_path_of_any_level_is_recognized(root: Path, level: str, below: str) -> None:
    """The contents tell root, run and node apart."""
    found = checkpoints.find_node_dirs(root / below)
    assert found.level == level
    assert "node-a" in {item.node for item in checkpoints.list_checkpoints(found)}


def test_root_with_several_runs_has_a_table_for_each(root: Path) -> None:
    """All runs under the root are listed."""
    (root / "other" / "node-c").mkdir(parents=True)
    checkpoint_samples.save_checkpoint(root / "other" / "node-c", step=3)
    text = checkpoints.format_checkpoints(checkpoints.find_node_dirs(root), NOW)
    assert text.index("run other") < text.index(f"run {RUN}")
    # Its manifest is one of run-1: a job named `other` would refuse it.
    assert "NO: belongs to the run 'run-1', not to 'other'" in text


def test_copied_node_directory_is_valid_under_any_name(root: Path, tmp_path: Path) -> None:
    """No job resumes from a backup, so its name is free."""
    backup = tmp_path / "backup"
    (root / RUN / "node-b").rename(backup)
    assert [item.state for item in checkpoints.list_checkpoints(checkpoints.find_node_dirs(backup))] == [
        "valid"
    ]


def test_quarantined_checkpoints_are_listed_with_reason(root: Path) -> None:
    """They are no checkpoints, but their reason is shown."""
    node = root / RUN / "node-a"
    bad = node / "g000001-s0000000015"
    Catalog(node, RUN).quarantine(bad, f"{bad}: state.safetensors is torn.")
    item = list(checkpoints.list_checkpoints(checkpoints.find_node_dirs(node)))[-1]
    assert (item.state, item.step, item.reason) == ("quarantined", 15, "state.safetensors is torn")
    assert listed(node)[-2][-1] == "quarantined: state.safetensors is torn"
    long = "given up: " + "a state that is newer than where the job went back to, " * 3 + "by --resume-from 5"
    Catalog(node, RUN).quarantine(node / "g000001-s0000000010", long)
    said = checkpoints.format_checkpoints(checkpoints.find_node_dirs(node), NOW)
    assert long in " ".join(said.split()), "no reason is cut before its end"
    said = checkpoints.format_checkpoints(checkpoints.find_node_dirs(root), NOW).splitlines()[-1]
    assert re.fullmatch(
        r"2 quarantined checkpoints, \S+ k?B: kept for inspection; runs never remove them", said
    )


def test_deep_check_finds_flipped_bit_that_quick_check_misses(root: Path) -> None:
    """A flipped bit keeps every size."""
    node = root / RUN / "node-b"
    checkpoint_samples.flip_bits(node / "g000001-s0000000010" / constants.STATE_FILE, -3)
    assert [item.state for item in checkpoints.list_checkpoints(checkpoints.find_node_dirs(node))] == [
        "valid"
    ]
    (item,) = checkpoints.list_checkpoints(checkpoints.find_node_dirs(node), deep=True)
    assert item.state == "bad"
    assert "do not match their digest" in item.reason


def test_single_checkpoint_path_is_checked(root: Path) -> None:
    """A good and a bad checkpoint are reported."""
    node = root / RUN / "node-a"
    (good,) = checkpoints.list_checkpoints(checkpoints.find_node_dirs(node / "g000001-s0000000010"))
    (bad,) = checkpoints.list_checkpoints(checkpoints.find_node_dirs(node / "g000001-s0000000015"))
    assert (good.state, good.node, good.run_id) == ("valid", "node-a", RUN)
    assert (bad.state, bad.step) == ("bad", 15)


@pytest.mark.parametrize("deep", [[], ["--deep"]])
def test_verify_exits_1_if_a_checkpoint_is_bad(
    root: Path, capsys: pytest.CaptureFixture[str], deep: list[str]
) -> None:
    """Each checkpoint gets a line; the exit code is for scripts."""
    assert main(["verify", *deep, str(root)]) == 1
    out = capsys.readouterr().out
    assert "ok   run-1/node-a/g000001-s0000000010" in out
    assert "BAD  run-1/node-a/g000001-s0000000015: state.safetensors has 7 bytes" in out
    assert "3 valid, 1 bad" in out
    assert main(["verify", *deep, str(root / RUN / "node-b")]) == 0


def test_verify_without_checkpoints_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistyped path must not look verified."""
    assert main(["verify", str(tmp_path)]) == 1
    assert "no checkpoints here" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "typo")]) == 1
    assert "No such file" in capsys.readouterr().err


def test_verify_ignores_quarantined_checkpoints(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise a directory would stay bad for ever."""
    node = root / RUN / "node-a"
    Catalog(node, RUN).quarantine(node / "g000001-s0000000015", "torn")
    assert main(["verify", str(root)]) == 0
    assert "aside run-1/node-a/quarantine/g000001-s0000000015: torn" in capsys.readouterr().out


def test_unexpected_contents_are_reported_or_ignored(root: Path) -> None:
    """Files, links, pipes and foreign directories may lie anywhere."""
    node = root / RUN / "node-a"
    (node / "g000002-s0000000001").mkdir()
    (node / "g000002-s0000000002").write_text("a file")
    (node / "g000002-s0000000003").symlink_to(node)
    odd = node / "g000002-s0000000004"
    odd.mkdir()
    (odd / constants.MANIFEST_FILE).write_bytes(Random(1).randbytes(500))
    os.mkfifo(odd / constants.STATE_FILE)
    loop = root / RUN / "loop"
    loop.symlink_to(loop)
    (root / "notes.txt").write_text("hello")
    (root / "empty").mkdir()
    (root / RUN / "\x1b[2J").mkdir()
    (node / "quarantine").write_text("a file")
    found = {
        item.path.name: item
        for item in checkpoints.list_checkpoints(checkpoints.find_node_dirs(root))
        if item.generation == 2
    }
    assert set(found) == {f"g000002-s000000000{step}" for step in (1, 3, 4)}
    for name in ("g000002-s0000000001", "g000002-s0000000003"):
        assert found[name].reason == "manifest.json is missing"
    assert found["g000002-s0000000004"].reason == "manifest: not JSON"
    assert all(
        len(line) <= WIDTH
        for line in checkpoints.format_checkpoints(checkpoints.find_node_dirs(root), NOW).splitlines()
    )


@pytest.mark.parametrize("path", ["", "typo", "file", "loop", "nul\0"])
def test_path_that_is_no_directory_is_refused(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is one line; the empty path is the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    if path:
        with pytest.raises(UsageError, match=re.escape(path.rstrip("\0"))):
            checkpoints.find_node_dirs(tmp_path / path)
    else:
        assert checkpoints.find_node_dirs(Path(path)).node_dirs == ()


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A directory that others may enter: every pytest that starts takes that right from where its own lie."""
    # The temporary directory may be one that only its owner enters.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as path:
        Path(path).chmod(0o755)
        yield Path(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without rights")
@pytest.mark.parametrize("closed", ["", RUN, f"{RUN}/node-a"])
def test_commands_name_directory_without_permission(root: Path, elsewhere: Path, closed: str) -> None:
    """Each command ends with one line, also for a path below the closed directory."""
    root = Path(shutil.move(root, elsewhere))
    (root / closed).chmod(0o700)
    node_dir = root / RUN / "node-a"
    commands = [[command, str(node_dir)] for command in ("ls", "verify", "report")]
    if closed == f"{RUN}/node-a":
        commands += [["report", str(root / RUN)]]
    code = (
        "import os\n"
        "from elastic_resume.cli import main\n"
        "from elastic_resume.commands import doctor, job_status, run_directory\n"
        "os.setgid(65534); os.setuid(65534)\n"
        f"for command in {commands!r}: assert main(command) == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    line = (
        f"elastic-resume: error: {node_dir}: cannot be read: Permission denied. Run this command as the user"
    )
    assert done.stderr.count(line) == len(commands), done.stderr
    assert len(done.stderr.splitlines()) == len(commands)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without rights")
@pytest.mark.parametrize("mode", [0o000, 0o600, 0o400])
def test_unreadable_directory_is_reported(root: Path, elsewhere: Path, mode: int) -> None:
    """Another user's directory gets a line with the reason, and exit code 1."""
    root = Path(shutil.move(root, elsewhere))
    for node in ("node-a", "node-b"):
        EventLog(root / RUN / node / constants.EVENTS_FILE, node=node).emit("step", step=1)
    (root / RUN / "node-a").chmod(mode)
    code = (
        "import contextlib, io, os, sys\n"
        "from elastic_resume.cli import main\n"
        # Python itself may lie where that user cannot read: import everything before.
        f"with contextlib.redirect_stdout(io.StringIO()): main(['verify', {str(root / RUN / 'node-b')!r}])\n"
        "os.setgid(65534); os.setuid(65534)\n"
        f"main(['report', {str(root / RUN)!r}])\n"
        "print('of the report', file=sys.stderr)\n"
        f"main(['ls', {str(root)!r}]); sys.exit(main(['verify', {str(root)!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "node-a" in done.stdout
    assert "Permission denied" in done.stdout
    assert "node-b/g000001-s0000000010" in done.stdout
    of_report, others = done.stderr.split("of the report\n")
    assert f"{root / RUN / 'node-a'}: left out: cannot be read: Permission denied" in of_report
    assert not others
