"""Where a run's time went: the share that was training and still counts, and what took the rest.

Promise: `slices` cover the run from its first event to its last without a gap or an overlap, so the parts of
`Goodput` add up to the whole. The job's time is meant, not that of its nodes: one that is away while the
others train costs nothing here.

Of a generation's training time, *repeated* is what went into steps that a later generation ran again, and
into the step that its end cut off; *stalled* is what training waited for copies, by its workers' own account.
Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

from elastic_resume.report.incidents import Report
from elastic_resume.report.moments import Moments
from elastic_resume.report.timeline import Timeline

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
