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

from elastic_resume.events import Event, get_boot_time
from elastic_resume.policy.failure_classification import NODE_LOST
from elastic_resume.policy.incidents import WHOLE_JOB
from elastic_resume.report import alerts, checkpoints, clock_alignment, event_log, goodput, incidents
from elastic_resume.report.alerts import BAD, Alert
from elastic_resume.report.checkpoints import CheckpointEntry, SavedStateRecord
from elastic_resume.report.clock_alignment import ClockOffset
from elastic_resume.report.event_log import EventTimeline
from elastic_resume.report.formatting import format_count, format_percent, format_seconds, truncate
from elastic_resume.report.goodput import (
    GenerationTimes,
    Goodput,
    RecoveryPhases,
    TimeSlice,
    measure_generations,
    recovery_phases,
)
from elastic_resume.report.incidents import Generation, RunHistory

MAX_HINTS = 6
MAX_MESSAGE_CHARS = 500  # characters of what an exception said, in a sentence
_MIN_REPEATED_FAILURES = 3  # failures of one node, from which on it is worth a look
_LOW_GOODPUT, _LONG_RUN_S = (
    0.9,
    600.0,
)  # of the time in training: what is below asks why, where a run is that long
MAX_SILENCE_S = 60.0  # a run that still goes on has marked a step since


@dataclass(frozen=True)
class RunVerdict:
    """``text``: how the run ended or stands, at which step, and what it cost. ``look``: at what, in order."""

    text: str
    hints: tuple[str, ...]


def summarize_run(
    history: RunHistory,
    goodput: Goodput,
    downtime_s: float,
    alerts: Sequence[Alert],
    clocks: Sequence[ClockOffset],
    *,
    silent_s: float | None = None,
) -> RunVerdict:
    """Judge a run.

    ``cost_s`` is what its failures cost. ``silent_s``: since when no event has come, where that is known.
    """
    return RunVerdict(
        " ".join(
            filter(
                None, [_describe_state(history, goodput), _describe_downtime(history, goodput, downtime_s)]
            )
        ),
        tuple(
            [
                *_hints_from_end(history, silent_s),
                *_hints_from_alerts(alerts),
                *_hints_from_totals(history, goodput, clocks),
            ][:MAX_HINTS]
        ),
    )


def _describe_state(history: RunHistory, goodput: Goodput) -> str:
    at = f" at step {history.last_step}" if history.last_step is not None else " before its first step"
    after = f" after {format_seconds(goodput.total_s)}" if goodput.total_s else ""
    if history.outcome == "finished":
        return f"Finished{at}{after}."
    if history.outcome == "failed":
        return f"FAILED{at}{after}: {truncate(history.message.rstrip('.'), MAX_MESSAGE_CHARS) or 'no reason was left'}."
    if history.outcome == "stopped":
        return f"Stopped{at}{after}: {truncate(history.message.rstrip('.'), MAX_MESSAGE_CHARS) or 'it was told to'}."
    if not history.generations:
        return f"No training yet{after}."
    if history.generations[-1].end.is_failure:
        why = history.generations[-1].end.text.rstrip(".")
        return f"Down{at}{after}, and not back yet: {truncate(why, MAX_MESSAGE_CHARS)}."
    return f"Running, or killed as a whole,{at}{after}."


def _describe_downtime(history: RunHistory, goodput: Goodput, downtime_s: float) -> str:
    if not history.generations:
        return ""
    share = (
        ""
        if goodput.share is None
        else f"{format_percent(goodput.share)} of the time was training that counts"
    )
    if not history.num_incidents:
        return f"No failure{f'; {share}' if share else ''}."
    again = (
        f"{format_count(history.recomputed_steps, 'step')} run again"
        if history.recomputed_steps
        else "no step run again"
    )
    price = f"{format_count(history.num_incidents, 'failure')} cost {format_seconds(downtime_s)}, {again}"
    return f"{price}; {share}." if share else f"{price}."


def _hints_from_end(history: RunHistory, silent_s: float | None) -> list[str]:
    look = []
    last = history.generations[-1] if history.generations else None
    if history.outcome == "failed" and last is not None and last.end.is_failure:
        look.append(f"what ended generation {last.number}: {last.end.text}")
    if history.outcome == "open" and silent_s is not None and silent_s > MAX_SILENCE_S:
        look.append(f"no node has written anything for {format_seconds(silent_s)}: does the job still run?")
    starts = [one for one in history.failed_starts if not one.is_secondary]
    if starts:
        before = f", {starts[0].text} first" if starts[0].text else ""
        look.append(f"{format_count(len(starts), 'worker')} ended before training{before}")
    return look


def _hints_from_alerts(troubles: Sequence[Alert]) -> list[str]:
    look = []
    counts: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], Alert] = {}
    for one in troubles:
        if one.severity == BAD:
            counts[one.kind, one.node] += one.count
            first.setdefault((one.kind, one.node), one)
    rank = ["replicas-differ", "hang", "commit-failed", "quarantine"]
    ordered = sorted(
        counts, key=lambda key: (rank.index(key[0]) if key[0] in rank else len(rank), -counts[key])
    )
    for key in ordered:
        one = first[key]
        times = f" ({format_count(counts[key], 'time')})" if counts[key] > 1 else ""
        still = "" if one.is_resolved else "; that was not over"
        look.append(f"{one.node or 'a node'}: {one.text}{times}{still}")
    return look


def _hints_from_totals(history: RunHistory, goodput: Goodput, clocks: Sequence[ClockOffset]) -> list[str]:
    look = []
    failures = [one.end for one in history.generations if one.end.is_failure]
    for node, count in Counter(end.node for end in failures if end.node).most_common(1):
        if count >= _MIN_REPEATED_FAILURES and count * 2 >= len(failures):
            look.append(f"node {node} was first in {count} of {len(failures)} failures")
    for clock in clocks[:1]:
        more = f" (and {len(clocks) - 1} more)" if len(clocks) > 1 else ""
        look.append(f"{clock.text}{more}")
    if goodput.total_s >= _LONG_RUN_S and goodput.productive_s < _LOW_GOODPUT * goodput.total_s:
        rest = [part for part in goodput.parts if part[0] != "productive"]
        name, spent = max(rest, key=lambda part: part[1])
        look.append(
            f"{format_percent(spent / goodput.total_s)} of the time went into {GOODPUT_LABELS[name]} ({format_seconds(spent)})"
        )
    return look


GOODPUT_LABELS = {
    "productive": "training that counts",
    "starting": "starting workers",
    "restoring": "restoring the state",
    "stalled": "waiting for copies",
    "recomputed": "steps run again, or cut off",
    "waiting": "waiting for a world",
}


REPORT_SCHEMA = 1


@dataclass(frozen=True)
class InjectedFault:
    """An injected cause, as its maker tells it. ``generation``: the one that ran then.

    It explains nothing by itself: why a generation ended is what its nodes saw.
    """

    number: int | None
    kind: str
    target: str
    trigger: str
    node: str
    rank: int | None
    t: float
    message: str
    generation: int | None

    @property
    def text(self) -> str:
        """What was broken, in words."""
        where = self.node or self.target
        rank = f" rank {self.rank}" if self.rank is not None else ""
        name = f"{self.kind}{f' {where}' if where else ''}{rank}"
        if self.message.startswith(self.kind):
            return self.message
        return f"{name}: {self.message}" if self.message else name


@dataclass(frozen=True)
class RunReport:
    """One run.

    ``silent_s``: for how long nothing has been written, where the present is known.
    ``recoveries``: the phases of the recovery after a generation, by its number. ``costs``: the seconds of
    training that its end took, if that was a failure.

    ``stacks``: what a node wrote of a hang, by node and file name. ``problems``: what could not be read.
    """

    run_id: str
    command: str
    start_t: float | None
    end_t: float | None
    silent_s: float | None
    verdict: RunVerdict
    history: RunHistory
    recoveries: Mapping[int, RecoveryPhases]
    downtimes: Mapping[int, float]
    goodput: Goodput
    alerts: tuple[Alert, ...]
    faults: tuple[InjectedFault, ...]
    saved_states: tuple[SavedStateRecord, ...]
    clocks: tuple[ClockOffset, ...]
    stacks: Mapping[str, str]
    problems: tuple[str, ...]
    timeline: EventTimeline = field(repr=False)
    slices: tuple[TimeSlice, ...] = field(repr=False)
    generation_times: tuple[GenerationTimes, ...] = field(repr=False)

    def describe_after_fault(self, t: float) -> str:
        """What is said of a fault at ``t`` from which no incident followed."""
        went_on = any(one.last_step_t is not None and one.last_step_t > t for one in self.generation_times)
        return "training went on" if went_on else "no step came after it"


def build_run_report(
    events: Iterable[Event],
    *,
    checkpoint_entries: Sequence[CheckpointEntry] = (),
    stacks: Mapping[str, str] | None = None,
    problems: Sequence[str] = (),
    now: float | None = None,
    boot_stamp: Event | None = None,
) -> RunReport:
    """Put together what ``events`` tell, and what else is known.

    ``items``: what lies on disk. ``now``: the present, in Unix seconds, where the run may still be going on;
    ``stamp``: the same as `events.stamp` gives it, which counts where the run is on this machine.
    """
    events = list(events)
    zeros = clock_alignment.estimate_boot_times(events)
    here = get_boot_time(boot_stamp or {})
    if now is not None and here is not None and here[0] in zeros:
        now = zeros[here[0]] + here[1]
    aligned, off = clock_alignment.align_events(events, zeros)
    line = event_log.build_timeline(aligned)
    report = incidents.build_history(line)
    found = measure_generations(line, report)
    parts = goodput.slice_time(line, report, found)
    spent = goodput.sum_goodput(parts, found)
    price = goodput.measure_downtimes(parts, report, found)
    odd = alerts.find_alerts(line)
    starts = line.select("agent-start")
    own = [one.t for one in line.events if one.kind != "fault"]
    silent_s = now - max(own) if now is not None and own else None
    recovered = (
        (before.number, recovery_phases(before, after)) for before, after in itertools.pairwise(found)
    )
    return RunReport(
        run_id=next((one.get_text("run_id") for one in starts if one.get_text("run_id")), ""),
        command=next((one.get_text("command") for one in reversed(starts) if one.get_text("command")), ""),
        start_t=min(own, default=None),
        end_t=max(own, default=None),
        silent_s=silent_s,
        verdict=summarize_run(
            report,
            spent,
            sum(price.values()),
            odd,
            off,
            silent_s=silent_s,
        ),
        history=report,
        recoveries={number: one for number, one in recovered if one is not None},
        downtimes=price,
        goodput=spent,
        alerts=odd,
        faults=_collect_faults(line, found),
        saved_states=checkpoints.build_saved_state_records(line, report, checkpoint_entries),
        clocks=off,
        stacks=dict(stacks or {}),
        problems=tuple(problems),
        timeline=line,
        slices=parts,
        generation_times=found,
    )


def _collect_faults(
    timeline: EventTimeline, generation_times: Sequence[GenerationTimes]
) -> tuple[InjectedFault, ...]:
    made = []
    for one in timeline.select("fault"):
        running = [each.number for each in generation_times if each.restored_t <= one.t]
        number = one.raw.get("number")
        made.append(
            InjectedFault(
                number=number if type(number) is int else None,
                kind=one.get_text("what") or "fault",
                target=str(one.raw.get("where") or ""),
                trigger=str(one.raw.get("when") or ""),
                node=one.node,
                rank=one.rank,
                t=one.t,
                message=one.get_text("message"),
                generation=running[-1] if running else None,
            )
        )
    return tuple(made)


def format_json(run_report: RunReport) -> str:
    """Return the report as JSON, whose members docs/report.md describes.

    Within one `SCHEMA` members are only added. Times are Unix seconds, durations seconds, null is unknown.
    """
    report = asdict(run_report.history)
    for row in report["generations"]:
        phases = run_report.recoveries.get(row["number"])
        row["recovery"] = asdict(phases) if phases is not None else None
        row["downtime_s"] = run_report.downtimes.get(row["number"])
    members: dict[str, Any] = {
        "schema": REPORT_SCHEMA,
        "run_id": run_report.run_id,
        "command": run_report.command,
        "start_t": run_report.start_t,
        "end_t": run_report.end_t,
        "verdict": asdict(run_report.verdict),
        "outcome": report.pop("outcome"),
        "message": report.pop("message"),
        "goodput": {**asdict(run_report.goodput), "share": run_report.goodput.share},
        **report,
        "alerts": [asdict(one) for one in run_report.alerts],
        "faults": [asdict(one) for one in run_report.faults],
        "checkpoints": [asdict(one) for one in run_report.saved_states],
        "clocks": [asdict(one) for one in run_report.clocks],
        "hangs": [{"file": name, "text": text} for name, text in run_report.stacks.items()],
        "problems": list(run_report.problems),
    }
    return json.dumps(members, indent=1, allow_nan=False) + "\n"


CLOCK_SLACK_S = 0.1  # by which a node may tell of what befell it before its maker has done it
FAULT_WINDOW_S = 1.0
CORRUPTING_FAULTS = frozenset({"torn-write", "bit-flip"})
"""Kinds of faults (`faults.kinds`) that hit a copy, which a later start sets aside: nothing ends of that."""
NON_FATAL_FAULTS = CORRUPTING_FAULTS | {
    *("slow-rank", "slow-link", "slow-disk", "packet-loss"),
    *("disk-full", "disk-error", "corrupt-message"),
}
"""Kinds that cost time at the most, as long as all is well: any other explains an end better."""


class FaultHit(NamedTuple):
    """When a fault came, and whom it hit; no node: all of them. ``what``: its kind."""

    t: float
    nodes: Sequence[str]
    rank: int | None = None
    kind: str = ""


def attribute_ends(faults: Sequence[FaultHit], rows: Sequence[Generation]) -> list[list[Generation]]:
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
        cause = _find_cause(row, same, ordered, following.start_t if following else math.inf)
        if cause is not None:
            found[order[cause]].append(row)
    return found


def _find_cause(
    generation: Generation, candidates: Sequence[int], faults: Sequence[FaultHit], until: float
) -> int | None:
    """Which of the faults at the places ``same`` ended it; None: none of them."""
    t = until if generation.end.t is None else generation.end.t

    def first_from(moment: float) -> int:
        return bisect.bisect_left(candidates, moment, key=lambda place: faults[place].t)

    def grave(places: Sequence[int]) -> Sequence[int]:
        there = set(generation.nodes or ())
        apart = [place for place in places if there and there.isdisjoint(faults[place].nodes or there)]
        hit = [place for place in places if place not in apart] or places
        return [place for place in hit if faults[place].kind not in NON_FATAL_FAULTS] or hit

    before = first_from(t + CLOCK_SLACK_S)
    since = candidates[first_from(t - CLOCK_SLACK_S) : first_from(math.nextafter(until, math.inf))]
    if generation.end.kind in {NODE_LOST, WHOLE_JOB} and since:
        return grave(since)[0]  # it fell silent, and t is what it told last
    just = candidates[first_from(t - FAULT_WINDOW_S) : before] or candidates[max(0, before - 1) : before]
    rank = generation.end.rank
    its_own = [place for place in just if rank is not None and faults[place].rank == rank]
    return grave(its_own or just)[-1] if just else None
