"""The flags of ``elastic-resume plan``, read into a job and a site; and the command.

Promise: a value that cannot be is a ConfigError that names its flag and what may be written.
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from elastic_resume import contract, values
from elastic_resume.durations import parse_duration
from elastic_resume.errors import ConfigError
from elastic_resume.faults import advice, advice_words, rates, simulate_job
from elastic_resume.faults.advice import Site
from elastic_resume.faults.simulate_job import Job
from elastic_resume.policy import budget, restart
from elastic_resume.policy.cadence import Every
from elastic_resume.report.saying import say

MAX_NODES = 1_000_000
MAX_STRIKES = 200_000  # of all runs: minutes
NEVER = "never"
DESCRIPTION = """Says how often to save, how many spares help, and what goodput to expect.

The job is played on fake time as the flags describe it, with the policy that `run` follows, beside other
cadences and numbers of nodes; and Young/Daly's closed form is set beside it. The same flags give the same
answer. Figures that nobody gives are those of large runs that were published, and our own.
"""


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the parser of the command."""
    one = subparsers.add_parser(
        "plan",
        help="how often to save, how many spares, what goodput to expect",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, metavar, default, text in FLAGS:
        told = f"{text} (default {default})" if default else text
        one.add_argument(
            f"--{name}",
            metavar=metavar,
            default=default,
            required=default is None,
            help=told.replace("%", "%%"),
        )
    one.add_argument("--json", action="store_true", help="everything, as one JSON object")
    one.set_defaults(function=plan)


# Name, what it takes, its default (None: it must be given; "": worked out), and what it is.
FLAGS: tuple[tuple[str, str, str | None, str], ...] = (
    ("nodes", "MIN:MAX", None, "as --nnodes of run: MAX train, and go on as long as MIN are there"),
    ("state", "SIZE", None, "model, optimizer and average, as 30GB: what a checkpoint takes on disk"),
    ("spares", "N", "0", "nodes beyond these that stand by"),
    ("mtbf-node", "TIME", "263d",
     "mean time between failures per node, one of several nodes counted once; or never; 263d: Llama 3"),
    ("mix", "KIND=N,...", ",".join(f"{kind}={weight:g}" for kind, weight in rates.MIX.items()),
     f"how often each kind comes, beside the others: {', '.join(rates.KINDS)}"),
    ("rack-nodes", "N", "2", "how many nodes a failure of the kind rack hits"),
    ("step-time", "TIME", "1s", "of a step with MAX nodes, without copies"),
    ("snapshot-every", "HOW", "auto", "as of run: auto, a number of steps, 30s, off"),
    ("save-every", "HOW", "auto", "as of run"),
    ("copy", "SPEED", "11.5GB/s", "of a copy of the state to memory; from GPUs their bus's"),
    ("cores", "N", "16", "of a node: one of them copies, which training feels"),
    ("snapshot-cost", "TIME", "", "what a snapshot adds to training (default: from the two above)"),
    ("free-memory", "SIZE", "", "of a node: half of it is for snapshots (default: enough)"),
    ("disk", "SPEED", "2GB/s", "of each node's disk"),
    ("network", "SPEED", "25Gbit/s", "of each node's link"),
    ("detection-time", "TIME", "", "until a failure is known (default: by kind, as run notices it)"),
    ("max-no-progress", "N", str(restart.MAX_NO_PROGRESS), "as of run: failed starts in a row, then it ends"),
    ("restart-time", "TIME", "30s", "from then to the first step, less loading: your script's top, NCCL"),
    ("agent-time", "TIME", "20s", "until an agent that died is back"),
    ("reboot-time", "TIME", "10m", "until a node that died is back"),
    ("replacement-time", "TIME", "2h", "until another node has taken the place of one that is gone"),
    ("duration", "TIME", "30d", "of the job"),
    ("runs", "N", "5", "how many times it is played, each with other failures"),
    ("seed", "N", "0", "of the failures"),
)  # fmt: skip


def plan(args: argparse.Namespace) -> int:
    """Answer, in words or as JSON."""
    job, site = read(args)
    answer = advice.ask(job, site)
    if args.json:
        say(json.dumps(advice_words.as_json(answer), indent=1, allow_nan=False) + "\n")
    else:
        say("\n".join(advice_words.tell(answer)) + "\n")
    return contract.EXIT_DONE


# ---- what was asked --------------------------------------------------------------------------------------


def read(args: argparse.Namespace) -> tuple[Job, Site]:
    """Read the flags.

    Raises:
        ConfigError: a value that cannot be, or a job that cannot be played.

    """
    low, high = _nodes(args.nodes)
    state = values.size("state", args.state)
    memory = values.size("free-memory", args.free_memory) if args.free_memory else None
    # Room for what a slot has beside the state is a sixty-fourth of it.
    slots = budget.SLOTS if memory is None else budget.slots_that_fit(state + state // 64, free_bytes=memory)
    copy, step_s = values.speed("copy", args.copy), _time("step-time", args.step_time, least_s=0.001)
    cores = _count("cores", args.cores)
    cost_s = simulate_job.snapshot_cost_s(state, copy_bytes_per_s=copy, cores=cores, step_s=step_s)
    detection = args.detection_time
    job = Job(
        nodes=high,
        min_nodes=low,
        state_bytes=state,
        spares=_count("spares", args.spares, least=0),
        step_s=step_s,
        snapshot_every=Every.parse(args.snapshot_every, "snapshot-every", off=True),
        save_every=Every.parse(args.save_every),
        slots=slots,
        snapshot_s=_time("snapshot-cost", args.snapshot_cost) if args.snapshot_cost else cost_s,
        copy_bytes_per_s=copy,
        disk_bytes_per_s=values.speed("disk", args.disk),
        link_bytes_per_s=values.speed("network", args.network),
        start_s=_time("restart-time", args.restart_time),
        cold_s=_time("agent-time", args.agent_time),
        max_no_progress=_count("max-no-progress", args.max_no_progress),
        noticed_s=dict.fromkeys(rates.KINDS, _time("detection-time", detection)) if detection else {},
        away_s={
            "agent": _time("agent-time", args.agent_time, least_s=0.001),
            "reboot": _time("reboot-time", args.reboot_time, least_s=0.001),
            "replacement": _time("replacement-time", args.replacement_time, least_s=0.001),
        },
    )
    site = Site(
        math.inf if args.mtbf_node == NEVER else _time("mtbf-node", args.mtbf_node, least_s=1.0),
        rates.parse_mix(args.mix),
        _count("rack-nodes", args.rack_nodes),
        _time("duration", args.duration, least_s=60.0),
        _count("seed", args.seed, least=0),
        _count("runs", args.runs),
    )
    _refuse(job, site)
    return job, site


def _refuse(job: Job, site: Site) -> None:
    expected_strikes = site.duration_s / site.mtbf_node_s * (job.nodes + job.spares)
    if expected_strikes * site.runs > MAX_STRIKES:
        raise ConfigError(
            f"{expected_strikes:.3g} failures are to be expected in each of {site.runs} runs: give a shorter "
            "--duration, fewer --runs, or a longer --mtbf-node. Is its unit the one you mean?"
        )
    if job.state_bytes < 1000:
        raise ConfigError(f"state is {job.state_bytes} bytes: write its size with its unit, as 30GB.")
    if job.spares > MAX_NODES:
        raise ConfigError(f"spares is {job.spares}, which is more than any job has.")
    if job.min_nodes > job.nodes:
        raise ConfigError(
            f"nodes: at least {job.min_nodes} of {job.nodes} nodes: write MIN:MAX, as 900:1000."
        )


def _nodes(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    most = _count("nodes", high if colon else low)
    if most > MAX_NODES:
        raise ConfigError(f"nodes is {text}, which is more than any job has.")
    return (_count("nodes", low) if colon else most), most


def _count(what: str, text: str, least: int = 1) -> int:
    if not text.isdecimal() or len(text) > 12 or int(text) < least:
        raise ConfigError(f"{what} is {text[:100]!r}: write a whole number, {least} or more.")
    return int(text)


def _time(what: str, text: str, least_s: float = 0.0) -> float:
    return parse_duration(what, text, least_s=least_s)
