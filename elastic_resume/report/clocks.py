"""Clocks of nodes that differ, found by what must have happened at once, and set right.

All nodes of a generation hear of it within milliseconds, and no rank ends a step before all have begun to add
up its gradients: so the marks that nodes leave of the same round or step are simultaneous, and a node whose
marks lie elsewhere, twice in a row, has another clock than most. Its events are moved by the difference, from
there on; a clock that jumps while a job runs is followed.

Pure. What is below `VISIBLE_S` is left alone: steps and machines are not that exact, and causes do not hang
on it (`causes`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic_resume.events import Event
from elastic_resume.report.timeline import time_of

VISIBLE_S = 1.0
_ALIKE_S = 0.5  # two differences of one clock


@dataclass(frozen=True)
class Clock:
    """A node's clock is ``ahead_s`` seconds before that of most others (negative: behind).

    ``t``: the first mark that shows it, on the clock of the others. ``jumped``: it had been right before.
    """

    node: str
    ahead_s: float
    t: float
    jumped: bool


def straighten(events: Iterable[Event]) -> tuple[list[Event], tuple[Clock, ...]]:
    """Give the events with times that can be compared, and whose clock was off.

    Events of a node are expected in the order in which it wrote them, as far as that is known.
    """
    listed = list(events)
    changes = _changes(listed)
    if not changes:
        return listed, ()
    told = [
        Clock(node, round(ahead, 3), round(t - ahead, 3), jumped)
        for node, found in changes.items()
        for _, ahead, t, jumped in found
    ]
    left = {node: list(found) for node, found in changes.items()}
    ahead_of: dict[str, float] = {}
    moved = []
    for index, event in enumerate(listed):
        node = event.get("node")
        if not isinstance(node, str) or node not in left or event.get("event") == "fault":
            moved.append(event)
            continue
        while left[node] and left[node][0][0] <= index:
            ahead_of[node] = left[node].pop(0)[1]
        off = ahead_of.get(node, 0.0)
        moved.append(
            {**event, "t": round(event["t"] - off, 3)} if off and time_of(event) is not None else event
        )
    return moved, tuple(sorted(told, key=lambda clock: clock.t))


def _changes(events: Sequence[Event]) -> dict[str, list[tuple[int, float, float, bool]]]:
    """For each node the places from which on its clock is off, by how much, when, and whether from a jump."""
    marks: dict[tuple[int, int], dict[str, tuple[int, float]]] = defaultdict(dict)
    for index, event in enumerate(events):
        key, t, node = _key(event), time_of(event), event.get("node")
        if key is not None and t is not None and isinstance(node, str):
            marks[key].setdefault(node, (index, t))
    ahead: dict[str, float] = {}  # of each node whose marks have been seen
    suspected: dict[str, tuple[int, float, float]] = {}
    changes: dict[str, list[tuple[int, float, float, bool]]] = defaultdict(list)
    for key in sorted(marks):
        here = marks[key]
        if len(here) < 2:
            continue
        corrected = sorted(t - ahead.get(node, 0.0) for node, (_, t) in here.items())
        most = corrected[(len(corrected) - 1) // 2]
        for node, (index, t) in here.items():
            new = t - most
            if abs(new - ahead.get(node, 0.0)) <= VISIBLE_S:
                ahead.setdefault(node, 0.0)
                suspected.pop(node, None)
            elif node in suspected and abs(suspected[node][1] - new) <= _ALIKE_S:
                first, _, since = suspected.pop(node)
                jumped = node in ahead
                changes[node].append((first if jumped else 0, new, since, jumped))
                ahead[node] = new
            else:
                suspected[node] = (index, new, t)
    return changes


def _key(event: Event) -> tuple[int, int] | None:
    """What an event marks, if that happens on all nodes at once; a round before its steps."""
    generation, step = event.get("generation"), event.get("step")
    if type(generation) is not int:
        return None
    if event.get("event") == "round":
        return (generation, -1)
    return (generation, step) if event.get("event") == "step" and type(step) is int else None
