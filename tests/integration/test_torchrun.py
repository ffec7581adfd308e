"""``torchrun --rdzv-backend elastic_resume``, with the command lines of torchrun's own tests.

The shapes are those of test/distributed/launcher/test_run.py in PyTorch that start processes and need no GPU;
without ``--standalone``, which replaces the backend. `make test` starts one as a user does, `make soak` all.
For the others an agent is forked that runs the same file as Python, which saves the import of torch.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from torch.distributed import launch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.run import get_args_parser

from elastic_resume import torchrun_handler
from elastic_resume.agent import torchelastic
from elastic_resume.errors import ConfigError
from elastic_resume.testing.backends import find_free_port
from tests.support.agents import Agents
from tests.support.agents import agents as agents  # noqa: PLC0414  pytest finds fixtures by name
from tests.support.paths import ROOT
from tests.support.processes import wait_for

pytestmark = pytest.mark.cluster

PORT = "PORT"  # in a shape: a free port
FILES = {
    "train.py": """
import os, pathlib, sys
for name in (
    "LOCAL_RANK RANK GROUP_RANK ROLE_RANK ROLE_NAME LOCAL_WORLD_SIZE WORLD_SIZE GROUP_WORLD_SIZE "
    "ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS "
    "TORCHELASTIC_RUN_ID TORCHELASTIC_ERROR_FILE OMP_NUM_THREADS"
).split():
    assert os.environ[name]
if "--fail" in sys.argv:
    raise RuntimeError("told to fail")
if "--die" in sys.argv and os.environ["RANK"] + os.environ["ELASTIC_RESUME_GENERATION"] == "11":
    os.kill(os.getpid(), 9)
pathlib.Path("rank-" + os.environ["RANK"]).touch()
""",
    "train.sh": "#!/bin/sh\necho creating rank-$RANK\ntouch rank-$RANK\n",
    "init.py": """
import os, pathlib, sys, torch
import torch.distributed as dist
assert dist.is_torchelastic_launched()
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=world_size)
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == world_size
pathlib.Path(f"rank-{rank}").touch()
dist.destroy_process_group()
""",
}


@dataclass(frozen=True)
class Shape:
    """A command line, and what becomes of it."""

    line: str
    ranks: int = 2
    exit_code: int = 0
    agents: int = 1
    variables: dict[str, str] = field(default_factory=dict)
    output: str = ""


TWO = "--nproc-per-node=2 --monitor-interval=1 --start-method=spawn"
MASTER = f"--master-addr=localhost --master-port={PORT}"
ELASTIC = f"--nnodes=1:2 --rdzv-backend=elastic_resume --rdzv-endpoint=localhost:{PORT} --rdzv-id=17 {TWO}"
PET = {
    "PET_NNODES": "1",
    "PET_NPROC_PER_NODE": "2",
    "PET_RDZV_ID": "17",
    "PET_MONITOR_INTERVAL": "1",
    "PET_START_METHOD": "spawn",
    "PET_NO_PYTHON": "1",
    "PET_MODULE": "0",
}
PREFIX = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank${rank}]: "}
SHAPES = {
    "script": Shape(f"--nnodes=1 --rdzv-id=17 {TWO} train.py"),
    "static": Shape(f"--nnodes=1 {TWO} {MASTER} --node-rank=0 train.py"),
    "program": Shape(f"--nnodes=1 --rdzv-id=17 {TWO} --no-python ./train.sh"),
    "one worker": Shape("--nnodes=1 --rdzv-id=17 --no-python ./train.sh", ranks=1),
    "variables": Shape("./train.sh", variables=PET),
    "elastic": Shape(f"{ELASTIC} --rdzv-conf='join_timeout=5,last_call_timeout=1,timeout=5' train.py"),
    "failure": Shape(
        f"{ELASTIC} --max-restarts=0 --rdzv-conf=last_call_timeout=1 train.py --fail", ranks=0, exit_code=1
    ),
    "killed worker": Shape(f"--nnodes=1 {TWO} train.py --die"),
    "run path": Shape("--run-path --logs_specs=default train.py", ranks=1),
    "two agents": Shape(
        f"{ELASTIC} --rdzv_conf=timeout=5,is_host=1,last_call_timeout=60 train.py", ranks=4, agents=2
    ),
    "tcp": Shape(f"--nnodes=1 {TWO} {MASTER} init.py tcp://localhost:{PORT}"),
    "env": Shape(f"--nnodes=1 {TWO} {MASTER} init.py env://"),
    "logs": Shape(
        f"{TWO} --redirect=3 --tee=3 --no-python ./train.sh", variables=PREFIX, output="[rank1]: creating"
    ),
}


AS_USER = "tcp"  # its workers are forked
# What another shape has too, or test_run_command.py, whose jobs fail.
ONLY_IN_SOAK = {"script", "static", "program", "one worker", "failure", "env"}
TORCHRUN = Path(sysconfig.get_path("scripts"), "torchrun")


@pytest.mark.parametrize(
    ("name", "by"),
    [
        *((name, "itself" if name == AS_USER else "fork") for name in SHAPES if name not in ONLY_IN_SOAK),
        *(pytest.param(name, "fork", marks=pytest.mark.soak) for name in sorted(ONLY_IN_SOAK)),
        *(pytest.param(name, "itself", marks=pytest.mark.soak) for name in SHAPES if name != AS_USER),
    ],
)
def test_shapes_of_torchruns_own_tests(name: str, by: str, agents: Agents) -> None:
    """Each worker that should run has run, with every variable that torchrun sets."""
    shape = SHAPES[name]
    agents.command = [str(TORCHRUN)] if by == "itself" else [sys.executable, str(TORCHRUN)]
    for file, text in FILES.items():
        agents.script(text, file)
    (agents.directory / "train.sh").chmod(0o755)
    # No shell: the quotes of --rdzv-conf stay, as in a YAML list of arguments.
    words = shape.line.replace(PORT, str(find_free_port("127.0.0.1"))).split()
    env = {"OMP_NUM_THREADS": "1", "PET_RDZV_BACKEND": "elastic_resume", **shape.variables}
    if "--rdzv-backend=elastic_resume" in words:
        del env["PET_RDZV_BACKEND"]
    nodes = "ab"[: shape.agents]
    started = [agents.start(*words, node=node, warm="init.py" in words, **env) for node in nodes]
    assert [agent.wait(120) for agent in started] == [shape.exit_code] * shape.agents, agents.log()
    ranks = {path.name for path in agents.directory.glob("rank-*")}
    assert ranks == {f"rank-{rank}" for rank in range(shape.ranks)}
    for node in nodes:
        assert f"elastic_resume[{node}] " in agents.log(node)
        assert shape.output in agents.log(node)


def test_signal_ends_the_job_as_under_our_command(agents: Agents) -> None:
    """The process that was torchrun is the agent; nothing of the former's handlers is left."""
    agents.command = [sys.executable, str(TORCHRUN)]
    agents.script("import pathlib, time; pathlib.Path('runs').touch(); time.sleep(600)")
    agent = agents.start("--rdzv-backend=elastic_resume", "train.py", ELASTIC_RESUME_LOG_LEVEL="DEBUG")
    agents.wait_for_workers()
    wait_for((agents.directory / "runs").exists, "the script")
    agent.send_signal(signal.SIGINT)
    assert agent.wait(60) == 130, agents.log()


def test_accelerate_launch_hands_its_job_over(agents: Agents) -> None:
    """It calls torchrun's function with arguments of its own."""
    agents.command = [sys.executable, str(TORCHRUN.with_name("accelerate")), "launch", "--multi_gpu"]
    for file, text in FILES.items():
        agents.script(text, file)
    line = "--rdzv_backend elastic_resume --num_processes 2 --num_machines 1 --mixed_precision no train.py"
    code, log = agents.run(*line.split(), OMP_NUM_THREADS="1")
    assert code == 0, log
    assert "elastic_resume[a] " in log
    assert {path.name for path in agents.directory.glob("rank-*")} == {"rank-0", "rank-1"}


ODD = "--max-restarts 0 --nproc-per-node 1 --rdzv-conf= -- --weird.py --x=1 -- a,b"


@pytest.mark.parametrize(
    ("line", "is_own"),
    [(ODD, True), *((shape.line, is_own) for shape in SHAPES.values() for is_own in (True, False))],
)
def test_flags_are_handed_over_as_they_are(line: str, is_own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The words themselves, so that a value which equals torchrun's default counts; or what equals them."""
    monkeypatch.setenv("PET_RDZV_BACKEND", "elastic_resume")
    words = line.replace(PORT, "29501").split() or ["train.py"]
    given = get_args_parser().parse_args(words)
    expected = vars(given).copy()
    given.master_port = given.master_port or 29500  # as torchrun's `run` does
    found = torchrun_handler.list_words(given, words if is_own else ["launch", "--multi-gpu", "train.py"])
    assert found == words or not is_own
    assert vars(get_args_parser().parse_args(found)) == expected


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's, of torch.distributed.launch
def test_another_launcher_is_refused() -> None:
    """Such as Ray's, which calls torch.distributed.launcher with a configuration of its own."""
    given = ["--rdzv-backend=elastic_resume", "train.py"]
    with pytest.raises(ConfigError, match="this is another launcher"):
        launch.main(given)  # which gives scripts --local-rank
    config = LaunchConfig(1, 1, 1, run_id="x", rdzv_backend="elastic_resume", rdzv_endpoint="localhost:0")
    with pytest.raises(ConfigError, match="this is another launcher"):
        elastic_launch(config, sys.executable)("train.py")


def test_entry_point_imports_nothing() -> None:
    """Torch loads it in each process that imports its rendezvous."""
    code = "import sys, elastic_resume.torchrun_handler as h; h.get_handler(); print(*sys.modules)"
    modules = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert {name for name in modules if name.startswith(("torch", "elastic_resume."))} == {
        "elastic_resume.errors",
        "elastic_resume.torchrun_handler",
    }


def test_lines_of_torchelastic_that_the_agent_drops_are_still_its_lines(tmp_path: Path) -> None:
    """A worker fails, the agent gets a signal, and the job ends elsewhere: it would log each twice."""
    script = ROOT / "tests/support/scripts/torchelastic_lines.py"
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, check=True, cwd=ROOT
    )
    lines = json.loads(done.stdout.splitlines()[-1])
    for beginnings in torchelastic.DROPPED_LINES.values():
        for beginning in beginnings:
            assert any(text.startswith(beginning) for text, _ in lines), (beginning, done.stderr)
    assert [text for text, is_dropped in lines if not is_dropped] == []
