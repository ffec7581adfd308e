"""What ``elastic-resume plan`` finds out: how often to save and what to expect, where nodes fail so often.

It plays the job (`simulate.py`) as it is described, with a few other cadences and numbers of nodes beside,
and sets the closed form (`expected.py`) beside it. The same flags and seed give the same answer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from elastic_resume.faults import expected, rates, simulate_job
from elastic_resume.faults.expected import Expected
from elastic_resume.faults.simulate import PARTS, Outcome, play
from elastic_resume.faults.simulate_job import Job
from elastic_resume.policy import cadence
from elastic_resume.policy.cadence import AUTO, Every

WORTH = 0.001  # of goodput: below it, what needs no flag is better
LEVER = 0.01  # of goodput: from it on, other numbers of nodes are worth the first sentence


@dataclass(frozen=True)
class Site:
    """How machines fail, and for how long the job is looked at. ``mtbf_node_s``: infinite for never."""

    mtbf_node_s: float
    mix: Mapping[str, float]
    rack_nodes: int
    duration_s: float
    seed: int
    runs: int

    def mtbf_s(self, job: Job) -> float:
        """Seconds between two failures of what trains."""
        return self.mtbf_node_s / job.nodes


@dataclass(frozen=True)
class Variant:
    """One way to do it. ``flags``: what differs from what was asked, for people."""

    flags: str
    job: Job
    outcomes: tuple[Outcome, ...]

    @property
    def goodput(self) -> float:
        """The mean of its runs."""
        return statistics.fmean(one.goodput for one in self.outcomes)

    @property
    def gave_up(self) -> tuple[Outcome, ...]:
        """The runs that ended before their time."""
        return tuple(one for one in self.outcomes if one.gave_up)

    @property
    def shares(self) -> dict[str, float]:
        """Where the time went, by the report's words, with nodes that are missing and the end apart."""
        found = {}
        for name in PARTS:
            found[name] = statistics.fmean(o.spent_s[name] / o.total_s for o in self.outcomes)
        found["missing"] = statistics.fmean(o.missing_s / o.total_s for o in self.outcomes)
        found["ended"] = statistics.fmean(o.ended_s / o.total_s for o in self.outcomes)
        found["waiting"] -= found["missing"] + found["ended"]
        return found


@dataclass(frozen=True)
class Answer:
    """All that was found. ``best``: the cadence to use; ``others``: what else was tried.

    ``lever``: of those the number of nodes that is worth more than any cadence.
    """

    site: Site
    asked: Variant
    best: Variant
    lever: Variant | None
    others: tuple[Variant, ...]
    formula: Expected
    classic: Expected
    classic_interval_s: float


def ask(job: Job, site: Site) -> Answer:
    """Play what was asked, and what else could be done."""
    asked = _whole(_one("", job, site), site)
    cadences = [_one(flags, other, site) for flags, other in _cadences(job, site)]
    # Runs of one seed meet the same failures, so the first ones say which are worth the others.
    cadences.sort(key=_first, reverse=True)
    cadences[:2] = [_whole(one, site) for one in cadences[:2]]
    best = max(cadences[:2], key=lambda one: one.goodput, default=asked)
    if best.goodput < asked.goodput + WORTH:
        best = asked
    sizes = [_one(flags, other, site) for flags, other in _sizes(best.job, site, asked)]
    more = [i for i, one in enumerate(sizes) if one.job.spares >= best.job.spares]
    lever = None
    if more and _first(sizes[top := max(more, key=lambda i: _first(sizes[i]))]) >= _first(best) + LEVER:
        lever = sizes[top] = _whole(sizes[top], site)
        if lever.goodput < best.goodput + max(LEVER, best.goodput - asked.goodput):
            lever = None
    others = [*(one for one in cadences if one is not best), *sizes]
    cost_s, mtbf_s = best.job.commit_s, site.mtbf_s(job)
    blocking_s = expected.best_interval_s(cost_s, mtbf_s) if mtbf_s < math.inf else math.inf
    return Answer(
        site,
        asked,
        best,
        lever,
        tuple(others),
        formula_of(best.job, site),
        _formula(best.job, site, interval_s=blocking_s, cost_s=cost_s),
        blocking_s,
    )


def formula_of(job: Job, site: Site) -> Expected:
    """The closed form for this job's own cadence; for saves where it takes no snapshots."""
    one = simulate_job.pace(job, start=0, nodes=job.nodes, mtbf_s=site.mtbf_s(job))
    if one.gap:
        return _formula(job, site, interval_s=one.gap * one.step_s, cost_s=one.snapshot_s)
    return _formula(job, site, interval_s=one.save_gap * one.step_s, cost_s=one.save_s)


def _formula(job: Job, site: Site, *, interval_s: float, cost_s: float) -> Expected:
    if site.mtbf_node_s == math.inf:
        share = 1 / (1 + cost_s / interval_s)
        return Expected(share, 0.0, 0.0, 1 - share)
    whole = sum(site.mix.values())
    noticed_s = sum(job.noticed_after_s(kind) * weight for kind, weight in site.mix.items()) / whole
    down_s = noticed_s + simulate_job.FORM_S + job.start_s + job.state_bytes / simulate_job.LOAD_BYTES_PER_S
    return expected.shares(mtbf_s=site.mtbf_s(job), down_s=down_s, interval_s=interval_s, cost_s=cost_s)


def _one(flags: str, job: Job, site: Site) -> Variant:
    return Variant(flags, job, (_play(job, site, 0),))


def _whole(one: Variant, site: Site) -> Variant:
    """The same with all its runs. Where nothing fails they are all alike."""
    runs = site.runs if site.mtbf_node_s < math.inf else 1
    return replace(one, outcomes=one.outcomes + tuple(_play(one.job, site, run) for run in range(1, runs)))


def _first(one: Variant) -> float:
    return one.outcomes[0].goodput


def _play(job: Job, site: Site, run: int) -> Outcome:
    if site.mtbf_node_s == math.inf:
        return play(job, (), site.duration_s)
    strikes = rates.strikes(
        nodes=job.nodes,
        spares=job.spares,
        mtbf_node_s=site.mtbf_node_s,
        mix=site.mix,
        rack_nodes=site.rack_nodes,
        seed=f"{site.seed} {run}",
    )
    return play(job, strikes, site.duration_s)


def _cadences(job: Job, site: Site) -> Iterator[tuple[str, Job]]:
    """Other ways to copy: around the closed form's optimum, and without memory."""
    mtbf_s = min(site.mtbf_s(job), site.duration_s)
    if job.slots > 1:
        best_s = expected.best_interval_s(job.snapshot_s, mtbf_s)
        steps = {max(1, round(best_s * factor / job.step_s)) for factor in (0.5, 1.0, 2.0)}
        for count in sorted({*steps, 1}):
            # A save costs nothing more where a snapshot is due anyway, and the disk has time for it.
            least_s = max(cadence.LONGEST_INTERVAL_S, job.commit_s / cadence.COMMIT_DUTY)
            saved = count * max(1, math.ceil(least_s / (count * job.step_s)))
            changed = replace(job, snapshot_every=Every(steps=count), save_every=Every(steps=saved))
            yield f"--snapshot-every {count} --save-every {saved}", changed
        if job.snapshot_every != AUTO or job.save_every != AUTO:
            yield (
                "--snapshot-every auto --save-every auto",
                replace(job, snapshot_every=AUTO, save_every=AUTO),
            )
        yield (
            "--snapshot-every off --save-every auto",
            replace(job, snapshot_every=Every(off=True), save_every=AUTO),
        )


def _sizes(job: Job, site: Site, asked: Variant) -> Iterator[tuple[str, Job]]:
    """Other numbers of nodes: without spares, with enough of them, and with a lower MIN."""
    if job.spares:
        yield "--spares 0", replace(job, spares=0)
    enough = spares_wanted(job, site)
    if enough and enough != job.spares:
        yield f"--spares {enough}", replace(job, spares=enough)
    if job.min_nodes == job.nodes > 1 and any(one.missing_s for one in asked.outcomes):
        low = max(1, job.nodes * 9 // 10)
        yield f"--nodes {low}:{job.nodes}", replace(job, min_nodes=low)


def spares_wanted(job: Job, site: Site) -> int:
    """So many that in 99 % of the time no more nodes are away, whose number is Poisson's."""
    if site.mtbf_node_s == math.inf:
        return 0
    several: Mapping[str, Callable[[], int]] = {"rack": lambda: site.rack_nodes, "cluster": lambda: 0}
    whole = sum(site.mix.values())
    away = sum(
        job.nodes
        / site.mtbf_node_s
        * weight
        / whole
        * job.away_s[kind.away]
        * several.get(kind.several, lambda: 1)()
        for name, weight in site.mix.items()
        if (kind := rates.KINDS[name]).away
    )
    count, share = 0, math.exp(-away)
    total = share
    while total < 0.99 and count < job.nodes:
        count += 1
        share *= away / count
        total += share
    return count
