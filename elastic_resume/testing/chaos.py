"""Run ``elastic-resume chaos``: a job on simulated nodes under random faults, and its report.

Each fault and each generation is printed when it comes. The end prints the run's report and one sentence. No
process, namespace or mount is left behind, and no file outside the job's directory.

Exit codes: 0 the job ended well; 1 it failed or stalled; 2 nothing was started; 128 + n signal n. 3: the job
ended well, but no fault was injected. Such a run proves less than was requested.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import os
import secrets
import shlex
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from elastic_resume import console, constants
from elastic_resume.config import AGENT_SETTINGS, OPTIONS, Parser
from elastic_resume.errors import ConfigError, UsageError
from elastic_resume.report import formatting, summary
from elastic_resume.report.formatting import format_count, wrap_text
from elastic_resume.report.loader import LoadedRun, load_run
from elastic_resume.report.summary import RunReport
from elastic_resume.testing import virtual_network
from elastic_resume.testing.cluster import Cluster, Hosts
from elastic_resume.testing.fault_runner import DONE, FaultInjector, FaultOutcome
from elastic_resume.testing.faults import Fault, JobShape, draw_random_faults
from elastic_resume.units import choose_verb, parse_duration, parse_size

logger = logging.getLogger(__name__)
_PACKAGE_LOGGER = logging.getLogger(__name__.rpartition(".")[0])

PROG = "elastic-resume chaos"
DEFAULT_MTBF_S = 15.0
RUN_ID = "chaos"
POLL_S, CHECK_INTERVAL_S = 0.02, 0.25
MAX_FAULT_WINDOW_S = 86400.0  # random faults without --for fall within this time
STALL_TIMEOUT_S = 300.0
LATE_NODE_GRACE_S = 30.0  # extra time for a node that was restarting when the job ended on the others
STEP_EVENT_INTERVAL_S = 1.0  # time between the step events of each rank
REPLACED_RUN_FLAGS = {
    "--nnodes": "--nodes and --min-nodes",
    "--nproc-per-node": "--workers-per-node",
    "--nproc_per_node": "--workers-per-node",
    "--ckpt-dir": "--dir",
    "--rdzv-id": "--dir",
    "--run-id": "--dir",
    "--rdzv-endpoint": "--nodes",
    "--local-addr": "--nodes",
}


# ---- the command ---------------------------------------------------------------------------------------


def main(args: Sequence[str]) -> int:
    """Run ``elastic-resume chaos [flags] [flags of run] -- script args...`` and return its exit code.

    Raises:
        ConfigError: the command is wrong.
        MachineError: these nodes are not available here.

    """
    experiment = parse_command(args)
    try:
        experiment.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--dir {experiment.directory}: cannot be made: {error.strerror}.") from error
    script = shlex.join(experiment.script)
    formatting.write_stdout(f"{script} on {_describe_nodes(experiment)}; seed {experiment.seed}\n")
    caught: list[int] = []
    try:
        with console.log_handler(_PACKAGE_LOGGER, _StdoutHandler()), _interrupt_on_signals(caught):
            result = run(experiment)
    except KeyboardInterrupt:  # before the job started
        return constants.EXIT_SIGNAL_BASE + caught[0]
    formatting.write_stdout(f"\n{format_result(experiment, result)}\n")
    if caught:
        return constants.EXIT_SIGNAL_BASE + caught[0]
    if result.failure:
        return constants.EXIT_JOB_ERROR
    return constants.EXIT_SUCCESS if result.injected else constants.EXIT_NO_FAULT


class _StdoutHandler(logging.Handler):
    """Prints each message with the seconds since the handler was made."""

    def __init__(self) -> None:
        super().__init__()
        self._began = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        elapsed = f"{time.monotonic() - self._began:7.1f} s  "
        lines = wrap_text(record.getMessage(), indent=" " * len(elapsed))
        for number, line in enumerate(lines):
            if not formatting.write_stdout(f"{'' if number else elapsed}{line}\n"):
                signal.raise_signal(signal.SIGTERM)  # the reader of the output has ended, as in `| head`


def parse_command(words: Sequence[str]) -> Experiment:
    """Parse the command."""
    at = words.index("--") if "--" in words else len(words)
    before, after = words[:at], words[at + 1 :]
    parser = build_parser()
    args, flags = parser.parse_known_args(before)
    if not after:
        parser.error("write the script behind --, as in: chaos --nodes 4 --mtbf 15s -- train.py --epochs 3")
    for flag in flags:
        name = flag.partition("=")[0]
        if name in REPLACED_RUN_FLAGS:
            raise ConfigError(
                f"{name} is not for chaos to pass on: it decides that itself; see {REPLACED_RUN_FLAGS[name]}."
            )
    chosen: Hosts = args.hosts or ("loopback" if virtual_network.unavailable_reason() else "namespaces")
    seed = secrets.randbelow(1 << 31) if args.seed is None else args.seed
    shape = JobShape(args.nodes, args.workers_per_node, chosen)
    faults = draw_random_faults(shape, mtbf_s=args.mtbf, until_s=args.for_s, seed=seed)
    if not 1 <= args.min_nodes <= args.nodes:
        raise ConfigError(f"--min-nodes is {args.min_nodes}: write 1 to {args.nodes}.")
    if args.disk is not None and chosen != "namespaces":
        why = (
            virtual_network.unavailable_reason() or "nodes share the disk that is here with --hosts loopback"
        )
        raise ConfigError(f"--disk takes nodes that have one of their own (--hosts namespaces): {why}.")
    return Experiment(
        _require_empty(args.dir.absolute()),
        nodes=args.nodes,
        workers_per_node=args.workers_per_node,
        min_nodes=args.min_nodes,
        hosts=chosen,
        flags=tuple(flags),
        env=_read_passed_settings(os.environ),
        script=tuple(after),
        faults=tuple(faults),
        seed=seed,
        disk_bytes=args.disk,
        fault_window_s=args.for_s,
        stall_timeout_s=args.patience,
    )


def _read_passed_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the user's settings for the agents, without those that chaos decides itself."""
    decided = {*AGENT_SETTINGS, "step_mark_s"}
    names = [option.variable for option in OPTIONS if option.field not in decided]
    return {name: environ[name] for name in names if name in environ}


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


def build_parser() -> Parser:
    """Return the parser of the command's own flags."""
    parser = Parser(
        prog=PROG,
        usage=f"{PROG} [flags] [flags of `elastic-resume run`] -- script [its arguments]",
        description="Run a training script on simulated nodes, inject random faults, and report how the job "
        "recovered.",
        epilog="TIME is a number of seconds, or has a unit: 500ms, 30s, 5m. Exit codes: 0: the job finished. "
        "1: it failed or made no progress. 2: nothing was started. 3: it finished before the first fault.",
    )

    def add(flag: str, what: str, **more: Any) -> None:
        parser.add_argument(flag, help=what, **more)

    def add_time(flag: str, what: str, *, min_s: float = 0.0, **more: Any) -> None:
        add(flag, what, type=functools.partial(parse_duration, flag, min_s=min_s), metavar="TIME", **more)

    count: dict[str, Any] = {"type": _parse_count, "metavar": "N"}
    add("--nodes", "number of simulated nodes (default 3)", default=3, **count)
    add("--min-nodes", "fewest nodes that continue training (default 1)", default=1, **count)
    add("--workers-per-node", "ranks on each node (default 1)", default=1, **count)
    add("--seed", "seed of all random choices; the same seed repeats the same faults", type=int, metavar="N")
    add_time("--mtbf", "mean time between faults (default 15s)", min_s=0.001, default=DEFAULT_MTBF_S)
    add_time("--for", "inject no fault later than this after the first step", dest="for_s",
             default=MAX_FAULT_WINDOW_S)  # fmt: skip
    add("--hosts", "namespaces: each node has a network and a disk in memory; needs root, and is the default "
        "where it works. loopback: processes only", choices=("loopback", "namespaces"))  # fmt: skip
    add("--disk", "size of each node's disk with --hosts namespaces (default 256MB)", type=_parse_size,
        metavar="SIZE")  # fmt: skip
    add("--dir", "directory of logs, checkpoints and events (default ./chaos-run)", type=Path,
        default=Path("chaos-run"))  # fmt: skip
    add_time(
        "--patience", "end a job that finishes no step for this long (default 5m)", default=STALL_TIMEOUT_S
    )
    return parser


def _parse_count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= virtual_network.MAX_NODES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {virtual_network.MAX_NODES}")
    return int(text)


def _parse_size(text: str) -> int:
    try:
        return parse_size("it", text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


@contextlib.contextmanager
def _interrupt_on_signals(caught: list[int]) -> Iterator[None]:
    """Treat SIGTERM and SIGHUP as Ctrl-C; ``caught`` gets the number of each of these signals."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        del frame
        caught.append(number)
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # nohup sets SIG_IGN; keep it
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- the run -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Experiment:
    """The job, its nodes and its faults."""

    directory: Path
    nodes: int
    min_nodes: int
    workers_per_node: int
    hosts: Hosts
    flags: tuple[str, ...]
    env: Mapping[str, str]
    script: tuple[str, ...]
    faults: tuple[Fault, ...]
    seed: int = 0
    disk_bytes: int | None = None
    fault_window_s: float = MAX_FAULT_WINDOW_S
    stall_timeout_s: float = STALL_TIMEOUT_S


@dataclass(frozen=True)
class ExperimentResult:
    """The result of an experiment; ``failure`` says why the job ended wrong, empty if it ended well."""

    failure: str
    fault_outcomes: tuple[FaultOutcome, ...]
    run_report: RunReport

    @property
    def injected(self) -> int:
        """Count the faults that happened."""
        return sum(outcome.state == DONE for outcome in self.fault_outcomes)


def run(experiment: Experiment) -> ExperimentResult:
    """Run the job to its end and log what happens. Then the nodes are gone, and their files stay.

    Raises:
        MachineError: these nodes are not available here.
        UsageError: these nodes have no disk of their own.

    """
    with Cluster(
        experiment.directory,
        nodes=experiment.nodes,
        min_nodes=experiment.min_nodes,
        workers_per_node=experiment.workers_per_node,
        run_id=RUN_ID,
        candidates=experiment.nodes,
        hosts=experiment.hosts,
        disk_bytes=experiment.disk_bytes,
        flags=experiment.flags,
        env={**experiment.env, constants.ENV_STEP_MARK_S: str(STEP_EVENT_INTERVAL_S)},
    ) as cluster:
        experiment_run = _ExperimentRun(experiment, cluster)
        try:
            failure = experiment_run.run_to_end()
        except KeyboardInterrupt:
            failure = "it was interrupted"
        finally:
            experiment_run.injector.close()
        return experiment_run.result(failure)


class _ExperimentRun:
    """An experiment in progress."""

    def __init__(self, experiment: Experiment, cluster: Cluster) -> None:
        self._experiment, self._cluster = experiment, cluster
        self.injector = FaultInjector(cluster, experiment.faults)
        self._last_progress_at = time.monotonic()
        self._latest_progress = (0, 0)
        self._job_ended_at: float | None = None

    def run_to_end(self) -> str:
        """Start the job and wait for its end; return why it failed, or nothing."""
        script, *args = self._experiment.script
        nodes = self._experiment.nodes
        logger.info("%s %s", format_count(nodes, "node"), choose_verb(nodes, "starts", "start"))
        self._cluster.start(script, *args)
        next_check_at = 0.0
        while not self.injector.is_over:
            self.injector.poll()
            now = time.monotonic()
            if now >= next_check_at:
                next_check_at = now + CHECK_INTERVAL_S
                stall = self._check_progress(now)
                if stall:
                    return stall
                self._end_fault_window()
                self._kill_late_nodes(now)
            time.sleep(POLL_S)
        return self._failure_message()

    def result(self, failure: str) -> ExperimentResult:
        """Return all that is known now."""
        try:
            found = load_run([self._cluster.run_dir])
        except UsageError:  # no agent has written an event
            found = LoadedRun()
        run_report = summary.build_run_report(found.events, checkpoint_entries=found.checkpoints)
        if not failure and run_report.history.last_step is None:
            failure = "no rank finished a step: does the script call er.resume() and run.step()?"
        return ExperimentResult(failure, tuple(self.injector.outcomes), run_report)

    def _check_progress(self, now: float) -> str:
        """Log a new generation; return a message if the job stalls."""
        furthest = max(
            ((line.generation, line.step) for _, line in self._cluster.rank_progress()), default=(0, 0)
        )
        if furthest[0] > self._latest_progress[0]:
            logger.info("generation %d continues after step %d", *furthest)
        if furthest != self._latest_progress:
            self._latest_progress, self._last_progress_at = furthest, now
        if now < self._last_progress_at + self._experiment.stall_timeout_s:
            return ""
        return (
            f"no rank finished a step for {self._experiment.stall_timeout_s:.0f} s "
            f"(generation {furthest[0]}, step {furthest[1]}).\n{self._cluster.output_tails()}"
        )

    def _end_fault_window(self) -> None:
        if self.injector.elapsed_s >= self._experiment.fault_window_s:
            self.injector.cancel_pending("the time of --for was over")

    def _kill_late_nodes(self, now: float) -> None:
        """Kill nodes that were restarting when the job ended: they would wait for members for ever."""
        if not {constants.EXIT_SUCCESS, constants.EXIT_JOB_ERROR, constants.EXIT_USAGE} & {
            *self._exit_codes()
        }:
            self._job_ended_at = None
            return
        self._job_ended_at = self._job_ended_at or now
        for index, node in enumerate(self._cluster.nodes):
            if now > self._job_ended_at + LATE_NODE_GRACE_S and node.alive:
                logger.info("%s is stopped: it waits for a job that has ended", node.name)
                self._cluster.kill_node(index)

    def _exit_codes(self) -> list[int | None]:
        return [node.agent.poll() if node.agent else None for node in self._cluster.nodes]

    def _failure_message(self) -> str:
        """Describe why this end is wrong; empty if it is right."""
        codes = self._exit_codes()
        wrong = {constants.EXIT_JOB_ERROR, constants.EXIT_USAGE} & {*codes}
        if constants.EXIT_SUCCESS in codes and not wrong:
            return ""
        ends = self._cluster.events("agent-end")
        messages = [
            str(end["message"]) for end in ends if end.get("outcome") == "failed" and end.get("message")
        ]
        reason = messages[0].rstrip(".") if messages else "no agent reported a reason"
        listed = ", ".join(str(code) for code in codes)
        tails = self._cluster.output_tails()
        return f"the job did not get to its end: {reason} (exit codes {listed}).\n{tails}"


# ---- the result ----------------------------------------------------------------------------------------


def format_result(experiment: Experiment, result: ExperimentResult) -> str:
    """Format the report and the conclusion."""
    lines = [summary.format_text(result.run_report).rstrip(), ""]
    lines += wrap_text(_summarize(result))
    for outcome in result.fault_outcomes:
        if outcome.state != DONE and outcome.reason:
            text = f"Fault {outcome.number}, {outcome.fault.what}, was not injected: {outcome.reason}"
            lines += wrap_text(text)
    lines += result.failure.splitlines()[1:]  # the ends of the nodes' output
    again = f"To repeat the same faults: {PROG} --seed {experiment.seed} with the same flags."
    return "\n".join([*lines, *wrap_text(f"{again} Logs and checkpoints are in {experiment.directory}.")])


def _summarize(result: ExperimentResult) -> str:
    history = result.run_report.history
    cost = (
        f"{format_count(result.injected, 'fault')} injected, "
        f"{format_count(history.num_incidents, 'incident')} followed, "
        f"{format_count(history.recomputed_steps, 'step')} recomputed"
    )
    if result.failure:
        return f"WRONG: {result.failure.splitlines()[0]} ({cost})"
    never = "" if result.injected else "; no fault was injected: train for longer, or give a shorter --mtbf"
    return f"The job finished, at step {history.last_step}: {cost}{never}."


def _describe_nodes(experiment: Experiment) -> str:
    own: dict[Hosts, str] = {
        "loopback": "processes only",
        "namespaces": "each with a network and a disk of its own",
    }
    workers = "" if experiment.workers_per_node == 1 else f" with {experiment.workers_per_node} workers each"
    return f"{format_count(experiment.nodes, 'node')}{workers} ({own[experiment.hosts]})"
