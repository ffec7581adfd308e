"""``elastic-resume chaos``: a job on simulated nodes under a plan of faults, and what came of it.

Promise: what cannot be done on these nodes is refused before anything starts; each fault and each recovery
is told when it happens; at the end there are the report's table, the fate of each fault and one sentence.
When it is over, in whatever way, no process, namespace or mount is left, and no file outside its directory.

Exit codes: 0 the job ended right; 1 it ended wrong, or stood still; 2 nothing was started; 3 it ended right,
but a fault that the plan names never came, or none of those that it wants drawn, so that less is proven than
was asked for; 128 + n signal n.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import math
import secrets
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from elastic_resume import config, constants
from elastic_resume.agent import validation
from elastic_resume.config import Parser, Settings, add_flags, parse_layers
from elastic_resume.errors import ConfigError
from elastic_resume.report import formatting, summary, text_report
from elastic_resume.report.formatting import amount, cut, seconds, table, wrap
from elastic_resume.report.incidents import Generation
from elastic_resume.testing import fault_plan, faults, virtual_network
from elastic_resume.testing.cluster import Hosts
from elastic_resume.testing.experiment import PATIENCE_S, Interrupted, Job, Outcome, run
from elastic_resume.testing.fault_plan import Every, Plan
from elastic_resume.testing.fault_runner import DONE, Fate
from elastic_resume.units import parse_duration

PROG = "elastic-resume chaos"
MTBF_S = 15.0
WHOM = 24  # characters of whom a fault hit, beside what followed
OURS = {
    "--nnodes": "--nodes and --min-nodes",
    "--nproc-per-node": "--workers-per-node",
    "--nproc_per_node": "--workers-per-node",
    "--ckpt-dir": "--dir",
    "--rdzv-id": "--dir",
    "--run-id": "--dir",
    "--rdzv-endpoint": "--nodes",
    "--node-name": "--nodes",
    "--local-addr": "--nodes",
}


# ---- the command ---------------------------------------------------------------------------------------


def main(words: Sequence[str]) -> int:
    """``elastic-resume chaos [flags] [flags of run] -- script args…``; see the module for its exit codes.

    Raises:
        ConfigError: the command, or the plan, is wrong.
        MachineError: these hosts cannot be had here.

    """
    job, saved = parse(words)
    began = time.monotonic()

    def say(text: str) -> None:
        for at, line in enumerate(wrap(text, indent=" " * 10)):
            if not formatting.say(f"{line}\n" if at else f"{time.monotonic() - began:7.1f} s  {line}\n"):
                signal.raise_signal(signal.SIGTERM)  # `| head` has had what it wanted

    if saved is not None:
        _write(saved, fault_plan.to_text(job.plan))
    try:
        job.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--dir {job.directory}: cannot be made: {error.strerror}.") from error
    formatting.say(f"{shlex.join(job.script)} on {_where(job)}; seed {job.plan.seed}\n")
    caught: list[int] = []
    try:
        with _signals(caught):
            outcome = run(job, say)
    except (Interrupted, KeyboardInterrupt) as ended:  # the latter before there was a job
        if isinstance(ended, Interrupted):
            formatting.say(f"\n{told(job, ended.outcome)}\n")
        return constants.EXIT_SIGNALLED + (caught[0] if caught else signal.SIGINT)
    formatting.say(f"\n{told(job, outcome)}\n")
    if outcome.why:
        return constants.EXIT_AT_FAULT
    if outcome.not_reached or _never_drawn(job, outcome):
        return constants.EXIT_NOT_REACHED
    return constants.EXIT_DONE


def parse(words: Sequence[str]) -> tuple[Job, Path | None]:
    """Read the command: the job, and where its plan is to be saved."""
    before, after = _split(words)
    parser = _parser()
    args, flags = parser.parse_known_args(before)
    if not after:
        parser.error("write the script behind --, as in: chaos --nodes 4 --mtbf 15s -- train.py --epochs 3")
    for flag in flags:
        name = flag.partition("=")[0]
        if name in OURS:
            raise ConfigError(
                f"{name} is not for chaos to pass on: it decides that itself; see {OURS[name]}."
            )
    plan = _plan(args)
    chosen: Hosts = args.hosts or ("loopback" if virtual_network.available() else "namespaces")
    shape = {"nodes": args.nodes, "workers_per_node": args.workers_per_node}
    plan.refuse(**shape, own=faults.OWN[chosen])
    if not 1 <= args.min_nodes <= args.nodes:
        raise ConfigError(f"--min-nodes is {args.min_nodes}: write 1 to {args.nodes}.")
    if args.disk is not None and chosen != "namespaces":
        why = virtual_network.available() or "nodes share the disk that is here with --hosts loopback"
        raise ConfigError(f"--disk takes nodes that have one of their own (--hosts namespaces): {why}.")
    _check_run(flags, after)
    job = Job(
        _empty(args.dir.absolute()),
        **shape,
        min_nodes=args.min_nodes,
        hosts=chosen,
        flags=tuple(flags),
        script=tuple(after),
        plan=plan,
        own=faults.OWN[chosen],
        disk_bytes=args.disk,
        for_s=args.for_s,
        drain=args.drain,
        patience_s=args.patience,
    )
    return job, args.save_plan


def _check_run(flags: Sequence[str], script: Sequence[str]) -> None:
    """Refuse what each agent would refuse for itself. Only flags of torchrun's take an import of torch."""
    ours = Parser(prog="elastic-resume run", add_help=False)
    add_flags(ours)
    args, others = ours.parse_known_args(flags)
    if others or args.config is not None:
        from elastic_resume.agent import torchelastic  # noqa: PLC0415

        args, _ = parse_layers(torchelastic.parser(), [*flags, *script])
    else:
        plain = {"module": False, "no_python": False, "run_path": False, "rdzv_id": "none", "run_id": None}
        args = argparse.Namespace(**vars(args), training_script=script[0], **plain)
    validation.check_script(args)
    Settings.for_agent(args, {})


def _empty(directory: Path) -> Path:
    try:
        full = any(directory.iterdir())
    except FileNotFoundError:
        return directory
    except OSError as error:
        raise ConfigError(f"--dir {directory}: cannot be used: {error.strerror}.") from error
    if full:
        raise ConfigError(f"{directory} is not empty: name another --dir, or remove what is there.")
    return directory


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    listed = list(words)
    if "--" not in listed:
        return listed, []
    at = listed.index("--")
    return listed[:at], listed[at + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=PROG,
        usage=f"{PROG} [flags] [flags of `elastic-resume run`] -- script [its arguments]",
        description="Run a training script on simulated nodes, break them by a plan, tell what came of it.",
        epilog="Exit codes: 0 the job ended right, 1 wrong, 2 nothing was started, 3 right, but a fault that "
        "the plan names never came.",
    )

    def add(flag: str, what: str, **more: object) -> None:
        parser.add_argument(flag, help=what, **more)  # type: ignore[arg-type]

    add("--nodes", "simulated nodes, n0 to n{N-1} (default 3)", type=_count, default=3, metavar="N")
    add("--min-nodes", "fewest that train on (default 1)", type=_count, default=1, metavar="N")
    add("--workers-per-node", "ranks on each (default 1)", type=_count, default=1, metavar="N")
    add("--plan", "what befalls whom and when: see docs/chaos.md", type=Path, metavar="FILE.yaml")
    add("--seed", "decides all that the plan leaves open, or all of it", type=int, metavar="N")
    add("--mtbf", "mean time between faults that are drawn (default 15s without a plan)",
        type=_seconds("--mtbf"), metavar="TIME")  # fmt: skip
    add("--for", "no fault comes later than this after the first step", dest="for_s", type=_seconds("--for"),
        metavar="TIME")  # fmt: skip
    add("--drain", "then drain the job, whose script has no end", action="store_true")
    add("--hosts", "namespaces: a network and a disk in memory for each node, as root (default where that "
        "can be); loopback: processes only", choices=sorted(faults.OWN))  # fmt: skip
    add("--disk", "size of each node's disk, in namespaces (default 256MB)", type=_size, metavar="SIZE")
    add("--dir", "logs, checkpoints and events go there (default ./chaos-run)", type=Path,
        default=Path("chaos-run"))  # fmt: skip
    add("--save-plan", "write the plan that is carried out", type=Path, metavar="FILE.yaml")
    add("--patience", "a job without a step for so long stands still (default 5m)",
        type=_seconds("--patience"), default=PATIENCE_S, metavar="TIME")  # fmt: skip
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= virtual_network.MAX_NODES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {virtual_network.MAX_NODES}")
    return int(text)


def _seconds(flag: str) -> Callable[[str], float]:
    """Return a reader of the flag's durations."""
    return functools.partial(parse_duration, flag)


def _size(text: str) -> int:
    try:
        return config.size("it", text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _plan(args: argparse.Namespace) -> Plan:
    """The plan of the command line: of a file, drawn, or both."""
    plan = fault_plan.read(args.plan) if args.plan else Plan(seed=secrets.randbelow(1 << 31))
    if args.seed is not None:
        plan = replace(plan, seed=args.seed)
    if args.mtbf is not None or args.plan is None:
        mtbf_s = MTBF_S if args.mtbf is None else args.mtbf
        plan = replace(plan, every=replace(plan.every or Every(mtbf_s), mtbf_s=mtbf_s))
    return plan


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"--save-plan {path}: cannot be written: {error.strerror}.") from error


@contextlib.contextmanager
def _signals(caught: list[int]) -> Iterator[None]:
    """Let SIGTERM, and a terminal that is gone, end it as Ctrl-C does; ``caught`` then holds the number."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        del frame
        caught.append(number)
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- what is told at the end ---------------------------------------------------------------------------


def told(job: Job, outcome: Outcome) -> str:
    """The report's table, the fate of each fault, and what it all means."""
    lines = [text_report.as_text(outcome.story).rstrip(), "", *_fates(outcome), ""]
    lines += wrap(_verdict(job, outcome))
    why, *tails = outcome.why.splitlines() or [""]
    del why
    lines += tails
    again = f"the same faults again: {PROG} --seed {job.plan.seed} with the same flags and plan"
    return "\n".join([*lines, *wrap(f"{again}; what the nodes wrote is in {job.directory}")])


def _fates(outcome: Outcome) -> list[str]:
    followed = _followed(outcome)
    rows = [("", "nothing of the plan", "-", followed[None])] if None in followed else []
    last = max((fate for fate in outcome.fates if fate.t is not None), key=_when, default=None)
    for fate in outcome.fates:
        if fate.state == DONE:
            ended_wrong = outcome.why and fate is last
            otherwise = "see below" if ended_wrong else outcome.story.after_fault(_when(fate))
            then = followed.get(fate.number, otherwise)
        elif fate.is_drawn:
            continue  # those go on beyond any job's end
        else:
            then = f"never came: {fate.why}"
        often = f", {amount(fate.times, 'time')}" if fate.times > 1 else ""
        what = f"{fate.fault.what} {cut(fate.whom or fate.fault.whom, WHOM)}{often}"
        rows.append((str(fate.number), what, _came(outcome, fate), then))
    return table(("no", "fault", "at", "what followed"), rows, right=(0, 2), elastic=3) if rows else []


def _came(outcome: Outcome, fate: Fate) -> str:
    if fate.t is None or outcome.story.began is None:
        return "-"
    return seconds(max(0.0, fate.t - outcome.story.began))


def _followed(outcome: Outcome) -> dict[int | None, str]:
    """What each fault led to, where it led to anything; None: what followed of no fault."""
    done = sorted((fate for fate in outcome.fates if fate.t is not None), key=_when)
    rows = outcome.story.report.generations
    found: dict[int | None, list[str]] = {}
    spoilt = [fate for fate in done if fate.fault.what in summary.SPOIL]
    for row in rows:
        for copy in row.rejected:
            by = [one for one in spoilt if copy.node in one.nodes and _when(one) <= row.began]
            what = f"a copy of {copy.node} was set aside: {copy.reason}"
            found.setdefault(by[-1].number if by else None, []).append(what)
    rest = [row for row in rows if _is_incident(row, outcome)]
    done = [fate for fate in done if fate not in spoilt]  # a damaged copy ends nothing
    times = [(fate, *hit) for fate in done for hit in ((_when(fate), fate.nodes, fate.rank), *fate.again)]
    hits = [summary.Hit(t, nodes, rank, fate.fault.what) for fate, t, nodes, rank in times]
    for (fate, *_), of_it in zip(times, summary.generations_after(hits, rows), strict=True):
        for row in [one for one in of_it if one in rest]:
            rest.remove(row)
            found.setdefault(fate.number, []).append(_incident(row))
    for row in rest:
        found.setdefault(None, []).append(_incident(row))
    for fate in done:
        if fate.fault.what == "preemption":  # where all nodes left, which is no failure
            found.setdefault(fate.number, []).extend(map(_incident, _stopped_at(_when(fate), rows)))
    return {number: "; ".join(texts) for number, texts in found.items() if texts}


def _stopped_at(t: float, rows: Sequence[Generation]) -> list[Generation]:
    """The generation that ran then, if all of it was told to stop and another one followed."""
    return [
        row
        for row, following in itertools.pairwise(rows)
        if row.began <= t < following.began and row.end.kind == "stopped"
    ]


def _when(fate: Fate) -> float:
    return fate.t or 0.0


def _is_incident(row: Generation, outcome: Outcome) -> bool:
    """Whether a failure ended it, and not that the job was drained."""
    drained = math.inf if outcome.drained is None else outcome.drained
    return row.end.is_failure and (row.end.t is None or row.end.t < drained - summary.SLACK_S)


def _never_drawn(job: Job, outcome: Outcome) -> bool:
    """Whether faults were to be drawn, and the job was over, or had time for none, before the first."""
    return job.plan.every is not None and outcome.is_undisturbed


def _incident(row: Generation) -> str:
    lost = f", {row.lost_steps} lost" if row.lost_steps else ""
    back = f", back in {seconds(row.recovered_s)}" if row.recovered_s is not None else ""
    return f"{row.end.text.rstrip('.')}{back}{lost}"


def _verdict(job: Job, outcome: Outcome) -> str:
    report = outcome.story.report
    came = sum(fate.state == DONE for fate in outcome.fates)
    incidents = sum(_is_incident(row, outcome) for row in report.generations)
    cost = (
        f"{amount(came, 'fault')} came, {amount(incidents, 'incident')} followed, "
        f"{amount(report.lost_steps, 'step')} run again"
    )
    if outcome.why:
        return f"WRONG: {outcome.why.splitlines()[0]} ({cost})"
    how = "was drained" if job.drain and job.for_s is not None else "ended right"
    left = len(outcome.not_reached)
    never = f"; {amount(left, 'fault')} of the plan never came" if left else ""
    if not left and _never_drawn(job, outcome):
        never = "; no fault came: train for longer, or give a shorter --mtbf"
    return f"The job {how}, at step {report.last_step}: {cost}{never}."


def _where(job: Job) -> str:
    own: dict[Hosts, str] = {
        "loopback": "processes only",
        "namespaces": "each with a network and a disk of its own",
    }
    workers = "" if job.workers_per_node == 1 else f" with {job.workers_per_node} workers each"
    return f"{amount(job.nodes, 'node')}{workers} ({own[job.hosts]})"
