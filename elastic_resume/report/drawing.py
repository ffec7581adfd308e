"""The timeline as SVG: the world's generations, then a lane for each node.

Places along the time are percentages and all else is in pixels, so the drawing fills whatever width it is
given and its texts keep their size, on a phone too. What is told by colour is told by shape or pattern as
well: colours are classes that the page's style fills in, for light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from elastic_resume.report import lanes
from elastic_resume.report.lanes import CHECKPOINT, FAULT, INCIDENT, TROUBLE, Lane, Mark, Span
from elastic_resume.report.markup import Markup, tag
from elastic_resume.report.story import Story
from elastic_resume.report.text import amount, cut, percent, seconds

SPANS = 1000  # of one lane; more are drawn in columns
COLUMNS = 200
MARKS = 60  # of one kind in one lane
MAX_LANES = 64
_AXIS, _WORLD, _ROOMY, _TIGHT = 20, 40, 52, 34
_TICKS = 4
_NICE = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800]
_NICE += [hours * 3600 for hours in (1, 2, 3, 6, 12, 24, 48, 96, 168)]


def timeline(told: Story, every: Sequence[Lane]) -> Markup | None:
    """The drawing of a run whose lanes are ``every``; None where nothing happened."""
    if told.began is None or told.until is None:
        return None
    shown = _busiest(every)
    row = _ROOMY if len(shown) <= 12 else _TIGHT
    height = _AXIS + _WORLD + row * len(shown) + 6
    frame = _Frame(told.began, max(told.until, told.began + 1e-3))
    parts = [
        tag("title", "Timeline of the run"),
        tag("desc", _described(told, len(every), len(shown))),
        _definitions(),
        *_axis(frame, height),
        *_world(told, frame),
    ]
    for index, lane in enumerate(shown):
        parts.append(_lane(lane, frame, _AXIS + _WORLD + index * row, roomy=row == _ROOMY))
    return tag("svg", *parts, class_="timeline", role="img", width="100%", height=height)


def _busiest(every: Sequence[Lane]) -> Sequence[Lane]:
    """Those to which most happened, in their own order, where there are too many."""
    if len(every) <= MAX_LANES:
        return every
    counts = {lane.node: sum(mark.what != CHECKPOINT for mark in lane.marks) for lane in every}
    chosen = sorted(every, key=lambda lane: -counts[lane.node])[:MAX_LANES]
    return tuple(lane for lane in every if lane in chosen)


def _described(told: Story, nodes: int, shown: int) -> str:
    generations = amount(len(told.report.generations), "generation")
    left_out = f", the {shown} with most incidents are drawn" if shown < nodes else ""
    return (
        f"{generations} of {amount(nodes, 'node')}{left_out}, "
        f"{amount(told.report.incidents, 'failure')}, {seconds(told.goodput.total_s)}. "
        "The same is in the tables below."
    )


class _Frame:
    """Turns times into places from left to right."""

    def __init__(self, began: float, until: float) -> None:
        self.began, self.until = began, until
        self.whole = until - began

    def x(self, t: float) -> str:
        """The place of a time."""
        return f"{self.share(t):.3f}%"

    def share(self, t: float) -> float:
        """The same as a number from 0 to 100."""
        return 100 * min(1.0, max(0.0, (t - self.began) / self.whole))

    def width(self, began: float, until: float) -> str:
        """The breadth of a stretch; what is there can be seen."""
        return f"{max(0.05, self.share(until) - self.share(began)):.3f}%"


def _axis(frame: _Frame, height: int) -> Iterable[Markup]:
    gap: float = next((step for step in _NICE if frame.whole / step <= _TICKS + 0.5), 0)
    gap = gap or math.ceil(frame.whole / _TICKS / 604800) * 604800
    if frame.whole < 1:
        gap = frame.whole / 2
    for index in range(math.floor(frame.whole / gap) + 1):
        t = frame.began + index * gap
        share = frame.share(t)
        anchor = "start" if share < 3 else "end" if share > 94 else "middle"
        yield tag("line", x1=frame.x(t), x2=frame.x(t), y1=_AXIS, y2=height, class_="grid")
        yield tag("text", _tick(index * gap), x=frame.x(t), y=_AXIS - 7, text_anchor=anchor, class_="tick")


def _tick(value: float) -> str:
    """A round duration in few characters."""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if value >= unit:
            return f"{value / unit:.4g} {name}"
    return f"{value:.3g} s" if value else "0"


def _world(told: Story, frame: _Frame) -> Iterable[Markup]:
    """What the job as a whole did, and its generations' numbers above that."""
    spans = [
        Span(one.what, one.began, one.until, f"{one.what} for {seconds(one.until - one.began)}")
        for one in told.slices
    ]
    yield from _bars(spans, frame, _AXIS + 17, 14, COLUMNS)
    ends = [one.formed if one.formed is not None else one.restored for one in told.moments[1:]]
    free = 0.0  # from where on there is room for a number
    for one, until in zip(told.moments, [*ends, frame.until], strict=False):
        began = one.formed if one.formed is not None else one.restored
        share, label = frame.share(began), str(one.number)
        if share >= free and frame.share(until) - share > 1.5:
            yield tag("text", label, x=frame.x(began), y=_AXIS + 11, class_="number", dx=1)
            free = share + 2.5 + 2 * len(label)
        if len(told.moments) <= SPANS:
            yield tag(
                "line", x1=frame.x(began), x2=frame.x(began), y1=_AXIS + 2, y2=_AXIS + 34, class_="begin"
            )


def _lane(lane: Lane, frame: _Frame, y: int, *, roomy: bool) -> Markup:
    bar_y, bar = (y + 24, 14) if roomy else (y + 16, 11)
    parts: list[Markup] = [
        tag("text", cut(lane.node, 40), x=0, y=y + 12, class_="name"),
    ]
    parts += _bars(lane.spans, frame, bar_y, bar, COLUMNS if roomy else COLUMNS // 4)
    marks = lanes.clustered(lane.marks, frame.began, frame.until, MARKS)
    for what in (CHECKPOINT, TROUBLE, FAULT, INCIDENT):  # the last lies on top
        parts += [_mark(mark, frame, bar_y, bar) for mark in marks if mark.what == what]
    return tag("g", *parts)


def _bars(spans: Sequence[Span], frame: _Frame, y: int, height: int, dots: int) -> Iterable[Markup]:
    """One rectangle for each span; of too many, columns that are split by what filled their time."""
    if len(spans) <= SPANS:
        yield from (_bar(span, frame, y, height, f"s-{span.what}") for span in spans)
        return
    for column in lanes.columns(spans, frame.began, frame.until, dots):
        parts = [tag("title", ", ".join(f"{percent(share)} {what}" for what, share in column.shares))]
        bottom = float(y + height)
        for what, share in column.shares:
            bottom -= share * height
            parts.append(
                tag(
                    "rect",
                    x=frame.x(column.began),
                    y=f"{bottom:.2f}",
                    width=frame.width(column.began, column.until),
                    height=f"{share * height:.2f}",
                    class_=f"s-{what}",
                )
            )
        yield tag("g", *parts)


def _bar(span: Span, frame: _Frame, y: int, height: int, kind: str) -> Markup:
    return tag(
        "rect",
        tag("title", span.text),
        x=frame.x(span.began),
        y=y,
        width=frame.width(span.began, span.until),
        height=height,
        class_=kind,
    )


def _mark(mark: Mark, frame: _Frame, bar_y: int, bar: int) -> Markup:
    y = {CHECKPOINT: bar_y + bar + 2, TROUBLE: bar_y + bar + 2, FAULT: bar_y - 2, INCIDENT: bar_y + bar / 2}[
        mark.what
    ]
    return tag(
        "use",
        tag("title", mark.text),
        href=f"#{mark.what}",
        x=frame.x(mark.t),
        y=f"{y:g}",
    )


def _definitions() -> Markup:
    """The shapes of marks, and the patterns of bars that are not training."""
    return tag(
        "defs",
        _hatch("hatch-gone", "hatch-gone-line", 5),
        _hatch("hatch-repeated", "hatch-repeated-line", 4),
        tag(
            "g",
            tag("circle", r=6, class_="incident-disc"),
            tag("path", d="M-3-3 3 3M3-3-3 3", class_="incident-cross"),
            id=INCIDENT,
        ),
        tag("path", d="M0 0-5-8H5Z", class_="fault-arrow", id=FAULT),
        tag("path", d="M0 0 4 4 0 8-4 4Z", class_="trouble-diamond", id=TROUBLE),
        tag("path", d="M0 0V5", class_="checkpoint-tick", id=CHECKPOINT),
    )


def _hatch(name: str, kind: str, size: int) -> Markup:
    lines = tag("path", d=f"M0 0V{size}", class_=kind)
    ground = tag("rect", width=size, height=size, class_=f"{kind}-ground")
    return tag(
        "pattern",
        ground,
        lines,
        id=name,
        width=size,
        height=size,
        patternUnits="userSpaceOnUse",
        patternTransform="rotate(45)",
    )


def stack(parts: Iterable[tuple[str, float]], label: str) -> Markup:
    """One bar in pieces, each as broad as its share of all. ``label`` says it for those who do not see it."""
    listed = [(kind, value) for kind, value in parts if value > 0]
    whole = sum(value for _, value in listed) or 1.0
    pieces, x = [], 0.0
    for kind, value in listed:
        width = 100 * value / whole
        title = tag("title", f"{kind}: {seconds(value)}")
        pieces.append(
            tag("rect", title, x=f"{x:.3f}%", width=f"{width:.3f}%", height="100%", class_=f"s-{kind}")
        )
        x += width
    return tag(
        "svg",
        tag("title", label),
        *pieces,
        class_="stack",
        role="img",
        width="100%",
        height=18,
        aria_label=label,
    )


def swatch(kind: str) -> Markup:
    """A key of the legend: a piece of bar, or a mark."""
    if kind in {INCIDENT, FAULT, TROUBLE, CHECKPOINT}:
        y = {INCIDENT: 7, FAULT: 11, TROUBLE: 3, CHECKPOINT: 4}[kind]
        inner = tag("use", href=f"#{kind}", x=8, y=y)
    else:
        inner = tag("rect", y=2, width=16, height=10, class_=f"s-{kind}")
    return tag("svg", inner, class_="swatch", width=16, height=14, aria_hidden="true")
