"""List the mechanisms. Without its line here, and its package, a mechanism is gone."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from elastic_resume.mechanisms.archive import ARCHIVE
from elastic_resume.mechanisms.collapsed_output import COLLAPSED_OUTPUT
from elastic_resume.mechanisms.compile_cache import COMPILE_CACHE
from elastic_resume.mechanisms.compute_check import COMPUTE_CHECK
from elastic_resume.mechanisms.curves import CURVES
from elastic_resume.mechanisms.gpu_health import GPU_HEALTH
from elastic_resume.mechanisms.hangs import HANGS
from elastic_resume.mechanisms.mechanism import (
    AgentContext,
    AgentPart,
    LazyCall,
    Mechanism,
    StatusMember,
    StepObserver,
    WorkerContext,
)
from elastic_resume.mechanisms.on_event import ON_EVENT
from elastic_resume.mechanisms.planned_ends import PLANNED_ENDS
from elastic_resume.mechanisms.preemption import PREEMPTION
from elastic_resume.mechanisms.replicas import REPLICAS
from elastic_resume.mechanisms.slow_ranks import SLOW_RANKS
from elastic_resume.mechanisms.standbys import STANDBYS
from elastic_resume.mechanisms.unreachable_peers import UNREACHABLE_PEERS
from elastic_resume.policy.resume_plan import Inventory

MECHANISMS: tuple[Mechanism, ...] = (
    ARCHIVE,
    COLLAPSED_OUTPUT,
    COMPILE_CACHE,
    COMPUTE_CHECK,
    CURVES,
    GPU_HEALTH,
    HANGS,
    ON_EVENT,
    PLANNED_ENDS,
    PREEMPTION,
    REPLICAS,
    SLOW_RANKS,
    STANDBYS,
    UNREACHABLE_PEERS,
)
TOPICS = tuple(mechanism.topic for mechanism in MECHANISMS if mechanism.topic)
ALERTS = tuple(alert for mechanism in MECHANISMS for alert in mechanism.alerts)
READERS = tuple(mechanism.is_reading_due for mechanism in MECHANISMS if mechanism.is_reading_due)
MECHANISM_OPTIONS = tuple(option for mechanism in MECHANISMS for option in mechanism.options)
REPORT_LINES = tuple(mechanism.report_line for mechanism in MECHANISMS if mechanism.report_line)
CHART_LOADERS = tuple(mechanism.load_charts for mechanism in MECHANISMS if mechanism.load_charts)
STATUS_MEMBERS = tuple(mechanism.status for mechanism in MECHANISMS if mechanism.status)
OPEN_EVIDENCE = next((mechanism.open_evidence for mechanism in MECHANISMS if mechanism.open_evidence), None)
WORKER_MODULES = tuple(
    dict.fromkeys(
        part.module
        for mechanism in MECHANISMS
        for part in (mechanism.make_observer, mechanism.make_note, mechanism.open_evidence)
        if isinstance(part, LazyCall)
    )
)
"""Modules that every worker imports in `er.resume`; the fork server imports them before it forks one."""
_OBSERVERS = tuple(mechanism for mechanism in MECHANISMS if mechanism.make_observer)
_MEASURING = tuple(mechanism for mechanism in MECHANISMS if mechanism.is_measuring)
_NOTES = tuple(mechanism for mechanism in MECHANISMS if mechanism.make_note)


def make_notes(node_dir: Path) -> tuple[str, ...]:
    """Return the note of each mechanism that makes notes, as JSON; none if all are empty."""
    notes = tuple(json.dumps(mechanism.make_note(node_dir)) for mechanism in _NOTES if mechanism.make_note)
    return notes if any(note != "null" for note in notes) else ()


def pass_over_states(inventories: Sequence[Inventory]) -> list[Inventory]:
    """Leave out the saved states that mechanisms pass over."""
    left = list(inventories)
    for at, mechanism in enumerate(_NOTES):
        notes = [note for _, note in _parse_notes([(i.node, i.notes) for i in inventories], at)]
        if mechanism.pass_over and any(note is not None for note in notes):
            left = mechanism.pass_over(left, notes)
    return left


def _parse_notes(notes: Sequence[tuple[str, tuple[str, ...]]], at: int) -> list[tuple[str, Any]]:
    return [(node, json.loads(texts[at]) if at < len(texts) else None) for node, texts in notes]


def make_step_observers(
    context: WorkerContext,
    record: Callable[[int, int], None],
    notes: Sequence[tuple[str, tuple[str, ...]]],
) -> list[StepObserver]:
    """Return the observers of one generation; ``record`` takes a measurement's index and its number.

    ``notes`` has each node's notes (`make_notes`), in the order of ranks.
    """
    found = []
    for mechanism in _OBSERVERS:
        at = _NOTES.index(mechanism) if mechanism in _NOTES else len(_NOTES)
        own = context._replace(notes=tuple(_parse_notes(notes, at)))
        if mechanism in _MEASURING:
            own = own._replace(record=functools.partial(record, _MEASURING.index(mechanism)))
        if mechanism.make_observer is not None:
            found.append(mechanism.make_observer(own))
    return [observer for observer in found if observer is not None]


def make_agent_parts(context: AgentContext) -> dict[AgentPart, StatusMember | None]:
    """Return the parts of an agent, each with the member of its status that it makes."""
    parts = {}
    for mechanism in MECHANISMS:
        needed = mechanism.needs_setting
        if mechanism.make_agent_part and (not needed or context.settings.get(needed)):
            index = _MEASURING.index(mechanism) if mechanism in _MEASURING else -1
            parts[mechanism.make_agent_part(context._replace(measurement_index=index))] = mechanism.status
    return parts
