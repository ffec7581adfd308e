"""The checkpoint format stays readable: load a checkpoint that version 0.1.0 wrote before the renaming.

``tests/support/old_checkpoint`` is the node directory of a run of three steps. Beside one checkpoint it has
the small files of that version, some under names that are no longer used (``life.json``, ``start.json``).
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

import elastic_resume as er
from elastic_resume import constants
from elastic_resume.checkpoint import node_dir
from elastic_resume.checkpoint.catalog import Catalog
from elastic_resume.checkpoint.layout import Layout
from elastic_resume.checkpoint.manifest import Position
from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.checkpoint.reader import checkpoint_name, deep_check, read_image
from elastic_resume.config import Settings
from elastic_resume.events import EventLog
from elastic_resume.ranks.collectives import Collectives
from elastic_resume.ranks.rank_context import RankContext
from elastic_resume.rendezvous.net.durable_state import DurableStateFile
from elastic_resume.restore.inventory import list_snapshots_and_checkpoints
from elastic_resume.slots.progress_page import ProgressPage
from tests.support.paths import TESTS

OLD_RUN = TESTS / "support" / "old_checkpoint" / "job"
WEIGHT = [0.0714608654, -0.400968641, 0.196056843, 0.192167163, -0.349130422, -0.0837664604]


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """Return a writable copy of the old node directory."""
    shutil.copytree(OLD_RUN, tmp_path / "job")
    return tmp_path / "job" / "node-a"


def test_reader_verifies_old_checkpoint() -> None:
    """Manifest, digests and layout are those of the present format."""
    path = OLD_RUN / "node-a" / checkpoint_name(1, 3)
    manifest = deep_check(path, "job")
    assert (manifest.node, manifest.world_size) == ("node-a", 1)
    assert manifest.position == Position(epoch=0, step_in_epoch=3, step=3, samples=0)
    image = read_image(path, manifest)
    assert "model/0.weight" in Layout.parse(image, len(image)).extents


def test_manifest_of_old_checkpoint_encodes_to_same_bytes() -> None:
    """A checkpoint written today is readable by the old version too."""
    path = OLD_RUN / "node-a" / checkpoint_name(1, 3)
    encoded = deep_check(path, "job").to_bytes()
    assert encoded == (path / constants.MANIFEST_FILE).read_bytes()


def test_catalog_lists_old_checkpoint_as_valid(node: Path) -> None:
    """Old files beside the checkpoint are ignored and kept."""
    catalog = Catalog(node, "job")
    assert [entry.version for entry in catalog.list_valid(read_data=True)] == [(1, 3)]
    assert catalog.remove_unfinished() == []
    assert (node / "life.json").exists()


def test_load_reads_old_checkpoint() -> None:
    """The state_dict of the model has the values printed when it was saved."""
    state = er.load(OLD_RUN)
    assert state["0.weight"].flatten().tolist() == pytest.approx(WEIGHT)
    assert state["1.num_batches_tracked"] == torch.tensor(3)
    assert er.load(OLD_RUN, name="optimizer")["param_groups"][0]["lr"] == 0.01


@pytest.mark.parametrize("mode", ["auto", "never"])
def test_inventory_offers_old_checkpoint(node: Path, mode: str) -> None:
    """Files under old names count as missing: the launcher and the script's arguments are unknown."""
    settings = Settings.for_worker(
        {}, "train.py", ckpt_dir=node.parent.parent, run_id="job", node_name="node-a", resume=mode
    )
    context = RankContext(
        Collectives(0, 1, None), settings, EventLog(node / constants.EVENTS_FILE, node="node-a")
    )
    inventory = list_snapshots_and_checkpoints(context, ProgressPage(node / constants.PROGRESS_FILE), 1)
    assert [(state.generation, state.step) for state in inventory.saved_states] == [(1, 3)]
    assert inventory.rejected == ()
    assert inventory.committed_generation == 1
    assert not inventory.has_restarted


def test_node_directory_of_old_version_is_claimed_with_its_identity(node: Path) -> None:
    """Identity and generation have kept their names and content."""
    with NodeDir.claim(node.parent.parent, "job", "node-a") as claimed:
        assert claimed.read_identity() == "b4e897af2d333edcea4944910cbb79bb"
        assert claimed.read_generation() == 1
        assert node_dir.read_script_arguments(node) == ("", [])


def test_rendezvous_state_of_old_version_is_read(node: Path) -> None:
    """An agent starts in the old directory and continues its count of generations."""
    state = DurableStateFile(node).state
    assert state is not None
    assert state.max_generation == 1


def test_run_resumes_in_old_node_directory(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script continues at the old step with the old weights and learning rate."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt_dir = node.parent.parent
    with er.resume(
        model=model, optimizer=optimizer, ckpt_dir=ckpt_dir, run_id="job", node_name="node-a"
    ) as run:
        assert (run.position.step, optimizer.param_groups[0]["lr"]) == (3, 0.01)
        assert model.get_parameter("0.weight").flatten().tolist() == pytest.approx(WEIGHT)
    assert (node / constants.GENERATION_FILE).read_text() == '{"generation": 2}\n'
