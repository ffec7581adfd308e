"""What one node could resume from, and how nodes tell each other."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_resume import constants
from elastic_resume.checkpoint import node_dir, reader
from elastic_resume.checkpoint.catalog import CatalogEntry, list_quarantined, read_quarantine_reason, scan_run
from elastic_resume.checkpoint.manifest import Manifest
from elastic_resume.errors import CheckpointError, ElasticResumeError, ForeignError, NodeFileError
from elastic_resume.policy.resume_plan import DISK, MEMORY, Inventory, RejectedState, SavedState
from elastic_resume.restore import rank_context
from elastic_resume.restore.rank_context import RankContext
from elastic_resume.snapshot import slots
from elastic_resume.snapshot.progress_page import ProgressPage

_STARTTIME_FIELD = 19  # of /proc/PID/stat, counted from behind the name: proc(5) calls it starttime
MAX_LISTED_COPIES = 64  # of one directory, newest first: older ones would be taken after 64 corrupt ones only


def list_snapshots_and_checkpoints(
    context: RankContext, progress_page: ProgressPage, generation: int
) -> Inventory:
    """List what this node could resume from, in memory and on disk; quarantine what is proven bad.

    That is a copy which lacks a file, is cut off or does not say what it must. One that could not be read
    now, is of a newer format or is not this job's stays where it is.

    Rank 0's node lists the directories of other nodes too, where it sees them (a shared file system): a job
    that is started again on other machines finds what it left behind. They are only read, and by one
    node only: a thousand nodes that each list a thousand directories would bring the file server down.
    """
    for entry in context.catalog.list_entries():
        if entry.is_damaged:
            context.quarantine(entry.path, str(entry.error))
    homes = {context.node: context.catalog.list_entries()}
    if context.collectives.rank == 0:
        homes = scan_run(context.run_dir, context.settings.run_id) | homes
    copies = [
        _to_copy(home, entry.manifest)
        for home, entries in homes.items()
        for entry in entries[:MAX_LISTED_COPIES]
        if entry.manifest is not None and entry.error is None
    ]
    rejected = [
        reason for home, entries in homes.items() for reason in _list_rejected(context, home, entries)
    ]
    snapshots, refused = _list_snapshots(context)
    floor, began = 0, False
    if context.settings.resume == "never":
        floor, began = node_dir.read_min_generation(context.node_dir, launcher_id(), generation)
    last_generation, last_step, last_world_size = _read_last_step(context, progress_page, generation)
    starter, words = node_dir.read_script_arguments(context.node_dir)
    return Inventory(
        node=context.node,
        local_leader_rank=context.collectives.rank,
        saved_states=tuple(snapshots + copies),
        rejected=tuple(refused + rejected),
        # The world's generation is one more than the greatest that anybody knew; the agents may have counted
        # further than checkpoints tell, when worlds ended before their first step.
        generation=max(generation, rank_context.assigned_generation() - 1),
        min_generation=floor,
        has_joined_world=began,
        committed_generation=node_dir.read_committed_generation(context.node_dir),
        last_step=last_step,
        last_generation=last_generation,
        last_world_size=last_world_size or None,
        has_restarted=starter == launcher_id(),
        command=tuple(words),
    )


def to_json(inventory: Inventory) -> dict[str, Any]:
    """Give ``inventory`` as JSON can say it."""
    return dataclasses.asdict(inventory)


def from_json(encoded: Mapping[str, Any]) -> Inventory:
    """Read what `to_json` gave on another rank.

    Raises:
        ElasticResumeError: the other rank runs a version with other fields.

    """
    try:
        members = {
            "saved_states": tuple(SavedState(**state) for state in encoded["saved_states"]),
            "rejected": tuple(
                RejectedState(**{**state, "version": tuple(state["version"])}) for state in encoded["rejected"]
            ),
            "command": tuple(encoded["command"]),
        }
        return Inventory(**{**encoded, **members})
    except (KeyError, TypeError) as error:
        raise ElasticResumeError(
            f"a node's inventory cannot be read ({error}): do all nodes run the same elastic_resume?"
        ) from error


def launcher_id() -> str:
    """Name the process whose life is "this start of the job": the node's agent, torchrun, or this one.

    By its start in ticks since the boot, and by that boot: a time of day would be another one after the wall
    clock was set, and what this start has saved would be set aside as an earlier one's.
    """
    agent = os.environ.get(constants.ENV_AGENT_PID)
    pid = int(agent) if agent else os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_STARTTIME_FIELD]
        return f"{pid} {started} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
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
    found = [
        RejectedState(owner_node, entry.path.name, str(entry.error), entry.version, entry.error.kind)
        for entry in entries
        if entry.error is not None
    ]
    found.extend(
        RejectedState(
            owner_node,
            path.name,
            read_quarantine_reason(path),
            reader.parse_checkpoint_name(path.name.split(".")[0]) or (0, 0),
            "aside",
        )
        for path in list_quarantined(context.run_dir / owner_node)
    )
    return found


def _list_snapshots(context: RankContext) -> tuple[list[SavedState], list[RejectedState]]:
    """The newest snapshot in this node's memory; damaged ones are let go of, so that an older one counts."""
    rejected: list[RejectedState] = []
    memory = context.slot_client
    while (
        memory is not None and (state := slots.newest_complete(memory.control_block.read_slots())) is not None
    ):
        try:
            held = memory.find_newest()
            if held is not None and held.manifest.run_id != context.settings.run_id:
                raise ForeignError(f"belongs to the run {held.manifest.run_id!r}.")
        except CheckpointError as error:
            order = slots.decode_snapshot_id(state.target)
            name = f"{reader.checkpoint_name(*order)} (in memory)"
            rejected.append(RejectedState(context.node, name, str(error), order, error.kind))
            memory.discard(state.index)
            continue
        return [_to_copy(context.node, held.manifest, MEMORY)] if held is not None else [], rejected
    return [], rejected


def _to_copy(owner_node: str, manifest: Manifest, tier: str = DISK) -> SavedState:
    return SavedState(
        owner_node,
        manifest.generation,
        manifest.step,
        manifest.rank,
        tier,
        manifest.file_bytes,
        manifest.position.epoch,
    )
