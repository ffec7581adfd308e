"""How nodes of a Slurm job drain, and with which exit codes: real agents, and an answer of squeue."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from elastic_resume import constants
from elastic_resume.testing.cluster import Cluster
from tests.support.agents import Agents
from tests.support.agents import agents as agents  # noqa: PLC0414  pytest finds fixtures by name
from tests.support.paths import SCRIPTS
from tests.support.processes import wait_for, write_command

pytestmark = pytest.mark.cluster

TRAIN = SCRIPTS / "train.py"
NODES = 2


def set_end(directory: Path, text: str) -> None:
    """Have ``squeue`` print this as the job's end and limit."""
    write_command(directory, "squeue", f"echo '{text}'")


def environ(directory: Path, nodes: int) -> dict[str, str]:
    """Return what Slurm tells a task of a job; its commands are in ``directory``."""
    return {
        "PATH": f"{directory}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_STEP_ID": "0",
        constants.ENV_TOKEN: "a secret of 22 letters",
    }


def start(cluster: Cluster, steps: int) -> None:
    """Start the job on all nodes, and wait until it has trained so many steps."""
    newest = max((event["step"] for event in cluster.events("step")), default=0)
    for index in range(NODES):
        cluster.start_node(index, env={"SLURM_NODEID": str(index)})
    cluster.wait(step=newest + steps)


def send(receivers: list[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to all of them, as ``scancel`` does. A loader may have ended with its epoch."""
    for process in receivers:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def all_have_saved(cluster: Cluster) -> bool:
    """Whether the newest finished step is on disk, and on each node that or the one before it.

    A node that hears that another has left, while its own worker is within the step, ends that at once.
    """
    steps = [cluster.checkpoints(index)[0].step for index in range(NODES)]
    finished = max(event["step"] for event in cluster.events("step"))
    return max(steps) >= finished and max(steps) - min(steps) <= 1


def processes(cluster: Cluster) -> list[psutil.Process]:
    """List all processes of all nodes."""
    return [process for index in range(NODES) for process in cluster.processes(index)]


def agent_pids(cluster: Cluster) -> set[int]:
    """Return the process ids of the agents."""
    return {node.agent.pid for node in cluster.nodes if node.agent is not None}


def find_deaf_processes(cluster: Cluster) -> list[psutil.Process] | None:
    """List all but agents and launcher shims, once every rank has its loader, which ends with each epoch."""
    found = []
    for process in processes(cluster):
        with contextlib.suppress(psutil.NoSuchProcess):
            is_agent = process.pid in agent_pids(cluster)
            if not is_agent and "launcher_shim.py" not in " ".join(process.cmdline()):
                found.append(process)
    return found if len(found) >= 4 * NODES else None  # fork server, supervisor, worker, its loader


def test_all_nodes_of_a_job_commit_and_end_with_code_of_cause(tmp_path: Path) -> None:
    """After USR1, SIGTERM, and ahead of the time limit."""
    slurm = tmp_path / "slurm"
    slurm.mkdir()
    set_end(slurm, "NONE|UNLIMITED")
    flags = ("--save-every=100000", "--snapshot-every=1", "--grace=10")
    with Cluster(tmp_path, nodes=NODES, flags=flags, env=environ(slurm, NODES)) as cluster:
        cluster._script = [str(TRAIN), "--step-log", str(tmp_path), "--epochs", "100000", "--loaders", "1"]
        # scancel --signal=USR1, to all processes: all but the agent continue
        start(cluster, steps=5)
        others = cluster.wait(lambda: find_deaf_processes(cluster), "a loader of each rank")
        send(others, signal.SIGUSR1)
        cluster.wait(step=cluster.events("step")[-1]["step"] + 5)
        assert not cluster.events("worker-exit")  # as when a loader had died of it
        send(processes(cluster), signal.SIGUSR1)
        assert cluster.wait_exit() == [75, 0]  # one node speaks for all
        assert all_have_saved(cluster)
        assert [event["cause"] for event in cluster.events("drain")] == ["SIGUSR1"] * NODES
        ends = cluster.events("worker-exit")
        assert all(end["stopped"] or end.get("lease_expired") for end in ends)  # and none of the signal

        # preempted within a grace, or cancelled: only the batch script can tell
        start(cluster, steps=5)
        send([psutil.Process(pid) for pid in agent_pids(cluster)], signal.SIGTERM)
        assert cluster.wait_exit() == [143] * NODES
        assert all_have_saved(cluster)

        # its time limit, which nobody announces
        set_end(slurm, time.strftime("%Y-%m-%dT%H:%M:%S|5:00", time.gmtime(time.time() + 8)))
        start(cluster, steps=0)
        assert cluster.wait_exit() == [75] * NODES
        assert [event["cause"] for event in cluster.events("drain")[-NODES:]] == ["deadline"] * NODES
        assert all_have_saved(cluster)


def test_drain_signal_may_be_another(agents: Agents, tmp_path: Path) -> None:
    """A job without a single step is to run again, too."""
    set_end(tmp_path, "NONE|UNLIMITED")
    agents.script("import pathlib, time\npathlib.Path('there').touch()\nwhile True:\n    time.sleep(1)\n")
    variables = {"ELASTIC_RESUME_DRAIN_SIGNALS": "usr2", **environ(tmp_path, 1)}
    agent = agents.start("--rdzv-id=train", "--grace=0.1", "train.py", warm=False, **variables)
    wait_for((agents.directory / "there").exists, "the worker")
    agent.send_signal(signal.SIGUSR2)
    assert agent.wait(60) == 75


@pytest.mark.parametrize("text", ["SIGINT", ",", "9"])
def test_invalid_drain_signals_are_rejected(agents: Agents, text: str) -> None:
    """Nothing starts."""
    agents.script("")
    code, log = agents.run("train.py", ELASTIC_RESUME_DRAIN_SIGNALS=text)
    assert code == 2, log
    assert f"ELASTIC_RESUME_DRAIN_SIGNALS is {text!r}" in log
