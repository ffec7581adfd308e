"""Measure where a run's time went: its goodput, and what took the rest.

`measure_generations` finds the moments of each generation. A moment that left no event is None. `slice_time`
cuts the run into slices without a gap or an overlap, so the parts of `Goodput` add up to the whole. It
measures the time of the job, not of its nodes: a node that is absent while the others train costs nothing
here. Pure.

Within a generation's training, *recomputed* time went into steps that a later generation ran again,
*interrupted* time into the step that its end interrupted. *Stalled* time is what training waited
for snapshots, as the workers measured it.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, pairwise

from elastic_resume.report.event_log import EventTimeline, ParsedEvent
from elastic_resume.report.generations import GenerationRow, RunHistory


@dataclass(frozen=True)
class StepTiming:
    """When the steps of one generation were finished, interpolated between recorded steps."""

    step_times: tuple[tuple[int, float], ...]

    @property
    def step_s(self) -> float | None:
        """Mean seconds of a step, without the first one, which is longer, if others are recorded."""
        if len(self.step_times) < 2:
            return None
        (first, first_t), (last, last_t) = (
            self.step_times[min(1, len(self.step_times) - 2)],
            self.step_times[-1],
        )
        return max(0.0, last_t - first_t) / (last - first)

    def time_of_step(self, step: int) -> float | None:
        """Return when ``step`` was finished; None if nothing is known."""
        if not self.step_times:
            return None
        index = bisect.bisect_left(self.step_times, (step, float("-inf")))
        if index == len(self.step_times):
            last_step, t = self.step_times[-1]
            return t + (step - last_step) * (self.step_s or 0.0)
        next_step, next_t = self.step_times[index]
        if index == 0 or next_step == step:
            return next_t
        previous_step, previous_t = self.step_times[index - 1]
        return previous_t + (next_t - previous_t) * (step - previous_step) / (next_step - previous_step)


@dataclass(frozen=True)
class GenerationTimes:
    """The moments of one generation, in Unix seconds.

    ``rendezvous_done_t``: all its nodes know the world. ``workers_started_t``: its workers begin to load
    the state. ``restored_t``: they have it. ``last_step_t`` is exact to within a step. ``detected_t``:
    the first sign of its end. ``end_t``: its last event. ``stalled_s``: how long its training waited for
    snapshots, in all.
    """

    number: int
    rendezvous_done_t: float | None
    workers_started_t: float | None
    restored_t: float
    first_step_t: float | None
    last_step_t: float | None
    detected_t: float | None
    end_t: float
    stalled_s: float
    step_timing: StepTiming = field(repr=False)

    @property
    def start_t(self) -> float:
        """The end of its rendezvous; if unknown, when its workers had their state."""
        return self.restored_t if self.rendezvous_done_t is None else self.rendezvous_done_t


def measure_generations(timeline: EventTimeline, history: RunHistory) -> tuple[GenerationTimes, ...]:
    """Measure the moments of each generation of the history, in its order."""
    rows = history.generations
    starts = [min(row.start_t, timeline.by_generation[row.number][0].t) for row in rows]
    ends = [*starts[1:], timeline.events[-1].t] if rows else []
    return tuple(
        _measure_generation(timeline.by_generation[row.number], row, next_start_t)
        for row, next_start_t in zip(rows, ends, strict=True)
    )


def _measure_generation(
    events: Sequence[ParsedEvent], row: GenerationRow, next_start_t: float
) -> GenerationTimes:
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        times[event.kind].append(event.t)
    resume = next((event for event in reversed(events) if event.kind == "resume"), None)
    last_event_t = max((event.t for event in events if event.t <= next_start_t), default=row.start_t)
    # Workers that never had their state were starting all the time.
    restored_t = max(times["worker-start"] or times["resume"], default=last_event_t)
    rendezvous_done_t = max(times["generation-start"], default=None)
    resume_s = resume.get_seconds("seconds") if resume is not None else None
    step_timing = _step_timing(events, row, restored_t)
    steps, last_step_t = step_timing.step_times, None
    detected_t = (
        min(times["worker-exit"], default=None) if row.detected_t is None else max(row.detected_t, restored_t)
    )
    if row.last_step is not None and row.first_step is not None:
        last_step_t = step_timing.time_of_step(row.last_step)
    if last_step_t is not None and detected_t is not None and not times["run-end"]:
        last_step_t = min(last_step_t, max(detected_t, steps[-1][1]))  # an estimate
    return GenerationTimes(
        number=row.number,
        rendezvous_done_t=None if (rendezvous_done_t or 0.0) > restored_t else rendezvous_done_t,
        workers_started_t=resume.t - resume_s if resume is not None and resume_s is not None else None,
        restored_t=restored_t,
        first_step_t=steps[1][1] if len(steps) > 1 else None,
        last_step_t=last_step_t,
        detected_t=detected_t,
        end_t=max(times["run-end"], default=max(restored_t, last_event_t)),
        stalled_s=_stalled_s(events),
        step_timing=step_timing,
    )


def _step_timing(events: Iterable[ParsedEvent], row: GenerationRow, restored_t: float) -> StepTiming:
    first_times: dict[int, float] = {}
    for event in events:
        if event.kind == "step" and event.step is not None:
            first_times[event.step] = min(event.t, first_times.get(event.step, event.t))
    if row.start_step is not None:
        first_times.setdefault(row.start_step, restored_t)
    # Clocks of nodes differ a little; time must not run backwards.
    steps = sorted(first_times)
    return StepTiming(tuple(zip(steps, accumulate((first_times[step] for step in steps), max), strict=True)))


def _stalled_s(events: Iterable[ParsedEvent]) -> float:
    """Return the stall of the rank that waited longest: no rank can step without it."""
    by_rank: dict[int | None, float] = {}
    for event in events:
        stalled_s = event.get_seconds("stalled_s")
        if event.kind in {"step", "run-end"} and stalled_s is not None:
            by_rank[event.rank] = stalled_s
    return max(by_rank.values(), default=0.0)


PRODUCTIVE, RECOMPUTED, INTERRUPTED = "productive", "recomputed", "interrupted"
STARTING, RESTORING, WAITING = "starting", "restoring", "waiting"


@dataclass(frozen=True)
class TimeSlice:
    """A stretch of the run in which the job did one thing."""

    activity: str
    start_t: float
    end_t: float
    generation: int | None = None


@dataclass(frozen=True)
class Goodput:
    """Seconds of the job's time: the total and its parts."""

    total_s: float
    productive_s: float
    starting_s: float
    restoring_s: float
    stalled_s: float
    recomputed_s: float
    interrupted_s: float
    waiting_s: float

    @property
    def share(self) -> float | None:
        """The productive part of the total, from 0 to 1; None if no time has passed."""
        return self.productive_s / self.total_s if self.total_s > 0 else None

    @property
    def parts(self) -> list[tuple[str, float]]:
        """The parts of the total by name."""
        return [(part.name[:-2], getattr(self, part.name)) for part in fields(self) if part.name != "total_s"]


def sum_goodput(slices: Sequence[TimeSlice], generation_times: Sequence[GenerationTimes]) -> Goodput:
    """Sum the slices of a run; stalls are within the productive ones."""
    spent = dict.fromkeys((PRODUCTIVE, RECOMPUTED, INTERRUPTED, STARTING, RESTORING, WAITING), 0.0)
    productive_s: dict[int | None, float] = {}
    for item in slices:
        spent[item.activity] += item.end_t - item.start_t
        if item.activity == PRODUCTIVE:
            productive_s[item.generation] = productive_s.get(item.generation, 0.0) + item.end_t - item.start_t
    stalled = sum(min(item.stalled_s, productive_s.get(item.number, 0.0)) for item in generation_times)
    spent[PRODUCTIVE] -= stalled
    seconds = {
        f"{name}_s": round(max(0.0, value), 3) for name, value in {**spent, "stalled": stalled}.items()
    }
    return Goodput(total_s=round(math.fsum(seconds.values()), 3), **seconds)


def slice_time(
    timeline: EventTimeline, history: RunHistory, generation_times: Sequence[GenerationTimes]
) -> tuple[TimeSlice, ...]:
    """Cut the run into slices by what its job did."""
    event_times = [event.t for event in timeline.events if event.kind != "fault"]
    if not event_times:
        return ()
    writer = _SliceWriter(min(event_times))
    last_kept_steps = _last_kept_steps(history)
    for times, row, last_kept in zip(generation_times, history.generations, last_kept_steps, strict=True):
        known = (times.rendezvous_done_t, times.workers_started_t, times.restored_t)
        ready_t = next(t for t in known if t is not None)
        writer.add_waiting(timeline, ready_t)
        writer.add_until(STARTING, known[1] if known[1] is not None else times.restored_t)
        writer.add_until(RESTORING, times.restored_t)
        step_s = times.step_timing.step_s or 0.0
        if times.first_step_t is not None and times.last_step_t is not None:
            # The first step includes one-time work; only a normal step's length counts as training.
            writer.add_until(STARTING, times.first_step_t - step_s, row.number)
            if row.start_step is None or last_kept > row.start_step:
                is_all_kept = last_kept >= (row.last_step or 0)
                kept_t = times.last_step_t if is_all_kept else times.step_timing.time_of_step(last_kept)
                writer.add_until(PRODUCTIVE, kept_t, row.number)
            writer.add_until(RECOMPUTED, times.last_step_t, row.number)
        if row.end.kind == "finished":
            writer.add_until(PRODUCTIVE, times.end_t, row.number)
            if times is generation_times[-1]:  # else it was started again, and trained more
                return writer.cut_at(times.end_t)
        elif row.end.kind == "open":
            writer.add_until(PRODUCTIVE, max(event_times), row.number)
        elif times.detected_t is not None and times.last_step_t is not None:
            writer.add_until(INTERRUPTED, min(times.detected_t, times.last_step_t + step_s), row.number)
    writer.add_waiting(timeline, max(event_times))
    return writer.cut_at(max(event_times))


def measure_downtimes(
    slices: Sequence[TimeSlice], history: RunHistory, generation_times: Sequence[GenerationTimes]
) -> dict[int, float]:
    """Return the seconds that each failure cost, by the generation that it ended.

    This is all time that was not productive from that generation's first step on. It ends with the first step
    of the next generation that reached one, or with the run. The first failure carries the cost of those that
    follow before that step. Unlike `GenerationRow.recovery_s` it does not contain the length of a step.
    """
    downtimes: dict[int, float] = {}
    first_steps = [
        (i, t) for i, times in enumerate(generation_times) if (t := times.first_step_t) is not None
    ]
    first_steps.append((len(generation_times), max((item.end_t for item in slices), default=0.0)))
    ends = [item.end_t for item in slices]
    for (first, start_t), (following, end_t) in pairwise(first_steps):
        failed = [row for row in history.generations[first:following] if row.end.is_incident]
        if not failed:
            continue
        total_s = 0.0
        for item in itertools.islice(slices, bisect.bisect_right(ends, start_t), None):
            if item.start_t >= end_t:
                break
            if item.activity != PRODUCTIVE:
                total_s += item.end_t - max(item.start_t, start_t)
        downtimes[failed[0].number] = round(total_s, 3)
    return downtimes


def _last_kept_steps(history: RunHistory) -> list[int]:
    """Return, for each generation, the last of its steps that a failure did not lose."""
    limit = 1 << 62
    kept = []
    for row in reversed(history.generations):
        kept.append(min(limit, row.last_step if row.last_step is not None else 0))
        if row.resume_from and row.start_step is not None:  # what came before was not lost, but given up
            limit = row.start_step + row.given_up_steps
        elif row.start_step is not None:
            limit = min(limit, row.start_step)
    return kept[::-1]


class _SliceWriter:
    """Appends slices one after another; time before the end of the last slice is not counted again."""

    def __init__(self, start_t: float) -> None:
        self._cursor = start_t
        self._slices: list[TimeSlice] = []

    def add_until(self, activity: str, end_t: float | None, generation: int | None = None) -> None:
        """Append ``activity`` until ``end_t``."""
        if end_t is None or end_t <= self._cursor:
            return
        self._slices.append(TimeSlice(activity, self._cursor, end_t, generation))
        self._cursor = end_t

    def add_waiting(self, timeline: EventTimeline, end_t: float | None) -> None:
        """Append waiting until ``end_t``; agents that import torch meanwhile make it a start."""
        if end_t is None or end_t <= self._cursor:
            return
        for start_t, ready_t in _preload_times(timeline, self._cursor, end_t):
            self.add_until(WAITING, min(start_t, end_t))
            self.add_until(STARTING, min(ready_t, end_t))
        self.add_until(WAITING, end_t)

    def cut_at(self, end_t: float) -> tuple[TimeSlice, ...]:
        """Return all slices, cut at ``end_t``."""
        kept = [item for item in self._slices if item.start_t < end_t]
        return tuple(replace(item, end_t=min(item.end_t, end_t)) for item in kept)


def _preload_times(timeline: EventTimeline, start_t: float, end_t: float) -> list[tuple[float, float]]:
    """Return when agents that started in this time imported torch, as start and end."""
    ready_events = timeline.select("fork-server-ready")
    preloads = []
    for start in timeline.select("agent-start"):
        if start_t <= start.t < end_t:
            later = (event.t for event in ready_events if event.node == start.node and event.t >= start.t)
            ready_t = min(later, default=None)
            if ready_t is not None:
                preloads.append((start.t, ready_t))
    return preloads
