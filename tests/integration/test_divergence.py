"""A node whose weights differ is found and named during training, and takes the majority's state if set."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_resume.testing import Cluster
from tests.support.training_job import SCRIPT, check_end

pytestmark = pytest.mark.cluster

# Each heartbeat carries the digest of one step: ten in three seconds.
FLAGS = ["--snapshot-every", "1", "--save-every", "3", "--node-timeout", "3"]
ENV = {"ELASTIC_RESUME_CHECK_REPLICAS": "4"}


def start(cluster: Cluster, directory: Path) -> Path:
    """Start a job in which rank 1 computes a wrong weight in step 7. From step 9 it is slow until go-on."""
    diary = directory / "diary"
    slow = ["--slow-from", "9", "--slow-until", str(directory / "go-on")]
    cluster.start(
        SCRIPT, "--diary", str(diary), "--step-delay", "0.1", "--epochs", "3", "--damage-at", "1:7:1", *slow
    )
    return diary


def test_diverged_node_ends_job_and_is_named(tmp_path: Path) -> None:
    """All nodes log the step and the node, and exit with 1."""
    with Cluster(tmp_path, nodes=3, flags=FLAGS, env=ENV) as cluster:
        start(cluster, tmp_path)
        assert cluster.wait_exit() == [1, 1, 1]
        found = cluster.events("replicas-differ")[0]
        assert (found["step"], found["diverged_nodes"]) == (8, ["n1"])
        assert found["agreed_step"] in {0, 4}  # a stalled node may not have sent step 4
        for index in range(3):
            assert "replicas differ at step 8: node n1 is not as nodes n0 and n2" in cluster.output(index)


def test_diverged_node_takes_majority_state_under_resume_from_majority(tmp_path: Path) -> None:
    """The later copies of the wrong node are set aside, and training ends with equal weights on all nodes."""
    env = {**ENV, "ELASTIC_RESUME_ON_DIVERGENCE": "resume-from-majority"}
    with Cluster(tmp_path, nodes=3, flags=FLAGS, env=env) as cluster:
        diary = start(cluster, tmp_path)
        cluster.wait(lambda: cluster.events("replicas-differ"), "a node that differs")
        (tmp_path / "go-on").touch()
        assert cluster.wait_exit() == [0, 0, 0], cluster.output(0)
        resumed = next(event for event in cluster.events("resume") if event["generation"] == 2)
        assert resumed["source_node"] in {"n0", "n2"}
        assert "n1" in resumed["receiving_nodes"]
        assert not cluster.node_events(1, "replicas-differ")[1:]
        saved = [event["step"] for event in cluster.node_events(1, "commit") if event["generation"] == 2]
        assert len(saved) > 2, "the wrong node saves as often as the others"
        check_end(diary, world_size=3, epochs=3)
