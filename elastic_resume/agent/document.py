"""What those who look are given: one JSON object, made of what this agent sees and what nodes have told it.

``elastic-resume status --json`` prints it, and metrics are made of it, so names stay once they are there:
`VERSION` counts what is not merely added. A leader's document tells of all nodes; another's of itself, and
who leads. Pure but for the clocks. It takes time in proportion to the number of nodes: there may be 10,000.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from elastic_resume.policy.tally import BOUNDS_S, Tally
from elastic_resume.rendezvous.quorum import Incarnation
from elastic_resume.rendezvous.tidings import Pulse
from elastic_resume.rendezvous.view import View

VERSION = 2
MAX_INCIDENTS = 10
STALE_S = 60.0
"""A node that is in no world, no spare, and has told nothing for so long is left out."""
_TOLD = [one.name for one in fields(Pulse)]
_SILENT = Pulse()


@dataclass(frozen=True)
class Known:
    """What a node told last, and when it was heard, on this process's monotonic clock."""

    pulse: Pulse
    heard_at: float


def make(
    view: View,
    known: Mapping[str, Known],
    tally: Tally,
    *,
    run_id: str,
    missed: int,
) -> dict[str, Any]:
    """Make the document. ``missed``: lines of other nodes' logs that did not come through."""
    world, sums = view.world, tally.sums()
    ranks = {one.node: rank for rank, one in enumerate(world.members)} if world else {}
    nodes = [_node(one, ranks.get(one), known.get(one)) for one in _names(view, known)]
    running = [one for one in nodes if world and one["generation"] == world.generation]
    furthest = max(running, key=lambda one: int(one["step"]), default=None)
    return {
        "version": VERSION,
        "run_id": run_id,
        "t": round(time.time(), 3),
        "node": view.me.node,
        "address": view.me.address,
        "leads": view.leads,
        "leader": _place(view.leader) if view.leader else None,
        "generation": view.generation,
        "world": {
            "generation": world.generation,
            "nodes": [one.node for one in world.members],
            "addresses": [one.address for one in world.members],
            "ranks": max((int(one["world_size"]) for one in running), default=0),
        }
        if world
        else None,
        "spares": list(view.spares),
        "missing": list(view.missing),
        "waiting": view.waiting,
        "over": view.over,
        "step": furthest["step"] if furthest else max((int(one["step"]) for one in nodes), default=0),
        "steps_per_s": furthest["steps_per_s"] if furthest else 0.0,
        "nodes": nodes,
        "incidents": [asdict(one) for one in tally.incidents()[-MAX_INCIDENTS:]],
        "sums": {
            "incidents": dict(sums.incidents),
            "lost_steps": sums.lost_steps,
            "recovery_bounds_s": list(BOUNDS_S),
            "recoveries": sums.recoveries,
            "recovery_s": round(sums.recovery_s, 3),
        },
        "missed_lines": missed,
    }


def _place(who: Incarnation) -> dict[str, str]:
    return {"node": who.node, "address": who.address}


def _names(view: View, known: Mapping[str, Known]) -> list[str]:
    """Members in the order of their ranks, then the others."""
    if not view.leads:
        return [view.me.node]
    members = [one.node for one in view.world.members] if view.world else []
    now = time.monotonic()
    others = {view.me.node, *view.spares}
    if not view.world:
        others |= {name for name, one in known.items() if now < one.heard_at + STALE_S}
    return [*members, *sorted(others - set(members))]


def _node(name: str, rank: int | None, one: Known | None) -> dict[str, Any]:
    """One node's part. Ages are as of now: those that it told, and how long ago that was."""
    told = one.pulse if one else _SILENT
    pulse = {field: getattr(told, field) for field in _TOLD}
    heard_s = time.monotonic() - one.heard_at if one else None
    for what in ("snapshot", "checkpoint"):
        age_s = pulse.pop(f"{what}_age_s")
        there = pulse[f"{what}_step"] is not None and heard_s is not None
        pulse[f"{what}_age_s"] = round(age_s + (heard_s or 0.0), 3) if there else None
    return {
        "node": name,
        "node_rank": rank,
        "heard_s": round(heard_s, 3) if heard_s is not None else None,
        **pulse,
    }
