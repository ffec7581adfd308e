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

from elastic_resume.report.event_log import Seen, Timeline
from elastic_resume.report.incidents import Facts, Generation, Report, facts_of


@dataclass(frozen=True)
class Pace:
    """When steps of one generation were finished: ``marks`` by step, and between them in a straight line.

    ``usual_s``: a step's length in this run, for a generation that was over before it left enough marks.
    """

    marks: tuple[tuple[int, float], ...]
    usual_s: float | None = None

    @property
    def step_s(self) -> float | None:
        """Mean seconds of a step, without the first one, which is longer."""
        if len(self.marks) < 3:
            return self.usual_s
        (first, since), (last, until) = self.marks[1], self.marks[-1]
        return max(0.0, until - since) / (last - first)

    def at(self, step: int) -> float | None:
        """When ``step`` was finished."""
        if not self.marks:
            return None
        place = bisect.bisect_left(self.marks, (step, float("-inf")))
        if place == len(self.marks):
            last, t = self.marks[-1]
            return t + (step - last) * (self.step_s or 0.0)
        after, until = self.marks[place]
        if place == 0 or after == step:
            return until
        before, since = self.marks[place - 1]
        return since + (until - since) * (step - before) / (after - before)


@dataclass(frozen=True)
class Moments:
    """Of one generation, as seconds since the epoch.

    ``formed``: all its nodes know of the world. ``launched``: its workers run and begin to load the state.
    ``restored``: they have it. ``stepped``: the first step. ``last``: the last one, known to within a step.
    ``noticed``: somebody saw that it is over. ``stopped``: its workers are gone. ``until``: the last trace.
    ``stalled_s``: how long its training waited for copies, in all.
    """

    number: int
    formed: float | None
    launched: float | None
    restored: float
    stepped: float | None
    last: float | None
    noticed: float | None
    stopped: float | None
    until: float
    stalled_s: float
    pace: Pace = field(repr=False)


@dataclass(frozen=True)
class Phases:
    """Seconds of one recovery, from the last step before to the first one after.

    What is not known is None, and its time is in the phase that follows. Until the failure was *noticed*,
    workers were *stopped*, the next world *formed*, its workers *started*, had *restored* the state, and had
    made the first *step*.
    """

    noticed_s: float | None
    stopped_s: float | None
    formed_s: float | None
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
        named = zip(NAMES, (getattr(self, f"{name}_s") for name in NAMES), strict=True)
        return [(name, value) for name, value in named if value is not None]


NAMES = ("noticed", "stopped", "formed", "started", "restored", "step")


def moments(line: Timeline, report: Report) -> tuple[Moments, ...]:
    """Find the moments of each generation of the report, in its order."""
    rounds = _rounds(line)
    facts = facts_of(line)
    starts = [min([fact.began, *(one.t for one in rounds[fact.number])]) for fact in facts]
    found = []
    for fact, row, following in zip_longest(facts, report.generations, starts[1:]):
        found.append(_of(fact, row, rounds, line.seen[-1].t if following is None else following))
    usual_s = _usual_step_s(found, report.generations)
    return tuple(
        one if one.pace.step_s is not None or usual_s is None else _reckoned(one, row, usual_s)
        for one, row in zip(found, report.generations, strict=True)
    )


def _usual_step_s(found: Sequence[Moments], rows: Sequence[Generation]) -> float | None:
    """Seconds of a step in this run; where no generation has marks enough, the most that it can have been."""
    known = [one.pace.step_s for one in found if one.pace.step_s is not None]
    if known:
        return statistics.median(known)
    most = [
        (one.noticed - one.stepped) / (row.last_step - row.first_step)
        for one, row in zip(found, rows, strict=True)
        if one.noticed is not None and one.stepped is not None and one.noticed > one.stepped
        if row.last_step is not None and row.first_step is not None and row.last_step > row.first_step
    ]
    return min(most, default=None)


def _reckoned(one: Moments, row: Generation, usual_s: float) -> Moments:
    """The same, with a last step at the pace that is usual in this run."""
    pace = replace(one.pace, usual_s=usual_s)
    if one.last is None or row.last_step is None:
        return replace(one, pace=pace)
    over = one.until if row.end.kind == "finished" or one.noticed is None else one.noticed
    return replace(one, pace=pace, last=min(pace.at(row.last_step) or one.last, max(over, one.last)))


def _rounds(line: Timeline) -> dict[int, list[Seen]]:
    """When nodes heard of each generation. A stock rendezvous has rounds only: the next generation's."""
    began = sorted((min(one.t for one in found), number) for number, found in line.generations.items())
    rounds: dict[int, list[Seen]] = defaultdict(list)
    for one in line.of_kind("round"):
        place = bisect.bisect_left(began, (one.t, -1))
        number = one.generation if one.generation is not None else next((n for _, n in began[place:]), None)
        if number is not None:
            rounds[number].append(one)
    return rounds


def _of(fact: Facts, row: Generation, rounds: Mapping[int, list[Seen]], over: float) -> Moments:
    starts = [one.t for one in fact.events if one.kind == "worker-start"]
    resume = fact.resume
    restored = max(starts, default=resume.t if resume else fact.began)
    spent = resume.seconds("seconds") if resume is not None else None
    launched = resume.t - spent if resume is not None and spent is not None else None
    pace = _pace(fact, row, restored)
    exits = [one.t for one in fact.events if one.kind == "worker-exit"]
    ends = [one.t for one in fact.events if one.kind == "run-end"]
    formed = max((one.t for one in rounds.get(fact.number, ())), default=None)
    last = pace.at(row.last_step) if row.last_step is not None and row.first_step is not None else None
    noticed = min(exits, default=None) if row.noticed is None else max(row.noticed, restored)
    if last is not None and noticed is not None and not ends:
        last = min(last, max(noticed, pace.marks[-1][1]))  # reckoned, where no mark was left of it
    return Moments(
        number=fact.number,
        formed=formed if formed is None or formed <= restored else None,
        launched=launched,
        restored=restored,
        stepped=pace.marks[1][1] if len(pace.marks) > 1 else None,
        last=last,
        noticed=noticed,
        stopped=max((t for t in exits if t <= over), default=None),
        until=max(ends, default=max([restored, *(one.t for one in fact.events if one.t <= over)])),
        stalled_s=_stalled_s(fact),
        pace=pace,
    )


def _pace(fact: Facts, row: Generation, restored: float) -> Pace:
    first: dict[int, float] = {}
    for one in fact.events:
        if one.kind == "step" and one.step is not None:
            first[one.step] = min(one.t, first.get(one.step, one.t))
    if row.start_step is not None:
        first.setdefault(row.start_step, restored)
    marks: list[tuple[int, float]] = []
    for step in sorted(first):  # a clock that is a little behind must not make time run backwards
        marks.append((step, max(first[step], marks[-1][1] if marks else first[step])))
    return Pace(tuple(marks))


def _stalled_s(fact: Facts) -> float:
    """Of the rank that waited longest: nobody steps without it. Before that was told: what workers wrote."""
    waited: dict[int | None, float] = {}
    for one in fact.events:
        told = one.seconds("stalled_s")
        if one.kind in {"step", "run-end"} and told is not None:
            waited[one.rank] = told
    if waited:
        return max(waited.values())
    workers = {one.pid for one in fact.events if one.kind == "worker-start"}
    written: dict[str, float] = defaultdict(float)
    for one in fact.events:
        spent = one.raw.get("seconds")
        if (
            one.kind == "commit"
            and one.pid in workers
            and isinstance(spent, (int, float))
            and 0 <= spent < 1e9
        ):
            written[one.node] += spent
    return max(written.values(), default=0.0)


def phases(before: Moments, after: Moments) -> Phases | None:
    """Seconds of the recovery between two generations; None where the later one never came to a step."""
    cursor = before.last if before.last is not None else before.noticed
    if cursor is None or after.stepped is None:
        return None
    spent: list[float | None] = []
    reached = (before.noticed, before.stopped, after.formed, after.launched, after.restored, after.stepped)
    for moment in reached:
        if moment is None:
            spent.append(None)
            continue
        until = min(max(cursor, moment), after.stepped)
        spent.append(round(max(0.0, until - cursor), 3))
        cursor = max(cursor, until)
    return Phases(*spent)


PRODUCTIVE, REPEATED, STARTING, RESTORING, WAITING = (
    "productive",
    "repeated",
    "starting",
    "restoring",
    "waiting",
)


@dataclass(frozen=True)
class Slice:
    """A stretch of the run in which its job did one thing."""

    what: str
    began: float
    until: float
    generation: int | None = None


@dataclass(frozen=True)
class Goodput:
    """Seconds of the job's time, all told and by what they went into."""

    total_s: float
    productive_s: float
    starting_s: float
    restoring_s: float
    stalled_s: float
    repeated_s: float
    waiting_s: float

    @property
    def share(self) -> float | None:
        """The productive part of the whole, from 0 to 1; None where no time has passed."""
        return self.productive_s / self.total_s if self.total_s > 0 else None

    @property
    def parts(self) -> list[tuple[str, float]]:
        """What the whole is made of, by name."""
        return [(one.name[:-2], getattr(self, one.name)) for one in fields(self) if one.name != "total_s"]


def total(parts: Sequence[Slice], found: Sequence[Moments]) -> Goodput:
    """Add up the slices of a run; stalls are within the productive ones."""
    spent = dict.fromkeys((PRODUCTIVE, REPEATED, STARTING, RESTORING, WAITING), 0.0)
    trained: dict[int | None, float] = {}
    for one in parts:
        spent[one.what] += one.until - one.began
        if one.what == PRODUCTIVE:
            trained[one.generation] = trained.get(one.generation, 0.0) + one.until - one.began
    stalled = sum(min(one.stalled_s, trained.get(one.number, 0.0)) for one in found)
    spent[PRODUCTIVE] -= stalled
    seconds = {
        f"{name}_s": round(max(0.0, value), 3) for name, value in {**spent, "stalled": stalled}.items()
    }
    return Goodput(total_s=round(math.fsum(seconds.values()), 3), **seconds)


def slices(line: Timeline, report: Report, found: Sequence[Moments]) -> tuple[Slice, ...]:
    """Cut the run into what its job did, one thing after the other."""
    own = [one.t for one in line.seen if one.kind != "fault"]
    if not own:
        return ()
    writer = _Writer(min(own))
    kept = _kept(report)
    for one, row, floor in zip(found, report.generations, kept, strict=True):
        writer.wait(line, next(t for t in (one.formed, one.launched, one.restored) if t is not None))
        writer.add(STARTING, one.launched if one.launched is not None else one.restored)
        writer.add(RESTORING, one.restored)
        if one.stepped is not None and one.last is not None:
            # The first step waits for all that happens once: its own length is all that counts of it.
            writer.add(STARTING, one.stepped - (one.pace.step_s or 0.0), row.number)
            start = row.start_step if row.start_step is not None else -1
            if floor > start:
                writer.add(
                    PRODUCTIVE, one.pace.at(floor) if floor < (row.last_step or 0) else one.last, row.number
                )
            writer.add(REPEATED, one.last, row.number)
        if row.end.kind == "finished":
            writer.add(PRODUCTIVE, one.until, row.number)
            return writer.slices(one.until)
        if row.end.kind == "open":
            writer.add(PRODUCTIVE, max(own), row.number)
        elif one.noticed is not None and one.last is not None:  # the step that was cut off
            writer.add(REPEATED, min(one.noticed, one.last + (one.pace.step_s or 0.0)), row.number)
    writer.wait(line, max(own))
    return writer.slices(max(own))


def costs(parts: Sequence[Slice], report: Report, found: Sequence[Moments]) -> dict[int, float]:
    """Seconds that each failure cost, by the generation that it ended.

    All that was not training that counts, from that generation's first step to that of the next one which
    came to a step (those between them failed as well, at its cost), or to the end; without the length of a
    step, which `incidents.Generation.recovered_s` includes.
    """
    spent: dict[int, float] = {}
    trained = [(at, one.stepped) for at, one in enumerate(found) if one.stepped is not None]
    trained.append((len(found), max((one.until for one in parts), default=0.0)))
    place = 0
    for (first, since), (following, until) in pairwise(trained):
        failed = [row for row in report.generations[first:following] if row.end.is_failure]
        while place < len(parts) and parts[place].until <= since:
            place += 1
        if not failed:
            continue
        total_s, one = 0.0, place
        while one < len(parts) and parts[one].began < until:
            if parts[one].what != PRODUCTIVE:
                total_s += parts[one].until - max(parts[one].began, since)
            one += 1
        spent[failed[0].number] = round(total_s, 3)
    return spent


def _kept(report: Report) -> list[int]:
    """For each generation the last of its steps that no later one ran again."""
    floor = 1 << 62
    kept = []
    for row in reversed(report.generations):
        kept.append(min(floor, row.last_step if row.last_step is not None else 0))
        if row.start_step is not None:
            floor = min(floor, row.start_step)
    return kept[::-1]


class _Writer:
    """Puts slices one after the other; what lies before the end of the last one is not told twice."""

    def __init__(self, began: float) -> None:
        self._cursor = began
        self._slices: list[Slice] = []

    def add(self, what: str, until: float | None, generation: int | None = None) -> None:
        """The job did ``what`` until then."""
        if until is None or until <= self._cursor:
            return
        self._slices.append(Slice(what, self._cursor, until, generation))
        self._cursor = until

    def wait(self, line: Timeline, until: float | None) -> None:
        """No world trains until then. Agents that import torch make it a start, else the job waits."""
        if until is None or until <= self._cursor:
            return
        for began, ready in _imports(line, self._cursor, until):
            self.add(WAITING, min(began, until))
            self.add(STARTING, min(ready, until))
        self.add(WAITING, until)

    def slices(self, until: float) -> tuple[Slice, ...]:
        """All of them, until then."""
        cut = [one for one in self._slices if one.began < until]
        return tuple(replace(one, until=min(one.until, until)) for one in cut)


def _imports(line: Timeline, since: float, until: float) -> list[tuple[float, float]]:
    """When agents that had just started were getting ready, by the beginning."""
    ready = line.of_kind("zygote-ready")
    found = []
    for start in line.of_kind("agent-start"):
        if since <= start.t < until:
            done = min((one.t for one in ready if one.node == start.node and one.t >= start.t), default=None)
            if done is not None:
                found.append((start.t, done))
    return found
