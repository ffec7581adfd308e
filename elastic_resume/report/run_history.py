"""Build the history of a run from events: its generations, and its snapshots and checkpoints.

Any list of events gives a history. Logs may be torn, from many clocks, of unknown kinds, or lost with
their node. A value that cannot be known is None, never a guess. `report.incident_tracker` decides why a
generation ended.

`build_saved_state_records` follows every snapshot and checkpoint by node, step and tier. A snapshot is
known only if a generation started from it. A checkpoint is known from its commit until it was pruned,
quarantined or lost with its disk. Entries found on disk override the events. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import PurePath

from elastic_resume.checkpoint.reader import parse_checkpoint_name
from elastic_resume.events import Event
from elastic_resume.policy import failure_classification
from elastic_resume.policy.wording import describe_failure
from elastic_resume.report import event_log, incident_tracker
from elastic_resume.report.checkpoints import QUARANTINED, CheckpointEntry
from elastic_resume.report.event_log import EventTimeline, ParsedEvent
from elastic_resume.report.formatting import strip_path
from elastic_resume.report.incident_tracker import FINISHED, GenerationEnd, IncidentTracker

MEMORY, DISK = "memory", "disk"
COMMITTED, PRUNED, LOST, USED = "committed", "pruned", "lost", "used"
# The agents' outcomes, from the one that decides on.
_OUTCOMES = {"failed": "failed", "signalled": "stopped", "left": "stopped", "done": "finished"}


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
    resume_kind: str  # cold, resumed, or empty if unknown
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
class JobWait:
    """Nodes that wait for others and run no workers, since ``since_t``; ``missing_nodes`` as far as known."""

    since_t: float
    missing_nodes: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class RunHistory:
    """All generations of a run, and sums over them.

    ``discarded_steps`` are the steps run, less those between the run's first and its last step. ``wait`` is
    None unless the remaining nodes wait for others now.
    """

    generations: tuple[Generation, ...]
    failed_starts: tuple[FailedStart, ...]
    num_incidents: int
    recomputed_steps: int
    discarded_steps: int
    last_step: int | None
    outcome: str  # finished, failed, stopped, open, or empty
    message: str
    wait: JobWait | None = None


@dataclass(frozen=True)
class GenerationFacts:
    """What the events of one generation say by themselves."""

    number: int
    events: Sequence[ParsedEvent]
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
    return build_history(event_log.build_timeline(events))


def build_history(timeline: EventTimeline) -> RunHistory:
    """Build the history of one run from its timeline."""
    all_facts = collect_facts(timeline)
    tracker = incident_tracker.track_incidents(
        (event.t, {**event.raw, "generation": event.generation})
        for event in timeline.events
        # A worker that never trained was in no generation.
        if event.generation is not None or event.kind not in {"worker-exit", "failure"}
    )
    rows = tuple(
        _build_generation(facts, next_facts, tracker)
        for facts, next_facts in zip(all_facts, [*all_facts[1:], None], strict=False)
    )
    outcome, message = _determine_outcome(timeline, rows)
    starts = [row.start_step for row in rows if row.start_step is not None]
    lasts = [row.last_step for row in rows if row.last_step is not None]
    net_steps = max(0, lasts[-1] - starts[0]) if starts and lasts else 0
    return RunHistory(
        generations=rows,
        failed_starts=_find_failed_starts(timeline, all_facts),
        num_incidents=sum(row.end.is_failure for row in rows),
        recomputed_steps=sum(row.recomputed_steps or 0 for row in rows),
        discarded_steps=max(0, sum(row.num_steps_run for row in rows) - net_steps),
        last_step=lasts[-1] if lasts else None,
        outcome=outcome,
        message=message,
        wait=_find_wait(timeline, rows) if outcome == "open" else None,
    )


def collect_facts(timeline: EventTimeline) -> list[GenerationFacts]:
    """Return the facts of each generation, in order."""
    return [_collect_generation_facts(number, found) for number, found in timeline.by_generation.items()]


def _collect_generation_facts(number: int, events: Sequence[ParsedEvent]) -> GenerationFacts:
    starts = [event for event in events if event.kind == "worker-start"]
    resume = next((event for event in reversed(events) if event.kind == "resume"), None)
    starts_and_resume = [resume, *starts] if resume else starts
    world_sizes = (event.get_count("world_size") for event in starts_and_resume)
    return GenerationFacts(
        number=number,
        events=events,
        resume=resume,
        nodes=(resume.get_texts("nodes") if resume else ())
        or tuple(sorted({event.node for event in events})),
        world_size=next((size for size in world_sizes if size is not None), None),
        start_t=min(event.t for event in starts_and_resume or events),
        start_step=next((event.step for event in starts_and_resume if event.step is not None), None),
    )


def _build_generation(
    facts: GenerationFacts, next_facts: GenerationFacts | None, tracker: IncidentTracker
) -> Generation:
    steps = [event.step for event in facts.events if event.step is not None]
    if next_facts is not None and next_facts.previous_last_step is not None:
        # None if the resume took the state of an older generation.
        steps.append(next_facts.previous_last_step)
    last, start = max(steps, default=None), facts.start_step
    if start is None:  # each worker records its first step
        first_steps = [event.step for event in facts.events if event.kind == "step" and event.step]
        start = min(first_steps) - 1 if first_steps else None
    has_run = start is not None and last is not None and last > start
    next_state = tracker.generation_state(next_facts.number) if next_facts else None
    analysis = incident_tracker.analyze_end(tracker.generation_state(facts.number), next_state)
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
        receiving_nodes=resume.get_texts("receiving_nodes") if resume else (),
        rejected=_parse_rejected(resume),
        end=analysis.end,
        detected_t=analysis.t,
        recomputed_steps=analysis.recomputed_steps,
        recovery_s=analysis.recovery_s,
    )


def _parse_rejected(resume: ParsedEvent | None) -> tuple[RejectedStateRecord, ...]:
    listed = resume.raw.get("rejected") if resume else None
    items = [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
    parsed = [ParsedEvent(0.0, "", "", None, None, None, None, item) for item in items]
    return tuple(
        RejectedStateRecord(
            fields.get_text("node"),
            fields.get_count("generation"),
            fields.get_count("step"),
            strip_path(fields.get_text("reason")),
        )
        for fields in parsed
    )


def _determine_outcome(timeline: EventTimeline, rows: Sequence[Generation]) -> tuple[str, str]:
    """Return the outcome of the run and its agents' message."""
    if rows and rows[-1].end.kind == FINISHED:
        return "finished", ""
    agent_events = timeline.select("agent-start", "round", "agent-end")
    if not agent_events:
        if not rows:
            return "", "no generation has started"
        end = rows[-1].end
        return ("failed", end.text) if end.kind == failure_classification.EXCEPTION else ("open", "")
    if agent_events[-1].kind != "agent-end":
        return "open", ""
    latest = max((event.t for event in agent_events if event.kind != "agent-end"), default=agent_events[0].t)
    ends = [event for event in agent_events if event.kind == "agent-end" and event.t >= latest]
    for name, outcome in _OUTCOMES.items():
        for event in ends:
            if event.get_text("outcome") == name:
                return outcome, event.get_text("message")
    return "open", ""


def _find_wait(timeline: EventTimeline, rows: Sequence[Generation]) -> JobWait | None:
    """Return what the agents wait for after the last generation; None if one runs or all agents ended.

    A node that was not in the last generation may be partitioned from others that train.
    """
    members = rows[-1].nodes if rows else tuple(timeline.by_node)
    last_run_t = max((event.t for event in timeline.select("round", "worker-start", "step")), default=0.0)
    ended = {node for node, events in timeline.by_node.items() if _has_ended(events)}
    waits = [
        event
        for event in timeline.select("rendezvous")
        if event.get_text("what") == "waiting" and event.t > last_run_t
        if event.node in members and event.node not in ended
    ]
    if not waits:
        return None
    text = waits[-1].get_text("message")
    return JobWait(waits[0].t, waits[-1].get_texts("missing"), text.rstrip("."))


def _has_ended(events: Sequence[ParsedEvent]) -> bool:
    """Whether the node's newest agent has ended."""
    names = [event.kind for event in events if event.kind in {"agent-start", "agent-end"}]
    return bool(names) and names[-1] == "agent-end"


def _find_failed_starts(timeline: EventTimeline, facts: Sequence[GenerationFacts]) -> tuple[FailedStart, ...]:
    by_node: dict[str, list[Event]] = defaultdict(list)
    for event in timeline.select("failure", "worker-exit"):
        has_failed = event.kind == "failure" or event.get_text("signal") or event.get_count("exit_code")
        if event.generation is None and has_failed:
            by_node[event.node].append({**event.raw, "t": event.t})
    starts = []
    for node, events in by_node.items():
        for t, failure in failure_classification.classify_with_times(events, node):
            next_generation = next((later.number for later in facts if later.start_t >= t), None)
            text = describe_failure(failure, with_node=True)
            starts.append(FailedStart(next_generation, t, node, failure.rank, text, failure.is_secondary))
    return tuple(sorted(starts, key=lambda start: start.t))


# ---- saved states ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedStateRecord:
    """One snapshot or checkpoint of one node.

    ``state``: committed (by the events), valid or bad (inspected on disk), pruned, quarantined, lost
    (with its disk), or used (a snapshot that a generation started from). ``verified``: a generation read
    its every byte. ``loaded_by`` are the generations that started from it. It existed from ``t`` to
    ``removed_t``.
    """

    node: str
    generation: int
    step: int
    tier: str
    state: str
    verified: bool
    loaded_by: tuple[int, ...] = ()
    t: float | None = None
    removed_t: float | None = None
    bytes: int | None = None
    commit_s: float | None = None
    reason: str = ""


def build_saved_state_records(
    timeline: EventTimeline, history: RunHistory, entries: Sequence[CheckpointEntry] = ()
) -> tuple[SavedStateRecord, ...]:
    """Return all records by generation, step, node and tier; ``entries`` lie on disk now."""
    records: _Records = {}
    for item in timeline.select("commit", "prune", "quarantine"):
        if item.kind == "commit":
            _record_commit(records, item)
        else:
            _record_removal(records, item)
    _record_loads(records, timeline, history)
    _apply_disk_entries(records, entries, timeline)
    ordered = sorted(records.values(), key=attrgetter("generation", "step", "node", "tier"))
    return tuple(ordered)


_Records = dict[tuple[str, int, int, str], SavedStateRecord]


def _record_commit(records: _Records, event: ParsedEvent) -> None:
    if event.generation is None or event.step is None:
        return
    key = (event.node, event.generation, event.step, DISK)
    size, commit_s = event.get_count("bytes"), event.get_seconds("seconds")
    records[key] = SavedStateRecord(*key, COMMITTED, verified=False, t=event.t, bytes=size, commit_s=commit_s)


def _record_removal(records: _Records, event: ParsedEvent) -> None:
    """Record a prune or a quarantine event."""
    version = parse_checkpoint_name(PurePath(event.get_text("path")).name.partition(".")[0])
    if version is None:
        return
    key = (event.node, *version, DISK)
    known = records.get(key, SavedStateRecord(event.node, *version, DISK, COMMITTED, verified=False))
    state = PRUNED if event.kind == "prune" else QUARANTINED
    records[key] = replace(known, state=state, removed_t=event.t, reason=event.get_text("reason"))


def _record_loads(records: _Records, timeline: EventTimeline, history: RunHistory) -> None:
    resumes = {event.generation: event for event in timeline.select("resume")}
    for row in history.generations:
        event = resumes.get(row.number)
        if event is None or not row.source_node or row.source_generation is None or row.start_step is None:
            continue
        tier = event.get_text("source_tier")
        if row.resume_kind != "resumed" or tier not in {MEMORY, DISK}:
            continue
        key = (row.source_node, row.source_generation, row.start_step, tier)
        record = SavedStateRecord(*key, USED if tier == MEMORY else COMMITTED, verified=True, t=event.t)
        known = records.get(key, record)
        records[key] = replace(known, verified=True, loaded_by=(*known.loaded_by, row.number))


def _apply_disk_entries(
    records: _Records, entries: Iterable[CheckpointEntry], timeline: EventTimeline
) -> None:
    seen = set()
    inspected_nodes = set()
    for entry in entries:
        inspected_nodes.add(entry.node)
        if entry.generation is None or entry.step is None:
            continue
        if entry.generation + timeline.generation_offset <= timeline.min_generation:
            continue  # of an earlier training
        key = (entry.node, entry.generation + timeline.generation_offset, entry.step, DISK)
        if key in seen and entry.state == QUARANTINED:  # a newer one has its name
            key = (*key[:3], f"{DISK}, {entry.path.name} quarantined")
        record = SavedStateRecord(
            *key[:3], DISK, COMMITTED, verified=False, t=entry.written_at, bytes=entry.bytes
        )
        known = records.get(key, record)
        size = known.bytes or entry.bytes
        records[key] = replace(known, state=entry.state, reason=entry.reason, bytes=size)
        seen.add(key)
    for key, record in records.items():
        is_committed = record.tier == DISK and record.state == COMMITTED
        if is_committed and record.node in inspected_nodes and key not in seen:
            records[key] = replace(record, state=LOST, reason="no longer on disk")
