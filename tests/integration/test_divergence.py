"""A node whose weights differ is found and named during training, and the job ends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from elastic_resume import constants
from elastic_resume.agent.snapshots import serve_snapshots
from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.config import Settings
from elastic_resume.mechanisms.mechanism import decode_body
from elastic_resume.mechanisms.replicas.judge import DIGESTS, StateDigest
from elastic_resume.policy.checkpoint_interval import AUTO
from elastic_resume.rendezvous.facts import FactBody
from elastic_resume.slots.ipc import SnapshotClient
from elastic_resume.testing import Cluster
from tests.support.rendezvous_nodes import wait_until
from tests.support.snapshot_samples import SLOT_BYTES, write_snapshot
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


class FakeClient:
    """A client without a rendezvous."""

    node = "a"

    def __init__(self) -> None:
        self.digests: list[tuple[int, int]] = []

    def send_fact(self, topic: str, generation: int, body: FactBody) -> None:
        """Keep the digest."""
        assert topic == DIGESTS.name
        self.digests.append((generation, decode_body(StateDigest, body).step))


def test_digest_is_sent_under_the_generation_of_the_view(tmp_path: Path) -> None:
    """Workers that resumed another job's generation 50 are in 51, and their view is the first."""
    settings = Settings(tmp_path, "job", "a", AUTO, 3, "auto", snapshot_memory=3 * SLOT_BYTES)
    nothing: Any = lambda *_, **__: None  # noqa: E731
    client: Any = FakeClient()
    with (
        NodeDir.claim(tmp_path, "job", "a") as node_dir,
        serve_snapshots(node_dir.path, settings, nothing) as service,
    ):
        service.start_replica_comparison(client)
        slot_pool = service.committer.slot_pool
        connection = SnapshotClient(os.environ[constants.ENV_COMMITTER])
        slot_pool.reserve(SLOT_BYTES)
        snapshot_id = write_snapshot(slot_pool._owned[0].slot, 9, generation=51)
        connection.send("compare", snapshot_id=snapshot_id, generation=1)
        wait_until(lambda: bool(client.digests), "the digest")
        assert client.digests[0] == (1, 9)
        connection.close()
