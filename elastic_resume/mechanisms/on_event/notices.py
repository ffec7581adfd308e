"""Make notices, the JSON objects for the user's command, from a node's events. Pure.

An event of the whole job becomes a notice on one node: on that of rank 0, which alone writes `resume`, or
where the event says that its node speaks for the job (`policy.reporting_node`). All else concerns its node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from elastic_resume.checkpoint.node_dir import mask_secrets
from elastic_resume.events import Event, get_count
from elastic_resume.mechanisms.mechanism import EventSummary
from elastic_resume.mechanisms.registry import ALERTS
from elastic_resume.units import format_count

NOTICE_VERSION = 1
"""It grows when a member is removed or changes its meaning."""
MAX_TOLD_ALERTS = 1000
_END_KINDS = {"done": "end", "failed": "give-up", "signalled": "stop", "left": "exclusion"}
_ALERT_KINDS = {alert.kind: alert for alert in ALERTS}
_JOB_ALERT_KINDS = {alert.kind for alert in ALERTS if alert.is_of_job}
# What a notice has as a member, or only this project reads.
_COMMON_FIELDS = {"t", "event", "node", "pid", "b", "boot", "generation", "message", "speaks_for_job"}


class NoticeMaker:
    """Makes the notices of one node; it gets all events of its agent and workers by time."""

    def __init__(self, summarize: Callable[[Event], EventSummary | None]) -> None:
        """``summarize`` returns what the report says about an event."""
        self._summarize = summarize
        self._run_id = ""
        self._generation: int | None = None
        self._begins_job = False  # its first generation
        self._restarts = 0
        self._told: set[tuple[object, ...]] = set()  # this generation's alerts

    def make(self, event: Event) -> dict[str, Any] | None:
        """Return the notice that an event is worth, or None."""
        kind = event["event"]
        self._generation = get_count(event, "generation") or self._generation
        match kind:
            case "agent-start":
                self._run_id = str(event.get("run_id") or "")
            case "generation-start":
                self._begins_job = event.get("begins_job") is True
                self._told.clear()
            case "resume":
                text = _describe_resume(event, is_recovery=not self._begins_job)
                kind = "start" if self._begins_job else "recovery"
                return self._notice(kind, EventSummary(is_bad=False, text=text), event)
            case "verdict":
                return self._make_failure(event)
            case "agent-end" if event.get("speaks_for_job"):
                outcome = str(event.get("outcome"))
                summary = EventSummary(outcome in {"failed", "left"}, str(event.get("message") or ""))
                return self._notice(_END_KINDS.get(outcome, "end"), summary, event)
            case _:
                return self._make_alert(event)
        return None

    def _make_failure(self, event: Event) -> dict[str, Any] | None:
        summary = self._summarize(event)
        if get_count(event, "next_generation") is None:
            return None  # `agent-end` follows
        self._restarts += 1
        if not event.get("speaks_for_job") or summary is None or not summary.is_bad:
            return None  # nodes that join are no failure
        return self._notice("failure", summary, event)

    def _make_alert(self, event: Event) -> dict[str, Any] | None:
        """Make one alert of each problem in a generation."""
        kind = event["event"]
        summary = None if kind in _JOB_ALERT_KINDS else self._summarize(event)
        if summary is None or not (summary.is_bad or kind in _ALERT_KINDS):
            return None
        same_by = _ALERT_KINDS[kind].same_by if kind in _ALERT_KINDS else ()
        problem = (kind, *(str(event.get(name)) for name in same_by)) if same_by else (kind, summary)
        if problem in self._told or len(self._told) >= MAX_TOLD_ALERTS:
            return None
        self._told.add(problem)
        return self._notice("alert", summary, event)

    def _notice(self, kind: str, summary: EventSummary, event: Event) -> dict[str, Any]:
        facts = {name: value for name, value in event.items() if name not in _COMMON_FIELDS}
        notice = {
            "version": NOTICE_VERSION,
            "kind": kind,
            "severity": "bad" if summary.is_bad else "note",
            "text": summary.text.rstrip("."),
            "run_id": self._run_id,
            "node": event.get("node"),
            "t": event["t"],
            "generation": self._generation,
            "step": get_count(event, "step"),
            "restarts": self._restarts,
            "root_cause": _find_root_cause(facts),
            "event": event["event"],
            "facts": facts,
        }
        masked: dict[str, Any] = mask(notice)
        return masked


def _describe_resume(event: Event, *, is_recovery: bool) -> str:
    step, nodes = get_count(event, "step") or 0, event.get("nodes")
    count = format_count(len(nodes), "node") if isinstance(nodes, list) else "?"
    begins = "continues" if is_recovery or event.get("kind") != "cold" else "starts"
    after = f" after step {step}" if step else ""
    text = f"training {begins}{after} on {count}, {format_count(get_count(event, 'world_size') or 0, 'rank')}"
    if event.get("resume_from"):
        given_up = format_count(get_count(event, "given_up_steps") or 0, "newer step")
        text += f"; it went back as --resume-from {event['resume_from']} asks, {given_up} given up"
    recomputed = get_count(event, "recomputed_steps")
    return f"{text}; {format_count(recomputed, 'step')} to compute again" if recomputed else text


def _find_root_cause(facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the first root cause of a verdict, or the failure for which the job ends, in one flat object."""
    causes = facts.get("root_causes") or [_find_failure(facts.get("reason"))]
    failure = causes[0] if isinstance(causes, list) and isinstance(causes[0], dict) else None
    if failure is None:
        return None
    cause = failure.get("cause")
    end: dict[str, Any] = cause if isinstance(cause, dict) else {}
    names = ("node", "rank", "kind", "type", "message")
    return {
        **{name: failure.get(name) for name in names},
        "exit_code": end.get("exit_code"),
        "signal": end.get("signal") or None,
    }


def _find_failure(fact: Any) -> Any:
    """Return the failure within a reason: give-up, or exclusion."""
    while isinstance(fact, dict) and "failure" not in fact:
        fact = fact.get("reason")
    return fact["failure"] if isinstance(fact, dict) else None


def mask(value: Any) -> Any:
    """Return a value with masked secrets: of ``--token VALUE`` and ``token=VALUE`` in its texts."""
    if isinstance(value, dict):
        return {key: mask(item) for key, item in value.items()}
    if isinstance(value, list):
        return [mask(item) for item in value]
    return " ".join(mask_secrets(value.split(" "))) if isinstance(value, str) else value
