"""The run in a sentence or two, and what a person should look at first. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_resume.report.clocks import Clock
from elastic_resume.report.goodput import Goodput
from elastic_resume.report.incidents import Report
from elastic_resume.report.text import amount, cut, percent, seconds
from elastic_resume.report.troubles import BAD, Trouble

MAX_LOOK = 6
MAX_SAID = 500  # characters of what an exception said, in a sentence
_OFTEN = 3  # failures of one node, from which on it is worth a look
_LITTLE, _LONG_S = 0.9, 600.0  # of the time in training: what is below asks why, where a run is that long
SILENT_S = 60.0  # a run that still goes on has marked a step since


@dataclass(frozen=True)
class Verdict:
    """``text``: how the run ended or stands, at which step, and what it cost. ``look``: at what, in order."""

    text: str
    look: tuple[str, ...]


def of(
    report: Report,
    goodput: Goodput,
    cost_s: float,
    troubles: Sequence[Trouble],
    clocks: Sequence[Clock],
    *,
    silent_s: float | None = None,
) -> Verdict:
    """Judge a run.

    ``cost_s`` is what its failures cost. ``silent_s``: since when no event has come, where that is known.
    """
    return Verdict(
        " ".join(filter(None, [_stands(report, goodput), _cost(report, goodput, cost_s)])),
        tuple(
            [*_of_end(report, silent_s), *_of_troubles(troubles), *_of_rest(report, goodput, clocks)][
                :MAX_LOOK
            ]
        ),
    )


def _stands(report: Report, goodput: Goodput) -> str:
    at = f" at step {report.last_step}" if report.last_step is not None else " before its first step"
    after = f" after {seconds(goodput.total_s)}" if goodput.total_s else ""
    if report.outcome == "finished":
        return f"Finished{at}{after}."
    if report.outcome == "failed":
        return f"FAILED{at}{after}: {cut(report.message.rstrip('.'), MAX_SAID) or 'no reason was left'}."
    if report.outcome == "stopped":
        return f"Stopped{at}{after}: {cut(report.message.rstrip('.'), MAX_SAID) or 'it was told to'}."
    if not report.generations:
        return f"No training yet{after}."
    if report.generations[-1].end.is_failure:
        why = report.generations[-1].end.text.rstrip(".")
        return f"Down{at}{after}, and not back yet: {cut(why, MAX_SAID)}."
    return f"Running, or killed as a whole,{at}{after}."


def _cost(report: Report, goodput: Goodput, cost_s: float) -> str:
    if not report.generations:
        return ""
    share = "" if goodput.share is None else f"{percent(goodput.share)} of the time was training that counts"
    if not report.incidents:
        return f"No failure{f'; {share}' if share else ''}."
    again = f"{amount(report.lost_steps, 'step')} run again" if report.lost_steps else "no step run again"
    price = f"{amount(report.incidents, 'failure')} cost {seconds(cost_s)}, {again}"
    return f"{price}; {share}." if share else f"{price}."


def _of_end(report: Report, silent_s: float | None) -> list[str]:
    look = []
    last = report.generations[-1] if report.generations else None
    if report.outcome == "failed" and last is not None and last.end.is_failure:
        look.append(f"what ended generation {last.number}: {last.end.text}")
    if report.outcome == "open" and silent_s is not None and silent_s > SILENT_S:
        look.append(f"no node has written anything for {seconds(silent_s)}: does the job still run?")
    starts = [one for one in report.failed_starts if not one.is_echo]
    if starts:
        before = f", {starts[0].text} first" if starts[0].text else ""
        look.append(f"{amount(len(starts), 'worker')} ended before training{before}")
    return look


def _of_troubles(troubles: Sequence[Trouble]) -> list[str]:
    look = []
    counts: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], Trouble] = {}
    for one in troubles:
        if one.weight == BAD:
            counts[one.kind, one.node] += one.count
            first.setdefault((one.kind, one.node), one)
    rank = ["replicas-differ", "hang", "commit-failed", "quarantine"]
    ordered = sorted(
        counts, key=lambda key: (rank.index(key[0]) if key[0] in rank else len(rank), -counts[key])
    )
    for key in ordered:
        one = first[key]
        times = f" ({amount(counts[key], 'time')})" if counts[key] > 1 else ""
        still = "" if one.is_over else "; that was not over"
        look.append(f"{one.node or 'a node'}: {one.text}{times}{still}")
    return look


def _of_rest(report: Report, goodput: Goodput, clocks: Sequence[Clock]) -> list[str]:
    look = []
    failures = [one.end for one in report.generations if one.end.is_failure]
    for node, count in Counter(end.node for end in failures if end.node).most_common(1):
        if count >= _OFTEN and count * 2 >= len(failures):
            look.append(f"node {node} was first in {count} of {len(failures)} failures")
    for clock in clocks[:1]:
        more = f" (and {len(clocks) - 1} more)" if len(clocks) > 1 else ""
        look.append(f"{clock.text}{more}")
    if goodput.total_s >= _LONG_S and goodput.productive_s < _LITTLE * goodput.total_s:
        rest = [part for part in goodput.parts if part[0] != "productive"]
        name, spent = max(rest, key=lambda part: part[1])
        look.append(
            f"{percent(spent / goodput.total_s)} of the time went into {PARTS[name]} ({seconds(spent)})"
        )
    return look


PARTS = {
    "productive": "training that counts",
    "starting": "starting workers",
    "restoring": "restoring the state",
    "stalled": "waiting for copies",
    "repeated": "steps run again, or cut off",
    "waiting": "waiting for a world",
}
