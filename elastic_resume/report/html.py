"""Render a run's report as one self-contained HTML page.

This module prepares plain data; ``report.html.j2`` lays it out with the style sheet ``report.css``. The
page loads nothing and runs no script: its content security policy forbids both. Jinja escapes every
value, and `_printable` replaces control characters first. The timeline is SVG whose horizontal positions
are percentages, so it fits any width. It shows the newest `MAX_GENERATIONS` generations, and marks that
would overlap become one mark with a count.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from elastic_resume import __version__
from elastic_resume.mechanisms.mechanism import Chart
from elastic_resume.report import checkpoints, summary
from elastic_resume.report.alerts import describe_recurrence
from elastic_resume.report.event_log import ParsedEvent
from elastic_resume.report.formatting import (
    fold_node_names,
    format_bytes,
    format_count,
    format_percent,
    format_seconds,
    format_utc,
    replace_unprintable,
    truncate,
)
from elastic_resume.report.generations import GenerationRow
from elastic_resume.report.goodput import GenerationTimes
from elastic_resume.report.summary import (
    GOODPUT_LABELS,
    MAX_SILENCE_S,
    RunReport,
    format_since_start,
)

MAX_TEXT = 4000  # limit of characters in one value
MAX_STACK = 64 * 1024
MAX_TABLE_ROWS = 100  # longer tables are cut into several that unfold
MAX_CHECKPOINT_STEPS = 200
MAX_LANES = 64
MAX_GENERATIONS = 100  # limit of generations in the timeline
MAX_MARKS = 60  # limit of marks of one kind in one lane
CHART_COLUMNS = 400  # a chart has at most two points in each
AXIS_HEIGHT, WORLD_HEIGHT = 20, 40  # pixels

INCIDENT, FAULT, ALERT, CHECKPOINT = "incident", "fault", "alert", "checkpoint"
MARK_Y = {CHECKPOINT: 4, ALERT: 3, FAULT: 11, INCIDENT: 7}  # pixels in a swatch; later kinds cover earlier
LEGEND = {
    **GOODPUT_LABELS,
    "offline": "offline",
    INCIDENT: "failure",
    FAULT: "injected fault",
    ALERT: "alert",
    CHECKPOINT: "checkpoint",
}
OUTCOME_LABELS = {
    "finished": ("good", "finished"),
    "failed": ("bad", "failed"),
    "stopped": ("other", "stopped"),
}
STATE_LABELS = {
    checkpoints.VALID: ("good", "on disk"),
    checkpoints.BAD: ("bad", "BAD"),
    checkpoints.QUARANTINED: ("bad", "quarantined"),
}
ARCHIVED_LABEL = ("good", "in the archive")


def render_page(report: RunReport) -> str:
    """Return the page of a run."""

    def later(part: Sequence[Any]) -> str:
        return f"{format_since_start(report, part[0].t)} after the start and later"

    return _template().render(
        report=report,
        title=report.run_id or "a run",
        version=__version__,
        since=functools.partial(format_since_start, report),
        state=_run_state(report),
        tiles=_summary_tiles(report),
        downtime_note=(summary.DOWNTIME_NOTE.capitalize() + ".") if report.downtimes else "",
        goodput=_bar_parts((kind, GOODPUT_LABELS[kind], value) for kind, value in report.goodput.parts),
        timeline=_draw_timeline(report),
        charts=[drawn for chart in report.charts if (drawn := _draw_chart(chart)) is not None],
        generations=_generation_rows(report),
        faults=_split_table(report.faults, later),
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
        "folded": fold_node_names,
        "lines": _preformatted_lines,
        "often": describe_recurrence,
        "or_dash": lambda value: "-" if value is None else value,
        "percent": format_percent,
        "seconds": format_seconds,
        "share": lambda share: f"{100 * share:.3f}%",
        "steps": summary.format_step_range,
        "utc": format_utc,
    }
    return environment.get_template("report.html.j2")


def _printable(value: object) -> object:
    """Return a template's value as printable text; markup stays as it is."""
    return value if isinstance(value, Markup) else replace_unprintable(truncate(str(value), MAX_TEXT))


def _preformatted_lines(text: str) -> Markup:
    """Return text that keeps its lines, for ``<pre>``."""
    return escape("\n".join(map(replace_unprintable, truncate(text, MAX_STACK).splitlines())))


# ---- the head ------------------------------------------------------------------------------------------


def _run_state(report: RunReport) -> tuple[str, str]:
    """Return the run's state as colour and word, in agreement with the verdict."""
    rows = report.history.generations
    if report.history.outcome != "open" or not rows:
        return OUTCOME_LABELS.get(report.history.outcome, ("other", "not started"))
    if report.history.wait is not None:
        return "bad", "waiting"
    if rows[-1].end.is_incident:
        return "bad", "down"
    is_silent = report.silent_s is not None and report.silent_s > MAX_SILENCE_S
    return "other", "silent" if is_silent else "running?"


def _summary_tiles(report: RunReport) -> list[tuple[str, str]]:
    history, share, newest = report.history, report.goodput.share, report.newest_checkpoint_step
    downtime_s = sum(report.downtimes.values()) if report.downtimes else None
    return [
        ("-" if share is None else format_percent(share), "goodput"),
        ("-" if history.last_step is None else f"{history.last_step:,}", "step"),
        (f"{history.num_failures:,}", "failure" if history.num_failures == 1 else "failures"),
        (
            f"{history.recomputed_steps:,}",
            "recomputed step" if history.recomputed_steps == 1 else "recomputed steps",
        ),
        (format_seconds(downtime_s), "downtime"),
        (format_seconds(report.median_recovery_s), "recovery (median)"),
        ("none" if newest is None else f"{newest:,}", "newest checkpoint's step"),
    ]


def _bar_parts(parts: Iterable[tuple[str, str, float]]) -> list[dict[str, Any]]:
    """Return the pieces of a bar and its legend from (kind, label, seconds) of each part."""
    nonzero = [part for part in parts if part[2] > 0]
    total, x, pieces = sum(value for _, _, value in nonzero), 0.0, []
    for kind, label, value in nonzero:
        pieces.append({"kind": kind, "label": label, "value": value, "share": value / total, "x": x})
        x += value / total
    return pieces


# ---- tables --------------------------------------------------------------------------------------------


def _split_table(rows: Sequence[Any], summarize: Callable[[Sequence[Any]], str]) -> list[dict[str, Any]]:
    """Cut a long table into several; ``summarize`` gives the summary of each."""
    chunks = [rows[first : first + MAX_TABLE_ROWS] for first in range(0, len(rows), MAX_TABLE_ROWS)]
    return [{"rows": part, "name": summarize(part)} for part in chunks]


def _generation_rows(report: RunReport) -> list[dict[str, Any]]:
    injected: dict[int | None, list[str]] = defaultdict(list)
    for fault in report.faults:
        injected[fault.generation].append(f"injected: {fault.text}")
    rows = []
    for row, times in zip(report.history.generations, report.generation_times, strict=True):
        kind = "good" if row.end.kind == "finished" else "other"
        rows.append(
            {
                "generation": row,
                "start_t": times.start_t,
                "kind": "failure" if row.end.is_failure else kind,
                "details": [*injected[row.number], *summary.describe_details(row)],
            }
        )

    def summarize(part: Sequence[Mapping[str, Any]]) -> str:
        generations: list[GenerationRow] = [row["generation"] for row in part]
        failed = format_count(sum(row.end.is_failure for row in generations), "failure")
        steps = format_count(sum(row.recomputed_steps or 0 for row in generations), "step")
        since, until = (format_since_start(report, part[index]["start_t"]) for index in (0, -1))
        return (
            f"generations {generations[0].number} to {generations[-1].number}: {failed}, {steps} recomputed; "
            f"{since} to {until} after the start"
        )

    return _split_table(rows, summarize)


def _checkpoint_rows(report: RunReport) -> list[dict[str, Any]]:
    """Return a row for each generation and step of the checkpoints, the newest first."""
    steps: dict[tuple[int, int], dict[tuple[str, str, str], list[str]]] = defaultdict(dict)
    for entry in report.checkpoints:
        is_in_archive = entry.is_archived and entry.state == checkpoints.VALID
        label = ARCHIVED_LABEL if is_in_archive else STATE_LABELS[entry.state]
        key = (*label, entry.reason or format_bytes(entry.bytes))
        steps[entry.generation or 0, entry.step or 0].setdefault(key, []).append(entry.node)
    return [{"rows": sorted(steps.items(), reverse=True)[:MAX_CHECKPOINT_STEPS]}] if steps else []


# ---- the timeline --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """A stretch of one lane, in Unix seconds. ``action`` is a verb for its text."""

    activity: str
    start_t: float
    end_t: float
    action: str

    @property
    def text(self) -> str:
        """What was done, and for how long."""
        return f"{self.action} for {format_seconds(self.end_t - self.start_t)}"


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
    """Return a lane for each node with the newest generations, in the order in which nodes took part."""
    agent_events: dict[str, list[ParsedEvent]] = defaultdict(list)
    for event in report.timeline.select("agent-start", "agent-end"):
        agent_events[event.node].append(event)
    spans: dict[str, list[Span]] = defaultdict(list)
    rows = report.history.generations
    for times, row in list(zip(report.generation_times, rows, strict=True))[-MAX_GENERATIONS:]:
        is_open = row.end.kind in {"finished", "open"} or times.detected_t is None
        end_t = max(times.restored_t, times.end_t if is_open else times.detected_t or 0.0)
        for node in row.nodes:
            spans[node] += _absence_spans(agent_events[node], spans[node], times.start_t)
            name = f"generation {row.number}"
            spans[node].append(Span("preparing", times.start_t, times.restored_t, f"{name}: prepares"))
            spans[node].append(Span("training", times.restored_t, end_t, f"{name}: trains"))
    for node in [*spans, *sorted(report.timeline.by_node.keys() - spans.keys() - {""})]:
        took_part_last = bool(rows) and node in rows[-1].nodes
        if report.history.outcome != "finished" or not took_part_last:
            spans[node] += _absence_spans(agent_events[node], spans[node], report.end_t or 0.0, last=True)
    marks = _marks_by_node(report)
    return tuple(
        NodeLane(node, tuple(span for span in found if span.end_t > span.start_t), tuple(marks[node]))
        for node, found in spans.items()
    )


def _absence_spans(
    agent_events: Sequence[ParsedEvent], known: Sequence[Span], end_t: float, *, last: bool = False
) -> list[Span]:
    """Return when a node was offline or waited for a world, after its ``known`` spans.

    Args:
        agent_events: the node's agent-start and agent-end events.
        known: its spans so far.
        end_t: when it takes part again, or the end of the run.
        last: it takes part in no later generation.
    """
    start_t = known[-1].end_t if known else -math.inf
    events = [event for event in agent_events if start_t - 0.5 < event.t < end_t]
    left_t = events[-1].t if last and events and events[-1].kind == "agent-end" else None
    until = end_t if left_t is None else left_t
    came_t = max((event.t for event in events if event.kind == "agent-start"), default=None)
    if came_t is not None:
        offline = [Span("offline", start_t, came_t, "is offline")] if known else []
        return [*offline, Span("idle", came_t, until, "waits")]
    if not known:
        return []
    if last and left_t is None:
        return [Span("offline", start_t, until, "is offline")]
    return [Span("idle", start_t, until, "waits")]


def _marks_by_node(report: RunReport) -> Mapping[str, list[TimelineMark]]:
    marks: dict[str, list[TimelineMark]] = defaultdict(list)
    for event in report.timeline.select("commit"):
        marks[event.node].append(TimelineMark(CHECKPOINT, event.t, f"checkpoint of step {event.step}"))
    for alert in report.alerts:
        marks[alert.node].append(TimelineMark(ALERT, alert.t, alert.text))
    for fault in report.faults:
        marks[fault.node].append(TimelineMark(FAULT, fault.t, f"injected: {fault.text}"))
    for times, row in zip(report.generation_times, report.history.generations, strict=True):
        if row.end.is_incident and times.detected_t is not None:
            text = f"generation {row.number}: {row.end.text}"
            for node in [row.end.node] if row.end.node else row.nodes:
                marks[node].append(TimelineMark(INCIDENT, times.detected_t, text))
    return marks


def cluster_marks(
    marks: Iterable[TimelineMark], start_t: float, end_t: float, max_marks: int
) -> list[TimelineMark]:
    """Return at most ``max_marks`` marks of each kind; marks that would overlap become one with a count."""
    width = (end_t - start_t) / max_marks if end_t > start_t else 1.0
    groups: dict[tuple[str, int], list[TimelineMark]] = defaultdict(list)
    for mark in sorted(marks, key=lambda mark: mark.t):
        if start_t <= mark.t <= end_t:
            groups[mark.kind, int((mark.t - start_t) / width)].append(mark)
    clusters = []
    for (kind, _), group in groups.items():
        count = f"{format_count(len(group), kind)}, the first: " if len(group) > 1 else ""
        clusters.append(TimelineMark(kind, group[len(group) // 2].t, count + group[0].text))
    return clusters


class TimeScale:
    """The time axis of the drawing, from left to right."""

    def __init__(self, start_t: float, end_t: float) -> None:
        self.start_t, self.end_t = start_t, max(end_t, start_t + 1e-3)
        self.duration_s = self.end_t - start_t

    def position(self, t: float) -> float:
        """Return the position of a time, from 0 to 1."""
        return min(1.0, max(0.0, (t - self.start_t) / self.duration_s))

    def ticks(self, offset_s: float) -> list[dict[str, Any]]:
        """Return about four round times along the axis, which begins ``offset_s`` after the run."""
        nice = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800]
        nice += [hours * 3600 for hours in (1, 2, 3, 6, 12, 24, 48, 96, 168)]
        weeks = math.ceil(self.duration_s / 4 / 604800) * 604800
        gap = next((float(gap) for gap in nice if self.duration_s / gap <= 4.5), float(weeks))
        gap = self.duration_s / 2 if self.duration_s < 1 else gap
        first = math.ceil(offset_s / gap)
        ticks = []
        for index in range(first, int((offset_s + self.duration_s) / gap) + 1):
            x = (index * gap - offset_s) / self.duration_s
            anchor = "start" if x < 0.03 else "end" if x > 0.94 else "middle"
            ticks.append({"x": x, "label": _format_tick(index * gap), "anchor": anchor})
        return ticks

    def bars(self, spans: Iterable[Span]) -> list[dict[str, Any]]:
        """Return a rectangle for each span."""
        rectangles = []
        for span in spans:
            if span.end_t > self.start_t:
                x = self.position(span.start_t)
                width = max(0.0005, self.position(span.end_t) - x)
                rectangles.append({"kind": span.activity, "x": x, "width": width, "text": span.text})
        return rectangles


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
    lane_height, bar_y, bar_height = (52, 24, 14) if len(shown) <= 12 else (34, 16, 11)  # pixels
    times = report.generation_times[-MAX_GENERATIONS:]
    is_cut = len(times) < len(report.generation_times)
    scale = TimeScale(times[0].start_t if is_cut else report.start_t, report.end_t)
    spans = [Span(item.activity, item.start_t, item.end_t, item.activity) for item in report.slices]
    seen = {span.activity for span in spans}
    seen |= {span.activity for lane in lanes for span in lane.spans}
    seen |= {mark.kind for lane in lanes for mark in lane.marks}
    chosen = f", the {len(shown)} with the most failures, faults and alerts are drawn"
    generations = format_count(len(report.history.generations), "generation")
    return {
        "height": AXIS_HEIGHT + WORLD_HEIGHT + lane_height * len(shown) + 6,
        "description": f"{generations} of {format_count(len(lanes), 'node')}"
        f"{chosen if len(shown) < len(lanes) else ''}, "
        f"{format_count(report.history.num_failures, 'failure')}, {format_seconds(report.goodput.total_s)}. "
        "The tables below contain the same.",
        "ticks": scale.ticks(scale.start_t - report.start_t),
        "world": {"bars": scale.bars(spans), "y": AXIS_HEIGHT + 17, "height": 14},
        "begins": [scale.position(item.start_t) for item in times],
        "numbers": _generation_labels(times, scale),
        "bar_height": bar_height,
        "lanes": [
            {
                "node": lane.node,
                "y": y + 12,
                "bar_y": y + bar_y,
                "bars": scale.bars(lane.spans),
                "marks": _place_marks(lane.marks, scale, y + bar_y, bar_height),
            }
            for y, lane in zip(itertools.count(AXIS_HEIGHT + WORLD_HEIGHT, lane_height), shown, strict=False)
        ],
        "legend": [(kind, label) for kind, label in LEGEND.items() if kind in seen],
        "notes": [f"Only the newest {MAX_GENERATIONS} generations are drawn."] if is_cut else [],
    }


def _busiest_lanes(lanes: Sequence[NodeLane]) -> Sequence[NodeLane]:
    """Return the lanes with the most marks, in their own order."""
    ordered = sorted(lanes, key=lambda lane: -sum(mark.kind != CHECKPOINT for mark in lane.marks))
    chosen = {lane.node for lane in ordered[:MAX_LANES]}
    return [lane for lane in lanes if lane.node in chosen]


def _generation_labels(times: Sequence[GenerationTimes], scale: TimeScale) -> list[tuple[float, int]]:
    """Return the positions and numbers of generations with enough space for a label."""
    labels, min_x = [], 0.0
    ends = [*(item.start_t for item in times[1:]), scale.end_t]
    for item, end_t in zip(times, ends, strict=False):
        x = scale.position(item.start_t)
        if x >= min_x and scale.position(end_t) - x > 0.015:
            labels.append((x, item.number))
            min_x = x + 0.025 + 0.02 * len(str(item.number))
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


# ---- charts --------------------------------------------------------------------------------------------


def _draw_chart(chart: Chart) -> dict[str, Any] | None:
    """Return a chart with positions from 0 to 1, from the top left; None if no value is finite."""
    finite = [(step, value) for step, value in chart.points if math.isfinite(value)]
    if not finite:
        return None
    first, last = finite[0][0], finite[-1][0]
    low, high = min(value for _, value in finite), max(value for _, value in finite)
    width, height = max(1, last - first), (high - low) or 1.0
    return {
        "name": chart.name,
        "line": [
            ((step - first) / width, 1 - (value - low) / height if high > low else 0.5)
            for step, value in thin_out(finite)
        ],
        "restarts": [(step - first) / width for step in chart.restarts if first <= step <= last],
        "range": f"{low:.4g} to {high:.4g}, last {finite[-1][1]:.4g}",
        "steps": f"steps {first} to {last}" if last > first else f"step {first}",
        "unusual": len(chart.points) - len(finite),
    }


def thin_out(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the smallest and the greatest value of each column, so that no spike is lost."""
    if len(points) <= 2 * CHART_COLUMNS:
        return list(points)
    first, width = points[0][0], points[-1][0] - points[0][0] + 1
    columns: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for step, value in points:
        columns[(step - first) * CHART_COLUMNS // width].append((step, value))
    chosen = []
    for column in columns.values():
        ends = {min(column, key=lambda point: point[1]), max(column, key=lambda point: point[1])}
        chosen += sorted(ends)
    return chosen
