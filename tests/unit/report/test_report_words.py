"""Test that words decide nothing in a report: with random sentences its structure is the same."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

import pytest

from elastic_resume.events import Event
from elastic_resume.report import html, summary
from elastic_resume.report.generations import MAX_FAILURE_EVENTS, MAX_GENERATIONS, GenerationTracker
from tests.support import report_runs
from tests.support.random_words import random_words
from tests.support.report_runs import Job

RUNS = [
    function
    for _, function in inspect.getmembers(report_runs, inspect.isfunction)
    if inspect.signature(function).return_annotation in {"Job", "EventfulRun"}
    and all(item.default is not item.empty for item in inspect.signature(function).parameters.values())
]
WORDS = ["finished", "left (SIGTERM)", "newcomers", "is over", "rank 1", "gloo", "", "zebra", "reset by peer"]


def structure(value: Any) -> Any:
    """Return a JSON value whose sentences are blank."""
    if isinstance(value, dict):
        return {
            name: "" if name in {"text", "cause", "message"} else structure(item)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [structure(item) for item in value]
    return "" if isinstance(value, str) and " " in value else value


def describe_structure(events: list[Event]) -> list[Any]:
    """Return all that a reader sees of a run, except its sentences."""
    report = summary.build_run_report(events)
    document = structure(json.loads(summary.format_json(report)))
    # A sentence may be a single word, but never decides how many there are.
    document["verdict"]["hints"] = len(document["verdict"]["hints"])
    for row in document["generations"]:
        for name in ("other_failures", "secondary_failures"):
            row["end"][name] = len(row["end"][name])
    page = html.render_page(report)
    tracker = GenerationTracker(MAX_GENERATIONS, MAX_FAILURE_EVENTS)
    for event in sorted(events, key=lambda item: float(item["t"])):
        tracker.record_event(event)
    incidents = [(item.generation, item.kind, item.node, item.rank) for item in tracker.incidents()]
    return [document, page.count("<tr"), page.count("<li"), page.count("<use"), incidents, tracker.totals()]


@pytest.mark.parametrize("make", RUNS)
def test_random_words_change_no_structure(make: Callable[[], Job]) -> None:
    """Rows, kinds, counts, times and hints are the same."""
    expected = describe_structure(make().events)
    for seed in range(3):
        with random_words(seed, WORDS):
            assert describe_structure(make().events) == expected


def test_all_runs_are_tried() -> None:
    """A new run in `report_runs` is found."""
    assert len(RUNS) >= 20
