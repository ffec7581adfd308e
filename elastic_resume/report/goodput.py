"""Where a run's time went: the share that was training and still counts, and what took the rest.

Promise: `slices` cover the run from its first event to its last without a gap or an overlap, so the parts of
`Goodput` add up to the whole. The job's time is meant, not that of its nodes: one that is away while the
others train costs nothing here.

Of a generation's training time, *repeated* is what went into steps that a later generation ran again, and
into the step that its end cut off; *stalled* is what training waited for copies, by its workers' own account.
Pure.

When what happened on the way from one generation's last step to the next one's first.

Each generation leaves up to nine moments, on one time axis (`clocks`); what left no event is None. `phases`
makes the seconds of a recovery of two generations' moments. Pure.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise, zip_longest

from elastic_resume.report.event_log import EventTimeline, ParsedEvent
from elastic_resume.report.incidents import Generation, GenerationFacts, RunHistory, collect_facts


@dataclass(frozen=True)
class StepTiming:
    """When steps of one generation were finished: ``marks`` by step, and between them in a straight line.

    ``usual_s``: a step's length in this run, for a generation that was over before it left enough marks.
    """

    step_times: tuple[tuple[int, float], ...]
    typical_step_s: float | None = None

    @property
    def step_s(self) -> float | None:
        """Mean seconds of a step, without the first one, which is longer."""
        if len(self.step_times) < 3:
            return self.typical_step_s
        (first, since), (last, until) = self.step_times[1], self.step_times[-1]
        return max(0.0, until - since) / (last - first)

    def time_of_step(self, step: int) -> float | None:
        """When ``step`` was finished."""
        if not self.step_times:
            return None
        place = bisect.bisect_left(self.step_times, (step, float("-inf")))
        if place == len(self.step_times):
            last, t = self.step_times[-1]
            return t + (step - last) * (self.step_s or 0.0)
        after, until = self.step_times[place]
        if place == 0 or after == step:
            return until
        before, since = self.step_times[place - 1]
        return since + (until - since) * (step - before) / (after - before)


@dataclass(frozen=True)
class GenerationTimes:
    """Of one generation, as seconds since the epoch.

    ``formed``: all its nodes know of the world. ``launched``: its workers run and begin to load the state.
    ``restored``: they have it. ``stepped``: the first step. ``last``: the last one, known to within a step.
    ``noticed``: somebody saw that it is over. ``stopped``: its workers are gone. ``until``: the last trace.
    ``stalled_s``: how long its training waited for copies, in all.
    """

    number: int
    rendezvous_done_t: float | None
    workers_started_t: float | None
    restored_t: float
    first_step_t: float | None
    last_step_t: float | None
    detected_t: float | None
    workers_stopped_t: float | None
    end_t: float
    stalled_s: float
    step_timing: StepTiming = field(repr=False)


@dataclass(frozen=True)
class RecoveryPhases:
    """Seconds of one recovery, from the last step before to the first one after.

    What is not known is None, and its time is in the phase that follows. Until the failure was *noticed*,
    workers were *stopped*, the next world *formed*, its workers *started*, had *restored* the state, and had
    made the first *step*.
    """

    detected_s: float | None
    stopped_s: float | None
    rendezvous_s: float | None
    started_s: float | None
    restored_s: float | None
    step_s: float | None

    @property
    def total_s(self) -> float:
        """All that is known."""
        return sum(value for _, value in self.known)

    @property
    def known(self) -> list[tuple[str, float]]:
        """The phases that are known, in order, by name."""
        named = zip(PHASE_NAMES, (getattr(self, f"{name}_s") for name in PHASE_NAMES), strict=True)
        return [(name, value) for name, value in named if value is not None]


PHASE_NAMES = ("detected", "stopped", "rendezvous", "started", "restored", "step")


def measure_generations(timeline: EventTimeline, report: RunHistory) -> tuple[GenerationTimes, ...]:
    """Find the moments of each generation of the report, in its order."""
    rounds = _rounds_by_generation(timeline)
    facts = collect_facts(timeline)
    starts = [min([fact.start_t, *(one.t for one in rounds[fact.number])]) for fact in facts]
    found = []
    for fact, row, following in zip_longest(facts, report.generations, starts[1:]):
        found.append(
            _measure_generation(fact, row, rounds, timeline.events[-1].t if following is None else following)
        )
    usual_s = _typical_step_s(found, report.generations)
    return tuple(
        one
        if one.step_timing.step_s is not None or usual_s is None
        else _estimate_last_step(one, row, usual_s)
        for one, row in zip(found, report.generations, strict=True)
    )


def _typical_step_s(found: Sequence[GenerationTimes], rows: Sequence[Generation]) -> float | None:
    """Seconds of a step in this run; where no generation has marks enough, the most that it can have been."""
    known = [one.step_timing.step_s for one in found if one.step_timing.step_s is not None]
    if known:
        return statistics.median(known)
    most = [
        (one.detected_t - one.first_step_t) / (row.last_step - row.first_step)
        for one, row in zip(found, rows, strict=True)
        if one.detected_t is not None and one.first_step_t is not None and one.detected_t > one.first_step_t
        if row.last_step is not None and row.first_step is not None and row.last_step > row.first_step
    ]
    return min(most, default=None)


def _estimate_last_step(one: GenerationTimes, row: Generation, typical_step_s: float) -> GenerationTimes:
    """The same, with a last step at the pace that is usual in this run."""
    pace = replace(one.step_timing, typical_step_s=typical_step_s)
    if one.last_step_t is None or row.last_step is None:
        return replace(one, step_timing=pace)
    over = one.end_t if row.end.kind == "finished" or one.detected_t is None else one.detected_t
    return replace(
        one,
        step_timing=pace,
        last_step_t=min(pace.time_of_step(row.last_step) or one.last_step_t, max(over, one.last_step_t)),
    )


def _rounds_by_generation(timeline: EventTimeline) -> dict[int, list[ParsedEvent]]:
    """When nodes heard of each generation. A stock rendezvous has rounds only: the next generation's."""
    began = sorted((min(one.t for one in found), number) for number, found in timeline.by_generation.items())
    rounds: dict[int, list[ParsedEvent]] = defaultdict(list)
    for one in timeline.select("round"):
        place = bisect.bisect_left(began, (one.t, -1))
        number = one.generation if one.generation is not None else next((n for _, n in began[place:]), None)
        if number is not None:
            rounds[number].append(one)
    return rounds


def _measure_generation(
    facts: GenerationFacts, row: Generation, rounds: Mapping[int, list[ParsedEvent]], next_start_t: float
) -> GenerationTimes:
    starts = [one.t for one in facts.events if one.kind == "worker-start"]
    resume = facts.resume
    restored = max(starts, default=resume.t if resume else facts.start_t)
    spent = resume.get_seconds("seconds") if resume is not None else None
    launched = resume.t - spent if resume is not None and spent is not None else None
    pace = _step_timing(facts, row, restored)
    exits = [one.t for one in facts.events if one.kind == "worker-exit"]
    ends = [one.t for one in facts.events if one.kind == "run-end"]
    formed = max((one.t for one in rounds.get(facts.number, ())), default=None)
    last = (
        pace.time_of_step(row.last_step) if row.last_step is not None and row.first_step is not None else None
    )
    noticed = min(exits, default=None) if row.detected_t is None else max(row.detected_t, restored)
    if last is not None and noticed is not None and not ends:
        last = min(last, max(noticed, pace.step_times[-1][1]))  # reckoned, where no mark was left of it
    return GenerationTimes(
        number=facts.number,
        rendezvous_done_t=formed if formed is None or formed <= restored else None,
        workers_started_t=launched,
        restored_t=restored,
        first_step_t=pace.step_times[1][1] if len(pace.step_times) > 1 else None,
        last_step_t=last,
        detected_t=noticed,
        workers_stopped_t=max((t for t in exits if t <= next_start_t), default=None),
        end_t=max(ends, default=max([restored, *(one.t for one in facts.events if one.t <= next_start_t)])),
        stalled_s=_stalled_s(facts),
        step_timing=pace,
    )


def _step_timing(facts: GenerationFacts, row: Generation, restored: float) -> StepTiming:
    first: dict[int, float] = {}
    for one in facts.events:
        if one.kind == "step" and one.step is not None:
            first[one.step] = min(one.t, first.get(one.step, one.t))
    if row.start_step is not None:
        first.setdefault(row.start_step, restored)
    marks: list[tuple[int, float]] = []
    for step in sorted(first):  # a clock that is a little behind must not make time run backwards
        marks.append((step, max(first[step], marks[-1][1] if marks else first[step])))
    return StepTiming(tuple(marks))


def _stalled_s(facts: GenerationFacts) -> float:
    """Of the rank that waited longest: nobody steps without it. Before that was told: what workers wrote."""
    waited: dict[int | None, float] = {}
    for one in facts.events:
        told = one.get_seconds("stalled_s")
        if one.kind in {"step", "run-end"} and told is not None:
            waited[one.rank] = told
    if waited:
        return max(waited.values())
    workers = {one.pid for one in facts.events if one.kind == "worker-start"}
    written: dict[str, float] = defaultdict(float)
    for one in facts.events:
        spent = one.raw.get("seconds")
        if (
            one.kind == "commit"
            and one.pid in workers
            and isinstance(spent, (int, float))
            and 0 <= spent < 1e9
        ):
            written[one.node] += spent
    return max(written.values(), default=0.0)


def recovery_phases(previous: GenerationTimes, following: GenerationTimes) -> RecoveryPhases | None:
    """Seconds of the recovery between two generations; None where the later one never came to a step."""
    cursor = previous.last_step_t if previous.last_step_t is not None else previous.detected_t
    if cursor is None or following.first_step_t is None:
        return None
    spent: list[float | None] = []
    reached = (
        previous.detected_t,
        previous.workers_stopped_t,
        following.rendezvous_done_t,
        following.workers_started_t,
        following.restored_t,
        following.first_step_t,
    )
    for moment in reached:
        if moment is None:
            spent.append(None)
            continue
        until = min(max(cursor, moment), following.first_step_t)
        spent.append(round(max(0.0, until - cursor), 3))
        cursor = max(cursor, until)
    return RecoveryPhases(*spent)


PRODUCTIVE, RECOMPUTED, STARTING, RESTORING, WAITING = (
    "productive",
    "recomputed",
    "starting",
    "restoring",
    "waiting",
)


@dataclass(frozen=True)
class TimeSlice:
    """A stretch of the run in which its job did one thing."""

    activity: str
    start_t: float
    end_t: float
    generation: int | None = None


@dataclass(frozen=True)
class Goodput:
    """Seconds of the job's time, all told and by what they went into."""

    total_s: float
    productive_s: float
    starting_s: float
    restoring_s: float
    stalled_s: float
    recomputed_s: float
    waiting_s: float

    @property
    def share(self) -> float | None:
        """The productive part of the whole, from 0 to 1; None where no time has passed."""
        return self.productive_s / self.total_s if self.total_s > 0 else None

    @property
    def parts(self) -> list[tuple[str, float]]:
        """What the whole is made of, by name."""
        return [(one.name[:-2], getattr(self, one.name)) for one in fields(self) if one.name != "total_s"]


def sum_goodput(slices: Sequence[TimeSlice], generation_times: Sequence[GenerationTimes]) -> Goodput:
    """Add up the slices of a run; stalls are within the productive ones."""
    spent = dict.fromkeys((PRODUCTIVE, RECOMPUTED, STARTING, RESTORING, WAITING), 0.0)
    trained: dict[int | None, float] = {}
    for one in slices:
        spent[one.activity] += one.end_t - one.start_t
        if one.activity == PRODUCTIVE:
            trained[one.generation] = trained.get(one.generation, 0.0) + one.end_t - one.start_t
    stalled = sum(min(one.stalled_s, trained.get(one.number, 0.0)) for one in generation_times)
    spent[PRODUCTIVE] -= stalled
    seconds = {
        f"{name}_s": round(max(0.0, value), 3) for name, value in {**spent, "stalled": stalled}.items()
    }
    return Goodput(total_s=round(math.fsum(seconds.values()), 3), **seconds)


def slice_time(
    timeline: EventTimeline, report: RunHistory, generation_times: Sequence[GenerationTimes]
) -> tuple[TimeSlice, ...]:
    """Cut the run into what its job did, one thing after the other."""
    own = [one.t for one in timeline.events if one.kind != "fault"]
    if not own:
        return ()
    writer = _SliceWriter(min(own))
    kept = _last_kept_steps(report)
    for one, row, floor in zip(generation_times, report.generations, kept, strict=True):
        writer.add_waiting(
            timeline,
            next(t for t in (one.rendezvous_done_t, one.workers_started_t, one.restored_t) if t is not None),
        )
        writer.add_until(
            STARTING, one.workers_started_t if one.workers_started_t is not None else one.restored_t
        )
        writer.add_until(RESTORING, one.restored_t)
        if one.first_step_t is not None and one.last_step_t is not None:
            # The first step waits for all that happens once: its own length is all that counts of it.
            writer.add_until(STARTING, one.first_step_t - (one.step_timing.step_s or 0.0), row.number)
            start = row.start_step if row.start_step is not None else -1
            if floor > start:
                writer.add_until(
                    PRODUCTIVE,
                    one.step_timing.time_of_step(floor) if floor < (row.last_step or 0) else one.last_step_t,
                    row.number,
                )
            writer.add_until(RECOMPUTED, one.last_step_t, row.number)
        if row.end.kind == "finished":
            writer.add_until(PRODUCTIVE, one.end_t, row.number)
            return writer.cut_at(one.end_t)
        if row.end.kind == "open":
            writer.add_until(PRODUCTIVE, max(own), row.number)
        elif one.detected_t is not None and one.last_step_t is not None:  # the step that was cut off
            writer.add_until(
                RECOMPUTED, min(one.detected_t, one.last_step_t + (one.step_timing.step_s or 0.0)), row.number
            )
    writer.add_waiting(timeline, max(own))
    return writer.cut_at(max(own))


def measure_downtimes(
    slices: Sequence[TimeSlice], report: RunHistory, generation_times: Sequence[GenerationTimes]
) -> dict[int, float]:
    """Seconds that each failure cost, by the generation that it ended.

    All that was not training that counts, from that generation's first step to that of the next one which
    came to a step (those between them failed as well, at its cost), or to the end; without the length of a
    step, which `incidents.Generation.recovered_s` includes.
    """
    spent: dict[int, float] = {}
    trained = [
        (at, one.first_step_t) for at, one in enumerate(generation_times) if one.first_step_t is not None
    ]
    trained.append((len(generation_times), max((one.end_t for one in slices), default=0.0)))
    place = 0
    for (first, since), (following, until) in pairwise(trained):
        failed = [row for row in report.generations[first:following] if row.end.is_failure]
        while place < len(slices) and slices[place].end_t <= since:
            place += 1
        if not failed:
            continue
        total_s, one = 0.0, place
        while one < len(slices) and slices[one].start_t < until:
            if slices[one].activity != PRODUCTIVE:
                total_s += slices[one].end_t - max(slices[one].start_t, since)
            one += 1
        spent[failed[0].number] = round(total_s, 3)
    return spent


def _last_kept_steps(report: RunHistory) -> list[int]:
    """For each generation the last of its steps that no later one ran again."""
    floor = 1 << 62
    kept = []
    for row in reversed(report.generations):
        kept.append(min(floor, row.last_step if row.last_step is not None else 0))
        if row.start_step is not None:
            floor = min(floor, row.start_step)
    return kept[::-1]


class _SliceWriter:
    """Puts slices one after the other; what lies before the end of the last one is not told twice."""

    def __init__(self, began: float) -> None:
        self._cursor = began
        self._slices: list[TimeSlice] = []

    def add_until(self, what: str, until: float | None, generation: int | None = None) -> None:
        """The job did ``what`` until then."""
        if until is None or until <= self._cursor:
            return
        self._slices.append(TimeSlice(what, self._cursor, until, generation))
        self._cursor = until

    def add_waiting(self, line: EventTimeline, until: float | None) -> None:
        """No world trains until then. Agents that import torch make it a start, else the job waits."""
        if until is None or until <= self._cursor:
            return
        for began, ready in _preload_times(line, self._cursor, until):
            self.add_until(WAITING, min(began, until))
            self.add_until(STARTING, min(ready, until))
        self.add_until(WAITING, until)

    def cut_at(self, until: float) -> tuple[TimeSlice, ...]:
        """All of them, until then."""
        cut = [one for one in self._slices if one.start_t < until]
        return tuple(replace(one, end_t=min(one.end_t, until)) for one in cut)


def _preload_times(timeline: EventTimeline, since: float, until: float) -> list[tuple[float, float]]:
    """When agents that had just started were getting ready, by the beginning."""
    ready = timeline.select("fork-server-ready")
    found = []
    for start in timeline.select("agent-start"):
        if since <= start.t < until:
            done = min((one.t for one in ready if one.node == start.node and one.t >= start.t), default=None)
            if done is not None:
                found.append((start.t, done))
    return found
