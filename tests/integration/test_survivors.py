"""Workers that keep their process when the world changes: real nodes, kills, and a training that goes on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic_resume.testing import Cluster
from tests.support import launch_ranks
from tests.support.paths import SCRIPTS
from tests.support.processes import is_alive, wait_for

pytestmark = pytest.mark.cluster

SCRIPT = SCRIPTS / "survivors.py"
STEPS = 10


class Job:
    """The training on simulated nodes."""

    def __init__(self, cluster: Cluster, *words: str) -> None:
        self.cluster = cluster
        self.directory = cluster.directory / "records"
        self.directory.mkdir()
        self._seen = 0, 0
        cluster.start(SCRIPT, str(self.directory), *words)

    def wait_for_hold(self, step: int, workers: set[str]) -> dict[str, int]:
        """Return the processes of these workers when just they wait after ``step`` in a new world."""

        def find_world() -> dict[str, int]:
            worlds: dict[int, dict[str, int]] = {}
            sizes: dict[int, int] = {}
            for path in self.directory.glob(f"held-{step}-*"):
                generation, name = path.name.split("-", 3)[2:]
                pid, size = map(int, path.read_text().split())
                worlds.setdefault(int(generation), {})[name] = pid
                sizes[int(generation)] = size
            newest = max(worlds, default=0)
            found = worlds.get(newest, {})
            if (step, newest) <= self._seen or found.keys() != workers or sizes[newest] != len(workers):
                return {}
            self._seen = step, newest
            return found

        return self.cluster.wait(find_world, f"{sorted(workers)} to wait after step {step}")

    def go_on(self, step: int) -> None:
        """Let the workers that wait after ``step`` train."""
        (self.directory / f"go-{step}").touch()

    def wait_for_line(self, node: int, line: str, times: int = 1) -> None:
        """Wait until a node's output has the line."""
        self.cluster.wait(lambda: self.cluster.output(node).count(line) >= times, repr(line))


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Start jobs with a snapshot at each step, and stop them after the test."""
    clusters = []

    def make(*words: str, **options: Any) -> Job:
        flags = ["--snapshot-every", "1", "--save-every", "1000", "--hang-timeout", "0"]
        flags += ["--rdzv-conf", "last_call_timeout=60"]  # the first view has all nodes
        clusters.append(Cluster(tmp_path, flags=flags, **options))
        return Job(clusters[-1], *words)

    yield make
    for cluster in clusters:
        cluster.stop()


def read_steps(directory: Path) -> dict[int, dict[str, list[dict[str, Any]]]]:
    """Return by step and generation what the ranks have written about it, in the order of ranks."""
    steps: dict[int, dict[str, list[dict[str, Any]]]] = {}
    for path in sorted(directory.glob("g*-r*.jsonl")):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            steps.setdefault(entry["step"], {}).setdefault(path.stem.split("-")[0], []).append(entry)
    return dict(sorted(steps.items()))


def read_once_finished(directory: Path) -> list[list[dict[str, Any]]]:
    """Return for each step what the ranks have written; check that no step was finished twice."""
    steps = read_steps(directory)
    repeated = {step: sorted(found) for step, found in steps.items() if len(found) > 1}
    assert not repeated, f"steps by generations: {repeated}"
    assert list(steps) == list(range(1, len(steps) + 1))
    return [ranks for found in steps.values() for ranks in found.values()]


def add_up(step: list[dict[str, Any]]) -> tuple[list[int], list[float]]:
    """Return the samples of all ranks in one step, and both losses' means over them."""
    samples = sorted(sample for rank in step for sample in rank["samples"])
    return samples, [sum(losses) for losses in zip(*(rank["loss"] for rank in step), strict=True)]


def name_workers(*nodes: int, local_ranks: int = 1) -> set[str]:
    """Return the names of these nodes' workers."""
    return {f"n{node}-{rank}" for node in nodes for rank in range(local_ranks)}


def train_undisturbed(directory: Path, ranks: int, *words: str) -> Path:
    """Train without an agent; return the directory with the records."""
    records = directory / "undisturbed"
    records.mkdir()
    env = {"ELASTIC_RESUME_CKPT_DIR": str(records / "checkpoints")}
    for rank in launch_ranks.run_ranks(ranks, SCRIPT, str(records), *words, env=[env] * ranks):
        assert rank.returncode == 0, rank.stderr
    return records


def test_worker_that_cannot_park_starts_anew_and_the_others_stay(make_job: Callable[..., Job]) -> None:
    """One holds the GIL in C, and one is stopped, while a node dies."""
    job = make_job("--hold", "2", "--hold-gil", "2-1-n1-0", nodes=4, min_nodes=2)
    first = job.wait_for_hold(2, name_workers(0, 1, 2, 3))
    job.cluster.kill_node(3)
    second = job.wait_for_hold(2, name_workers(0, 1, 2))
    assert {name for name in second if second[name] != first[name]} == {"n1-0"}
    job.wait_for_line(1, "did not leave the restartable function within 2 s")

    os.kill(second["n1-0"], signal.SIGSTOP)
    wait_for(lambda: psutil.Process(second["n1-0"]).status() == psutil.STATUS_STOPPED, "it to stop")
    job.cluster.kill_node(2)
    third = job.wait_for_hold(2, name_workers(0, 1))
    assert {name for name in third if third[name] != second[name]} == {"n1-0"}
    job.wait_for_line(1, "did not leave the restartable function within 2 s", times=2)
    job.go_on(2)
    assert job.cluster.wait_exit() == [0, 0]
    assert len(read_once_finished(job.directory)) == STEPS


def test_parked_worker_that_is_killed_starts_anew_and_dies_with_its_agent(
    make_job: Callable[..., Job],
) -> None:
    """It waits for the other rank of its node, whose start takes long. The other node trains meanwhile."""
    job = make_job("--slow", "--hold", "2", "4", nodes=2, min_nodes=1, workers_per_node=2)
    every, others = name_workers(0, 1, local_ranks=2), name_workers(0, local_ranks=2)
    is_parked = "local rank 0 keeps its process; local rank 1 starts before this node joins"

    first = job.wait_for_hold(2, every)
    os.kill(first["n1-1"], signal.SIGKILL)
    assert job.wait_for_hold(2, others).items() <= first.items()
    job.wait_for_line(1, is_parked)
    os.kill(first["n1-0"], signal.SIGKILL)
    (job.directory / "start").touch()
    second = job.wait_for_hold(2, every)
    assert {name for name in every if second[name] == first[name]} == others

    (job.directory / "start").unlink()
    job.go_on(2)
    assert job.wait_for_hold(4, every) == second
    os.kill(second["n1-1"], signal.SIGKILL)
    job.wait_for_line(1, is_parked, times=2)
    left = job.cluster.processes(1)
    assert second["n1-0"] in {process.pid for process in left}
    job.cluster.kill_agent(1)
    wait_for(lambda: not any(is_alive(process.pid) for process in left), "the end of all processes of n1")
    assert job.wait_for_hold(4, others).items() <= first.items()
    job.go_on(4)
    assert job.cluster.wait_exit() == [0]
    assert len(read_once_finished(job.directory)) == STEPS


def test_run_with_failures_in_a_row_and_lost_node_equals_undisturbed_run(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    """A second worker is killed while the others leave, and while they enter. Then 3 -> 2 -> 3 nodes."""
    job = make_job("--hold", "2", "3", "6", nodes=3, min_nodes=2)
    every = name_workers(0, 1, 2)
    first = job.wait_for_hold(2, every)
    os.kill(first["n2-0"], signal.SIGKILL)
    os.kill(first["n1-0"], signal.SIGKILL)
    second = job.wait_for_hold(2, every)
    assert {name for name in every if second[name] == first[name]} == {"n0-0"}
    job.go_on(2)

    assert job.wait_for_hold(3, every) == second
    job.cluster.arm(1, "resume.planned=kill")
    os.kill(second["n2-0"], signal.SIGKILL)
    third = job.wait_for_hold(3, every)
    assert {name for name in every if third[name] == first[name]} == {"n0-0"}
    assert third["n1-0"] != second["n1-0"]

    job.cluster.kill_node(2)
    assert job.wait_for_hold(3, every - {"n2-0"}).items() <= third.items()
    job.go_on(3)
    job.wait_for_hold(6, every - {"n2-0"})
    job.cluster.start_node(2)
    last = job.wait_for_hold(6, every)
    assert {name for name in every if last[name] == third[name]} == {"n0-0", "n1-0"}
    job.go_on(6)
    assert job.cluster.wait_exit() == [0, 0, 0]

    found = [add_up(step) for step in read_once_finished(job.directory)]
    alone = [add_up(step) for step in read_once_finished(train_undisturbed(tmp_path, 1))]
    assert [samples for samples, _ in found] == [samples for samples, _ in alone]
    assert [losses for _, losses in found] == [pytest.approx(losses, abs=1e-6) for _, losses in alone]


@pytest.mark.soak
def test_gan_stream_and_rank_values_resume_in_the_same_process(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    """Twice a worker is killed when the discriminator has taken its step, and the generator has not."""
    job = make_job("--stream", "--kill", "3:1", "11:1", nodes=1, workers_per_node=2)
    assert job.cluster.wait_exit() == [0]
    processes = [path.stem.split("-")[1:] for path in job.directory.glob("g*-r*.jsonl")]
    assert [len({pid for rank, pid in processes if rank == each}) for each in ("r0", "r1")] == [1, 3]
    alone = train_undisturbed(tmp_path, 2, "--stream")
    assert read_once_finished(job.directory) == read_once_finished(alone)
    for end in alone.glob("end-*.json"):
        assert (job.directory / end.name).read_text() == end.read_text()
