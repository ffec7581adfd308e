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
from elastic_resume.faults.simulate import Outcome, play
from elastic_resume.faults.simulate_job import Job
from elastic_resume.policy import cadence
from elastic_resume.policy.cadence import AUTO, Every

WORTH = 0.001  # of goodput: below it, what needs no flag is better


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


@dataclass(frozen=True)
class Answer:
    """All that was found. ``best``: the cadence to use; ``others``: what else was tried."""

    site: Site
    asked: Variant
    best: Variant
    others: tuple[Variant, ...]
    formula: Expected
    classic: Expected
    classic_interval_s: float


def ask(job: Job, site: Site) -> Answer:
    """Play what was asked, and what else could be done."""
    asked = Variant("", job, tuple(_play(job, site, run) for run in range(site.runs)))
    cadences = [asked, *(_one(flags, other, site) for flags, other in _cadences(job, site))]
    top = max(cadences, key=lambda one: one.outcomes[0].goodput)
    # Runs of one seed meet the same failures: so the first ones can be compared.
    best = asked if top.outcomes[0].goodput < asked.outcomes[0].goodput + WORTH else top
    if best is not asked:
        best = Variant(best.flags, best.job, tuple(_play(best.job, site, run) for run in range(site.runs)))
    others = [one for one in cadences if one is not asked and one is not top]
    others += [_one(flags, other, site) for flags, other in _sizes(best.job, site, asked)]
    cost_s, mtbf_s = best.job.commit_s, site.mtbf_s(job)
    blocking_s = expected.best_interval_s(cost_s, mtbf_s) if mtbf_s < math.inf else math.inf
    return Answer(
        site,
        asked,
        best,
        tuple(others),
        formula_of(best.job, site),
        _formula(best.job, site, interval_s=blocking_s, cost_s=cost_s),
        blocking_s,
    )


def formula_of(job: Job, site: Site) -> Expected:
    """The closed form for this job's own cadence; for saves where it takes no snapshots."""
    one = simulate_job.course(job, start=0, nodes=job.nodes, mtbf_s=site.mtbf_s(job))
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
