"""Whole jobs whose model is on a GPU: copies while training continues, kills, and a resume to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elastic_resume.testing import Cluster
from tests.support.training_job import SCRIPT, check_end

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

EPOCHS = 6
KILLS_AT = (7, 20, 21, 44)


def train(directory: Path, nodes: int, kills_at: tuple[int, ...] = (), **env: str) -> str:
    """Train on a GPU that the nodes share, killing a worker at each of the steps; return the end's digest."""
    # NCCL wants a GPU for each rank.
    backend = ["--backend", "gloo"] if nodes > 1 else []
    with Cluster(directory, nodes=nodes, flags=["--snapshot-every", "1"], env=env) as cluster:
        step_log = directory / "step_log"
        words = ["--device", "cuda", "--epochs", str(EPOCHS), "--width", "512", *backend]
        cluster.start(SCRIPT, "--step-log", str(step_log), *words)
        for count, step in enumerate(kills_at):
            cluster.wait(generation=count + 1, step=step)
            cluster.kill_worker(count % nodes)
        assert cluster.wait_exit() == [0] * nodes, cluster.output_tails()
        resumes = [event for event in cluster.events("resume") if event["generation"] > 1]
        assert len(kills_at) <= len(resumes)
        assert cluster.lost_steps <= len(kills_at)
    return check_end(step_log, world_size=nodes, epochs=EPOCHS)


@pytest.mark.parametrize("nodes", [1, 2])
def test_killed_job_on_gpu_ends_with_undisturbed_weights(tmp_path: Path, nodes: int) -> None:
    """The weights are bit-identical; each kill costs one step at most."""
    undisturbed = train(tmp_path / "undisturbed", nodes)
    assert train(tmp_path / "killed", nodes, kills_at=KILLS_AT) == undisturbed


def test_replicas_on_gpu_are_compared(tmp_path: Path) -> None:
    """Digests are computed of snapshots, so a GPU costs nothing there; equal replicas are no divergence."""
    train(tmp_path / "checked", 2, ELASTIC_RESUME_CHECK_REPLICAS="5")
