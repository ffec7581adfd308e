"""Leaves steps out of a long log: most of its lines are marks of steps, and a report needs few of them. Pure.

Promise: of each generation the first and the last step of each rank stay, and those around whatever befell a
node; between them the same steps stay on all nodes, since clocks are compared by them. Order is kept but for
the last step before a change, which may come after a commit of its time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from elastic_resume.events import Event

_OFTEN = frozenset({"commit", "prune", "busy"})
"""What befalls nobody."""
_SPREAD = 2_654_435_761  # Knuth's: steps that are marked every so often must not all stay, nor all go


def thin(events: Iterable[Event], one_in: int) -> Iterator[Event]:
    """Give all events of one log but steps, and about one in ``one_in`` of those."""
    if one_in <= 1:
        yield from events
        return
    running: dict[Any, Any] = {}  # generation by node and rank
    passed: dict[Any, Event] = {}  # the newest that was left out, by node and rank
    for event in events:
        if event["event"] != "step":
            if event["event"] not in _OFTEN:
                yield from passed.values()
                passed.clear()
            yield event
            continue
        who, generation, step = (repr(event.get(name)) for name in ("node", "generation", "step"))
        key = (who, repr(event.get("rank")))
        if running.get(key) != generation:
            if key in passed:
                yield passed.pop(key)
            running[key] = generation
            yield event
        elif step.isdecimal() and int(step[:18]) * _SPREAD % (1 << 32) * one_in < 1 << 32:
            passed.pop(key, None)
            yield event
        else:
            passed[key] = event
    yield from passed.values()
