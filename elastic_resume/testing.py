"""What a test of a training script needs: simulated nodes, as a class and as a pytest fixture.

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

__all__ = ["Cluster", "ClusterTimeoutError", "Node", "cluster"]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Three simulated nodes, two of which suffice; nothing runs before `Cluster.start`."""
    with Cluster(tmp_path, nodes=3, min_nodes=2) as made:
        yield made
