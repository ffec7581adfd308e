"""Build the history of a run from events: its generations, its outcome, and its snapshots and checkpoints.

Any list of events gives a history. Logs may be torn, of unknown kinds, or lost with their node. A value that
cannot be known is None, never a guess. `report.generations` says why each generation ended.

`build_saved_state_records` follows every snapshot and checkpoint by node, step and tier. A snapshot is
known only if a generation started from it. A checkpoint is known from its commit until it was pruned,
quarantined or lost with its disk. Entries found on disk override the events. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import PurePath

from elastic_resume.checkpoint.reader import parse_checkpoint_name
from elastic_resume.events import Event
from elastic_resume.report import event_log
from elastic_resume.report.checkpoints import QUARANTINED, CheckpointEntry
from elastic_resume.report.event_log import EventTimeline, ParsedEvent
from elastic_resume.report.generations import FINISHED, Generation, GenerationTracker, describe_reason

MEMORY, DISK = "memory", "disk"
COMMITTED, PRUNED, LOST, USED = "committed", "pruned", "lost", "used"
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

    ``discarded_steps`` are the steps run, less those between the run's first and its last step. ``wait`` is
    None unless the remaining nodes wait for others now.
    """

    generations: tuple[Generation, ...]
    num_incidents: int
    recomputed_steps: int
    discarded_steps: int
    last_step: int | None
    outcome: str  # finished, failed, stopped, open, or empty
    message: str
    wait: JobWait | None = None


def build_history_from_events(events: Iterable[Event]) -> RunHistory:
    """Build the history of one run from its events, in any order."""
    return build_history(event_log.build_timeline(events))


def build_history(timeline: EventTimeline) -> RunHistory:
    """Build the history of one run from its timeline."""
    tracker = GenerationTracker()
    for event in timeline.events:
        tracker.record(event)
    rows = tuple(tracker.generations())
    outcome, message = _determine_outcome(timeline, rows)
    starts = [row.start_step for row in rows if row.start_step is not None]
    lasts = [row.last_step for row in rows if row.last_step is not None]
    net_steps = max(0, lasts[-1] - starts[0]) if starts and lasts else 0
    return RunHistory(
        generations=rows,
        num_incidents=sum(row.end.is_failure for row in rows),
        recomputed_steps=sum(row.recomputed_steps or 0 for row in rows),
        discarded_steps=max(0, sum(row.num_steps_run for row in rows) - net_steps),
        last_step=lasts[-1] if lasts else None,
        outcome=outcome,
        message=message,
        wait=_find_wait(timeline, rows) if outcome == "open" else None,
    )


def _determine_outcome(timeline: EventTimeline, rows: Sequence[Generation]) -> tuple[str, str]:
    """Return the outcome of the run and its agents' message."""
    if rows and rows[-1].end.kind == FINISHED:
        return "finished", ""
    agent_events = timeline.select("agent-start", "generation-start", "agent-end")
    if not agent_events:
        is_failed = bool(rows) and rows[-1].end.is_failure  # without agents nothing starts the workers again
        return ("failed", rows[-1].end.text) if is_failed else ("open" if rows else "", "")
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
    _apply_disk_entries(records, entries)
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


def _apply_disk_entries(records: _Records, entries: Iterable[CheckpointEntry]) -> None:
    seen = set()
    inspected_nodes = set()
    for entry in entries:
        inspected_nodes.add(entry.node)
        if entry.generation is None or entry.step is None:
            continue
        key = (entry.node, entry.generation, entry.step, DISK)
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
