"""``torchrun`` by name: the file of ``install-torchrun``, with the command lines of torchrun's own tests.

The shapes are those of test/distributed/launcher/test_run.py in PyTorch that start processes and need no GPU.
`make test` runs one by PATH, `make soak` all. For the others an agent is forked that runs the same file as
Python, which saves the import of torch.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field

import pytest

from elastic_resume import cli, constants
from elastic_resume.testing.backends import find_free_port
from tests.support.agents import Agents
from tests.support.agents import agents as agents  # noqa: PLC0414  pytest finds fixtures by name

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
ELASTIC = f"--nnodes=1:2 --rdzv-backend=c10d --rdzv-endpoint=localhost:{PORT} --rdzv-id=17 {TWO}"
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
    "standalone": Shape(f"--nnodes=1 --standalone {TWO} train.py"),
    "run path": Shape("--run-path --logs_specs=default train.py", ranks=1),
    "two agents": Shape(f"{ELASTIC} --rdzv_conf=timeout=5,is_host=1 train.py", ranks=4, agents=2),
    "tcp": Shape(f"--nnodes=1 {TWO} {MASTER} init.py tcp://localhost:{PORT}"),
    "env": Shape(f"--nnodes=1 {TWO} {MASTER} init.py env://"),
    "logs": Shape(
        f"{TWO} --redirect=3 --tee=3 --no-python ./train.sh", variables=PREFIX, output="[rank1]: creating"
    ),
}


BY_PATH = "tcp"  # its workers are forked


@pytest.mark.parametrize(
    ("name", "by"),
    [
        *((name, "PATH" if name == BY_PATH else "file") for name in SHAPES),
        *(pytest.param(name, "PATH", marks=pytest.mark.soak) for name in SHAPES if name != BY_PATH),
    ],
)
def test_shapes_of_torchruns_own_tests(name: str, by: str, agents: Agents) -> None:
    """Each worker that should run has run, with every variable that torchrun sets."""
    shape = SHAPES[name]
    install(agents, by)
    for file, text in FILES.items():
        agents.script(text, file)
    (agents.directory / "train.sh").chmod(0o755)
    # No shell: the quotes of --rdzv-conf stay, as in a YAML list of arguments.
    words = shape.line.replace(PORT, str(find_free_port("127.0.0.1"))).split()
    env = {"OMP_NUM_THREADS": "1", "PATH": search_path(agents), **shape.variables}
    nodes = "ab"[: shape.agents]
    started = [agents.start(*words, node=node, warm="init.py" in words, **env) for node in nodes]
    assert [agent.wait(120) for agent in started] == [shape.exit_code] * shape.agents, agents.log()
    ranks = {path.name for path in agents.directory.glob("rank-*")}
    assert ranks == {f"rank-{rank}" for rank in range(shape.ranks)}
    for node in nodes:
        assert "this torchrun is elastic_resume" in agents.log(node).partition("\n")[0]
        assert shape.output in agents.log(node)


def install(agents: Agents, by: str = "PATH") -> None:
    """Install torchrun into a directory whose name has a space; agents start it by PATH or as a file."""
    directory = agents.directory / "our bin"
    assert cli.main(["install-torchrun", str(directory)]) == 0
    agents.command = ["torchrun"] if by == "PATH" else [sys.executable, str(directory / "torchrun")]


def search_path(agents: Agents) -> str:
    """Return a PATH on which our torchrun is first."""
    return f"{agents.directory / 'our bin'}{os.pathsep}{os.environ['PATH']}"


def test_torchrun_on_path_names_itself_in_version_help_and_errors(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person who typed torchrun learns what runs."""
    install(agents)
    monkeypatch.setenv("PATH", search_path(agents))
    assert [agents.start(word).wait(60) for word in ("--version", "--help")] == [0, 0]
    install(agents, "file")
    assert agents.start("--hepl", "train.py").wait(60) == 2
    version, *lines = agents.log().splitlines()
    assert version.startswith("elastic-resume ")
    assert lines[0].startswith("usage: torchrun [flags] SCRIPT")
    assert lines[-1].startswith("torchrun (elastic-resume): error: unknown flag --hepl.")
    assert lines[-1].endswith("(see torchrun --help)")
    assert "elastic-resume run" not in agents.log()


def test_variable_turns_torchrun_into_pytorchs(agents: Agents) -> None:
    """Which writes nothing below ./checkpoints."""
    install(agents, "file")
    agents.script("import os; print('rank', os.environ['RANK'])")
    code, log = agents.run("train.py", **{constants.ENV_TORCHRUN: "0"})
    assert code == 0, log
    assert "rank 0" in log
    assert "elastic_resume" not in log
    assert not (agents.directory / "checkpoints").exists()
