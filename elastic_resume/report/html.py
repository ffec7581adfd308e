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
from elastic_resume.report.alerts import BAD, NOTE, described
from elastic_resume.report.event_log import Seen
from elastic_resume.report.formatting import amount, clean, cut, folded, percent, seconds, size
from elastic_resume.report.goodput import Phases
from elastic_resume.report.incidents import Generation
from elastic_resume.report.summary import PARTS, SILENT_S, Story

MAX_TEXT = 4000  # characters of one value
MAX_STACK = 64 * 1024
ROWS = 100  # of one table; longer ones are cut into several that unfold
MAX_STEPS = 200  # in the table of checkpoints
MAX_ALSO = 4
MAX_LANES = 64
SPANS = 1000  # of one lane; more are drawn in columns
COLUMNS = 200
MARKS = 60  # of one kind in one lane
AXIS, WORLD, ROOMY, TIGHT = 20, 40, 52, 34  # heights of the timeline's rows in pixels

INCIDENT, FAULT, TROUBLE, CHECKPOINT = "incident", "fault", "trouble", "checkpoint"
MARK_Y = {CHECKPOINT: 4, TROUBLE: 3, FAULT: 11, INCIDENT: 7}  # in a swatch; a later one covers an earlier one
KEYS = {
    "productive": PARTS["productive"],
    "repeated": PARTS["repeated"],
    "starting": "starting",
    "restoring": "restoring",
    "waiting": "waiting",
    "gone": "gone",
    INCIDENT: "failure",
    FAULT: "injected fault",
    TROUBLE: "trouble",
    CHECKPOINT: "checkpoint",
}
PHASES = {
    "noticed": "noticed",
    "stopped": "workers stopped",
    "formed": "world formed",
    "started": "workers started",
    "restored": "state restored",
}
SHORT_PHASES = {"formed": "world", "started": "start", "restored": "restore"}
OUTCOMES = {"finished": ("good", "finished"), "failed": ("bad", "failed"), "stopped": ("other", "stopped")}
STATES = {
    checkpoints.VALID: ("good", "on disk, checked"),
    checkpoints.COMMITTED: ("good", "on disk"),
    checkpoints.BAD: ("bad", "BAD"),
    checkpoints.QUARANTINED: ("bad", "set aside"),
    checkpoints.LOST: ("dim", "lost"),
    checkpoints.PRUNED: ("dim", "pruned"),
    checkpoints.USED: ("good", "in memory"),
}


def render(told: Story, title: str = "") -> str:
    """Return the page of a run; ``title`` replaces the run's name."""

    def later(rows: Sequence[Any]) -> str:
        return f"{terminal.since(told, rows[0].t)} after the start and later"

    return _template().render(
        told=told,
        title=title or told.run_id or "a run",
        version=__version__,
        since=functools.partial(terminal.since, told),
        state=_state(told),
        tiles=_tiles(told),
        goodput=_shares((what, PARTS[what], value) for what, value in told.goodput.parts),
        timeline=_timeline(told),
        recoveries=_recoveries(told),
        generations=_generations(told),
        failed_starts=_chunks(told.report.failed_starts, later),
        faults=_chunks(_faults(told), lambda rows: later([rows[0]["fault"]])),
        troubles=_chunks(told.troubles, later),
        checkpoints=_checkpoints(told),
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
        "cut": cut,
        "folded": folded,
        "lines": _lines,
        "often": described,
        "or_dash": lambda value: "-" if value is None else value,
        "percent": percent,
        "seconds": seconds,
        "share": lambda share: f"{100 * share:.3f}%",
        "steps": terminal.steps,
        "utc": _utc,
    }
    return environment.get_template("report.html.j2")


def _printable(value: object) -> object:
    """Return what may stand in a page for a value of the template; what is markup already stays."""
    return value if isinstance(value, Markup) else clean(cut(str(value), MAX_TEXT))


def _lines(text: str) -> Markup:
    """Return text that keeps its lines, for ``<pre>``."""
    return escape("\n".join(map(clean, cut(text, MAX_STACK).splitlines())))


def _utc(t: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(t))
    except (ValueError, OverflowError, OSError):
        return f"{t:.0f} s"


# ---- the head ------------------------------------------------------------------------------------------


def _state(told: Story) -> tuple[str, str]:
    """Return the run's state as colour and word, in agreement with the verdict."""
    rows = told.report.generations
    if told.report.outcome != "open" or not rows:
        return OUTCOMES.get(told.report.outcome, ("other", "not begun"))
    if rows[-1].end.is_failure:
        return "bad", "down"
    is_silent = told.silent_s is not None and told.silent_s > SILENT_S
    return "other", "silent" if is_silent else "running?"


def _tiles(told: Story) -> list[tuple[str, str]]:
    report, costs = told.report, told.costs.values()
    steps = [
        (one.generation, one.step)
        for one in told.copies
        if one.tier == checkpoints.DISK and one.state in {checkpoints.VALID, checkpoints.COMMITTED}
    ]
    return [
        ("-" if told.goodput.share is None else percent(told.goodput.share), PARTS["productive"]),
        ("-" if report.last_step is None else f"{report.last_step:,}", "step"),
        (f"{report.incidents:,}", "failure" if report.incidents == 1 else "failures"),
        (f"{report.lost_steps:,}", "step run again" if report.lost_steps == 1 else "steps run again"),
        (seconds(statistics.median(costs) if costs else None), "cost of a failure"),
        (f"{max(steps)[1]:,}" if steps else "none", "newest checkpoint's step"),
    ]


def _shares(parts: Iterable[tuple[str, str, float]]) -> list[dict[str, Any]]:
    """Return the pieces of a bar and its legend from kind, words and seconds of each part."""
    listed = [part for part in parts if part[2] > 0]
    whole, x, made = sum(value for _, _, value in listed), 0.0, []
    for kind, word, value in listed:
        made.append({"kind": kind, "word": word, "value": value, "share": value / whole, "x": x})
        x += value / whole
    return made


def _recoveries(told: Story) -> dict[str, Any] | None:
    """Return the phases of a typical recovery; the first step is not part of it, but is named."""
    medians = dict(terminal.typical(told.recoveries.values()))
    parts = _shares((f"p-{name}", word, medians.get(name, 0.0)) for name, word in PHASES.items())
    note = "From the last step before, until the state is there again."
    note += f" The first step then takes {seconds(medians['step'])}." if "step" in medians else ""
    note += f" Medians of {len(told.recoveries)} recoveries." if len(told.recoveries) > 1 else ""
    return {"parts": parts, "note": note} if parts else None


# ---- tables --------------------------------------------------------------------------------------------


def _chunks(rows: Sequence[Any], name: Callable[[Sequence[Any]], str]) -> list[dict[str, Any]]:
    """Cut a long table into several; ``name`` gives the summary of each."""
    parts = [rows[first : first + ROWS] for first in range(0, len(rows), ROWS)]
    return [{"rows": part, "name": name(part)} for part in parts]


def _generations(told: Story) -> list[dict[str, Any]]:
    injected: dict[int | None, list[str]] = {}
    for fault in told.faults:
        injected.setdefault(fault.generation, []).append(f"injected: {fault.text}")
    rows = []
    for one, moment in zip(told.report.generations, told.moments, strict=True):
        phases = told.recoveries.get(one.number)
        kind = "failure" if one.end.is_failure else "good" if one.end.kind == "finished" else "other"
        rows.append(
            {
                "one": one,
                "began": moment.formed or moment.restored,
                "kind": kind,
                "details": [*injected.get(one.number, []), *_details(one)],
                "phases": _phases(phases) if phases else "",
            }
        )

    def name(part: Sequence[Mapping[str, Any]]) -> str:
        here = [row["one"] for row in part]
        failed = amount(sum(one.end.is_failure for one in here), "failure")
        lost = amount(sum(one.lost_steps or 0 for one in here), "step")
        when = f"{terminal.since(told, here[0].began)} to {terminal.since(told, here[-1].began)}"
        numbers = f"generations {here[0].number} to {here[-1].number}"
        return f"{numbers}: {failed}, {lost} run again; {when} after the start"

    return _chunks(rows, name)


def _phases(phases: Phases) -> str:
    return " · ".join(f"{SHORT_PHASES.get(name, name)} {seconds(value)}" for name, value in phases.known)


def _details(one: Generation) -> list[str]:
    """Return what else failed, which copy the generation began with, and which ones it rejected."""
    also = one.end.also
    told = [f"also: {text}" for text in also[:MAX_ALSO]]
    told += [f"and {len(also) - MAX_ALSO} more"] if len(also) > MAX_ALSO else []
    if one.resumed == "checkpoint" and one.source_node:
        sent = f", sent to {folded(one.lacking, 40)}" if one.lacking else ""
        told.append(f"began with {one.source_node}'s copy of step {one.start_step}{sent}")
    for copy in one.rejected:
        which = f"generation {copy.generation}, step {copy.step}"
        told.append(f"rejected {copy.node}'s copy of {which}: {copy.reason}")
    return told


def _faults(told: Story) -> list[dict[str, Any]]:
    hits = [summary.Hit(one.t, [one.node] if one.node else [], one.rank, one.what) for one in told.faults]
    ended = summary.generations_after(hits, told.report.generations)
    return [{"fault": one, "ended": here} for one, here in zip(told.faults, ended, strict=True)]


def _checkpoints(told: Story) -> dict[str, Any] | None:
    """Return a row for each step of which a copy matters now or has mattered."""
    if not told.copies:
        return None
    shown = [one for one in told.copies if one.state != checkpoints.PRUNED or one.loaded_by]
    gone = len(told.copies) - len(shown)
    note = f"{amount(len(told.copies), 'copy', 'copies')} known"
    note += f"; {gone} that nobody began with were pruned for newer ones and are left out." if gone else "."
    steps: dict[tuple[int, int], dict[tuple[str, str, str], list[str]]] = defaultdict(dict)
    for one in shown:
        began = ", ".join(map(str, one.loaded_by[:6]))
        notes = (size(one.bytes) if one.bytes else "", began and f"generation {began} began with it")
        alike = (*STATES[one.state], "; ".join(filter(None, (*notes, one.reason))))
        steps[one.generation, one.step].setdefault(alike, []).append(one.node)
    newest = sorted(steps.items(), reverse=True)[:MAX_STEPS]
    if len(newest) < len(steps):
        note += f" The newest {MAX_STEPS} of {len(steps)} steps are shown."
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

    what: str
    began: float
    until: float
    text: str


@dataclass(frozen=True)
class Mark:
    """A moment in one lane."""

    what: str
    t: float
    text: str


@dataclass(frozen=True)
class Lane:
    """What one node did, as far as its log or the generations that it took part in tell."""

    node: str
    spans: tuple[Span, ...]
    marks: tuple[Mark, ...]


def lanes(told: Story) -> tuple[Lane, ...]:
    """Return a lane for each node, in the order in which they first took part."""
    if told.until is None:
        return ()
    parts: dict[str, list[tuple[int, float, float, float]]] = {}
    for one, row in zip(told.moments, told.report.generations, strict=True):
        over = one.until if row.end.kind in {"finished", "open"} or one.noticed is None else one.noticed
        formed = one.formed if one.formed is not None else one.restored
        for node in row.nodes:
            part = (row.number, formed, one.restored, max(over, one.restored))
            parts.setdefault(node, []).append(part)
    names = dict.fromkeys([*parts, *sorted(node for node in told.line.nodes if node)])
    marks = _marks(told)
    return tuple(Lane(node, _spans(told, node, parts.get(node, [])), tuple(marks[node])) for node in names)


def _spans(told: Story, node: str, parts: Sequence[tuple[int, float, float, float]]) -> tuple[Span, ...]:
    log = told.line.nodes.get(node, ())
    came = [one for one in log if one.kind in {"agent-start", "agent-end"}]
    spans: list[Span] = []
    cursor: float | None = None  # where its last part ended
    for number, formed, restored, stopped in parts:
        spans += _between(came, cursor, formed)
        text = f"generation {number}: prepares for {seconds(restored - formed)}"
        spans.append(Span("preparing", formed, restored, text))
        text = f"generation {number}: trains for {seconds(stopped - restored)}"
        spans.append(Span("training", restored, stopped, text))
        cursor = stopped
    took_part = bool(parts) and parts[-1][0] == told.report.generations[-1].number
    if told.report.outcome != "finished" or not took_part:
        spans += _between(came, cursor, told.until or 0.0, last=True)
    return tuple(span for span in spans if span.until > span.began)


def _between(came: Sequence[Seen], since: float | None, until: float, *, last: bool = False) -> list[Span]:
    """Return what a node was while no world had it: ``since`` None before its first one."""
    here = [one for one in came if (since is None or one.t > since - 0.5) and one.t < until]
    spans, cursor, is_there = [], since, since is not None and not last
    is_there = is_there and not any(one.kind == "agent-start" for one in here)
    if last and since is not None:
        is_there = any(one.kind == "agent-end" for one in here)
    for one in here:
        if cursor is not None and one.t > cursor:
            spans.append(_idle(is_there, cursor, one.t))
        cursor, is_there = one.t, one.kind == "agent-start"
    is_over = last and bool(here) and here[-1].kind == "agent-end"
    if cursor is not None and not is_over:
        spans.append(_idle(is_there, cursor, until))
    return spans


def _idle(is_there: bool, began: float, until: float) -> Span:
    word = "waits" if is_there else "is gone"
    return Span("idle" if is_there else "gone", began, until, f"{word} for {seconds(until - began)}")


def _marks(told: Story) -> Mapping[str, list[Mark]]:
    marks: dict[str, list[Mark]] = defaultdict(list)
    for copy in told.copies:
        if copy.t is not None and copy.tier == checkpoints.DISK:
            marks[copy.node].append(Mark(CHECKPOINT, copy.t, f"checkpoint of step {copy.step}"))
    for one in told.troubles:
        if one.weight in {BAD, NOTE}:
            marks[one.node].append(Mark(TROUBLE, one.t, one.text))
    for fault in told.faults:
        marks[fault.node].append(Mark(FAULT, fault.t, f"injected: {fault.text}"))
    for moment, row in zip(told.moments, told.report.generations, strict=True):
        t = row.end.t if row.end.t is not None else moment.noticed
        if row.end.is_failure and t is not None:
            for node in [row.end.node] if row.end.node else row.nodes:
                marks[node].append(Mark(INCIDENT, t, f"generation {row.number}: {row.end.text}"))
    return marks


@dataclass(frozen=True)
class Column:
    """A piece of a bar, and the shares of its time by what filled it; the rest is nothing."""

    began: float
    until: float
    shares: tuple[tuple[str, float], ...]


def columns(spans: Iterable[Span], began: float, until: float, dots: int) -> list[Column]:
    """Return at most ``dots`` columns for any number of spans, with every share of the time."""
    width = (until - began) / dots
    filled: list[dict[str, float]] = [defaultdict(float) for _ in range(dots)]
    whole: dict[str, float] = defaultdict(float)
    for span in spans:
        whole[span.what] += span.until - span.began
        first = max(0, int((span.began - began) / width))
        for dot in range(first, min(dots, int((span.until - began) / width) + 1)):
            low, high = began + dot * width, began + (dot + 1) * width
            filled[dot][span.what] += max(0.0, min(span.until, high) - max(span.began, low))
    order = sorted(whole, key=lambda what: -whole[what])
    made: list[Column] = []
    for dot, spent in enumerate(filled):
        low, high = began + dot * width, began + (dot + 1) * width
        found = ((what, round(spent.get(what, 0.0) / width, 3)) for what in order)
        shares = tuple((what, share) for what, share in found if share)
        if made and made[-1].shares == shares and made[-1].until > low - width / 2:
            made[-1] = Column(made[-1].began, high, shares)
        elif shares:
            made.append(Column(low, high, shares))
    return made


def clustered(marks: Iterable[Mark], began: float, until: float, dots: int) -> list[Mark]:
    """Return at most ``dots`` marks of each kind: those that would overlap become one with their number."""
    width = (until - began) / dots if until > began else 1.0
    near: dict[tuple[str, int], list[Mark]] = defaultdict(list)
    for mark in sorted(marks, key=lambda mark: mark.t):
        near[mark.what, int((mark.t - began) / width)].append(mark)
    found = []
    for (what, _), here in near.items():
        text = here[0].text if len(here) == 1 else f"{amount(len(here), what)}, the first: {here[0].text}"
        found.append(Mark(what, here[len(here) // 2].t, text))
    return found


# ---- the timeline as it is drawn -----------------------------------------------------------------------


class Frame:
    """The times from the left to the right edge of the drawing."""

    def __init__(self, began: float, until: float) -> None:
        self.began, self.until = began, max(until, began + 1e-3)
        self.whole = self.until - began

    def x(self, t: float) -> float:
        """Return the place of a time, from 0 to 1."""
        return min(1.0, max(0.0, (t - self.began) / self.whole))

    def ticks(self) -> list[dict[str, Any]]:
        """Return about four round times along the axis."""
        nice = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800]
        nice += [hours * 3600 for hours in (1, 2, 3, 6, 12, 24, 48, 96, 168)]
        weeks = math.ceil(self.whole / 4 / 604800) * 604800
        gap = next((float(gap) for gap in nice if self.whole / gap <= 4.5), float(weeks))
        gap = self.whole / 2 if self.whole < 1 else gap
        places = [(index * gap, index * gap / self.whole) for index in range(int(self.whole / gap) + 1)]
        return [
            {"x": x, "label": _tick(t), "anchor": "start" if x < 0.03 else "end" if x > 0.94 else "middle"}
            for t, x in places
        ]

    def bars(self, spans: Sequence[Span], y: float, height: float, dots: int) -> list[dict[str, Any]]:
        """Return a rectangle for each span, or columns in several pieces where there are too many."""
        if len(spans) <= SPANS:
            return [self._bar(one, one.text, [(one.what, f"{y:g}", f"{height:g}")]) for one in spans]
        made = []
        for column in columns(spans, self.began, self.until, dots):
            pieces, bottom = [], y + height
            for what, share in column.shares:
                bottom -= share * height
                pieces.append((what, f"{bottom:.2f}", f"{share * height:.2f}"))
            text = ", ".join(f"{percent(share)} {what}" for what, share in column.shares)
            made.append(self._bar(column, text, pieces))
        return made

    def _bar(self, one: Span | Column, text: str, pieces: list[tuple[str, str, str]]) -> dict[str, Any]:
        x = self.x(one.began)
        return {"x": x, "width": max(0.0005, self.x(one.until) - x), "text": text, "pieces": pieces}


def _tick(value: float) -> str:
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if value >= unit:
            return f"{value / unit:.4g} {name}"
    return f"{value:.3g} s" if value else "0"


def _timeline(told: Story) -> dict[str, Any] | None:
    if told.began is None or told.until is None:
        return None
    every = lanes(told)
    shown = _busiest(every)
    row, bar_y, bar, dots = (ROOMY, 24, 14, COLUMNS) if len(shown) <= 12 else (TIGHT, 16, 11, COLUMNS // 4)
    frame = Frame(told.began, told.until)
    spans = [
        Span(one.what, one.began, one.until, f"{one.what} for {seconds(one.until - one.began)}")
        for one in told.slices
    ]
    seen = {one.what for one in told.slices}
    seen |= {span.what for lane in every for span in lane.spans}
    seen |= {mark.what for lane in every for mark in lane.marks}
    notes = ["Too much to draw one by one: each column of a bar is split by what its time went into."]
    clocks = [terminal.clock(one) for one in told.clocks[:5]]
    left_out = f", the {len(shown)} with most incidents are drawn" if len(shown) < len(every) else ""
    generations = amount(len(told.report.generations), "generation")
    begins = [one.formed if one.formed is not None else one.restored for one in told.moments]
    return {
        "height": AXIS + WORLD + row * len(shown) + 6,
        "description": f"{generations} of {amount(len(every), 'node')}{left_out}, "
        f"{amount(told.report.incidents, 'failure')}, {seconds(told.goodput.total_s)}. "
        "The same is in the tables below.",
        "ticks": frame.ticks(),
        "world": frame.bars(spans, AXIS + 17, 14, COLUMNS),
        "begins": [frame.x(t) for t in begins] if len(begins) <= SPANS else [],
        "numbers": _numbers(told, frame, begins),
        "lanes": [
            {
                "node": lane.node,
                "y": y + 12,
                "bars": frame.bars(lane.spans, y + bar_y, bar, dots),
                "marks": _placed(lane.marks, frame, y + bar_y, bar),
            }
            for y, lane in zip(range(AXIS + WORLD, 1 << 30, row), shown, strict=False)
        ],
        "legend": [(kind, word) for kind, word in KEYS.items() if kind in seen],
        "notes": [
            *(notes if len(told.slices) > SPANS else []),
            *(f"{one[:1].upper()}{one[1:]}." for one in clocks),
        ],
    }


def _busiest(every: Sequence[Lane]) -> Sequence[Lane]:
    """Return the lanes to which most happened, in their own order."""
    busy = sorted(every, key=lambda lane: -sum(mark.what != CHECKPOINT for mark in lane.marks))
    chosen = {lane.node for lane in busy[:MAX_LANES]}
    return [lane for lane in every if lane.node in chosen]


def _numbers(told: Story, frame: Frame, begins: Sequence[float]) -> list[tuple[float, int]]:
    """Return the numbers of generations, with their places, where there is room for them."""
    made, free = [], 0.0
    for one, began, until in zip(told.moments, begins, [*begins[1:], frame.until], strict=False):
        x = frame.x(began)
        if x >= free and frame.x(until) - x > 0.015:
            made.append((x, one.number))
            free = x + 0.025 + 0.02 * len(str(one.number))
    return made


def _placed(marks: Iterable[Mark], frame: Frame, bar_y: float, bar: float) -> list[tuple[float, str, Mark]]:
    places = {CHECKPOINT: bar_y + bar + 2, TROUBLE: bar_y + bar + 2, FAULT: bar_y - 2}
    found = clustered(marks, frame.began, frame.until, MARKS)
    found.sort(key=lambda mark: list(MARK_Y).index(mark.what))
    return [(frame.x(one.t), f"{places.get(one.what, bar_y + bar / 2):g}", one) for one in found]
