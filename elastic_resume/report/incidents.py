"""Build the history of a run from events: one `Generation` for each lifetime of its workers.

Any list of events gives a history. Logs may be torn, from many clocks, of unknown kinds, or lost with
their node. A value that cannot be known is None, never a guess. `policy.incidents` decides why a
generation ended. Pure.
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
    """A snapshot or checkpoint that existed and was not loaded."""

    node: str
    generation: int | None
    step: int | None
    reason: str


@dataclass(frozen=True)
class Generation:
    """One lifetime of the worker group. Steps count over the whole job; times are Unix seconds.

    ``start_step`` was finished before it. It ran ``first_step`` to ``last_step``; both are None if it ran
    no step or that is unknown. ``detected_t`` is the first sign of its end. ``recomputed_steps`` and
    ``recovery_s`` are the cost of its end, known once the next generation runs.
    """

    number: int
    nodes: tuple[str, ...]
    world_size: int | None
    start_t: float
    resume_kind: str  # cold, checkpoint, or empty if unknown
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
        """The number of steps that it ran, as far as known."""
        if self.start_step is None or self.last_step is None:
            return 0
        return max(0, self.last_step - self.start_step)


@dataclass(frozen=True)
class FailedStart:
    """A worker that ended before its training began; ``next_generation`` is None after the last one."""

    next_generation: int | None
    t: float
    node: str
    rank: int | None
    text: str
    is_secondary: bool


@dataclass(frozen=True)
class RunHistory:
    """All generations of a run, and sums over them.

    ``discarded_steps`` are the steps run, less those between the run's first and its last step.
    """

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
        """The last step of the previous generation, as the resume event gives it."""
        if self.resume is None or self.start_step is None:
            return None
        recomputed = self.resume.get_count("recomputed_steps")
        return None if recomputed is None else self.start_step + recomputed


def build_history_from_events(events: Iterable[Event]) -> RunHistory:
    """Build the history of one run from its events, in any order."""
    events = list(events)
    return build_history(
        event_log.build_timeline(
            clock_alignment.align_events(events, clock_alignment.estimate_boot_times(events))[0]
        )
    )


def build_history(timeline: EventTimeline) -> RunHistory:
    """Build the history of one run from its timeline."""
    all_facts = collect_facts(timeline)
    tracker = incidents.track_incidents(
        (facts_of_generation.t, _with_generation(facts_of_generation))
        for facts_of_generation in timeline.events
        if _belongs_to_generation(facts_of_generation)
    )
    rows = tuple(
        _build_generation(
            facts_of_generation,
            next_facts,
            tracker.generation_state(facts_of_generation.number),
            tracker.generation_state(next_facts.number) if next_facts else None,
        )
        for facts_of_generation, next_facts in zip_longest(all_facts, all_facts[1:])
    )
    outcome, message = _determine_outcome(timeline, rows)
    return RunHistory(
        generations=rows,
        failed_starts=_find_failed_starts(timeline, all_facts),
        num_incidents=sum(row.end.is_failure for row in rows),
        recomputed_steps=sum(row.recomputed_steps or 0 for row in rows),
        discarded_steps=max(0, sum(row.num_steps_run for row in rows) - _net_steps(rows)),
        last_step=next((row.last_step for row in reversed(rows) if row.last_step is not None), None),
        outcome=outcome,
        message=message,
    )


def collect_facts(timeline: EventTimeline) -> list[GenerationFacts]:
    """Return the facts of each generation, in order."""
    return [_collect_generation_facts(number, found) for number, found in timeline.by_generation.items()]


def _collect_generation_facts(number: int, events: tuple[ParsedEvent, ...]) -> GenerationFacts:
    starts = [event for event in events if event.kind == "worker-start"]
    resume = next((event for event in reversed(events) if event.kind == "resume"), None)
    starts_and_resume = [resume, *starts] if resume else starts
    nodes = resume.get_texts("nodes") if resume else ()
    return GenerationFacts(
        number=number,
        events=events,
        resume=resume,
        nodes=nodes or tuple(sorted({event.node for event in events})),
        world_size=next(
            (size for event in starts_and_resume if (size := event.get_count("world_size")) is not None), None
        ),
        start_t=min(event.t for event in starts_and_resume or events),
        start_step=next((event.step for event in starts_and_resume if event.step is not None), None),
    )


def _with_generation(event: ParsedEvent) -> Event:
    """Return the raw event with the generation that was found for it."""
    return {**event.raw, "generation": event.generation}


def _belongs_to_generation(event: ParsedEvent) -> bool:
    """Whether the event may explain a generation's end; a worker that never trained was in none."""
    return event.generation is not None or event.kind not in {"worker-exit", "failure"}


def _build_generation(
    facts: GenerationFacts,
    next_facts: GenerationFacts | None,
    state: GenerationState,
    next_state: GenerationState | None,
) -> Generation:
    steps = [event.step for event in facts.events if event.step is not None]
    if next_facts is not None and next_facts.previous_last_step is not None:
        # None if the resume took the state of an older generation.
        steps.append(next_facts.previous_last_step)
    last = max(steps, default=None)
    start = facts.start_step if facts.start_step is not None else _infer_start_step(facts)
    has_run = start is not None and last is not None and last > start
    analysis = incidents.analyze_end(state, next_state)
    resume = facts.resume
    return Generation(
        number=facts.number,
        nodes=facts.nodes,
        world_size=facts.world_size,
        start_t=facts.start_t,
        resume_kind=resume.get_text("kind") if resume else "",
        start_step=start,
        first_step=start + 1 if has_run and start is not None else None,
        last_step=last,
        source_node=resume.get_text("source_node") if resume else "",
        source_generation=resume.get_count("source_generation") if resume else None,
        receiving_nodes=resume.get_texts("lacking") if resume else (),
        rejected=_parse_rejected(resume),
        end=analysis.end,
        detected_t=analysis.t,
        recomputed_steps=analysis.recomputed_steps,
        recovery_s=analysis.recovery_s,
    )


def _infer_start_step(facts: GenerationFacts) -> int | None:
    """Return the step before the first recorded one; each worker records its first step."""
    marks = [event.step for event in facts.events if event.kind == "step" and event.step]
    return min(marks) - 1 if marks else None


def _parse_rejected(resume: ParsedEvent | None) -> tuple[RejectedStateRecord, ...]:
    listed = resume.raw.get("rejected") if resume else None
    records = []
    for item in listed if isinstance(listed, list) else []:
        if isinstance(item, dict):
            fields = ParsedEvent(0.0, "", "", None, None, None, None, item)
            record = RejectedStateRecord(
                fields.get_text("node"),
                fields.get_count("generation"),
                fields.get_count("step"),
                strip_path(fields.get_text("reason")),
            )
            records.append(record)
    return tuple(records)


# ---- the run as a whole --------------------------------------------------------------------------------


def _net_steps(rows: Sequence[Generation]) -> int:
    """Return the steps between the run's first and last step."""
    starts = [row.start_step for row in rows if row.start_step is not None]
    lasts = [row.last_step for row in rows if row.last_step is not None]
    return max(0, lasts[-1] - starts[0]) if starts and lasts else 0


def _determine_outcome(timeline: EventTimeline, rows: Sequence[Generation]) -> tuple[str, str]:
    """Return the outcome of the run and its agents' message."""
    if rows and rows[-1].end.kind == FINISHED:
        return "finished", ""
    agent_events = timeline.select("agent-start", "round", "agent-end")
    if not agent_events:
        last = rows[-1].end if rows else None
        if last is None:
            return "", "no generation has started"
        return ("failed", last.text) if last.kind == failure_classification.EXCEPTION else ("open", "")
    if agent_events[-1].kind != "agent-end":
        return "open", ""
    latest = max((event.t for event in agent_events if event.kind != "agent-end"), default=agent_events[0].t)
    ends = [event for event in agent_events if event.kind == "agent-end" and event.t >= latest]
    for outcome, outcome_name in (
        ("failed", "failed"),
        ("signalled", "stopped"),
        ("left", "stopped"),
        ("done", "finished"),
    ):
        for event in ends:
            if event.get_text("outcome") == outcome:
                return outcome_name, event.get_text("message")
    return "open", ""


def _find_failed_starts(timeline: EventTimeline, facts: Sequence[GenerationFacts]) -> tuple[FailedStart, ...]:
    by_node: dict[str, list[Event]] = defaultdict(list)
    for event in timeline.select("failure", "worker-exit"):
        if event.generation is None and (event.kind == "failure" or event.exited_with_failure):
            by_node[event.node].append({**event.raw, "t": event.t})
    starts = []
    for node, events in by_node.items():
        for t, failure in failure_classification.classify_with_times(events, node):
            next_generation = next(
                (
                    facts_of_generation.number
                    for facts_of_generation in facts
                    if facts_of_generation.start_t >= t
                ),
                None,
            )
            text = failure_classification.describe_failure(failure, with_node=True)
            starts.append(FailedStart(next_generation, t, node, failure.rank, text, failure.is_secondary))
    return tuple(sorted(starts, key=lambda event: event.t))
