"""``elastic-resume run`` with warm workers behaves like torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from elastic_resume import cli, constants, events
from elastic_resume.agent import main
from elastic_resume.agent.workers import forkserver_manager
from tests.support.paths import SCRIPTS

pytestmark = pytest.mark.cluster

OURS = [sys.executable, "-m", "elastic_resume", "run"]
WAYS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "warm": OURS,
}
# Variables that differ between any two starts, or that only one of the launchers sets.
DIFFERING_VARIABLES = {
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCH_ELASTIC_WORKER_IDENTICAL",
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHINDUCTOR_CACHE_DIR",  # the last is set by importing torch._dynamo
}  # fmt: skip


def read_logs(directory: Path, name: str) -> list[str]:
    """Return the files of that name that torchelastic wrote, by local rank; without the directory's name."""
    paths = sorted((directory / "logs").rglob(f"attempt_0/*/{name}"))
    return [path.read_text().replace(str(directory), "") for path in paths]


def run_facts(way: str, here: Path) -> dict[str, Any]:
    """Run the script as two workers, of which rank 0 fails; return what it has seen and printed."""
    here.mkdir()
    command = [*WAYS[way], "--nproc-per-node=2", "--max-restarts=0", "--tee=3", "--log-dir=logs"]
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | {constants.ENV_LOG_LEVEL: "DEBUG"}
    done = subprocess.run(
        [*command, "--virtual-local-rank", str(SCRIPTS / "start_facts.py")],
        cwd=here,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 1, done.stderr
    assert "[default1]:rank 1 local 0" in done.stdout
    assert "starts cold" not in done.stderr
    assert "the fork server is a new process" not in done.stderr  # but a fork of the agent
    (error,) = read_logs(here, "error.json")
    assert json.loads(error)["message"]["message"] == "ValueError: rank 0 fails"
    (first, *stdout), stderr = read_logs(here, "stdout.log"), read_logs(here, "stderr.log")
    facts: dict[str, Any] = json.loads(first.splitlines()[0])
    environ = facts["environ"]
    assert (environ["LOCAL_RANK"], environ["OMP_NUM_THREADS"]) == ("0", "1")
    facts["environ"] = {key: value for key, value in environ.items() if key not in DIFFERING_VARIABLES}
    return {**facts, "last words": first.splitlines()[1:], "rank 1": stdout, "stderr": stderr}


def test_warm_script_sees_same_as_under_torchrun(tmp_path: Path) -> None:
    """It prints, forks, spawns, loads data with persistent workers, prints at exit, and fails."""
    expected, facts = (run_facts(way, tmp_path / way) for way in WAYS)
    assert expected["last words"] == ["from a thread", "at exit"]
    assert expected["rank 1"] == ["rank 1 local 0\n"]
    # The agent handles the signal that a scheduler sends before the end; workers ignore it.
    expected["signals"]["SIGUSR1"] = str(signal.SIG_IGN)
    for name, value in expected.items():
        assert facts[name] == value, name


def test_agent_stops_while_its_workers_import(tmp_path: Path) -> None:
    """The first workers run already; the next ones will share what it imports."""
    (tmp_path / "slow.py").write_text("import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(600)")
    (tmp_path / "job.py").write_text("import time; time.sleep(600)")
    agent = subprocess.Popen(
        [*OURS, "--preload", "slow", "job.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    while not (tmp_path / "begun").exists():
        assert agent.poll() is None
        time.sleep(0.02)
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(60) == 143
    (end,) = [e for e in events.read(next(tmp_path.rglob("events.jsonl"))) if e["event"] == "agent-end"]
    assert end["outcome"] == "signalled"


def test_caller_of_main_goes_on_alone(tmp_path: Path) -> None:
    """Its workers do not run what follows the call. It ignores SIGCHLD, as nohup wrappers may."""
    # In one piece: unbuffered, two workers' lines would mix.
    (tmp_path / "job.py").write_text("import sys; sys.stdout.write(f'a worker {sys.argv[1:]}\\n')")
    words = ["run", "--nproc-per-node", "2", "job.py", "--nproc-per-node"]
    done = subprocess.run(
        [sys.executable, "-c", f"from elastic_resume import cli\nprint('ended', cli.main({words}))"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
    )
    assert sorted(done.stdout.splitlines()) == ["a worker ['--nproc-per-node']"] * 2 + ["ended 0"]


@pytest.mark.parametrize(("flag", "is_detected"), [("-m", False), ("-u", False), ("-O", True), ("-P", True)])
def test_interpreter_flags_other_than_m_and_u_are_detected(
    flag: str, is_detected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker must not inherit them: with -O it would lose its assertions."""
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, flag, "elastic_resume", "run"])
    forks: list[None] = []
    monkeypatch.setattr(forkserver_manager, "prefork", lambda: forks.append(None))
    monkeypatch.setattr(main, "run_agent", lambda *_: 0)
    assert cli.run(["train.py"], owns_process=True) == 0
    assert (not forks) == is_detected
