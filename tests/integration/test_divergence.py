"""A node whose weights are unlike the others' is found while it trains, named, and put right if wanted."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_resume.testing import Cluster
from tests.support.training_job import SCRIPT, check_end

pytestmark = pytest.mark.cluster

# With each heartbeat a node tells of one step: ten in three seconds.
FLAGS = ["--snapshot-every", "1", "--check-replicas", "4", "--save-every", "3", "--node-timeout", "3"]


def start(cluster: Cluster, directory: Path) -> Path:
    """Start a job in which rank 1 computes a wrong weight in step 7; from 9 on it is slow, until go-on."""
    kept = directory / "diary"
    slow = ["--slow-from", "9", "--slow-until", str(directory / "go-on")]
    cluster.start(SCRIPT, "--diary", str(kept), "--step-delay", "0.1", "--damage-at", "1:7:1", *slow)
    return kept


def test_a_node_that_differs_ends_the_job_and_is_named(tmp_path: Path) -> None:
    """By step and node; all nodes say so and exit with 1."""
    with Cluster(tmp_path, nodes=3, flags=FLAGS) as cluster:
        start(cluster, tmp_path)
        assert cluster.wait_exit() == [1, 1, 1]
        found = cluster.events("replicas-differ")[0]
        assert (found["step"], found["wrong"]) == (8, ["n1"])
        assert found["agreed_step"] in {0, 4}  # which a node that stood still may not have told of
        for index in range(3):
            assert "replicas differ at step 8: node n1 is not as nodes n0 and n2" in cluster.output(index)


def test_the_majoritys_state_is_taken_where_that_is_wanted(tmp_path: Path) -> None:
    """The wrong node's later copies are set aside, and training ends with equal weights on all nodes."""
    with Cluster(tmp_path, nodes=3, flags=[*FLAGS, "--on-divergence", "resume-from-majority"]) as cluster:
        kept = start(cluster, tmp_path)
        cluster.wait(lambda: cluster.events("replicas-differ"), "a node that differs")
        (tmp_path / "go-on").touch()
        assert cluster.wait_exit() == [0, 0, 0], cluster.output(0)
        resumed = next(event for event in cluster.events("resume") if event["generation"] == 2)
        assert resumed["source_node"] in {"n0", "n2"}
        assert "n1" in resumed["lacking"]  # and who was a step behind
        assert not cluster.node_events(1, "replicas-differ")[1:]
        saved = [event["step"] for event in cluster.node_events(1, "commit") if event["generation"] == 2]
        assert len(saved) > 2, "the node that was wrong saves as often as others"
        check_end(kept, world_size=3)
