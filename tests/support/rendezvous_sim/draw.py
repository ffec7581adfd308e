"""From a seed to a schedule. The same seed gives the same schedule, on every machine.

Families differ in what they draw from; `chase` writes those that follow worlds as they form.
"""

from __future__ import annotations

import random
from dataclasses import replace

from elastic_resume.rendezvous.core.events import Settings
from tests.support.rendezvous_sim import chase
from tests.support.rendezvous_sim import schedule as kinds
from tests.support.rendezvous_sim.schedule import CUTS, Fault, Job, Moment, Schedule, Site

NAMES = "abcdefghi"
DRIFT = 0.02
"""Clocks run at rates up to this far from true; leases keep 0.05 back for two of them."""
FAMILIES = {
    kinds.CHASE: 33,
    kinds.WEATHER: 18,
    kinds.RESETS: 9,
    kinds.LATE: 7,
    kinds.CALM_DAYS: 6,
    kinds.END_GAME: 6,
    kinds.IMPATIENCE: 8,
    kinds.LOST_DISKS: 3,
    kinds.LOST_DISKS_AND_SILENCE: 3,
    kinds.REJECTION: 3,
    kinds.FORCED: 4,
}
"""How many of a hundred schedules belong to each family."""

DEATHS = ("kill", "kill", "unsent", "written")
SILENCES = ("power", "pause", "suspend", "partition", "shift", "shift", "one-way")
TROUBLE = ("slow", "disk", "stuck", "worker", "leave", "reset", "half-reset")
KINDS = {
    kinds.WEATHER: (*DEATHS, *SILENCES, *TROUBLE),
    kinds.CALM_DAYS: ("reset", "worker", "half-reset", "slowish", "reset", "kill"),
    kinds.END_GAME: (*DEATHS, *SILENCES, "finish", "finish", "finish", "finish", "fail", "worker", "leave"),
    kinds.IMPATIENCE: (*DEATHS, *SILENCES, *TROUBLE),
    kinds.LOST_DISKS: (*DEATHS, "wipe", "wipe", "wipe", "worker", "leave", "disk"),
    kinds.LOST_DISKS_AND_SILENCE: (*DEATHS, *SILENCES, *TROUBLE, "wipe", "wipe", "wipe", "wipe"),
    kinds.FORCED: (*DEATHS, *SILENCES, *TROUBLE, "power", "power", "shift"),
    kinds.REJECTION: (*DEATHS, "reject", "reject", "reject", "pause", "worker", "leave"),
}
LONGEST_S = {"slow": 8.0, "slowish": 12.0, "disk": 8.0, "pause": 8.0, "suspend": 12.0, "stuck": 12.0}
"""What lasts too long hides everything else."""
SPARES = 0.2
"""How many of the plots are played against a job with a node more than it takes."""
LATEST_S = 15.0
"""When the latest nodes come."""


def draw(seed: int) -> Schedule:
    """Return the schedule of that seed."""
    rng = random.Random(2 * seed)
    (family,) = rng.choices(list(FAMILIES), list(FAMILIES.values()))
    if family in chase.PLOTS:
        job = draw_job(rng, family, rng.choice((3, 3, 3, 4, 5, 5, 5, 5, 6, 7)))
        if rng.random() < SPARES:
            job = replace(job, settings=replace(job.settings, max_nodes=len(job.sites) - 1))
        return Schedule(seed, family, job, tuple(chase.draw_faults(rng, family, len(job.sites))))
    job = draw_job(rng, family, rng.choice((3, 3, 4, 5, 5, 6, 7, 9)))
    if family == kinds.FORCED and rng.random() < 0.7:
        job = replace(job, settings=replace(job.settings, max_nodes=len(job.sites)))
        return Schedule(seed, family, job, tuple(chase.burials(rng, len(job.sites))))
    if family == kinds.END_GAME and rng.random() < 0.5:
        return Schedule(seed, family, job, tuple(chase.last_words(rng, len(job.sites))))
    faults = draw_faults(rng, family, job.names)
    if family == kinds.LOST_DISKS:
        faults = spare_candidates(rng, job, faults)
    return Schedule(seed, family, job, tuple(faults))


def draw_job(rng: random.Random, family: str, count: int) -> Job:
    """Draw the job: nodes, candidates, limits, clocks."""
    names = tuple(NAMES[:count])
    candidates = names[: rng.choice((1, 2, 3, 3, count))]
    settings = Settings(
        candidates,
        min_nodes=rng.choice((1, 1, 1, 2)),
        max_nodes=count if family in chase.PLOTS else rng.choice((count, count, count - 1, 2)),
        beats_per_timeout=4,
        join_timeout_s=rng.choice((10.0, 15.0, 20.0)) if family == kinds.IMPATIENCE else 600.0,
    )
    late = {kinds.IMPATIENCE: 0.4, **dict.fromkeys(chase.PLOTS, 0.0)}.get(family, 0.05)
    sites = tuple(
        Site(
            name,
            comes_s=_comes(rng, late),
            order=place if rng.random() < 0.5 else 0,
            origin=rng.uniform(-1e4, 1e4),
            rate=rng.uniform(1 - DRIFT, 1 + DRIFT),
        )
        for place, name in enumerate(names)
    )
    return Job(
        sites,
        settings,
        linger_s=rng.choice((2.0, 2.0, 5.0)),
        ends=family == kinds.END_GAME,
        operator=family == kinds.FORCED,
    )


def _comes(rng: random.Random, late: float) -> float:
    """Draw when a node comes: soon; else late, or never."""
    if rng.random() >= late:
        return rng.uniform(0.0, 2.0)
    return rng.choice((rng.uniform(2.0, LATEST_S), rng.uniform(2.0, LATEST_S), float("inf")))


def draw_faults(rng: random.Random, family: str, names: tuple[str, ...]) -> list[Fault]:
    """Draw faults at times, and at messages that form worlds."""
    aimed = rng.choice((0.0, 0.4, 0.8))
    faults = []
    at, message = rng.uniform(0.0, 7.0), rng.randint(0, 3 * len(names))
    for _ in range(rng.randint(2, 9)):
        kind = rng.choice(KINDS[family])
        for_s = rng.choice((0.05, 0.3, 1.0, 3.5, 4.5, 8.0, 100.0)) * rng.uniform(0.7, 1.3)
        nodes = tuple(rng.sample(names, _how_many(rng, kind, len(names))))
        if rng.random() < aimed:
            message += rng.choice((1, 1, 2, 3, len(names), 3 * len(names)))
            when = Moment(0.0, "message", message)
        else:
            at += rng.choice((0.02, 0.1, 0.5, 2.0, 5.0)) * rng.uniform(0.5, 1.5)
            when = Moment(at)
        faults.append(Fault(when, kind, nodes, min(for_s, LONGEST_S.get(kind, for_s))))
    return faults


def _how_many(rng: random.Random, kind: str, count: int) -> int:
    if kind in CUTS or kind in ("slow", "slowish"):
        return rng.randint(1, count - 1)
    if kind == "finish":
        return rng.randint(1, count)
    if kind in ("reset", "half-reset"):
        return 2
    return 2 if kind in ("kill", "power", "wipe", "pause", "suspend") and rng.random() < 0.3 else 1


def spare_candidates(rng: random.Random, job: Job, faults: list[Fault]) -> list[Fault]:
    """Have most candidates keep their disks: those who forgot everything may not make a first world alone."""
    few = rng.sample(job.settings.candidates, (len(job.settings.candidates) - 1) // 2)
    forgetful = [*few, *(name for name in job.names if name not in job.settings.candidates)]
    kept = []
    for fault in faults:
        if fault.kind == "wipe":
            nodes = tuple(rng.sample(forgetful, min(len(forgetful), len(fault.nodes))))
            kept += [replace(fault, nodes=nodes)] if nodes else []
        else:
            kept.append(fault)
    return kept or [Fault(Moment(5.0), "worker", job.names[:1])]
