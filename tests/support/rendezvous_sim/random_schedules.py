"""Draw a schedule from a seed. A seed gives the same schedule on every machine.

Families differ in what they draw; `targeted_faults` draws the faults that follow view changes.
"""

from __future__ import annotations

import random
from dataclasses import replace

from elastic_resume.rendezvous.core.events import Settings
from tests.support.rendezvous_sim import schedule as kinds
from tests.support.rendezvous_sim import targeted_faults
from tests.support.rendezvous_sim.schedule import PARTITION_KINDS, Fault, JobSpec, NodeSpec, Schedule, Trigger

NODE_NAMES = "abcdefghi"
MAX_CLOCK_DRIFT = 0.02
"""Clock rates differ from true by up to this share; leases keep 0.05 back for two clocks."""
FAMILY_WEIGHTS = {
    kinds.VIEW_CHANGES: 33,
    kinds.ANY_FAULT: 18,
    kinds.RESETS: 9,
    kinds.LATE_READERS: 7,
    kinds.MILD_FAULTS: 6,
    kinds.JOB_END: 6,
    kinds.SHORT_JOIN_TIMEOUT: 8,
    kinds.LOST_DISKS: 3,
    kinds.LOST_DISKS_AND_PARTITIONS: 3,
    kinds.REJECTING_FIREWALL: 3,
    kinds.FORCED_QUORUM: 4,
}
"""Schedules of each family in a hundred."""

CRASHES = ("kill", "kill", "crash-before-send", "written")
UNREACHABLE_KINDS = ("power", "pause", "suspend", "partition", "repartition", "repartition", "one-way")
OTHER_KINDS = ("slow", "disk", "stuck", "worker", "leave", "reset", "half-reset")
KINDS_BY_FAMILY = {
    kinds.ANY_FAULT: (*CRASHES, *UNREACHABLE_KINDS, *OTHER_KINDS),
    kinds.MILD_FAULTS: ("reset", "worker", "half-reset", "slowish", "reset", "kill"),
    kinds.JOB_END: (*CRASHES, *UNREACHABLE_KINDS, *["finish"] * 4, "fail", "worker", "leave"),
    kinds.SHORT_JOIN_TIMEOUT: (*CRASHES, *UNREACHABLE_KINDS, *OTHER_KINDS),
    kinds.LOST_DISKS: (*CRASHES, "wipe", "wipe", "wipe", "worker", "leave", "disk"),
    kinds.LOST_DISKS_AND_PARTITIONS: (*CRASHES, *UNREACHABLE_KINDS, *OTHER_KINDS, *["wipe"] * 4),
    kinds.FORCED_QUORUM: (*CRASHES, *UNREACHABLE_KINDS, *OTHER_KINDS, "power", "power", "repartition"),
    kinds.REJECTING_FIREWALL: (*CRASHES, "reject", "reject", "reject", "pause", "worker", "leave"),
}
MAX_DURATION_S = {"slow": 8.0, "slowish": 12.0, "disk": 8.0, "pause": 8.0, "suspend": 12.0, "stuck": 12.0}
"""The longest duration of faults that would hide all others."""
SPARE_PROBABILITY = 0.2
"""Share of the attacks that are played with one node more than the job takes."""
LATEST_START_S = 15.0
"""When the latest nodes start."""


def draw_schedule(seed: int) -> Schedule:
    """Return the schedule of a seed."""
    rng = random.Random(2 * seed)
    (family,) = rng.choices(list(FAMILY_WEIGHTS), list(FAMILY_WEIGHTS.values()))
    if family in targeted_faults.ATTACKS_BY_FAMILY:
        job = draw_job(rng, family, rng.choice((3, 3, 3, 4, 5, 5, 5, 5, 6, 7)))
        if rng.random() < SPARE_PROBABILITY:
            job = replace(job, settings=replace(job.settings, max_nodes=len(job.nodes) - 1))
        return Schedule(seed, family, job, tuple(targeted_faults.draw_faults(rng, family, len(job.nodes))))
    job = draw_job(rng, family, rng.choice((3, 3, 4, 5, 5, 6, 7, 9)))
    if family == kinds.FORCED_QUORUM and rng.random() < 0.7:
        job = replace(job, settings=replace(job.settings, max_nodes=len(job.nodes)))
        return Schedule(
            seed, family, job, tuple(targeted_faults.forced_quorum_after_deaths(rng, len(job.nodes)))
        )
    if family == kinds.JOB_END and rng.random() < 0.5:
        return Schedule(seed, family, job, tuple(targeted_faults.partition_at_job_end(rng, len(job.nodes))))
    faults = draw_faults(rng, family, job.node_names)
    if family == kinds.LOST_DISKS:
        faults = keep_candidate_disks(rng, job, faults)
    return Schedule(seed, family, job, tuple(faults))


def draw_job(rng: random.Random, family: str, count: int) -> JobSpec:
    """Draw nodes, candidates, limits and clocks."""
    names = tuple(NODE_NAMES[:count])
    candidates = names[: rng.choice((1, 2, 3, 3, count))]
    settings = Settings(
        candidates,
        min_nodes=rng.choice((1, 1, 1, 2)),
        max_nodes=count
        if family in targeted_faults.ATTACKS_BY_FAMILY
        else rng.choice((count, count, count - 1, 2)),
        heartbeats_per_timeout=4,
        join_timeout_s=rng.choice((10.0, 15.0, 20.0)) if family == kinds.SHORT_JOIN_TIMEOUT else 600.0,
    )
    late = {kinds.SHORT_JOIN_TIMEOUT: 0.4, **dict.fromkeys(targeted_faults.ATTACKS_BY_FAMILY, 0.0)}.get(
        family, 0.05
    )
    nodes = tuple(
        NodeSpec(
            name,
            start_s=_draw_start(rng, late),
            order=index if rng.random() < 0.5 else 0,
            clock_origin_s=rng.uniform(-1e4, 1e4),
            clock_rate=rng.uniform(1 - MAX_CLOCK_DRIFT, 1 + MAX_CLOCK_DRIFT),
        )
        for index, name in enumerate(names)
    )
    return JobSpec(
        nodes,
        settings,
        linger_s=rng.choice((2.0, 2.0, 5.0)),
        finishes_at_end=family == kinds.JOB_END,
        has_operator=family == kinds.FORCED_QUORUM,
    )


def _draw_start(rng: random.Random, late_probability: float) -> float:
    """Draw when a node starts: soon, late or never."""
    if rng.random() >= late_probability:
        return rng.uniform(0.0, 2.0)
    return rng.choice((rng.uniform(2.0, LATEST_START_S), rng.uniform(2.0, LATEST_START_S), float("inf")))


def draw_faults(rng: random.Random, family: str, names: tuple[str, ...]) -> list[Fault]:
    """Draw faults at times and at view change messages."""
    aimed = rng.choice((0.0, 0.4, 0.8))
    faults = []
    at, message = rng.uniform(0.0, 7.0), rng.randint(0, 3 * len(names))
    for _ in range(rng.randint(2, 9)):
        kind = rng.choice(KINDS_BY_FAMILY[family])
        for_s = rng.choice((0.05, 0.3, 1.0, 3.5, 4.5, 8.0, 100.0)) * rng.uniform(0.7, 1.3)
        nodes = tuple(rng.sample(names, _draw_node_count(rng, kind, len(names))))
        if rng.random() < aimed:
            message += rng.choice((1, 1, 2, 3, len(names), 3 * len(names)))
            when = Trigger(0.0, "message", message)
        else:
            at += rng.choice((0.02, 0.1, 0.5, 2.0, 5.0)) * rng.uniform(0.5, 1.5)
            when = Trigger(at)
        faults.append(Fault(when, kind, nodes, min(for_s, MAX_DURATION_S.get(kind, for_s))))
    return faults


def _draw_node_count(rng: random.Random, kind: str, count: int) -> int:
    if kind in PARTITION_KINDS or kind in ("slow", "slowish"):
        return rng.randint(1, count - 1)
    if kind == "finish":
        return rng.randint(1, count)
    if kind in ("reset", "half-reset"):
        return 2
    return 2 if kind in ("kill", "power", "wipe", "pause", "suspend") and rng.random() < 0.3 else 1


def keep_candidate_disks(rng: random.Random, job: JobSpec, faults: list[Fault]) -> list[Fault]:
    """Let most candidates keep their disks, so that nodes without knowledge cannot form a first view."""
    few = rng.sample(job.settings.candidates, (len(job.settings.candidates) - 1) // 2)
    forgetful = [*few, *(name for name in job.node_names if name not in job.settings.candidates)]
    kept = []
    for fault in faults:
        if fault.kind == "wipe":
            nodes = tuple(rng.sample(forgetful, min(len(forgetful), len(fault.nodes))))
            kept += [replace(fault, nodes=nodes)] if nodes else []
        else:
            kept.append(fault)
    return kept or [Fault(Trigger(5.0), "worker", job.node_names[:1])]
