"""What each node of a run did when: the timeline, before it is drawn. Pure.

A node's lane is made of the generations that it took part in and of its agent's comings and goings; a node
whose own log is lost has the former. Where a run has more of them than a screen has dots, `columns` and
`clustered` keep what a person could still see, and lose no share and no incident.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic_resume.report.story import Story
from elastic_resume.report.text import amount, seconds
from elastic_resume.report.timeline import Seen
from elastic_resume.report.troubles import BAD, NOTE

TRAINING, PREPARING, IDLE, GONE = "training", "preparing", "idle", "gone"
INCIDENT, FAULT, TROUBLE, CHECKPOINT = "incident", "fault", "trouble", "checkpoint"


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
    """One node's."""

    node: str
    spans: tuple[Span, ...]
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class _Part:
    """A node's part in one generation."""

    number: int
    formed: float
    restored: float
    stopped: float


def of(told: Story) -> tuple[Lane, ...]:
    """A lane for each node, in the order in which they first took part."""
    if told.until is None:
        return ()
    parts = _parts(told)
    names = dict.fromkeys([*parts, *sorted(node for node in told.line.nodes if node)])
    marks = _marks(told)
    return tuple(
        Lane(node, tuple(_spans(told, node, parts.get(node, []))), tuple(marks.get(node, ())))
        for node in names
    )


def _parts(told: Story) -> dict[str, list[_Part]]:
    parts: dict[str, list[_Part]] = {}
    for one, row in zip(told.moments, told.report.generations, strict=True):
        over = one.until if row.end.kind in {"finished", "open"} or one.noticed is None else one.noticed
        for node in row.nodes:
            formed = one.formed if one.formed is not None else one.restored
            parts.setdefault(node, []).append(
                _Part(row.number, formed, one.restored, max(over, one.restored))
            )
    return parts


def _spans(told: Story, node: str, parts: Sequence[_Part]) -> list[Span]:
    log = told.line.nodes.get(node, ())
    came = [one for one in log if one.kind in {"agent-start", "agent-end"}]
    until = told.until or 0.0
    spans: list[Span] = []
    cursor: float | None = None  # where its last part ended
    for part in parts:
        spans += _between(came, cursor, part.formed)
        text = f"generation {part.number}: prepares for {seconds(part.restored - part.formed)}"
        spans.append(Span(PREPARING, part.formed, part.restored, text))
        text = f"generation {part.number}: trains for {seconds(part.stopped - part.restored)}"
        spans.append(Span(TRAINING, part.restored, part.stopped, text))
        cursor = part.stopped
    took_part = bool(parts) and parts[-1].number == told.report.generations[-1].number
    if told.report.outcome != "finished" or not took_part:
        spans += _between(came, cursor, until, last=True)
    return [span for span in spans if span.until > span.began]


def _between(came: Sequence[Seen], since: float | None, until: float, *, last: bool = False) -> list[Span]:
    """What a node was while no world had it: ``since`` None before its first one."""
    here = [one for one in came if (since is None or one.t > since - 0.5) and one.t < until]
    spans, cursor, is_there = [], since, since is not None and not last
    is_there = is_there and not any(one.kind == "agent-start" for one in here)
    if last and since is not None:
        is_there = any(one.kind == "agent-end" for one in here)
    for one in here:
        if cursor is not None and one.t > cursor:
            spans.append(_span(is_there, cursor, one.t))
        cursor, is_there = one.t, one.kind == "agent-start"
    if last and here and here[-1].kind == "agent-end":
        return spans  # it ended, and that was that
    if cursor is not None:
        spans.append(_span(is_there, cursor, until))
    return spans


def _span(is_there: bool, began: float, until: float) -> Span:
    word = "waits" if is_there else "is gone"
    return Span(IDLE if is_there else GONE, began, until, f"{word} for {seconds(until - began)}")


def _marks(told: Story) -> dict[str, list[Mark]]:
    marks: dict[str, list[Mark]] = {}
    for copy in told.copies:
        if copy.t is not None and copy.tier == "disk":
            marks.setdefault(copy.node, []).append(
                Mark(CHECKPOINT, copy.t, f"checkpoint of step {copy.step}")
            )
    for one in told.troubles:
        if one.weight in {BAD, NOTE} and one.node:
            marks.setdefault(one.node, []).append(Mark(TROUBLE, one.t, one.text))
    for moment, row in zip(told.moments, told.report.generations, strict=True):
        t = row.end.t if row.end.t is not None else moment.noticed
        if row.end.is_failure and t is not None:
            for node in [row.end.node] if row.end.node else row.nodes:
                marks.setdefault(node, []).append(
                    Mark(INCIDENT, t, f"generation {row.number}: {row.end.text}")
                )
    for fault in told.faults:
        text = f"injected: {fault.text}"
        marks.setdefault(fault.node, []).append(Mark(FAULT, fault.t, text))
    return marks


# ---- no more than can be seen --------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """A piece of a bar, and what shares of its time were spent on what; the rest on nothing."""

    began: float
    until: float
    shares: tuple[tuple[str, float], ...]


def columns(spans: Iterable[Span], began: float, until: float, dots: int) -> list[Column]:
    """At most ``dots`` columns for any number of spans. None hides what filled the lesser part of it."""
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
    """At most ``dots`` marks of each kind: those that would overlap are one, with their number."""
    listed = sorted(marks, key=lambda mark: mark.t)
    width = (until - began) / dots if until > began else 1.0
    made: dict[tuple[str, int], list[Mark]] = {}
    for mark in listed:
        made.setdefault((mark.what, int((mark.t - began) / width)), []).append(mark)
    found = []
    for (what, _), here in made.items():
        middle = here[len(here) // 2].t
        text = here[0].text if len(here) == 1 else f"{amount(len(here), what)}, the first: {here[0].text}"
        found.append(Mark(what, middle, text))
    return found
