"""Play many schedules on every core and report the result.

A failing schedule is printed whole, with the command that plays it again.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace

from tests.support.rendezvous_sim.invariants import INVARIANTS
from tests.support.rendezvous_sim.mutations import apply_mutation
from tests.support.rendezvous_sim.schedule import WAIVED_INVARIANTS, Fault
from tests.support.rendezvous_sim.simulation import Result, run_schedule, run_seed

COMMAND = "python -m tests.support.rendezvous_sim"
CHUNK_SIZE = 50
"""Schedules of one task: a quarter of a second of work, so that all cores finish together."""
MAX_SHOWN = 3
"""Failing schedules printed in full."""
PROGRESS_INTERVAL_S = 30.0
"""How often a long run prints progress: some systems end a command that is silent for minutes."""


@dataclass(slots=True)
class BatchResult:
    """The result of several schedules."""

    schedules: int = 0
    views: int = 0
    events: int = 0
    families: Counter[str] = field(default_factory=Counter)
    failed: list[Result] = field(default_factory=list)

    def add(self, other: BatchResult) -> None:
        """Add another result."""
        self.schedules += other.schedules
        self.views += other.views
        self.events += other.events
        self.families += other.families
        self.failed += other.failed


def run_chunk(seeds: range, mutation: str = "") -> BatchResult:
    """Play several schedules in turn, with one mutation."""
    tally = BatchResult()
    with apply_mutation(mutation):
        for seed in seeds:
            result = run_seed(seed)
            tally.schedules += 1
            tally.views += result.view_count
            tally.events += result.event_count
            tally.families[result.schedule.family] += 1
            if result.violations:
                tally.failed.append(result)
    return tally


def run_parallel(seeds: range, mutation: str = "", jobs: int | None = None) -> Iterator[BatchResult]:
    """Play schedules in `jobs` processes (one for each core); yield results in the order of seeds."""
    chunks = [seeds[start : start + CHUNK_SIZE] for start in range(0, len(seeds), CHUNK_SIZE)]
    jobs = min(jobs or count_cores(), len(chunks))
    if jobs <= 1:
        yield from (run_chunk(chunk, mutation) for chunk in chunks)
        return
    # Spawned, not forked: the caller may have threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=_ignore_sigint) as pool:
        try:
            yield from pool.map(run_chunk, chunks, [mutation] * len(chunks))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def count_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def _ignore_sigint() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


# Output.


def run_one(seed: int, mutation: str = "") -> int:
    """Play one schedule and print all that happens; return 1 if an invariant was violated."""
    with apply_mutation(mutation):
        result = run_seed(seed, with_trace=True)
    print(result)
    failed = [result] if result.violations else []
    print(f"\n{result.view_count} views started in {result.event_count:,} events; {format_verdict(failed)}")
    return 1 if result.violations else 0


def run_many(seeds: range, mutation: str = "", jobs: int | None = None) -> int:
    """Play schedules, print failing ones and a summary; return 1 if an invariant was violated."""
    jobs = jobs or count_cores()
    rule = f", with the mutation {mutation}" if mutation else ""
    span = f"{len(seeds):,} schedules, seeds {seeds.start} to {seeds.stop - 1}"
    print(f"{span}, processes: {jobs}{rule}", flush=True)
    start = printed_at = time.monotonic()
    total = BatchResult()
    for tally in run_parallel(seeds, mutation, jobs):
        for result in tally.failed[: max(0, MAX_SHOWN - len(total.failed))]:
            print(f"\n{format_failure(result, mutation)}\n", flush=True)
        total.add(tally)
        if time.monotonic() >= printed_at + PROGRESS_INTERVAL_S:
            printed_at = time.monotonic()
            print(f"{total.schedules:,} played, {len(total.failed):,} failed", file=sys.stderr, flush=True)
    print(format_summary(total, time.monotonic() - start))
    print(format_verdict(total.failed))
    if len(total.failed) > MAX_SHOWN:
        others = " ".join(str(result.schedule.seed) for result in total.failed[MAX_SHOWN:][:20])
        print(f"seeds of others: {others}{' …' if len(total.failed) > MAX_SHOWN + 20 else ''}")
    return 1 if total.failed else 0


def format_failure(result: Result, mutation: str = "") -> str:
    """Format a failing schedule, the faults that suffice to fail, and the command that plays it again."""
    lines = [str(result)]
    with apply_mutation(mutation):
        needed = minimize_faults(result)
    if len(needed) < len(result.schedule.faults):
        lines += ["  these faults suffice:", *map(str, needed)]
    rule = f" --break {mutation}" if mutation else ""
    return "\n".join([*lines, f"  again: {COMMAND} --seed {result.schedule.seed}{rule}"])


def minimize_faults(result: Result) -> tuple[Fault, ...]:
    """Leave out faults one by one, as long as the first violated invariant stays violated."""
    checker = result.violations[0].invariant
    faults = result.schedule.faults
    for fault in faults:
        fewer = tuple(one for one in faults if one is not fault)
        violations = run_schedule(replace(result.schedule, faults=fewer)).violations
        if checker in {violation.invariant for violation in violations}:
            faults = fewer
    return faults


def format_summary(total: BatchResult, took_s: float) -> str:
    """Format what was played, and how fast."""
    lines = []
    for family, count in total.families.most_common():
        waived = "; ".join(one for one in INVARIANTS if one in WAIVED_INVARIANTS.get(family, ()))
        lines.append(f"{count:>9,}  {family}" + (f"  (may violate: {waived})" if waived else ""))
    rate = total.schedules / max(took_s, 1e-9)
    lines.append(
        f"{total.views:,} views and {total.events:,} events in {took_s:.1f} s, {rate:.0f} schedules/s"
    )
    return "\n".join(lines)


def format_verdict(failed: list[Result]) -> str:
    """Format which invariants were violated in how many schedules, or that all hold."""
    if not failed:
        return "all invariants hold: " + "; ".join(INVARIANTS)
    counts = Counter(checker for result in failed for checker in {one.invariant for one in result.violations})
    kinds = "; ".join(f"{checker} ({count})" for checker, count in counts.most_common())
    return f"INVARIANTS WERE VIOLATED in {len(failed):,} of the schedules: {kinds}"
