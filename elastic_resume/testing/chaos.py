"""Run ``elastic-resume chaos``: a job on simulated nodes under a fault plan, and a table of the outcomes.

A fault that these nodes cannot have is refused before anything starts. Each fault and each recovery is
printed when it happens. The end prints the report's table, the outcome of each fault, and one sentence. No
process, namespace or mount is left behind, and no file outside the job's directory.

Exit codes: 0 the job ended well; 1 it failed or stalled; 2 nothing was started; 3 it ended well, but a fault
of the plan, or every random fault, never happened, so the run proves less than was asked for; 128 + n signal
n.
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

from elastic_resume import constants
from elastic_resume.agent import options
from elastic_resume.config import Parser, Settings, add_flags, parse_flags_and_file
from elastic_resume.errors import ConfigError
from elastic_resume.report import formatting, summary
from elastic_resume.report.formatting import format_count, format_seconds, format_table, truncate, wrap_text
from elastic_resume.report.incidents import Generation
from elastic_resume.testing import fault_plan, faults, virtual_network
from elastic_resume.testing.cluster import Hosts
from elastic_resume.testing.experiment import (
    STALL_TIMEOUT_S,
    Experiment,
    ExperimentInterrupted,
    ExperimentResult,
    run,
)
from elastic_resume.testing.fault_plan import FaultPlan, RandomFaults
from elastic_resume.testing.fault_runner import DONE, FaultOutcome
from elastic_resume.units import parse_duration, parse_size

PROG = "elastic-resume chaos"
DEFAULT_MTBF_S = 15.0
TARGET_WIDTH = 24  # characters of whom a fault hit, beside what followed
REPLACED_RUN_FLAGS = {
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


def main(args: Sequence[str]) -> int:
    """Run ``elastic-resume chaos [flags] [flags of run] -- script args...`` and return its exit code.

    Raises:
        ConfigError: the command or the plan is wrong.
        MachineError: these nodes are not available here.

    """
    job, saved = parse_command(args)
    began = time.monotonic()

    def say(text: str) -> None:
        for at, line in enumerate(wrap_text(text, indent=" " * 10)):
            if not formatting.write_stdout(
                f"{line}\n" if at else f"{time.monotonic() - began:7.1f} s  {line}\n"
            ):
                signal.raise_signal(signal.SIGTERM)  # `| head` has had what it wanted

    if saved is not None:
        _write_plan(saved, fault_plan.to_text(job.plan))
    try:
        job.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--dir {job.directory}: cannot be made: {error.strerror}.") from error
    formatting.write_stdout(f"{shlex.join(job.script)} on {_describe_nodes(job)}; seed {job.plan.seed}\n")
    caught: list[int] = []
    try:
        with _interrupt_on_signals(caught):
            outcome = run(job, say)
    except (ExperimentInterrupted, KeyboardInterrupt) as ended:  # the latter before there was a job
        if isinstance(ended, ExperimentInterrupted):
            formatting.write_stdout(f"\n{format_result(job, ended.result)}\n")
        return constants.EXIT_SIGNAL_BASE + (caught[0] if caught else signal.SIGINT)
    formatting.write_stdout(f"\n{format_result(job, outcome)}\n")
    if outcome.failure:
        return constants.EXIT_JOB_ERROR
    if outcome.missed_faults or _has_no_random_fault(job, outcome):
        return constants.EXIT_PLAN_INCOMPLETE
    return constants.EXIT_SUCCESS


def parse_command(words: Sequence[str]) -> tuple[Experiment, Path | None]:
    """Parse the command: return the experiment and the path at which its plan is saved."""
    before, after = _split_at_script(words)
    parser = _build_parser()
    args, flags = parser.parse_known_args(before)
    if not after:
        parser.error("write the script behind --, as in: chaos --nodes 4 --mtbf 15s -- train.py --epochs 3")
    for flag in flags:
        name = flag.partition("=")[0]
        if name in REPLACED_RUN_FLAGS:
            raise ConfigError(
                f"{name} is not for chaos to pass on: it decides that itself; see {REPLACED_RUN_FLAGS[name]}."
            )
    plan = _build_plan(args)
    chosen: Hosts = args.hosts or ("loopback" if virtual_network.unavailable_reason() else "namespaces")
    shape = {"nodes": args.nodes, "workers_per_node": args.workers_per_node}
    plan.validate(**shape, node_resources=faults.NODE_RESOURCES[chosen])
    if not 1 <= args.min_nodes <= args.nodes:
        raise ConfigError(f"--min-nodes is {args.min_nodes}: write 1 to {args.nodes}.")
    if args.disk is not None and chosen != "namespaces":
        why = (
            virtual_network.unavailable_reason() or "nodes share the disk that is here with --hosts loopback"
        )
        raise ConfigError(f"--disk takes nodes that have one of their own (--hosts namespaces): {why}.")
    _validate_run_flags(flags, after)
    job = Experiment(
        _require_empty(args.dir.absolute()),
        **shape,
        min_nodes=args.min_nodes,
        hosts=chosen,
        flags=tuple(flags),
        script=tuple(after),
        plan=plan,
        node_resources=faults.NODE_RESOURCES[chosen],
        disk_bytes=args.disk,
        fault_window_s=args.for_s,
        drain=args.drain,
        stall_timeout_s=args.patience,
    )
    return job, args.save_plan


def _validate_run_flags(flags: Sequence[str], script: Sequence[str]) -> None:
    """Refuse flags that each agent would refuse. Only torchrun's own flags need an import of torch."""
    ours = Parser(prog="elastic-resume run", add_help=False)
    add_flags(ours)
    args, others = ours.parse_known_args(flags)
    if others or args.config is not None:
        from elastic_resume.agent import torchelastic  # noqa: PLC0415

        args, _ = parse_flags_and_file(torchelastic.build_parser(), [*flags, *script])
    else:
        plain = {"module": False, "no_python": False, "run_path": False, "rdzv_id": "none", "run_id": None}
        args = argparse.Namespace(**vars(args), training_script=script[0], **plain)
    options.check_script(args)
    Settings.for_agent(args, {})


def _require_empty(directory: Path) -> Path:
    try:
        full = any(directory.iterdir())
    except FileNotFoundError:
        return directory
    except OSError as error:
        raise ConfigError(f"--dir {directory}: cannot be used: {error.strerror}.") from error
    if full:
        raise ConfigError(f"{directory} is not empty: name another --dir, or remove what is there.")
    return directory


def _split_at_script(words: Sequence[str]) -> tuple[list[str], list[str]]:
    listed = list(words)
    if "--" not in listed:
        return listed, []
    at = listed.index("--")
    return listed[:at], listed[at + 1 :]


def _build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=PROG,
        usage=f"{PROG} [flags] [flags of `elastic-resume run`] -- script [its arguments]",
        description="Run a training script on simulated nodes, break them by a plan, tell what came of it.",
        epilog="Exit codes: 0 the job ended right, 1 wrong, 2 nothing was started, 3 right, but a fault that "
        "the plan names never came.",
    )

    def add(flag: str, what: str, **more: object) -> None:
        parser.add_argument(flag, help=what, **more)  # type: ignore[arg-type]

    add("--nodes", "simulated nodes, n0 to n{N-1} (default 3)", type=_parse_count, default=3, metavar="N")
    add("--min-nodes", "fewest that train on (default 1)", type=_parse_count, default=1, metavar="N")
    add("--workers-per-node", "ranks on each (default 1)", type=_parse_count, default=1, metavar="N")
    add("--plan", "what befalls whom and when: see docs/chaos.md", type=Path, metavar="FILE.yaml")
    add("--seed", "decides all that the plan leaves open, or all of it", type=int, metavar="N")
    add("--mtbf", "mean time between faults that are drawn (default 15s without a plan)",
        type=_duration_parser("--mtbf"), metavar="TIME")  # fmt: skip
    add("--for", "no fault comes later after the first step", dest="for_s", type=_duration_parser("--for"),
        metavar="TIME")  # fmt: skip
    add("--drain", "then drain the job, whose script has no end", action="store_true")
    add("--hosts", "namespaces: a network and a disk in memory for each node, as root (default where that "
        "can be); loopback: processes only", choices=sorted(faults.NODE_RESOURCES))  # fmt: skip
    add("--disk", "size of each node's disk, in namespaces (default 256MB)", type=_parse_size, metavar="SIZE")
    add("--dir", "logs, checkpoints and events go there (default ./chaos-run)", type=Path,
        default=Path("chaos-run"))  # fmt: skip
    add("--save-plan", "write the plan that is carried out", type=Path, metavar="FILE.yaml")
    add("--patience", "a job without a step for so long stands still (default 5m)",
        type=_duration_parser("--patience"), default=STALL_TIMEOUT_S, metavar="TIME")  # fmt: skip
    return parser


def _parse_count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= virtual_network.MAX_NODES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {virtual_network.MAX_NODES}")
    return int(text)


def _duration_parser(flag: str) -> Callable[[str], float]:
    """Return a parser for the durations of a flag."""
    return functools.partial(parse_duration, flag)


def _parse_size(text: str) -> int:
    try:
        return parse_size("it", text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _build_plan(args: argparse.Namespace) -> FaultPlan:
    """Build the plan of the command line: from a file, random, or both."""
    plan = fault_plan.read(args.plan) if args.plan else FaultPlan(seed=secrets.randbelow(1 << 31))
    if args.seed is not None:
        plan = replace(plan, seed=args.seed)
    if args.mtbf is not None or args.plan is None:
        mtbf_s = DEFAULT_MTBF_S if args.mtbf is None else args.mtbf
        plan = replace(plan, every=replace(plan.every or RandomFaults(mtbf_s), mtbf_s=mtbf_s))
    return plan


def _write_plan(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"--save-plan {path}: cannot be written: {error.strerror}.") from error


@contextlib.contextmanager
def _interrupt_on_signals(caught: list[int]) -> Iterator[None]:
    """Treat SIGTERM and SIGHUP as Ctrl-C; ``caught`` then holds the signal's number."""

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


def format_result(experiment: Experiment, result: ExperimentResult) -> str:
    """Format the report's table, the outcome of each fault, and the conclusion."""
    lines = [summary.format_text(result.run_report).rstrip(), "", *_fault_table(result), ""]
    lines += wrap_text(_summarize(experiment, result))
    why, *tails = result.failure.splitlines() or [""]
    del why
    lines += tails
    again = f"the same faults again: {PROG} --seed {experiment.plan.seed} with the same flags and plan"
    return "\n".join([*lines, *wrap_text(f"{again}; what the nodes wrote is in {experiment.directory}")])


def _fault_table(result: ExperimentResult) -> list[str]:
    followed = _consequences(result)
    rows = [("", "nothing of the plan", "-", followed[None])] if None in followed else []
    last = max(
        (fate for fate in result.fault_outcomes if fate.injected_at is not None),
        key=_injection_time,
        default=None,
    )
    for fate in result.fault_outcomes:
        if fate.state == DONE:
            ended_wrong = result.failure and fate is last
            otherwise = (
                "see below" if ended_wrong else result.run_report.describe_after_fault(_injection_time(fate))
            )
            then = followed.get(fate.number, otherwise)
        elif fate.is_random:
            continue  # those go on beyond any job's end
        else:
            then = f"never came: {fate.reason}"
        often = f", {format_count(fate.injection_count, 'time')}" if fate.injection_count > 1 else ""
        what = f"{fate.fault.what} {truncate(fate.target or fate.fault.target_text, TARGET_WIDTH)}{often}"
        rows.append((str(fate.number), what, _format_injection_time(result, fate), then))
    return (
        format_table(("no", "fault", "at", "what followed"), rows, right_aligned=(0, 2), shrinkable=3)
        if rows
        else []
    )


def _format_injection_time(result: ExperimentResult, fault_outcome: FaultOutcome) -> str:
    if fault_outcome.injected_at is None or result.run_report.start_t is None:
        return "-"
    return format_seconds(max(0.0, fault_outcome.injected_at - result.run_report.start_t))


def _consequences(result: ExperimentResult) -> dict[int | None, str]:
    """Map each fault to what followed from it; None holds what followed from no fault."""
    done = sorted(
        (fate for fate in result.fault_outcomes if fate.injected_at is not None), key=_injection_time
    )
    rows = result.run_report.history.generations
    found: dict[int | None, list[str]] = {}
    spoilt = [fate for fate in done if fate.fault.what in summary.CORRUPTING_FAULTS]
    for row in rows:
        for copy in row.rejected:
            by = [one for one in spoilt if copy.node in one.nodes and _injection_time(one) <= row.start_t]
            what = f"a copy of {copy.node} was set aside: {copy.reason}"
            found.setdefault(by[-1].number if by else None, []).append(what)
    rest = [row for row in rows if _is_incident(row, result)]
    done = [fate for fate in done if fate not in spoilt]  # a damaged copy ends nothing
    times = [
        (fate, *hit)
        for fate in done
        for hit in ((_injection_time(fate), fate.nodes, fate.rank), *fate.repeats)
    ]
    hits = [summary.FaultHit(t, nodes, rank, fate.fault.what) for fate, t, nodes, rank in times]
    for (fate, *_), of_it in zip(times, summary.attribute_ends(hits, rows), strict=True):
        for row in [one for one in of_it if one in rest]:
            rest.remove(row)
            found.setdefault(fate.number, []).append(_format_incident(row))
    for row in rest:
        found.setdefault(None, []).append(_format_incident(row))
    for fate in done:
        if fate.fault.what == "preemption":  # where all nodes left, which is no failure
            found.setdefault(fate.number, []).extend(
                map(_format_incident, _generations_stopped_at(_injection_time(fate), rows))
            )
    return {number: "; ".join(texts) for number, texts in found.items() if texts}


def _generations_stopped_at(time_s: float, rows: Sequence[Generation]) -> list[Generation]:
    """Return the generation that ran then, if all of it was told to stop and another one followed."""
    return [
        row
        for row, following in itertools.pairwise(rows)
        if row.start_t <= time_s < following.start_t and row.end.kind == "stopped"
    ]


def _injection_time(outcome: FaultOutcome) -> float:
    return outcome.injected_at or 0.0


def _is_incident(generation: Generation, result: ExperimentResult) -> bool:
    """Whether a failure ended the generation, rather than the end of the experiment."""
    drained = math.inf if result.drained_at is None else result.drained_at
    return generation.end.is_failure and (
        generation.end.t is None or generation.end.t < drained - summary.CLOCK_SLACK_S
    )


def _has_no_random_fault(experiment: Experiment, result: ExperimentResult) -> bool:
    """Whether random faults were requested and none happened."""
    return experiment.plan.every is not None and result.had_no_fault


def _format_incident(generation: Generation) -> str:
    lost = f", {generation.recomputed_steps} lost" if generation.recomputed_steps else ""
    back = f", back in {format_seconds(generation.recovery_s)}" if generation.recovery_s is not None else ""
    return f"{generation.end.text.rstrip('.')}{back}{lost}"


def _summarize(experiment: Experiment, result: ExperimentResult) -> str:
    report = result.run_report.history
    came = sum(fate.state == DONE for fate in result.fault_outcomes)
    incidents = sum(_is_incident(row, result) for row in report.generations)
    cost = (
        f"{format_count(came, 'fault')} came, {format_count(incidents, 'incident')} followed, "
        f"{format_count(report.recomputed_steps, 'step')} run again"
    )
    if result.failure:
        return f"WRONG: {result.failure.splitlines()[0]} ({cost})"
    how = "was drained" if experiment.drain and experiment.fault_window_s is not None else "ended right"
    left = len(result.missed_faults)
    never = f"; {format_count(left, 'fault')} of the plan never came" if left else ""
    if not left and _has_no_random_fault(experiment, result):
        never = "; no fault came: train for longer, or give a shorter --mtbf"
    return f"The job {how}, at step {report.last_step}: {cost}{never}."


def _describe_nodes(experiment: Experiment) -> str:
    own: dict[Hosts, str] = {
        "loopback": "processes only",
        "namespaces": "each with a network and a disk of its own",
    }
    workers = "" if experiment.workers_per_node == 1 else f" with {experiment.workers_per_node} workers each"
    return f"{format_count(experiment.nodes, 'node')}{workers} ({own[experiment.hosts]})"
