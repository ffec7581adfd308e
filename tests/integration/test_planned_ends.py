"""A planned end of a view costs no finished step, however rare snapshots are: real agents and workers."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_resume.testing import Cluster
from tests.support import notices
from tests.support.paths import SCRIPTS

pytestmark = pytest.mark.cluster

SCRIPT = SCRIPTS / "noticed.py"
FLAGS = ["--snapshot-every", "100000", "--save-every", "100000", "--hang-timeout", "0"]
ENV = {"ELASTIC_RESUME_CHECK_REPLICAS": "off"}  # a comparison takes a snapshot too
WORDS = ["--unused", "--samples", "100000"]  # as does the end of an epoch
SLOW = pytest.mark.soak
KINDS = ["step", pytest.param("restartable", marks=SLOW), pytest.param("sharded", marks=SLOW)]
Start = Callable[..., Cluster]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start jobs, and stop them after the test."""
    made: list[Cluster] = []

    def make(nodes: int, kind: str, *words: str, only: list[int] | None = None, more: list[str]) -> Cluster:
        (tmp_path / "log").mkdir()
        made.append(
            Cluster(
                tmp_path, nodes=nodes, min_nodes=nodes - 1, workers_per_node=2, flags=[*FLAGS, *more], env=ENV
            )
        )
        made[0].start(SCRIPT, str(tmp_path / "log"), *WORDS, "--kind", kind, *words, only=only)
        return made[0]

    yield make
    for cluster in made:
        cluster.stop()


def train_until_next_generation(cluster: Cluster) -> None:
    """Wait until generation 2 trains on, from the last step of the first one."""
    log = cluster.directory / "log"
    cluster.wait(lambda: len(notices.read_lines(log).get((2, 0), [])) > 1, "the next generation")
    lines = notices.read_lines(log)
    last = max(line["step"] for (generation, _), found in lines.items() if generation == 1 for line in found)
    assert last > 3
    assert lines[2, 0][0]["step"] == last + 1
    assert cluster.lost_steps == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stopped", [1, pytest.param(0, marks=SLOW)])
@pytest.mark.parametrize("step_s", [0.05, pytest.param(0.7, marks=SLOW)])
def test_drained_node_costs_no_finished_step(start: Start, kind: str, stopped: int, step_s: float) -> None:
    """The others have a snapshot of the last step that it took part in. The first node leads."""
    cluster = start(2, kind, "--step-s", str(step_s), more=["--grace", "60"])
    cluster.wait(step=4)
    cluster.kill_agent(stopped, signal.SIGTERM)
    train_until_next_generation(cluster)


@pytest.mark.soak
def test_drain_with_long_steps_and_the_default_grace_costs_no_finished_step(start: Start) -> None:
    """One more step of 2 s fits into 5 s."""
    cluster = start(2, "step", "--step-s", "2", more=["--node-timeout", "3"])
    cluster.wait(step=4)
    cluster.kill_agent(1, signal.SIGTERM)
    train_until_next_generation(cluster)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step_s", [1.5, pytest.param(0.05, marks=SLOW)])
def test_newcomer_costs_no_finished_step(start: Start, kind: str, step_s: float) -> None:
    """It waits until the nodes have a snapshot of the newest step."""
    cluster = start(3, kind, "--step-s", str(step_s), only=[0, 1], more=[])
    cluster.wait(step=4)
    cluster.start_node(2)
    train_until_next_generation(cluster)


def test_newcomer_that_starts_slowly_costs_no_finished_step(start: Start) -> None:
    """It has joined long before it is ready."""
    cluster = start(3, "step", "--step-s", "0.3", only=[0, 1], more=[])
    cluster.wait(step=4)
    cluster.start_node(2, flags=["--preload", "tests.support.slow_import"])
    train_until_next_generation(cluster)
