"""One self-contained HTML page that tells what befell a run.

Promise: the page asks nobody for anything (its content security policy forbids that and any script), and
whatever the events hold is shown as text. Pure: events in, text out. Does not know where events come from.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from importlib import resources
from string import Template

from elastic_resume.events import Event
from elastic_resume.report import story
from elastic_resume.report.incidents import Generation
from elastic_resume.report.markup import Markup, joined, tag, text
from elastic_resume.report.story import Story
from elastic_resume.report.text import folded, seconds

_HEAD = ("generation", "nodes", "world", "steps", "ended because", "lost", "recovered in")


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
            tag("h1", name),
            tag("p", told.verdict.text),
            tag("h2", "Generations"),
            tag(
                "table",
                tag("tr", *(tag("th", name) for name in _HEAD)),
                *(_row(one) for one in told.report.generations),
            ),
        ]
    )
    refresh = "" if live_s is None else tag("meta", http_equiv="refresh", content=f"{live_s:g}")
    return Template(_part("page.html")).substitute(
        refresh=refresh, title=text(f"{name} - elastic_resume"), style=_part("page.css"), body=body
    )


def _row(one: Generation) -> Markup:
    cells = (
        one.number,
        folded(one.nodes),
        one.world_size if one.world_size is not None else "-",
        f"{one.first_step}-{one.last_step}" if one.first_step is not None else "none",
        one.end.text,
        "-" if one.lost_steps is None else one.lost_steps,
        seconds(one.recovered_s),
    )
    return tag("tr", *(tag("td", cell) for cell in cells))


@functools.cache
def _part(name: str) -> str:
    return resources.files("elastic_resume.report").joinpath(name).read_text(encoding="utf-8")
