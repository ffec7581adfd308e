"""Whether the simulation tells the truth: measured and simulated goodput and the closed form, side by side.

    simulated_goodput.py --calibrate FILE          what the simulation wants to know, on a job of its own
    simulated_goodput.py --with FILE --every 5,15  real jobs with kills, and the same kills on fake time

Jobs and kills are those of `goodput.py`: three nodes on this machine's loopback, a snapshot at every step; a
worker, a node or an agent killed every so many seconds by a seeded plan, and started again at once.
Calibration kills one after another, waits until all train again, and notes

    the length of a step with three nodes, with two while the third starts, and with one while two do;
    from a kill to the next world's first step, for a worker, and for a node or its agent;
    from the start of a node's agent until the others stop to let it in;
    from that stop to the next world's first step.

The first steps of a world are slower than later ones: what the first ten take more is part of its restart. No
figure of a job that is compared goes into its simulation, but the times and victims of its kills. Beside it
stands how much of the machine others used meanwhile: they make restarts longer than they were found to be.

"measured" counts steps against those of an undisturbed stretch before. Where the machine's own speed changes
by more than kills cost (a host with other guests: 48 to 58 ms a step within a minute, seen here), that says
little: "own steps" is the share of the time that went into steps as long as those around them usually were.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from goodput import SLEEP_S, WIDTH, Step, read_steps, run
from jobs.agents import NODES, Job, Work, bury, make_job, strike
from jobs.marks import Marks
from recovery import machine, no_process_left, say, wait_steady

from elastic_resume.faults import expected, simulate_job
from elastic_resume.faults.rates import Strike
from elastic_resume.faults.simulate import play
from elastic_resume.policy.cadence import Every

FLAGS = ("--snapshot-every", "1")
QUIET_S = 15.0
REST_S = 5.0
AROUND = 100  # steps: five seconds
FIRST_STEPS = 10  # of a world: slower than the others
BEFORE_S = 600.0  # of fake time ahead of the first kill, which is not counted
PLAYS = 100
KILLS = {"worker": (0,), "node": (1,), "agent": (2,), "two nodes": (0, 1)}


# ---- calibration -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calibration:
    """What was measured, in seconds: means, but ``away_s``, which is every one.

    ``step_s`` is by number of nodes.
    """

    step_s: dict[int, float]
    worker_s: float
    node_s: float
    join_s: float
    away_s: list[float]
    kills: int


@dataclass(frozen=True)
class Kill:
    """What was killed, when."""

    at: float
    kind: str


def calibrate(directory: Path, rounds: int) -> Calibration:
    """Kill each kind so many times, one after the other."""
    job = make_job("ours", directory, None, "", Work(SLEEP_S, WIDTH, 1, FLAGS, min_nodes=1))
    kills = []
    try:
        marks = Marks(directory / "marks")
        wait_steady(job, marks)
        time.sleep(QUIET_S)
        for kind in itertools.chain.from_iterable([KILLS] * rounds):
            kills.append(kill(job, marks, kind))
            while len(marks.world(kills[-1].at, FIRST_STEPS)) < NODES:
                marks.look()
                time.sleep(0.05)
            time.sleep(REST_S)
    finally:
        job.stop()
    return measured(read_steps(directory / "marks"), kills)


def kill(job: Job, marks: Marks, kind: str) -> Kill:
    """Kill, and start what is dead again."""
    victims = KILLS[kind]
    pids = {worker.pid for worker in wait_steady(job, marks)}
    doomed = []
    for victim in victims:
        processes = job.processes(victim)
        if kind == "worker":
            doomed += [process for process in processes if process.pid in pids]
        else:
            doomed += processes[:1] if kind == "agent" else processes
    at = time.monotonic()
    strike(doomed)
    if kind != "worker":
        for victim in victims:
            job.agent(victim).wait()
            job.start(victim)
    bury(doomed)
    return Kill(at, kind)


def measured(steps: list[Step], kills: list[Kill]) -> Calibration:
    """Work out what the simulation wants to know."""
    worlds = [list(group) for _, group in itertools.groupby(steps, key=lambda step: step.world)]
    lengths = [
        (late[0].ranks, (late[-1].t - late[0].t) / (len(late) - 1))
        for world in worlds
        if len(late := world[FIRST_STEPS:-1]) > FIRST_STEPS
    ]
    step_s = {
        nodes: statistics.fmean(length for ranks, length in lengths if ranks == nodes)
        for nodes in range(1, NODES + 1)
    }
    seen: dict[str, list[float]] = {name: [] for name in ("worker", "node", "join", "away")}
    for one in kills:
        new = next(i for i, world in enumerate(worlds) if world[0].t > one.at)
        if one.kind == "two nodes":
            continue  # for the length of the last one's steps
        seen["worker" if one.kind == "worker" else "node"].append(begins(worlds[new], step_s) - one.at)
        if one.kind != "worker":
            joined_at = worlds[new][-1].t
            seen["away"].append(joined_at - one.at - simulate_job.DEBOUNCE_S)
            seen["join"].append(begins(worlds[new + 1], step_s) - joined_at)
    return Calibration(
        step_s,
        statistics.fmean(seen["worker"]),
        statistics.fmean(seen["node"]),
        statistics.fmean(seen["join"]),
        seen["away"],
        len(kills),
    )


def begins(world: list[Step], step_s: dict[int, float]) -> float:
    """When its first step began, if its first ten had taken no longer than others."""
    first = world[min(len(world), FIRST_STEPS) - 1]
    return first.t - min(len(world), FIRST_STEPS) * step_s[first.ranks]


# ---- on fake time ----------------------------------------------------------------------------------------


def job_of(found: Calibration) -> simulate_job.Job:
    """The job that was calibrated. Its steps' length holds the snapshots; its state weighs nothing."""
    start_s = min(found.worker_s, found.node_s, found.join_s) - simulate_job.FORM_S
    rest_s = start_s + simulate_job.FORM_S
    return simulate_job.Job(
        nodes=NODES,
        min_nodes=1,
        state_bytes=1,
        step_s=found.step_s[NODES],
        step_by_nodes=found.step_s,
        snapshot_every=Every(steps=1),
        start_s=start_s,
        cold_s=0.0,
        noticed_s={
            "worker": found.worker_s - rest_s,
            "agent": found.node_s - rest_s,
            simulate_job.DRAINED: found.join_s - rest_s,
        },
        away_s=dict.fromkeys(("agent", "replacement"), statistics.fmean(found.away_s)),
    )


def simulated(found: Calibration, kills: list[dict[str, Any]], seconds: float) -> tuple[float, float]:
    """Goodput, and restarts, of the same kills on fake time; the mean of many plays.

    A kill that comes just as a node does makes a difference of one restart, and how long nodes are away is
    not always the same: each play draws it anew from what was measured.
    """
    job, chance = job_of(found), random.Random(0)
    before = play(job, (), BEFORE_S)
    plays = []
    for _ in range(PLAYS):
        # A node that dies is started again at once, whatever took it.
        strikes = [
            Strike(
                BEFORE_S + one["at_s"],
                "worker" if one["kind"] == "worker" else "agent",
                (one["victim"],),
                chance.choice(found.away_s),
            )
            for one in kills
        ]
        plays.append(play(job, strikes, BEFORE_S + seconds))
    steps = statistics.fmean(one.steps - before.steps for one in plays)
    return steps * job.step_s / seconds, statistics.fmean(len(one.recoveries) for one in plays)


def by_own_steps(steps: list[Step], start: float, end: float) -> float:
    """Which share of the time went into steps; one that took twice as long as those around it stood still."""
    lengths = [two.t - one.t for one, two in itertools.pairwise(steps) if start < two.t <= end]
    useful_s = 0.0
    for place, length in enumerate(lengths):
        usual = statistics.median(lengths[max(0, place - AROUND) : place + AROUND])
        useful_s += length if length < 2 * usual else usual
    return useful_s / (end - start)


def closed_form(found: Calibration, kills: list[dict[str, Any]], every_s: float) -> float:
    """What Young/Daly's gives: each kill costs its own restart, and half a step."""
    downs = [found.worker_s if one["kind"] == "worker" else found.node_s for one in kills]
    step_s = found.step_s[NODES]
    down_s = statistics.fmean(downs)
    return expected.shares(mtbf_s=every_s, down_s=down_s, interval_s=step_s, cost_s=0.0).productive


def processors() -> tuple[float, float]:
    """Processor seconds that all have used so far, and this benchmark with all that it has started."""
    used = psutil.cpu_times()
    own = [psutil.Process(), *psutil.Process().children(recursive=True)]
    own_s = sum(sum(process.cpu_times()[:4]) for process in own)
    return used.user + used.nice + used.system, own_s


def others(before: tuple[float, float], began_s: float) -> float:
    """How many cores others have kept busy since then."""
    busy_s, own_s = (now - then for now, then in zip(processors(), before, strict=True))
    return (busy_s - own_s) / (time.monotonic() - began_s)


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines."""
    yield (
        f"{'kill every':>10}{'kills':>7}{'minutes':>9}{'measured':>10}{'own steps':>11}"
        f"{'simulated':>11}{'closed form':>13}{'restarts':>15}{'others used':>13}"
    )
    for row in rows:
        worlds = f"{row['worlds']} / {row['simulated_worlds']:.0f}"
        yield (
            f"{row['every_s']:8.0f} s{row['kills']:7}{row['minutes']:9.1f}{row['measured']:10.1%}"
            f"{row['own_steps']:11.1%}"
            f"{row['simulated']:11.1%}{row['closed_form']:13.1%}{worlds:>15}"
            f"{row['others']:8.2f} cores"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calibrate", type=Path, metavar="FILE", help="measure, and write it there")
    parser.add_argument("--rounds", type=int, default=3, help="of kills in the calibration")
    parser.add_argument("--with", dest="calibration", type=Path, metavar="FILE", help="what was measured")
    parser.add_argument("--every", default="5,15,60", metavar="S[,S]", help="seconds between two kills")
    parser.add_argument("--minutes", default="2,2.5,4", metavar="M[,M]", help="with kills, for each of these")
    parser.add_argument("--baseline-minutes", type=float, default=0.5, help="without, before them")
    parser.add_argument("--seed", type=int, default=0, help="of kinds and victims")
    parser.add_argument("--dir", type=Path, help="work here, and leave logs and events (default: temporary)")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    if not options.calibrate and not options.calibration:
        parser.error("--calibrate FILE or --with FILE")
    rows = []
    with contextlib.ExitStack() as stack:
        base = options.dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="simulated-")))
        stack.enter_context(no_process_left())
        if options.calibrate:
            began_s, before = time.monotonic(), processors()
            found = calibrate(base.absolute() / "calibration", options.rounds)
            options.calibrate.write_text(json.dumps(asdict(found), indent=1) + "\n")
            say(f"calibrated, while others used {others(before, began_s):.2f} cores: {found}")
            return 0
        told = json.loads(options.calibration.read_text())
        found = Calibration(**{**told, "step_s": {int(n): s for n, s in told["step_s"].items()}})
        pairs = zip(options.every.split(","), options.minutes.split(","), strict=True)
        for every_s, minutes in ((float(every), float(minutes)) for every, minutes in pairs):
            # As `goodput.py` takes them.
            options.minutes, options.ours_flags = minutes, " ".join(FLAGS)
            began_s, before = time.monotonic(), processors()
            real = run("ours", every_s, options, base.absolute() / f"every-{every_s:g}")
            shared = others(before, began_s)
            own = by_own_steps(read_steps(base.absolute() / f"every-{every_s:g}" / "marks"), *real["times"])
            goodput, worlds = simulated(found, real["plan"], real["disturbed"]["seconds"])
            row = {
                "every_s": every_s,
                "minutes": minutes,
                "kills": sum(real["kills"].values()),
                "measured": real["goodput"],
                "own_steps": own,
                "simulated": goodput,
                "closed_form": closed_form(found, real["plan"], every_s),
                "worlds": real["disturbed"]["worlds"] - 1,
                "simulated_worlds": worlds,
                "others": shared,
                "real": real,
            }
            rows.append(row)
            told = f"measured {row['measured']:.1%}, by its own steps {own:.1%}, simulated {goodput:.1%}"
            say(f"a kill every {every_s:g} s: {told}")
    print("\n".join(table(rows)))
    if options.json:
        result = {"machine": machine(), "seed": options.seed, "calibration": asdict(found), "rows": rows}
        options.json.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
