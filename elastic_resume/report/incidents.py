"""What befell a run: one row for each generation, from the events that its nodes left behind.

Pure: a list of events in, frozen records out. Promise: any list of events gives a report. Logs may be torn,
of many clocks, of unknown kinds, or gone with their node; what cannot be known is None, never a guess
presented as a fact.

Does not know how a report looks (`render`), nor what a node's disk holds now (`checkpoints`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from elastic_resume.events import Event
from elastic_resume.policy import failure_classification, incidents
from elastic_resume.policy.incidents import FINISHED, End, Turn
from elastic_resume.report import clock_alignment, event_log
from elastic_resume.report.event_log import Seen, Timeline
from elastic_resume.report.formatting import without_path


@dataclass(frozen=True)
class RejectedCopy:
    """A copy that existed and was not loaded."""

    node: str
    generation: int | None
    step: int | None
    reason: str


@dataclass(frozen=True)
class Generation:
    """One lifetime of the worker group. Steps are counted over the whole job, times are Unix seconds.

    ``start_step`` had been finished before it, ``first_step`` to ``last_step`` are what it ran (None: not
    one, or not known). ``noticed`` is the first sign of its end. ``lost_steps`` and ``recovered_s`` are the
    price of its end, known once the next one runs: steps run again, and seconds from the first sign to the
    next generation's first step.
    """

    number: int
    nodes: tuple[str, ...]
    world_size: int | None
    began: float
    resumed: str  # cold, checkpoint, or nothing when that is not known
    start_step: int | None
    first_step: int | None
    last_step: int | None
    source_node: str
    source_generation: int | None
    lacking: tuple[str, ...]
    rejected: tuple[RejectedCopy, ...]
    end: End
    noticed: float | None
    lost_steps: int | None
    recovered_s: float | None

    @property
    def executed(self) -> int:
        """How many steps it ran, as far as is known."""
        if self.start_step is None or self.last_step is None:
            return 0
        return max(0, self.last_step - self.start_step)


@dataclass(frozen=True)
class FailedStart:
    """A worker that ended before its training began, on the way to generation ``before`` (None: the next)."""

    before: int | None
    t: float
    node: str
    rank: int | None
    text: str
    is_echo: bool


@dataclass(frozen=True)
class Report:
    """The whole run. ``wasted_steps``: executed, less those that the run stands at now."""

    generations: tuple[Generation, ...]
    failed_starts: tuple[FailedStart, ...]
    incidents: int
    lost_steps: int
    wasted_steps: int
    last_step: int | None
    outcome: str  # finished, failed, stopped, open, or empty
    message: str


@dataclass(frozen=True)
class Facts:
    """What the events of one generation say by themselves."""

    number: int
    events: tuple[Seen, ...]
    resume: Seen | None
    nodes: tuple[str, ...]
    world_size: int | None
    began: float
    start_step: int | None

    @property
    def announced_last(self) -> int | None:
        """The last step of the generation before, as this one's resume found it."""
        if self.resume is None or self.start_step is None:
            return None
        lost = self.resume.count("lost_steps")
        return None if lost is None else self.start_step + lost


def tell(events: Iterable[Event]) -> Report:
    """Make a report of the events of one run, in any order."""
    events = list(events)
    return of(event_log.build(clock_alignment.align(events, clock_alignment.boot_times(events))[0]))


def of(line: Timeline) -> Report:
    """Make a report of what was seen."""
    facts = facts_of(line)
    told = incidents.fold((one.t, _event(one)) for one in line.seen if _is_dated(one))
    rows = tuple(
        _generation(one, following, told.turn(one.number), told.turn(following.number) if following else None)
        for one, following in zip_longest(facts, facts[1:])
    )
    outcome, message = _outcome(line, rows)
    return Report(
        generations=rows,
        failed_starts=_failed_starts(line, facts),
        incidents=sum(row.end.is_failure for row in rows),
        lost_steps=sum(row.lost_steps or 0 for row in rows),
        wasted_steps=max(0, sum(row.executed for row in rows) - _progress(rows)),
        last_step=next((row.last_step for row in reversed(rows) if row.last_step is not None), None),
        outcome=outcome,
        message=message,
    )


def facts_of(line: Timeline) -> list[Facts]:
    """Give the generations in order."""
    return [_facts(number, found) for number, found in line.generations.items()]


def _facts(number: int, events: tuple[Seen, ...]) -> Facts:
    starts = [one for one in events if one.kind == "worker-start"]
    resume = next((one for one in reversed(events) if one.kind == "resume"), None)
    told = [resume, *starts] if resume else starts
    named = resume.names("nodes") if resume else ()
    return Facts(
        number=number,
        events=events,
        resume=resume,
        nodes=named or tuple(sorted({one.node for one in events})),
        world_size=next((size for one in told if (size := one.count("world_size")) is not None), None),
        began=min(one.t for one in told or events),
        start_step=next((one.step for one in told if one.step is not None), None),
    )


def _event(one: Seen) -> Event:
    """The event, with the generation that was found for a worker's exit."""
    return {**one.raw, "generation": one.generation}


def _is_dated(one: Seen) -> bool:
    """Whether it may tell of a generation's end: a worker that never trained was in none."""
    return one.generation is not None or one.kind not in {"worker-exit", "failure"}


def _generation(one: Facts, following: Facts | None, turn: Turn, later: Turn | None) -> Generation:
    steps = [seen.step for seen in one.events if seen.step is not None]
    if following is not None and following.announced_last is not None:
        # A resume that takes another lineage up says nothing about this one.
        steps.append(following.announced_last)
    last = max(steps, default=None)
    start = one.start_step if one.start_step is not None else _first_mark(one)
    ran = start is not None and last is not None and last > start
    judged = incidents.judge(turn, later)
    resume = one.resume
    return Generation(
        number=one.number,
        nodes=one.nodes,
        world_size=one.world_size,
        began=one.began,
        resumed=resume.text("kind") if resume else "",
        start_step=start,
        first_step=start + 1 if ran and start is not None else None,
        last_step=last,
        source_node=resume.text("source_node") if resume else "",
        source_generation=resume.count("source_generation") if resume else None,
        lacking=resume.names("lacking") if resume else (),
        rejected=_rejected(resume),
        end=judged.end,
        noticed=judged.t,
        lost_steps=judged.lost_steps,
        recovered_s=judged.recovered_s,
    )


def _first_mark(one: Facts) -> int | None:
    """The step before the first one marked: every worker marks the first step that it finishes."""
    marks = [seen.step for seen in one.events if seen.kind == "step" and seen.step]
    return min(marks) - 1 if marks else None


def _rejected(resume: Seen | None) -> tuple[RejectedCopy, ...]:
    listed = resume.raw.get("rejected") if resume else None
    found = []
    for item in listed if isinstance(listed, list) else []:
        if isinstance(item, dict):
            one = Seen(0.0, "", "", None, None, None, None, item)
            copy = RejectedCopy(
                one.text("node"), one.count("generation"), one.count("step"), without_path(one.text("reason"))
            )
            found.append(copy)
    return tuple(found)


# ---- the run as a whole --------------------------------------------------------------------------------


def _progress(rows: Sequence[Generation]) -> int:
    """Steps between where the run began and where it stands."""
    starts = [row.start_step for row in rows if row.start_step is not None]
    lasts = [row.last_step for row in rows if row.last_step is not None]
    return max(0, lasts[-1] - starts[0]) if starts and lasts else 0


def _outcome(line: Timeline, rows: Sequence[Generation]) -> tuple[str, str]:
    """How the run stands, and what its agents said about it."""
    if rows and rows[-1].end.kind == FINISHED:
        return "finished", ""
    words = line.of_kind("agent-start", "round", "agent-end")
    if not words:
        last = rows[-1].end if rows else None
        if last is None:
            return "", "no generation has begun"
        return ("failed", last.text) if last.kind == failure_classification.EXCEPTION else ("open", "")
    if words[-1].kind != "agent-end":
        return "open", ""
    latest = max((one.t for one in words if one.kind != "agent-end"), default=words[0].t)
    ends = [one for one in words if one.kind == "agent-end" and one.t >= latest]
    for outcome, told in (
        ("failed", "failed"),
        ("signalled", "stopped"),
        ("left", "stopped"),
        ("done", "finished"),
    ):
        for one in ends:
            if one.text("outcome") == outcome:
                return told, one.text("message")
    return "open", ""


def _failed_starts(line: Timeline, facts: Sequence[Facts]) -> tuple[FailedStart, ...]:
    by_node: dict[str, list[Event]] = defaultdict(list)
    for one in line.of_kind("failure", "worker-exit"):
        if one.generation is None and (one.kind == "failure" or one.at_fault):
            by_node[one.node].append({**one.raw, "t": one.t})
    found = []
    for node, events in by_node.items():
        for t, failure in failure_classification.dated(events, node):
            before = next((fact.number for fact in facts if fact.began >= t), None)
            text = failure_classification.describe(failure, node=True)
            found.append(FailedStart(before, t, node, failure.rank, text, failure.is_echo))
    return tuple(sorted(found, key=lambda one: one.t))
