"""All that a report tells, put together once for the terminal, the page and programs. Pure.

Promise: any list of events gives a story. Times lie on one axis (`clocks`); what lies on
disk, the texts of hangs and what could not be read are arguments, since events alone do not tell of them.

The run in a sentence or two, and what a person should look at first. Pure.

What followed each fault: the incidents after it, before the next one that hit the same node. Pure.

Each incident follows from one fault at most; many faults have none. A fault that came when the failure had
been noticed did not cause it; what befell a node that no fault had hit is nobody's. Of several in one moment
the one that hit the very rank which ended is to blame, then one that can end something by itself.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

from elastic_resume.events import Event, booted
from elastic_resume.policy.failure_classification import NODE_LOST
from elastic_resume.policy.incidents import JOB
from elastic_resume.report import alerts, checkpoints, clock_alignment, event_log, goodput, incidents
from elastic_resume.report.alerts import BAD, Trouble
from elastic_resume.report.checkpoints import Copy, Item
from elastic_resume.report.clock_alignment import Clock
from elastic_resume.report.event_log import Timeline
from elastic_resume.report.formatting import amount, cut, percent, seconds
from elastic_resume.report.goodput import Goodput, Moments, Phases, Slice, moments, phases
from elastic_resume.report.incidents import Generation, Report

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


def judge_end(
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


SCHEMA = 1


@dataclass(frozen=True)
class Fault:
    """An injected cause, as its maker tells it. ``generation``: the one that ran then.

    It explains nothing by itself: why a generation ended is what its nodes saw.
    """

    number: int | None
    what: str
    where: str
    when: str
    node: str
    rank: int | None
    t: float
    message: str
    generation: int | None

    @property
    def text(self) -> str:
        """What was broken, in words."""
        where = self.node or self.where
        rank = f" rank {self.rank}" if self.rank is not None else ""
        name = f"{self.what}{f' {where}' if where else ''}{rank}"
        if self.message.startswith(self.what):
            return self.message
        return f"{name}: {self.message}" if self.message else name


@dataclass(frozen=True)
class Story:
    """One run.

    ``silent_s``: for how long nothing has been written, where the present is known.
    ``recoveries``: the phases of the recovery after a generation, by its number. ``costs``: the seconds of
    training that its end took, if that was a failure.

    ``stacks``: what a node wrote of a hang, by node and file name. ``problems``: what could not be read.
    """

    run_id: str
    command: str
    began: float | None
    until: float | None
    silent_s: float | None
    verdict: Verdict
    report: Report
    recoveries: Mapping[int, Phases]
    costs: Mapping[int, float]
    goodput: Goodput
    troubles: tuple[Trouble, ...]
    faults: tuple[Fault, ...]
    copies: tuple[Copy, ...]
    clocks: tuple[Clock, ...]
    stacks: Mapping[str, str]
    problems: tuple[str, ...]
    line: Timeline = field(repr=False)
    slices: tuple[Slice, ...] = field(repr=False)
    moments: tuple[Moments, ...] = field(repr=False)

    def after_fault(self, t: float) -> str:
        """What is said of a fault at ``t`` from which no incident followed."""
        went_on = any(one.last is not None and one.last > t for one in self.moments)
        return "training went on" if went_on else "no step came after it"


def tell(
    events: Iterable[Event],
    *,
    items: Sequence[Item] = (),
    stacks: Mapping[str, str] | None = None,
    problems: Sequence[str] = (),
    now: float | None = None,
    stamp: Event | None = None,
) -> Story:
    """Put together what ``events`` tell, and what else is known.

    ``items``: what lies on disk. ``now``: the present, in Unix seconds, where the run may still be going on;
    ``stamp``: the same as `events.stamp` gives it, which counts where the run is on this machine.
    """
    events = list(events)
    zeros = clock_alignment.boot_times(events)
    here = booted(stamp or {})
    if now is not None and here is not None and here[0] in zeros:
        now = zeros[here[0]] + here[1]
    aligned, off = clock_alignment.align(events, zeros)
    line = event_log.build(aligned)
    report = incidents.of(line)
    found = moments(line, report)
    parts = goodput.slices(line, report, found)
    spent = goodput.total(parts, found)
    price = goodput.costs(parts, report, found)
    odd = alerts.find(line)
    starts = line.of_kind("agent-start")
    own = [one.t for one in line.seen if one.kind != "fault"]
    silent_s = now - max(own) if now is not None and own else None
    recovered = ((before.number, phases(before, after)) for before, after in itertools.pairwise(found))
    return Story(
        run_id=next((one.text("run_id") for one in starts if one.text("run_id")), ""),
        command=next((one.text("command") for one in reversed(starts) if one.text("command")), ""),
        began=min(own, default=None),
        until=max(own, default=None),
        silent_s=silent_s,
        verdict=judge_end(
            report,
            spent,
            sum(price.values()),
            odd,
            off,
            silent_s=silent_s,
        ),
        report=report,
        recoveries={number: one for number, one in recovered if one is not None},
        costs=price,
        goodput=spent,
        troubles=odd,
        faults=_faults(line, found),
        copies=checkpoints.of(line, report, items),
        clocks=off,
        stacks=dict(stacks or {}),
        problems=tuple(problems),
        line=line,
        slices=parts,
        moments=found,
    )


def _faults(line: Timeline, found: Sequence[Moments]) -> tuple[Fault, ...]:
    made = []
    for one in line.of_kind("fault"):
        running = [each.number for each in found if each.restored <= one.t]
        number = one.raw.get("number")
        made.append(
            Fault(
                number=number if type(number) is int else None,
                what=one.text("what") or "fault",
                where=str(one.raw.get("where") or ""),
                when=str(one.raw.get("when") or ""),
                node=one.node,
                rank=one.rank,
                t=one.t,
                message=one.text("message"),
                generation=running[-1] if running else None,
            )
        )
    return tuple(made)


def as_json(told: Story) -> str:
    """Return the report as JSON, whose members docs/report.md describes.

    Within one `SCHEMA` members are only added. Times are Unix seconds, durations seconds, null is unknown.
    """
    report = asdict(told.report)
    for row in report["generations"]:
        phases = told.recoveries.get(row["number"])
        row["recovery"] = asdict(phases) if phases is not None else None
        row["cost_s"] = told.costs.get(row["number"])
    members: dict[str, Any] = {
        "schema": SCHEMA,
        "run_id": told.run_id,
        "command": told.command,
        "began": told.began,
        "until": told.until,
        "verdict": asdict(told.verdict),
        "outcome": report.pop("outcome"),
        "message": report.pop("message"),
        "goodput": {**asdict(told.goodput), "share": told.goodput.share},
        **report,
        "troubles": [asdict(one) for one in told.troubles],
        "faults": [asdict(one) for one in told.faults],
        "checkpoints": [asdict(one) for one in told.copies],
        "clocks": [asdict(one) for one in told.clocks],
        "hangs": [{"file": name, "text": text} for name, text in told.stacks.items()],
        "problems": list(told.problems),
    }
    return json.dumps(members, indent=1, allow_nan=False) + "\n"


SLACK_S = 0.1  # by which a node may tell of what befell it before its maker has done it
MOMENT_S = 1.0
SPOIL = frozenset({"torn-write", "bit-flip"})
"""Kinds of faults (`faults.kinds`) that hit a copy, which a later start sets aside: nothing ends of that."""
MILD = SPOIL | {
    *("slow-rank", "slow-link", "slow-disk", "packet-loss"),
    *("disk-full", "disk-error", "corrupt-message"),
}
"""Kinds that cost time at the most, as long as all is well: any other explains an end better."""


class Hit(NamedTuple):
    """When a fault came, and whom it hit; no node: all of them. ``what``: its kind."""

    t: float
    nodes: Sequence[str]
    rank: int | None = None
    what: str = ""


def generations_after(faults: Sequence[Hit], rows: Sequence[Generation]) -> list[list[Generation]]:
    """For each fault the generations that ended of it."""
    order = sorted(range(len(faults)), key=lambda place: faults[place].t)
    ordered = [faults[place] for place in order]
    nodes = {row.end.node for row in rows}
    by_node: dict[str, list[int]] = defaultdict(list)  # places in that order
    for place, fault in enumerate(ordered):
        for node in set(fault.nodes) or nodes:
            by_node[node].append(place)
    found: list[list[Generation]] = [[] for _ in faults]
    for row, following in zip_longest(rows, rows[1:]):
        if not row.end.is_failure:
            continue
        same = by_node.get(row.end.node, []) if row.end.node else range(len(order))
        cause = _cause(row, same, ordered, following.began if following else math.inf)
        if cause is not None:
            found[order[cause]].append(row)
    return found


def _cause(row: Generation, same: Sequence[int], faults: Sequence[Hit], until: float) -> int | None:
    """Which of the faults at the places ``same`` ended it; None: none of them."""
    t = until if row.end.t is None else row.end.t

    def first_from(moment: float) -> int:
        return bisect.bisect_left(same, moment, key=lambda place: faults[place].t)

    def grave(places: Sequence[int]) -> Sequence[int]:
        there = set(row.nodes or ())
        apart = [place for place in places if there and there.isdisjoint(faults[place].nodes or there)]
        hit = [place for place in places if place not in apart] or places
        return [place for place in hit if faults[place].what not in MILD] or hit

    before = first_from(t + SLACK_S)
    since = same[first_from(t - SLACK_S) : first_from(math.nextafter(until, math.inf))]
    if row.end.kind in {NODE_LOST, JOB} and since:
        return grave(since)[0]  # it fell silent, and t is what it told last
    just = same[first_from(t - MOMENT_S) : before] or same[max(0, before - 1) : before]
    rank = row.end.rank
    its_own = [place for place in just if rank is not None and faults[place].rank == rank]
    return grave(its_own or just)[-1] if just else None
