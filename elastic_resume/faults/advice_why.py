"""Why simulation and closed form differ, as ``elastic-resume plan`` says it.

Pure. Promise: a cause is named only where it was counted in the runs; else the figures are given alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from elastic_resume.faults import simulate_job
from elastic_resume.faults.advice import Answer
from elastic_resume.report.text import amount

TELLING = 0.003  # a difference that is worth a sentence


def why(answer: Answer) -> Iterator[str]:
    """Each part of the difference, by the parts of the table."""
    found, formula = answer.best.shares, answer.formula
    if found["ended"] > 0:
        yield f"{found['ended']:.1%}: it knows no job that gives up. What else differs is hidden behind that."
        return
    if found["missing"] > TELLING:
        yield (
            f"{found['missing']:.1%}: it knows no lack of nodes. Too few of them were up; spares, or a lower "
            "MIN, help."
        )
    if formula.productive == 0:
        yield "It does not hold where failures come faster than recoveries end."
        return
    if abs(found["fewer"]) > TELLING:
        yield f"{found['fewer']:.1%}: it knows no smaller world, whose steps take another time."
    if abs(found["stalled"] - formula.copies) > TELLING:
        yield _copies(answer)
    down = found["starting"] + found["restoring"] + found["waiting"] - formula.down
    if abs(down) > TELLING:
        yield _recoveries(answer, down)
    if abs(found["repeated"] - formula.repeated) > TELLING:
        yield _again(answer)


def _copies(answer: Answer) -> str:
    """Of the first snapshots of generations, and of saves between two snapshots."""
    best, found = answer.best, answer.best.shares
    more = found["stalled"] - answer.formula.copies
    if more < 0:
        idle = 1 - found["productive"] - found["stalled"] - found["fewer"]
        cause = f", and none are made in the {idle:.1%} of the time in which nothing new is trained"
        return f"{-more:.1%} less for copies: there are fewer{cause if idle > TELLING else ''}."
    one = simulate_job.pace(best.job, start=0, nodes=best.job.nodes, mtbf_s=answer.site.mtbf_s(best.job))
    begun = sum(1 + len(o.recoveries) for o in best.outcomes)
    causes = []
    if one.gap > 1 and begun * one.warm * one.snapshot_s > more / 4 * sum(o.total_s for o in best.outcomes):
        causes.append(f"{amount(begun, 'start')} began with {amount(one.warm, 'snapshot')} at once")
    if one.gap and one.save_s:
        causes.append("a save between two snapshots takes one of its own")
    return f"{more:.1%} more for copies" + (f": {', and '.join(causes)}." if causes else ".")


def _recoveries(answer: Answer, more: float) -> str:
    outcomes = answer.best.outcomes
    total_s = sum(o.total_s for o in outcomes)
    failures = sum(len(o.failures) for o in outcomes)
    counted = f"{amount(failures, 'failure')} cost a recovery, of {_expected(answer)} that it counts"
    if more < 0:
        return f"{-more:.1%} less for recoveries: {counted}; those that come during one share it."
    joined = [r.seconds for o in outcomes for r in o.recoveries if r not in o.failures]
    causes = [counted]
    if joined:
        causes.append(
            f"{amount(len(joined), 'restart')} for nodes that came back took {sum(joined) / total_s:.1%}"
        )
    first = len(outcomes) * (answer.best.job.start_s + answer.best.job.cold_s) / total_s
    if first > TELLING / 3:
        causes.append(f"the first start took {first:.1%}")
    return f"{more:.1%} more for recoveries: {'; '.join(causes)}."


def _again(answer: Answer) -> str:
    best = answer.best
    more = best.shares["repeated"] - answer.formula.repeated
    failed = [r for o in best.outcomes for r in o.failures]
    text = f"{abs(more):.1%} {'more' if more > 0 else 'less'} is run again"
    if not failed:
        return f"{text}: no failure cost a recovery, of {_expected(answer)} that it counts."
    one = simulate_job.pace(best.job, start=0, nodes=best.job.nodes, mtbf_s=answer.site.mtbf_s(best.job))
    half = (one.gap or one.save_gap) / 2
    lost = statistics.fmean(r.lost for r in failed)
    text += (
        f": {amount(len(failed), 'recovery', 'recoveries')}, of {_expected(answer)} that it counts, cost "
        f"{lost:.1f} finished steps each, where it counts {half:g}"
    )
    deep = sum(r.tier != "memory" for r in failed)
    return f"{text}; {deep} of them found no copy in memory." if deep and best.job.slots else f"{text}."


def _expected(answer: Answer) -> str:
    """How many failures the closed form reckons with in these runs."""
    mtbf_s = answer.site.mtbf_s(answer.best.job)
    return f"{sum(o.total_s for o in answer.best.outcomes) / mtbf_s:.0f}" if mtbf_s < math.inf else "0"
