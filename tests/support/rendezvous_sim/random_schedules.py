"""Draw a schedule from a seed. A seed gives the same schedule on every machine.

Families differ in what they draw; `targeted_faults` draws the faults that follow view changes.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

from elastic_resume.rendezvous.core.interface import RendezvousSettings
from tests.support.rendezvous_sim import schedule as kinds
from tests.support.rendezvous_sim import targeted_faults
from tests.support.rendezvous_sim.schedule import PARTITION_KINDS, Fault, JobSpec, NodeSpec, Schedule, Trigger

NODE_NAMES = "abcdefghi"
MAX_CLOCK_DRIFT = 0.02
"""Clock rates differ from true by up to this share; leases keep 0.05 back for two clocks."""
FAMILY_WEIGHTS = {
    kinds.VIEW_CHANGES: 28,
    kinds.RESTARTS: 3,
    kinds.ANY_FAULT: 15,
    kinds.RESETS: 8,
    kinds.LATE_READERS: 7,
    kinds.MILD_FAULTS: 5,
    kinds.JOB_END: 6,
    kinds.SHORT_JOIN_TIMEOUT: 6,
    kinds.LOST_DISKS: 3,
    kinds.LOST_DISKS_AND_PARTITIONS: 2,
    kinds.REJECTING_FIREWALL: 3,
    kinds.PARTIAL_PARTITIONS: 6,
    kinds.CROWDS: 3,
    kinds.NEWCOMERS: 3,
    kinds.WRONG_SETUPS: 2,
}
"""Schedules of each family in a hundred."""

CRASHES = ("kill", "kill", "crash-before-send", "written")
UNREACHABLE_KINDS = ("power", "pause", "suspend", "partition", "repartition", "repartition", "one-way")
OTHER_KINDS = ("slow", "disk", "stuck", "worker", "leave", "reset", "half-reset", "small-path")
KINDS_BY_FAMILY = {
    kinds.ANY_FAULT: (*CRASHES, *UNREACHABLE_KINDS, *OTHER_KINDS),
    kinds.MILD_FAULTS: ("reset", "worker", "half-reset", "slowish", "reset", "kill"),
    kinds.JOB_END: (*CRASHES, *UNREACHABLE_KINDS, *["finish"] * 4, "fail", "worker", "leave"),
    kinds.SHORT_JOIN_TIMEOUT: (*CRASHES, *UNREACHABLE_KINDS, *OTHER_KINDS),
    kinds.LOST_DISKS: (*CRASHES, "wipe", "wipe", "wipe", "worker", "leave", "disk"),
    kinds.LOST_DISKS_AND_PARTITIONS: (*CRASHES, *UNREACHABLE_KINDS, *OTHER_KINDS, *["wipe"] * 4),
    kinds.REJECTING_FIREWALL: (*CRASHES, "reject", "reject", "reject", "pause", "worker", "leave"),
    kinds.WRONG_SETUPS: (*CRASHES, *UNREACHABLE_KINDS, *OTHER_KINDS),
}
MAX_DURATION_S = {"slow": 8.0, "slowish": 12.0, "disk": 8.0, "pause": 8.0, "suspend": 12.0, "stuck": 12.0}
"""The longest duration of faults that would hide all others."""
STRICT_PROBABILITY = 0.15
"""Share of the jobs without the exception of `quorum`: only there clocks stop."""
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
        faults = targeted_faults.draw_faults(rng, family, len(job.nodes))
        return Schedule(seed, family, job, tuple(stop_clocks(job, faults)))
    if family in DRAWN_WITH_JOB:
        return Schedule(seed, family, *DRAWN_WITH_JOB[family](rng, family))
    job = draw_job(rng, family, rng.choice((3, 3, 4, 5, 5, 6, 7, 9)))
    if family == kinds.JOB_END and rng.random() < 0.5:
        return Schedule(seed, family, job, tuple(targeted_faults.partition_at_job_end(rng, len(job.nodes))))
    faults = draw_faults(rng, family, job.node_names)
    if family in (kinds.LOST_DISKS, kinds.LOST_DISKS_AND_PARTITIONS):
        faults = keep_candidate_disks(rng, job, faults, may_lose=family == kinds.LOST_DISKS)
    return Schedule(seed, family, job, tuple(stop_clocks(job, faults)))


def stop_clocks(job: JobSpec, faults: list[Fault]) -> list[Fault]:
    """Let the clocks of suspended machines stop, unless votes of dead nodes count: these trust clocks."""
    if not job.settings.is_strict:
        return faults
    return [replace(fault, kind="stop-clock") if fault.kind == "suspend" else fault for fault in faults]


def draw_job(rng: random.Random, family: str, count: int) -> JobSpec:
    """Draw nodes, candidates, limits and clocks."""
    names = tuple(NODE_NAMES[:count]) if count <= 9 else tuple(f"n{place:03}" for place in range(count))
    candidates = names[: rng.choice((1, 2, 3, 3, min(count, 9)))]
    settings = RendezvousSettings(
        candidates,
        min_nodes=rng.choice((1, 1, 1, 2)),
        max_nodes=count
        if family in targeted_faults.ATTACKS_BY_FAMILY or family in DRAWN_WITH_JOB
        else rng.choice((count, count, count - 1, 2)),
        is_strict=family == kinds.LOST_DISKS_AND_PARTITIONS or rng.random() < STRICT_PROBABILITY,
        heartbeats_per_timeout=4,
        join_timeout_s=rng.choice((10.0, 15.0, 20.0)) if family == kinds.SHORT_JOIN_TIMEOUT else 600.0,
    )
    on_time = dict.fromkeys((*targeted_faults.ATTACKS_BY_FAMILY, *DRAWN_WITH_JOB), 0.0)
    late = {kinds.SHORT_JOIN_TIMEOUT: 0.4, **on_time}.get(family, 0.05)
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


def keep_candidate_disks(
    rng: random.Random, job: JobSpec, faults: list[Fault], *, may_lose: bool
) -> list[Fault]:
    """Let most candidates keep their disks, so that nodes without knowledge cannot form a first view.

    Unless a few `may_lose` them, all do: a candidate may have been cut off from the first view.
    """
    few = rng.sample(job.settings.candidates, (len(job.settings.candidates) - 1) // 2 * may_lose)
    forgetful = [*few, *(name for name in job.node_names if name not in job.settings.candidates)]
    kept = []
    for fault in faults:
        if fault.kind == "wipe":
            nodes = tuple(rng.sample(forgetful, min(len(forgetful), len(fault.nodes))))
            kept += [replace(fault, nodes=nodes)] if nodes else []
        else:
            kept.append(fault)
    return kept or [Fault(Trigger(5.0), "worker", job.node_names[:1])]


# Families that draw their faults to fit the job.


def draw_partial_partition(rng: random.Random, family: str) -> tuple[JobSpec, tuple[Fault, ...]]:
    """Cut some links for good, but none of a majority, before or after the first view; few faults follow."""
    job = draw_job(rng, family, rng.choice((3, 4, 5, 5, 6, 7)))
    names = job.node_names
    # The first node mostly leads. It may be outside of the majority, and connected to few others.
    others = names[1:] if rng.random() < 0.5 and len(names) > 3 else names
    majority = set(rng.sample(others, len(names) // 2 + 1))
    if rng.random() < 0.3:
        settings = replace(job.settings, min_nodes=rng.randint(2, len(majority)))
        job = replace(job, settings=settings)
    pairs = [pair for pair in combinations(names, 2) if not majority.issuperset(pair)]
    cut = [rng.sample(pair, 2) for pair in rng.sample(pairs, rng.randint(1, len(pairs)))]
    links = tuple(f"{first}{rng.choice('-->')}{second}" for first, second in cut)
    when = rng.choice((Trigger(0.0), Trigger(rng.uniform(0.0, 2.0), "view", 1)))
    faults = [Fault(when, "links", links, float("inf"))]
    for _ in range(rng.choice((0, 0, 1, 2))):
        kind = rng.choice(("kill", "power", "worker", "leave"))
        faults.append(Fault(_draw_next(rng), kind, (rng.choice(names),), rng.choice((0.3, 3.0, 60.0))))
    return job, tuple(faults)


def _draw_next(rng: random.Random) -> Trigger:
    return Trigger(rng.choice((0.02, 0.3, 1.0, 4.0, 8.0)), after_previous=True)


def draw_crowd(rng: random.Random, family: str) -> tuple[JobSpec, tuple[Fault, ...]]:
    """Let many nodes of a large job lose power or restart at once."""
    job = draw_job(rng, family, rng.randint(100, 300))
    count = len(job.nodes)
    lost = job.node_names[: rng.choice((12, count // 4, (count - 1) // 2, count))]
    if rng.random() < 0.3:
        lost = tuple(rng.sample(job.node_names, len(lost)))
    crash = Fault(Trigger(1.0, "view", 1), rng.choice(("power", "kill")), lost, rng.choice((0.5, 3.0, 60.0)))
    return job, (crash,)


def draw_restart(rng: random.Random, family: str) -> tuple[JobSpec, tuple[Fault, ...]]:
    """Let some nodes die for good, and all others die and start again within some milliseconds."""
    job = draw_job(rng, family, rng.choice((3, 4, 5, 6)))
    names = job.node_names
    faults = []
    if rng.random() < 0.5:
        faults += [
            Fault(Trigger(1.0, "view", 1), "finish", names),
            Fault(
                Trigger(rng.choice((1.0, 6.0)), after_previous=True), "kill", names, rng.choice((0.3, 1.0))
            ),
        ]
    gone = rng.sample(names, rng.randint(0, (len(names) - 1) // 2))
    kinds_of_loss = ("kill", "power", "kill", "leave")
    faults += [Fault(_draw_next(rng), rng.choice(kinds_of_loss), (name,), float("inf")) for name in gone]
    others = tuple(name for name in names if name not in gone)
    restart_s = rng.choice((0.3, 1.0, 4.0))
    pause_s = rng.choice((0.0, 0.002, 0.005, 0.01, 0.1))
    kind = rng.choice(("kill", "power"))
    at = Trigger(rng.choice((1.0, 4.0, 8.0)), after_previous=True)
    for name in rng.sample(others, len(others)):
        faults.append(Fault(at, kind, (name,), restart_s))
        at = Trigger(pause_s, after_previous=True)
    if rng.random() < 0.3:
        faults += draw_faults(rng, kinds.ANY_FAULT, names)[:2]
    first = faults[0]
    if first.trigger.after_previous:
        faults[0] = replace(first, trigger=Trigger(first.trigger.delay_s, "view", 1))
    return job, tuple(faults)


def draw_newcomers(rng: random.Random, family: str) -> tuple[JobSpec, tuple[Fault, ...]]:
    """Let late nodes prepare for long, or crash again and again."""
    job = draw_job(rng, family, rng.choice((3, 4, 5, 6)))
    late = rng.sample(job.nodes, rng.choice((1, 1, 2)))
    start_s, preparation_s = rng.uniform(5.0, 9.0), rng.choice((0.0, 0.0, 3.0, 20.0))
    nodes = tuple(
        replace(node, start_s=start_s, preparation_s=preparation_s) if node in late else node
        for node in job.nodes
    )
    faults, at = [], 9.0
    pause_s = rng.choice((1.0, 3.0, 5.0))
    for _ in range(rng.randint(0, 8)):
        at += pause_s * rng.uniform(0.8, 1.2)
        kind = rng.choice(("kill", "kill", "power", "worker", "leave", "small-path"))
        faults.append(Fault(Trigger(at), kind, (late[0].name,), rng.choice((0.1, 0.5, 1.0))))
    if rng.random() < 0.5:
        faults += draw_faults(rng, kinds.ANY_FAULT, job.node_names)[:2]
    return replace(job, nodes=nodes), tuple(faults)


def draw_wrong_setup(rng: random.Random, family: str) -> tuple[JobSpec, tuple[Fault, ...]]:
    """Give one node another list of candidates; or replace one that is cut off by another of its name."""
    job = draw_job(rng, family, rng.choice((3, 4, 5, 6)))
    names = job.node_names
    nodes = list(job.nodes)
    place = rng.randrange(len(nodes))
    faults = draw_faults(rng, family, names)[: rng.randint(0, 3)]
    if rng.random() < 0.5:
        job = replace(job, settings=replace(job.settings, candidates=names[:3]))
        others = tuple(rng.sample(names, rng.choice((2, 3, 3))))
        nodes[place] = replace(nodes[place], candidates=others)
    else:
        at = rng.uniform(4.0, 8.0)
        cut = Fault(Trigger(at), "partition", (names[place],), rng.choice((4.0, 10.0, 60.0)))
        new = NodeSpec(f"{names[place]}2", at + rng.uniform(0.1, 6.0), same_name_as=names[place])
        settings = replace(job.settings, is_strict=True, max_nodes=len(nodes) + rng.choice((0, 1)))
        job, faults = replace(job, settings=settings), [cut, *faults]
        nodes.append(new)
    return replace(job, nodes=tuple(nodes)), tuple(faults)


DRAWN_WITH_JOB = {
    kinds.PARTIAL_PARTITIONS: draw_partial_partition,
    kinds.CROWDS: draw_crowd,
    kinds.NEWCOMERS: draw_newcomers,
    kinds.RESTARTS: draw_restart,
    kinds.WRONG_SETUPS: draw_wrong_setup,
}
