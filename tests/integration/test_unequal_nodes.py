"""Nodes with another script or other arguments are found; nodes that disagree about the end fail the job."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_resume.testing import Cluster
from tests.support.training_job import SCRIPT

pytestmark = pytest.mark.cluster


def test_nodes_that_disagree_about_the_end_fail_and_take_no_further_step(tmp_path: Path) -> None:
    """Node n1 wants another epoch: it would train it alone, though two nodes are the minimum."""
    log = ["--step-log", str(tmp_path / "log"), "--step-delay", "0"]
    with Cluster(tmp_path, nodes=2, min_nodes=2) as cluster:
        cluster.start(SCRIPT, *log, "--epochs", "1", only=[0])
        cluster.start(SCRIPT, *log, "--epochs", "2", only=[1])
        assert cluster.wait_exit() == [1, 1]
        outputs = [cluster.output(index) for index in range(2)]
        for output in outputs:
            assert output.count("the script's arguments differ between nodes: ") == 1
            assert "--epochs 1; n1: " in output
            assert "the training has ended on n0, and the ranks here would take step 11 without it" in output
        assert {event["generation"] for event in cluster.node_events(1, "step")} == {1}


def test_node_with_another_script_is_refused(tmp_path: Path) -> None:
    """It leaves with a usage error that names both, and the others finish."""
    other = tmp_path / SCRIPT.name
    other.write_text(SCRIPT.read_text() + "\n# edited on this node\n")
    arguments = ["--step-log", str(tmp_path / "log"), "--epochs", "2", "--fast-from", str(tmp_path / "fast")]
    with Cluster(tmp_path, nodes=3, min_nodes=2) as cluster:
        cluster.start(SCRIPT, *arguments, only=[0, 1])
        cluster.wait(lambda: cluster.node_events(0, "step"), "a step of n0")
        cluster.start(other, *arguments, only=[2])
        assert cluster.wait_exit(only=[2]) == [2]
        (tmp_path / "fast").touch()
        assert cluster.wait_exit(only=[0, 1]) == [0, 0]
        assert f"the training script is {SCRIPT.name} (" in cluster.output(2)
        assert len(cluster.node_events(0, "generation-start")) == 1, "the refusal stops nobody"
