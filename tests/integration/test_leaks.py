"""Restarts leak nothing."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from elastic_resume.events import Event
from elastic_resume.testing import Cluster
from tests.support.processes import wait_for
from tests.support.training_job import SCRIPT

pytestmark = pytest.mark.cluster


def commits(cluster: Cluster, generation: int) -> list[Event]:
    """Return the commits of a generation."""
    return [event for event in cluster.events("commit") if event["generation"] == generation]


@pytest.mark.soak
def test_restarts_leak_no_descriptor(tmp_path: Path) -> None:
    """After five restarts agent and fork server have no more open descriptors than after one."""
    with Cluster(tmp_path, nodes=1, flags=["--save-every", "1"]) as cluster:
        cluster.start(SCRIPT, "--step-log", str(tmp_path / "step_log"), "--epochs", "100000")
        before: tuple[int, int] = (0, 0)
        for generation in range(1, 8):
            cluster.wait(partial(commits, cluster, generation), f"a commit of generation {generation}")
            agent, *others = cluster.processes(0)
            fork_server = next(process for process in others if process.name() == "er-fork-server")
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
