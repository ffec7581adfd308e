"""A report as a person reads it in a terminal, and as a program reads it.

The table has one row for each generation. Under it stand, in the order in which one asks: what was cut off
in it, copies that were rejected, workers that never came to training, and one line on the whole.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from elastic_resume.report.incidents import FailedStart, Generation, Report
from elastic_resume.report.text import amount, folded, seconds, table, wrap

_HEAD = ("gen", "nodes", "world", "steps", "ended because", "lost", "recovered in")
_MAX_NOTES = 40
_OUTCOMES = {
    "finished": "finished",
    "failed": "FAILED",
    "stopped": "stopped",
    "open": "still running, or killed as a whole",
}


def as_text(report: Report) -> str:
    """Lines for a terminal, at most 120 columns wide."""
    lines = []
    if report.generations:
        rows = [_row(one) for one in report.generations]
        lines += table(_HEAD, rows, right=(0, 2, 3, 5, 6), elastic=4)
    shown = "\n".join(lines)
    notes = [note for one in report.generations for note in _notes(one, shown)]
    notes += _failed_starts(report.failed_starts)
    left_out = len(notes) - _MAX_NOTES
    for note in notes[:_MAX_NOTES]:
        lines += wrap(note)
    if left_out > 0:
        lines.append(f"and {left_out} more notes: see --json")
    return "\n".join([*lines, *wrap(summary(report))]) + "\n"


def as_json(report: Report) -> str:
    """The whole report as one JSON object; its members are named as the fields of `incidents.Report`."""
    return json.dumps(asdict(report), indent=1, allow_nan=False) + "\n"


def summary(report: Report) -> str:
    """The run in one sentence."""
    outcome = _OUTCOMES.get(report.outcome, report.outcome or "never started")
    outcome += f": {report.message}" if report.message else ""
    at = f" at step {report.last_step}" if report.last_step is not None else ""
    counts = [
        amount(len(report.generations), "generation"),
        amount(report.incidents, "incident"),
        f"{amount(report.lost_steps, 'step')} lost",
        f"{amount(report.wasted_steps, 'step')} wasted",
    ]
    return f"{', '.join(counts)}{at}; {outcome}"


def _row(one: Generation) -> tuple[str, ...]:
    return (
        str(one.number),
        folded(one.nodes),
        "-" if one.world_size is None else str(one.world_size),
        _steps(one),
        one.end.text,
        "-" if one.lost_steps is None else str(one.lost_steps),
        seconds(one.recovered_s),
    )


def _steps(one: Generation) -> str:
    if one.first_step is not None and one.last_step is not None:
        return f"{one.first_step}-{one.last_step}"
    return "none" if one.start_step is not None else "?" if one.last_step is None else f"?-{one.last_step}"


def _notes(one: Generation, shown: str) -> list[str]:
    """What the row of a generation has no room for."""
    notes = []
    if one.end.text not in shown:
        notes.append(f"generation {one.number} ended because of {one.end.text}")
    also = one.end.also
    if also:
        more = f"; and {len(also) - 2} more" if len(also) > 2 else ""
        notes.append(f"generation {one.number} also: {'; '.join(also[:2])}{more}")
    if one.lacking:
        notes.append(f"generation {one.number}: {one.source_node} sent its copy to {', '.join(one.lacking)}")
    for copy in one.rejected:
        which = f"generation {copy.generation}, step {copy.step}"
        notes.append(f"generation {one.number} rejected {copy.node}'s copy of {which}: {copy.reason}")
    return notes


def _failed_starts(starts: tuple[FailedStart, ...]) -> list[str]:
    """One line for each gap between generations in which workers ended before they trained."""
    notes = []
    for before in dict.fromkeys(one.before for one in starts):
        here = [one for one in starts if one.before == before]
        first = min(here, key=lambda one: (one.is_echo, one.t))
        where = "after the last generation" if before is None else f"before generation {before}"
        notes.append(f"{where} {amount(len(here), 'worker')} ended before training; first: {first.text}")
    return notes
