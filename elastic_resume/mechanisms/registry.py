"""List the mechanisms. Without its line here, and its package, a mechanism is gone."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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

logger = logging.getLogger(__name__)

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
_OWN_SWITCHES = {mechanism.make_observer: mechanism.worker_switch for mechanism in MECHANISMS}
_SWITCHES = [option for option in MECHANISM_OPTIONS if option.field in _OWN_SWITCHES.values()]


def export_switches(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables from which workers read the switches of their observers."""
    return {option.variable: str(bool(settings[option.field])).lower() for option in _SWITCHES}


def read_switches(environ: Mapping[str, str]) -> list[str]:
    """Return the fields of the switches that are on in a worker's environment."""
    values = {option: environ.get(option.variable) or option.default for option in _SWITCHES}
    return [option.field for option, value in values.items() if option.parse(option.variable, value)]


def make_step_observers(
    context: WorkerContext, record: Callable[[int, int], None], switches: Sequence[Sequence[str]]
) -> list[StepObserver]:
    """Return the observers of one generation.

    ``record`` takes a measurement's index and its number. ``switches`` has those that are on, by rank: an
    observer may use collectives, so all ranks have it or none.
    """
    found = []
    for index, make in enumerate(_OBSERVER_MAKERS):
        switch = _OWN_SWITCHES[make]
        is_on = [switch in of_rank for of_rank in switches]
        if switch and not all(is_on):
            if any(is_on) and context.rank == 0:
                text = "--%s is ignored: rank %d has it and rank %d does not. Give all nodes the same flags."
                logger.warning(text, switch.replace("_", "-"), is_on.index(True), is_on.index(False))
            continue
        found.append(make(context._replace(record=functools.partial(record, index))))
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
