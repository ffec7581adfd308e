"""Build the history of a run from events: its generations and its outcome.

Any list of events gives a history. Logs may be torn, of unknown kinds, or lost with their node. A value that
cannot be known is None, never a guess. `report.generations` says why each generation ended. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic_resume.events import Event
from elastic_resume.report import event_log
from elastic_resume.report.event_log import EventTimeline
from elastic_resume.report.generations import FINISHED, Generation, GenerationTracker, describe_reason

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

    generations: tuple[Generation, ...]
    num_incidents: int
    recomputed_steps: int
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
    lasts = [row.last_step for row in rows if row.last_step is not None]
    return RunHistory(
        generations=rows,
        num_incidents=sum(row.end.is_failure for row in rows),
        recomputed_steps=sum(row.recomputed_steps or 0 for row in rows),
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
