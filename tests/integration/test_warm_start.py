"""``elastic-resume run`` with warm workers and with ``no-warm`` behaves like torchrun."""

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

from elastic_resume import constants, events
from tests.support.paths import SCRIPTS

pytestmark = pytest.mark.cluster

MIRROR = SCRIPTS / "mirror.py"
OURS = [sys.executable, "-m", "elastic_resume", "run"]
WAYS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "cold": ["env", "ELASTIC_RESUME_NO_WARM=1", *OURS],
    "warm": OURS,
}
# Variables that differ between any two starts, or that only one of the launchers sets.
DIFFERING_VARIABLES = {
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCH_ELASTIC_WORKER_IDENTICAL",
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHINDUCTOR_CACHE_DIR",  # the last is set by importing torch._dynamo
}  # fmt: skip


def run(way: str, directory: Path, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a job of two workers in ``directory``; return what it printed."""
    directory.mkdir(exist_ok=True)
    command = [*WAYS[way], "--nproc-per-node=2", "--max-restarts=0", *words]
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | {constants.ENV_LOG_LEVEL: "DEBUG"}
    done = subprocess.run(
        command, cwd=directory, env=env, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == code, done.stderr
    return done


def read_logs(directory: Path, name: str) -> list[str]:
    """Return the files of that name that torchelastic wrote, by local rank."""
    return [path.read_text() for path in sorted((directory / "logs").rglob(f"attempt_0/*/{name}"))]


def test_script_behaves_the_same_warm_cold_and_under_torchrun(tmp_path: Path) -> None:
    """It prints, forks, spawns, loads data with persistent workers, and prints at exit."""
    facts: dict[str, list[dict[str, Any]]] = {}
    for way in WAYS:
        here = tmp_path / way
        done = run(way, here, "--redirects=3", "--log-dir=logs", str(MIRROR), "chance-${local_rank}", "0")
        out = read_logs(here, "stdout.log")
        assert [text.splitlines()[1:] for text in out] == [["a thread's last word", "at exit"]] * 2
        assert read_logs(here, "stderr.log") == ["", ""]
        facts[way] = [json.loads(text.splitlines()[0]) for text in out]
        if way == "warm":
            assert "starts cold" not in done.stderr
            assert "the fork server is a new process" not in done.stderr  # but a fork of the agent
        for rank, seen in enumerate(facts[way]):
            seen["cwd"] = seen["cwd"].replace(way, "")
            environ = seen.pop("environ")
            assert (environ["LOCAL_RANK"], environ["OMP_NUM_THREADS"]) == (str(rank), "1")
            assert seen["argv"][1] == f"chance-{rank}"
            seen["environ"] = {
                key: value.replace(way, "")
                for key, value in environ.items()
                if key not in DIFFERING_VARIABLES
            }
        assert len({(here / f"chance-{rank}").read_text() for rank in range(2)}) == 2
    for way in ("cold", "warm"):
        for rank in range(2):
            # The agent handles the signal that a scheduler sends before the end; workers ignore it.
            facts["torchrun"][rank]["signals"]["SIGUSR1"] = str(signal.SIG_IGN)
            for name, value in facts["torchrun"][rank].items():
                assert facts[way][rank][name] == value, f"{way}, rank {rank}: {name}"


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
    """Its workers do not run what follows the call."""
    # In one piece: unbuffered, two workers' lines would mix.
    (tmp_path / "job.py").write_text("import sys; sys.stdout.write('a worker\\n')")
    code = (
        "from elastic_resume import cli\nprint('ended', cli.main(['run', '--nproc-per-node', '2', 'job.py']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=200
    )
    assert sorted(done.stdout.splitlines()) == ["a worker", "a worker", "ended 0"]


def test_flags_of_the_agents_interpreter_do_not_reach_workers(tmp_path: Path) -> None:
    """With -O a script would lose its assertions. The agent also ignores SIGCHLD, as nohup wrappers may."""
    (tmp_path / "job.py").write_text("import sys; print(sys.flags.optimize, sys.argv[1:])")
    command = [sys.executable, "-O", "-m", "elastic_resume", "run", "job.py", "--nproc-per-node"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
    )
    assert done.stdout == "0 ['--nproc-per-node']\n"


FAILS = """
import os, pathlib, time
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    print("rank", os.environ["RANK"], "local", os.environ["LOCAL_RANK"], flush=True)
    pathlib.Path("printed" + os.environ["RANK"]).touch()
    while not pathlib.Path("printed0").exists():  # the failure of rank 1 ends rank 0 too
        time.sleep(0.01)
    if os.environ["RANK"] == "1":
        raise ValueError("no such luck")
main()
"""


@pytest.mark.parametrize("way", WAYS)
def test_logs_tee_error_files_and_virtual_ranks_work(way: str, tmp_path: Path) -> None:
    """Also for a module that is found in the working directory."""
    here = tmp_path / way
    here.mkdir()
    (here / "fails.py").write_text(FAILS)
    flags = ["--tee=3", "--log-dir=logs", "--virtual-local-rank", "-m", "fails"]
    done = run(way, here, *flags, code=1)
    assert "[default1]:rank 1 local 0" in done.stdout
    assert [text.splitlines()[0] for text in read_logs(here, "stdout.log")] == [
        "rank 0 local 0",
        "rank 1 local 0",
    ]
    (error,) = read_logs(here, "error.json")
    assert json.loads(error)["message"]["message"] == "ValueError: no such luck"


@pytest.mark.parametrize("way", ["cold", "warm"])
def test_no_python_worker_starts_cold(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log says why at level DEBUG."""
    monkeypatch.setenv("ELASTIC_RESUME_LOG_LEVEL", "DEBUG")
    done = run(way, tmp_path, "--no-python", "/bin/sh", "-c", "echo rank $RANK; exit 0")
    assert sorted(done.stdout.split()) == ["0", "1", "rank", "rank"]
    assert done.stderr.count("workers start cold: --no-python") == 1
