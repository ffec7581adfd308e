"""Describe in reports what became of logged values."""

from __future__ import annotations

from elastic_resume.events import Event
from elastic_resume.mechanisms.mechanism import AlertKind


def _describe_lost(event: Event) -> str:
    if (error := event.get("error")) is not None:
        return f"values of run.log() were not recorded until the next restart: {error}"
    return describe_gap(event.get("first"), event.get("last"))


def describe_gap(first: object, last: object) -> str:
    """Say which steps have no values."""
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    return f"the trackers lack values of {steps}: the nodes that had them are gone"


def _describe_failed(event: Event) -> str:
    return f"{event.get('tracker')} cannot be written: {event.get('error')}"


ALERTS = (
    AlertKind("curves-lost", _describe_lost, is_bad=True),
    AlertKind("curves-failed", _describe_failed, is_bad=True, ended_by="curves-recovered"),
    AlertKind("curves-recovered", lambda event: f"{event.get('tracker')} is written again"),
)
