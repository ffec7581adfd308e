"""What a test of a training script needs: simulated nodes, and the proof that a killed run is the same run.

`assert_same_run` runs a script undisturbed and with kills, and fails unless both end bit for bit alike::

    def test_my_training_survives():
        assert_same_run("train.py", "--epochs", "2", kills=["worker 1 at step 20", "node 2 at step 35"])

The ``cluster`` fixture comes with the package (a pytest plugin)::

    def test_my_training_survives(cluster):
        cluster.start("train.py", "--epochs", "2")
        cluster.wait_step(20)
        cluster.kill_node(2)
        cluster.wait_generation(2)
        assert cluster.wait_exit() == [0, 0]
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_resume.faults.lab import Cluster, ClusterTimeoutError, Node
from elastic_resume.faults.same_run import Kill, assert_same_run

__all__ = ["Cluster", "ClusterTimeoutError", "Kill", "Node", "assert_same_run", "cluster"]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Three simulated nodes, two of which suffice; nothing runs before `Cluster.start`."""
    with Cluster(tmp_path, nodes=3, min_nodes=2) as made:
        yield made
