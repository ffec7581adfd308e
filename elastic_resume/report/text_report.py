"""A report as a person reads it in a terminal.

First the verdict and what to look at; then a row for each generation and what has no room there: what was cut
off, copies that were rejected, workers that never came to training; then what went wrong besides, where the
time went, and what there is of checkpoints.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
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

_COLUMNS = ("gen", "nodes", "world", "steps", "ended because", "lost", "recovered in")
MAX_ROWS = 40
MAX_NOTES = 40
MAX_ALERTS = 20
MAX_NOTE_CHARS = 600  # of one note: an exception may have said anything; --json has all of it
PHASE_LABELS = {
    "detected": "to notice it",
    "stopped": "to stop workers",
    "rendezvous": "to form a world",
    "started": "to start workers",
    "restored": "to restore the state",
    "step": "for a step",
}


def format_text(report: RunReport) -> str:
    """Lines for a terminal, at most 100 columns wide."""
    lines = wrap_text(report.verdict.text)
    for look in report.verdict.hints:
        lines += wrap_text(truncate(f"look at: {look}", MAX_NOTE_CHARS))
    rows = report.history.generations
    if rows:
        left_out = max(0, len(rows) - MAX_ROWS)
        lines += [
            "",
            *(
                [f"{format_count(left_out, 'generation')} before these: see --html or --json"]
                if left_out
                else []
            ),
        ]
        lines += format_table(
            _COLUMNS,
            [_generation_row(one) for one in rows[left_out:]],
            right_aligned=(0, 2, 3, 5, 6),
            shrinkable=4,
        )
    shown = "\n".join(lines)
    notes = [note for one in rows for note in _generation_notes(one, shown)]
    notes += _describe_failed_starts(report.history.failed_starts)
    lines += _limit_notes(notes, MAX_NOTES)
    dated = [*_format_alerts(report), *_format_faults(report)]
    dated = [*sorted(dated[:MAX_ALERTS], key=itemgetter(0)), *dated[MAX_ALERTS:]]
    odd = [*(text for _, text in dated), *map(describe_clock_offset, report.clocks)]
    lines += ["", *_limit_notes(odd, MAX_ALERTS)] if odd else []
    figures = [
        line
        for line in (
            _describe_goodput(report),
            _describe_recoveries(report.recoveries.values()),
            _describe_checkpoints(report),
        )
        if line
    ]
    lines += ["", *(part for line in figures for part in wrap_text(line))] if figures else []
    return "\n".join(lines) + "\n"


def _limit_notes(notes: Sequence[str], limit: int) -> list[str]:
    lines = [line for note in notes[:limit] for line in wrap_text(truncate(note, MAX_NOTE_CHARS))]
    left_out = len(notes) - limit
    return [*lines, *([f"and {left_out} more: see --html or --json"] if left_out > 0 else [])]


def _generation_row(one: Generation) -> tuple[str, ...]:
    return (
        str(one.number),
        format_node_names(one.nodes),
        "-" if one.world_size is None else str(one.world_size),
        format_step_range(one),
        one.end.text,
        "-" if one.recomputed_steps is None else str(one.recomputed_steps),
        format_seconds(one.recovery_s),
    )


def format_step_range(one: Generation) -> str:
    """The steps that a generation ran."""
    if one.first_step is not None and one.last_step is not None:
        return f"{one.first_step}-{one.last_step}"
    return "none" if one.start_step is not None else "?" if one.last_step is None else f"?-{one.last_step}"


def _generation_notes(one: Generation, shown: str) -> list[str]:
    """What the row of a generation has no room for."""
    notes = []
    if one.end.text not in shown:
        notes.append(f"generation {one.number} ended because of {one.end.text}")
    also = one.end.other_failures
    if also:
        more = f"; and {len(also) - 2} more" if len(also) > 2 else ""
        notes.append(f"generation {one.number} also: {'; '.join(also[:2])}{more}")
    if one.receiving_nodes:
        notes.append(
            f"generation {one.number}: {one.source_node} sent its copy to {', '.join(one.receiving_nodes)}"
        )
    for copy in one.rejected:
        which = f"generation {copy.generation}, step {copy.step}"
        notes.append(f"generation {one.number} rejected {copy.node}'s copy of {which}: {copy.reason}")
    return notes


def _describe_failed_starts(starts: tuple[FailedStart, ...]) -> list[str]:
    """One line for each gap between generations in which workers ended before they trained."""
    notes = []
    for before in dict.fromkeys(one.next_generation for one in starts):
        here = [one for one in starts if one.next_generation == before]
        first = min(here, key=lambda one: (one.is_secondary, one.t))
        where = "after the last generation" if before is None else f"before generation {before}"
        notes.append(
            f"{where} {format_count(len(here), 'worker')} ended before training; first: {first.text}"
        )
    return notes


def format_since_start(report: RunReport, t: float) -> str:
    """A time, counted from the run's first event."""
    return format_seconds(max(0.0, t - report.start_t)) if report.start_t is not None else "-"


def _format_alerts(report: RunReport) -> list[tuple[float, str]]:
    return [
        (
            one.t,
            f"at {format_since_start(report, one.t)}  {one.node or '-'}: {one.text}"
            + (f" ({often})" if (often := describe_recurrence(one)) else ""),
        )
        for one in report.alerts
        if one.severity != INFO
    ]


def _format_faults(report: RunReport) -> list[tuple[float, str]]:
    return [
        (
            one.t,
            f"at {format_since_start(report, one.t)}  injected: {one.text}"
            + (f", in generation {one.generation}" if one.generation is not None else ""),
        )
        for one in report.faults
    ]


def describe_clock_offset(offset: ClockOffset) -> str:
    """Whose clock was off, as a sentence."""
    return f"{offset.text}; durations here do not depend on it"


def _describe_goodput(report: RunReport) -> str:
    whole = report.goodput.total_s
    if whole <= 0:
        return ""
    told_of = [(name, value) for name, value in report.goodput.parts if value >= whole / 1e4]
    spent = [f"{format_percent(value / whole)} {GOODPUT_LABELS[name]}" for name, value in told_of]
    return f"of {format_seconds(whole)}: {', '.join(spent)}"


def median_phases(recoveries: Iterable[RecoveryPhases]) -> list[tuple[str, float]]:
    """The median of each phase of the recoveries, by name, where it is known."""
    listed = list(recoveries)
    found = []
    for name in PHASE_NAMES:
        values = [value for one in listed if (value := getattr(one, f"{name}_s")) is not None]
        if values:
            found.append((name, statistics.median(values)))
    return found


def _describe_recoveries(recoveries: Iterable[RecoveryPhases]) -> str:
    listed = list(recoveries)
    spent = ", ".join(
        f"{format_seconds(value)} {PHASE_LABELS[name]}" for name, value in median_phases(listed)
    )
    which = "the recovery took" if len(listed) == 1 else f"{len(listed)} recoveries took (medians)"
    return f"{which}: {spent}" if spent else ""


def _describe_checkpoints(report: RunReport) -> str:
    on_disk = [one for one in report.saved_states if one.tier == checkpoints.DISK]
    there = [one for one in on_disk if one.state in {checkpoints.COMMITTED, checkpoints.VALID}]
    if not on_disk:
        return ""
    nodes = Counter(one.node for one in there)
    newest = max(((one.generation, one.step) for one in there), default=None)
    held = format_node_names(sorted(nodes), 40) or "no node"
    parts = [f"{format_count(len(on_disk), 'checkpoint')} written, {len(there)} there now on {held}"]
    if newest is not None:
        parts.append(f"the newest of step {newest[1]}")
    for state, word in ((checkpoints.BAD, "bad"), (checkpoints.QUARANTINED, "in quarantine")):
        count = sum(one.state == state for one in on_disk)
        parts += [f"{count} {word}"] if count else []
    return ", ".join(parts)
