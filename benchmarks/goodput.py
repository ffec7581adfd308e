"""Measure goodput under constant kills: elastic_resume and stock torchrun.

Three nodes are three agents on loopback addresses of this machine, one worker each, `--nnodes 1:3`: a job
that lost two nodes continues with one. A small DDP model on gloo (jobs/steps.py, about 50 ms per step; a GPT
of 21 M parameters with `--model gpt`) trains undisturbed for --baseline-minutes, then for --minutes with one
kill every --every seconds. Each kill hits a worker, a node (its agent and all descendants at once) or an
agent alone, drawn with --seed, the same for all systems. The next failure comes even if the job has not
recovered from the last.

    ours       `elastic-resume run`, defaults and --snapshot-every 1
    torchrun   c10d, defaults, but --max-restarts; every node saves with torch.save at every tenth step
    tuned      torchrun with shorter timeouts, and a store of each round's own (see recovery.py)
    dcp        the same, and all ranks save with dcp.async_save into a shared directory, at every tenth step
    torchft    its defaults (see recovery.py); n0 hosts its lighthouse, and is not killed
    none       torchrun whose script saves nothing, undisturbed only: what a step takes without any of this

A node whose agent is gone is started again at once, whether it was killed or ended by itself (those are
counted). The node that hosts torchrun's store is never killed, because that ends its job for good. torchrun's
workers die with their agent, as ours do; otherwise they would live on and interfere.

Every rank records every step that it has executed, with the time. A step is done when one rank has finished
it. If a later world executes a step again, it counts twice as executed. Wasted steps are executed steps that
were no progress. Steps that were started and never finished show only in the goodput: steps done, divided by
the steps that the undisturbed rate gives for the same time. A step counts the same with fewer nodes, as with
a constant global batch, and may take less time when nodes share cores; so the mean number of nodes stands
beside it. Standstill is the longest time without a new step.

The cost of a snapshot at every step without any failure, in turns with a job that saves nothing:
`--minutes 0 --model gpt --only none,ours,none,ours`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from jobs.agents import NODES, OURS, Job, Work, kill_processes, make_job
from jobs.marks import Marks
from recovery import SYSTEMS, NotTrainingError, choice, log, machine, no_process_left, wait_steady

KINDS = ("worker", "node", "agent")
LOOK_S = 0.5  # how soon a node that ended by itself is started again
SLEEP_S = 0.04
STOCK_SAVES_EVERY, NEVER = 10, 1 << 60


# ---- what happens ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kill:
    """One planned failure. ``spare`` is killed instead if ``victim`` must not be."""

    at_s: float
    kind: str
    victim: int
    spare: int


def plan(seed: int, every_s: float, duration_s: float) -> list[Kill]:
    """Plan one kill in the middle of every ``every_s``, so that the last one has time to recover."""
    rng = random.Random(f"{seed} {every_s}")
    times = itertools.takewhile(lambda at: at < duration_s, itertools.count(every_s / 2, every_s))
    return [Kill(at, rng.choice(KINDS), rng.randrange(NODES), 1 + rng.randrange(NODES - 1)) for at in times]


@dataclass
class Disturbance:
    """Counts kills by kind, kills without a target, and agents that ended by themselves."""

    kills: Counter[str] = field(default_factory=Counter)
    missed: int = 0
    ended: list[str] = field(default_factory=list)
    dead: list[psutil.Process] = field(default_factory=list)  # to be reaped


def inject_kills(job: Job, marks: Marks, kills: list[Kill], until: float, *, spare_host: bool) -> Disturbance:
    """Kill by the plan and restart what is gone, until the time is over."""
    done, began, left = Disturbance(), time.monotonic(), list(kills)
    while (now := time.monotonic()) < until:
        if left and now >= began + left[0].at_s:
            kill_once(job, marks, left.pop(0), done, spare_host=spare_host)
        restart_ended(job, done)
        _, done.dead = psutil.wait_procs(done.dead, timeout=0)
        wake = min([until, *(began + kill.at_s for kill in left[:1])])
        time.sleep(max(0.0, min(LOOK_S, wake - time.monotonic())))
    return done


def kill_once(job: Job, marks: Marks, kill: Kill, done: Disturbance, *, spare_host: bool) -> None:
    """Kill, wait for the agent's end if it was hit, and start the node again."""
    mortal = kill.kind != "worker" and spare_host and kill.victim == job.host()
    victim = kill.spare if mortal else kill.victim
    try:
        processes = job.processes(victim)
    except psutil.NoSuchProcess:
        processes = []
    if kill.kind == "worker":
        marks.look()
        pids = {process.pid for process in processes}
        born = [
            worker.pid for worker in marks.workers() if worker.node == f"n{victim}" and worker.pid in pids
        ]
        killed = [process for process in processes if process.pid in born]
    else:
        killed = processes if kill.kind == "node" else processes[:1]
    kill_processes(killed)
    if not killed:
        done.missed += 1
        return
    done.kills[kill.kind] += 1
    if kill.kind != "worker":
        done.dead += processes[1:]
        job.agent(victim).wait()
        job.start(victim)


def restart_ended(job: Job, done: Disturbance) -> None:
    """Restart agents that have ended by themselves, as a service manager would."""
    for index, code in enumerate(job.codes()):
        if code is not None:
            done.ended.append(f"n{index} with {code if code >= 0 else signal.Signals(-code).name}")
            job.start(index)


# ---- what came of it -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One step of one world, at the time when the first rank finished it."""

    t: float
    world: str
    step: int
    ranks: int


def read_steps(directory: Path) -> list[Step]:
    """Read all recorded steps, each step of a world once, ordered by time."""
    noted: dict[tuple[str, int], list[float]] = {}
    for path in directory.glob("*"):
        world = ""
        for line in map(json.loads, path.read_bytes().rpartition(b"\n")[0].splitlines()):
            if line["mark"] == "resumed":
                world = line["world"]
            elif line["mark"] == "step":
                noted.setdefault((world, line["step"]), []).append(line["t"])
    return sorted((Step(min(ts), *key, len(ts)) for key, ts in noted.items()), key=lambda step: step.t)


@dataclass(frozen=True)
class Stretch:
    """What a job did in a stretch of time."""

    seconds: float
    done: int
    executed: int
    worlds: int
    ranks: float  # of a step, on average
    standstill_s: float
    step_s: tuple[float, float]  # from one step to the next of the same world: median and 99th percentile

    @property
    def wasted(self) -> int:
        """Return the steps that were executed again, or whose result was discarded."""
        return self.executed - self.done

    @classmethod
    def of(cls, steps: list[Step], start: float, end: float) -> Stretch:
        """Count the steps between two times."""
        reached = before = max((step.step for step in steps if step.t <= start), default=0)
        within = [step for step in steps if start < step.t <= end]
        progress = [start]
        for step in within:
            if step.step > reached:
                reached = step.step
                progress.append(step.t)
        gaps = [later - earlier for earlier, later in itertools.pairwise([*progress, end])]
        worlds = len({step.world for step in within})
        ranks = sum(step.ranks for step in within) / max(len(within), 1)
        pairs = itertools.pairwise(within)
        lengths = sorted(later.t - earlier.t for earlier, later in pairs if later.world == earlier.world)
        step_s = (statistics.median(lengths), lengths[len(lengths) * 99 // 100]) if lengths else (0.0, 0.0)
        return cls(end - start, reached - before, len(within), worlds, ranks, max(gaps), step_s)


def run(system: str, every_s: float, options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Run a job undisturbed, then with kills.

    Raises:
        NotTrainingError: it never began to train.

    """
    saves_every = NEVER if system == "none" else STOCK_SAVES_EVERY
    sleep_s = 0.0 if options.model.startswith("gpt") else SLEEP_S
    work = Work(options.model, sleep_s, saves_every, tuple(options.ours_flags.split()), min_nodes=1)
    kills = plan(options.seed, every_s, 60 * options.minutes) if system != "none" else []
    job = make_job("tuned" if system == "none" else system, directory, None, "", work)
    try:
        marks = Marks(directory / "marks")
        wait_steady(job, marks)
        times = [time.monotonic()]
        times.append(times[0] + 60 * options.baseline_minutes)
        time.sleep(times[1] - times[0])
        times.append(time.monotonic() + 60 * options.minutes)
        done = inject_kills(job, marks, kills, times[2], spare_host=system not in OURS)
    finally:
        job.stop()
    steps = read_steps(directory / "marks")
    quiet, rough = (Stretch.of(steps, *pair) for pair in itertools.pairwise(times))
    expected = quiet.done / quiet.seconds * rough.seconds or math.nan
    return {
        "system": system,
        "every_s": every_s,
        "kills": dict(done.kills),
        "missed": done.missed,
        "ended": done.ended,
        "undisturbed": asdict(quiet),
        "disturbed": {**asdict(rough), "wasted": rough.wasted},
        "expected": expected,
        "goodput": rough.done / expected,
    }


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the table's lines."""
    yield (
        f"{'system':10}{'kill every':>11}{'kills':>7}{'steps done':>12}{'undisturbed':>13}{'goodput':>9}"
        f"{'executed':>10}{'wasted':>8}{'worlds':>8}{'nodes':>7}{'standstill':>12}"
    )
    for row in rows:
        rough = row["disturbed"]
        yield (
            f"{row['system']:10}{row['every_s']:9.0f} s{sum(row['kills'].values()):7}{rough['done']:12}"
            f"{row['expected']:13.0f}{row['goodput']:9.1%}{rough['executed']:10}{rough['wasted']:8}"
            f"{rough['worlds']:8}{rough['ranks']:7.2f}{rough['standstill_s']:10.1f} s"
        )
    yield ""
    for row in rows:
        name, quiet = f"{row['system']}, every {row['every_s']:.0f} s", row["undisturbed"]
        kinds = ", ".join(f"{count} {kind}s" for kind, count in sorted(row["kills"].items()))
        yield (
            f"{name}: {kinds} killed, {row['missed']} kills found nothing to kill; undisturbed "
            f"{1000 * quiet['seconds'] / max(quiet['done'], 1):.1f} ms a step "
            f"(median {1000 * quiet['step_s'][0]:.1f}, 99 % are below {1000 * quiet['step_s'][1]:.1f})"
        )
        if row["ended"]:
            counts = ", ".join(f"{count} x {what}" for what, count in Counter(row["ended"]).items())
            yield f"{name}: agents that ended by themselves: {counts}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", default="15", metavar="S[,S]", help="seconds between two kills")
    parser.add_argument("--minutes", type=float, default=10.0, help="with kills")
    parser.add_argument("--baseline-minutes", type=float, default=1.0, help="without, before them")
    parser.add_argument(
        "--only",
        type=choice((*SYSTEMS, "none")),
        default=("ours", "torchrun"),
        help=f"of {','.join(SYSTEMS)},none",
    )
    parser.add_argument("--model", default="256", help="width of three layers, or gpt, or gpt-compiled")
    parser.add_argument("--ours-flags", default="--snapshot-every 1", metavar="'--FLAG VALUE …'")
    parser.add_argument("--seed", type=int, default=0, help="of kinds and victims")
    parser.add_argument("--dir", type=Path, help="work here, and leave logs and events (default: temporary)")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    rows, whole = [], True
    with contextlib.ExitStack() as stack:
        base = options.dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="goodput-")))
        stack.enter_context(no_process_left())
        turns = itertools.product(map(float, options.every.split(",")), options.only)
        for turn, (every_s, system) in enumerate(turns):
            try:
                row = run(system, every_s, options, base.absolute() / f"{turn}-{system}-{every_s:g}")
            except NotTrainingError as error:
                log(f"{system}, a kill every {every_s:g} s: left out: {error} (--dir keeps the logs)")
                whole = False
                continue
            rows.append(row)
            log(f"{system}, a kill every {every_s:g} s: goodput {row['goodput']:.1%}")
    print("\n".join(table(rows)))
    facts = machine()
    print(f"\n{facts['cores']} cores, torch {facts['torch']}, {NODES} nodes, --nnodes 1:{NODES}")
    if options.json:
        given = {"seed": options.seed, "model": options.model, "ours_flags": options.ours_flags}
        result = {"machine": facts, **given, "rows": rows}
        options.json.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    return int(not whole)


if __name__ == "__main__":
    sys.exit(main())
