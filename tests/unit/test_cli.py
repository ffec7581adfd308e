"""The command line: what is refused before anything starts, and what is shown."""

from __future__ import annotations

import argparse
import contextlib
import os
import py_compile
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from elastic_resume import cli, config, constants
from elastic_resume.agent import run_help
from elastic_resume.config_file import ConfigFile, Entry
from elastic_resume.rendezvous.rendezvous_config import CONF_KEYS
from tests.support.paths import ROOT

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
        (["--keep", "many", "train.py"], "--keep is 'many'"),
        (["--rdzv-id", "a/b", "train.py"], "--rdzv-id is 'a/b', which cannot be the name of a directory"),
        (["--archive", "nc63/llm", "train.py"], "no such directory. For a bucket write s3://nc63/llm, or"),
        (["--archive-every", "30min", "train.py"], "write a number of steps (1000) or a time (30m, 2h)"),
        (["--node-name", "a", "train.py"], "node-name has no flag: set ELASTIC_RESUME_NODE_NAME"),
        (["--save-every", "often", "train.py"], "--save-every is 'often'"),
        (["--resume", "atuo", "train.py"], "Did you mean auto"),
        (["--nnodes", "2", "train.py"], "--rdzv-endpoint HOST,HOST"),
        (["--nnodes", "2", "--standalone", "train.py"], "--standalone means one node"),
        (["--nnodes", "x", "--rdzv-endpoint", "h:1", "train.py"], "x"),
        (["--nnodes", "3:2", "--rdzv-endpoint", "h:1", "train.py"], "--nnodes is '3:2': write N or MIN:MAX"),
        (["--nnodes", "2:1", "train.py"], "--nnodes is '2:1': write N or MIN:MAX"),
        (["--nnodes", "0", "train.py"], "--nnodes is '0': write N or MIN:MAX"),
        (["--nnodes", "1:2:3", "train.py"], "--nnodes is '1:2:3': write N or MIN:MAX"),
        (["--nnodes", "1:10001", "train.py"], "--nnodes is '1:10001': write a MAX of at most 10000"),
        (["--nproc-per-node", "0", "train.py"], "--nproc-per-node comes to 0: a node needs one worker"),
        (["--monitor-interval", "0", "train.py"], "--monitor-interval is 0: write a number of seconds"),
        (["--signals-to-handle", "SIGFOO", "train.py"], "--signals-to-handle names 'SIGFOO'"),
        (["--rdzv-conf", "join_timeout=abc", "train.py"], "--rdzv-conf join_timeout is 'abc': write a time"),
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
        (["--rdzv-conf", "last_call_timeout=-1", "train.py"], "--rdzv-conf last_call_timeout is '-1'"),
        (
            ["--rdzv-conf", "allow_minority=true", "train.py"],
            "unknown key allow_minority",
        ),
        (["--rdzv-conf", "join_timout=3", "train.py"], "Did you mean join_timeout?"),
        (["--rdzv-conf", "strict=yes", "train.py"], "--rdzv-conf strict: 'yes' is neither true nor false"),
        (["--rdzv-conf", "token_file=no.such", "train.py"], "token file no.such cannot be read"),
        ([""], "there is no training script '' in "),
        (["x" * 300], "there is no training script 'xxx"),
        (["unreadable.py"], "there is no training script 'unreadable.py' in "),
        (["--resume", "model.pt", "train.py"], "load it into the model and the optimizer before er.resume()"),
        (["--ckpt-dir", "~nobody-at-all", "train.py"], "which cannot be a path here: Could not determine"),
        (["--nproc-per-node", "some", "train.py"], "some"),
        (
            ["--max-restarts", "-1", "train.py"],
            "--max-restarts is '-1': torchrun takes a whole number, 0 or more",
        ),
        (["--master-port", "65536", "train.py"], "--master-port is 65536: torchrun takes a port, 0 to 65535"),
        (["--max-restarts", "abc", "train.py"], "--max-restarts is 'abc': write a whole number"),
        (["--monitor-interval", "x", "train.py"], "--monitor-interval is 'x': write a number"),
        (["-t", "9", "train.py"], "--tee is '9': torchrun takes 0, 1, 2 or 3"),
        (["--redirects", "0:7", "train.py"], "--redirects is '0:7': torchrun takes 0, 1, 2 or 3"),
        (
            ["--local-ranks-filter", "0,x", "train.py"],
            "--local-ranks-filter is '0,x': torchrun takes local ranks",
        ),
        (
            ["--rdzv-conf", "join_timeout", "train.py"],
            "--rdzv-conf is 'join_timeout': torchrun takes KEY=VALUE",
        ),
        (["--logs-specs", "none", "train.py"], "Could not find entrypoint under 'torchrun.logs_specs[none]'"),
        (["--no-python", "--module", "sh"], "Don't use both the '--no-python' flag and the '--module' flag"),
        (["--print-completion", "bash"], "--print-completion writes completions for the name torchrun"),
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


def test_unknown_command_exits_with_2(capsys: Any) -> None:
    """The error names the nearest command."""
    assert cli.main(["rnu"]) == 2
    assert "unknown command rnu. Did you mean run?" in capsys.readouterr().err


def test_help_of_chaos_needs_no_pytest() -> None:
    """The simulated nodes run without it too: only the plugin's module imports it."""
    code = (
        "import sys; sys.modules['pytest'] = None; from elastic_resume import cli; cli.main(['chaos', '-h'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("usage: elastic-resume chaos"), done.stderr


def test_run_help_fits_screen_and_names_our_flags(capsys: Any) -> None:
    """Sixty lines of eighty columns, with 21 flags of ours beside --quiet and those that print."""
    assert cli.main(["run", "--help"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80
    named = set(re.findall(r"^  (?:-\w, )?--([a-z-]+)", text, re.MULTILINE))
    ours = {option.name for option in config.FLAG_OPTIONS} | {"config", "help-all", "show-config"}
    assert len(ours - {"quiet", "help-all", "show-config"}) == 21
    assert ours <= named
    torchruns = {flag.removeprefix("--") for flag in config.actions_by_flag(get_args_parser())}
    assert named - ours <= torchruns
    with pytest.raises(SystemExit):
        cli.main(["run", "--keep", "3", "--help"])
    assert capsys.readouterr().out == text


def test_run_help_all_names_every_flag_and_setting(capsys: Any) -> None:
    """Also the variables and the keys of --rdzv-conf."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", "--help-all"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert text.isascii()
    missing = [flag for flag in config.actions_by_flag(get_args_parser()) if flag not in text]
    missing += [option.variable for option in config.OPTIONS_WITHOUT_FLAG if option.variable not in text]
    missing += [key for key in CONF_KEYS if f"{key}=" not in text]
    assert missing == []
    assert "C10d TCP store" not in text  # torchrun's flags that mean something else have our help
    assert set(run_help.CHANGED_HELP) <= {action.dest for action in get_args_parser()._actions}


def test_build_parser_has_all_commands_with_their_flags() -> None:
    """The reference of the documentation is made from it."""
    parser = cli.build_parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    flags = {name: set(config.actions_by_flag(command)) for name, command in commands.choices.items()}
    assert {"--keep", "--rdzv-endpoint", "--help-all"} <= flags["run"]
    assert {"--mtbf", "--seed"} <= flags["chaos"]
    assert {"--token-file"} <= flags["status"]


def test_run_help_prints_on_ascii_terminal(capsys: Any) -> None:
    """A missing character once aborted the whole help text."""
    commands = "run init chaos report ls verify export diff doctor status"
    for words in ([], *([command] for command in commands.split())):
        with contextlib.suppress(SystemExit):
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


@pytest.mark.parametrize(
    ("words", "threads"),
    [
        (["train.py"], None),
        (["--nnodes", "2", "--nproc-per-node", "4", "train.py"], "1"),
        (["--nproc_per_node=gpu", "train.py"], "1"),
        (["train.py", "--nproc-per-node"], None),  # the script's own flag
        (["--config", "two.yaml"], "1"),
    ],
)
def test_torch_is_imported_with_omp_threads_of_workers(
    words: list[str], threads: str | None, monkeypatch: Any
) -> None:
    """A worker that is forked afterwards has as many threads as under torchrun."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    in_file = {"nproc-per-node": Entry("", "2", "")} if "--config" in words else {}
    with cli._omp_threads_of_workers(words, ConfigFile(settings=in_file)):
        assert os.environ.get("OMP_NUM_THREADS") == threads
    assert "OMP_NUM_THREADS" not in os.environ


def test_only_run_imports_torch() -> None:
    """The other commands answer at once."""
    code = (
        "import sys; from elastic_resume import cli\n"
        "try: cli.main(['--version'])\n"
        "finally: assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.split()[0]) == (0, "elastic-resume")


@pytest.mark.slow
@pytest.mark.parametrize("module", ["cli", "agent/torchelastic"])
def test_damaged_bytecode_of_the_command_names_the_file(tmp_path: Path, module: str) -> None:
    """A full disk cuts such a file. The exit code says that the machine is at fault."""
    package = tmp_path / "elastic_resume"
    shutil.copytree(ROOT / "elastic_resume", package, ignore=shutil.ignore_patterns("__pycache__"))
    compiled = Path(py_compile.compile(str(package / f"{module}.py"), doraise=True) or "")
    os.truncate(compiled, compiled.stat().st_size // 2)
    command = [sys.executable, "-m", "elastic_resume", "run", "train.py"]
    end = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert end.returncode == constants.EXIT_MACHINE_ERROR
    assert end.stderr.startswith(f"elastic-resume: error: the compiled Python file {compiled} is damaged")
    assert end.stderr.count("\n") == 1


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), BlockingIOError(11, "fork")])
def test_refused_thread_or_fork_is_one_line_with_remedy(
    error: Exception, monkeypatch: Any, capsys: Any
) -> None:
    """Python says no more than this when pids.max of the control group is reached."""

    def refuse(*_: object, **__: object) -> int:
        raise error

    monkeypatch.setattr(cli, "run", refuse)
    assert cli.main(["run", "train.py"]) == constants.EXIT_MACHINE_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert "pids.max" in line


@pytest.mark.parametrize("error", [RuntimeError("a bug"), BlockingIOError(11, "write", 5)])
def test_other_errors_of_these_classes_keep_their_traceback(error: Exception, monkeypatch: Any) -> None:
    """A write to a full pipe is no refused fork."""

    def fail(*_: object, **__: object) -> int:
        raise error

    monkeypatch.setattr(cli, "run", fail)
    with pytest.raises(type(error)) as raised:
        cli.main(["run", "train.py"])
    assert raised.value is error
