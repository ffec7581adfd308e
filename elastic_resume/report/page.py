"""One self-contained HTML page that tells what befell a run.

Promise: the page asks nobody for anything (its content security policy forbids that and any script), and
whatever the events hold is shown as text. Pure: events in, text out. Does not know where events come from.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Iterable
from importlib import resources
from string import Template

from elastic_resume import __version__
from elastic_resume.events import Event
from elastic_resume.report import drawing, lanes, ledger, story, tables
from elastic_resume.report import render as terminal
from elastic_resume.report.markup import Markup, joined, tag, text
from elastic_resume.report.story import Story
from elastic_resume.report.tables import PHASES, section
from elastic_resume.report.text import percent, seconds
from elastic_resume.report.verdict import PARTS, SILENT_S

_OUTCOMES = {
    "finished": ("good", "finished"),
    "failed": ("bad", "failed"),
    "stopped": ("other", "stopped"),
}
_KEYS = (
    ("productive", "training that counts"),
    ("repeated", PARTS["repeated"]),
    ("starting", "starting"),
    ("restoring", "restoring"),
    ("waiting", "waiting"),
    (lanes.GONE, "gone"),
    (lanes.INCIDENT, "failure"),
    (lanes.FAULT, "injected fault"),
    (lanes.TROUBLE, "trouble"),
    (lanes.CHECKPOINT, "checkpoint"),
)


def render(
    events: Iterable[Event], *, live_s: float | None = None, now: float | None = None, title: str = ""
) -> str:
    """Give the page of a run from its events alone.

    With ``live_s`` a browser asks for it again after so many seconds. ``now``: the present, in Unix seconds.
    """
    return of(story.tell(events, now=now), live_s=live_s, title=title)


def of(told: Story, *, live_s: float | None = None, title: str = "") -> str:
    """Give the page of a story."""
    name = title or told.run_id or "a run"
    body = joined(
        [
            _header(told, name, live_s),
            tag("main", *(part for part in _sections(told) if part is not None)),
            tag("footer", f"elastic_resume {__version__}. Times count from the run's first event, in UTC."),
        ]
    )
    return _whole(name, body, live_s)


def without(why: str, live_s: float) -> str:
    """Give a page that says why there is no story yet."""
    return _whole("a run", tag("main", tag("p", why)), live_s)


def _whole(name: str, body: Markup, live_s: float | None) -> str:
    refresh = "" if live_s is None else tag("meta", http_equiv="refresh", content=f"{live_s:g}")
    return Template(_part("page.html")).substitute(
        refresh=refresh, title=text(f"{name} - elastic_resume"), style=_part("page.css"), body=body
    )


def _sections(told: Story) -> Iterable[Markup | None]:
    yield _verdict(told)
    yield _tiles(told)
    yield _goodput(told)
    yield _timeline(told)
    yield _recoveries(told)
    yield tables.generations(told)
    yield tables.failed_starts(told.report.failed_starts, told)
    yield tables.faults(told)
    yield tables.troubles(told)
    yield tables.hangs(told)
    yield tables.checkpoints(told)
    yield _problems(told)


def _header(told: Story, name: str, live_s: float | None) -> Markup:
    kind, word = _state(told, live=live_s is not None)
    when = ""
    if told.began is not None and told.until is not None:
        when = f"{_utc(told.began)} to {_utc(told.until)} UTC"
    return tag(
        "header",
        tag("div", tag("h1", name), tag("span", word, class_=f"chip {kind}"), class_="title"),
        tag("p", when, class_="note") if when else None,
        tag("code", told.command, class_="command") if told.command else None,
    )


def _state(told: Story, *, live: bool) -> tuple[str, str]:
    """How the run stands, in a word and its colour; as the verdict has it."""
    rows = told.report.generations
    if told.report.outcome != "open" or not rows:
        return _OUTCOMES.get(told.report.outcome, ("other", "not begun"))
    if rows[-1].end.is_failure:
        return "bad", "down"
    if told.silent_s is not None and told.silent_s > SILENT_S:
        return "other", "silent"
    return ("live", "running") if live else ("other", "running?")


def _verdict(told: Story) -> Markup:
    look = [tag("li", one) for one in told.verdict.look]
    return tag(
        "section",
        tag("p", told.verdict.text, class_="verdict"),
        joined([tag("h2", "Look at"), tag("ul", *look)]) if look else None,
        class_="lead",
    )


def _tiles(told: Story) -> Markup:
    report = told.report
    there = [
        one
        for one in told.copies
        if one.tier == ledger.DISK and one.state in {ledger.VALID, ledger.COMMITTED}
    ]
    newest = max(((one.generation, one.step) for one in there), default=None)
    typical = statistics.median(told.costs.values()) if told.costs else None
    tiles = (
        ("-" if told.goodput.share is None else percent(told.goodput.share), "training that counts"),
        ("-" if report.last_step is None else f"{report.last_step:,}", "step"),
        (f"{report.incidents:,}", "failure" if report.incidents == 1 else "failures"),
        (f"{report.lost_steps:,}", "step run again" if report.lost_steps == 1 else "steps run again"),
        (seconds(typical), "cost of a failure"),
        ("none" if newest is None else f"{newest[1]:,}", "newest checkpoint's step"),
    )
    return tag(
        "dl", *(tag("div", tag("dt", word), tag("dd", value)) for value, word in tiles), class_="tiles"
    )


def _goodput(told: Story) -> Markup | None:
    whole = told.goodput.total_s
    if whole <= 0:
        return None
    label = ", ".join(f"{PARTS[name]} {percent(value / whole)}" for name, value in told.goodput.parts)
    return section(
        "Where the time went",
        drawing.stack(told.goodput.parts, label),
        _legend(
            [(name, PARTS[name], value, value / whole) for name, value in told.goodput.parts if value > 0]
        ),
    )


def _recoveries(told: Story) -> Markup | None:
    """What of a recovery is not a step: how long one takes is the job's own affair."""
    medians = terminal.typical(told.recoveries.values())
    step_s = dict(medians).get("step")
    typical = [(name, value) for name, value in medians if name != "step"]
    whole = sum(value for _, value in typical)
    if whole <= 0:
        return None
    label = ", ".join(f"{PHASES[name]} {seconds(value)}" for name, value in typical)
    count = len(told.recoveries)
    note = "From the last step before, until the state is there again."
    note += f" The first step then takes {seconds(step_s)}." if step_s is not None else ""
    note += f" Medians of {count} recoveries." if count > 1 else ""
    return section(
        "How long a recovery takes",
        drawing.stack([(f"p-{name}", value) for name, value in typical], label),
        _legend([(f"p-{name}", PHASES[name], value, value / whole) for name, value in typical]),
        note=note,
    )


def _legend(rows: Iterable[tuple[str, str, float, float]]) -> Markup:
    items = [
        tag(
            "li",
            drawing.swatch(kind),
            tag("span", word),
            tag("b", seconds(value)),
            tag("small", percent(share)),
        )
        for kind, word, value, share in rows
    ]
    return tag("ul", *items, class_="legend")


def _timeline(told: Story) -> Markup | None:
    every = lanes.of(told)
    drawn = drawing.timeline(told, every)
    if drawn is None:
        return None
    seen = {one.what for one in told.slices}
    seen |= {span.what for lane in every for span in lane.spans}
    seen |= {mark.what for lane in every for mark in lane.marks}
    keys = [tag("li", drawing.swatch(kind), tag("span", word)) for kind, word in _KEYS if kind in seen]
    crowded = len(told.slices) > drawing.SPANS
    note = "Too much to draw one by one: each column of a bar is split by what its time went into."
    notes = [tag("p", note, class_="note")] if crowded else []
    notes += [tag("p", _sentence(terminal.clock(one)), class_="note") for one in told.clocks[:5]]
    return section("Timeline", drawn, tag("ul", *keys, class_="keys"), *notes)


def _problems(told: Story) -> Markup | None:
    if not told.problems:
        return None
    return section("Could not be read", tag("ul", *(tag("li", one) for one in told.problems)))


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


def _utc(t: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(t))
    except (ValueError, OverflowError, OSError):
        return f"{t:.0f} s"


@functools.cache
def _part(name: str) -> str:
    return resources.files("elastic_resume.report").joinpath(name).read_text(encoding="utf-8")
