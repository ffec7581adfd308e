"""One YAML file starts a job without a flag: on three simulated nodes, by torchrun, and after failures."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

from elastic_resume import constants
from elastic_resume.report import html, summary
from elastic_resume.report.loader import load_run
from elastic_resume.testing.backends import find_free_port
from tests.support.agents import Agents
from tests.support.agents import agents as agents  # noqa: PLC0414  pytest finds fixtures by name
from tests.support.fake_sklearn import write_fake_sklearn
from tests.support.paths import ROOT
from tests.support.processes import wait_for

pytestmark = pytest.mark.cluster

NODES = {"a": "127.0.0.1", "b": "127.0.0.2", "c": "127.0.0.3"}
TRAIN = """
import os, pathlib, sys
name = "-".join(os.environ[n] for n in ("ELASTIC_RESUME_NODE_NAME", "RANK", "ELASTIC_RESUME_GENERATION"))
seen = [*sys.argv[1:], *(os.environ.get(n, "-") for n in sys.argv[1:])]
pathlib.Path("seen-" + name).write_text(" ".join(seen))
if os.environ["ELASTIC_RESUME_GENERATION"] + os.environ["RANK"] == "11":
    os.kill(os.getpid(), 9)
"""


def test_file_starts_the_readmes_job_on_three_nodes(agents: Agents) -> None:
    """A worker is killed meanwhile; the nodes' directories and the report have the settings."""
    job = yaml.safe_load((ROOT / "examples" / "digits.yaml").read_text())
    write_fake_sklearn(agents.directory / "examples")
    shutil.copy(ROOT / job["script"], agents.directory / job["script"])
    job["script-args"] = ["--epochs", 4, "--step-delay", 0.05]
    job |= {
        "nnodes": "3",
        "rdzv-endpoint": [f"{NODES['a']}:{find_free_port(NODES['a'])}", NODES["b"], NODES["c"]],
    }
    job |= {"local-addr": "${NODE_ADDRESS}", "snapshot-every": 1, "rdzv-id": "train"}
    (agents.directory / "job.yaml").write_text(yaml.safe_dump(job))
    started = [
        agents.start(
            "--config", "job.yaml", node=node, warm=True, NODE_ADDRESS=address, ELASTIC_RESUME_STEP_MARK_S="0"
        )
        for node, address in NODES.items()
    ]
    step = wait_for(lambda: [e for e in agents.events("step", "b") if e["step"] > 5], "a step of node b")[0]
    os.kill(step["pid"], signal.SIGKILL)
    assert [agent.wait(120) for agent in started] == [0, 0, 0], agents.log()
    assert [event["world_size"] for node in NODES for event in agents.events("resume", node)] == [3, 3]
    for node, address in NODES.items():
        settings = (agents.directory / "checkpoints" / "train" / node / constants.SETTINGS_FILE).read_text()
        assert f"local-addr: {address} " in settings
        assert "job.yaml:" in settings
    report = summary.build_run_report(load_run([agents.directory / "checkpoints" / "train"]).events)
    assert "snapshot-every 1 (job.yaml:" in " ".join(report.settings)
    assert "settings: " in summary.format_text(report)
    assert "snapshot-every 1 (job.yaml:" in html.render_page(report)
    assert "snapshot-every 1 (job.yaml:" in " ".join(json.loads(summary.format_json(report))["settings"])


@pytest.mark.parametrize("by", ["run", "torchrun"])
def test_workers_of_every_start_get_what_the_file_says(
    by: str, agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings, variables and torchrun's flags; also of torchrun, with two variables and no flag."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = "FOO OMP_NUM_THREADS HF_TOKEN ELASTIC_RESUME_KEEP ELASTIC_RESUME_CONFIG LOCAL_WORLD_SIZE"
    agents.script(TRAIN)
    job = {
        "script": "train.py",
        "script-args": names.split(),
        "nproc-per-node": 2,
        "keep": 5,
        "env": {"FOO": "b a r", "OMP_NUM_THREADS": 3, "HF_TOKEN": "${HF_TOKEN}"},
    }
    (agents.directory / "job.yaml").write_text(yaml.safe_dump(job))
    environ = {constants.ENV_CONFIG: "job.yaml", "HF_TOKEN": "hidden"}
    words: list[str] = []
    if by == "torchrun":
        agents.command = [sys.executable, str(Path(sysconfig.get_path("scripts"), "torchrun"))]
        environ["PET_RDZV_BACKEND"] = "elastic_resume"
        words = ["train.py", *names.split()]
    code, log = agents.run(*words, **environ)
    assert code == 0, log
    expected = f"{names} b a r 3 hidden 5 - 2"
    seen = {path.name: path.read_text() for path in agents.directory.glob("seen-*")}
    assert set(seen.values()) == {expected}
    assert {"seen-a-0-2", "seen-a-1-2"} <= set(seen)
    files = [path for path in (agents.directory / "checkpoints").rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if b"hidden" in path.read_bytes()] == []


def test_script_without_agent_reads_the_file(agents: Agents) -> None:
    """Under plain python, er.resume() takes settings of the file; torchrun's keys are not for it."""
    job = "script: train.py\nnproc-per-node: 2\nckpt-dir: of-file\nkeep: 5\nnode-name: n7\n"
    (agents.directory / "job.yaml").write_text(job)
    agents.command = [sys.executable]
    agents.script((ROOT / "examples" / "digits.py").read_text())
    write_fake_sklearn(agents.directory)
    code, log = agents.run("train.py", "--epochs", "1", ELASTIC_RESUME_CONFIG="job.yaml")
    assert code == 0, log
    assert (agents.directory / "of-file" / "train" / "a").is_dir(), "a variable names the node"
