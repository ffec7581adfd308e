"""Render a run's report as one self-contained HTML page.

This module prepares plain data; ``report.html.j2`` lays it out with the style sheet ``report.css``. The page
loads nothing and runs no script: its content security policy forbids both. Jinja escapes every value, and
`_printable` replaces control characters first. The timeline is SVG whose horizontal places are percentages,
so it fills any width. Long runs are thinned to what a screen can show: bars become columns that are split by
what filled their time, and marks that would overlap become one with their number.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from elastic_resume import __version__
from elastic_resume.report import checkpoints, summary
from elastic_resume.report import text_report as terminal
from elastic_resume.report.alerts import BAD, NOTE, describe_recurrence
from elastic_resume.report.event_log import ParsedEvent
from elastic_resume.report.formatting import (
    format_bytes,
    format_count,
    format_node_names,
    format_percent,
    format_seconds,
    replace_unprintable,
    truncate,
)
from elastic_resume.report.goodput import RecoveryPhases
from elastic_resume.report.incidents import Generation
from elastic_resume.report.summary import GOODPUT_LABELS, MAX_SILENCE_S, RunReport

MAX_TEXT = 4000  # characters of one value
MAX_STACK = 64 * 1024
MAX_TABLE_ROWS = 100  # of one table; longer ones are cut into several that unfold
MAX_CHECKPOINT_STEPS = 200  # in the table of checkpoints
MAX_OTHER_FAILURES = 4
MAX_LANES = 64
MAX_SPANS = 1000  # of one lane; more are drawn in columns
MAX_COLUMNS = 200
MAX_MARKS = 60  # of one kind in one lane
AXIS_HEIGHT, WORLD_HEIGHT, ROOMY_LANE_HEIGHT, TIGHT_LANE_HEIGHT = (
    20,
    40,
    52,
    34,
)  # heights of the timeline's rows in pixels

INCIDENT, FAULT, ALERT, CHECKPOINT = "incident", "fault", "alert", "checkpoint"
MARK_Y = {CHECKPOINT: 4, ALERT: 3, FAULT: 11, INCIDENT: 7}  # in a swatch; a later one covers an earlier one
LEGEND = {
    "productive": GOODPUT_LABELS["productive"],
    "recomputed": GOODPUT_LABELS["recomputed"],
    "starting": "starting",
    "restoring": "restoring",
    "waiting": "waiting",
    "offline": "offline",
    INCIDENT: "failure",
    FAULT: "injected fault",
    ALERT: "alert",
    CHECKPOINT: "checkpoint",
}
PHASE_LABELS = {
    "detected": "detected",
    "stopped": "workers stopped",
    "rendezvous": "world formed",
    "started": "workers started",
    "restored": "state restored",
}
SHORT_PHASE_LABELS = {"rendezvous": "world", "started": "start", "restored": "restore"}
OUTCOME_LABELS = {
    "finished": ("good", "finished"),
    "failed": ("bad", "failed"),
    "stopped": ("other", "stopped"),
}
STATE_LABELS = {
    checkpoints.VALID: ("good", "on disk, checked"),
    checkpoints.COMMITTED: ("good", "on disk"),
    checkpoints.BAD: ("bad", "BAD"),
    checkpoints.QUARANTINED: ("bad", "set aside"),
    checkpoints.LOST: ("dim", "lost"),
    checkpoints.PRUNED: ("dim", "pruned"),
    checkpoints.USED: ("good", "in memory"),
}


def render_page(report: RunReport, title: str = "") -> str:
    """Return the page of a run; ``title`` replaces the run's name."""

    def later(rows: Sequence[Any]) -> str:
        return f"{terminal.format_since_start(report, rows[0].t)} after the start and later"

    return _template().render(
        told=report,
        title=title or report.run_id or "a run",
        version=__version__,
        since=functools.partial(terminal.format_since_start, report),
        state=_run_state(report),
        tiles=_summary_tiles(report),
        goodput=_bar_parts((what, GOODPUT_LABELS[what], value) for what, value in report.goodput.parts),
        timeline=_draw_timeline(report),
        recoveries=_recovery_bar(report),
        generations=_generation_rows(report),
        failed_starts=_split_table(report.history.failed_starts, later),
        faults=_split_table(_fault_rows(report), lambda rows: later([rows[0]["fault"]])),
        alerts=_split_table(report.alerts, later),
        checkpoints=_checkpoint_rows(report),
    )


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True,
        finalize=_printable,
        keep_trailing_newline=True,
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals["marks"] = MARK_Y
    environment.filters |= {
        "cut": truncate,
        "folded": format_node_names,
        "lines": _preformatted_lines,
        "often": describe_recurrence,
        "or_dash": lambda value: "-" if value is None else value,
        "percent": format_percent,
        "seconds": format_seconds,
        "share": lambda share: f"{100 * share:.3f}%",
        "steps": terminal.format_step_range,
        "utc": _format_utc,
    }
    return environment.get_template("report.html.j2")


def _printable(value: object) -> object:
    """Return what may stand in a page for a value of the template; what is markup already stays."""
    return value if isinstance(value, Markup) else replace_unprintable(truncate(str(value), MAX_TEXT))


def _preformatted_lines(text: str) -> Markup:
    """Return text that keeps its lines, for ``<pre>``."""
    return escape("\n".join(map(replace_unprintable, truncate(text, MAX_STACK).splitlines())))


def _format_utc(t: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(t))
    except (ValueError, OverflowError, OSError):
        return f"{t:.0f} s"


# ---- the head ------------------------------------------------------------------------------------------


def _run_state(report: RunReport) -> tuple[str, str]:
    """Return the run's state as colour and word, in agreement with the verdict."""
    rows = report.history.generations
    if report.history.outcome != "open" or not rows:
        return OUTCOME_LABELS.get(report.history.outcome, ("other", "not begun"))
    if rows[-1].end.is_failure:
        return "bad", "down"
    is_silent = report.silent_s is not None and report.silent_s > MAX_SILENCE_S
    return "other", "silent" if is_silent else "running?"


def _summary_tiles(told: RunReport) -> list[tuple[str, str]]:
    report, costs = told.history, told.downtimes.values()
    steps = [
        (one.generation, one.step)
        for one in told.saved_states
        if one.tier == checkpoints.DISK and one.state in {checkpoints.VALID, checkpoints.COMMITTED}
    ]
    return [
        (
            "-" if told.goodput.share is None else format_percent(told.goodput.share),
            GOODPUT_LABELS["productive"],
        ),
        ("-" if report.last_step is None else f"{report.last_step:,}", "step"),
        (f"{report.num_incidents:,}", "failure" if report.num_incidents == 1 else "failures"),
        (
            f"{report.recomputed_steps:,}",
            "step run again" if report.recomputed_steps == 1 else "steps run again",
        ),
        (format_seconds(statistics.median(costs) if costs else None), "cost of a failure"),
        (f"{max(steps)[1]:,}" if steps else "none", "newest checkpoint's step"),
    ]


def _bar_parts(parts: Iterable[tuple[str, str, float]]) -> list[dict[str, Any]]:
    """Return the pieces of a bar and its legend from kind, words and seconds of each part."""
    listed = [part for part in parts if part[2] > 0]
    whole, x, made = sum(value for _, _, value in listed), 0.0, []
    for kind, word, value in listed:
        made.append({"kind": kind, "word": word, "value": value, "share": value / whole, "x": x})
        x += value / whole
    return made


def _recovery_bar(told: RunReport) -> dict[str, Any] | None:
    """Return the phases of a typical recovery; the first step is not part of it, but is named."""
    medians = dict(terminal.median_phases(told.recoveries.values()))
    parts = _bar_parts((f"p-{name}", word, medians.get(name, 0.0)) for name, word in PHASE_LABELS.items())
    note = "From the last step before, until the state is there again."
    note += f" The first step then takes {format_seconds(medians['step'])}." if "step" in medians else ""
    note += f" Medians of {len(told.recoveries)} recoveries." if len(told.recoveries) > 1 else ""
    return {"parts": parts, "note": note} if parts else None


# ---- tables --------------------------------------------------------------------------------------------


def _split_table(rows: Sequence[Any], name: Callable[[Sequence[Any]], str]) -> list[dict[str, Any]]:
    """Cut a long table into several; ``name`` gives the summary of each."""
    parts = [rows[first : first + MAX_TABLE_ROWS] for first in range(0, len(rows), MAX_TABLE_ROWS)]
    return [{"rows": part, "name": name(part)} for part in parts]


def _generation_rows(told: RunReport) -> list[dict[str, Any]]:
    injected: dict[int | None, list[str]] = {}
    for fault in told.faults:
        injected.setdefault(fault.generation, []).append(f"injected: {fault.text}")
    rows = []
    for one, moment in zip(told.history.generations, told.generation_times, strict=True):
        phases = told.recoveries.get(one.number)
        kind = "failure" if one.end.is_failure else "good" if one.end.kind == "finished" else "other"
        rows.append(
            {
                "one": one,
                "start_t": moment.rendezvous_done_t or moment.restored_t,
                "kind": kind,
                "details": [*injected.get(one.number, []), *_generation_details(one)],
                "phases": _format_phases(phases) if phases else "",
            }
        )

    def name(part: Sequence[Mapping[str, Any]]) -> str:
        here = [row["one"] for row in part]
        failed = format_count(sum(one.end.is_failure for one in here), "failure")
        lost = format_count(sum(one.recomputed_steps or 0 for one in here), "step")
        when = f"{terminal.format_since_start(told, here[0].start_t)} to {terminal.format_since_start(told, here[-1].start_t)}"
        numbers = f"generations {here[0].number} to {here[-1].number}"
        return f"{numbers}: {failed}, {lost} run again; {when} after the start"

    return _split_table(rows, name)


def _format_phases(phases: RecoveryPhases) -> str:
    return " · ".join(
        f"{SHORT_PHASE_LABELS.get(name, name)} {format_seconds(value)}" for name, value in phases.known
    )


def _generation_details(one: Generation) -> list[str]:
    """Return what else failed, which copy the generation began with, and which ones it rejected."""
    also = one.end.other_failures
    told = [f"also: {text}" for text in also[:MAX_OTHER_FAILURES]]
    told += [f"and {len(also) - MAX_OTHER_FAILURES} more"] if len(also) > MAX_OTHER_FAILURES else []
    if one.resume_kind == "checkpoint" and one.source_node:
        sent = f", sent to {format_node_names(one.receiving_nodes, 40)}" if one.receiving_nodes else ""
        told.append(f"began with {one.source_node}'s copy of step {one.start_step}{sent}")
    for copy in one.rejected:
        which = f"generation {copy.generation}, step {copy.step}"
        told.append(f"rejected {copy.node}'s copy of {which}: {copy.reason}")
    return told


def _fault_rows(told: RunReport) -> list[dict[str, Any]]:
    hits = [
        summary.FaultHit(one.t, [one.node] if one.node else [], one.rank, one.kind) for one in told.faults
    ]
    ended = summary.attribute_ends(hits, told.history.generations)
    return [{"fault": one, "ended": here} for one, here in zip(told.faults, ended, strict=True)]


def _checkpoint_rows(told: RunReport) -> dict[str, Any] | None:
    """Return a row for each step of which a copy matters now or has mattered."""
    if not told.saved_states:
        return None
    shown = [one for one in told.saved_states if one.state != checkpoints.PRUNED or one.loaded_by]
    gone = len(told.saved_states) - len(shown)
    note = f"{format_count(len(told.saved_states), 'copy', 'copies')} known"
    note += f"; {gone} that nobody began with were pruned for newer ones and are left out." if gone else "."
    steps: dict[tuple[int, int], dict[tuple[str, str, str], list[str]]] = defaultdict(dict)
    for one in shown:
        began = ", ".join(map(str, one.loaded_by[:6]))
        notes = (format_bytes(one.bytes) if one.bytes else "", began and f"generation {began} began with it")
        alike = (*STATE_LABELS[one.state], "; ".join(filter(None, (*notes, one.reason))))
        steps[one.generation, one.step].setdefault(alike, []).append(one.node)
    newest = sorted(steps.items(), reverse=True)[:MAX_CHECKPOINT_STEPS]
    if len(newest) < len(steps):
        note += f" The newest {MAX_CHECKPOINT_STEPS} of {len(steps)} steps are shown."
    rows = [
        {
            "step": step,
            "generation": generation,
            "copies": [(*alike, nodes) for alike, nodes in alikes.items()],
        }
        for (generation, step), alikes in newest
    ]
    return {"note": note, "chunks": [{"rows": rows}]}


# ---- what each node did when ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """A stretch of one lane, in Unix seconds."""

    activity: str
    start_t: float
    end_t: float
    text: str


@dataclass(frozen=True)
class TimelineMark:
    """A moment in one lane."""

    kind: str
    t: float
    text: str


@dataclass(frozen=True)
class NodeLane:
    """What one node did, as far as its log or the generations that it took part in tell."""

    node: str
    spans: tuple[Span, ...]
    marks: tuple[TimelineMark, ...]


def build_lanes(report: RunReport) -> tuple[NodeLane, ...]:
    """Return a lane for each node, in the order in which they first took part."""
    if report.end_t is None:
        return ()
    parts: dict[str, list[tuple[int, float, float, float]]] = {}
    for one, row in zip(report.generation_times, report.history.generations, strict=True):
        over = one.end_t if row.end.kind in {"finished", "open"} or one.detected_t is None else one.detected_t
        formed = one.rendezvous_done_t if one.rendezvous_done_t is not None else one.restored_t
        for node in row.nodes:
            part = (row.number, formed, one.restored_t, max(over, one.restored_t))
            parts.setdefault(node, []).append(part)
    names = dict.fromkeys([*parts, *sorted(node for node in report.timeline.by_node if node)])
    marks = _marks_by_node(report)
    return tuple(
        NodeLane(node, _lane_spans(report, node, parts.get(node, [])), tuple(marks[node])) for node in names
    )


def _lane_spans(
    told: RunReport, node: str, parts: Sequence[tuple[int, float, float, float]]
) -> tuple[Span, ...]:
    log = told.timeline.by_node.get(node, ())
    came = [one for one in log if one.kind in {"agent-start", "agent-end"}]
    spans: list[Span] = []
    cursor: float | None = None  # where its last part ended
    for number, formed, restored, stopped in parts:
        spans += _absence_spans(came, cursor, formed)
        text = f"generation {number}: prepares for {format_seconds(restored - formed)}"
        spans.append(Span("preparing", formed, restored, text))
        text = f"generation {number}: trains for {format_seconds(stopped - restored)}"
        spans.append(Span("training", restored, stopped, text))
        cursor = stopped
    took_part = bool(parts) and parts[-1][0] == told.history.generations[-1].number
    if told.history.outcome != "finished" or not took_part:
        spans += _absence_spans(came, cursor, told.end_t or 0.0, last=True)
    return tuple(span for span in spans if span.end_t > span.start_t)


def _absence_spans(
    came: Sequence[ParsedEvent], since: float | None, until: float, *, last: bool = False
) -> list[Span]:
    """Return what a node was while no world had it: ``since`` None before its first one."""
    here = [one for one in came if (since is None or one.t > since - 0.5) and one.t < until]
    spans, cursor, is_there = [], since, since is not None and not last
    is_there = is_there and not any(one.kind == "agent-start" for one in here)
    if last and since is not None:
        is_there = any(one.kind == "agent-end" for one in here)
    for one in here:
        if cursor is not None and one.t > cursor:
            spans.append(_absence_span(is_there, cursor, one.t))
        cursor, is_there = one.t, one.kind == "agent-start"
    is_over = last and bool(here) and here[-1].kind == "agent-end"
    if cursor is not None and not is_over:
        spans.append(_absence_span(is_there, cursor, until))
    return spans


def _absence_span(is_there: bool, began: float, until: float) -> Span:
    word = "waits" if is_there else "is offline"
    return Span("idle" if is_there else "offline", began, until, f"{word} for {format_seconds(until - began)}")


def _marks_by_node(told: RunReport) -> Mapping[str, list[TimelineMark]]:
    marks: dict[str, list[TimelineMark]] = defaultdict(list)
    for copy in told.saved_states:
        if copy.t is not None and copy.tier == checkpoints.DISK:
            marks[copy.node].append(TimelineMark(CHECKPOINT, copy.t, f"checkpoint of step {copy.step}"))
    for one in told.alerts:
        if one.severity in {BAD, NOTE}:
            marks[one.node].append(TimelineMark(ALERT, one.t, one.text))
    for fault in told.faults:
        marks[fault.node].append(TimelineMark(FAULT, fault.t, f"injected: {fault.text}"))
    for moment, row in zip(told.generation_times, told.history.generations, strict=True):
        t = row.end.t if row.end.t is not None else moment.detected_t
        if row.end.is_failure and t is not None:
            for node in [row.end.node] if row.end.node else row.nodes:
                marks[node].append(TimelineMark(INCIDENT, t, f"generation {row.number}: {row.end.text}"))
    return marks


@dataclass(frozen=True)
class TimeColumn:
    """A piece of a bar, and the shares of its time by what filled it; the rest is nothing."""

    start_t: float
    end_t: float
    shares: tuple[tuple[str, float], ...]


def merge_into_columns(
    spans: Iterable[Span], start_t: float, end_t: float, max_columns: int
) -> list[TimeColumn]:
    """Return at most ``dots`` columns for any number of spans, with every share of the time."""
    width = (end_t - start_t) / max_columns
    filled: list[dict[str, float]] = [defaultdict(float) for _ in range(max_columns)]
    whole: dict[str, float] = defaultdict(float)
    for span in spans:
        whole[span.activity] += span.end_t - span.start_t
        first = max(0, int((span.start_t - start_t) / width))
        for dot in range(first, min(max_columns, int((span.end_t - start_t) / width) + 1)):
            low, high = start_t + dot * width, start_t + (dot + 1) * width
            filled[dot][span.activity] += max(0.0, min(span.end_t, high) - max(span.start_t, low))
    order = sorted(whole, key=lambda what: -whole[what])
    made: list[TimeColumn] = []
    for dot, spent in enumerate(filled):
        low, high = start_t + dot * width, start_t + (dot + 1) * width
        found = ((what, round(spent.get(what, 0.0) / width, 3)) for what in order)
        shares = tuple((what, share) for what, share in found if share)
        if made and made[-1].shares == shares and made[-1].end_t > low - width / 2:
            made[-1] = TimeColumn(made[-1].start_t, high, shares)
        elif shares:
            made.append(TimeColumn(low, high, shares))
    return made


def cluster_marks(
    marks: Iterable[TimelineMark], start_t: float, end_t: float, max_marks: int
) -> list[TimelineMark]:
    """Return at most ``dots`` marks of each kind: those that would overlap become one with their number."""
    width = (end_t - start_t) / max_marks if end_t > start_t else 1.0
    near: dict[tuple[str, int], list[TimelineMark]] = defaultdict(list)
    for mark in sorted(marks, key=lambda mark: mark.t):
        near[mark.kind, int((mark.t - start_t) / width)].append(mark)
    found = []
    for (what, _), here in near.items():
        text = (
            here[0].text if len(here) == 1 else f"{format_count(len(here), what)}, the first: {here[0].text}"
        )
        found.append(TimelineMark(what, here[len(here) // 2].t, text))
    return found


# ---- the timeline as it is drawn -----------------------------------------------------------------------


class TimeScale:
    """The times from the left to the right edge of the drawing."""

    def __init__(self, began: float, until: float) -> None:
        self.start_t, self.end_t = began, max(until, began + 1e-3)
        self.duration_s = self.end_t - began

    def position(self, t: float) -> float:
        """Return the place of a time, from 0 to 1."""
        return min(1.0, max(0.0, (t - self.start_t) / self.duration_s))

    def ticks(self) -> list[dict[str, Any]]:
        """Return about four round times along the axis."""
        nice = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800]
        nice += [hours * 3600 for hours in (1, 2, 3, 6, 12, 24, 48, 96, 168)]
        weeks = math.ceil(self.duration_s / 4 / 604800) * 604800
        gap = next((float(gap) for gap in nice if self.duration_s / gap <= 4.5), float(weeks))
        gap = self.duration_s / 2 if self.duration_s < 1 else gap
        places = [
            (index * gap, index * gap / self.duration_s) for index in range(int(self.duration_s / gap) + 1)
        ]
        return [
            {
                "x": x,
                "label": _format_tick(t),
                "anchor": "start" if x < 0.03 else "end" if x > 0.94 else "middle",
            }
            for t, x in places
        ]

    def bars(self, spans: Sequence[Span], y: float, height: float, dots: int) -> list[dict[str, Any]]:
        """Return a rectangle for each span, or columns in several pieces where there are too many."""
        if len(spans) <= MAX_SPANS:
            return [
                self._rectangle(one, one.text, [(one.activity, f"{y:g}", f"{height:g}")]) for one in spans
            ]
        made = []
        for column in merge_into_columns(spans, self.start_t, self.end_t, dots):
            pieces, bottom = [], y + height
            for what, share in column.shares:
                bottom -= share * height
                pieces.append((what, f"{bottom:.2f}", f"{share * height:.2f}"))
            text = ", ".join(f"{format_percent(share)} {what}" for what, share in column.shares)
            made.append(self._rectangle(column, text, pieces))
        return made

    def _rectangle(
        self, one: Span | TimeColumn, text: str, pieces: list[tuple[str, str, str]]
    ) -> dict[str, Any]:
        x = self.position(one.start_t)
        return {"x": x, "width": max(0.0005, self.position(one.end_t) - x), "text": text, "pieces": pieces}


def _format_tick(value: float) -> str:
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if value >= unit:
            return f"{value / unit:.4g} {name}"
    return f"{value:.3g} s" if value else "0"


def _draw_timeline(told: RunReport) -> dict[str, Any] | None:
    if told.start_t is None or told.end_t is None:
        return None
    every = build_lanes(told)
    shown = _busiest_lanes(every)
    row, bar_y, bar, dots = (
        (ROOMY_LANE_HEIGHT, 24, 14, MAX_COLUMNS)
        if len(shown) <= 12
        else (TIGHT_LANE_HEIGHT, 16, 11, MAX_COLUMNS // 4)
    )
    frame = TimeScale(told.start_t, told.end_t)
    spans = [
        Span(
            one.activity,
            one.start_t,
            one.end_t,
            f"{one.activity} for {format_seconds(one.end_t - one.start_t)}",
        )
        for one in told.slices
    ]
    seen = {one.activity for one in told.slices}
    seen |= {span.activity for lane in every for span in lane.spans}
    seen |= {mark.kind for lane in every for mark in lane.marks}
    notes = ["Too much to draw one by one: each column of a bar is split by what its time went into."]
    clocks = [terminal.describe_clock_offset(one) for one in told.clocks[:5]]
    left_out = f", the {len(shown)} with most incidents are drawn" if len(shown) < len(every) else ""
    generations = format_count(len(told.history.generations), "generation")
    begins = [
        one.rendezvous_done_t if one.rendezvous_done_t is not None else one.restored_t
        for one in told.generation_times
    ]
    return {
        "height": AXIS_HEIGHT + WORLD_HEIGHT + row * len(shown) + 6,
        "description": f"{generations} of {format_count(len(every), 'node')}{left_out}, "
        f"{format_count(told.history.num_incidents, 'failure')}, {format_seconds(told.goodput.total_s)}. "
        "The same is in the tables below.",
        "ticks": frame.ticks(),
        "world": frame.bars(spans, AXIS_HEIGHT + 17, 14, MAX_COLUMNS),
        "begins": [frame.position(t) for t in begins] if len(begins) <= MAX_SPANS else [],
        "numbers": _generation_labels(told, frame, begins),
        "lanes": [
            {
                "node": lane.node,
                "y": y + 12,
                "bars": frame.bars(lane.spans, y + bar_y, bar, dots),
                "marks": _place_marks(lane.marks, frame, y + bar_y, bar),
            }
            for y, lane in zip(range(AXIS_HEIGHT + WORLD_HEIGHT, 1 << 30, row), shown, strict=False)
        ],
        "legend": [(kind, word) for kind, word in LEGEND.items() if kind in seen],
        "notes": [
            *(notes if len(told.slices) > MAX_SPANS else []),
            *(f"{one[:1].upper()}{one[1:]}." for one in clocks),
        ],
    }


def _busiest_lanes(every: Sequence[NodeLane]) -> Sequence[NodeLane]:
    """Return the lanes to which most happened, in their own order."""
    busy = sorted(every, key=lambda lane: -sum(mark.kind != CHECKPOINT for mark in lane.marks))
    chosen = {lane.node for lane in busy[:MAX_LANES]}
    return [lane for lane in every if lane.node in chosen]


def _generation_labels(told: RunReport, frame: TimeScale, begins: Sequence[float]) -> list[tuple[float, int]]:
    """Return the numbers of generations, with their places, where there is room for them."""
    made, free = [], 0.0
    for one, began, until in zip(told.generation_times, begins, [*begins[1:], frame.end_t], strict=False):
        x = frame.position(began)
        if x >= free and frame.position(until) - x > 0.015:
            made.append((x, one.number))
            free = x + 0.025 + 0.02 * len(str(one.number))
    return made


def _place_marks(
    marks: Iterable[TimelineMark], frame: TimeScale, bar_y: float, bar: float
) -> list[tuple[float, str, TimelineMark]]:
    places = {CHECKPOINT: bar_y + bar + 2, ALERT: bar_y + bar + 2, FAULT: bar_y - 2}
    found = cluster_marks(marks, frame.start_t, frame.end_t, MAX_MARKS)
    found.sort(key=lambda mark: list(MARK_Y).index(mark.kind))
    return [(frame.position(one.t), f"{places.get(one.kind, bar_y + bar / 2):g}", one) for one in found]
