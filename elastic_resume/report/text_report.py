"""Format a run's report for a terminal.

The verdict and what to look at come first, then a row for each generation and notes that do not fit in
it. Alerts, injected faults, goodput and checkpoints follow.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter

from elastic_resume.report import checkpoints
from elastic_resume.report.alerts import INFO, describe_recurrence
from elastic_resume.report.clock_alignment import ClockOffset
from elastic_resume.report.formatting import (
    format_count,
    format_node_names,
    format_percent,
    format_seconds,
    format_table,
    truncate,
    wrap_text,
)
from elastic_resume.report.goodput import PHASE_NAMES, RecoveryPhases
from elastic_resume.report.incidents import FailedStart, Generation
from elastic_resume.report.summary import GOODPUT_LABELS, RunReport

_COLUMNS = ("gen", "nodes", "world", "steps", "ended because", "recomputed", "recovery")
MAX_ROWS = 40
MAX_NOTES = 40
MAX_ALERTS = 20
MAX_NOTE_CHARS = 600  # of one note; --json has all of it
PHASE_LABELS = {
    "detected": "detection",
    "stopped": "stopping workers",
    "rendezvous": "rendezvous",
    "started": "starting workers",
    "restored": "restore",
    "step": "first step",
}


def format_text(report: RunReport) -> str:
    """Format a report for a terminal, at most `WIDTH` columns wide."""
    lines = wrap_text(report.verdict.text)
    for hint in report.verdict.hints:
        lines += wrap_text(truncate(f"look at: {hint}", MAX_NOTE_CHARS))
    rows = report.history.generations
    num_hidden = max(0, len(rows) - MAX_ROWS)
    if rows:
        lines.append("")
    if num_hidden:
        lines.append(f"{format_count(num_hidden, 'earlier generation')}: see --html or --json")
    if rows:
        table = [_generation_row(generation) for generation in rows[num_hidden:]]
        lines += format_table(_COLUMNS, table, right_aligned=(0, 2, 3, 5, 6), shrinkable=4)
    shown = "\n".join(lines)
    notes = [note for generation in rows for note in _generation_notes(generation, shown)]
    notes += _describe_failed_starts(report.history.failed_starts)
    lines += _limit_notes(notes, MAX_NOTES)
    dated_notes = [*_format_alerts(report), *_format_faults(report)]
    dated_notes = [*sorted(dated_notes[:MAX_ALERTS], key=itemgetter(0)), *dated_notes[MAX_ALERTS:]]
    side_notes = [*(text for _, text in dated_notes), *map(describe_clock_offset, report.clocks)]
    lines += ["", *_limit_notes(side_notes, MAX_ALERTS)] if side_notes else []
    recoveries = list(report.recoveries.values())
    totals = (_describe_goodput(report), _describe_recoveries(recoveries), _describe_checkpoints(report))
    wrapped = [line for text in totals if text for line in wrap_text(text)]
    lines += ["", *wrapped] if wrapped else []
    return "\n".join(lines) + "\n"


def _limit_notes(notes: Sequence[str], limit: int) -> list[str]:
    lines = [line for note in notes[:limit] for line in wrap_text(truncate(note, MAX_NOTE_CHARS))]
    num_hidden = len(notes) - limit
    return [*lines, *([f"and {num_hidden} more: see --html or --json"] if num_hidden > 0 else [])]


def _generation_row(generation: Generation) -> tuple[str, ...]:
    return (
        str(generation.number),
        format_node_names(generation.nodes),
        "-" if generation.world_size is None else str(generation.world_size),
        format_step_range(generation),
        generation.end.text,
        "-" if generation.recomputed_steps is None else str(generation.recomputed_steps),
        format_seconds(generation.recovery_s),
    )


def format_step_range(generation: Generation) -> str:
    """Format the steps that a generation ran."""
    if generation.first_step is not None and generation.last_step is not None:
        return f"{generation.first_step}-{generation.last_step}"
    if generation.start_step is not None:
        return "none"
    return "?" if generation.last_step is None else f"?-{generation.last_step}"


def _generation_notes(generation: Generation, shown: str) -> list[str]:
    """Return what does not fit in a generation's row."""
    name, notes = f"generation {generation.number}", []
    if generation.end.text not in shown:
        notes.append(f"{name} ended: {generation.end.text}")
    others = generation.end.other_failures
    if others:
        more = f"; and {len(others) - 2} more" if len(others) > 2 else ""
        notes.append(f"{name} also: {'; '.join(others[:2])}{more}")
    if generation.receiving_nodes:
        receivers = ", ".join(generation.receiving_nodes)
        notes.append(f"{name}: {generation.source_node} sent its state to {receivers}")
    for record in generation.rejected:
        version = f"generation {record.generation}, step {record.step}"
        notes.append(f"{name} rejected {record.node}'s state of {version}: {record.reason}")
    return notes


def _describe_failed_starts(starts: tuple[FailedStart, ...]) -> list[str]:
    """Describe the workers that ended before they trained, one line for each gap between generations."""
    notes = []
    for next_generation in dict.fromkeys(start.next_generation for start in starts):
        failed = [start for start in starts if start.next_generation == next_generation]
        first = min(failed, key=lambda start: (start.is_secondary, start.t))
        where = (
            "after the last generation" if next_generation is None else f"before generation {next_generation}"
        )
        notes.append(
            f"{where}, {format_count(len(failed), 'worker')} ended before training; first: {first.text}"
        )
    return notes


def format_since_start(report: RunReport, t: float) -> str:
    """Format a time, counted from the run's first event."""
    return format_seconds(max(0.0, t - report.start_t)) if report.start_t is not None else "-"


def _format_alerts(report: RunReport) -> list[tuple[float, str]]:
    return [
        (
            alert.t,
            f"at {format_since_start(report, alert.t)}  {alert.node or '-'}: {alert.text}"
            + (f" ({recurrence})" if (recurrence := describe_recurrence(alert)) else ""),
        )
        for alert in report.alerts
        if alert.severity != INFO
    ]


def _format_faults(report: RunReport) -> list[tuple[float, str]]:
    return [
        (
            fault.t,
            f"at {format_since_start(report, fault.t)}  injected: {fault.text}"
            + (f", in generation {fault.generation}" if fault.generation is not None else ""),
        )
        for fault in report.faults
    ]


def describe_clock_offset(offset: ClockOffset) -> str:
    """Describe a wall clock that was off, in one sentence."""
    return f"{offset.text}; durations here do not depend on it"


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


def median_phases(recoveries: Sequence[RecoveryPhases]) -> list[tuple[str, float]]:
    """Return the median of each known phase of the recoveries, by name."""
    medians = []
    for name in PHASE_NAMES:
        values = [value for phases in recoveries if (value := getattr(phases, f"{name}_s")) is not None]
        if values:
            medians.append((name, statistics.median(values)))
    return medians


def _describe_recoveries(recoveries: Sequence[RecoveryPhases]) -> str:
    parts = ", ".join(
        f"{PHASE_LABELS[name]} {format_seconds(value)}" for name, value in median_phases(recoveries)
    )
    which = "recovery" if len(recoveries) == 1 else f"{len(recoveries)} recoveries (medians)"
    return f"{which}: {parts}" if parts else ""


def _describe_checkpoints(report: RunReport) -> str:
    on_disk = [record for record in report.saved_states if record.tier == checkpoints.DISK]
    present = [record for record in on_disk if record.state in {checkpoints.COMMITTED, checkpoints.VALID}]
    if not on_disk:
        return ""
    nodes = Counter(record.node for record in present)
    newest = max(((record.generation, record.step) for record in present), default=None)
    holders = format_node_names(sorted(nodes), 40) or "no node"
    parts = [f"{format_count(len(on_disk), 'checkpoint')} written, {len(present)} present on {holders}"]
    if newest is not None:
        parts.append(f"newest: step {newest[1]}")
    for state, word in ((checkpoints.BAD, "bad"), (checkpoints.QUARANTINED, "in quarantine")):
        count = sum(record.state == state for record in on_disk)
        parts += [f"{count} {word}"] if count else []
    return ", ".join(parts)
