"""Render a run's report as one self-contained HTML page.

This module prepares plain data; ``report.html.j2`` lays it out with the style sheet ``report.css``. The
page loads nothing and runs no script: its content security policy forbids both. Jinja escapes every
value, and `_printable` replaces control characters first. The timeline is SVG whose horizontal positions
are percentages, so it fits any width. Long runs are thinned to what a screen can show: bars become
columns with the shares of their time, and marks that would overlap become one mark with a count.
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
MAX_TABLE_ROWS = 100  # longer tables are cut into several that unfold
MAX_CHECKPOINT_STEPS = 200
MAX_OTHER_FAILURES = 4
MAX_LANES = 64
MAX_SPANS = 1000  # of one lane; more become columns
MAX_COLUMNS = 200
MAX_MARKS = 60  # of one kind in one lane
AXIS_HEIGHT, WORLD_HEIGHT, ROOMY_LANE_HEIGHT, TIGHT_LANE_HEIGHT = 20, 40, 52, 34  # pixels

INCIDENT, FAULT, ALERT, CHECKPOINT = "incident", "fault", "alert", "checkpoint"
MARK_Y = {CHECKPOINT: 4, ALERT: 3, FAULT: 11, INCIDENT: 7}  # in a swatch; later kinds cover earlier ones
LEGEND = {
    **GOODPUT_LABELS,
    "offline": "offline",
    INCIDENT: "failure",
    FAULT: "injected fault",
    ALERT: "alert",
    CHECKPOINT: "checkpoint",
}
PHASE_LABELS = {
    "detected": "detected",
    "stopped": "workers stopped",
    "rendezvous": "rendezvous",
    "started": "workers started",
    "restored": "state restored",
}
OUTCOME_LABELS = {
    "finished": ("good", "finished"),
    "failed": ("bad", "failed"),
    "stopped": ("other", "stopped"),
}
STATE_LABELS = {
    checkpoints.VALID: ("good", "on disk, checked"),
    checkpoints.COMMITTED: ("good", "on disk"),
    checkpoints.BAD: ("bad", "BAD"),
    checkpoints.QUARANTINED: ("bad", "quarantined"),
    checkpoints.LOST: ("dim", "lost"),
    checkpoints.PRUNED: ("dim", "pruned"),
    checkpoints.USED: ("good", "in memory"),
}


def render_page(report: RunReport, title: str = "") -> str:
    """Return the page of a run; ``title`` replaces the run's name."""

    def later(part: Sequence[Any]) -> str:
        return f"{terminal.format_since_start(report, part[0].t)} after the start and later"

    return _template().render(
        report=report,
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
        faults=_split_table(_fault_rows(report), lambda part: later([part[0]["fault"]])),
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
        "count": format_count,
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
    """Return a template's value as printable text; markup stays as it is."""
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
        return OUTCOME_LABELS.get(report.history.outcome, ("other", "not started"))
    if rows[-1].end.is_failure:
        return "bad", "down"
    is_silent = report.silent_s is not None and report.silent_s > MAX_SILENCE_S
    return "other", "silent" if is_silent else "running?"


def _summary_tiles(report: RunReport) -> list[tuple[str, str]]:
    history, downtimes = report.history, report.downtimes.values()
    steps = [
        (record.generation, record.step)
        for record in report.saved_states
        if record.tier == checkpoints.DISK and record.state in {checkpoints.VALID, checkpoints.COMMITTED}
    ]
    return [
        ("-" if report.goodput.share is None else format_percent(report.goodput.share), "goodput"),
        ("-" if history.last_step is None else f"{history.last_step:,}", "step"),
        (f"{history.num_incidents:,}", "failure" if history.num_incidents == 1 else "failures"),
        (
            f"{history.recomputed_steps:,}",
            "recomputed step" if history.recomputed_steps == 1 else "recomputed steps",
        ),
        (
            format_seconds(statistics.median(downtimes) if downtimes else None),
            "downtime of a failure (median)",
        ),
        (f"{max(steps)[1]:,}" if steps else "none", "newest checkpoint's step"),
    ]


def _bar_parts(parts: Iterable[tuple[str, str, float]]) -> list[dict[str, Any]]:
    """Return the pieces of a bar and its legend from (kind, words, seconds) of each part."""
    nonzero = [part for part in parts if part[2] > 0]
    total, x, pieces = sum(value for _, _, value in nonzero), 0.0, []
    for kind, word, value in nonzero:
        pieces.append({"kind": kind, "word": word, "value": value, "share": value / total, "x": x})
        x += value / total
    return pieces


def _recovery_bar(report: RunReport) -> dict[str, Any] | None:
    """Return the median phases of a recovery; the first step is a note, not a part."""
    medians = dict(terminal.median_phases(list(report.recoveries.values())))
    parts = _bar_parts((f"p-{name}", word, medians.get(name, 0.0)) for name, word in PHASE_LABELS.items())
    note = "From the last step before the failure until the state is restored."
    note += f" The first step takes {format_seconds(medians['step'])}." if "step" in medians else ""
    note += f" Medians of {len(report.recoveries)} recoveries." if len(report.recoveries) > 1 else ""
    return {"parts": parts, "note": note} if parts else None


# ---- tables --------------------------------------------------------------------------------------------


def _split_table(rows: Sequence[Any], summarize: Callable[[Sequence[Any]], str]) -> list[dict[str, Any]]:
    """Cut a long table into several; ``summarize`` gives the summary of each."""
    chunks = [rows[first : first + MAX_TABLE_ROWS] for first in range(0, len(rows), MAX_TABLE_ROWS)]
    return [{"rows": part, "name": summarize(part)} for part in chunks]


def _generation_rows(report: RunReport) -> list[dict[str, Any]]:
    injected: dict[int | None, list[str]] = {}
    for fault in report.faults:
        injected.setdefault(fault.generation, []).append(f"injected: {fault.text}")
    rows = []
    for generation, times in zip(report.history.generations, report.generation_times, strict=True):
        phases = report.recoveries.get(generation.number)
        kind = {"finished": "good"}.get(generation.end.kind, "other")
        rows.append(
            {
                "one": generation,
                "start_t": times.start_t,
                "kind": "failure" if generation.end.is_failure else kind,
                "details": [*injected.get(generation.number, []), *_generation_details(generation)],
                "phases": _format_phases(phases) if phases else "",
            }
        )

    def summarize(part: Sequence[Mapping[str, Any]]) -> str:
        generations = [row["one"] for row in part]
        first, last = generations[0], generations[-1]
        failed = format_count(sum(generation.end.is_failure for generation in generations), "failure")
        steps = format_count(sum(generation.recomputed_steps or 0 for generation in generations), "step")
        since, until = (terminal.format_since_start(report, each.start_t) for each in (first, last))
        return (
            f"generations {first.number} to {last.number}: {failed}, {steps} recomputed; "
            f"{since} to {until} after the start"
        )

    return _split_table(rows, summarize)


def _format_phases(phases: RecoveryPhases) -> str:
    return " · ".join(f"{name} {format_seconds(value)}" for name, value in phases.known)


def _generation_details(generation: Generation) -> list[str]:
    """Return other failures, the state that the generation started from, and rejected states."""
    others = generation.end.other_failures
    details = [f"also: {text}" for text in others[:MAX_OTHER_FAILURES]]
    details += [f"and {len(others) - MAX_OTHER_FAILURES} more"] if len(others) > MAX_OTHER_FAILURES else []
    if generation.resume_kind == "checkpoint" and generation.source_node:
        details.append(f"started from {generation.source_node}'s state of step {generation.start_step}")
        if generation.receiving_nodes:
            details.append(f"sent it to {format_node_names(generation.receiving_nodes, 40)}")
    for record in generation.rejected:
        version = f"generation {record.generation}, step {record.step}"
        details.append(f"rejected {record.node}'s state of {version}: {record.reason}")
    return details


def _fault_rows(report: RunReport) -> list[dict[str, Any]]:
    hits = [
        summary.FaultHit(fault.t, [fault.node] if fault.node else [], fault.rank, fault.kind)
        for fault in report.faults
    ]
    ended = summary.attribute_ends(hits, report.history.generations)
    return [
        {"fault": fault, "ended": ended_here} for fault, ended_here in zip(report.faults, ended, strict=True)
    ]


def _checkpoint_rows(report: RunReport) -> dict[str, Any] | None:
    """Return a row for each step with a snapshot or checkpoint that was kept or loaded."""
    if not report.saved_states:
        return None
    shown = [
        record for record in report.saved_states if record.state != checkpoints.PRUNED or record.loaded_by
    ]
    num_hidden = len(report.saved_states) - len(shown)
    note = format_count(len(report.saved_states), "snapshot or checkpoint", "snapshots and checkpoints")
    note += " known."
    note += f" {num_hidden} of them were pruned, never loaded, and are not shown." if num_hidden else ""
    steps: dict[tuple[int, int], dict[tuple[str, str, str], list[str]]] = defaultdict(dict)
    for record in shown:
        loaded_by = ", ".join(map(str, record.loaded_by[:6]))
        notes = (
            format_bytes(record.bytes) if record.bytes else "",
            loaded_by and f"loaded by generation {loaded_by}",
        )
        key = (*STATE_LABELS[record.state], "; ".join(filter(None, (*notes, record.reason))))
        steps[record.generation, record.step].setdefault(key, []).append(record.node)
    newest = sorted(steps.items(), reverse=True)[:MAX_CHECKPOINT_STEPS]
    if len(newest) < len(steps):
        note += f" The newest {MAX_CHECKPOINT_STEPS} of {len(steps)} steps are shown."
    rows = [
        {"step": step, "generation": generation, "copies": [(*key, nodes) for key, nodes in groups.items()]}
        for (generation, step), groups in newest
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
    """What one node did, from its log and the generations it took part in."""

    node: str
    spans: tuple[Span, ...]
    marks: tuple[TimelineMark, ...]


def build_lanes(report: RunReport) -> tuple[NodeLane, ...]:
    """Return a lane for each node, in the order in which they first took part."""
    if report.end_t is None:
        return ()
    parts_by_node: dict[str, list[tuple[int, float, float, float]]] = {}
    for times, row in zip(report.generation_times, report.history.generations, strict=True):
        end_t = (
            times.end_t
            if row.end.kind in {"finished", "open"} or times.detected_t is None
            else times.detected_t
        )
        for node in row.nodes:
            part = (row.number, times.start_t, times.restored_t, max(end_t, times.restored_t))
            parts_by_node.setdefault(node, []).append(part)
    nodes = dict.fromkeys([*parts_by_node, *sorted(node for node in report.timeline.by_node if node)])
    marks = _marks_by_node(report)
    return tuple(
        NodeLane(node, _lane_spans(report, node, parts_by_node.get(node, [])), tuple(marks[node]))
        for node in nodes
    )


def _lane_spans(
    report: RunReport, node: str, parts: Sequence[tuple[int, float, float, float]]
) -> tuple[Span, ...]:
    log = report.timeline.by_node.get(node, ())
    agent_events = [event for event in log if event.kind in {"agent-start", "agent-end"}]
    spans: list[Span] = []
    cursor: float | None = None  # where its last part ended
    for number, world_t, restored_t, end_t in parts:
        spans += _absence_spans(agent_events, cursor, world_t)
        text = f"generation {number}: prepares for {format_seconds(restored_t - world_t)}"
        spans.append(Span("preparing", world_t, restored_t, text))
        text = f"generation {number}: trains for {format_seconds(end_t - restored_t)}"
        spans.append(Span("training", restored_t, end_t, text))
        cursor = end_t
    took_part_last = bool(parts) and parts[-1][0] == report.history.generations[-1].number
    if report.history.outcome != "finished" or not took_part_last:
        spans += _absence_spans(agent_events, cursor, report.end_t or 0.0, last=True)
    return tuple(span for span in spans if span.end_t > span.start_t)


def _absence_spans(
    agent_events: Sequence[ParsedEvent], start_t: float | None, end_t: float, *, last: bool = False
) -> list[Span]:
    """Return what a node did while it was in no world; ``start_t`` is None before its first one."""
    events = [
        event for event in agent_events if (start_t is None or event.t > start_t - 0.5) and event.t < end_t
    ]
    spans, cursor, is_there = [], start_t, start_t is not None and not last
    is_there = is_there and not any(event.kind == "agent-start" for event in events)
    if last and start_t is not None:
        is_there = any(event.kind == "agent-end" for event in events)
    for event in events:
        if cursor is not None and event.t > cursor:
            spans.append(_absence_span(is_there, cursor, event.t))
        cursor, is_there = event.t, event.kind == "agent-start"
    is_over = last and bool(events) and events[-1].kind == "agent-end"
    if cursor is not None and not is_over:
        spans.append(_absence_span(is_there, cursor, end_t))
    return spans


def _absence_span(is_there: bool, start_t: float, end_t: float) -> Span:
    state = "waits" if is_there else "is offline"
    return Span(
        "idle" if is_there else "offline", start_t, end_t, f"{state} for {format_seconds(end_t - start_t)}"
    )


def _marks_by_node(report: RunReport) -> Mapping[str, list[TimelineMark]]:
    marks: dict[str, list[TimelineMark]] = defaultdict(list)
    for record in report.saved_states:
        if record.t is not None and record.tier == checkpoints.DISK:
            marks[record.node].append(TimelineMark(CHECKPOINT, record.t, f"checkpoint of step {record.step}"))
    for alert in report.alerts:
        if alert.severity in {BAD, NOTE}:
            marks[alert.node].append(TimelineMark(ALERT, alert.t, alert.text))
    for fault in report.faults:
        marks[fault.node].append(TimelineMark(FAULT, fault.t, f"injected: {fault.text}"))
    for times, row in zip(report.generation_times, report.history.generations, strict=True):
        t = row.end.t if row.end.t is not None else times.detected_t
        if row.end.is_failure and t is not None:
            for node in [row.end.node] if row.end.node else row.nodes:
                marks[node].append(TimelineMark(INCIDENT, t, f"generation {row.number}: {row.end.text}"))
    return marks


@dataclass(frozen=True)
class TimeColumn:
    """A piece of a bar with the shares of its time; the rest is empty."""

    start_t: float
    end_t: float
    shares: tuple[tuple[str, float], ...]


def merge_into_columns(
    spans: Iterable[Span], start_t: float, end_t: float, max_columns: int
) -> list[TimeColumn]:
    """Merge any number of spans into at most ``max_columns`` columns that keep every share."""
    width = (end_t - start_t) / max_columns
    filled: list[dict[str, float]] = [defaultdict(float) for _ in range(max_columns)]
    whole: dict[str, float] = defaultdict(float)
    for span in spans:
        whole[span.activity] += span.end_t - span.start_t
        first = max(0, int((span.start_t - start_t) / width))
        for index in range(first, min(max_columns, int((span.end_t - start_t) / width) + 1)):
            low, high = start_t + index * width, start_t + (index + 1) * width
            filled[index][span.activity] += max(0.0, min(span.end_t, high) - max(span.start_t, low))
    order = sorted(whole, key=lambda activity: -whole[activity])
    columns: list[TimeColumn] = []
    for index, shares_of_column in enumerate(filled):
        low, high = start_t + index * width, start_t + (index + 1) * width
        rounded = ((activity, round(shares_of_column.get(activity, 0.0) / width, 3)) for activity in order)
        shares = tuple((activity, share) for activity, share in rounded if share)
        if columns and columns[-1].shares == shares and columns[-1].end_t > low - width / 2:
            columns[-1] = TimeColumn(columns[-1].start_t, high, shares)
        elif shares:
            columns.append(TimeColumn(low, high, shares))
    return columns


def cluster_marks(
    marks: Iterable[TimelineMark], start_t: float, end_t: float, max_marks: int
) -> list[TimelineMark]:
    """Return at most ``max_marks`` marks of each kind; marks that would overlap become one with a count."""
    width = (end_t - start_t) / max_marks if end_t > start_t else 1.0
    groups: dict[tuple[str, int], list[TimelineMark]] = defaultdict(list)
    for mark in sorted(marks, key=lambda mark: mark.t):
        groups[mark.kind, int((mark.t - start_t) / width)].append(mark)
    clusters = []
    for (kind, _), group in groups.items():
        text = (
            group[0].text
            if len(group) == 1
            else f"{format_count(len(group), kind)}, the first: {group[0].text}"
        )
        clusters.append(TimelineMark(kind, group[len(group) // 2].t, text))
    return clusters


# ---- the timeline as it is drawn -----------------------------------------------------------------------


class TimeScale:
    """The time axis of the drawing, from left to right."""

    def __init__(self, start_t: float, end_t: float) -> None:
        self.start_t, self.end_t = start_t, max(end_t, start_t + 1e-3)
        self.duration_s = self.end_t - start_t

    def position(self, t: float) -> float:
        """Return the position of a time, from 0 to 1."""
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

    def bars(self, spans: Sequence[Span], y: float, height: float, max_columns: int) -> list[dict[str, Any]]:
        """Return a rectangle for each span, or columns if there are too many."""
        if len(spans) <= MAX_SPANS:
            return [
                self._rectangle(span, span.text, [(span.activity, f"{y:g}", f"{height:g}")]) for span in spans
            ]
        rectangles = []
        for column in merge_into_columns(spans, self.start_t, self.end_t, max_columns):
            pieces, bottom = [], y + height
            for activity, share in column.shares:
                bottom -= share * height
                pieces.append((activity, f"{bottom:.2f}", f"{share * height:.2f}"))
            text = ", ".join(f"{format_percent(share)} {activity}" for activity, share in column.shares)
            rectangles.append(self._rectangle(column, text, pieces))
        return rectangles

    def _rectangle(
        self, span: Span | TimeColumn, text: str, pieces: list[tuple[str, str, str]]
    ) -> dict[str, Any]:
        x = self.position(span.start_t)
        return {"x": x, "width": max(0.0005, self.position(span.end_t) - x), "text": text, "pieces": pieces}


def _format_tick(value: float) -> str:
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if value >= unit:
            return f"{value / unit:.4g} {name}"
    return f"{value:.3g} s" if value else "0"


def _draw_timeline(report: RunReport) -> dict[str, Any] | None:
    if report.start_t is None or report.end_t is None:
        return None
    lanes = build_lanes(report)
    shown = _busiest_lanes(lanes)
    lane_height, bar_y, bar_height, max_columns = (
        (ROOMY_LANE_HEIGHT, 24, 14, MAX_COLUMNS)
        if len(shown) <= 12
        else (TIGHT_LANE_HEIGHT, 16, 11, MAX_COLUMNS // 4)
    )
    scale = TimeScale(report.start_t, report.end_t)
    spans = [
        Span(
            item.activity,
            item.start_t,
            item.end_t,
            f"{item.activity} for {format_seconds(item.end_t - item.start_t)}",
        )
        for item in report.slices
    ]
    seen = {item.activity for item in report.slices}
    seen |= {span.activity for lane in lanes for span in lane.spans}
    seen |= {mark.kind for lane in lanes for mark in lane.marks}
    notes = ["Too many spans to draw: each column of a bar shows the shares of its time."]
    clocks = [terminal.describe_clock_offset(item) for item in report.clocks[:5]]
    left_out = (
        f", the {len(shown)} with the most failures, faults and alerts are drawn"
        if len(shown) < len(lanes)
        else ""
    )
    generations = format_count(len(report.history.generations), "generation")
    generation_starts = [times.start_t for times in report.generation_times]
    return {
        "height": AXIS_HEIGHT + WORLD_HEIGHT + lane_height * len(shown) + 6,
        "description": f"{generations} of {format_count(len(lanes), 'node')}{left_out}, "
        f"{format_count(report.history.num_incidents, 'failure')}, {format_seconds(report.goodput.total_s)}. "
        "The tables below contain the same.",
        "ticks": scale.ticks(),
        "world": scale.bars(spans, AXIS_HEIGHT + 17, 14, MAX_COLUMNS),
        "begins": [scale.position(t) for t in generation_starts]
        if len(generation_starts) <= MAX_SPANS
        else [],
        "numbers": _generation_labels(report, scale, generation_starts),
        "lanes": [
            {
                "node": lane.node,
                "y": y + 12,
                "bars": scale.bars(lane.spans, y + bar_y, bar_height, max_columns),
                "marks": _place_marks(lane.marks, scale, y + bar_y, bar_height),
            }
            for y, lane in zip(range(AXIS_HEIGHT + WORLD_HEIGHT, 1 << 30, lane_height), shown, strict=False)
        ],
        "legend": [(kind, word) for kind, word in LEGEND.items() if kind in seen],
        "notes": [
            *(notes if len(report.slices) > MAX_SPANS else []),
            *(f"{item[:1].upper()}{item[1:]}." for item in clocks),
        ],
    }


def _busiest_lanes(lanes: Sequence[NodeLane]) -> Sequence[NodeLane]:
    """Return the lanes with the most marks, in their own order."""
    ordered = sorted(lanes, key=lambda lane: -sum(mark.kind != CHECKPOINT for mark in lane.marks))
    chosen = {lane.node for lane in ordered[:MAX_LANES]}
    return [lane for lane in lanes if lane.node in chosen]


def _generation_labels(
    report: RunReport, scale: TimeScale, generation_starts: Sequence[float]
) -> list[tuple[float, int]]:
    """Return the positions and numbers of generations with enough space for a label."""
    labels, min_x = [], 0.0
    for times, start_t, end_t in zip(
        report.generation_times, generation_starts, [*generation_starts[1:], scale.end_t], strict=False
    ):
        x = scale.position(start_t)
        if x >= min_x and scale.position(end_t) - x > 0.015:
            labels.append((x, times.number))
            min_x = x + 0.025 + 0.02 * len(str(times.number))
    return labels


def _place_marks(
    marks: Iterable[TimelineMark], scale: TimeScale, bar_y: float, bar_height: float
) -> list[tuple[float, str, TimelineMark]]:
    y_by_kind = {CHECKPOINT: bar_y + bar_height + 2, ALERT: bar_y + bar_height + 2, FAULT: bar_y - 2}
    clusters = cluster_marks(marks, scale.start_t, scale.end_t, MAX_MARKS)
    clusters.sort(key=lambda mark: list(MARK_Y).index(mark.kind))
    return [
        (scale.position(mark.t), f"{y_by_kind.get(mark.kind, bar_y + bar_height / 2):g}", mark)
        for mark in clusters
    ]
