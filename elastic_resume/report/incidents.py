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
from elastic_resume.policy.incidents import FINISHED, GenerationEnd, GenerationState
from elastic_resume.report import clock_alignment, event_log
from elastic_resume.report.event_log import EventTimeline, ParsedEvent
from elastic_resume.report.formatting import strip_path


@dataclass(frozen=True)
class RejectedStateRecord:
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
    start_t: float
    resume_kind: str  # cold, checkpoint, or nothing when that is not known
    start_step: int | None
    first_step: int | None
    last_step: int | None
    source_node: str
    source_generation: int | None
    receiving_nodes: tuple[str, ...]
    rejected: tuple[RejectedStateRecord, ...]
    end: GenerationEnd
    detected_t: float | None
    recomputed_steps: int | None
    recovery_s: float | None

    @property
    def num_steps_run(self) -> int:
        """How many steps it ran, as far as is known."""
        if self.start_step is None or self.last_step is None:
            return 0
        return max(0, self.last_step - self.start_step)


@dataclass(frozen=True)
class FailedStart:
    """A worker that ended before its training began, on the way to generation ``before`` (None: the next)."""

    next_generation: int | None
    t: float
    node: str
    rank: int | None
    text: str
    is_secondary: bool


@dataclass(frozen=True)
class RunHistory:
    """The whole run. ``wasted_steps``: executed, less those that the run stands at now."""

    generations: tuple[Generation, ...]
    failed_starts: tuple[FailedStart, ...]
    num_incidents: int
    recomputed_steps: int
    discarded_steps: int
    last_step: int | None
    outcome: str  # finished, failed, stopped, open, or empty
    message: str


@dataclass(frozen=True)
class GenerationFacts:
    """What the events of one generation say by themselves."""

    number: int
    events: tuple[ParsedEvent, ...]
    resume: ParsedEvent | None
    nodes: tuple[str, ...]
    world_size: int | None
    start_t: float
    start_step: int | None

    @property
    def previous_last_step(self) -> int | None:
        """The last step of the generation before, as this one's resume found it."""
        if self.resume is None or self.start_step is None:
            return None
        lost = self.resume.get_count("recomputed_steps")
        return None if lost is None else self.start_step + lost


def build_history_from_events(events: Iterable[Event]) -> RunHistory:
    """Make a report of the events of one run, in any order."""
    events = list(events)
    return build_history(
        event_log.build_timeline(
            clock_alignment.align_events(events, clock_alignment.estimate_boot_times(events))[0]
        )
    )


def build_history(timeline: EventTimeline) -> RunHistory:
    """Make a report of what was seen."""
    facts = collect_facts(timeline)
    told = incidents.track_incidents(
        (one.t, _with_generation(one)) for one in timeline.events if _belongs_to_generation(one)
    )
    rows = tuple(
        _build_generation(
            one,
            following,
            told.generation_state(one.number),
            told.generation_state(following.number) if following else None,
        )
        for one, following in zip_longest(facts, facts[1:])
    )
    outcome, message = _determine_outcome(timeline, rows)
    return RunHistory(
        generations=rows,
        failed_starts=_find_failed_starts(timeline, facts),
        num_incidents=sum(row.end.is_failure for row in rows),
        recomputed_steps=sum(row.recomputed_steps or 0 for row in rows),
        discarded_steps=max(0, sum(row.num_steps_run for row in rows) - _net_steps(rows)),
        last_step=next((row.last_step for row in reversed(rows) if row.last_step is not None), None),
        outcome=outcome,
        message=message,
    )


def collect_facts(timeline: EventTimeline) -> list[GenerationFacts]:
    """Give the generations in order."""
    return [_collect_generation_facts(number, found) for number, found in timeline.by_generation.items()]


def _collect_generation_facts(number: int, events: tuple[ParsedEvent, ...]) -> GenerationFacts:
    starts = [one for one in events if one.kind == "worker-start"]
    resume = next((one for one in reversed(events) if one.kind == "resume"), None)
    told = [resume, *starts] if resume else starts
    named = resume.get_texts("nodes") if resume else ()
    return GenerationFacts(
        number=number,
        events=events,
        resume=resume,
        nodes=named or tuple(sorted({one.node for one in events})),
        world_size=next((size for one in told if (size := one.get_count("world_size")) is not None), None),
        start_t=min(one.t for one in told or events),
        start_step=next((one.step for one in told if one.step is not None), None),
    )


def _with_generation(one: ParsedEvent) -> Event:
    """The event, with the generation that was found for a worker's exit."""
    return {**one.raw, "generation": one.generation}


def _belongs_to_generation(one: ParsedEvent) -> bool:
    """Whether it may tell of a generation's end: a worker that never trained was in none."""
    return one.generation is not None or one.kind not in {"worker-exit", "failure"}


def _build_generation(
    one: GenerationFacts,
    following: GenerationFacts | None,
    turn: GenerationState,
    later: GenerationState | None,
) -> Generation:
    steps = [seen.step for seen in one.events if seen.step is not None]
    if following is not None and following.previous_last_step is not None:
        # A resume that takes another lineage up says nothing about this one.
        steps.append(following.previous_last_step)
    last = max(steps, default=None)
    start = one.start_step if one.start_step is not None else _infer_start_step(one)
    ran = start is not None and last is not None and last > start
    judged = incidents.analyze_end(turn, later)
    resume = one.resume
    return Generation(
        number=one.number,
        nodes=one.nodes,
        world_size=one.world_size,
        start_t=one.start_t,
        resume_kind=resume.get_text("kind") if resume else "",
        start_step=start,
        first_step=start + 1 if ran and start is not None else None,
        last_step=last,
        source_node=resume.get_text("source_node") if resume else "",
        source_generation=resume.get_count("source_generation") if resume else None,
        receiving_nodes=resume.get_texts("lacking") if resume else (),
        rejected=_parse_rejected(resume),
        end=judged.end,
        detected_t=judged.t,
        recomputed_steps=judged.recomputed_steps,
        recovery_s=judged.recovery_s,
    )


def _infer_start_step(one: GenerationFacts) -> int | None:
    """The step before the first one marked: every worker marks the first step that it finishes."""
    marks = [seen.step for seen in one.events if seen.kind == "step" and seen.step]
    return min(marks) - 1 if marks else None


def _parse_rejected(resume: ParsedEvent | None) -> tuple[RejectedStateRecord, ...]:
    listed = resume.raw.get("rejected") if resume else None
    found = []
    for item in listed if isinstance(listed, list) else []:
        if isinstance(item, dict):
            one = ParsedEvent(0.0, "", "", None, None, None, None, item)
            copy = RejectedStateRecord(
                one.get_text("node"),
                one.get_count("generation"),
                one.get_count("step"),
                strip_path(one.get_text("reason")),
            )
            found.append(copy)
    return tuple(found)


# ---- the run as a whole --------------------------------------------------------------------------------


def _net_steps(rows: Sequence[Generation]) -> int:
    """Steps between where the run began and where it stands."""
    starts = [row.start_step for row in rows if row.start_step is not None]
    lasts = [row.last_step for row in rows if row.last_step is not None]
    return max(0, lasts[-1] - starts[0]) if starts and lasts else 0


def _determine_outcome(line: EventTimeline, rows: Sequence[Generation]) -> tuple[str, str]:
    """How the run stands, and what its agents said about it."""
    if rows and rows[-1].end.kind == FINISHED:
        return "finished", ""
    words = line.select("agent-start", "round", "agent-end")
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
            if one.get_text("outcome") == outcome:
                return told, one.get_text("message")
    return "open", ""


def _find_failed_starts(line: EventTimeline, facts: Sequence[GenerationFacts]) -> tuple[FailedStart, ...]:
    by_node: dict[str, list[Event]] = defaultdict(list)
    for one in line.select("failure", "worker-exit"):
        if one.generation is None and (one.kind == "failure" or one.exited_with_failure):
            by_node[one.node].append({**one.raw, "t": one.t})
    found = []
    for node, events in by_node.items():
        for t, failure in failure_classification.classify_with_times(events, node):
            before = next((fact.number for fact in facts if fact.start_t >= t), None)
            text = failure_classification.describe_failure(failure, with_node=True)
            found.append(FailedStart(before, t, node, failure.rank, text, failure.is_secondary))
    return tuple(sorted(found, key=lambda one: one.t))
