"""Play many schedules on every core and report the result.

A failing schedule is printed whole, with the command that plays it again.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from tests.support.rendezvous_sim.invariants import INVARIANTS
from tests.support.rendezvous_sim.mutations import apply_mutation
from tests.support.rendezvous_sim.random_schedules import draw_schedule
from tests.support.rendezvous_sim.schedule import Fault
from tests.support.rendezvous_sim.simulation import Result, run_schedule
from tests.support.rendezvous_sim.wide_schedules import draw_wide_schedule

COMMAND = "python -m tests.support.rendezvous_sim"
CHUNK_SIZE = 50
"""Schedules of one task: a quarter of a second of work, so that all cores finish together."""
MAX_SHOWN = 3
"""Failing schedules printed in full."""


def run_chunk(seeds: Sequence[int], mutation: str = "", *, is_wide: bool = False) -> list[Result]:
    """Play several schedules in turn, with one mutation."""
    draw = draw_wide_schedule if is_wide else draw_schedule
    with apply_mutation(mutation):
        return [run_schedule(draw(seed)) for seed in seeds]


def run_parallel(
    seeds: range, mutation: str = "", jobs: int | None = None, *, is_wide: bool = False
) -> Iterator[Result]:
    """Play schedules in `jobs` processes (one for each core); yield results in the order of seeds."""
    chunks = [seeds[start : start + CHUNK_SIZE] for start in range(0, len(seeds), CHUNK_SIZE)]
    jobs = min(jobs or len(os.sched_getaffinity(0)), len(chunks))
    if jobs <= 1:
        for chunk in chunks:
            yield from run_chunk(chunk, mutation, is_wide=is_wide)
        return
    # Spawned, not forked: the caller may have threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=_ignore_sigint) as pool:
        try:
            play = functools.partial(run_chunk, mutation=mutation, is_wide=is_wide)
            for results in pool.map(play, chunks):
                yield from results
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _ignore_sigint() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


# Output.


def run_one(seed: int, mutation: str = "", *, is_wide: bool = False) -> int:
    """Play one schedule and print all that happens; return 1 if an invariant was violated."""
    draw = draw_wide_schedule if is_wide else draw_schedule
    with apply_mutation(mutation):
        result = run_schedule(draw(seed), with_trace=True)
    failed = [result] if result.violations else []
    print(result)
    print(f"\n{result.view_count} views started in {result.event_count:,} events; {format_verdict(failed)}")
    return len(failed)


def run_many(seeds: range, mutation: str = "", jobs: int | None = None, *, is_wide: bool = False) -> int:
    """Play schedules, print failing ones and a summary; return 1 if an invariant was violated."""
    suffix = f", with the mutation {mutation}" if mutation else ""
    print(f"{len(seeds):,} schedules, seeds {seeds.start} to {seeds.stop - 1}{suffix}", flush=True)
    start = time.monotonic()
    failed: list[Result] = []
    families: Counter[str] = Counter()
    views = 0
    for result in run_parallel(seeds, mutation, jobs, is_wide=is_wide):
        families[result.schedule.family] += 1
        views += result.view_count
        if result.violations:
            failed.append(result)
            if len(failed) <= MAX_SHOWN:
                print(f"\n{format_failure(result, mutation, is_wide=is_wide)}\n", flush=True)
    for family, count in families.most_common():
        print(f"{count:>9,}  {family}")
    took_s = time.monotonic() - start
    print(f"{views:,} views in {took_s:.1f} s, {len(seeds) / max(took_s, 1e-9):.0f} schedules/s")
    print(format_verdict(failed))
    return 1 if failed else 0


def format_failure(result: Result, mutation: str = "", *, is_wide: bool = False) -> str:
    """Format a failing schedule, the faults that suffice to fail, and the command that plays it again."""
    lines = [str(result)]
    with apply_mutation(mutation):
        needed = minimize_faults(result)
    if len(needed) < len(result.schedule.faults):
        lines += ["  these faults suffice:", *map(str, needed)]
    option = (" --wide" if is_wide else "") + (f" --break {mutation}" if mutation else "")
    return "\n".join([*lines, f"  again: {COMMAND} --seed {result.schedule.seed}{option}"])


def minimize_faults(result: Result) -> tuple[Fault, ...]:
    """Leave out faults one by one, as long as the first violated invariant stays violated."""
    faults = result.schedule.faults
    for fault in faults:
        fewer = tuple(other for other in faults if other is not fault)
        violated = run_schedule(replace(result.schedule, faults=fewer)).violated
        if result.violations[0].invariant in violated:
            faults = fewer
    return faults


def format_verdict(failed: list[Result]) -> str:
    """Format which invariants were violated in how many schedules, or that all hold."""
    if not failed:
        return "all invariants hold: " + "; ".join(INVARIANTS)
    counts = Counter(invariant for result in failed for invariant in result.violated)
    kinds = "; ".join(f"{invariant} ({count})" for invariant, count in counts.most_common())
    seeds = " ".join(str(result.schedule.seed) for result in failed[:20])
    return f"INVARIANTS WERE VIOLATED in {len(failed):,} of the schedules: {kinds}\nseeds: {seeds}"
