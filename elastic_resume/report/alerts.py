"""What went wrong and killed nobody: disks that refuse, copies set aside, notices, words of schedulers.

Each kind of event has one sentence. The same trouble of the same node, again and again, is one with a count,
from the first time to the last; one that ends (a disk that takes checkpoints again) says when. Pure.

Failures that ended a generation are not among these (`incidents`).
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import PurePath

from elastic_resume.report.event_log import EventTimeline, ParsedEvent
from elastic_resume.report.formatting import format_count, format_seconds, strip_path

BAD, NOTE, INFO = "bad", "note", "info"
_SLOW_FACTOR = 5  # times as long as such a commit mostly takes
_MIN_SLOW_S = 1.0
_MIN_COMMITS = 4  # fewer tell nothing of what is usual


@dataclass(frozen=True)
class Alert:
    """``weight``: bad (somebody should look), note, or news (of how worlds formed).

    ``until``: when it was over, or last seen.
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


def find_alerts(timeline: EventTimeline) -> tuple[Alert, ...]:
    """All troubles of a run, by the time at which they began."""
    found: list[Alert] = []
    for kind, (usual, sentence) in _DESCRIPTIONS.items():
        for seen in timeline.select(kind):
            said = sentence(seen)
            if said:
                weight = NOTE if seen.raw.get("elsewhere") is True else usual  # a hang that another node made
                made = Alert(kind, weight, seen.node, seen.t, seen.t, 1, said, seen.generation, seen.step)
                found.append(made)
    found += [one for one in map(_rendezvous_alert, timeline.select("rendezvous")) if one is not None]
    found += _find_slow_commits(timeline.select("commit"))
    return tuple(sorted(_merge_repeated(found, timeline), key=lambda trouble: (trouble.t, trouble.node)))


def _merge_repeated(found: Iterable[Alert], timeline: EventTimeline) -> list[Alert]:
    """The same again becomes one; a checkpoint that is written ends the trouble with writing them."""
    commits: dict[str, list[float]] = {}
    for one in timeline.select("commit"):
        commits.setdefault(one.node, []).append(one.t)
    open_ones: dict[tuple[str, str, str], Alert] = {}
    told = []
    for trouble in sorted(found, key=lambda trouble: trouble.t):
        said = trouble.text if trouble.kind != "commit-failed" else ""
        key = (trouble.kind, trouble.node, said)
        last = open_ones.get(key)
        if last is not None and not _has_time_between(commits.get(trouble.node, []), last.last_t, trouble.t):
            open_ones[key] = replace(last, last_t=trouble.t, count=last.count + 1)
            continue
        if last is not None:
            told.append(last)
        open_ones[key] = trouble
    told += open_ones.values()
    return [_resolve_alert(one, commits.get(one.node, [])) for one in told]


def _resolve_alert(one: Alert, commits: list[float]) -> Alert:
    if one.kind != "commit-failed":
        return one
    again = next((t for t in commits if t > one.last_t), None)
    return replace(one, is_resolved=again is not None, last_t=one.last_t if again is None else again)


def _has_time_between(times: list[float], since: float, until: float) -> bool:
    place = bisect.bisect_right(times, since)
    return place < len(times) and times[place] < until


def _find_slow_commits(commits: list[ParsedEvent]) -> list[Alert]:
    """Commits that took much longer than this node's mostly take."""
    by_node: dict[str, list[tuple[ParsedEvent, float]]] = {}
    for one in commits:
        spent = one.get_seconds("seconds")
        if spent is not None:
            by_node.setdefault(one.node, []).append((one, spent))
    found = []
    for node, here in by_node.items():
        usual = statistics.median(spent for _, spent in here)
        for one, spent in here:
            if len(here) >= _MIN_COMMITS and spent > max(_MIN_SLOW_S, _SLOW_FACTOR * usual):
                text = (
                    f"a checkpoint took {format_seconds(spent)} to write, most take {format_seconds(usual)}"
                )
                slow = Alert("slow-disk", BAD, node, one.t - spent, one.t, 1, text, one.generation, one.step)
                found.append(slow)
    return found


# ---- one sentence for each kind ------------------------------------------------------------------------


def _first_text(one: ParsedEvent, *names: str) -> str:
    return next((strip_path(text) for name in names if (text := one.get_text(name))), "no reason is told")


def _describe_quarantine(one: ParsedEvent) -> str:
    return f"a copy was set aside ({PurePath(one.get_text('path')).name}): {_first_text(one, 'reason')}"


def _describe_divergence(one: ParsedEvent) -> str:
    wrong = one.get_texts("wrong")
    who = f"of {', '.join(wrong)} differ from the others'" if wrong else "differ, and no majority says whose"
    then = "the majority's state is taken" if one.raw.get("goes_on") is True else "the job ends"
    return f"replicas {who}; {then}"


def _describe_drain(one: ParsedEvent) -> str:
    others = ", the others go on" if one.raw.get("alone") is True else ""
    return f"{_first_text(one, 'cause')}: this node saves and leaves{others}"


def _describe_notice(one: ParsedEvent) -> str:
    reason = one.get_text("reason")
    return f"the node is to be taken away, says {_first_text(one, 'source')}" + (
        f": {reason}" if reason else ""
    )


def _describe_requeue(one: ParsedEvent) -> str:
    done = ", done" if one.raw.get("done") is True else ", refused" if "done" in one.raw else ""
    told = ": ".join(filter(None, [one.get_text("why"), one.get_text("message")]))
    return f"{_first_text(one, 'action')}{done}" + (f" ({told})" if told else "")


def _describe_hang(one: ParsedEvent) -> str:
    suspects = one.raw.get("suspects")
    named = [s for s in suspects if isinstance(s, dict)] if isinstance(suspects, list) else []
    blamed = "; ".join(f"rank {s.get('rank')} {s.get('reason')}" for s in named[:3])
    quiet = format_seconds(one.get_seconds("seconds"))
    who = blamed or "all ranks of this node wait for another node's"
    return f"no step for {quiet} after step {one.step}: {who}"


def _describe_preload(one: ParsedEvent) -> str:
    left = one.raw.get("skipped_modules")
    names = ", ".join(map(str, left)) if isinstance(left, dict) else ""
    return f"not preloaded, since it spoils a fork: {names}" if names else ""


def _describe_fork_server_exit(one: ParsedEvent) -> str:
    return "" if one.get_count("exit_code") == 0 else "the process that forks workers died, and was replaced"


def _describe_stuck_worker(one: ParsedEvent) -> str:
    return f"rank {one.rank}'s process cannot be killed" if one.raw.get("stuck") is True else ""


_DESCRIPTIONS: dict[str, tuple[str, Callable[[ParsedEvent], str]]] = {
    "commit-failed": (BAD, lambda one: f"no checkpoint could be written: {_first_text(one, 'error')}"),
    "snapshot-failed": (BAD, lambda one: f"no copy in memory: {_first_text(one, 'reason')}"),
    "snapshot-ignored": (BAD, lambda one: f"a copy in memory cannot be true: {_first_text(one, 'reason')}"),
    "committer-failed": (BAD, lambda one: f"a fault of elastic_resume's keeper: {_first_text(one, 'error')}"),
    "hang-detector-failed": (
        BAD,
        lambda one: f"a fault of elastic_resume's watch: {_first_text(one, 'error')}",
    ),
    "prune-failed": (BAD, lambda one: f"old checkpoints could not be removed: {_first_text(one, 'error')}"),
    "progress-page-ignored": (
        BAD,
        lambda one: f"the page of last steps was damaged: {_first_text(one, 'reason')}",
    ),
    "quarantine": (BAD, _describe_quarantine),
    "replicas-differ": (BAD, _describe_divergence),
    "hang": (BAD, _describe_hang),
    "worker-exit": (BAD, _describe_stuck_worker),
    "hang-ended": (NOTE, lambda one: f"the hang after step {one.step} ended by itself"),
    "drain": (NOTE, _describe_drain),
    "preemption-notice": (NOTE, _describe_notice),
    "requeue": (NOTE, _describe_requeue),
    "fork-server-ready": (NOTE, _describe_preload),
    "fork-server-exit": (NOTE, _describe_fork_server_exit),
}
_RENDEZVOUS_SEVERITIES = {
    "disk": BAD,
    "refused": BAD,
    "unauthenticated": BAD,
    "quorum-forced": BAD,
    "lease-expired": BAD,
    "waiting": NOTE,
    "spare": INFO,
    "proposal-aborted": INFO,
    "step-down": INFO,
    "leader-lost": INFO,
    "new-incarnation": INFO,
}


def _rendezvous_alert(one: ParsedEvent) -> Alert | None:
    what = one.get_text("what")
    weight = _RENDEZVOUS_SEVERITIES.get(what)
    if weight is None:
        return None
    return Alert(what, weight, one.node, one.t, one.t, 1, one.get_text("message") or what)


def describe_recurrence(alert: Alert) -> str:
    """How often and for how long, where it was more than once."""
    lasting = alert.last_t - alert.t
    again = format_count(alert.count, "time") if alert.count > 1 else ""
    while_ = f"for {format_seconds(lasting)}" if lasting >= 1 and alert.kind != "slow-disk" else ""
    still = "" if alert.is_resolved else "and not over"
    return ", ".join(filter(None, [again, while_, still]))
