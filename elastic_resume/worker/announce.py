"""How a generation's start is told: as an event, and as the line that a person reads."""

from __future__ import annotations

from typing import Any

from elastic_resume.policy.source import DISK
from elastic_resume.store.manifest import Position
from elastic_resume.worker.resume import Resumed


def as_event(resumed: Resumed, position: Position, world_size: int) -> dict[str, Any]:
    """Give the fields of the ``resume`` event."""
    plan = resumed.plan
    return {
        "generation": plan.generation,
        "step": position.step,
        "epoch": position.epoch,
        "world_size": world_size,
        "previous_world_size": plan.previous_world_size,
        "nodes": list(resumed.nodes),
        "kind": plan.kind,
        "source_node": plan.source_node,
        "source_tier": plan.source_tier,
        "source_generation": plan.source_generation,
        "lacking": list(plan.lacking),
        "rejected": [
            {"node": r.node, "generation": r.order[0], "step": r.order[1], "reason": r.reason}
            for r in plan.rejected
        ],
        "lost_steps": plan.lost_steps,
        "seconds": round(resumed.seconds, 3),
    }


def as_text(resumed: Resumed, position: Position, world_size: int) -> str:
    """Say in one line what happened; each rejected copy gets a line of its own."""
    plan = resumed.plan
    was = plan.previous_world_size
    world = f"world {was} -> {world_size}" if was not in {None, world_size} else f"world {world_size}"
    what = "no checkpoint found, starting fresh"
    if plan.kind == "checkpoint":
        sent = f", sent to {', '.join(plan.lacking)}" if plan.lacking else ""
        where = "checkpoint" if plan.source_tier == DISK else "snapshot in memory"
        what = (
            f"resumed at step {position.step} (epoch {position.epoch}) from {plan.source_node}'s {where} "
            f"of generation {plan.source_generation}{sent}"
        )
    lost = "no step lost" if plan.lost_steps == 0 else f"{plan.lost_steps} steps are run again"
    lines = [f"generation {plan.generation}: {what}; {lost}; {world}; {resumed.seconds:.2f} s"]
    lines += [f"rejected {r.node}/{r.name}: {r.reason}" for r in plan.rejected]
    return "\n  ".join(lines)
