"""A node lists its checkpoints for a resume, and quarantines damaged ones."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from elastic_resume import constants, events
from elastic_resume.checkpoint import node_dir, reader
from elastic_resume.checkpoint.catalog import Catalog
from elastic_resume.checkpoint.reader import checkpoint_name
from elastic_resume.config import Settings
from elastic_resume.errors import (
    CorruptError,
    NewerFormatError,
    NoValidCheckpointError,
    TornError,
    UnreadableError,
)
from elastic_resume.events import EventLog
from elastic_resume.policy import reasons, resume_plan
from elastic_resume.policy.resume_plan import Inventory, ResumePlan
from elastic_resume.ranks.collectives import Collectives
from elastic_resume.ranks.rank_context import RankContext
from elastic_resume.restore import coordinator
from elastic_resume.restore.attempt import NodeFailures, RestoreAttempt, _parse_values_layout
from elastic_resume.restore.sources import MemorySource, list_sources, take_inventory
from elastic_resume.restore.streaming import BackgroundTask
from elastic_resume.slots.ipc import SlotClient
from elastic_resume.slots.progress_page import ProgressPage
from tests.support.checkpoint_samples import (
    RUN,
    SMALL_BLOCK,
    flip_bits,
    make_image,
    make_manifest,
    save_checkpoint,
)

NEWER = '{"kind":"elastic_resume checkpoint","format":99}'


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """The directory of node a, with checkpoints of steps 1 and 2."""
    path = tmp_path / RUN / "a"
    path.mkdir(parents=True)
    save_checkpoint(path, 1, 1)
    save_checkpoint(path, 1, 2)
    return path


def make_context(node: Path, mode: str = "auto") -> RankContext:
    """Return the context of rank 0 of a world of one, on that node."""
    settings = Settings.for_worker(
        {}, "train.py", ckpt_dir=node.parent.parent, run_id=RUN, node_name="a", resume=mode
    )
    return RankContext(Collectives(0, 1, None), settings, EventLog(node / constants.EVENTS_FILE, node="a"))


def list_node(node: Path, mode: str = "auto", generation: int = 1) -> Inventory:
    """Return the inventory that the node sends to the others."""
    context, page = make_context(node, mode), ProgressPage(node / constants.PROGRESS_FILE)
    return take_inventory(context, list_sources(context, None), page, generation)


def plan_resume(node: Path, mode: str = "auto") -> ResumePlan:
    """Return the plan for the node's inventory."""
    return resume_plan.choose_resume_plan([list_node(node, mode)], mode)


def execute(context: RankContext, plan: ResumePlan) -> NodeFailures:
    """Execute a plan without tracked objects; return the copies that failed."""
    return RestoreAttempt(context, plan, None).run({})[1]


def exclude(
    context: RankContext, plan: ResumePlan, inventories: list[Inventory], failures: NodeFailures
) -> list[Inventory]:
    """Return the inventories without the failed copies."""
    sources = list_sources(context, None)
    return coordinator._exclude_failed_states(context, plan, sources, inventories, failures)


def read_events(node: Path, kind: str) -> list[events.Event]:
    """Return the events of one kind."""
    return [event for event in events.read(node / constants.EVENTS_FILE) if event["event"] == kind]


def test_inventory_survives_json_round_trip(node: Path) -> None:
    """It has valid and rejected checkpoints."""
    (node / checkpoint_name(1, 2) / constants.MANIFEST_FILE).write_text(NEWER)
    node_dir.record_committed_generation(node, 1)
    inventory = list_node(node)
    assert (inventory.committed_generation, [r.kind for r in inventory.rejected]) == (1, ["newer"])
    assert coordinator._parse_inventory(reasons.to_json(inventory)) == inventory


def test_absent_nodes_states_count_only_by_generation_with_resume_never(node: Path) -> None:
    """On a shared disk an absent node's directory may be of an earlier run."""
    (node.parent / "absent").mkdir()
    save_checkpoint(node.parent / "absent", 7, 9)
    assert plan_resume(node).version == (7, 9)
    plan = plan_resume(node, "never")
    assert (plan.version, plan.generation) == ((1, 2), 8)


def test_inventory_quarantines_checkpoint_without_state_file(node: Path) -> None:
    """Nobody could ever load it; an event is emitted."""
    (node / checkpoint_name(1, 2) / constants.STATE_FILE).unlink()
    inventory = list_node(node)
    assert [copy.step for copy in inventory.saved_states] == [1]
    assert [(r.name, r.kind) for r in inventory.rejected] == [(checkpoint_name(1, 2), "aside")]
    assert len(read_events(node, "quarantine")) == 1


def test_newer_format_stops_job_and_stays_in_place(node: Path) -> None:
    """The older checkpoint is not restored instead."""
    (node / checkpoint_name(1, 2) / constants.MANIFEST_FILE).write_text(NEWER)
    with pytest.raises(NoValidCheckpointError, match=r"format 99.*Upgrade"):
        plan_resume(node)
    assert (node / checkpoint_name(1, 2) / constants.MANIFEST_FILE).read_text() == NEWER
    assert not (node / constants.QUARANTINE_DIR).exists()


def test_inventory_rejects_checkpoint_of_another_run_in_place(node: Path) -> None:
    """The node's own older checkpoint is restored."""
    other = Path(f"{node}-other")
    other.mkdir()
    save_checkpoint(other, 7, 8).rename(node / checkpoint_name(7, 9))
    plan = plan_resume(node)
    assert (plan.step, plan.generation) == (2, 2)
    assert [(r.name, r.kind) for r in plan.rejected] == [(checkpoint_name(7, 9), "foreign")]
    assert (node / checkpoint_name(7, 9)).is_dir()


def test_inventory_rejects_unreadable_checkpoint_in_place(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device fails for a moment; the next restore finds the checkpoint."""
    real = os.open
    newest = node / checkpoint_name(1, 2)

    def fail(path: Path, flags: int, mode: int = 0o777) -> int:
        if newest in Path(path).parents:
            raise OSError(5, os.strerror(5), str(path))
        return real(path, flags, mode)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", fail)
        plan = plan_resume(node)
    assert (plan.step, [r.kind for r in plan.rejected]) == (1, ["unreadable"])
    assert plan_resume(node).step == 2


def test_inventory_lists_linked_checkpoint_and_rejects_dead_link(node: Path) -> None:
    """Neither link is moved."""
    kept = Path(f"{node}-kept")
    (node / checkpoint_name(1, 2)).rename(kept)
    link = node / checkpoint_name(1, 2)
    link.symlink_to(kept)
    assert plan_resume(node).step == 2
    kept.rename(f"{node}-unmounted")
    plan = plan_resume(node)
    assert (plan.step, [r.kind for r in plan.rejected]) == (1, ["unreadable"])
    assert link.is_symlink()


def test_inventory_leaves_damaged_checkpoint_behind_link(node: Path) -> None:
    """It is on another disk, and a person created the link."""
    link = node / checkpoint_name(1, 9)
    link.symlink_to(node / checkpoint_name(1, 2))
    assert [r.kind for r in list_node(node).rejected] == ["foreign"], "it has another name than its manifest"
    link.unlink()
    aside = Path(f"{node}-kept")
    (node / checkpoint_name(1, 2)).rename(aside)
    (node / checkpoint_name(1, 2)).symlink_to(aside)
    (aside / constants.STATE_FILE).unlink()
    assert [r.kind for r in list_node(node).rejected] == ["torn"]
    assert (node / checkpoint_name(1, 2)).is_symlink()


@pytest.mark.parametrize("damage", [b"\xff" * 32768, (9).to_bytes(8, "little"), b"garbage"])
def test_damaged_progress_page_costs_only_recomputed_count(node: Path, damage: bytes) -> None:
    """The generation comes from generation.json and the checkpoints."""
    (node / constants.PROGRESS_FILE).write_bytes(damage)
    plan = plan_resume(node)
    assert (plan.generation, plan.step, plan.recomputed_steps) == (2, 2, 0)


def test_plan_counts_unsaved_steps_of_progress_page_as_recomputed(node: Path) -> None:
    """The progress page has the newest finished step."""
    ProgressPage(node / constants.PROGRESS_FILE).start_generation(0, generation=1, step=37, world_size=1)
    assert plan_resume(node).recomputed_steps == 35


def test_plan_refuses_cold_start_if_checkpoints_were_removed(node: Path) -> None:
    """The other files show that the node is not new."""
    node_dir.record_committed_generation(node, 1)
    for entry in Catalog(node, RUN).list_entries():
        entry.path.rename(f"{node}-{entry.step}")
    with pytest.raises(NoValidCheckpointError, match="had checkpoints of this job"):
        plan_resume(node)


# ---- copies that fail while they are read -----------------------------------------------------


@pytest.mark.parametrize(
    ("error", "moved"), [(CorruptError, True), (TornError, True), (UnreadableError, False), (OSError, False)]
)
def test_failed_load_quarantines_only_proven_damage(
    node: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception], moved: bool
) -> None:
    """In each case the next plan excludes the checkpoint, with the reason."""

    def fail(*_: object) -> NoReturn:
        raise error("made up")

    context, inventories = make_context(node), [list_node(node)]
    plan = resume_plan.choose_resume_plan(inventories, "auto")
    monkeypatch.setattr(reader, "map_unverified", fail)
    failures = execute(context, plan)
    again = resume_plan.choose_resume_plan(exclude(context, plan, inventories, failures), "auto")
    assert (again.step, len(again.rejected)) == (1, 1)
    assert "made up" in again.rejected[0].reason
    assert (node / checkpoint_name(1, 2)).exists() is not moved


@pytest.mark.parametrize("source", ["a", "b"])
def test_state_of_another_size_than_planned_is_not_loaded(node: Path, source: str) -> None:
    """It was replaced after the inventory, or it is not that of the source."""
    plan = plan_resume(node)
    ((_, state),) = plan.holders
    other = replace(state, nbytes=1)
    holders = (("a", other if source == "a" else state), ("b", other))
    failures = execute(make_context(node), replace(plan, source_node=source, holders=holders))
    kind, reason = failures["a"]
    assert (kind, "bytes were expected" in reason) == (UnreadableError.kind, True)


@pytest.mark.parametrize(("block_bytes", "is_manifests"), [(SMALL_BLOCK, True), (4096, False)])
def test_served_digests_are_those_of_the_manifest(node: Path, block_bytes: int, is_manifests: bool) -> None:
    """If it has blocks of that size. They would show bytes that changed in memory."""
    plan = plan_resume(node)
    attempt = RestoreAttempt(make_context(node), plan, None)
    opened = attempt._open_own(plan.holders[0][1])
    assert [task.join() for task in opened.tasks] == [None]
    assert opened.manifest is not None
    claimed = replace(opened.manifest, blocks=("00" * 16,) * len(opened.manifest.blocks))
    with contextlib.closing(attempt._serve(replace(opened, manifest=claimed), block_bytes)) as server:
        assert (server.table.get_digest(1) == bytes(16)) == is_manifests


def test_lost_connection_to_a_rank_is_no_fault_of_a_state(node: Path) -> None:
    """It ends the generation."""

    def fail() -> NoReturn:
        raise ConnectionError("made up")

    loader: Any = None
    attempt = RestoreAttempt(make_context(node), plan_resume(node), None)
    attempt._tasks.append(BackgroundTask("test", fail))
    with pytest.raises(ConnectionError, match="made up"):
        attempt._load_and_join_tasks(None, loader)


@pytest.mark.parametrize(
    ("kinds", "kind"), [("unreadable corrupt", "corrupt"), ("torn unreadable", "torn"), ("- newer", "newer")]
)
def test_rank_that_proved_a_state_invalid_overrules_others(node: Path, kinds: str, kind: str) -> None:
    """The state of one node may fail on several ranks."""
    context, plan = make_context(node), plan_resume(node)
    context.node_by_rank = ["a", "a"]
    failures = [None if each == "-" else [each, f"is {each}"] for each in kinds.split()]
    grouped = RestoreAttempt(context, plan, None)._group_failures_by_node(failures)
    assert grouped == {"a": (kind, f"is {kind}")}


@pytest.mark.parametrize("nbytes", [0, 101])
def test_values_larger_than_the_state_are_refused(nbytes: int) -> None:
    """Before memory is allocated for them."""
    with pytest.raises(CorruptError, match=f"announced {nbytes} of 100 bytes"):
        _parse_values_layout("", nbytes, 100)


def test_restore_detects_flipped_bit_before_loading(node: Path) -> None:
    """The quick check at listing time does not read the data."""
    flip_bits(node / checkpoint_name(1, 2) / constants.STATE_FILE, -1)
    context, inventories = make_context(node), [list_node(node)]
    plan = resume_plan.choose_resume_plan(inventories, "auto")
    failures = execute(context, plan)
    assert failures["a"][0] == CorruptError.kind
    exclude(context, plan, inventories, failures)
    assert not (node / checkpoint_name(1, 2)).exists()


def test_newer_format_found_at_open_stops_job(node: Path) -> None:
    """The older checkpoint is not restored instead."""
    inventories = [list_node(node)]
    plan = resume_plan.choose_resume_plan(inventories, "auto")
    (node / checkpoint_name(1, 2) / constants.MANIFEST_FILE).write_text(NEWER)
    context = make_context(node)
    failures = execute(context, plan)
    assert failures["a"][0] == NewerFormatError.kind
    with pytest.raises(NoValidCheckpointError, match="Upgrade"):
        resume_plan.choose_resume_plan(exclude(context, plan, inventories, failures), "auto")
    assert (node / checkpoint_name(1, 2)).exists()


# ---- the snapshot in memory -------------------------------------------------------------------


def fill_slot(client: SlotClient, step: int, run_id: str = RUN) -> None:
    """Make a state of that step this node's snapshot."""
    image = make_image(step)
    manifest = replace(make_manifest(1, step, run_id=run_id), file_bytes=len(image))
    slot = client.acquire_slot(manifest)
    assert slot is not None
    slot.memory[: len(image)] = image
    client.finish_fill(slot, manifest, on_disk=True)


def test_snapshot_of_another_run_is_discarded(node: Path, client: SlotClient) -> None:
    """The older one of this run is listed."""
    fill_slot(client, 1)
    fill_slot(client, 2, "another")
    listing = MemorySource(make_context(node), client).list_states()
    assert [state.step for state in listing.saved_states] == [1]
    assert [(rejected.kind, rejected.version) for rejected in listing.rejected] == [("foreign", (1, 2))]


def test_each_snapshot_is_listed_newest_first_and_given_up_alone(node: Path, client: SlotClient) -> None:
    """An earlier one is read for the proof of a resume. What is gone is neither opened nor given up."""
    source = MemorySource(make_context(node), client)
    for step in (1, 2):
        fill_slot(client, step)
    newest, earlier = source.list_states().saved_states
    assert (newest.step, earlier.step) == (2, 1)
    assert bytes(source.open(earlier).buffer.memory) == bytes(make_image(1))
    gone = replace(earlier, step=9)
    for kept in (source, MemorySource(make_context(node), None)):
        with pytest.raises(UnreadableError, match="no longer in this node's memory"):
            kept.open(gone)
        kept.give_up(gone, "made up")
    assert source.list_states().saved_states == (newest, earlier)
    source.give_up(newest, "made up")
    assert source.list_states().saved_states == (earlier,)
