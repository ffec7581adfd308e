"""Find problems that ended no generation, such as disk errors and hangs.

Each kind of event has one sentence. The same problem of the same node becomes one alert with a count,
from the first time to the last. An alert for failing commits is resolved by the node's next checkpoint.
Pure.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import PurePath

from elastic_resume.events import Event
from elastic_resume.mechanisms.mechanism import AlertKind, EventSummary
from elastic_resume.mechanisms.registry import ALERTS
from elastic_resume.policy import wording
from elastic_resume.policy.proof import NOT_PROVED
from elastic_resume.policy.reasons import from_json
from elastic_resume.policy.stalls import Stall
from elastic_resume.report.event_log import EventTimeline, ParsedEvent, parse_event
from elastic_resume.report.formatting import format_count, format_seconds
from elastic_resume.report.generations import GenerationRow, describe_verdict

BAD, NOTE = "bad", "note"
_VARYING_FIELDS = frozenset({"t", "b", "pid", "seconds", "generation"})


@dataclass(frozen=True)
class Alert:
    """A problem of one node, with how often and how long it occurred.

    ``severity`` is bad (a person should look) or note. ``last_t`` is when it was resolved, or else seen last.
    """

    kind: str
    severity: str
    node: str
    t: float
    last_t: float
    count: int
    text: str
    generation: int | None = None
    step: int | None = None
    is_resolved: bool = True


def find_alerts(timeline: EventTimeline, generations: Iterable[GenerationRow]) -> tuple[Alert, ...]:
    """Find all alerts of a run, by the time of their first event."""
    root_nodes = {row.number: row.end.node for row in generations if row.end.is_incident}
    found: list[tuple[Alert, str]] = []  # with what tells different problems of a kind apart
    for kind, (severity, describe) in _DESCRIPTIONS.items():
        for event in timeline.select(kind):
            text = describe(event)
            if text:
                is_note = _is_note(event) or _has_ended(event, timeline.select(_ENDED_BY.get(kind, "")))
                alert = _make_alert(kind, NOTE if is_note else severity, event, text)
                found.append((alert, _identify_problem(event)))
    for event in timeline.select("rendezvous"):
        kind = event.get_text("what")
        # A lease that another node's failure let expire is part of that failure.
        root_node = root_nodes.get(event.generation or 0) if kind == "lease-expired" else ""
        if kind in _RENDEZVOUS_SEVERITIES and root_node in {"", None, event.node}:
            text = event.get_text("message") or kind
            alert = _make_alert(kind, _RENDEZVOUS_SEVERITIES[kind], event, text)
            found.append((alert, _identify_problem(event)))
    return tuple(sorted(_merge_repeated(found, timeline), key=lambda alert: (alert.t, alert.node)))


def summarize_event(event: Event) -> EventSummary | None:
    """Return what a report says about one event; of a verdict, why its generation ended."""
    parsed = parse_event(event, {})
    if parsed is None:
        return None
    if parsed.kind == "verdict":
        end = describe_verdict(parsed)
        return EventSummary(end.is_incident, end.text)
    severity, describe = _DESCRIPTIONS.get(parsed.kind, (NOTE, lambda _: ""))
    text = describe(parsed)
    return EventSummary(severity == BAD and not _is_note(parsed), text) if text else None


def _is_note(event: ParsedEvent) -> bool:
    """Return whether it is a hang that another node caused, or a resume that was proved."""
    return event.raw.get("waits_for_other_node") is True or (
        event.kind == "proof" and event.get_text("verdict") != NOT_PROVED
    )


def _has_ended(begin: ParsedEvent, ends: Iterable[ParsedEvent]) -> bool:
    where = begin.node, begin.rank, begin.generation
    return any((end.node, end.rank, end.generation) == where and end.t >= begin.t for end in ends)


def _make_alert(kind: str, severity: str, event: ParsedEvent, text: str) -> Alert:
    return Alert(kind, severity, event.node, event.t, event.t, 1, text, event.generation, event.step)


def _identify_problem(event: ParsedEvent) -> str:
    """Return what repeated events of one problem have in common."""
    if event.kind == "commit-failed":
        return ""
    if event.kind == "rendezvous":
        return repr(event.raw.get("reason"))
    if same_by := _SAME_BY.get(event.kind):
        return repr([event.raw.get(name) for name in same_by])
    return repr([(name, value) for name, value in event.raw.items() if name not in _VARYING_FIELDS])


def _merge_repeated(alerts: Iterable[tuple[Alert, str]], timeline: EventTimeline) -> list[Alert]:
    """Merge repeated alerts of a node; a commit between two failed commits separates them."""
    commits: dict[str, list[float]] = defaultdict(list)
    for event in timeline.select("commit"):
        commits[event.node].append(event.t)
    open_alerts: dict[tuple[str, str, str], Alert] = {}
    merged = []
    for alert, problem in sorted(alerts, key=lambda pair: pair[0].t):
        key = (alert.kind, alert.node, problem)
        last = open_alerts.get(key)
        if last is not None and _next_after(commits[alert.node], last.last_t) >= alert.t:
            open_alerts[key] = replace(last, last_t=alert.t, count=last.count + 1)
            continue
        merged += [last] if last is not None else []
        open_alerts[key] = alert
    merged += open_alerts.values()
    return [
        _resolve(alert, _next_after(commits[alert.node], alert.last_t))
        if alert.kind == "commit-failed"
        else alert
        for alert in merged
    ]


def _resolve(alert: Alert, next_commit_t: float) -> Alert:
    is_resolved = next_commit_t < math.inf
    return replace(alert, is_resolved=is_resolved, last_t=next_commit_t if is_resolved else alert.last_t)


def _next_after(times: list[float], t: float) -> float:
    """Return the first of the sorted ``times`` after ``t``; infinity if there is none."""
    index = bisect.bisect_right(times, t)
    return times[index] if index < len(times) else math.inf


# ---- one sentence for each kind ------------------------------------------------------------------------


def _first_text(event: ParsedEvent, *names: str) -> str:
    return next((text for name in names if (text := event.get_text(name))), "no reason recorded")


def _describe_with_reason(prefix: str, event: ParsedEvent) -> str:
    return f"{prefix}: {_first_text(event, 'error', 'reason')}"


def _describe_quarantine(event: ParsedEvent) -> str:
    name = PurePath(event.get_text("path")).name
    return f"a checkpoint was quarantined ({name}): {_first_text(event, 'reason')}"


def _describe_drain(event: ParsedEvent) -> str:
    others = "; the others continue" if event.raw.get("others_continue") is True else ""
    return f"{_first_text(event, 'cause')}: this node saves a checkpoint and leaves{others}"


def _describe_hang(event: ParsedEvent) -> str:
    suspects_text = "; ".join(
        f"rank {suspect.get('rank')} {_describe_stall(suspect.get('reason'))}"
        for suspect in event.get_facts("suspects")[:3]
    )
    duration = format_seconds(event.get_seconds("seconds"))
    if suspects_text and event.get_seconds("kill_delay_s"):
        suspects_text = f"perhaps {suspects_text}"  # A rank of another node may be it.
    explanation = suspects_text or "all ranks of this node wait for a rank of another node"
    waiting = event.raw.get("waiting")
    if not suspects_text and waiting and isinstance(waiting, dict):
        rank, stall = next(iter(waiting.items()))
        explanation += f": rank {rank} {_describe_stall(stall)}"
    return f"no step for {duration} after step {event.step}: {explanation}"


def _describe_stall(fact: object) -> str:
    try:
        return wording.describe_stall(from_json(Stall, fact))
    except ValueError:
        return "stands still"


def _describe_preload(event: ParsedEvent) -> str:
    skipped = event.raw.get("skipped_modules")
    names = ", ".join(map(str, skipped)) if isinstance(skipped, dict) else ""
    return f"not preloaded because it is not safe to fork: {names}" if names else ""


def _describe_fork_server_exit(event: ParsedEvent) -> str:
    return "" if event.get_count("exit_code") == 0 else "the fork server died and was replaced"


def _describe_raw(alert: AlertKind, event: ParsedEvent) -> str:
    return alert.describe(dict(event.raw))


def _describe_stuck_worker(event: ParsedEvent) -> str:
    return f"rank {event.rank}'s process cannot be killed" if event.raw.get("stuck") is True else ""


_DESCRIPTIONS: dict[str, tuple[str, Callable[[ParsedEvent], str]]] = {
    **{
        kind: (BAD, functools.partial(_describe_with_reason, prefix))
        for kind, prefix in {
            "commit-failed": "the checkpoint could not be written",
            "snapshot-failed": "no snapshot was taken",
            "snapshot-ignored": "an invalid snapshot was ignored",
            "committer-failed": "internal error in the committer",
            "prune-failed": "old checkpoints could not be pruned",
        }.items()
    },
    "proof": (BAD, lambda event: event.get_text("message")),
    "quarantine": (BAD, _describe_quarantine),
    "hang": (BAD, _describe_hang),
    "worker-exit": (BAD, _describe_stuck_worker),
    "hang-ended": (NOTE, lambda event: f"the hang after step {event.step} ended without a restart"),
    "drain": (NOTE, _describe_drain),
    "fork-server-ready": (NOTE, _describe_preload),
    "fork-server-exit": (NOTE, _describe_fork_server_exit),
    **{
        alert.kind: (BAD if alert.is_bad else NOTE, functools.partial(_describe_raw, alert))
        for alert in ALERTS
    },
}
_ENDED_BY = {alert.kind: alert.ended_by for alert in ALERTS}
_SAME_BY = {alert.kind: alert.same_by for alert in ALERTS}
_RENDEZVOUS_SEVERITIES = {
    "disk": BAD,
    "refused": BAD,
    "unauthenticated": BAD,
    "lease-expired": BAD,
    "left-out": BAD,
    "waiting": NOTE,
}


def describe_recurrence(alert: Alert) -> str:
    """Describe how often and how long an alert occurred; empty if once."""
    duration_s = alert.last_t - alert.t
    repeats = format_count(alert.count, "time") if alert.count > 1 else ""
    lasting = f"for {format_seconds(duration_s)}" if duration_s >= 1 else ""
    unresolved = "" if alert.is_resolved else "not resolved"
    return ", ".join(filter(None, [repeats, lasting, unresolved]))
