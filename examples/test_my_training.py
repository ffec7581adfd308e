"""Tests of a training script against failures: copy them beside yours, and say which script that is."""

from __future__ import annotations

from pathlib import Path

from elastic_resume.testing import Cluster, assert_same_run

SCRIPT = Path(__file__).with_name("digits.py")


def test_my_training_survives(elastic_cluster: Cluster) -> None:
    """A worker and then a whole node die; the others train on, and no finished step is run again."""
    elastic_cluster.start(SCRIPT, "--epochs", "3")
    elastic_cluster.at(step=10, rank=1).kill()
    elastic_cluster.at(step=25, node=2).kill()
    assert elastic_cluster.wait_exit() == [0, 0]
    assert elastic_cluster.lost_steps == 0


def test_my_training_ends_as_if_nothing_had_happened() -> None:
    """The trained weights are the same, bit for bit, after any failure."""
    assert_same_run(SCRIPT, "--epochs", "2", kills=["worker 1 at step 8", "node 2 at step 20"])
