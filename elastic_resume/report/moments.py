"""When what happened on the way from one generation's last step to the next one's first.

Each generation leaves up to nine moments, on one time axis (`clocks`); what left no event is None. `phases`
makes the seconds of a recovery of two generations' moments. Pure.
"""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from elastic_resume.report.incidents import Facts, Generation, Report, facts_of
from elastic_resume.report.timeline import Seen, Timeline


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
