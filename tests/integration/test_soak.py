"""Random kills at random moments, then the right weights and nothing left behind. Restarts leak nothing.

`make soak` kills a hundred times. ELASTIC_RESUME_SOAK_SEED chooses other moments.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from elastic_resume.events import Event
from elastic_resume.testing import Cluster
from tests.support.processes import wait_for
from tests.support.training_job import SCRIPT, check_end, left_behind

pytestmark = pytest.mark.cluster

KILLS = int(os.environ.get("ELASTIC_RESUME_SOAK_KILLS", "100"))
SEED = int(os.environ.get("ELASTIC_RESUME_SOAK_SEED", "10"))
EPOCHS = 4 + KILLS // 2  # of ten steps: some are left after the last kill
STEP_S = 0.05
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only looked at


def train_undisturbed(directory: Path) -> str:
    """Return the digest of weights and optimizer after an undisturbed run of three nodes."""
    with Cluster(directory, nodes=3, flags=["--save-every", "1000"]) as cluster:
        kept = directory / "step_log"
        cluster.start(SCRIPT, "--step-log", str(kept), "--epochs", str(EPOCHS), "--step-delay", "0")
        assert cluster.wait_exit() == [0, 0, 0], cluster.output(0)
        return check_end(kept, world_size=3, epochs=EPOCHS)


@pytest.mark.soak
def test_job_survives_random_kills(tmp_path: Path) -> None:
    """Kills hit workers, supervisors, shims, fork servers, agents and whole nodes, also during restarts."""
    rng = random.Random(SEED)
    shared = set(SHARED_MEMORY.iterdir())
    # Three kills may come before the next step is finished.
    env = {"ELASTIC_RESUME_MAX_NO_PROGRESS": "1000"}
    # Agents start as those of real nodes do.
    with Cluster(tmp_path, nodes=3, flags=["--save-every", "1"], env=env, fresh=True) as cluster:
        kept = tmp_path / "step_log"
        words = ["--step-log", str(kept), "--epochs", str(EPOCHS), "--step-delay", str(STEP_S)]
        cluster.start(SCRIPT, *words)
        cluster.wait(commit=1, node=0)
        for number in range(KILLS):
            kill_something(cluster, rng)
            if number % 5 == 4:  # sometimes steps are finished in between
                newest = max(event["generation"] for event in cluster.events("resume"))
                cluster.wait(generation=newest)
                cluster.wait(lambda: all(node.alive for node in cluster.nodes), "all nodes")
            time.sleep(rng.uniform(0, 2.0))  # a random moment is the point
        assert cluster.wait_exit(600) == [0, 0, 0], cluster.output(0)
        assert check_end(kept, world_size=3, epochs=EPOCHS) == train_undisturbed(tmp_path / "undisturbed")
    wait_for(lambda: not list(left_behind(tmp_path)), "all processes to end")
    # Jobs of other tests may have theirs for a while.
    wait_for(lambda: set(SHARED_MEMORY.iterdir()) <= shared, "shared memory to be given back", 60)
    assert not [path for path in tmp_path.rglob("*") if path.is_socket()]


def kill_something(cluster: Cluster, rng: random.Random) -> None:
    """Kill a process or a node, and restart a node whose agent has ended."""
    index = rng.randrange(3)
    kind = rng.choice(["worker", "supervisor", "shim", "fork-server", "agent", "node", "node"])
    if kind == "node":
        cluster.kill_node(index)
    elif kind == "agent":
        cluster.kill_agent(index)
    else:
        victims = [process for process in cluster.processes(index)[1:] if kind_of(process) == kind]
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in victims[:1]:
                process.kill()
    agent = cluster.nodes[index].agent
    if kind in {"node", "agent"}:
        assert agent is not None
        agent.wait()
    if agent is None or agent.poll() is not None:
        cluster.start_node(index)


def kind_of(process: psutil.Process) -> str:
    """Return the kind of a process below an agent, from its name."""
    try:
        name, words = process.name(), process.cmdline()
    except psutil.NoSuchProcess:
        return ""
    if any(word.endswith("launcher_shim.py") for word in words):
        return "shim"
    return name.removeprefix("er-") if name in {"er-fork-server", "er-supervisor", "er-worker"} else ""


def commits(cluster: Cluster, generation: int) -> list[Event]:
    """Return the commits of a generation."""
    return [event for event in cluster.events("commit") if event["generation"] == generation]


def test_restarts_leak_no_descriptor(tmp_path: Path) -> None:
    """After five restarts agent and fork server have no more open descriptors than after one."""
    with Cluster(tmp_path, nodes=1, flags=["--save-every", "1"]) as cluster:
        cluster.start(SCRIPT, "--step-log", str(tmp_path / "step_log"), "--epochs", "100000")
        before: tuple[int, int] = (0, 0)
        for generation in range(1, 8):
            cluster.wait(partial(commits, cluster, generation), f"a commit of generation {generation}")
            agent, *others = cluster.processes(0)
            fork_server = next(process for process in others if kind_of(process) == "fork-server")
            if generation == 2:  # the first restart may open files that stay open
                before = most(agent, fork_server)
            if generation < 7:
                cluster.kill_worker(0)
        # Files and connections of the moment come and go.
        wait_for(lambda: agent.num_fds() <= before[0], "the agent to have no more open than before")
        wait_for(
            lambda: fork_server.num_fds() <= before[1], "the fork server to have no more open than before"
        )


def most(agent: psutil.Process, fork_server: psutil.Process) -> tuple[int, int]:
    """Return the greatest number of open descriptors of each within half a second."""
    counts = []
    for _ in range(50):
        time.sleep(0.01)
        counts.append((agent.num_fds(), fork_server.num_fds()))
    return max(one for one, _ in counts), max(one for _, one in counts)
