"""What ``elastic-resume plan`` says, for people and for programs. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from elastic_resume.faults import simulate_job
from elastic_resume.faults.advice import Answer, Variant
from elastic_resume.faults.simulate import PARTS
from elastic_resume.report.text import amount, seconds, size, table, wrap

TELLING = 0.003  # a difference between simulation and closed form that is worth a sentence
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
    yield from wrap(_what(answer))
    yield ""
    yield from wrap(_use(answer))
    yield from wrap(_expect(best))
    for sentence in _numbers(answer):
        yield from wrap(sentence)
    yield from _gave_up(best)
    yield ""
    yield from _parts(answer)
    yield ""
    yield from _differences(answer)
    yield ""
    yield from _variants(answer)
    yield ""
    yield from wrap(_assumed(answer))
    if site.mtbf_node_s < math.inf and not any(one.recoveries for one in best.outcomes):
        yield from wrap("No failure came in that time. A longer --duration says more.")


def _gave_up(best: Variant) -> Iterator[str]:
    ended = [one for one in best.outcomes if one.gave_up]
    if ended:
        first = ended[0]
        yield from wrap(
            f"In {len(ended)} of {amount(len(best.outcomes), 'run')} the job gave up, in the first after "
            f"{seconds(first.total_s - first.ended_s)}: {first.gave_up} What comes after counts as lost. A "
            "greater --max-no-progress makes that rarer, where chance alone is to blame."
        )


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
    """What the settings come to in a world of all nodes that has not failed yet."""
    course = simulate_job.course(one.job, start=0, nodes=one.job.nodes, mtbf_s=4 * 3600.0)
    snapshots = "no snapshots in memory"
    if course.gap:
        snapshots = (
            f"a snapshot in memory every {amount(course.gap, 'step')} ({seconds(course.gap * course.step_s)})"
        )
    return f"{snapshots}, a checkpoint on disk every {seconds(course.save_gap * course.step_s)}"


def _expect(one: Variant) -> str:
    found = [recovery for outcome in one.outcomes for recovery in outcome.failures]
    goodputs = sorted(outcome.goodput for outcome in one.outcomes)
    between = (
        f" ({goodputs[0]:.1%} to {goodputs[-1]:.1%} in {len(goodputs)} runs)" if len(goodputs) > 1 else ""
    )
    text = f"Expect {one.goodput:.1%} of the time to be training that counts{between}."
    if not found:
        return text
    took, lost = _spread([r.seconds for r in found]), _spread([r.lost for r in found])
    from_disk = sum(r.tier != "memory" for r in found)
    text += (
        f" A failure costs {seconds(took[0])} until the next step (one in twenty {seconds(took[1])} or more, "
        f"at most {seconds(took[2])}) and {amount(round(lost[0]), 'finished step')} (one in twenty "
        f"{lost[1]:.0f} or more, at most {lost[2]:.0f})."
    )
    if from_disk:
        share = from_disk / len(found)
        text += f" In {share:.1%} of them no copy in memory was left, and a disk's was taken."
    return text


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
            yield f"With {one.flags} the same failures leave {one.outcomes[0].goodput:.1%}: {told}."


# ---- the table, and why its columns differ ----------------------------------------------------------------


def shares(one: Variant) -> dict[str, float]:
    """Where the time of a variant went, by the report's words, with nodes that are missing apart."""
    found = {}
    for name in PARTS:
        found[name] = statistics.fmean(o.spent_s[name] / o.total_s for o in one.outcomes)
    found["missing"] = statistics.fmean(o.missing_s / o.total_s for o in one.outcomes)
    found["ended"] = statistics.fmean(o.ended_s / o.total_s for o in one.outcomes)
    found["waiting"] -= found["missing"] + found["ended"]
    return found


def _parts(answer: Answer) -> Iterator[str]:
    found, formula, classic = shares(answer.best), answer.formula, answer.classic
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
        cells = [f"{share:.2%}" for share in columns.get(name, ())]
        cells = cells or (['"', '"'] if name in {"restoring", "waiting"} else ["-", "-"])
        rows.append([name, _SAYS[name], f"{found[name]:.2%}", *cells])
    head = ["", "", "simulated", "closed form", "blocking saves"]
    yield from table(head, rows, right=(2, 3, 4))
    if answer.classic_interval_s < math.inf:
        yield from wrap(
            "Closed form: Young/Daly with this cadence. Blocking saves: the same for a job without snapshots "
            f"whose training waits for its disk, at its best interval, {seconds(answer.classic_interval_s)}."
        )


def _differences(answer: Answer) -> Iterator[str]:
    """Say where the two differ, and why."""
    reasons = list(why(answer))
    gap = shares(answer.best)["productive"] - answer.formula.productive
    if not reasons:
        yield from wrap(f"Simulation and closed form agree within {max(0.001, abs(gap)):.1%}.")
        return
    yield from wrap(
        f"The simulation gives {abs(gap):.1%} {'more' if gap > 0 else 'less'} than the closed form:"
    )
    for reason in reasons:
        yield from wrap(f"- {reason}", indent="  ")


def why(answer: Answer) -> Iterator[str]:
    """Each reason for which simulation and closed form differ, greatest share first said by part."""
    found, formula = shares(answer.best), answer.formula
    outcomes = answer.best.outcomes
    joined = sum(len(o.recoveries) - len(o.failures) for o in outcomes)
    failed = sum(len(o.failures) for o in outcomes)
    if found["ended"] > 0:
        yield f"{found['ended']:.1%}: it knows no job that gives up. What else differs is hidden behind that."
        return
    if found["missing"] > TELLING:
        yield (
            f"{found['missing']:.1%}: it knows no lack of nodes. Too few of them were up; spares, or a lower "
            "MIN, help."
        )
    if abs(found["fewer"]) > TELLING:
        yield f"{found['fewer']:.1%}: it knows no smaller world, whose steps take longer."
    copies = found["stalled"] - formula.copies
    if copies > TELLING:
        yield (
            f"{copies:.1%}: a generation begins with {simulate_job.WARM_SNAPSHOTS} snapshots, and a save "
            "between two of them takes one of its own."
        )
    elif copies < -TELLING:
        yield f"{-copies:.1%} less for copies: none are made while nobody trains."
    down = found["starting"] + found["restoring"] + found["waiting"] - formula.down
    if down > TELLING:
        yield (
            f"{down:.1%}: it knows neither the first start nor the {amount(joined, 'restart')} for nodes "
            f"that came back (beside {amount(failed, 'failure')}), nor the way of the state to who lacks it."
        )
    elif down < -TELLING:
        yield f"{-down:.1%} less for recoveries: failures that come during one share it, and spares fail too."
    again = found["repeated"] - formula.repeated
    deep = [r for o in outcomes for r in o.failures if r.tier != "memory"]
    if again > TELLING:
        yield (
            f"{again:.1%}: {amount(len(deep), 'failure')} took all copies in memory along, and cost "
            "the steps since the last save."
        )
    elif again < -TELLING:
        yield f"{-again:.1%} less is run again: a failure during a recovery costs no further steps."


# ---- what else, and what it stands on ---------------------------------------------------------------------


def _variants(answer: Answer) -> Iterator[str]:
    """The same failures, met otherwise: the first run of each."""
    names = {id(answer.asked): "as asked"}
    tried = [answer.best, *([] if answer.best is answer.asked else [answer.asked]), *answer.others]
    rows = []
    for one in tried:
        first = one.outcomes[0]
        name = names.get(id(one), one.flags) + (" (use this)" if one is answer.best else "")
        lost = sum(r.lost for r in first.recoveries)
        rows.append(
            [name, f"{first.goodput:.2%}", str(lost), seconds(first.missing_s), str(len(first.recoveries))]
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
        course = simulate_job.course(one.job, start=0, nodes=one.job.nodes, mtbf_s=4 * 3600.0)
        recoveries = [r for o in one.outcomes for r in o.recoveries]
        return {
            "flags": one.flags,
            "snapshot_every": str(one.job.snapshot_every),
            "save_every": str(one.job.save_every),
            "snapshot_gap_steps": course.gap or None,
            "save_gap_steps": course.save_gap,
            "nodes": [one.job.min_nodes, one.job.nodes],
            "spares": one.job.spares,
            "goodput": one.goodput,
            "goodput_by_run": [o.goodput for o in one.outcomes],
            "shares": shares(one),
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
