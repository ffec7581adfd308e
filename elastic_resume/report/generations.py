"""Fold the events of a run into its generations: who trained, which steps, why each ended, at what cost.

The agents' ``verdict`` event holds why a generation ended, and is copied. Without one, ``agent-end`` events
decide, then the failures that workers reported. If all agents were started again and none had ended, the job
was killed as a whole, which no agent can record. Both the report and the live status use `GenerationTracker`.
The report records all events at once. The live status keeps the newest `MAX_GENERATIONS`; its totals include
those that it dropped. Events must come by time.

`build_history` gives a run's generations and its outcome. Any list of events gives a history. Logs may be
torn, of unknown kinds, or lost with their node. A value that cannot be known is None, never a guess. Pure.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from elastic_resume.events import MAX_COUNT_VALUE, Event, get_boot_time, get_count, get_seconds
from elastic_resume.policy import wording
from elastic_resume.policy.failure_classification import (
    FAILURE_KINDS,
    NODE_LOST,
    NOT_PROVED,
    PREEMPTED,
    Failure,
    classify_with_times,
)
from elastic_resume.policy.reasons import ViewEnd, from_json
from elastic_resume.rendezvous.core.interface import EventReason
from elastic_resume.report.event_log import (
    COMMIT_KINDS,
    GENERATION_EVENT_KINDS,
    EventTimeline,
    GenerationFinder,
    ParsedEvent,
    build_timeline,
    parse_event,
)
from elastic_resume.units import choose_verb

MAX_GENERATIONS = 64
MAX_FAILURE_EVENTS = 256
"""Events of failed workers kept for each generation while a job runs; its verdict names all of them."""
UNKNOWN, WHOLE_JOB = "unknown", "job"
STOPPED, JOINED, FINISHED, OPEN = "stopped", "joined", "finished", "open"
INCIDENT_KINDS = (*FAILURE_KINDS, WHOLE_JOB, UNKNOWN)
"""Kinds of ends that are failures."""
RECOVERY_BUCKETS_S = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the histogram of recoveries; a last bucket without a bound follows."""


@dataclass(frozen=True, slots=True)
class GenerationEnd:
    """Why a generation ended.

    ``kind`` is one of `INCIDENT_KINDS` for an incident. Else it is stopped (the whole job was stopped on
    request), joined (nodes joined), not-proved (the workers went back to a kept state), finished, or open (it
    runs, or was killed as a whole). ``node`` and ``rank`` name the root cause.
    """

    kind: str
    text: str
    node: str = ""
    rank: int | None = None
    other_failures: tuple[str, ...] = ()
    secondary_failures: tuple[str, ...] = ()
    message: str = ""
    """That of the root cause's exception."""

    @property
    def is_incident(self) -> bool:
        """Whether something other than the job itself ended the generation."""
        return self.kind in INCIDENT_KINDS

    @property
    def is_failure(self) -> bool:
        """Whether this end is an incident that nobody asked for."""
        return self.is_incident and self.kind != PREEMPTED


@dataclass(frozen=True)
class RejectedStateRecord:
    """A snapshot or checkpoint that existed and was not loaded; ``kind`` is that of the reason."""

    node: str
    generation: int | None
    step: int | None
    kind: str
    text: str


@dataclass(frozen=True)
class GenerationRow:
    """One lifetime of the worker group. Steps count over the whole job; times are Unix seconds.

    ``start_step`` was finished before it. It ran ``first_step`` to ``last_step``; both are None if it ran
    no step or that is unknown. ``detected_t`` is the first sign of its end. ``recomputed_steps`` and
    ``recovery_s`` are the cost of its end, known once workers have resumed again. ``resume_from`` is the
    request by which it went back and gave up ``given_up_steps``, which are not lost: they count nowhere else.
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
    resume_from: str = ""
    given_up_steps: int = 0

    @property
    def failure_recovery_s(self) -> float | None:
        """The recovery after a failure; None if nodes joined or somebody asked for the stop."""
        return self.recovery_s if self.end.is_failure else None


@dataclass(frozen=True, slots=True)
class Incident:
    """A failure that ended a generation, and its cost. Times are Unix seconds."""

    generation: int
    kind: str
    cause: str
    t: float | None
    recomputed_steps: int | None = None
    recovery_s: float | None = None
    """From the first sign to the first step of the next generation; None before that step."""
    node: str = ""
    rank: int | None = None


@dataclass(slots=True)
class IncidentTotals:
    """Sums over all incidents.

    ``recovery_buckets`` counts recoveries for each bound of `RECOVERY_BUCKETS_S`, then those that took
    longer.
    """

    incidents: Counter[str] = field(default_factory=Counter)
    recomputed_steps: int = 0
    recovery_buckets: list[int] = field(default_factory=lambda: [0] * (len(RECOVERY_BUCKETS_S) + 1))
    recovery_s: float = 0.0

    def add(self, incident: Incident) -> None:
        """Add one incident."""
        self.incidents[incident.kind] += 1
        self.recomputed_steps += incident.recomputed_steps or 0
        if incident.recovery_s is not None:
            bucket = sum(incident.recovery_s > bound for bound in RECOVERY_BUCKETS_S)
            self.recovery_buckets[bucket] += 1
            self.recovery_s += incident.recovery_s


@dataclass(slots=True)
class _GenerationRecord:
    """What the events say of one generation.

    ``node_ranks`` are the nodes that wrote events of it. ``restarted`` are nodes whose agent started anew
    in it, ``agent_ends`` those whose agent ended. ``resumed_t`` is when the first worker had its state.
    ``worker_kept_step`` is the `kept_step` of a node's workers, where the resume of rank 0's is unknown.
    """

    number: int
    first_t: float
    last_t: float
    node_ranks: dict[str, int] = field(default_factory=dict)
    num_nodes: int = 0
    resume: ParsedEvent | None = None
    worker_kept_step: int | None = None
    resumed_t: float | None = None
    world_size: int | None = None
    start_step: int | None = None
    first_recorded_step: int | None = None
    first_step_t: float | None = None
    last_step: int | None = None
    is_finished: bool = False
    failure_t: float | None = None
    stopped_t: float | None = None
    end_reason: ParsedEvent | None = None
    num_failure_events: int = 0
    worker_events: dict[str, list[Event]] = field(default_factory=dict)
    verdicts: dict[str, ParsedEvent] = field(default_factory=dict)
    restarted: set[str] = field(default_factory=set)
    agent_ends: dict[str, ParsedEvent] = field(default_factory=dict)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Its nodes by rank, as far as they are known."""
        listed = self.resume.get_texts("nodes") if self.resume else ()
        return listed or tuple(sorted(self.node_ranks, key=lambda node: (self.node_ranks[node], node)))

    @property
    def kept_step(self) -> int | None:
        """The step up to which nothing was lost; steps up to it may be computed again on purpose."""
        if self.resume is None and self.worker_kept_step is not None:
            return self.worker_kept_step
        target = self.resume.get_count("proves_step") if self.resume else None
        if self.start_step is not None and self.given_up_steps:  # the user has asked to go back
            return self.start_step + self.given_up_steps
        return self.start_step if target is None else target

    @property
    def given_up_steps(self) -> int:
        """The steps that it left behind, because the user asked to go back."""
        return (self.resume.get_count("given_up_steps") if self.resume else None) or 0

    @property
    def previous_last_step(self) -> int | None:
        """The last step of the previous generation, as the resume event gives it."""
        recomputed = self.resume.get_count("recomputed_steps") if self.resume else None
        if self.given_up_steps:  # the previous one may have gone back too, and been killed before a step
            return None
        return None if recomputed is None or self.kept_step is None else self.kept_step + recomputed

    def record(self, event: ParsedEvent, max_failure_events: int) -> None:
        """Record an event of this generation."""
        kind, t = event.kind, event.t
        if kind in GENERATION_EVENT_KINDS:
            self.node_ranks.setdefault(event.node, MAX_COUNT_VALUE)
            if event.step is not None:
                self.last_step = max(event.step, self.last_step or 0)
            if kind not in COMMIT_KINDS:  # the committer may outlive the generation
                self.last_t = max(t, self.last_t)
        if kind == "generation-start":
            rank = event.get_count("node_rank")
            self.node_ranks[event.node] = MAX_COUNT_VALUE if rank is None else rank
            self.num_nodes = max(self.num_nodes, event.get_count("num_nodes") or 0)
        elif kind in {"worker-start", "resume"}:
            self._record_resume(event)
        elif kind == "step":
            self.resumed_t = self.resumed_t or t
            self.first_step_t = min(t, self.first_step_t or t)
            self.first_recorded_step = min(event.step or 0, self.first_recorded_step or MAX_COUNT_VALUE)
        elif kind == "run-end":
            self.is_finished = True
        elif kind == "verdict":
            self.verdicts[event.node] = event
        elif kind == "agent-start":
            self.restarted.add(event.node)
        elif kind == "agent-end":
            self.agent_ends[event.node] = event
        elif kind == "rendezvous" and event.get_text("what") in {"view-ended", "leader-lost"}:
            self.failure_t = min(t, self.failure_t or t)
            if event.get_text("what") == "view-ended":
                self.end_reason = self.end_reason or event
        elif kind in {"failure", "worker-exit", "hang", "hang-ended"}:
            self._record_worker_end(event, max_failure_events)

    def _record_resume(self, event: ParsedEvent) -> None:
        if event.kind == "resume":
            self.resume = event
        else:
            self.worker_kept_step = event.get_count("kept_step")
        if self.start_step is None or (event.kind == "resume" and event.step is not None):
            self.start_step = event.step
        self.resumed_t = min(event.t, self.resumed_t or event.t)
        self.world_size = self.world_size or event.get_count("world_size")

    def _record_worker_end(self, event: ParsedEvent, max_failure_events: int) -> None:
        if event.kind == "worker-exit":
            if event.raw.get("stopped"):
                self.stopped_t = min(event.t, self.stopped_t or event.t)
            elif event.raw.get("exit_code") or event.raw.get("signal"):
                self.failure_t = min(event.t, self.failure_t or event.t)
            elif not event.raw.get("stuck"):
                return
        elif event.kind == "hang":
            self.failure_t = min(event.t, self.failure_t or event.t)
        if self.num_failure_events < max_failure_events:
            self.num_failure_events += 1
            kept = {**event.raw, "t": event.t, "traceback": None}
            self.worker_events.setdefault(event.node, []).append(kept)


class GenerationTracker:
    """Tracks the generations of one job from its events, with bounded memory if limits are given."""

    def __init__(
        self, max_generations: int = MAX_COUNT_VALUE, max_failure_events: int = MAX_COUNT_VALUE
    ) -> None:
        """Keep ``max_generations`` generations, and ``max_failure_events`` events of failures for each."""
        self._max_generations = max_generations
        self._max_failure_events = max_failure_events
        self._records: dict[int, _GenerationRecord] = {}
        self._evicted_totals = IncidentTotals()
        self._newest_evicted = 0
        self._finder = GenerationFinder()
        self._boot_times: dict[str, float] = {}  # Unix time of each boot, by its first event

    def record_event(self, event: Event) -> None:
        """Record one event of the log; ignore an event whose kind or form is unknown."""
        t, since = get_seconds(event), get_boot_time(event)
        if t is not None and since is not None:  # a wall clock may jump
            self._boot_times.setdefault(since[0], t - since[1])
        parsed = parse_event(event, self._boot_times)
        if parsed is not None:
            self.record(self._finder.complete(parsed))

    def record(self, event: ParsedEvent) -> None:
        """Record one event whose generation was found."""
        number = event.generation
        if not number or number <= self._newest_evicted:
            return
        if number not in self._records:
            if event.kind not in GENERATION_EVENT_KINDS - COMMIT_KINDS:
                return
            self._records[number] = _GenerationRecord(number, event.t, event.t)
            if len(self._records) > self._max_generations:
                self._evict_oldest()
        if number in self._records:
            self._records[number].record(event, self._max_failure_events)

    def generations(self) -> list[GenerationRow]:
        """Return the generations that are kept, in order."""
        records = [self._records[number] for number in sorted(self._records)]
        found = []
        resumed: _GenerationRecord | None = None  # the next one whose workers got their state
        for index, record in reversed(list(enumerate(records))):
            found.append(_build_generation(record, resumed, is_last=index == len(records) - 1))
            resumed = record if record.resumed_t is not None else resumed
        return found[::-1]

    def incidents(self) -> list[Incident]:
        """Return the failures after which another generation followed, in order."""
        return [
            Incident(
                generation.number,
                generation.end.kind,
                generation.end.text,
                generation.detected_t,
                generation.recomputed_steps,
                generation.failure_recovery_s,
                generation.end.node,
                generation.end.rank,
            )
            for generation in islice(self.generations(), max(0, len(self._records) - 1))
            if generation.end.is_incident
        ]

    def totals(self) -> IncidentTotals:
        """Return the sums over all incidents, including those of dropped generations."""
        totals = copy.deepcopy(self._evicted_totals)
        for incident in self.incidents():
            totals.add(incident)
        return totals

    def _evict_oldest(self) -> None:
        """Add the oldest generation to the totals and drop it. Later events of it are ignored."""
        oldest = min(self._records)
        for incident in self.incidents():
            if incident.generation == oldest:
                self._evicted_totals.add(incident)
        del self._records[oldest]
        self._newest_evicted = oldest


def _build_generation(
    record: _GenerationRecord, resumed: _GenerationRecord | None, *, is_last: bool
) -> GenerationRow:
    """Build a generation; ``resumed`` is the next one whose workers got their state."""
    resume, start, last = record.resume, record.start_step, record.last_step
    recomputed, recovery_s = None, None
    end = _find_end(record, is_last=is_last)
    detected_t = record.failure_t if record.failure_t is not None else record.stopped_t
    if resumed is not None and record.resumed_t is not None:
        if resumed.previous_last_step is not None:  # None if it took the state of an older generation
            last = max(resumed.previous_last_step, last or 0)
            recomputed = resumed.previous_last_step - (resumed.kept_step or 0)
        if resumed.kept_step is not None and last is not None:
            recomputed = max(recomputed or 0, last - resumed.kept_step)
        if end.kind != FINISHED and resumed.first_step_t is not None:
            first_sign_t = record.last_t if detected_t is None else detected_t
            recovery_s = round(max(0.0, resumed.first_step_t - first_sign_t), 3)
    if start is None and record.first_recorded_step:  # each worker records its first step
        start = record.first_recorded_step - 1
    has_run = start is not None and last is not None and last > start
    return GenerationRow(
        number=record.number,
        nodes=record.nodes,
        world_size=record.world_size,
        start_t=record.first_t if record.resumed_t is None else record.resumed_t,
        resume_kind=resume.get_text("kind") if resume else "",
        start_step=start,
        first_step=start + 1 if has_run and start is not None else None,
        last_step=last,
        source_node=resume.get_text("source_node") if resume else "",
        source_generation=resume.get_count("source_generation") if resume else None,
        receiving_nodes=resume.get_texts("receiving_nodes") if resume else (),
        rejected=_parse_rejected(resume),
        end=end,
        detected_t=detected_t,
        recomputed_steps=recomputed,
        recovery_s=recovery_s,
        resume_from=resume.get_text("resume_from") if resume else "",
        given_up_steps=record.given_up_steps,
    )


def _parse_rejected(resume: ParsedEvent | None) -> tuple[RejectedStateRecord, ...]:
    return tuple(
        RejectedStateRecord(
            str(item.get("node") or ""),
            get_count(item, "generation"),
            get_count(item, "step"),
            fact_kind(item.get("reason")),
            str(item["reason"].get("detail") or "") if fact_kind(item.get("reason")) else "",
        )
        for item in (resume.get_facts("rejected") if resume else [])
    )


# ---- why it ended --------------------------------------------------------------------------------------


def _find_end(record: _GenerationRecord, *, is_last: bool) -> GenerationEnd:
    verdict = _choose_verdict(record)
    if verdict is not None:
        causes = _parse_failures(verdict, "root_causes")
        secondary = _parse_failures(verdict, "secondary_failures")
        joined = verdict.get_texts("joined")
        has_grown = bool(joined) or _reason_kind(verdict, record.end_reason) == ViewEnd.NEWCOMERS.value
        if has_grown and all(failure.is_secondary for failure in causes):
            # Agents stop their workers one after another, so a join leaves secondary failures only.
            text = f"{_name_nodes(joined)} joined" if joined else "nodes joined and left again"
            return GenerationEnd(JOINED, text, secondary_failures=_describe_all([*causes, *secondary]))
        expired = _list_expired_leases(record)
        if expired and all(failure.is_secondary for failure in causes):
            # Such a node reports no failure; what its peers report are the connections that it broke.
            nodes = [node for node, _ in expired]
            text = f"on {_name_nodes(nodes)} {describe_reason(expired[0][1])}"
            return GenerationEnd(
                UNKNOWN, text, nodes[0], secondary_failures=_describe_all([*causes, *secondary])
            )
        if causes:
            return _failure_end(causes, secondary)
    if record.is_finished or any(_outcome(end) == "done" for end in record.agent_ends.values()):
        return GenerationEnd(FINISHED, "finished")
    if verdict is not None and verdict.get_count("next_generation"):
        reason = verdict.raw.get("reason") or (record.end_reason and record.end_reason.raw.get("reason"))
        return _end_for_reason(UNKNOWN, reason)
    return _end_without_verdict(record, is_last=is_last)


def describe_verdict(event: ParsedEvent) -> GenerationEnd:
    """Say why a generation ended, as far as one verdict tells."""
    record = _GenerationRecord(event.generation or 0, event.t, event.t)
    record.record(event, 0)
    return _find_end(record, is_last=False)


def _choose_verdict(record: _GenerationRecord) -> ParsedEvent | None:
    """Return the verdict that led on, or that of agents that gave up; the one with most root causes."""
    verdicts, ends = record.verdicts.values(), record.agent_ends
    decisive = [verdict for verdict in verdicts if verdict.get_count("next_generation")]
    decisive = decisive or [
        verdict for verdict in verdicts if verdict.node in ends and _outcome(ends[verdict.node]) == "failed"
    ]
    return max(decisive, key=lambda verdict: len(verdict.get_facts("root_causes")), default=None)


def _list_expired_leases(record: _GenerationRecord) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the nodes whose workers ended with their lease, and the reason that each recorded."""
    reasons = [(node, verdict.raw.get("reason")) for node, verdict in sorted(record.verdicts.items())]
    return [
        (node, reason)
        for node, reason in reasons
        if isinstance(reason, Mapping) and fact_kind(reason.get("end")) == ViewEnd.LEASE_EXPIRED.value
    ]


def _outcome(agent_end: ParsedEvent) -> str:
    return agent_end.get_text("outcome")


def _reason_kind(*events: ParsedEvent | None) -> str:
    """Return the kind of the first reason that the events have."""
    return next((kind for event in events if event and (kind := fact_kind(event.raw.get("reason")))), "")


def _end_without_verdict(record: _GenerationRecord, *, is_last: bool) -> GenerationEnd:
    """Return the end that agents recorded of themselves, else what workers reported, else the whole job's."""
    ends, members = record.agent_ends, set(record.nodes)
    failed = [end for end in ends.values() if _outcome(end) == "failed"]
    if failed:
        text = failed[0].get_text("message").rstrip(".") or "the agents gave up without a reason"
        return GenerationEnd(UNKNOWN, text)
    restarted = record.restarted & members
    is_known = len(members) >= record.num_nodes or members <= ends.keys()
    if members and is_known and members <= restarted | ends.keys():
        texts = [text for end in ends.values() if (text := end.get_text("message").rstrip("."))]
        return GenerationEnd(STOPPED, min(texts, default="stopped")) if ends else WHOLE_JOB_END
    found = [
        pair for node, events in record.worker_events.items() for pair in classify_with_times(events, node)
    ]
    found.sort(key=lambda pair: (not pair[1].is_deterministic, pair[1].is_secondary, pair[0]))
    causes = [failure for _, failure in found if not failure.is_secondary]
    if causes or (found and is_last):
        causes = causes or [found[0][1]]
        return _failure_end(causes, [failure for _, failure in found if failure not in causes])
    if restarted and not is_last:
        return GenerationEnd(
            NODE_LOST,
            f"{_name_nodes(sorted(restarted))} {choose_verb(len(restarted), 'was', 'were')} lost",
            min(restarted),
        )
    if record.end_reason is not None and _reason_kind(record.end_reason) != ViewEnd.NEWCOMERS.value:
        reason = record.end_reason.raw.get("reason")
        kind = NODE_LOST if fact_kind(reason) == NODE_LOST else UNKNOWN
        return _end_for_reason(kind, reason)
    if is_last:
        return GenerationEnd(OPEN, "still running, or killed as a whole")
    return GenerationEnd(UNKNOWN, "ended for an unknown reason")


def _end_for_reason(kind: str, reason: Any) -> GenerationEnd:
    text = describe_reason(reason) or "ended for an unknown reason"
    return GenerationEnd(kind, text, str(reason.get("node") or "") if isinstance(reason, dict) else "")


WHOLE_JOB_END = GenerationEnd(WHOLE_JOB, "whole job killed")


def _failure_end(causes: Sequence[Failure], secondary: Sequence[Failure]) -> GenerationEnd:
    root = causes[0]
    others = [
        replace(each, message="the same") if root.message and root.message == each.message else each
        for each in causes[1:]
    ]
    return GenerationEnd(
        root.kind,
        wording.describe_failure(root, with_node=True),
        root.node,
        root.rank,
        _describe_all(others),
        _describe_all(secondary),
        root.message,
    )


def _describe_all(failures: Iterable[Failure]) -> tuple[str, ...]:
    return tuple(wording.describe_failure(failure, with_node=True) for failure in failures)


def _name_nodes(names: Sequence[str]) -> str:
    return f"{'nodes' if len(names) > 1 else 'node'} {wording.format_node_names(names)}"


def _parse_failures(verdict: ParsedEvent, name: str) -> list[Failure]:
    """Parse the failures in the list of a verdict event."""
    failures = []
    for entry in verdict.get_facts(name):
        with contextlib.suppress(ValueError):
            failures.append(from_json(Failure, entry))
    return [failure for failure in failures if failure.kind in {*FAILURE_KINDS, NOT_PROVED}]


def fact_kind(fact: Any) -> str:
    """Return the kind of a recorded fact; empty without one."""
    kind = fact.get("kind") if isinstance(fact, Mapping) else None
    return kind if isinstance(kind, str) else ""


def describe_reason(fact: Any) -> str:
    """Describe a recorded reason of the rendezvous; empty without one."""
    try:
        return wording.describe(from_json(EventReason, fact))
    except ValueError:
        return fact_kind(fact)


# ---- the whole run -------------------------------------------------------------------------------------

# The agents' outcomes, from the one that decides on.
_OUTCOMES = {"failed": "failed", "signalled": "stopped", "left": "stopped", "done": "finished"}


@dataclass(frozen=True)
class JobWait:
    """Nodes that wait for others and run no workers, since ``since_t``; ``missing_nodes`` as far as known."""

    since_t: float
    missing_nodes: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class RunHistory:
    """All generations of a run, and sums over them.

    ``wait`` is None unless the remaining nodes wait for others now.
    """

    generations: tuple[GenerationRow, ...]
    num_incidents: int
    num_failures: int  # the incidents but those of nodes that were asked to leave
    recomputed_steps: int
    last_step: int | None
    outcome: str  # finished, failed, stopped, open, or empty
    message: str
    wait: JobWait | None = None


def build_history_from_events(events: Iterable[Event]) -> RunHistory:
    """Build the history of one run from its events, in any order."""
    return build_history(build_timeline(events))


def build_history(timeline: EventTimeline) -> RunHistory:
    """Build the history of one run from its timeline."""
    tracker = GenerationTracker()
    for event in timeline.events:
        tracker.record(event)
    rows = tuple(tracker.generations())
    outcome, message = _determine_outcome(timeline, rows)
    wait = _find_wait(timeline, rows)
    if outcome == "stopped" and wait is not None:  # some nodes were drained, and the others wait
        outcome, message = "open", ""
    lasts = [row.last_step for row in rows if row.last_step is not None]
    return RunHistory(
        generations=rows,
        num_incidents=sum(row.end.is_incident for row in rows),
        num_failures=sum(row.end.is_failure for row in rows),
        recomputed_steps=sum(row.recomputed_steps or 0 for row in rows),
        last_step=lasts[-1] if lasts else None,
        outcome=outcome,
        message=message,
        wait=wait if outcome == "open" else None,
    )


def _determine_outcome(timeline: EventTimeline, rows: Sequence[GenerationRow]) -> tuple[str, str]:
    """Return the outcome of the run and its agents' message."""
    if rows and rows[-1].end.kind == FINISHED:
        return "finished", ""
    agent_events = timeline.select("agent-start", "generation-start", "agent-end")
    if not agent_events:
        is_failed = bool(rows) and rows[-1].end.is_incident  # without agents nothing starts the workers again
        return ("failed", rows[-1].end.text) if is_failed else ("open" if rows else "", "")
    if agent_events[-1].kind != "agent-end":
        return "open", ""
    latest = max((event.t for event in agent_events if event.kind != "agent-end"), default=agent_events[0].t)
    ends = [event for event in agent_events if event.kind == "agent-end" and event.t >= latest]
    if rows and rows[-1].nodes:  # a drained node may end after the others have begun without it
        ends = [event for event in ends if event.node in rows[-1].nodes]
    for name, outcome in _OUTCOMES.items():
        for event in ends:
            if event.get_text("outcome") == name:
                return outcome, event.get_text("message")
    return "open", ""


def _find_wait(timeline: EventTimeline, rows: Sequence[GenerationRow]) -> JobWait | None:
    """Return what the agents wait for after the last generation; None if one runs or all agents ended.

    A node that was not in the last generation may be partitioned from others that train.
    """
    members = rows[-1].nodes if rows else tuple(timeline.by_node)
    last_run = max((event.t for event in timeline.select("generation-start", "step")), default=0.0)
    newest_agents = {event.node: event for event in timeline.select("agent-start", "agent-end")}
    ended = {node for node, event in newest_agents.items() if event.kind == "agent-end"}
    waits = [
        event
        for event in timeline.select("rendezvous")
        if event.get_text("what") == "waiting" and event.t > last_run
        if event.node in members and event.node not in ended
    ]
    if not waits:
        return None
    reason = waits[-1].raw.get("reason")
    missing = reason.get("missing_nodes") if isinstance(reason, dict) else None
    nodes = tuple(node for node in missing if isinstance(node, str)) if isinstance(missing, list) else ()
    return JobWait(waits[0].t, nodes, describe_reason(reason) or waits[-1].get_text("message"))
