"""Describe in reports what became of logged values."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_resume.events import Event
from elastic_resume.mechanisms.mechanism import AlertKind, StatusMember


@dataclass(frozen=True, slots=True)
class CurvesStatus:
    """The trackers that this node, which has rank 0, cannot write now."""

    failing: tuple[tuple[str, str], ...]
    """Each tracker, and why."""


def describe_status(status: CurvesStatus) -> str:
    """Name each tracker that is not written."""
    return "; ".join(describe_failure(tracker, reason) for tracker, reason in status.failing)


def describe_failure(tracker: object, reason: object) -> str:
    """Say that a tracker is not written."""
    return f"{tracker} cannot be written: {reason}"


def _describe_lost(event: Event) -> str:
    if (error := event.get("error")) is not None:
        return f"values of run.log() were not recorded until the next restart: {error}"
    return describe_gap(event.get("first"), event.get("last"))


def describe_gap(first: object, last: object) -> str:
    """Say which steps have no values."""
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    return (
        f"no living node has the values of {steps}: they were not recorded, or the nodes that had them are "
        "gone. Trackers that had not got them lack them"
    )


def _describe_failed(event: Event) -> str:
    return describe_failure(event.get("tracker"), event.get("error"))


STATUS = StatusMember("curves", CurvesStatus, describe_status)
ALERTS = (
    AlertKind("curves-lost", _describe_lost, is_bad=True),
    AlertKind("curves-failed", _describe_failed, is_bad=True, ended_by="curves-recovered"),
    AlertKind("curves-recovered", lambda event: f"{event.get('tracker')} is written again"),
)
