"""Test that a process killed during a copy or a commit leaves only whole slots and checkpoints."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_resume import constants
from elastic_resume.checkpoint.catalog import Catalog
from elastic_resume.checkpoint.layout import Layout
from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.errors import MachineError
from elastic_resume.slots import slot_memory
from elastic_resume.slots.committer import CheckpointCommitter
from elastic_resume.slots.ipc import SlotClient, SnapshotServer
from elastic_resume.slots.slot_memory import Slot
from elastic_resume.slots.slot_pool import SlotPool
from elastic_resume.state import state_dict
from elastic_resume.state.state_dict import TensorBuffer
from tests.support import launch_ranks
from tests.support.paths import ROOT
from tests.support.snapshot_samples import read_newest

pytestmark = pytest.mark.slow

# Trains ten steps; before each `run.step()` it writes the digests of the state.
TRAIN = """
import json, os, sys, torch
import elastic_resume as er
from elastic_resume import failpoints
from elastic_resume.state import state_dict as state
os.environ["ELASTIC_RESUME_FAILPOINTS"] = sys.argv[2]  # in the environment of its start it would start cold
failpoints.arm()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
optimizer = torch.optim.AdamW(model.parameters())
run = er.resume(model=model, optimizer=optimizer, snapshot_every=1, save_every=1000000)
for _ in range(10):
    model(torch.randn(4, 8)).pow(2).mean().backward()
    optimizer.step()
    flat = state.flatten({"model": model, "optimizer": optimizer})
    with open(sys.argv[1], "a") as file:
        print(json.dumps(state.digest_leaves(flat.leaves)), file=file)
    run.step()
"""
COMMIT = """
import sys
from pathlib import Path
from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.slots.committer import CheckpointCommitter
from elastic_resume.slots.slot_pool import SlotPool
from elastic_resume.slots.slot_memory import Slot
from tests.support.snapshot_samples import SLOT_BYTES, write_snapshot
with NodeDir.claim(Path(sys.argv[1]), "job", "a") as node_dir:
    pool = SlotPool(3 * SLOT_BYTES)
    pool.reserve(SLOT_BYTES)
    committer = CheckpointCommitter(node_dir.path, "job", pool, emit=lambda *_, **__: None)
    committer.start()
    for step in range(1, 6):
        committer.commit(write_snapshot(pool._owned[step % 3].slot, step))
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SnapshotServer]:
    """Yield the snapshot server of a node's agent."""
    with NodeDir.claim(tmp_path, "job", "n0") as node_dir:
        pool = SlotPool(1 << 26)
        committer = CheckpointCommitter(node_dir.path, "job", pool, emit=lambda *_, **__: None)
        snapshot_server = SnapshotServer(committer)
        committer.start()
        snapshot_server.start()
        yield snapshot_server
        snapshot_server.close()
        committer.close()


@pytest.mark.parametrize("point", ["started", "written", "copying", "copied", "confirmed"])
def test_worker_killed_during_copy_leaves_whole_snapshot(
    point: str, server: SnapshotServer, tmp_path: Path
) -> None:
    """The newest snapshot is that of the step before, or of this step once it is confirmed."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    digests_file = tmp_path / "digests_file"
    env = {
        constants.ENV_AGENT_PID: str(os.getpid()),
        constants.ENV_COMMITTER: server.socket_name,
        constants.ENV_CKPT_DIR: str(tmp_path),
        constants.ENV_RUN_ID: "job",
    }
    (end,) = launch_ranks.run_ranks(1, script, str(digests_file), f"snapshot.{point}=kill@6", env=[env])
    assert end.returncode == -signal.SIGKILL, end.stderr
    memory = SlotClient(server.socket_name, 0, is_local_leader=True)
    newest = read_newest(memory)
    assert newest is not None
    assert newest.manifest.step == (6 if point == "confirmed" else 5)
    image = TensorBuffer(Layout.parse(newest.image, len(newest.image)), newest.image)
    leaves = [state_dict.Leaf(name, image.tensor(name), state_dict.OTHER) for name in image.layout.extents]
    expected = json.loads(digests_file.read_text().splitlines()[newest.manifest.step - 1])
    found = state_dict.digest_leaves(leaves)
    assert {name: found[name] for name in expected} == expected
    memory.close()


def test_slot_whose_pages_cannot_be_mapped_is_not_writable(
    server: SnapshotServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step then takes no snapshot; it does not fail."""
    memory = SlotClient(server.socket_name, 0, is_local_leader=True)

    def refuse(_: memoryview) -> None:
        raise MachineError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(slot_memory, "populate_pages", refuse)
        assert memory.reserve(4096) > 0
        assert memory.list_writable(4096) == []
    assert memory.list_writable(4096)
    memory.close()


def test_slot_that_this_process_cannot_map_counts_as_missing(
    server: SnapshotServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore then reads the checkpoint without a slot. No descriptor is left open."""
    memory = SlotClient(server.socket_name, 0, is_local_leader=True)
    assert memory.reserve(4096) > 0

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    def count_open() -> int:
        return sum("slot-0" in str(link.resolve()) for link in Path("/proc/self/fd").iterdir())

    before = count_open()
    with monkeypatch.context() as patch:
        patch.setattr(Slot, "__init__", refuse)
        assert memory.map_slot(0) is None
    assert count_open() == before
    assert memory.map_slot(0) is not None
    memory.close()


POINTS = [
    "committer.written",
    "commit.before-data",
    "commit.after-data",
    "commit.before-manifest",
    "commit.before-rename",
    "commit.after-rename",
]


@pytest.mark.parametrize("point", POINTS)
def test_committer_killed_during_commit_leaves_whole_checkpoints(point: str, tmp_path: Path) -> None:
    """All older checkpoints are whole, and so is the new one if it has its final name."""
    env = {**os.environ, constants.ENV_FAILPOINTS: f"{point}=kill@3"}
    command = [sys.executable, "-c", COMMIT, str(tmp_path)]
    end = subprocess.run(command, env=env, cwd=ROOT, check=False, timeout=60)
    assert end.returncode == -signal.SIGKILL
    entries = Catalog(tmp_path / "job" / "a", "job").list_entries(read_data=True)
    assert [entry.error for entry in entries] == [None] * len(entries)
    assert [entry.step for entry in entries] == ([3, 2, 1] if point == "commit.after-rename" else [2, 1])
