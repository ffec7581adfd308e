"""All that a report tells, put together once for the terminal, the page and programs. Pure.

Promise: any list of events gives a story. Times lie on one axis (`clocks`); what lies on
disk, the texts of hangs and what could not be read are arguments, since events alone do not tell of them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from elastic_resume.events import Event, booted
from elastic_resume.report import clocks, goodput, incidents, ledger, timeline, troubles, verdict
from elastic_resume.report.checkpoints import Item
from elastic_resume.report.clocks import Clock
from elastic_resume.report.goodput import Goodput, Slice
from elastic_resume.report.incidents import Report
from elastic_resume.report.ledger import Copy
from elastic_resume.report.moments import Moments, Phases, moments, phases
from elastic_resume.report.timeline import Timeline
from elastic_resume.report.troubles import Trouble
from elastic_resume.report.verdict import Verdict

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
    zeros = clocks.boot_times(events)
    here = booted(stamp or {})
    if now is not None and here is not None and here[0] in zeros:
        now = zeros[here[0]] + here[1]
    aligned, off = clocks.align(events, zeros)
    line = timeline.build(aligned)
    report = incidents.of(line)
    found = moments(line, report)
    parts = goodput.slices(line, report, found)
    spent = goodput.total(parts, found)
    price = goodput.costs(parts, report, found)
    odd = troubles.find(line)
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
        verdict=verdict.of(
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
        copies=ledger.of(line, report, items),
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
