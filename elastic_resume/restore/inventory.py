"""The inventory of one node: the snapshots and checkpoints that it could restore, and the ones it rejects.

Each local leader builds one at the start of a generation, and the ranks exchange them as JSON.
`policy.resume_plan` turns all inventories into one plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_resume.checkpoint import node_dir, reader
from elastic_resume.checkpoint.catalog import Catalog, CatalogEntry, read_quarantine_reason, scan_run
from elastic_resume.checkpoint.manifest import Manifest
from elastic_resume.errors import CheckpointError, ElasticResumeError, ForeignError, NodeFileError
from elastic_resume.policy.resume_plan import DISK, MEMORY, Inventory, RejectedState, SavedState
from elastic_resume.ranks import rank_context
from elastic_resume.ranks.rank_context import RankContext
from elastic_resume.slots import slot_memory
from elastic_resume.slots.progress_page import ProgressPage

MAX_LISTED_COPIES = 64  # limit per directory, newest first; older ones matter only after 64 corrupt ones


def list_snapshots_and_checkpoints(
    context: RankContext, progress_page: ProgressPage, generation: int
) -> Inventory:
    """List what this node could restore from memory and disk; quarantine checkpoints that are damaged.

    A damaged checkpoint lacks a file, is truncated or has an invalid manifest. Checkpoints that are
    unreadable now, of a newer format or of another job stay in place.

    Rank 0's node also lists the directories of other nodes that it sees on a shared file system, because a
    job may restart on other machines. It never writes there. No other node does this, to limit the load on
    the file server. With ``--resume never`` only the generations of those states count, since an absent node
    has not moved its earlier run aside.
    """
    for entry in context.catalog.list_entries():
        if entry.is_damaged:
            context.quarantine(entry.path, str(entry.error))
    entries_by_owner = {context.node: context.catalog.list_entries()}
    # Generations that ended before their first step left nothing on disk, but agents have counted them.
    newest_generation = max(generation, rank_context.assigned_generation() - 1)
    if context.collectives.rank == 0:
        visible = scan_run(context.run_dir, context.settings.run_id)
        if context.settings.resume == "never":
            seen = [entry.generation for entries in visible.values() for entry in entries]
            newest_generation = max([newest_generation, *seen])
        else:
            entries_by_owner = visible | entries_by_owner
    saved_states, rejected = _list_snapshots(context)
    for owner, entries in entries_by_owner.items():
        listed = entries[:MAX_LISTED_COPIES]
        valid = [entry.manifest for entry in listed if entry.manifest is not None and entry.error is None]
        saved_states += [_to_saved_state(owner, manifest) for manifest in valid]
        rejected += _list_rejected(context, owner, entries)
    last_generation, last_step, last_world_size = _read_last_step(context, progress_page, generation)
    last_launcher, command = node_dir.read_script_arguments(context.node_dir)
    return Inventory(
        node=context.node,
        local_leader_rank=context.collectives.rank,
        saved_states=tuple(saved_states),
        rejected=tuple(rejected),
        generation=newest_generation,
        committed_generation=node_dir.read_committed_generation(context.node_dir),
        last_step=last_step,
        last_generation=last_generation,
        last_world_size=last_world_size or None,
        has_restarted=last_launcher == rank_context.launcher_id(),
        command=tuple(command),
    )


def to_json(inventory: Inventory) -> dict[str, Any]:
    """Return ``inventory`` as a JSON object."""
    return dataclasses.asdict(inventory)


def from_json(encoded: Mapping[str, Any]) -> Inventory:
    """Read an inventory that another rank encoded with `to_json`.

    Raises:
        ElasticResumeError: the other rank runs a version with other fields.

    """
    try:
        members = {
            "saved_states": tuple(SavedState(**state) for state in encoded["saved_states"]),
            "rejected": tuple(
                RejectedState(**{**state, "version": tuple(state["version"])})
                for state in encoded["rejected"]
            ),
            "command": tuple(encoded["command"]),
        }
        return Inventory(**{**encoded, **members})
    except (KeyError, TypeError) as error:
        raise ElasticResumeError(
            f"a node's inventory cannot be read ({error}): do all nodes run the same elastic_resume?"
        ) from error


def _read_last_step(
    context: RankContext, progress_page: ProgressPage, generation: int
) -> tuple[int, int, int]:
    try:
        return progress_page.newest_progress(generation)
    except NodeFileError as error:
        context.events.emit("progress-page-ignored", reason=str(error))
        progress_page.clear()
        return 0, 0, 0


def _list_rejected(
    context: RankContext, owner_node: str, entries: Sequence[CatalogEntry]
) -> list[RejectedState]:
    rejected = [
        RejectedState(owner_node, entry.path.name, str(entry.error), entry.version, entry.error.kind)
        for entry in entries
        if entry.error is not None
    ]
    for path in Catalog(context.run_dir / owner_node, None).list_quarantined():
        version = reader.parse_checkpoint_name(path.name.split(".")[0]) or (0, 0)
        rejected.append(RejectedState(owner_node, path.name, read_quarantine_reason(path), version, "aside"))
    return rejected


def _list_snapshots(context: RankContext) -> tuple[list[SavedState], list[RejectedState]]:
    """List the newest valid snapshot in this node's memory; discard newer ones that are damaged."""
    rejected: list[RejectedState] = []
    client = context.slot_client
    while (
        client is not None
        and (state := slot_memory.newest_complete(client.control_block.read_slots())) is not None
    ):
        try:
            snapshot = client.find_newest()
            if snapshot is not None and snapshot.manifest.run_id != context.settings.run_id:
                raise ForeignError(f"belongs to the run {snapshot.manifest.run_id!r}.")
        except CheckpointError as error:
            version = slot_memory.decode_snapshot_id(state.target)
            name = f"{reader.checkpoint_name(*version)} (in memory)"
            rejected.append(RejectedState(context.node, name, str(error), version, error.kind))
            client.discard(state.index)
            continue
        if snapshot is not None:
            return [_to_saved_state(context.node, snapshot.manifest, MEMORY)], rejected
        break
    return [], rejected


def _to_saved_state(owner_node: str, manifest: Manifest, tier: str = DISK) -> SavedState:
    version, size, epoch = (manifest.generation, manifest.step), manifest.file_bytes, manifest.position.epoch
    return SavedState(owner_node, *version, manifest.rank, tier, size, epoch)
