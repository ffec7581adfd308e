"""Where a job began anew: nothing of it was left on any node, and its generations count from 1 once more.

Only who has kept its events elsewhere (`faults.mishaps`, copies of disks) sees that. What came later counts
on from there, so that no two generations have one number, and what was lost is seen to be.

Promise: events of a job that never began anew are given back as they are. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import PurePath

from elastic_resume.events import Event, count_of, time_of
from elastic_resume.report.checkpoints import Item
from elastic_resume.store.checkpoint import name_of, parse_name

_COUNTED = ("generation", "source_generation")


def apart(events: Iterable[Event], items: Sequence[Item] = ()) -> tuple[list[Event], list[Item]]:
    """Give ``events`` with generations of which each is one, and ``items``, which are of the last life."""
    found = list(events)
    begins = _begins(found)
    if not begins:
        return found, list(items)
    count = max(map(len, begins.values()))
    common = [min(times[life] for times in begins.values() if len(times) > life) for life in range(count)]

    def life_of(event: Event) -> int:
        own = begins.get(event.get("node"), [])
        return sum(event["t"] >= begin for begin in [*own, *common[len(own) :]])

    tops = [0] * (count + 1)
    lives = [life_of(event) if time_of(event) is not None else 0 for event in found]
    for event, life in zip(found, lives, strict=True):
        tops[life] = max(tops[life], count_of(event, "generation") or 0)
    before = [sum(tops[:life]) for life in range(count + 1)]
    later = [_later(event, before[life]) for event, life in zip(found, lives, strict=True)]
    last = before[-1]
    here = [
        one if one.generation is None else replace(one, generation=one.generation + last) for one in items
    ]
    return later, here


def _begins(events: Sequence[Event]) -> dict[object, list[float]]:
    """When the agents of each node began anew: they have a world of a generation that they had before.

    That generations go back would not do: clocks do so as well, and lines of several logs are put in order
    by them.
    """
    begins: dict[object, list[float]] = defaultdict(list)
    had: dict[object, dict[int, float]] = defaultdict(dict)  # generations, each with its agent's start
    started: dict[object, float] = {}
    for event in events:
        node, t = event.get("node"), time_of(event)
        generation = count_of(event, "generation")
        if t is None or not isinstance(node, str):
            continue
        if event["event"] == "agent-start":
            started[node] = t
        if event["event"] != "round" or generation is None or node not in started:
            continue
        if had[node].setdefault(generation, started[node]) != started[node]:
            begins[node].append(started[node])
            had[node] = {generation: started[node]}
    return {node: sorted(times) for node, times in begins.items()}


def _later(event: Event, by: int) -> Event:
    """Count its generations on."""
    if not by:
        return event
    new = dict(event)
    for name in _COUNTED:
        number = count_of(event, name)
        if number is not None:
            new[name] = number + by
    path = event.get("path")
    if isinstance(path, str) and (order := parse_name(PurePath(path).name)):
        new["path"] = str(PurePath(path).with_name(name_of(order[0] + by, order[1])))
    return new
