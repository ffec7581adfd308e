"""Type and index the events of a run: by time, by generation, by node and by kind.

No event makes this module raise. A field of a wrong type counts as absent. An event without a usable time
is left out. Unknown kinds are kept, but prove no generation.

A job whose nodes all lost their disks starts again at generation 1. `number_restarts` continues the
numbers, so that no two generations share one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from elastic_resume.checkpoint.reader import checkpoint_name, parse_checkpoint_name
from elastic_resume.events import Event, get_count, get_seconds

# Kinds of events that prove that their generation ran.
GENERATION_EVENT_KINDS = frozenset(
    {"resume", "worker-start", "step", "commit", "commit-failed", "busy", "failure", "run-end", "worker-exit"}
)


@dataclass(frozen=True)
class ParsedEvent:
    """One event whose common fields have the right type or are None; ``raw`` holds all fields."""

    t: float
    kind: str
    node: str
    generation: int | None
    rank: int | None
    step: int | None
    pid: int | None
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
        return _text_or_empty(self.raw, name)

    def get_texts(self, name: str) -> tuple[str, ...]:
        """Return the texts in the list ``name``."""
        value = self.raw.get(name)
        return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()

    @property
    def exited_with_failure(self) -> bool:
        """Whether this worker exit was a failure."""
        return bool(self.get_text("signal") or self.get_count("exit_code"))


@dataclass(frozen=True)
class EventTimeline:
    """All events by time, and the same events by generation, by node and by kind.

    ``generation_offset`` was added to generations of the job's last start; it is 0 unless the job started
    anew.
    """

    events: tuple[ParsedEvent, ...]
    by_generation: Mapping[int, tuple[ParsedEvent, ...]]
    by_node: Mapping[str, tuple[ParsedEvent, ...]]
    by_kind: Mapping[str, tuple[ParsedEvent, ...]]
    generation_offset: int = 0

    def select(self, *names: str) -> list[ParsedEvent]:
        """Return all events of these kinds, by time."""
        found = [event for name in names for event in self.by_kind.get(name, ())]
        return sorted(found, key=lambda event: event.t) if len(names) > 1 else found


def build_timeline(events: Iterable[Event]) -> EventTimeline:
    """Sort ``events`` by time, type their fields and find the generation of each worker's exit."""
    events, offset = number_restarts(events)
    parsed = [event for event in map(_parse_event, events) if event is not None]
    parsed.sort(key=lambda event: event.t)  # stable: lines of one file stay in order
    parsed = _assign_generations(parsed)
    by_generation: dict[int, list[ParsedEvent]] = defaultdict(list)
    by_node: dict[str, list[ParsedEvent]] = defaultdict(list)
    by_kind: dict[str, list[ParsedEvent]] = defaultdict(list)
    for event in parsed:
        by_node[event.node].append(event)
        by_kind[event.kind].append(event)
        if event.generation is not None and event.kind in GENERATION_EVENT_KINDS:
            by_generation[event.generation].append(event)
    return EventTimeline(
        events=tuple(parsed),
        by_generation={number: tuple(by_generation[number]) for number in sorted(by_generation)},
        by_node={name: tuple(node_events) for name, node_events in by_node.items()},
        by_kind={name: tuple(node_events) for name, node_events in by_kind.items()},
        generation_offset=offset,
    )


def number_restarts(events: Iterable[Event]) -> tuple[list[Event], int]:
    """Continue the generation numbers of a job that started again at 1; return the events and an offset.

    A job starts again at 1 if all nodes lost their disks; only logs that were kept elsewhere show it. The
    offset was added to the generations of the last start.
    """
    listed = list(events)
    restarts = _find_restarts(listed)
    if not restarts:
        return listed, 0
    count = max(map(len, restarts.values()))
    # A node that took part in one start only is assigned by the times of the others.
    earliest = [min(times[i] for times in restarts.values() if len(times) > i) for i in range(count)]

    def count_restarts(event: Event) -> int:
        own = restarts.get(str(event.get("node")), [])
        t = get_seconds(event)
        return 0 if t is None else sum(t >= start for start in [*own, *earliest[len(own) :]])

    newest = [0] * (count + 1)
    numbers = [count_restarts(event) for event in listed]
    for event, number in zip(listed, numbers, strict=True):
        newest[number] = max(newest[number], get_count(event, "generation") or 0)
    offsets = [sum(newest[:number]) for number in range(count + 1)]
    numbered = [_shift_generation(event, offsets[n]) for event, n in zip(listed, numbers, strict=True)]
    return numbered, offsets[-1]


def _find_restarts(events: Iterable[Event]) -> dict[str, list[float]]:
    """Find, for each node, the agent starts after which it entered a generation that it had known before."""
    restarts: dict[str, list[float]] = defaultdict(list)
    known: dict[str, dict[int, float]] = defaultdict(dict)  # the agent's start, by generation
    agent_starts: dict[str, float] = {}
    for event in sorted(events, key=lambda event: get_seconds(event) or 0.0):
        node, t, generation = event.get("node"), get_seconds(event), get_count(event, "generation")
        if t is None or not isinstance(node, str):
            continue
        if event.get("event") == "agent-start":
            agent_starts[node] = t
        if event.get("event") != "round" or generation is None or node not in agent_starts:
            continue
        start_t = agent_starts[node]
        if known[node].setdefault(generation, start_t) != start_t:
            restarts[node].append(start_t)
            known[node] = {generation: start_t}
    return restarts


def _shift_generation(event: Event, offset: int) -> Event:
    shifted = dict(event)
    for name in ("generation", "source_generation") if offset else ():
        number = get_count(event, name)
        if number is not None:
            shifted[name] = number + offset
    path = event.get("path")
    if offset and isinstance(path, str) and (version := parse_checkpoint_name(PurePath(path).name)):
        shifted["path"] = checkpoint_name(version[0] + offset, version[1])
    return shifted


def _assign_generations(events: list[ParsedEvent]) -> list[ParsedEvent]:
    """Find the generation of each worker exit.

    A worker supervisor does not know its worker's generation, but its process id.
    """
    first: dict[tuple[str, int], int] = {}
    for event in events:
        if event.pid is not None and event.generation is not None:
            first.setdefault((event.node, event.pid), event.generation)
    newest: dict[tuple[str, int], int] = {}  # the kernel reuses process ids
    complete = []
    for event in events:
        if event.pid is not None and event.generation is not None:
            newest[event.node, event.pid] = event.generation
        worker = event.get_count("worker_pid") if event.kind == "worker-exit" else None
        if worker is not None:
            process = (event.node, worker)
            complete.append(replace(event, generation=newest.get(process, first.get(process)), pid=worker))
        else:
            complete.append(event)
    return complete


def _parse_event(event: Event) -> ParsedEvent | None:
    t, kind = get_seconds(event), event.get("event")
    if t is None or not isinstance(kind, str):
        return None
    return ParsedEvent(
        t=t,
        kind=kind,
        node=_text_or_empty(event, "node"),
        generation=get_count(event, "generation"),
        rank=get_count(event, "rank"),
        step=get_count(event, "step"),
        pid=get_count(event, "pid"),
        raw=event,
    )


def _text_or_empty(raw: Mapping[str, Any], name: str) -> str:
    value = raw.get(name)
    return value if isinstance(value, str) else ""
