"""Measure the time from SIGKILL to the next optimizer step: elastic_resume, torchrun and torchft in one run.

Three nodes are three agents on loopback addresses of this machine, `--nnodes 2:3`, one worker each. A small
DDP model on gloo is saved at every step (jobs/steps.py). Each system starts workers as it
does by default: elastic_resume forks them, the others import torch again. Three kinds of kill: a worker; a
node that does not host the rendezvous, with its agent and all descendants at once; and the node that hosts
it, or leads. A killed node is started again when the others continue. The next kill comes at a random moment
while three nodes train.

    in-process `elastic-resume run`, defaults, and the script uses `@run.restartable`: survivors stay
    ours       the same without it: every worker starts again
    torchrun   c10d, defaults, but --max-restarts, because its default of 0 survives no loss at all
    tuned      torchrun with shorter timeouts (TUNED_CONF of jobs/agents.py), and a store of each round's own
    dcp        the same, and it saves with dcp.async_save into a directory that all nodes share
    torchft    torchft-nightly's Manager and DDP on gloo, its defaults; n0 hosts the lighthouse. Needs
               `pip install torchft-nightly`

Seconds are counted from the first signal until the last surviving worker of the old world is gone
(detection), until the first process of the new world starts (world), and until its first step is finished on
all ranks (step). If the killed worker's successor was not in that world, it enters a later one: the longest
time between two steps of a survivor around that, less a usual step, is the cost (entry). "never" means that
no step followed within --give-up seconds (60 for stock's host), or that all agents ended. Lost steps are
recomputed. torchft's survivors keep their process: its detection is not shown, and its world begins with the
last step before the new quorum. In-process, detection ends when the last survivor has left its function, and
the world begins with the first call of it.

With `--setup 20` each process sleeps for 20 s before it resumes, as a script that starts slowly does.

torchrun's rounds share one store. Workers of a new round read addresses of the dead round, fail, and try
again in another round until one succeeds by chance (pytorch#135712; torch 2.13). With its defaults, five
kills of each kind can take an hour.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import importlib.metadata
import itertools
import json
import math
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from jobs.agents import (
    MIN_NODES,
    NODES,
    OURS,
    TUNED_CONF,
    Job,
    Work,
    is_gone,
    kill_processes,
    make_job,
    occupy_core,
    reap_processes,
)
from jobs.marks import Marks, Worker

ROWS = {"worker": "a worker", "node": "a node", "host": "the host"}
SYSTEMS = (*OURS, "torchrun", "tuned", "dcp", "torchft")
FIGURES = ("detection", "world", "step", "entry")
STOCK_HOST_GIVE_UP_S = 60.0  # its agents end within seconds unless one hangs
STEADY_STEPS = 10  # of each rank, before the next kill
STEADY_S = 120.0  # and ten set-ups; then a new job is started
TIMELINE_BEFORE_S = 3.0  # the kill
MARKS = ("born", "imported", "built", "resumed", "wrapped", "step")
PHASES = ("detect", "rendezvous", "import", "build", "resume", "wrap", "step")
PR_SET_CHILD_SUBREAPER = 36


class NotTrainingError(Exception):
    """A job did not reach training on all of its nodes."""


def log(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


# ---- one kill --------------------------------------------------------------------------------------------


@dataclass
class Incident:
    """One kill; times are seconds since the first signal. Infinite means never, and ``never`` says why."""

    killed: str
    at: float  # CLOCK_MONOTONIC, like all marks
    detection: float = math.inf
    world: float = math.inf
    step: float = math.inf
    entry: float = math.nan  # nan if the missing node was in the world that took the first step
    lost_steps: int | None = None
    world_size: int | None = None
    kept_processes: int = 0  # of the workers in the new world
    never: str = ""
    after: str = ""  # why the job was replaced after it had recovered
    phases: dict[str, float] = field(default_factory=dict)
    timeline: list[dict[str, Any]] = field(default_factory=list)  # each worker's marks


def wait_steady(job: Job, marks: Marks) -> list[Worker]:
    """Wait until a world of all nodes trains, and return its workers."""
    began = time.monotonic()
    limit_s = STEADY_S + 10 * job.work.setup_s
    while time.monotonic() < began + limit_s and job.codes().count(None) == NODES:
        marks.look()
        world = marks.world(0.0, STEADY_STEPS)
        if len(world) == NODES and all(psutil.pid_exists(worker.pid) for worker in world):
            return sorted(world, key=lambda worker: worker.rank)
        time.sleep(0.02)
    waited_s, ended = time.monotonic() - began, [code for code in job.codes() if code is not None]
    agents = f"agents ended with {ended}" if ended else "all agents alive"
    raise NotTrainingError(f"no world of {NODES} nodes after {waited_s:.0f} s, {agents}")


def kill(job: Job, marks: Marks, row: str, rng: random.Random, give_up_s: float) -> Incident:
    """Kill once, and watch until the job has finished a step again or never will."""
    wait_steady(job, marks)
    time.sleep(rng.uniform(0.0, 2.0))  # at a random moment
    old = wait_steady(job, marks)
    host = job.host()
    victim = host if row == "host" else rng.choice([i for i in range(NODES) if row == "worker" or i != host])
    workers = {worker.node: psutil.Process(worker.pid) for worker in old}
    killed_worker = workers.pop(f"n{victim}")
    killed = [killed_worker] if row == "worker" else job.processes(victim)
    incident = Incident(f"n{victim}", time.monotonic())
    kill_processes(killed)
    survivors = list(workers.values())
    if job.survivors_keep_process:
        survivors, incident.detection = [], math.nan
    new = watch(job, marks, survivors, incident, give_up_s)
    reap_processes(killed)
    if new:
        measure(incident, old, new)
    return incident


def watch(
    job: Job, marks: Marks, survivors: list[psutil.Process], incident: Incident, give_up_s: float
) -> list[Worker]:
    """Poll until the survivors' workers are gone and a new world has finished a step; return its workers."""
    next_look = killed_at = incident.at
    while True:
        if survivors:
            survivors = [process for process in survivors if not is_gone(process)]
            if not survivors:
                incident.detection = time.monotonic() - killed_at
        if time.monotonic() >= next_look:
            marks.look()
            new = marks.world(killed_at)
            if new and not survivors:
                return new
            codes = job.codes()
            if None not in codes and not survivors:
                ended = " and ".join(str(code) for code in codes if code != -signal.SIGKILL)
                incident.never = f"all agents ended, the others with {ended}"
                return []
            if time.monotonic() > killed_at + give_up_s:
                alive = codes.count(None)
                incident.never = f"no step within {give_up_s:.0f} s, with {alive} agents alive"
                return []
            next_look = time.monotonic() + 0.02
        time.sleep(0.003 if survivors else 0.02)


def measure(incident: Incident, old: list[Worker], new: list[Worker]) -> None:
    ends = {mark: max(worker.marks[mark] for worker in new) - incident.at for mark in new[0].marks}
    incident.world = min(worker.marks["born"] for worker in new) - incident.at
    incident.step = ends["step"]
    incident.lost_steps = max(worker.last_step for worker in old) - new[0].start_step
    incident.world_size = len(new)
    incident.kept_processes = len({worker.pid for worker in old} & {worker.pid for worker in new})
    left = [worker.marks["left"] for worker in old if "left" in worker.marks]
    if left:
        incident.detection = max(left) - incident.at
    done = [incident.detection, *(ends[mark] for mark in MARKS)]
    starts = [0.0, *done[:-1]]
    if math.isnan(incident.detection):
        return  # survivors kept their process, and recorded nothing of it
    incident.phases = {name: end - start for name, start, end in zip(PHASES, starts, done, strict=True)}


def measure_entry(incident: Incident, marks: Marks, whole: list[Worker]) -> None:
    """Measure how long the survivors stood still when the missing node came into the ``whole`` world."""
    gaps = []
    for survivor in (worker for worker in whole if worker.node != incident.killed):
        begun = survivor.steps[0]
        lives = [worker.steps for worker in marks.workers() if worker.node == survivor.node and worker.steps]
        before = max(steps[-1] for steps in lives if steps[-1] < begun)
        usual = statistics.median(b - a for a, b in itertools.pairwise(survivor.steps))
        around = itertools.pairwise([before, *survivor.steps[:STEADY_STEPS]])
        gaps.append(max(b - a for a, b in around) - usual)
    incident.entry = max(gaps)


def timeline(marks: Marks, incident: Incident) -> list[dict[str, Any]]:
    """List the marks of each worker since shortly before the kill, in seconds since the kill."""
    lives = [worker for worker in marks.workers() if worker.steps]
    return [
        {"node": worker.node, "pid": worker.pid}
        | {mark: round(t - incident.at, 3) for mark, t in {**worker.marks, "end": worker.steps[-1]}.items()}
        for worker in lives
        if worker.steps[-1] > incident.at - TIMELINE_BEFORE_S
    ]


# ---- many kills ------------------------------------------------------------------------------------------


def run_row(row: str, system: str, options: argparse.Namespace, directory: Path) -> list[Incident]:
    """Kill repeatedly. Replace a job that does not recover or does not grow to all nodes again.

    Raises:
        NotTrainingError: it never began to train.

    """
    rng = random.Random(f"{options.seed} {row}")
    give_up_s = options.give_up
    if row == "host" and system not in OURS:
        give_up_s = min(give_up_s, STOCK_HOST_GIVE_UP_S)
    incidents: list[Incident] = []
    while len(incidents) < options.kills:
        before = len(incidents)
        work = Work(setup_s=options.setup)
        path = directory / f"{row}-{system}-{before}"
        job = make_job(system, path, options.node_timeout, options.imports, work)
        try:
            for incident in kills(job, row, rng, give_up_s):
                incidents.append(incident)
                log(f"{system}, {ROWS[row]} killed ({incident.killed}): {describe(incident)}")
                if len(incidents) == options.kills:
                    break
        except NotTrainingError as error:
            if not incidents:
                raise
            incidents[-1].after = str(error)
            if len(incidents) == before:
                log(f"{system}: a new job did not start either, so there are fewer kills: {error}")
                break
            log(f"{system}: starting a new job: {error}")
        finally:
            job.stop()
    return incidents


def kills(job: Job, row: str, rng: random.Random, give_up_s: float) -> Iterator[Incident]:
    """Kill until the job does not recover. A killed node is started again when the others continue."""
    marks = Marks(job.directory / "marks")
    while True:
        incident = kill(job, marks, row, rng, give_up_s)
        if incident.never:
            yield incident
            return
        if row != "worker":
            job.start(int(incident.killed.removeprefix("n")))
        try:
            whole = wait_steady(job, marks)
        except NotTrainingError as error:
            incident.after = str(error)
            yield incident
            return
        if incident.world_size != NODES:
            measure_entry(incident, marks, whole)
        incident.timeline = timeline(marks, incident)
        yield incident


def describe(incident: Incident) -> str:
    if incident.never:
        return f"never: {incident.never}"
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in incident.phases.items())
    text = f"{incident.step:.2f} s to the next step ({parts}), {incident.lost_steps} steps lost"
    text += "" if math.isnan(incident.entry) else f", {incident.entry:.2f} s at the entry"
    return text + (incident.after and f"; then {incident.after}")


def summary(row: str, system: str, incidents: list[Incident]) -> dict[str, Any]:
    """Summarize one row of the table. A median that was never reached is infinite.

    The timeline of the kill with the median step is kept.
    """
    result: dict[str, Any] = {"killed": row, "system": system, "kills": len(incidents)}
    for name in FIGURES:
        values = [getattr(incident, name) for incident in incidents]
        values = [value for value in values if not math.isnan(value)] or [math.nan]
        result[name] = {"median": statistics.median(values), "best": min(values), "worst": max(values)}
    recovered = [incident for incident in incidents if not incident.never]
    by_step = sorted((each for each in recovered if each.timeline), key=lambda incident: incident.step)
    for incident in incidents:
        if by_step and incident is not by_step[len(by_step) // 2]:
            incident.timeline = []
    result["recovered"] = len(recovered)
    result["recomputed_steps"] = max((incident.lost_steps or 0 for incident in recovered), default=None)
    result["phases"] = {
        name: statistics.median([incident.phases[name] for incident in recovered if incident.phases])
        for name in (PHASES if any(incident.phases for incident in recovered) else ())
    }
    result["incidents"] = [asdict(incident) for incident in incidents]
    return result


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines: the figures, their ratios, where the time goes, and what never recovered."""
    ours = {row["killed"]: row["step"]["median"] for row in rows if row["system"] == "ours"}
    pair = f"{'median':>8}{'range':>14}"
    yield f"{'':28}" + "".join(f"{name:>22}" for name in FIGURES) + f"{'step':>8}{'lost':>7}"
    yield f"{'killed':10}{'system':12}{'kills':>6}{pair * len(FIGURES)}{'x ours':>8}{'steps':>7}"
    for row in rows:
        line = f"{ROWS[row['killed']]:10}{row['system']:12}{row['kills']:6}"
        for name in FIGURES:
            figure = {key: seconds(value) for key, value in row[name].items()}
            extremes = f"{figure['best']}-{figure['worst']}" if figure["best"] else ""
            line += f"{figure['median']:>8}{extremes:>14}"
        ratio = row["step"]["median"] / ours.get(row["killed"], math.nan)
        lost = "" if row["recomputed_steps"] is None else str(row["recomputed_steps"])
        yield line + f"{seconds(ratio, 1):>8}{lost:>7}"
    yield "\nWhere the time goes; a phase ends when the last rank is through (medians; they need not add up):"
    yield f"{'killed':10}{'system':12}" + "".join(f"{name:>11}" for name in PHASES)
    for row in rows:
        if row["phases"]:
            parts = "".join(f"{value:11.2f}" for value in row["phases"].values())
            yield f"{ROWS[row['killed']]:10}{row['system']:12}{parts}"
    yield ""
    for row in rows:
        if row["system"] == "in-process":
            kept = [incident["kept_processes"] for incident in row["incidents"] if not incident["never"]]
            yield f"in-process, {ROWS[row['killed']]} killed: workers that kept their process: {kept}"
        notes = [incident["never"] for incident in row["incidents"]]
        notes += [incident["after"] and f"later {incident['after']}" for incident in row["incidents"]]
        for note, count in collections.Counter(filter(None, notes)).items():
            yield f"{row['system']}, {ROWS[row['killed']]} killed, {count} of {row['kills']} times: {note}."


def seconds(value: float, digits: int = 2) -> str:
    if math.isnan(value):
        return ""
    return "never" if math.isinf(value) else f"{value:.{digits}f}"


def without_infinity(value: Any) -> Any:
    """Replace infinity by null, because JSON has no such number."""
    if isinstance(value, dict):
        return {key: without_infinity(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_infinity(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def no_process_left() -> Iterator[None]:
    """Kill all started processes when the benchmark ends, except by SIGKILL; orphans become its children."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        yield
    finally:
        while left := [p for p in psutil.Process().children(recursive=True) if not is_gone(p)]:
            reap_processes(kill_processes(left))


def machine() -> dict[str, Any]:
    """Describe the machine that the figures depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    facts = {
        "processor": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "python": sys.version.split()[0],
        "torch": importlib.metadata.version("torch"),
    }
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        facts["torchft"] = importlib.metadata.version("torchft-nightly")
    return facts | {"date": time.strftime("%Y-%m-%d", time.gmtime())}


def choice(known: Any) -> Callable[[str], list[str]]:
    """Return a parser of a comma-separated list, whose order stays."""

    def parse(text: str) -> list[str]:
        words = text.split(",")
        if not set(words) <= set(known):
            raise argparse.ArgumentTypeError(f"{text!r}: choose among {','.join(known)}")
        return words

    return parse


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=5, help="of each kind, for each system")
    parser.add_argument("--only", type=choice(SYSTEMS), default=SYSTEMS[:-1], help=",".join(SYSTEMS))
    parser.add_argument("--rows", type=choice(ROWS), default=tuple(ROWS), help=",".join(ROWS))
    parser.add_argument("--give-up", type=float, default=200.0, metavar="S", help="until it is called never")
    parser.add_argument("--setup", type=float, default=0.0, metavar="S", help="of each process, at its start")
    parser.add_argument("--busy-core", action="store_true", help="let another process take core 0")
    parser.add_argument("--node-timeout", type=float, metavar="S", help="ours, instead of its default")
    parser.add_argument(
        "--imports",
        default="",
        metavar="MODULE",
        help="the script imports it too, and ours preloads it (extra bench: "
        "transformers.models.gpt2.modeling_gpt2)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of victims and moments")
    parser.add_argument("--dir", type=Path, help="work here, and leave logs and events (default: temporary)")
    parser.add_argument("--json", type=Path, help="write the figures there too, for benchmarks/chart.py")
    options = parser.parse_args()
    rows, whole = [], True
    with contextlib.ExitStack() as stack:
        base = options.dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="recovery-")))
        stack.enter_context(no_process_left())
        if options.busy_core:
            occupy_core()
        for row, system in itertools.product(options.rows, options.only):
            try:
                rows.append(summary(row, system, run_row(row, system, options, base.absolute())))
            except NotTrainingError as error:
                log(f"{system}, {ROWS[row]} killed: left out: {error} (--dir keeps the logs)")
                whole = False
    print("\n".join(table(rows)))
    facts = machine()
    print(f"\n{facts['cores']} cores, torch {facts['torch']}, {NODES} nodes, --nnodes {MIN_NODES}:{NODES}")
    if options.json:
        used = {"setup_s": options.setup, "busy_core": options.busy_core, "tuned_conf": TUNED_CONF}
        result = {"machine": facts, **used, "rows": without_infinity(rows)}
        options.json.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    return int(not whole)


if __name__ == "__main__":
    sys.exit(main())
