"""A node's memory for snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.slots.committer import CheckpointCommitter
from elastic_resume.slots.ipc import SlotClient, SnapshotServer
from elastic_resume.slots.slot_pool import SlotPool


@pytest.fixture
def client(tmp_path: Path) -> Iterator[SlotClient]:
    """Yield a local leader's connection to the committer of a node without a snapshot."""
    with NodeDir.claim(tmp_path, "job", "n0") as node_dir:
        pool = SlotPool(1 << 26)
        committer = CheckpointCommitter(node_dir.path, "job", pool, emit=lambda *_, **__: None)
        server = SnapshotServer(committer)
        committer.start()
        server.start()
        slot_client = SlotClient(server.socket_name, 0, is_local_leader=True)
        yield slot_client
        slot_client.close()
        server.close()
        committer.close()
