"""Draw what `random_schedules` never does; `python -m tests.support.rendezvous_sim --wide` plays it.

These are orderly ways to stop, nodes of new names, second runs with other settings, and the conditions of
real clusters: workers that stop slowly, other node timeouts, lost packets, new ports and IP addresses. Where
worlds.md promises that the nodes that are left continue, `must_continue` checks it without the core's rule.
"""

from __future__ import annotations

import random
from dataclasses import replace

from tests.support.rendezvous_sim import random_schedules, targeted_faults
from tests.support.rendezvous_sim import schedule as kinds
from tests.support.rendezvous_sim.schedule import Fault, JobSpec, NodeSpec, Schedule, Trigger

FAMILY_WEIGHTS = {
    kinds.LEAVERS: 25,
    kinds.FULL_STOPS: 15,
    kinds.SECOND_RUNS: 10,
    kinds.FOREIGN: 7,
    kinds.MANY_NODES: 1,
    kinds.ANY_FAULT: 42,
}
"""Schedules of each family in a hundred; for `ANY_FAULT` one of `random_schedules` in a real cluster."""
NEVER_S = float("inf")


def draw_wide_schedule(seed: int) -> Schedule:
    """Return the schedule of a seed."""
    rng = random.Random(2 * seed)
    (family,) = rng.choices(list(FAMILY_WEIGHTS), list(FAMILY_WEIGHTS.values()))
    if family == kinds.ANY_FAULT:
        schedule = draw_known_family(seed)
        return replace(schedule, job=draw_conditions(rng, schedule.job, share=0.4))
    job, faults = DRAWN_WITH_JOB[family](rng)
    return Schedule(seed, family, draw_conditions(rng, job, share=0.2), tuple(faults))


def draw_known_family(seed: int) -> Schedule:
    """Return a schedule of `random_schedules` without a crowd, which costs as much as thirty others."""
    schedule = random_schedules.draw_schedule(seed)
    while schedule.family == kinds.CROWDS:
        seed += 10**9
        schedule = random_schedules.draw_schedule(seed)
    return schedule


def draw_conditions(rng: random.Random, job: JobSpec, share: float) -> JobSpec:
    """Give this share of the jobs each condition of a real cluster."""
    if rng.random() < share:
        job = replace(job, max_stop_s=(0.02, 2.0, 5.0, 10.0))
    if rng.random() < share:
        job = replace(job, has_new_addresses=True)
    if rng.random() < share and not (job.must_continue and len(job.stays_away) > 3):
        # A node that leaves waits for two seconds, and each packet of ten may need half of one. Of many that
        # leave one after the other, each leads for a moment: see "What waits".
        job = replace(job, loss=0.02 if job.must_continue else rng.choice((0.02, 0.1)))
    if rng.random() < share:
        timeout_s = 10.0 if job.loss else rng.choice((1.0, 10.0))
        settings, first = replace(job.settings, node_timeout_s=timeout_s), job.first_settings
        first = replace(first, node_timeout_s=timeout_s) if first else None
        job = replace(job, settings=settings, first_settings=first)
    return job


def draw_job(rng: random.Random, family: str, count: int, min_nodes: int = 1) -> JobSpec:
    """Draw a job whose first view has all its nodes."""
    job = random_schedules.draw_job(rng, family, count)
    nodes = tuple(replace(node, start_s=rng.uniform(0.0, 1.0)) for node in job.nodes)
    settings = replace(job.settings, min_nodes=min_nodes, max_nodes=count)
    return replace(job, nodes=nodes, settings=settings)


def add_candidate(job: JobSpec, name: str) -> JobSpec:
    """Let a node be a candidate: a node that knows none of the others looks for it there."""
    others = [other for other in job.settings.candidates if other != name]
    return replace(job, settings=replace(job.settings, candidates=(*others, name)))


def draw_leavers(rng: random.Random) -> tuple[JobSpec, list[Fault]]:
    """Let some nodes leave at once or one after the other for good; those that stay, or join, must continue.

    Each that leaves hands its vote over if the others' workers stop slowly, or MIN nodes are not here.
    """
    count = rng.choice((2, 2, 3, 3, 4, 5, 6))
    leaving_count = rng.randint(1, count - 1)
    new_count = rng.choice((0, 0, 1, leaving_count))
    job = draw_job(rng, kinds.LEAVERS, count, rng.randint(1, count - leaving_count + new_count))
    leaving = tuple(rng.sample(job.node_names, leaving_count))
    if new_count:
        job = add_candidate(job, rng.choice([name for name in job.node_names if name not in leaving]))
    at_s = rng.uniform(6.0, 9.0)
    nodes = [NodeSpec(f"z{number}", at_s + rng.uniform(0.1, 9.0)) for number in range(new_count)]
    job = replace(job, nodes=(*job.nodes, *nodes), stays_away=leaving)
    faults, pause_s = [], rng.choice((0.0, 0.0, 0.02, 0.5, 2.0))
    for name in leaving:
        faults.append(Fault(Trigger(at_s), "leave", (name,), NEVER_S))
        at_s += pause_s
    return replace(job, must_continue=True), faults


def draw_full_stop(rng: random.Random) -> tuple[JobSpec, list[Fault]]:
    """Stop all nodes at once; the smallest majority comes back, at once or one after the other."""
    count = rng.choice((2, 3, 3, 4, 5, 6, 7))
    job = draw_job(rng, kinds.FULL_STOPS, count, rng.randint(1, count // 2 + 1))
    back = rng.sample(job.node_names, count // 2 + 1)
    job = add_candidate(job, back[0])
    away = tuple(name for name in job.node_names if name not in back)
    kind, at = rng.choice(("power", "power", "leave")), Trigger(rng.uniform(6.0, 9.0))
    faults = [Fault(at, kind, (name,), rng.choice((0.3, 3.0, 6.0))) for name in back]
    faults += [Fault(at, kind, (name,), NEVER_S) for name in away]
    rng.shuffle(faults)
    return replace(job, stays_away=away, must_continue=True), faults


def draw_second_run(rng: random.Random) -> tuple[JobSpec, list[Fault]]:
    """Start all nodes again with other settings, after the end of the job or in the middle of it."""
    count = rng.choice((2, 3, 3, 4, 5))
    job = draw_job(rng, kinds.SECOND_RUNS, count)
    names, settings = job.node_names, job.settings
    others = tuple(rng.sample(names, rng.choice((1, 2, min(3, count)))))
    settings = rng.choice(
        (
            replace(settings, is_strict=not settings.is_strict),
            replace(settings, candidates=others),
            replace(settings, min_nodes=rng.randint(1, count)),
        )
    )
    job = replace(job, settings=settings, first_settings=job.settings)
    at_s, faults = rng.uniform(6.0, 8.0), []
    if rng.random() < 0.4:
        faults.append(Fault(Trigger(at_s), "finish", names))
        at_s += 3.0
    first: tuple[str, ...] = ()
    if rng.random() < 0.4:
        # One dies before the others, which may take its vote, and starts with the new settings behind a cut.
        first = (rng.choice(names),)
        faults.append(Fault(Trigger(at_s), "kill", first, 1.0))
        faults.append(Fault(Trigger(at_s + 0.6), "partition", first, 8.0))
        at_s += 0.8
    faults.append(Fault(Trigger(at_s), "reconfigure", names))
    apart = rng.random() < 0.5
    for name in rng.sample(names, count):
        at_s += rng.choice((0.0, 0.02, 0.5, 4.0)) if apart else 0.0
        if name not in first:
            faults.append(Fault(Trigger(at_s + 0.01), "kill", (name,), rng.choice((0.3, 1.0, 4.0))))
    if rng.random() < 0.3:
        faults.append(targeted_faults.heal(rng))
    return job, faults


def draw_foreign_directory(rng: random.Random) -> tuple[JobSpec, list[Fault]]:
    """Let a node come with the directory of another job while a view runs."""
    job = draw_job(rng, kinds.FOREIGN, rng.choice((3, 4, 5)))
    name = rng.choice(job.node_names[1:])
    nodes = tuple(
        replace(node, is_foreign=True, start_s=rng.uniform(6.0, 9.0)) if node.name == name else node
        for node in job.nodes
    )
    settings = replace(
        job.settings, candidates=tuple(rng.sample([other for other in job.node_names if other != name], 2))
    )
    # Before the first view is decided nobody can know that the directory is of another job.
    faults = random_schedules.draw_faults(rng, kinds.ANY_FAULT, job.node_names)[: rng.randint(0, 2)]
    faults = [replace(fault, trigger=Trigger(rng.uniform(6.0, 12.0))) for fault in faults]
    faults = faults or [Fault(Trigger(12.0), "worker", ("#0",))]
    return replace(job, nodes=nodes, settings=settings), faults


def draw_many_nodes(rng: random.Random) -> tuple[JobSpec, list[Fault]]:
    """Play any faults against a job of more than 64 nodes."""
    job = draw_job(rng, kinds.MANY_NODES, rng.randint(65, 90))
    return job, random_schedules.draw_faults(rng, kinds.ANY_FAULT, job.node_names)


DRAWN_WITH_JOB = {
    kinds.LEAVERS: draw_leavers,
    kinds.FULL_STOPS: draw_full_stop,
    kinds.SECOND_RUNS: draw_second_run,
    kinds.FOREIGN: draw_foreign_directory,
    kinds.MANY_NODES: draw_many_nodes,
}
