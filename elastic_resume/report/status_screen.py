"""One screen that says how a job stands, of the document that agents give (`agent.document`). Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_resume.report.text import amount, clean, cut, seconds, table, wrap

MAX_NODES = 24
MAX_INCIDENTS = 5
MAX_SPARES = 24
_HEAD = ("rank", "node", "step", "steps/s", "snapshot", "checkpoint", "heard", "")


def fitting(said: Mapping[str, Any], columns: int, rows: int) -> list[str]:
    """Give the lines of `screen` that a terminal of that size has room for: of many nodes fewer."""
    lines = screen(said)
    nodes = min(MAX_NODES, len(said["nodes"]))
    if len(lines) > rows and nodes:
        lines = screen(said, max(1, nodes - 1 - (len(lines) - rows)))
    return [line[:columns] for line in lines[: max(1, rows)]]


def screen(said: Mapping[str, Any], most: int = MAX_NODES) -> list[str]:
    """Give the lines, with ``most`` nodes.

    Raises:
        KeyError, TypeError, ValueError: it is no such document.

    """
    return [
        *_headline(said),
        "",
        *_nodes(said, most),
        *_spares(said["spares"]),
        "",
        *_incidents(said),
    ]


def _headline(said: Mapping[str, Any]) -> list[str]:
    world, leader = said["world"], said["leader"]
    led = f"led by {leader['node']}" if leader else "nobody leads"
    if said["over"]:
        return wrap(f"job {said['run_id']}: {said['over']}")
    if world is None:
        lines = wrap(f"job {said['run_id']}: no world runs, {led}")
        if said["waiting"]:
            lines += wrap(f"waiting: {said['waiting']}")
        if said["missing"]:
            lines += wrap(f"not here: {', '.join(said['missing'])}")
        return lines
    size = f"{amount(len(world['nodes']), 'node')}, {amount(world['ranks'], 'rank')}"
    lines = wrap(f"job {said['run_id']}: generation {world['generation']}, {size}, {led}")
    if not said["leads"]:
        lines.append(f"(as {clean(said['node'])} knows it: who leads did not answer)")
    return [*lines, f"step {said['step']}, {said['steps_per_s']:.3g} steps/s"]


def _spares(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - MAX_SPARES} more" if len(names) > MAX_SPARES else ""
    return ["", *wrap(f"spares: {', '.join(map(clean, names[:MAX_SPARES]))}{more}")]


def _nodes(said: Mapping[str, Any], most: int) -> list[str]:
    nodes = said["nodes"]
    # Those in trouble, or not heard of, are what somebody looks for among thousands.
    shown = nodes
    if len(nodes) > most:
        shown = sorted(nodes, key=lambda one: (not one["trouble"], -(one["heard_s"] or 1e9)))[:most]
    rows = [
        (
            "-" if one["node_rank"] is None else str(one["node_rank"]),
            one["node"],
            str(one["step"]),
            f"{one['steps_per_s']:.3g}",
            _copy(one["snapshot_step"], one["snapshot_age_s"]),
            _copy(one["checkpoint_step"], one["checkpoint_age_s"]),
            "never" if one["heard_s"] is None else f"{seconds(one['heard_s'])} ago",
            one["trouble"],
        )
        for one in shown
    ]
    lines = table(_HEAD, rows, right=(0, 2, 3), elastic=7)
    return [*lines, f"and {len(nodes) - len(shown)} more"] if len(shown) < len(nodes) else lines


def _copy(step: int | None, age_s: float | None) -> str:
    return "-" if step is None else f"{step}, {seconds(age_s)} old"


def _incidents(said: Mapping[str, Any]) -> list[str]:
    sums = said["sums"]
    kinds = ", ".join(f"{count} {clean(kind)}" for kind, count in sorted(sums["incidents"].items()))
    count = sum(sums["incidents"].values())
    if not count:
        return ["no incident so far"]
    head = f"{amount(count, 'incident')} ({kinds}), {amount(sums['lost_steps'], 'step')} run again"
    rows = [
        (
            "-" if one["t"] is None else time.strftime("%H:%M:%S", time.gmtime(one["t"])),
            str(one["generation"]),
            cut(one["cause"], 70),
            "-" if one["lost_steps"] is None else str(one["lost_steps"]),
            seconds(one["recovered_s"]),
        )
        for one in said["incidents"][-MAX_INCIDENTS:]
    ]
    return [
        *wrap(head),
        *table(("UTC", "generation", "cause", "lost", "recovered in"), rows, right=(1, 3), elastic=2),
    ]
