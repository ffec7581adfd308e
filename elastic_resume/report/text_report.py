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
from elastic_resume.report.alerts import NEWS, described
from elastic_resume.report.clock_alignment import Clock
from elastic_resume.report.formatting import amount, cut, folded, percent, seconds, table, wrap
from elastic_resume.report.goodput import NAMES, Phases
from elastic_resume.report.incidents import FailedStart, Generation
from elastic_resume.report.summary import PARTS, Story

_HEAD = ("gen", "nodes", "world", "steps", "ended because", "lost", "recovered in")
MAX_ROWS = 40
MAX_NOTES = 40
MAX_TROUBLES = 20
MAX_CHARS = 600  # of one note: an exception may have said anything; --json has all of it
PHASES = {
    "noticed": "to notice it",
    "stopped": "to stop workers",
    "formed": "to form a world",
    "started": "to start workers",
    "restored": "to restore the state",
    "step": "for a step",
}


def as_text(told: Story) -> str:
    """Lines for a terminal, at most 100 columns wide."""
    lines = wrap(told.verdict.text)
    for look in told.verdict.look:
        lines += wrap(cut(f"look at: {look}", MAX_CHARS))
    rows = told.report.generations
    if rows:
        left_out = max(0, len(rows) - MAX_ROWS)
        lines += [
            "",
            *([f"{amount(left_out, 'generation')} before these: see --html or --json"] if left_out else []),
        ]
        lines += table(_HEAD, [_row(one) for one in rows[left_out:]], right=(0, 2, 3, 5, 6), elastic=4)
    shown = "\n".join(lines)
    notes = [note for one in rows for note in _notes(one, shown)]
    notes += _failed_starts(told.report.failed_starts)
    lines += _some(notes, MAX_NOTES)
    dated = [*_troubles(told), *_faults(told)]
    dated = [*sorted(dated[:MAX_TROUBLES], key=itemgetter(0)), *dated[MAX_TROUBLES:]]
    odd = [*(text for _, text in dated), *map(clock, told.clocks)]
    lines += ["", *_some(odd, MAX_TROUBLES)] if odd else []
    figures = [line for line in (_time(told), _recoveries(told.recoveries.values()), _copies(told)) if line]
    lines += ["", *(part for line in figures for part in wrap(line))] if figures else []
    return "\n".join(lines) + "\n"


def _some(notes: Sequence[str], limit: int) -> list[str]:
    lines = [line for note in notes[:limit] for line in wrap(cut(note, MAX_CHARS))]
    left_out = len(notes) - limit
    return [*lines, *([f"and {left_out} more: see --html or --json"] if left_out > 0 else [])]


def _row(one: Generation) -> tuple[str, ...]:
    return (
        str(one.number),
        folded(one.nodes),
        "-" if one.world_size is None else str(one.world_size),
        steps(one),
        one.end.text,
        "-" if one.lost_steps is None else str(one.lost_steps),
        seconds(one.recovered_s),
    )


def steps(one: Generation) -> str:
    """The steps that a generation ran."""
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


def since(told: Story, t: float) -> str:
    """A time, counted from the run's first event."""
    return seconds(max(0.0, t - told.began)) if told.began is not None else "-"


def _troubles(told: Story) -> list[tuple[float, str]]:
    return [
        (
            one.t,
            f"at {since(told, one.t)}  {one.node or '-'}: {one.text}"
            + (f" ({often})" if (often := described(one)) else ""),
        )
        for one in told.troubles
        if one.weight != NEWS
    ]


def _faults(told: Story) -> list[tuple[float, str]]:
    return [
        (
            one.t,
            f"at {since(told, one.t)}  injected: {one.text}"
            + (f", in generation {one.generation}" if one.generation is not None else ""),
        )
        for one in told.faults
    ]


def clock(one: Clock) -> str:
    """Whose clock was off, as a sentence."""
    return f"{one.text}; durations here do not depend on it"


def _time(told: Story) -> str:
    whole = told.goodput.total_s
    if whole <= 0:
        return ""
    told_of = [(name, value) for name, value in told.goodput.parts if value >= whole / 1e4]
    spent = [f"{percent(value / whole)} {PARTS[name]}" for name, value in told_of]
    return f"of {seconds(whole)}: {', '.join(spent)}"


def typical(recoveries: Iterable[Phases]) -> list[tuple[str, float]]:
    """The median of each phase of the recoveries, by name, where it is known."""
    listed = list(recoveries)
    found = []
    for name in NAMES:
        values = [value for one in listed if (value := getattr(one, f"{name}_s")) is not None]
        if values:
            found.append((name, statistics.median(values)))
    return found


def _recoveries(recoveries: Iterable[Phases]) -> str:
    listed = list(recoveries)
    spent = ", ".join(f"{seconds(value)} {PHASES[name]}" for name, value in typical(listed))
    which = "the recovery took" if len(listed) == 1 else f"{len(listed)} recoveries took (medians)"
    return f"{which}: {spent}" if spent else ""


def _copies(told: Story) -> str:
    on_disk = [one for one in told.copies if one.tier == checkpoints.DISK]
    there = [one for one in on_disk if one.state in {checkpoints.COMMITTED, checkpoints.VALID}]
    if not on_disk:
        return ""
    nodes = Counter(one.node for one in there)
    newest = max(((one.generation, one.step) for one in there), default=None)
    held = folded(sorted(nodes), 40) or "no node"
    parts = [f"{amount(len(on_disk), 'checkpoint')} written, {len(there)} there now on {held}"]
    if newest is not None:
        parts.append(f"the newest of step {newest[1]}")
    for state, word in ((checkpoints.BAD, "bad"), (checkpoints.QUARANTINED, "in quarantine")):
        count = sum(one.state == state for one in on_disk)
        parts += [f"{count} {word}"] if count else []
    return ", ".join(parts)
