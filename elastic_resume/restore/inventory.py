"""List the snapshots and checkpoints that one node could restore, and those that it rejects.

Each local leader builds one at the start of a generation, and the ranks exchange them as JSON.
`policy.resume_plan` turns all inventories into one plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from elastic_resume.checkpoint import node_dir
from elastic_resume.errors import ElasticResumeError, NodeFileError
from elastic_resume.policy.resume_plan import Inventory, RejectedState, SavedState
from elastic_resume.ranks import rank_context
from elastic_resume.ranks.rank_context import RankContext
from elastic_resume.restore.sources import StateSource
from elastic_resume.slots.progress_page import ProgressPage


def take_inventory(
    context: RankContext, sources: Mapping[str, StateSource], progress_page: ProgressPage, generation: int
) -> Inventory:
    """List what this node could restore from its ``sources``; give up what is damaged."""
    listings = [source.list_states() for source in sources.values()]
    # Generations that ended before their first step left nothing on disk, but agents have counted them.
    known = [
        generation,
        rank_context.assigned_generation() - 1,
        *(each.newest_generation for each in listings),
    ]
    last_generation, last_step, last_world_size = _read_last_step(context, progress_page, generation)
    last_launcher, command = node_dir.read_script_arguments(context.node_dir)
    return Inventory(
        node=context.node,
        local_leader_rank=context.collectives.rank,
        saved_states=tuple(state for each in listings for state in each.saved_states),
        rejected=tuple(state for each in listings for state in each.rejected),
        generation=max(known),
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
