"""Tests of a training script against failures: copy them beside yours, and say which script that is."""

from __future__ import annotations

from pathlib import Path

from elastic_resume.testing import Cluster, Fault, assert_same_run

SCRIPT = Path(__file__).with_name("digits.py")


def test_my_training_survives(elastic_cluster: Cluster) -> None:
    """A worker and then a whole node die; the others continue, and no finished step is recomputed."""
    elastic_cluster.start(SCRIPT, "--epochs", "3")
    elastic_cluster.at(step=10, rank=1).kill()
    elastic_cluster.at(step=25, node=2).kill()
    assert elastic_cluster.wait_exit() == [0, 0]
    assert elastic_cluster.lost_steps == 0


def test_my_training_ends_as_if_nothing_had_happened() -> None:
    """The weights are the same, bit for bit, and so are the printed accuracies."""
    faults = [Fault("kill-worker", rank=1, step=8), Fault("kill-node", node=2, step=20)]
    assert_same_run(SCRIPT, "--epochs", "2", faults=faults, lines="^epoch")
