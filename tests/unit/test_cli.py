"""The command line: what is refused before anything starts, and what is shown."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic_resume import cli

TWO = ["--nnodes", "2", "--rdzv-endpoint", "h"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kepe", "3", "train.py"], "unknown flag --kepe. Did you mean --keep"),
        (["--nproc-per-nod=2", "x", "train.py"], None),  # an unambiguous prefix is a flag, as for torchrun
        (["nowhere.py"], "there is no training script 'nowhere.py' in "),
        (["-m", "nowhere.train"], "there is no module 'nowhere' in "),
        (["--no-python", "./nowhere"], "there is no program './nowhere'"),
        (["--keep", "1", "train.py"], "a checkpoint that turns out corrupt leaves nothing to resume from"),
        (["--keep", "many", "train.py"], "keep is 'many'"),
        (["--rdzv-id", "a/b", "train.py"], "run id 'a/b' cannot be the name of a directory"),
        (["--node-name", "a b", "train.py"], "node name 'a b' cannot be the name of a directory"),
        (["--save-every", "often", "train.py"], "save-every is 'often'"),
        (["--resume", "atuo", "train.py"], "Did you mean auto"),
        (["--nnodes", "2", "train.py"], "--rdzv-endpoint HOST,HOST"),
        (["--nnodes", "2", "--standalone", "train.py"], "--standalone means one node"),
        (["--nnodes", "x", "--rdzv-endpoint", "h:1", "train.py"], "x"),
        (["--nnodes", "3:2", "--rdzv-endpoint", "h:1", "train.py"], "--nnodes is '3:2': write N or MIN:MAX"),
        (["--nnodes", "2:1", "train.py"], "--nnodes is '2:1': write N or MIN:MAX"),
        (["--nnodes", "0", "train.py"], "--nnodes is '0': write N or MIN:MAX"),
        (["--nnodes", "1:2:3", "train.py"], "--nnodes is '1:2:3': write N or MIN:MAX"),
        (["--nproc-per-node", "0", "train.py"], "--nproc-per-node comes to 0: a node needs one worker"),
        (["--monitor-interval", "0", "train.py"], "--monitor-interval is 0: write a number of seconds"),
        (["--signals-to-handle", "SIGFOO", "train.py"], "--signals-to-handle names 'SIGFOO'"),
        (["--rdzv-conf", "join_timeout=abc", "train.py"], "--join-timeout is 'abc': write a time"),
        ([*TWO, "--rdzv-backend", "etcd", "train.py"], "--rdzv-backend is 'etcd', and nodes meet in"),
        ([*TWO, "--rdzv-backend", "etcd-v2", "train.py"], "--rdzv-backend is 'etcd-v2'"),
        ([*TWO, "--rdzv-backend", "no-such", "train.py"], "--rdzv-backend is 'no-such'"),
        (["--nnodes", "2", "--node-rank", "-1", "train.py"], "--node-rank is -1"),
        (
            ["--nnodes", "2", "--rdzv-endpoint", "h:xyz", "train.py"],
            "--rdzv-endpoint: 'h:xyz' has no valid port",
        ),
        (["--node-timeout", "soon", "train.py"], "--node-timeout is 'soon': write a time in seconds"),
        (["--node-timeout", "0.1", "train.py"], "from 0.5s to 86400s"),
        (["--join-timeout", "nan", "train.py"], "--join-timeout is 'nan'"),
        (["--settle", "-1", "train.py"], "--settle is '-1'"),
        (
            ["--rdzv-conf", "allow_minority=true", "train.py"],
            "unknown key allow_minority",
        ),
        (["--rdzv-conf", "node_timout=3", "train.py"], "Did you mean node_timeout?"),
        (["--rdzv-token-file", "no.such", "train.py"], "no.such"),
        ([""], "there is no training script '' in "),
        (["x" * 300], "there is no training script 'xxx"),
        (["unreadable.py"], "there is no training script 'unreadable.py' in "),
        (["--resume", "model.pt", "train.py"], "load it into the model and the optimizer before er.resume()"),
        (["--ckpt-dir", "~nobody-at-all", "train.py"], "which cannot be a path here: Could not determine"),
        (["--nproc-per-node", "some", "train.py"], "some"),
        (["--max-restarts", "-1", "train.py"], "max_restarts must be"),
        (["--config", "wrong.yaml", "train.py"], "wrong.yaml:1: unknown key 'kep'. Did you mean keep"),
        ([], "training_script"),
    ],
)
def test_command_line_error_is_one_line_with_exit_code_2(
    words: list[str], said: str | None, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """Nothing is created on disk."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "unreadable.py").touch()
    # To root, as whom tests may run, everything is readable.
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != "unreadable.py" and access(path, mode))
    (tmp_path / "wrong.yaml").write_text("kep: 3\n")
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(["run", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("elastic-resume: error: ")
    assert (said or "") in err
    assert len(err.splitlines()) <= 2
    assert sorted(tmp_path.rglob("*")) == before


def test_run_refuses_invalid_step_mark_variable(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Nothing is created on disk."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ELASTIC_RESUME_STEP_MARK_S", "abc")
    (tmp_path / "train.py").touch()
    assert cli.main(["run", "train.py"]) == 2
    assert "error: ELASTIC_RESUME_STEP_MARK_S is 'abc': write a time" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_unknown_command_exits_with_1(capsys: Any) -> None:
    """The exit code is that of all commands but run, diff and chaos."""
    assert cli.main(["rnu"]) == 1
    assert "invalid choice: 'rnu'" in capsys.readouterr().err


def test_run_help_groups_our_flags_beside_torchruns(capsys: Any) -> None:
    """Our flags are in a group of their own."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "elastic_resume:" in out
    for flag in ("--save-every", "--nproc-per-node", "--rdzv-endpoint", "--node-name"):
        assert flag in out


def test_run_help_prints_on_ascii_terminal(capsys: Any) -> None:
    """A missing character once aborted the whole help text."""
    commands = "run chaos report ls verify export diff doctor status force-quorum"
    for words in ([], *([command] for command in commands.split())):
        with pytest.raises(SystemExit):
            cli.main([*words, "--help"])
        assert capsys.readouterr().out.isascii()


@pytest.mark.parametrize("command", ["report", "ls"])
@pytest.mark.parametrize(("where", "why"), [(">/dev/full", "No space left"), (">&-", "stdout is closed")])
def test_command_reports_failed_output_in_one_line(
    tmp_path: Path, command: str, where: str, why: str
) -> None:
    """A closed or full output is neither a traceback nor a success."""
    run = tmp_path / "job" / "n0"
    run.mkdir(parents=True)
    (run / "events.jsonl").write_text('{"t":1.0,"event":"agent-start","node":"n0","run_id":"job"}\n')
    words = [command, str(run.parent)]
    code = f"import sys; from elastic_resume import cli; sys.exit(cli.main({words}))"
    line = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} {where}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert why in done.stderr


def test_only_run_imports_torch() -> None:
    """The other commands answer at once."""
    code = (
        "import sys; from elastic_resume import cli\n"
        "try: cli.main(['--version'])\n"
        "finally: assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.split()[0]) == (0, "elastic-resume")
