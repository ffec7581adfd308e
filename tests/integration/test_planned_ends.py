"""A planned end of a view costs no finished step, however rare snapshots are: real agents and workers."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from elastic_resume.testing import Cluster
from tests.support import notices
from tests.support.paths import SCRIPTS

pytestmark = pytest.mark.cluster

SCRIPT = SCRIPTS / "noticed.py"
FLAGS = ["--snapshot-every", "100000", "--save-every", "100000", "--grace", "60", "--hang-timeout", "0"]
KINDS = [
    "step",
    pytest.param("restartable", marks=pytest.mark.soak),
    pytest.param("sharded", marks=pytest.mark.soak),
]


def train_until_next_generation(cluster: Cluster, log: Path) -> None:
    """Wait until generation 2 trains on, from the last step of the first one."""
    cluster.wait(lambda: len(notices.read_lines(log).get((2, 0), [])) > 5, "the next generation")
    lines = notices.read_lines(log)
    last = max(line["step"] for (generation, _), found in lines.items() if generation == 1 for line in found)
    assert lines[2, 0][0]["step"] == last + 1
    assert cluster.lost_steps == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stopped", [1, pytest.param(0, marks=pytest.mark.soak)])
def test_drained_node_costs_no_finished_step(tmp_path: Path, kind: str, stopped: int) -> None:
    """The others have a snapshot of the last step that it took part in. The first node leads."""
    log = tmp_path / "log"
    log.mkdir()
    with Cluster(tmp_path, nodes=2, min_nodes=1, workers_per_node=2, flags=FLAGS) as cluster:
        cluster.start(SCRIPT, str(log), "--unused", "--kind", kind)
        cluster.wait(step=20)
        cluster.kill_agent(stopped, signal.SIGTERM)
        train_until_next_generation(cluster, log)


@pytest.mark.parametrize("kind", KINDS)
def test_newcomer_costs_no_finished_step(tmp_path: Path, kind: str) -> None:
    """The leader's node, at least, takes a snapshot of each step before the view ends."""
    log = tmp_path / "log"
    log.mkdir()
    with Cluster(tmp_path, nodes=3, min_nodes=2, flags=FLAGS) as cluster:
        cluster.start(SCRIPT, str(log), "--unused", "--kind", kind, only=[0, 1])
        cluster.wait(step=20)
        cluster.start_node(2)
        train_until_next_generation(cluster, log)
