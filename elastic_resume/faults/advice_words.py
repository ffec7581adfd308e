"""What ``elastic-resume plan`` says, for people and for programs. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from elastic_resume.faults import simulate_job
from elastic_resume.faults.advice import LEVER, Answer, Variant
from elastic_resume.faults.advice_why import why
from elastic_resume.faults.simulate_job import Pace
from elastic_resume.policy import cadence
from elastic_resume.report.text import amount, percent, seconds, size, table, wrap

_ONLY = ("missing", "fewer", "ended")  # told where there is any
_SAYS = {
    "productive": "training that counts",
    "starting": "starting workers",
    "restoring": "loading the state",
    "stalled": "waiting for copies",
    "repeated": "steps run again, or cut off",
    "waiting": "noticing failures, forming worlds",
    "missing": "waiting for nodes",
    "fewer": "longer steps on fewer nodes",
    "ended": "after giving up",
}


def tell(answer: Answer) -> Iterator[str]:
    """Yield the lines."""
    best, site = answer.best, answer.site
    yield from wrap(_headline(answer))
    yield ""
    yield from wrap(_what(answer))
    if not _lost(best):
        yield from wrap(_use(answer))
    for sentence in (*_costs(best), *_numbers(answer)):
        yield from wrap(sentence)
    yield ""
    yield from _parts(answer)
    yield ""
    yield from _differences(answer)
    yield ""
    yield from _variants(answer)
    yield ""
    yield from wrap(_assumed(answer))
    if site.mtbf_node_s < math.inf and not _struck(best):
        yield from wrap("No failure came in that time. A longer --duration says more.")


def _headline(answer: Answer) -> str:
    """The one thing that matters most, with the goodput to be expected."""
    best, lever, count = answer.best, answer.lever, len(answer.best.outcomes)
    share = percent(best.goodput)
    ends = sorted(one.goodput for one in best.outcomes)
    between = f" ({percent(ends[0])} to {percent(ends[-1])} in {count} runs)" if ends[0] < ends[-1] else ""
    if best.gave_up:
        first = best.gave_up[0]
        text = f"The job gives up in {len(best.gave_up)} of {amount(count, 'run')}"
        text += f", even with {best.flags}" if best is not answer.asked else ""
        text += (
            f", in the first of them after {seconds(first.total_s - first.ended_s)}: {first.gave_up} With "
            f"what comes after counted as lost, {share} of the time is training that counts{between}."
        )
        if lever:
            ended = f"it gives up in {len(lever.gave_up)}" if lever.gave_up else "it does not give up"
            return f"{text} With {lever.flags} {ended}: {percent(lever.goodput)}."
        return f"{text} A greater --max-no-progress makes that rarer, where chance alone is to blame."
    lacking = best.shares["missing"]
    missing = f", as nodes are missing for {percent(lacking)} of it" if lacking > LEVER else ""
    if lever:
        more = lever.job.spares - best.job.spares
        text = f"Going on with {lever.job.min_nodes} of {amount(lever.job.nodes, 'node')} is"
        if more:
            text = amount(more, "more spare node" if best.job.spares else "spare node") + (
                " is" if more == 1 else " are"
            )
        return (
            f"{text} worth more than any cadence: {percent(lever.goodput)} of the time is training that "
            f"counts instead of {share}{between}{missing}."
        )
    if _lost(best):
        return (
            f"Training never goes on after a failure: {share} of the time is training that counts{missing}."
        )
    gain = 100 * (best.goodput - answer.asked.goodput)
    by = f"; {gain:.1f} points of it come of the cadence below" if best is not answer.asked else ""
    return f"Expect {share} of the time to be training that counts{between}{by}{missing}."


def _struck(one: Variant) -> int:
    """How many failures hit a machine that was up."""
    return sum(sum(outcome.struck.values()) for outcome in one.outcomes)


def _lost(one: Variant) -> bool:
    """Whether no cadence helps: it gave up, or lost most of its time and never trained after a failure."""
    never = _struck(one) and not any(outcome.recoveries for outcome in one.outcomes)
    return bool(one.gave_up or (never and one.goodput < 1 / 2))


def _what(answer: Answer) -> str:
    job, site = answer.asked.job, answer.site
    nodes = amount(job.nodes, "node") + (f", {job.min_nodes} at least" if job.min_nodes < job.nodes else "")
    nodes += f" and {amount(job.spares, 'spare')}" if job.spares else ""
    if site.mtbf_node_s == math.inf:
        return (
            f"{nodes}, {size(job.state_bytes)} of state, for {seconds(site.duration_s)}: nothing ever fails."
        )
    mtbf_s = site.mtbf_s(job)
    return (
        f"{nodes}, {size(job.state_bytes)} of state. A node fails every {seconds(site.mtbf_node_s)}, so the "
        f"job every {seconds(mtbf_s)}: {site.duration_s / mtbf_s:.0f} times in {seconds(site.duration_s)}."
    )


def _use(answer: Answer) -> str:
    best, asked = answer.best, answer.asked
    found = _cadence(best)
    if best is asked:
        flags = f"--snapshot-every {best.job.snapshot_every} --save-every {best.job.save_every}"
        return f"Use {flags}: {found}. Nothing else that was tried gives a tenth of a point more."
    gain = best.goodput - asked.goodput
    now = f"--snapshot-every {asked.job.snapshot_every} --save-every {asked.job.save_every}"
    return (
        f"Use {best.flags}: {found}. That is {100 * gain:.1f} points more goodput than {now} "
        f"({_cadence(asked)})."
    )


def _cadence(one: Variant) -> str:
    """What the settings come to, in words."""
    pace = _pace(one)
    snapshots = "no snapshots in memory"
    if pace.gap:
        snapshots = (
            f"a snapshot in memory every {amount(pace.gap, 'step')} ({_brief(pace.gap * pace.step_s)})"
        )
    return f"{snapshots}, a checkpoint on disk every {_brief(pace.save_gap * pace.step_s)}"


def _pace(one: Variant) -> Pace:
    """That of a world of all nodes which has not failed yet."""
    return simulate_job.pace(one.job, start=0, nodes=one.job.nodes, mtbf_s=cadence.ASSUMED_MTBF_S)


def _costs(one: Variant) -> Iterator[str]:
    """What a failure costs, where there was any."""
    found = [recovery for outcome in one.outcomes for recovery in outcome.failures]
    if not found:
        return
    took, lost = _spread([r.seconds for r in found]), _spread([r.lost for r in found])
    from_disk = sum(r.tier != "memory" for r in found)
    text = (
        f"A failure costs {seconds(took[0])} until the next step (one in twenty {seconds(took[1])} or more, "
        f"at most {seconds(took[2])}) and {amount(round(lost[0]), 'finished step')} (one in twenty "
        f"{lost[1]:.0f} or more, at most {lost[2]:.0f})."
    )
    if from_disk:
        share = percent(from_disk / len(found))
        text += f" In {share} of them no copy in memory was left, and a disk's was taken."
    yield text


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    ordered = sorted(values)
    return statistics.median(ordered), ordered[math.ceil(0.95 * len(ordered)) - 1], ordered[-1]


def _numbers(answer: Answer) -> Iterator[str]:
    """What other numbers of nodes would change, of the first run, whose failures they share."""
    usual = answer.best.outcomes[0].goodput
    for one in answer.others:
        if one.job.spares != answer.best.job.spares or one.job.min_nodes != answer.best.job.min_nodes:
            gain = 100 * (one.outcomes[0].goodput - usual)
            told = (
                f"{abs(gain):.1f} points {'more' if gain > 0 else 'less'}" if abs(gain) >= 0.1 else "the same"
            )
            left = percent(one.outcomes[0].goodput)
            yield f"With {one.flags} the same failures leave {left}: {told} (first run)."


# ---- the table, and why its columns differ ----------------------------------------------------------------


def _parts(answer: Answer) -> Iterator[str]:
    found, formula, classic = answer.best.shares, answer.formula, answer.classic
    columns = {
        "productive": (formula.productive, classic.productive),
        "starting": (formula.down, classic.down),  # and the two below
        "stalled": (formula.copies, classic.copies),
        "repeated": (formula.repeated, classic.repeated),
    }
    rows = []
    for name in ("productive", "starting", "restoring", "waiting", "stalled", "repeated", *_ONLY):
        if name in _ONLY and abs(found[name]) < 0.00005:
            continue
        cells = [_hundredths(share) for share in columns.get(name, ())]
        cells = cells or (['"', '"'] if name in {"restoring", "waiting"} else ["-", "-"])
        rows.append([name, _SAYS[name], _hundredths(found[name]), *cells])
    head = ["", "", "simulated", "closed form", "blocking saves"]
    yield from table(head, rows, right=(2, 3, 4))
    if answer.classic_interval_s < math.inf:
        yield from wrap(
            "Closed form: Young/Daly with this cadence. Blocking saves: the same for a job without snapshots "
            f"whose training waits for its disk, at its best interval, {seconds(answer.classic_interval_s)}."
        )


def _hundredths(share: float) -> str:
    """Two digits for a table; never 100 % for what is less, nor 0 for what is more."""
    if 0 < share < 0.00005:
        return "<0.01%"
    return ">99.99%" if 0.99995 <= share < 1 - 1e-9 else f"{share:.2%}"


def _differences(answer: Answer) -> Iterator[str]:
    """Say where the two differ, and why."""
    reasons = list(why(answer))
    gap = answer.best.shares["productive"] - answer.formula.productive
    if not reasons:
        yield from wrap(
            f"Simulation and closed form agree within {max(0.001, math.ceil(abs(gap) * 1000) / 1000):.1%}."
        )
        return
    yield from wrap(
        f"The simulation gives {abs(gap):.1%} {'more' if gap > 0 else 'less'} than the closed form:"
    )
    for reason in reasons:
        yield from wrap(f"- {reason}", indent="  ")


# ---- what else, and what it stands on ---------------------------------------------------------------------


def _variants(answer: Answer) -> Iterator[str]:
    """The same failures, met otherwise: the first run of each."""
    names = {id(answer.asked): "as asked"}
    tried = [answer.best, *([] if answer.best is answer.asked else [answer.asked]), *answer.others]
    rows = []
    for one in tried:
        first = one.outcomes[0]
        name = names.get(id(one), one.flags) + (
            " (use this)" if one is answer.best and not _lost(one) else ""
        )
        lost = sum(r.lost for r in first.recoveries)
        rows.append(
            [
                name,
                _hundredths(first.goodput),
                str(lost),
                seconds(first.missing_s),
                str(len(first.recoveries)),
            ]
        )
    head = ["the same failures (first run), and", "goodput", "steps lost", "waited for nodes", "restarts"]
    yield from table(head, rows, right=(1, 2, 3, 4), elastic=0)


def _assumed(answer: Answer) -> str:
    job = answer.best.job
    return (
        f"Played with steps of {_brief(job.step_s)}, {_brief(job.snapshot_s)} of training for a snapshot, "
        f"{_brief(job.commit_s)} for a commit, {seconds(job.start_s)} for a restart, nodes back after "
        f"{seconds(job.away_s['reboot'])} or replaced after {seconds(job.away_s['replacement'])}. What is "
        "assumed of your cluster can be said by flags (--help); `elastic-resume report` tells what it was "
        "in a run."
    )


def _brief(value: float) -> str:
    """``3 ms``, and what is longer as anywhere."""
    return f"{1000 * value:.3g} ms" if value < 0.1 else seconds(value)


def as_json(answer: Answer) -> dict[str, Any]:
    """Everything, in plain types."""

    def variant(one: Variant) -> dict[str, Any]:
        pace = _pace(one)
        recoveries = [r for o in one.outcomes for r in o.recoveries]
        return {
            "flags": one.flags,
            "snapshot_every": str(one.job.snapshot_every),
            "save_every": str(one.job.save_every),
            "snapshot_gap_steps": pace.gap or None,
            "save_gap_steps": pace.save_gap,
            "nodes": [one.job.min_nodes, one.job.nodes],
            "spares": one.job.spares,
            "goodput": one.goodput,
            "goodput_by_run": [o.goodput for o in one.outcomes],
            "shares": one.shares,
            "steps_by_run": [o.steps for o in one.outcomes],
            "struck_by_run": [o.struck for o in one.outcomes],
            "recovery_s": _quantiles([r.seconds for r in recoveries if r.kind != "joined"]),
            "lost_steps": _quantiles([r.lost for r in recoveries if r.kind != "joined"]),
            "restarts": len(recoveries),
            "gave_up": [o.gave_up for o in one.outcomes if o.gave_up],
        }

    site, job = answer.site, answer.asked.job
    never = site.mtbf_node_s == math.inf
    return {
        "mtbf_node_s": None if never else site.mtbf_node_s,
        "mtbf_job_s": None if never else site.mtbf_s(job),
        "mix": dict(site.mix),
        "duration_s": site.duration_s,
        "seed": site.seed,
        "runs": site.runs,
        "state_bytes": job.state_bytes,
        "step_s": job.step_s,
        "snapshot_s": job.snapshot_s,
        "commit_s": job.commit_s,
        "asked": variant(answer.asked),
        "use": variant(answer.best),
        "others": [variant(one) for one in answer.others],
        "closed_form": asdict(answer.formula),
        "blocking_saves": {
            **asdict(answer.classic),
            "interval_s": None if answer.classic_interval_s == math.inf else answer.classic_interval_s,
        },
        "why_they_differ": list(why(answer)),
    }


def _quantiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    median, late, most = _spread(values)
    return {"mean": statistics.fmean(values), "median": median, "p95": late, "max": most}
