"""A node whose weights differ is found and named during training, and the job ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_resume.testing import Cluster
from tests.support.training_job import SCRIPT

pytestmark = pytest.mark.cluster

# Each heartbeat carries the digest of one step: ten in three seconds.
FLAGS = ["--snapshot-every", "1", "--save-every", "3", "--node-timeout", "3"]
ENV = {"ELASTIC_RESUME_CHECK_REPLICAS": "4"}


def test_diverged_node_ends_job_and_is_named(tmp_path: Path) -> None:
    """Rank 1 computes a wrong weight in step 7. All nodes log the step and the node, and exit with 1."""
    pace = ["--step-delay", "0.1", "--slow-from", "9", "--slow-until", str(tmp_path / "never")]
    with Cluster(tmp_path, nodes=3, flags=FLAGS, env=ENV) as cluster:
        cluster.start(
            SCRIPT, "--step-log", str(tmp_path / "step_log"), "--epochs", "3", "--damage-at", "1:7:1", *pace
        )
        assert cluster.wait_exit() == [1, 1, 1]
        found = cluster.events("replicas-differ")[0]
        assert (found["step"], found["diverged_nodes"]) == (8, ["n1"])
        assert found["agreed_step"] in {0, 4}  # a stalled node may not have sent step 4
        for index in range(3):
            assert "replicas differ at step 8: node n1 is not as nodes n0 and n2" in cluster.output(index)
