"""The inventory of one node: the snapshots and checkpoints that it could restore, and the ones it rejects.

Each local leader builds one at the start of a generation, and the ranks exchange them as JSON.
`policy.resume_plan` turns all inventories into one plan.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_resume import constants
from elastic_resume.checkpoint import node_dir, reader
from elastic_resume.checkpoint.catalog import Catalog, CatalogEntry, read_quarantine_reason, scan_run
from elastic_resume.checkpoint.manifest import Manifest
from elastic_resume.errors import CheckpointError, ElasticResumeError, ForeignError, NodeFileError
from elastic_resume.policy.resume_plan import DISK, MEMORY, Inventory, RejectedState, SavedState
from elastic_resume.ranks import rank_context
from elastic_resume.ranks.rank_context import RankContext
from elastic_resume.slots import slot_memory
from elastic_resume.slots.progress_page import ProgressPage

_STARTTIME_FIELD = 19  # index in /proc/PID/stat of proc(5)'s starttime, counted after the name
MAX_LISTED_COPIES = 64  # limit per directory, newest first; older ones matter only after 64 corrupt ones


def list_snapshots_and_checkpoints(
    context: RankContext, progress_page: ProgressPage, generation: int
) -> Inventory:
    """List what this node could restore from memory and disk; quarantine checkpoints that are damaged.

    A damaged checkpoint lacks a file, is truncated or has an invalid manifest. Checkpoints that are
    unreadable now, of a newer format or of another job stay in place.

    Rank 0's node also lists the directories of other nodes that it sees on a shared file system, because a
    job may restart on other machines. It never writes there. No other node does this, to limit the load on
    the file server.
    """
    for entry in context.catalog.list_entries():
        if entry.is_damaged:
            context.quarantine(entry.path, str(entry.error))
    entries_by_owner = {context.node: context.catalog.list_entries()}
    if context.collectives.rank == 0:
        entries_by_owner = scan_run(context.run_dir, context.settings.run_id) | entries_by_owner
    saved_states, rejected = _list_snapshots(context)
    for owner, entries in entries_by_owner.items():
        listed = entries[:MAX_LISTED_COPIES]
        valid = [entry.manifest for entry in listed if entry.manifest is not None and entry.error is None]
        saved_states += [_to_saved_state(owner, manifest) for manifest in valid]
        rejected += _list_rejected(context, owner, entries)
    min_generation, has_joined_world = 0, False
    if context.settings.resume == "never":
        min_generation, has_joined_world = node_dir.read_min_generation(
            context.node_dir, launcher_id(), generation
        )
    last_generation, last_step, last_world_size = _read_last_step(context, progress_page, generation)
    last_launcher, command = node_dir.read_script_arguments(context.node_dir)
    return Inventory(
        node=context.node,
        local_leader_rank=context.collectives.rank,
        saved_states=tuple(saved_states),
        rejected=tuple(rejected),
        # Generations that ended before their first step left nothing on disk, but agents have counted them.
        generation=max(generation, rank_context.assigned_generation() - 1),
        min_generation=min_generation,
        has_joined_world=has_joined_world,
        committed_generation=node_dir.read_committed_generation(context.node_dir),
        last_step=last_step,
        last_generation=last_generation,
        last_world_size=last_world_size or None,
        has_restarted=last_launcher == launcher_id(),
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


def launcher_id() -> str:
    """Identify this start of the job by its launcher: the node's agent, torchrun, or this process.

    The id holds the launcher's start time in ticks since boot, and the boot. A wall-clock time could change,
    and this start's own checkpoints would then count as an earlier start's.
    """
    agent = os.environ.get(constants.ENV_AGENT_PID)
    pid = int(agent) if agent else os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    try:
        start_ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_STARTTIME_FIELD]
        return f"{pid} {start_ticks} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    except OSError:
        return str(pid)


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
            version = slot_memory.decode_snapshot_id(state.snapshot_id)
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
