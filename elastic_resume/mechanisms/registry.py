"""List the mechanisms. Without its line here, and its package, a mechanism is gone."""

from __future__ import annotations

import functools
from collections.abc import Callable

from elastic_resume.mechanisms.archive import ARCHIVE
from elastic_resume.mechanisms.compile_cache import COMPILE_CACHE
from elastic_resume.mechanisms.compute_check import COMPUTE_CHECK
from elastic_resume.mechanisms.gpu_health import GPU_HEALTH
from elastic_resume.mechanisms.hangs import HANGS
from elastic_resume.mechanisms.mechanism import (
    AgentContext,
    AgentPart,
    Mechanism,
    StatusMember,
    StepObserver,
    WorkerContext,
)
from elastic_resume.mechanisms.on_event import ON_EVENT
from elastic_resume.mechanisms.preemption import PREEMPTION
from elastic_resume.mechanisms.replicas import REPLICAS
from elastic_resume.mechanisms.slow_ranks import SLOW_RANKS
from elastic_resume.mechanisms.standbys import STANDBYS
from elastic_resume.mechanisms.unreachable_peers import UNREACHABLE_PEERS

MECHANISMS: tuple[Mechanism, ...] = (
    ARCHIVE,
    COMPILE_CACHE,
    COMPUTE_CHECK,
    GPU_HEALTH,
    HANGS,
    ON_EVENT,
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
STATUS_MEMBERS = tuple(mechanism.status for mechanism in MECHANISMS if mechanism.status)
_OBSERVER_MAKERS = tuple(mechanism.make_observer for mechanism in MECHANISMS if mechanism.make_observer)


def make_step_observers(context: WorkerContext, record: Callable[[int, int], None]) -> list[StepObserver]:
    """Return the observers of one generation; ``record`` takes a measurement's index and its number."""
    found = (
        make(context._replace(record=functools.partial(record, index)))
        for index, make in enumerate(_OBSERVER_MAKERS)
    )
    return [observer for observer in found if observer is not None]


def make_agent_parts(context: AgentContext) -> dict[AgentPart, StatusMember | None]:
    """Return the parts of an agent, each with the member of its status that it makes."""
    parts = {}
    for mechanism in MECHANISMS:
        needed = mechanism.needs_setting
        if mechanism.make_agent_part and (not needed or context.settings.get(needed)):
            observer = mechanism.make_observer
            index = _OBSERVER_MAKERS.index(observer) if observer else -1
            parts[mechanism.make_agent_part(context._replace(measurement_index=index))] = mechanism.status
    return parts
