"""Many schedules on every core, and what there is to say of them.

A failing schedule is printed whole, with the command that plays it again. Nothing here decides whether one
fails; `simulate` plays them and `checkers` judge.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace

from elastic_resume.rendezvous.core.quorum import ALL_RULES, Rules
from tests.support.rendezvous_sim.checkers import PROMISES
from tests.support.rendezvous_sim.cures import CURES, without
from tests.support.rendezvous_sim.schedule import WAIVED, Fault
from tests.support.rendezvous_sim.simulate import Result, play, run

COMMAND = "python -m tests.support.rendezvous_sim"
BROKEN_RULES = {
    "incarnations": Rules(incarnations=False),
    "two-steps": Rules(two_steps=False),
    "later-proposals": Rules(later_proposals=False),
    "gone-brings-knowledge": Rules(gone_brings_knowledge=False),
}
"""One rule of the quorum broken on purpose, by the name that `--break` takes."""
BREAKS = (*BROKEN_RULES, *CURES)
"""Everything that can be broken by name: the rules, and the cures of `cures`."""
CHUNK = 50
"""Schedules to a task: a quarter of a second of work, so that all cores finish together."""
SHOWN = 3
"""So many failing schedules are printed in full; one is enough to work on."""
PROGRESS_S = 30.0
"""How often a long run says where it is: some places end what is silent for minutes."""


@dataclass(slots=True)
class Tally:
    """What became of some schedules."""

    schedules: int = 0
    worlds: int = 0
    events: int = 0
    families: Counter[str] = field(default_factory=Counter)
    broken: list[Result] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Count others in."""
        self.schedules += other.schedules
        self.worlds += other.worlds
        self.events += other.events
        self.families += other.families
        self.broken += other.broken


@contextlib.contextmanager
def broken(name: str) -> Iterator[Rules]:
    """Break one rule or take one cure out, and give the rules that hold; an empty name breaks nothing."""
    with without("" if name in BROKEN_RULES else name):
        yield BROKEN_RULES.get(name, ALL_RULES)


def play_some(seeds: range, rule: str = "") -> Tally:
    """Play a few schedules one after the other, with one rule broken."""
    tally = Tally()
    with broken(rule) as rules:
        for seed in seeds:
            result = run(seed, rules)
            tally.schedules += 1
            tally.worlds += result.worlds
            tally.events += result.events
            tally.families[result.schedule.family] += 1
            if result.violations:
                tally.broken.append(result)
    return tally


def play_many(seeds: range, rule: str = "", jobs: int | None = None) -> Iterator[Tally]:
    """Play schedules in `jobs` processes (one for each core); yield tallies in the order of seeds."""
    chunks = [seeds[start : start + CHUNK] for start in range(0, len(seeds), CHUNK)]
    jobs = min(jobs or cores(), len(chunks))
    if jobs <= 1:
        yield from (play_some(chunk, rule) for chunk in chunks)
        return
    # Spawned, not forked: whoever calls may have threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=_leave_interrupts_to_the_parent) as pool:
        try:
            yield from pool.map(play_some, chunks, [rule] * len(chunks))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


# ---- for people ----------------------------------------------------------------------------------------


def tell_one(seed: int, broken_rule: str = "") -> int:
    """Play one schedule and print all that happened; 1 if a promise was broken."""
    with broken(broken_rule) as rules:
        result = run(seed, rules, told=True)
    print(result)
    failed = [result] if result.violations else []
    print(f"\n{result.worlds} worlds began in {result.events:,} events; {verdict(failed)}")
    return 1 if result.violations else 0


def tell_many(seeds: range, broken_rule: str = "", jobs: int | None = None) -> int:
    """Play schedules, print those that fail and a summary; 1 if a promise was broken."""
    jobs = jobs or cores()
    rule = f", with the rule {broken_rule} broken on purpose" if broken_rule else ""
    span = f"{len(seeds):,} schedules, seeds {seeds.start} to {seeds.stop - 1}"
    print(f"{span}, processes: {jobs}{rule}", flush=True)
    start = told_at = time.monotonic()
    total = Tally()
    for tally in play_many(seeds, broken_rule, jobs):
        for result in tally.broken[: max(0, SHOWN - len(total.broken))]:
            print(f"\n{failure(result, broken_rule)}\n", flush=True)
        total.add(tally)
        if time.monotonic() >= told_at + PROGRESS_S:
            told_at = time.monotonic()
            print(f"{total.schedules:,} played, {len(total.broken):,} failed", file=sys.stderr, flush=True)
    print(summary(total, time.monotonic() - start))
    print(verdict(total.broken))
    if len(total.broken) > SHOWN:
        others = " ".join(str(result.schedule.seed) for result in total.broken[SHOWN:][:20])
        print(f"seeds of others: {others}{' …' if len(total.broken) > SHOWN + 20 else ''}")
    return 1 if total.broken else 0


def failure(result: Result, broken_rule: str = "") -> str:
    """Show a failing schedule, which of its faults are enough, and the command that plays it again."""
    lines = [str(result)]
    with broken(broken_rule) as rules:
        needed = necessary(result, rules)
    if len(needed) < len(result.schedule.faults):
        lines += ["  without the other faults it fails too:", *map(str, needed)]
    rule = f" --break {broken_rule}" if broken_rule else ""
    return "\n".join([*lines, f"  again: {COMMAND} --seed {result.schedule.seed}{rule}"])


def necessary(result: Result, rules: Rules) -> tuple[Fault, ...]:
    """Leave faults out, one after the other, as long as the first promise that was broken is broken still."""
    checker = result.violations[0].checker
    faults = result.schedule.faults
    for fault in faults:
        fewer = tuple(one for one in faults if one is not fault)
        violations = play(replace(result.schedule, faults=fewer), rules).violations
        if checker in {violation.checker for violation in violations}:
            faults = fewer
    return faults


def summary(total: Tally, took_s: float) -> str:
    """Say what was played, and how fast."""
    lines = []
    for family, count in total.families.most_common():
        waived = "; ".join(one for one in PROMISES if one in WAIVED.get(family, ()))
        lines.append(f"{count:>9,}  {family}" + (f"  (may defeat: {waived})" if waived else ""))
    rate = total.schedules / max(took_s, 1e-9)
    lines.append(
        f"{total.worlds:,} worlds and {total.events:,} events in {took_s:.1f} s, {rate:.0f} schedules/s"
    )
    return "\n".join(lines)


def verdict(failed: list[Result]) -> str:
    """Say which promises were broken in how many schedules, or that all were kept."""
    if not failed:
        return "all promises were kept: " + "; ".join(PROMISES)
    counts = Counter(checker for result in failed for checker in {one.checker for one in result.violations})
    kinds = "; ".join(f"{checker} ({count})" for checker, count in counts.most_common())
    return f"PROMISES WERE BROKEN in {len(failed):,} of the schedules: {kinds}"
