"""Build the report of one run from its events, and format it for a terminal or as JSON.

`build_run_report` computes everything once: history, goodput, alerts, checkpoints, and a verdict with
hints. `format_text`, the page (`html`) and `format_json` show it. Any list of events gives a report.
Checkpoints on disk, stacks and read errors are arguments, because events do not contain them. Pure.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from typing import Any

from elastic_resume.events import Event, get_boot_time
from elastic_resume.mechanisms.mechanism import Chart
from elastic_resume.mechanisms.registry import ALERTS, REPORT_LINES
from elastic_resume.report import alerts, checkpoints, event_log, goodput
from elastic_resume.report.alerts import BAD, Alert, describe_recurrence
from elastic_resume.report.checkpoints import CheckpointEntry
from elastic_resume.report.event_log import EventTimeline
from elastic_resume.report.formatting import (
    fold_node_names,
    format_count,
    format_percent,
    format_seconds,
    format_table,
    format_utc,
    truncate,
    wrap_text,
)
from elastic_resume.report.generations import GenerationRow, JobWait, RunHistory, build_history
from elastic_resume.report.goodput import (
    GenerationTimes,
    Goodput,
    TimeSlice,
    measure_generations,
)

MAX_HINTS = 6
MAX_MESSAGE_CHARS = 500  # limit of an exception's text within a sentence
_WORST_ALERTS = (
    *(alert.kind for alert in ALERTS if alert.is_worst),
    *("hang", "commit-failed", "quarantine"),
)
_MIN_REPEATED_FAILURES = 3  # failures of one node
_LOW_GOODPUT, _LONG_RUN_S = 0.9, 600.0  # a run this long with less goodput gets a hint
MAX_SILENCE_S = 60.0  # a running job records a step more often
GOODPUT_LABELS = {
    "productive": "goodput",
    "starting": "startup",
    "restoring": "restore",
    "stalled": "snapshot stalls",
    "recomputed": "recomputed steps",
    "interrupted": "interrupted steps",
    "waiting": "rendezvous",
}
DOWNTIME_NOTE = (
    "downtime: what failures and drains cost, which is recomputed and interrupted steps and all time "
    "until the next generation's first step"
)
MAX_ROWS, MAX_NOTES, MAX_ALERTS, MAX_OTHERS = 40, 40, 20, 4  # limits of the output in a terminal
MAX_NOTE_CHARS = 600  # limit of one note; --json has all of it
_COLUMNS = ("gen", "nodes", "world", "steps", "ended because", "recomputed", "recovery")


@dataclass(frozen=True)
class RunVerdict:
    """How the run ended or stands, at which step, at what cost; and what to look at, in order."""

    text: str
    hints: tuple[str, ...]


def _summarize_run(
    history: RunHistory,
    goodput: Goodput,
    downtime_s: float,
    alerts: Sequence[Alert],
    *,
    silent_s: float | None = None,
) -> RunVerdict:
    """Summarize a run in a sentence or two, with hints for a person.

    ``downtime_s`` is the cost of all failures; ``silent_s`` the time since the last event, if known.
    """
    hints = [
        *_hints_from_end(history, silent_s),
        *_hints_from_alerts(alerts),
        *_hints_from_totals(history, goodput),
    ]
    text = _describe_state(history, goodput)
    if history.generations:
        text += " " + _describe_downtime(history, goodput, downtime_s)
    return RunVerdict(text, tuple(hints[:MAX_HINTS]))


def _describe_state(history: RunHistory, goodput: Goodput) -> str:
    when = f" at step {history.last_step}" if history.last_step is not None else " before its first step"
    when += f" after {format_seconds(goodput.total_s)}" if goodput.total_s else ""
    message = truncate(history.message.rstrip("."), MAX_MESSAGE_CHARS) or "no reason recorded"
    if history.outcome == "finished":
        return f"Finished{when}."
    if history.outcome in {"failed", "stopped"}:
        return f"{'FAILED' if history.outcome == 'failed' else 'Stopped'}{when}: {message}."
    if history.wait is not None:
        return _describe_wait(history.wait, f",{when}" if history.generations else "")
    if not history.generations:
        return "No training yet."
    end = history.generations[-1].end
    if end.is_incident:
        return f"Down{when}, not recovered: {truncate(end.text.rstrip('.'), MAX_MESSAGE_CHARS)}."
    return f"Running, or killed as a whole,{when}."


def _describe_wait(wait: JobWait, when: str) -> str:
    since = f"{format_utc(wait.since_t)} UTC"
    if not wait.missing_nodes:
        return f"Waiting since {since}{when}: {truncate(wait.text, MAX_MESSAGE_CHARS)}."
    nodes = ", ".join(wait.missing_nodes)
    verb = "is" if len(wait.missing_nodes) == 1 else "are"
    return f"Waiting for a quorum since {since}{when}: {nodes} {verb} missing."


def _describe_downtime(history: RunHistory, goodput: Goodput, downtime_s: float) -> str:
    share = "" if goodput.share is None else f"; goodput {format_percent(goodput.share)}"
    if not history.num_incidents and history.wait is None:
        return f"No failure{share}."
    steps = format_count(history.recomputed_steps, "step") if history.recomputed_steps else "no step"
    failures = format_count(history.num_failures, "failure") if history.num_failures else "No failure"
    if drained := history.num_incidents - history.num_failures:
        failures += f", {format_count(drained, 'drain')}"
    downtime = f", {format_seconds(downtime_s)} downtime" if downtime_s else ""
    return f"{failures}{downtime}, {steps} recomputed{share}."


def _hints_from_end(history: RunHistory, silent_s: float | None) -> list[str]:
    hints = []
    if history.wait is not None and history.wait.missing_nodes:
        hints.append(
            f"start {', '.join(history.wait.missing_nodes)} again, with their disks; if they are gone for "
            "good: end the job, remove rendezvous.json from the node directories, and start it again"
        )
    last = history.generations[-1] if history.generations else None
    is_failed = history.outcome == "failed" and last is not None and last.end.is_incident
    if is_failed and last is not None and not _is_told(last, history):
        hints.append(f"generation {last.number} ended: {last.end.text}")
    if history.outcome == "open" and silent_s is not None and silent_s > MAX_SILENCE_S:
        hints.append(f"no event for {format_seconds(silent_s)}: check whether the job still runs")
    return hints


def _is_told(last: GenerationRow, history: RunHistory) -> bool:
    """Whether the verdict has the message of the error that ended the last generation."""
    cause = last.end.message.rstrip(".")
    return bool(cause) and cause in truncate(history.message, MAX_MESSAGE_CHARS)


def _hints_from_alerts(alerts: Sequence[Alert]) -> list[str]:
    groups: dict[tuple[str, str], list[Alert]] = defaultdict(list)
    for alert in alerts:
        if alert.severity == BAD:
            groups[alert.kind, alert.node].append(alert)
    hints = []
    for group in groups.values():
        first, count = group[0], sum(alert.count for alert in group)
        times = f" ({format_count(count, 'time')})" if count > 1 else ""
        unresolved = "" if first.is_resolved else "; not resolved"
        rank = _WORST_ALERTS.index(first.kind) if first.kind in _WORST_ALERTS else len(_WORST_ALERTS)
        hints.append((rank, -count, f"{_describe_alert(first)}{times}{unresolved}"))
    return [hint for *_, hint in sorted(hints, key=itemgetter(0, 1))]


def _describe_alert(alert: Alert) -> str:
    return f"{alert.node or 'a node'}: {alert.text}"


def _hints_from_totals(history: RunHistory, goodput: Goodput) -> list[str]:
    hints = []
    failures = [generation.end for generation in history.generations if generation.end.is_failure]
    for node, count in Counter(end.node for end in failures if end.node).most_common(1):
        if count >= _MIN_REPEATED_FAILURES and count * 2 >= len(failures):
            hints.append(f"node {node} is the root cause of {count} of {len(failures)} failures")
    if goodput.total_s >= _LONG_RUN_S and goodput.productive_s < _LOW_GOODPUT * goodput.total_s:
        losses = [part for part in goodput.parts if part[0] != "productive"]
        name, seconds = max(losses, key=lambda part: part[1])
        share = format_percent(seconds / goodput.total_s)
        hints.append(f"{share} of the time was {GOODPUT_LABELS[name]} ({format_seconds(seconds)})")
    return hints


REPORT_SCHEMA = 4


@dataclass(frozen=True)
class InjectedFault:
    """An injected fault, as the fault injector recorded it, and the generation that ran then.

    It decides no root cause: only the nodes' own events do.
    """

    number: int | None
    kind: str
    target: str
    trigger: str
    node: str
    rank: int | None
    t: float
    message: str
    generation: int | None

    @property
    def text(self) -> str:
        """What the injector did, in words."""
        return self.message or f"{self.kind} {self.node or self.target}".rstrip()


@dataclass(frozen=True)
class RunReport:
    """Everything that a report shows of one run.

    ``downtimes`` are by the number of the generation that ended. ``silent_s`` is the time since the last
    event, if the present is known. ``stacks`` are texts by NODE/FILE. ``charts`` are for the page.
    """

    run_id: str
    command: str
    settings: tuple[str, ...]
    start_t: float | None
    end_t: float | None
    silent_s: float | None
    verdict: RunVerdict
    history: RunHistory
    downtimes: Mapping[int, float]
    goodput: Goodput
    alerts: tuple[Alert, ...]
    faults: tuple[InjectedFault, ...]
    checkpoints: tuple[CheckpointEntry, ...]
    stacks: Mapping[str, str]
    charts: tuple[Chart, ...]
    problems: tuple[str, ...]
    timeline: EventTimeline = field(repr=False)
    slices: tuple[TimeSlice, ...] = field(repr=False)
    generation_times: tuple[GenerationTimes, ...] = field(repr=False)

    @property
    def recoveries_s(self) -> list[float]:
        """The recoveries in the table of generations."""
        rows = self.history.generations
        return [row.failure_recovery_s for row in rows if row.failure_recovery_s is not None]

    @property
    def median_recovery_s(self) -> float | None:
        """Their median; None without one."""
        return statistics.median(self.recoveries_s) if self.recoveries_s else None

    @property
    def newest_checkpoint_step(self) -> int | None:
        """The step of the newest valid checkpoint; None if there is none."""
        valid = [entry for entry in self.checkpoints if entry.state == checkpoints.VALID]
        versions = [(entry.generation or 0, entry.step or 0) for entry in valid]
        return max(versions)[1] if versions else None


def build_run_report(
    events: Iterable[Event],
    *,
    checkpoint_entries: Sequence[CheckpointEntry] = (),
    stacks: Mapping[str, str] | None = None,
    charts: Sequence[Chart] = (),
    problems: Sequence[str] = (),
    now: float | None = None,
    boot_stamp: Event | None = None,
) -> RunReport:
    """Build the report of one run.

    ``checkpoint_entries`` are the checkpoints on disk and in an archive. ``now`` is the present in Unix
    seconds, if the run may still be running; ``boot_stamp`` is the present as `events.boot_fields` gives it,
    used if the run is on this machine.
    """
    timeline = event_log.build_timeline(events)
    boot_time = get_boot_time(boot_stamp or {})
    if now is not None and boot_time is not None and boot_time[0] in timeline.boot_times:
        now = timeline.boot_times[boot_time[0]] + boot_time[1]
    history = build_history(timeline)
    generation_times = measure_generations(timeline, history)
    slices = goodput.slice_time(timeline, history, generation_times)
    total = goodput.sum_goodput(slices, generation_times)
    downtimes = goodput.measure_downtimes(slices, history, generation_times)
    alert_list = alerts.find_alerts(timeline, history.generations)
    starts = timeline.select("agent-start")
    event_times = [item.t for item in timeline.events if item.kind != "fault"]
    silent_s = now - max(event_times) if now is not None and event_times else None
    return RunReport(
        run_id=next((item.get_text("run_id") for item in starts if item.get_text("run_id")), ""),
        command=next((item.get_text("command") for item in reversed(starts) if item.get_text("command")), ""),
        settings=starts[-1].get_texts("settings") if starts else (),
        start_t=min(event_times, default=None),
        end_t=max(event_times, default=None),
        silent_s=silent_s,
        verdict=_summarize_run(history, total, sum(downtimes.values()), alert_list, silent_s=silent_s),
        history=history,
        downtimes=downtimes,
        goodput=total,
        alerts=alert_list,
        faults=_collect_faults(timeline, generation_times),
        checkpoints=tuple(checkpoint_entries),
        stacks=stacks or {},
        charts=tuple(charts),
        problems=tuple(problems),
        timeline=timeline,
        slices=slices,
        generation_times=generation_times,
    )


def _collect_faults(
    timeline: EventTimeline, generation_times: Sequence[GenerationTimes]
) -> tuple[InjectedFault, ...]:
    faults = []
    for event in timeline.select("fault"):
        running = [times.number for times in generation_times if times.restored_t <= event.t]
        number = event.raw.get("number")
        faults.append(
            InjectedFault(
                number=number if type(number) is int else None,
                kind=event.get_text("what") or "fault",
                target=str(event.raw.get("where") or ""),
                trigger=str(event.raw.get("when") or ""),
                node=event.node,
                rank=event.rank,
                t=event.t,
                message=event.get_text("message"),
                generation=running[-1] if running else None,
            )
        )
    return tuple(faults)


def format_json(run_report: RunReport) -> str:
    """Return the report as JSON; docs/reference/report-json.md describes its members.

    Within one `REPORT_SCHEMA` members are only added. Times are Unix seconds, durations seconds, null is
    unknown.
    """
    history = asdict(run_report.history)
    for row in history["generations"]:
        row["downtime_s"] = run_report.downtimes.get(row["number"])
    members: dict[str, Any] = {
        "schema": REPORT_SCHEMA,
        "run_id": run_report.run_id,
        "command": run_report.command,
        "settings": list(run_report.settings),
        "start_t": run_report.start_t,
        "end_t": run_report.end_t,
        "verdict": asdict(run_report.verdict),
        "median_recovery_s": run_report.median_recovery_s,
        "outcome": history.pop("outcome"),
        "message": history.pop("message"),
        "goodput": {**asdict(run_report.goodput), "share": run_report.goodput.share},
        **history,
        "alerts": [asdict(item) for item in run_report.alerts],
        "faults": [asdict(item) for item in run_report.faults],
        "checkpoints": [{**asdict(item), "path": str(item.path)} for item in run_report.checkpoints],
        "hangs": [{"file": name, "text": text} for name, text in run_report.stacks.items()],
        "problems": list(run_report.problems),
    }
    return json.dumps(members, indent=1, allow_nan=False) + "\n"


# ---- in a terminal -----------------------------------------------------------------------------------


def format_text(report: RunReport) -> str:
    """Format a report for a terminal, at most `WIDTH` columns wide.

    The verdict and what to look at come first, then a row for each generation and notes that do not fit
    in it. Alerts, injected faults, goodput and checkpoints follow.
    """
    lines = wrap_text(report.verdict.text)
    for hint in report.verdict.hints:
        lines += wrap_text(truncate(f"look at: {hint}", MAX_NOTE_CHARS))
    rows = report.history.generations
    if rows:
        lines.append("")
        if len(rows) > MAX_ROWS:
            hidden = format_count(len(rows) - MAX_ROWS, "earlier generation")
            lines.append(f"{hidden}: see --html or --json")
        table = [_generation_row(generation) for generation in rows[-MAX_ROWS:]]
        lines += format_table(_COLUMNS, table, right_aligned=(0, 2, 3, 5, 6), shrinkable=4)
    shown = "\n".join([report.verdict.text, *report.verdict.hints, *lines])  # also what was wrapped
    notes = []
    for row in rows:
        name = f"generation {row.number}"
        is_told = row.end.text in shown or (row is rows[-1] and _is_told(row, report.history))
        notes += [] if is_told else [f"{name} ended: {row.end.text}"]
        notes += [f"{name}: {detail}" for detail in describe_details(row)]
    lines += _limit_notes(notes, MAX_NOTES)
    dated_notes = [*_format_alerts(report), *_format_faults(report)]
    dated_notes = [*sorted(dated_notes[:MAX_ALERTS], key=itemgetter(0)), *dated_notes[MAX_ALERTS:]]
    lines += ["", *_limit_notes([text for _, text in dated_notes], MAX_ALERTS)] if dated_notes else []
    totals = (
        _describe_goodput(report),
        DOWNTIME_NOTE if report.downtimes else "",
        _describe_recoveries(report),
        _describe_checkpoints(report),
        *_describe_mechanisms(report),
        truncate(f"settings: {', '.join(report.settings)}", MAX_NOTE_CHARS) if report.settings else "",
    )
    wrapped = [line for text in totals if text for line in wrap_text(text)]
    lines += ["", *wrapped] if wrapped else []
    return "\n".join(lines) + "\n"


def _limit_notes(notes: Sequence[str], limit: int) -> list[str]:
    lines = [line for note in notes[:limit] for line in wrap_text(truncate(note, MAX_NOTE_CHARS))]
    num_hidden = len(notes) - limit
    return [*lines, *([f"and {num_hidden} more: see --html or --json"] if num_hidden > 0 else [])]


def _generation_row(generation: GenerationRow) -> tuple[str, ...]:
    return (
        str(generation.number),
        fold_node_names(generation.nodes),
        "-" if generation.world_size is None else str(generation.world_size),
        format_step_range(generation),
        generation.end.text,
        "-" if generation.recomputed_steps is None else str(generation.recomputed_steps),
        format_seconds(generation.failure_recovery_s),
    )


def format_step_range(generation: GenerationRow) -> str:
    """Format the steps that a generation ran."""
    if generation.first_step is not None and generation.last_step is not None:
        return f"{generation.first_step}-{generation.last_step}"
    if generation.start_step is not None or generation.last_step is None:
        return "none"
    return f"?-{generation.last_step}"


def describe_details(generation: GenerationRow) -> list[str]:
    """Describe other failures at its end, the nodes that received its state, and rejected states."""
    others, details = generation.end.other_failures, []
    if others:
        more = f"; and {len(others) - MAX_OTHERS} more" if len(others) > MAX_OTHERS else ""
        details.append(f"also {'; '.join(others[:MAX_OTHERS])}{more}")
    if generation.resume_from:
        details.append(
            f"went back to step {generation.start_step}, as --resume-from {generation.resume_from} "
            f"requested; {format_count(generation.given_up_steps, 'newer step')} given up"
        )
    if generation.receiving_nodes:
        receivers = fold_node_names(generation.receiving_nodes, 40)
        details.append(f"{generation.source_node} sent its state to {receivers}")
    for record in generation.rejected:
        version = f"generation {record.generation}, step {record.step}"
        details.append(f"rejected {record.node}'s state of {version}: {record.text}")
    return details


def format_since_start(report: RunReport, t: float) -> str:
    """Format a time, counted from the run's first event."""
    return format_seconds(max(0.0, t - report.start_t)) if report.start_t is not None else "-"


def _format_alerts(report: RunReport) -> Iterator[tuple[float, str]]:
    """Yield each alert's time and sentence; of one whose sentence is a hint, the kind alone."""
    for alert in report.alerts:
        recurrence = describe_recurrence(alert)
        is_told = any(hint.startswith(_describe_alert(alert)) for hint in report.verdict.hints)
        text = f"{alert.node or '-'}: {f'{alert.kind}, see above' if is_told else alert.text}"
        text += f" ({recurrence})" if recurrence else ""
        yield alert.t, f"at {format_since_start(report, alert.t)}  {text}"


def _format_faults(report: RunReport) -> Iterator[tuple[float, str]]:
    for fault in report.faults:
        place = f", in generation {fault.generation}" if fault.generation is not None else ""
        yield fault.t, f"at {format_since_start(report, fault.t)}  injected: {fault.text}{place}"


def _describe_goodput(report: RunReport) -> str:
    total_s = report.goodput.total_s
    if total_s <= 0:
        return ""
    shown = [
        f"{format_percent(value / total_s)} {GOODPUT_LABELS[name]}"
        for name, value in report.goodput.parts
        if name != "productive" and value >= total_s / 1e4
    ]
    share = format_percent(report.goodput.productive_s / total_s)
    return "; ".join(filter(None, [f"goodput {share} of {format_seconds(total_s)}", ", ".join(shown)]))


def _describe_recoveries(report: RunReport) -> str:
    count = len(report.recoveries_s)
    subject = "recovery" if count == 1 else f"{count} recoveries, median"
    duration = format_seconds(report.median_recovery_s)
    return f"{subject}: {duration} from the first sign to the first step" if count else ""


def _describe_checkpoints(report: RunReport) -> str:
    states = Counter(entry.state for entry in report.checkpoints)
    if not states:
        return ""
    valid = [entry for entry in report.checkpoints if entry.state == checkpoints.VALID]
    nodes = [entry.node for entry in valid if not entry.is_archived]
    num_archived, step = len(valid) - len(nodes), report.newest_checkpoint_step
    parts = []
    if nodes or not num_archived:
        names = fold_node_names(sorted({*nodes}), 40) or "no node"
        parts += [f"{format_count(len(nodes), 'checkpoint')} on {names}"]
    if num_archived:
        parts += [f"{format_count(num_archived, 'checkpoint')} in the archive"]
    parts += [f"newest: step {step}"] if step is not None else []
    for state, text in ((checkpoints.BAD, "bad"), (checkpoints.QUARANTINED, "in quarantine")):
        parts += [f"{states[state]} {text}"] if states[state] else []
    return ", ".join(parts)


def _describe_mechanisms(report: RunReport) -> Iterator[str]:
    for line in REPORT_LINES:
        found = [{**event.raw, "t": event.t} for event in report.timeline.select(line.kind)]
        if found:
            yield line.describe(found, found[-1]["t"] if report.end_t is None else report.end_t)
