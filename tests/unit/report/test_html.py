"""Test the page of a report as text; test_report_browser.py opens it in a browser."""

from __future__ import annotations

import dataclasses
import math
from html.parser import HTMLParser

import pytest

from elastic_resume.mechanisms.mechanism import Chart
from elastic_resume.report import html, summary
from tests.support.report_runs import Job

HOSTILE = "</script><script>alert(1)</script>\x00\"'<!-- <img src=x onerror=alert(2)>"


class Elements(HTMLParser):
    """Collects the elements, attributes and text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """One element begins."""
        self.names.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        """Text between elements."""
        self.text += data


def test_exception_message_is_escaped() -> None:
    """No message becomes an element, attribute or script."""
    job = Job().begun()
    job.fail(110.2, 1, HOSTILE, HOSTILE)
    job.begin(115, 10, "n0", HOSTILE, "n2")
    report = dataclasses.replace(summary.build_run_report(job.events), run_id=HOSTILE)
    found = Elements(html.render_page(report))
    assert "script" not in found.names
    assert "img" not in found.names
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    assert "<script>alert(1)</script>" in found.text
    assert "\x00" not in found.text


@pytest.mark.parametrize(
    ("died", "now", "word"),
    [(False, 111, "running?"), (False, 1e6, "silent"), (True, 111, "down"), (True, 1e6, "down")],
)
def test_state_agrees_with_verdict(died: bool, now: float, word: str) -> None:
    """A silent run, or one whose last generation failed, is not shown as running."""
    job = Job().begun()
    if died:
        job.exit(110.2, 1, signal="SIGKILL")
    assert f">{word}</span>" in html.render_page(summary.build_run_report(job.events, now=now))


def test_fault_is_listed_with_its_generation() -> None:
    """The row of the generation has the fault too, beside why it ended."""
    job = Job().begun()
    slow = {"number": 1, "what": "slow-link", "where": "n2", "when": "", "rank": None}
    job.add(104, "fault", "n2", **slow, message="slow-link n2 (for 5s)")
    kill = {**slow, "number": 2, "what": "kill-worker", "where": "n1"}
    job.add(110.1, "fault", "n1", **kill, message="kill-worker n1")
    job.exit(110.2, 1, signal="SIGKILL")
    told = html.render_page(summary.build_run_report(job.events))
    rows = told[told.index("Injected faults") :].split("<tr>")[2:4]
    listed = ["<td>1</td><td>slow-link n2 (for 5s)", "<td>1</td><td>kill-worker n1"]
    assert [words in row for words, row in zip(listed, rows, strict=True)] == [True] * 2
    assert "<small>injected: kill-worker n1</small>" in told
    assert "slow-link n2: slow-link" not in told


def test_terminal_cuts_long_exception_message() -> None:
    """The page shows more of it, and JSON everything."""
    job = Job().begun()
    job.fail(110.2, 1, "ValueError", "x" * 35_000)
    assert len(summary.format_text(summary.build_run_report(job.events))) < 4000


def test_chart_has_every_spike_and_names_what_it_cannot_draw() -> None:
    """A column of several points keeps its smallest and its greatest; nan has no place."""
    points = [(step, 100.0 if step == 5001 else float(step % 7)) for step in range(1, 10_001)]
    drawn = html._draw_chart(Chart("loss", [*points, (10_001, math.nan)], [0, 5000]))
    assert drawn is not None
    assert len(drawn["line"]) <= 2 * html.CHART_COLUMNS
    assert min(drawn["line"], key=lambda place: place[1]) == (5000 / 9999, 0.0)
    assert drawn["line"] == sorted(drawn["line"], key=lambda place: place[0])
    assert drawn["restarts"] == [4999 / 9999]
    assert (drawn["range"], drawn["steps"]) == ("0 to 100, last 4", "steps 1 to 10000")
    assert drawn["unusual"] == 1
    assert html._draw_chart(Chart("lr", [(3, 0.1), (4, 0.1)], [])) == {
        "name": "lr",
        "line": [(0.0, 0.5), (1.0, 0.5)],
        "restarts": [],
        "range": "0.1 to 0.1, last 0.1",
        "steps": "steps 3 to 4",
        "unusual": 0,
    }
    assert html._draw_chart(Chart("loss", [(1, math.inf)], [])) is None


def test_page_shows_charts_with_escaped_names() -> None:
    """A script may log a key such as <script>."""
    charts = [Chart("<script>", [(1, 0.5), (2, 0.25)], [1])]
    page = html.render_page(summary.build_run_report(Job().begun().events, charts=charts))
    assert "&lt;script&gt;" in page
    assert "<script>" not in page
    assert 'd="M0.000 0.000 L100.000 100.000h0"' in page
