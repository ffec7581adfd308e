"""Workers that start before their node joins: real agents and kills, and workers without torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elastic_resume import constants
from elastic_resume.testing import Cluster
from tests.support.paths import ROOT, SCRIPTS
from tests.support.processes import wait_for

pytestmark = pytest.mark.cluster

SCRIPT = SCRIPTS / "restartable_worker.py"
ALL = {f"n{node}-{rank}" for node in range(3) for rank in range(2)}


class Job:
    """Three nodes with two workers each; two nodes are enough."""

    def __init__(self, directory: Path, cluster: Cluster) -> None:
        self.directory, self.cluster = directory, cluster
        self.generation = 0

    def wait_for_next_generation(self, workers: set[str]) -> dict[str, int]:
        """Wait until exactly these workers run in the next generation; return their process ids."""
        self.generation += 1
        prefix = f"{self.generation}-"
        found: dict[str, int] = {}

        def are_running() -> bool:
            paths = self.directory.glob(f"{prefix}*")
            found.update((path.name.removeprefix(prefix), int(path.read_text())) for path in paths)
            return found.keys() >= workers

        self.cluster.wait(are_running, f"generation {self.generation} of {sorted(workers)}")
        assert found.keys() == workers
        return found

    def let_standbys_reach_resume(self, node: int, error: str = "") -> None:
        """Let them park, or fail with an error."""
        path = self.directory / f"n{node}-ready"
        path.with_suffix(".tmp").write_text(error)
        path.with_suffix(".tmp").rename(path)

    def wait_for_line(self, node: int, line: str) -> None:
        """Wait until a node's output has the line."""
        self.cluster.wait(lambda: line in self.cluster.output(node), repr(line))

    def kill(self, pid: int) -> None:
        """Kill one worker."""
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """Start the job and wait for its first generation."""
    flags = ["--rdzv-conf", "last_call_timeout=60"]
    with Cluster(tmp_path, nodes=3, min_nodes=2, workers_per_node=2, flags=flags) as cluster:
        directory = tmp_path / "generations"
        directory.mkdir()
        cluster.start(SCRIPT, str(directory))
        yield Job(directory, cluster)


def test_others_go_on_without_a_node_until_its_workers_stand_at_resume(job: Job) -> None:
    """A killed worker and a killed node cost the others no start, and no process but the killed ones."""
    first = job.wait_for_next_generation(ALL)
    job.kill(first["n1-1"])
    second = job.wait_for_next_generation(ALL - {"n1-0", "n1-1"})
    assert second == {name: first[name] for name in second}
    job.wait_for_line(1, "local rank 0 keeps its process; local rank 1 starts before this node joins")
    assert "restarting without n1, whose workers start first." in job.cluster.output(0)
    job.let_standbys_reach_resume(1)
    third = job.wait_for_next_generation(ALL)
    assert {name for name in ALL if third[name] != first[name]} == {"n1-1"}

    job.cluster.kill_node(2)
    fourth = job.wait_for_next_generation(ALL - {"n2-0", "n2-1"})
    job.cluster.start_node(2)  # it learns from the leader that a start takes long
    job.wait_for_line(2, "local ranks 0, 1 start before this node joins")
    job.let_standbys_reach_resume(2)
    fifth = job.wait_for_next_generation(ALL)
    assert {name: fifth[name] for name in fourth} == fourth == {name: third[name] for name in fourth}

    (job.directory / "stop").touch()
    assert job.cluster.wait_exit() == [0, 0, 0]


def test_node_that_is_needed_joins_at_once_and_its_standby_is_adopted(job: Job) -> None:
    """A second failure comes while a node prepares: one node is not enough."""
    first = job.wait_for_next_generation(ALL)
    job.kill(first["n1-1"])
    second = job.wait_for_next_generation(ALL - {"n1-0", "n1-1"})
    job.kill(second["n2-0"])
    job.wait_for_line(2, "local rank 0 starts before this node joins")
    job.cluster.wait(
        lambda: [e for e in job.cluster.node_events(1, "generation-start") if e["generation"] == 3],
        "the third view with all nodes",
    )
    job.let_standbys_reach_resume(1)
    job.let_standbys_reach_resume(2)
    third = job.wait_for_next_generation(ALL)
    assert {name for name in ALL if third[name] != first[name]} == {"n1-1", "n2-0"}
    assert "local rank 1 did not reach" not in job.cluster.output(1)

    job.let_standbys_reach_resume(0, error="the data is gone")
    job.kill(third["n0-0"])
    job.wait_for_next_generation(ALL - {"n0-0", "n0-1"})
    fifth = job.wait_for_next_generation(ALL)  # in the old way
    assert {name for name in ALL if fifth[name] != third[name]} == {"n0-0"}
    job.wait_for_line(0, "local rank 0 did not reach er.resume() before this node joined: it ended with exit")
    assert "ValueError: the data is gone" in job.cluster.output(0)
    job.kill(fifth["n0-0"])
    job.wait_for_next_generation(ALL)  # it has failed once, so this agent tries no other


# unit/mechanisms/standbys/test_workers.py ends standbys with the agent's part in the job.
@pytest.mark.parametrize("end", ["drain", pytest.param("finish", marks=pytest.mark.soak)])
def test_standby_ends_with_the_job(job: Job, end: str) -> None:
    """It may come while a node prepares. Nothing is left, and no failure is reported."""
    first = job.wait_for_next_generation(ALL)
    job.kill(first["n1-1"])
    job.wait_for_next_generation(ALL - {"n1-0", "n1-1"})
    job.wait_for_line(1, "local rank 1 starts before this node joins")
    pids = [process.pid for process in job.cluster.processes(1)]
    if end == "finish":
        (job.directory / "stop").touch()
        assert job.cluster.wait_exit() == [0, 0, 0]
    else:
        for node in (1, 0, 2):
            job.cluster.kill_agent(node, signal.SIGTERM)
        assert job.cluster.wait_exit() == [constants.EXIT_SIGNAL_BASE + signal.SIGTERM] * 3
    assert "did not reach er.resume()" not in job.cluster.output(1)
    wait_for(lambda: not any(map(psutil.pid_exists, pids)), "the end of all processes")


RESTORE = """
import gc, os, sys, time
from tests.support.own_supervisor import Supervisor
supervisor = Supervisor()
import torch
import elastic_resume as er
from elastic_resume import failpoints
from elastic_resume.training.restartable import Interrupter, InterrupterState

def end_first_world():
    if supervisor.worlds == 1:
        supervisor.end_world()
        (interrupter,) = [item for item in gc.get_objects() if type(item) is Interrupter]
        limit = time.monotonic() + 20
        while interrupter.state is not InterrupterState.PENDING and time.monotonic() < limit:
            time.sleep(0.01)

failpoints.register_action("end-world", end_first_world)
model = torch.nn.Linear(2, 2)
with er.resume(model=model, ckpt_dir="checkpoints", run_id="job", node_name="a") as run:
    print(supervisor.worlds, run.position.step)
    if sys.argv[1:]:
        run.step()
"""


@pytest.mark.soak
def test_standby_whose_first_world_ends_in_the_restore_goes_on_in_the_next(tmp_path: Path) -> None:
    """It has begun no generation that it could leave."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHELASTIC_RESTART_COUNT": "0"}
    standby = {"ELASTIC_RESUME_EARLY_START": "1", "ELASTIC_RESUME_FAILPOINTS": "resume.planned=do:end-world"}
    for more, words, expected in (({}, ["train"], "0 0"), (standby, [], "2 1")):
        command = [sys.executable, "-c", RESTORE, *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=environ | more, capture_output=True, text=True, check=False
        )
        assert done.stdout.split("\n")[0] == expected, done.stderr
