"""Type the events of a run, put them on one time axis, and index them by generation, node and kind.

No event makes this module raise. A field of a wrong type counts as absent. An event without a usable time
is left out. Unknown kinds are kept, but prove no generation.

Each event has CLOCK_BOOTTIME (``b``) and its boot beside the wall clock (``t``), which may jump. Within a
boot, ``b`` gives every duration. The boot's wall clock places it on the axis, corrected by the generations
that it shares with the others: all nodes see the start of a generation within milliseconds. Pure.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elastic_resume.events import Event, get_boot_time, get_count, get_seconds

# Kinds of events that prove that their generation ran.
GENERATION_EVENT_KINDS = frozenset(
    {"generation-start", "resume", "worker-start", "step", "commit", "commit-failed", "busy", "failure"}
    | {"run-end", "worker-exit"}
)
# A node that receives or reads an older state commits it, with the generation that has saved it.
COMMIT_KINDS = frozenset({"commit", "commit-failed"})
MAX_GENERATION = 1 << 23  # more than a snapshot id has room for: a damaged line
_STARTS = frozenset({"generation-start", "worker-start"})
_AGENT_KINDS = frozenset({"agent-start", "agent-end"})
_WORKER_KINDS = frozenset({"failure", "worker-exit", "hang", "hang-ended", "rendezvous"})


@dataclass(frozen=True)
class ParsedEvent:
    """One event whose common fields have the right type or are None; ``raw`` holds all fields."""

    t: float
    kind: str
    node: str
    generation: int | None
    rank: int | None
    step: int | None
    raw: Mapping[str, Any] = field(repr=False)

    def get_count(self, name: str) -> int | None:
        """Return the field ``name`` if it is a count."""
        return get_count(self.raw, name)

    def get_seconds(self, name: str) -> float | None:
        """Return the field ``name`` if it is a duration."""
        value = get_seconds(self.raw, name)
        return value if value is not None and value >= 0 else None

    def get_text(self, name: str) -> str:
        """Return the field ``name`` if it is text, else an empty string."""
        value = self.raw.get(name)
        return value if isinstance(value, str) else ""

    def get_texts(self, name: str) -> tuple[str, ...]:
        """Return the texts in the list ``name``."""
        value = self.raw.get(name)
        return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()

    def get_facts(self, name: str) -> list[Mapping[str, Any]]:
        """Return the objects in the list ``name``."""
        value = self.raw.get(name)
        return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


@dataclass(frozen=True)
class EventTimeline:
    """All events by time, and the same events by generation, by node and by kind.

    ``boot_times`` gives the Unix time of each boot.
    """

    events: tuple[ParsedEvent, ...]
    by_generation: Mapping[int, Sequence[ParsedEvent]]
    by_node: Mapping[str, Sequence[ParsedEvent]]
    by_kind: Mapping[str, Sequence[ParsedEvent]]
    boot_times: Mapping[str, float]

    def select(self, *names: str) -> list[ParsedEvent]:
        """Return all events of these kinds, by time."""
        found = [event for name in names for event in self.by_kind.get(name, ())]
        return sorted(found, key=lambda event: event.t) if len(names) > 1 else found


class GenerationFinder:
    """Finds the generation of events that do not name one; it must see all events by time.

    A worker that ended before `er.resume` and an agent that starts or ends do not know a generation, but
    their node is in one. A node without a known one starts in the newest.
    """

    def __init__(self) -> None:
        self._newest: int | None = None
        self._by_node: dict[str, int] = {}

    def complete(self, event: ParsedEvent) -> ParsedEvent:
        """Return the event with its generation, as far as it is known."""
        if event.generation:
            if event.kind in _STARTS:
                self._by_node[event.node] = event.generation
                self._newest = max(event.generation, self._newest or 0)
            return event
        if event.kind in _WORKER_KINDS:
            return replace(event, generation=self._by_node.get(event.node))
        if event.kind in _AGENT_KINDS:
            return replace(event, generation=self._by_node.get(event.node, self._newest))
        return event


def build_timeline(events: Iterable[Event]) -> EventTimeline:
    """Sort ``events`` by time, type their fields and find their generations."""
    events = list(events)
    boot_times = _estimate_boot_times(events)
    parsed = [event for event in (parse_event(event, boot_times) for event in events) if event is not None]
    parsed.sort(key=lambda event: event.t)  # stable: lines of one file stay in order
    finder = GenerationFinder()
    parsed = [finder.complete(event) for event in parsed]
    by_generation: dict[int, list[ParsedEvent]] = defaultdict(list)
    by_node: dict[str, list[ParsedEvent]] = defaultdict(list)
    by_kind: dict[str, list[ParsedEvent]] = defaultdict(list)
    for event in parsed:
        by_node[event.node].append(event)
        by_kind[event.kind].append(event)
        if event.generation and event.kind in GENERATION_EVENT_KINDS:
            by_generation[event.generation].append(event)
    return EventTimeline(
        tuple(parsed), dict(sorted(by_generation.items())), dict(by_node), dict(by_kind), boot_times
    )


def parse_event(event: Event, boot_times: Mapping[str, float]) -> ParsedEvent | None:
    """Type the common fields of an event, with its time by its boot if known; None without time or kind."""
    t, kind, since = get_seconds(event), event.get("event"), get_boot_time(event)
    if t is None or not isinstance(kind, str):
        return None
    if since is not None and since[0] in boot_times:
        t = round(boot_times[since[0]] + since[1], 3)
    node, generation = event.get("node"), get_count(event, "generation")
    if generation is not None and generation > MAX_GENERATION:
        generation = None  # a damaged line must not become the newest generation
    return ParsedEvent(
        t=t,
        kind=kind,
        node=node if isinstance(node, str) else "",
        generation=generation,
        rank=get_count(event, "rank"),
        step=get_count(event, "step"),
        raw=event,
    )


def _estimate_boot_times(events: Iterable[Event]) -> dict[str, float]:
    """Return the Unix time of each boot, by its wall clock or by generations that it shares with others."""
    walls: dict[str, list[float]] = defaultdict(list)
    starts: dict[str, dict[int, float]] = defaultdict(dict)
    for event in events:
        t, boot_time = get_seconds(event), get_boot_time(event)
        if t is None or boot_time is None:
            continue
        boot, b = boot_time
        walls[boot].append(t - b)
        generation = get_count(event, "generation")
        if event.get("event") == "generation-start" and generation is not None:
            starts[boot].setdefault(generation, b)
    boot_times: dict[str, float] = {}
    known_starts: dict[int, float] = {}
    for boot in sorted(walls, key=lambda boot: (-len(starts[boot]), boot)):
        boot_times[boot] = statistics.median_low(
            [known_starts[number] - b for number, b in starts[boot].items() if number in known_starts]
            or walls[boot]
        )
        for number, b in starts[boot].items():
            known_starts.setdefault(number, boot_times[boot] + b)
    return boot_times
