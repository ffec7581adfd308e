"""Type, align and index the events of a run: by time, by generation, by node and by kind.

No event makes this module raise. A field of a wrong type counts as absent. An event without a usable time
is left out. Unknown kinds are kept, but prove no generation.

All times are put on one axis, although wall clocks jump or differ. Each event has CLOCK_BOOTTIME (``b``)
and its boot beside the wall clock (``t``). Within a boot, ``b`` gives every duration. Boots of different
machines are aligned by the generations they share, because all nodes see the start of a generation within
milliseconds. A boot that shares none keeps its wall clock.

A job whose nodes all lost their disks starts again at generation 1. `number_restarts` continues the earlier
numbers, so that reports count the lost steps. Pure.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from elastic_resume.checkpoint.reader import checkpoint_name, parse_checkpoint_name
from elastic_resume.events import Event, get_boot_time, get_count, get_seconds
from elastic_resume.report.formatting import format_seconds

# Kinds of events that prove that their generation ran.
GENERATION_EVENT_KINDS = frozenset(
    {"resume", "worker-start", "step", "commit", "commit-failed", "busy", "failure", "run-end", "worker-exit"}
)
MIN_REPORTED_OFFSET_S = 1.0


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


@dataclass(frozen=True)
class ClockOffset:
    """A node's wall clock that was off by more than `MIN_REPORTED_OFFSET_S`, since ``t``.

    ``ahead_s`` is the greatest offset.
    """

    node: str
    ahead_s: float
    t: float

    @property
    def text(self) -> str:
        """Describe the difference in a sentence without a full stop."""
        off = "ahead" if self.ahead_s > 0 else "behind"
        return f"the clock of {self.node} was up to {format_seconds(abs(self.ahead_s))} {off}"


@dataclass(frozen=True)
class EventTimeline:
    """All events by time, and the same events by generation, by node and by kind.

    ``boot_times`` gives the Unix time of each boot on the common axis; ``clocks`` are the wall clocks that
    were off. ``generation_offset`` was added to generations of the job's last start; it is 0 unless the job
    started again at generation 1. Generations up to ``min_generation`` are an earlier training of this name,
    which is left out, and ``earlier_end_t`` is the time of its last event.
    """

    events: tuple[ParsedEvent, ...]
    by_generation: Mapping[int, Sequence[ParsedEvent]]
    by_node: Mapping[str, Sequence[ParsedEvent]]
    by_kind: Mapping[str, Sequence[ParsedEvent]]
    boot_times: Mapping[str, float]
    clocks: tuple[ClockOffset, ...]
    generation_offset: int = 0
    min_generation: int = 0
    earlier_end_t: float | None = None

    def select(self, *names: str) -> list[ParsedEvent]:
        """Return all events of these kinds, by time."""
        found = [event for name in names for event in self.by_kind.get(name, ())]
        return sorted(found, key=lambda event: event.t) if len(names) > 1 else found


def build_timeline(events: Iterable[Event]) -> EventTimeline:
    """Align and sort ``events``, type their fields and find the generation of each worker's exit."""
    events, generation_offset = number_restarts(events)
    boot_times = _estimate_boot_times(events)
    aligned, clocks = _align_events(events, boot_times)
    parsed = [event for event in map(_parse_event, aligned) if event is not None]
    parsed.sort(key=lambda event: event.t)  # stable: lines of one file stay in order
    min_generation = _find_earlier_training(parsed)
    parsed, earlier_end_t = _drop_earlier_training(_assign_generations(parsed), min_generation)
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
        by_generation=dict(sorted(by_generation.items())),
        by_node=dict(by_node),
        by_kind=dict(by_kind),
        boot_times=boot_times,
        clocks=clocks,
        generation_offset=generation_offset,
        min_generation=min_generation,
        earlier_end_t=earlier_end_t,
    )


def _find_earlier_training(events: Iterable[ParsedEvent]) -> int:
    """Return the newest generation from before the last start with ``--resume never``; 0: none."""
    return max(
        (event.get_count("min_generation") or 0 for event in events if event.kind == "worker-start"),
        default=0,
    )


def _drop_earlier_training(
    events: list[ParsedEvent], min_generation: int
) -> tuple[list[ParsedEvent], float | None]:
    """Drop the earlier training; return the other events, and the time of the last one that was dropped.

    On each node, the new run begins with the agent that started its first worker.
    """
    if not min_generation:
        return events, None
    agent_starts: dict[str, float] = {}
    run_starts: dict[str, float] = {}
    for event in events:
        if event.kind == "agent-start":
            agent_starts[event.node] = event.t
        elif event.kind == "worker-start" and event.get_count("min_generation") == min_generation:
            run_starts.setdefault(event.node, agent_starts.get(event.node, event.t))
    first_t = min(run_starts.values())

    def is_earlier(event: ParsedEvent) -> bool:
        if event.kind in GENERATION_EVENT_KINDS and event.generation is not None:
            return event.generation <= min_generation
        return event.t < run_starts.get(event.node, first_t)

    dropped = [event.t for event in events if is_earlier(event)]
    return [event for event in events if not is_earlier(event)], max(dropped, default=None)


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
    for name in ("generation", "source_generation", "min_generation") if offset else ():
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
            event = replace(event, generation=newest.get(process, first.get(process)), pid=worker)  # noqa: PLW2901
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


# ---- one time axis -------------------------------------------------------------------------------------


def _align_events(
    events: Iterable[Event], boot_times: Mapping[str, float]
) -> tuple[list[Event], tuple[ClockOffset, ...]]:
    """Return the events with times from CLOCK_BOOTTIME, and the wall clocks that were off.

    Events without a boot keep their times.
    """
    aligned: list[Event] = []
    offsets: dict[str, ClockOffset] = {}
    for event in events:
        t, boot_time, node = get_seconds(event), get_boot_time(event), event.get("node")
        if t is None or boot_time is None:
            aligned.append(event)
            continue
        aligned_t = round(boot_times[boot_time[0]] + boot_time[1], 3)
        aligned.append({**event, "t": aligned_t})
        ahead_s = round(t - aligned_t, 3)
        if isinstance(node, str) and event.get("event") != "fault" and abs(ahead_s) > MIN_REPORTED_OFFSET_S:
            known = offsets.setdefault(node, ClockOffset(node, ahead_s, aligned_t))
            if abs(ahead_s) > abs(known.ahead_s):
                offsets[node] = replace(known, ahead_s=ahead_s)
    return aligned, tuple(sorted(offsets.values(), key=lambda clock: clock.t))


def _estimate_boot_times(events: Iterable[Event]) -> dict[str, float]:
    """Return the time of each boot in Unix seconds, on one common axis.

    Boots that share a generation, directly or through others, are placed relative to one another. The
    median of their wall clocks then places the group.
    """
    wall_estimates: dict[str, list[float]] = defaultdict(list)
    starts: dict[str, dict[int, float]] = defaultdict(dict)  # seconds since each boot, by generation
    for event in events:
        t, boot_time = get_seconds(event), get_boot_time(event)
        if t is None or boot_time is None:
            continue
        boot, b = boot_time
        wall_estimates[boot].append(t - b)
        generation = get_count(event, "generation")
        if event.get("event") == "round" and generation is not None:
            starts[boot].setdefault(generation, b)
    median_walls = {boot: statistics.median_low(values) for boot, values in wall_estimates.items()}
    boot_times: dict[str, float] = {}
    for seed in sorted(median_walls, key=lambda boot: (-len(starts[boot]), boot)):
        if seed not in boot_times:
            others = {boot: times for boot, times in starts.items() if boot not in boot_times}
            placed = _place_boots(seed, median_walls[seed], others)
            shift = statistics.median_low(median_walls[boot] - zero for boot, zero in placed.items())
            boot_times |= {boot: zero + shift for boot, zero in placed.items()}
    return boot_times


def _place_boots(seed: str, zero: float, starts: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """Place the boots that share generations with ``seed``, then those that share with these, and so on."""
    placed, newly_placed = {seed: zero}, [seed]
    generation_times: dict[int, float] = {}
    while newly_placed:
        for boot in newly_placed:
            for generation, b in starts.get(boot, {}).items():
                generation_times.setdefault(generation, placed[boot] + b)
        newly_placed = []
        for boot in [boot for boot in starts if boot not in placed]:
            shared = starts[boot].keys() & generation_times.keys()
            if shared:
                newly_placed.append(boot)
                placed[boot] = statistics.median_low(generation_times[n] - starts[boot][n] for n in shared)
    return placed
