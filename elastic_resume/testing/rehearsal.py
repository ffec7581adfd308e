"""Run ``elastic-resume rehearse``: resume a script on purpose, and print what was restored and what was not.

The job runs on simulated nodes of this machine, with a snapshot every few steps. It is interrupted within an
epoch, after the end of one, and by the loss of a node. Each time it resumes from an earlier snapshot,
computes the newest one again, and compares (`policy.proof`). Then it is stopped.

Exit codes: 0 every check passed; 1 one did not, or the script failed or ended first; 2 nothing was started.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastic_resume import constants
from elastic_resume.agent import torchelastic
from elastic_resume.config import Parser, actions_by_flag, parse_flags
from elastic_resume.errors import ConfigError
from elastic_resume.events import Event
from elastic_resume.policy.failure_classification import looks_secondary
from elastic_resume.policy.proof import NOT_PROVED, PROVED, REHEARSE, RESUMED, ROUNDING
from elastic_resume.report import formatting
from elastic_resume.slots.progress_page import ProgressRecord
from elastic_resume.testing.cluster import Cluster
from elastic_resume.testing.script_files import ScriptFiles
from elastic_resume.units import format_bytes, parse_duration

PROG = "elastic-resume rehearse"
DEFAULT_SNAPSHOT_STEPS = 5
DEFAULT_LIMIT_S = 600.0
POLL_S = 0.005
MAX_INTERRUPTIONS = 3  # until one resume is within an epoch
NODES = 2
NOT_MADE = (
    "no earlier snapshot was there, or one node alone had the newest: the script may be right, try again"
)
# Flags of the real job that say where it runs; here it runs on simulated nodes.
DECIDED_FLAGS = {
    "nnodes", "nproc_per_node", "node_rank", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf",
    "local_addr", "local_ranks_filter", "standalone", "master_addr", "master_port", "ckpt_dir", "resume",
    "prove", "snapshot_every", "metrics", "quiet", "directory", "limit_s", "log_dir", "redirects", "tee",
    "show_config",
}  # fmt: skip


@dataclass(frozen=True)
class Rehearsal:
    """What to run, and how."""

    script: tuple[str, ...]
    flags: tuple[str, ...]
    workers_per_node: int
    snapshot_every: str
    limit_s: float
    directory: Path | None


@dataclass(frozen=True)
class Check:
    """One interruption: what it is, when it comes, and how."""

    name: str
    is_due: Callable[[ProgressRecord], bool]
    interrupt: Callable[[Cluster], object]
    needs_epoch: bool = False
    """A resume at the beginning of an epoch does not count."""


@dataclass(frozen=True)
class CheckResult:
    """The outcome of a check. ``verdict`` is one of `policy.proof`, or empty if it was not made."""

    name: str
    verdict: str
    text: str
    steps: int | None = None
    within_epoch: bool = True

    @property
    def has_passed(self) -> bool:
        """Whether nothing is wrong as far as this check shows."""
        return self.verdict in {PROVED, ROUNDING, RESUMED}


def main(words: Sequence[str]) -> int:
    """Run ``elastic-resume rehearse [flags of run] script args...`` and return its exit code.

    Raises:
        ConfigError: the command is wrong.

    """
    rehearsal = parse_command(words)
    formatting.write_stdout(
        f"rehearsing {' '.join(rehearsal.script)} on {NODES} simulated nodes with "
        f"{formatting.format_count(rehearsal.workers_per_node, 'worker')} each. The script writes its files "
        "where it always does.\n"
    )
    started_at = time.monotonic()
    with contextlib.ExitStack() as cleanup:
        directory = rehearsal.directory
        if directory is None:
            temporary = tempfile.TemporaryDirectory(prefix="elastic-resume-rehearse-")
            directory = Path(cleanup.enter_context(temporary))
        results, output, notes = run(rehearsal, directory)
    formatting.write_stdout(format_results(results, time.monotonic() - started_at, output, notes))
    passed = all(result.has_passed for result in results)
    return constants.EXIT_SUCCESS if passed else constants.EXIT_JOB_ERROR


def build_parser() -> Parser:
    """Return the parser of the command's own flags."""
    parser = Parser(
        prog=PROG,
        usage=f"{PROG} [flags] [flags of `elastic-resume run`] SCRIPT [its arguments]",
        description="Interrupt and resume a training script on purpose, on simulated nodes of this machine, "
        "and compare what it computes with what it had computed.",
        epilog="--snapshot-every N, a flag of run, is the number of steps between snapshots (default "
        f"{DEFAULT_SNAPSHOT_STEPS}). Exit codes: 0: every check passed. 1: one did not, or could not be "
        "made. 2: nothing was started.",
    )
    _add_flags(parser)
    parser.add_argument("script", help="the training script", metavar="SCRIPT")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _add_flags(parser: Parser) -> None:
    parser.add_argument(
        "--time-limit",
        dest="limit_s",
        metavar="TIME",
        type=functools.partial(parse_duration, "--time-limit", min_s=1.0),
        default=DEFAULT_LIMIT_S,
        help="end the rehearsal after TIME (default 10m)",
    )
    parser.add_argument(
        "--dir", dest="directory", type=Path, help="keep logs and events in DIR, which is empty"
    )


def parse_command(words: Sequence[str]) -> Rehearsal:
    """Parse the command. Flags that say where the real job runs are left out."""
    if not words or words[0] in {"-h", "--help"}:
        build_parser().print_help()
        raise SystemExit(constants.EXIT_SUCCESS if words else constants.EXIT_USAGE)
    parser = torchelastic.build_parser()
    parser.prog = PROG
    _add_flags(parser)
    args, given = parse_flags(parser, words)
    script_words = [args.training_script, *args.training_script_args]
    directory = args.directory.absolute() if args.directory is not None else None
    if directory is not None and directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"--dir {directory} is not empty: name another one, or remove what is there.")
    every = str(args.snapshot_every) if "snapshot_every" in given else str(DEFAULT_SNAPSHOT_STEPS)
    if not every.isdecimal():
        raise ConfigError(f"--snapshot-every is {every}: a rehearsal takes a number of steps.")
    workers = str(args.nproc_per_node)
    total = int(workers) if workers.isdecimal() else 1
    is_in_file = "training_script" in args.sources
    before = list(words if is_in_file else words[: len(words) - len(script_words)])
    return Rehearsal(
        script=tuple(script_words),
        flags=tuple(_select_flags(parser, before)),
        workers_per_node=max(1, total // NODES),
        snapshot_every=every,
        limit_s=args.limit_s,
        directory=directory,
    )


def _select_flags(parser: Parser, words: Sequence[str]) -> Iterator[str]:
    """Yield the flags, with their values, that the simulated nodes get too."""
    actions = actions_by_flag(parser)
    at = 0
    while at < len(words):
        name, has_value, _ = words[at].partition("=")
        action = actions.get(name)
        size = 1 if action is None or has_value or action.nargs == 0 else 2
        if action is None or action.dest not in DECIDED_FLAGS:
            yield from words[at : at + size]
        at += size


# ---- the run -------------------------------------------------------------------------------------------


def run(rehearsal: Rehearsal, directory: Path) -> tuple[list[CheckResult], str, list[str]]:
    """Run the checks.

    Return their results, the end of the nodes' output if a check was not made, and notes: the warnings of the
    run, and the files that the resumed script has emptied.
    """
    every = rehearsal.snapshot_every
    flags = [*rehearsal.flags, "--prove", REHEARSE, "--snapshot-every", every]
    with Cluster(
        directory, nodes=NODES, min_nodes=1, workers_per_node=rehearsal.workers_per_node, flags=flags,
        env={"ELASTIC_RESUME_MAX_NO_PROGRESS": "100"}, run_id="rehearsal",
    ) as cluster:  # fmt: skip
        script, *args = rehearsal.script
        cluster.start(script, *args)
        runner = _Runner(cluster, time.monotonic() + rehearsal.limit_s)
        results = [runner.run(check) for check in list_checks(int(every), rehearsal.workers_per_node)]
        is_missing = any(not result.verdict for result in results)
        return results, cluster.output_tails() if is_missing else "", list_notes(cluster, runner.files)


def list_notes(cluster: Cluster, files: ScriptFiles) -> list[str]:
    """Return what is no difference of the state, and may be wrong all the same."""
    output = "\n".join(cluster.output(index) for index in range(NODES))
    notes = list(dict.fromkeys(re.findall(r"^elastic_resume: (WARNING: .*)", output, re.MULTILINE)))
    for path, size in files.emptied.items():
        notes.append(
            f"The resumed script emptied {path}, which had {format_bytes(size)}. If it is a log, open it "
            'with "a" in place of "w".'
        )
    return notes


def list_checks(every: int, workers_per_node: int) -> list[Check]:
    """Return the interruptions, in order; ``every`` is the number of steps between two snapshots."""
    last = NODES * workers_per_node
    epoch_end = [0]

    def is_in_epoch(record: ProgressRecord) -> bool:
        return record.step > max(2 * every, record.first_step + every)

    def is_after_epoch(record: ProgressRecord) -> bool:
        # With a snapshot behind the end of the epoch: the one before it is then within the epoch.
        if record.epoch_end_step > record.first_step:
            epoch_end[0] = record.epoch_end_step
        snapshot_step = (epoch_end[0] // every + 1) * every
        return epoch_end[0] > 0 and record.step > max(snapshot_step, record.first_step + every)

    def is_later(record: ProgressRecord) -> bool:
        return record.step > record.first_step + 2 * every

    return [
        Check(
            "within an epoch",
            is_in_epoch,
            lambda cluster: cluster.kill_worker(NODES - 1),
            needs_epoch=True,
        ),
        Check("after the end of an epoch", is_after_epoch, lambda cluster: cluster.kill_worker(0)),
        Check(
            f"with {last - workers_per_node} of {last} ranks", is_later, lambda cluster: cluster.kill_node(1)
        ),
    ]


class _Runner:
    """Interrupts a job in progress, and waits for the verdicts."""

    def __init__(self, cluster: Cluster, deadline: float) -> None:
        self._cluster, self._deadline = cluster, deadline
        self._ended = ""  # why no further check can be made
        self.files = ScriptFiles(cluster.directory)

    def run(self, check: Check) -> CheckResult:
        """Interrupt when it is due, again if that gave no verdict or a weak one, and return the verdict.

        A kill between two nodes' copies of a snapshot leaves one of them with it, and then nothing is proved.
        """
        for _ in range(MAX_INTERRUPTIONS):
            result = self._interrupt(check)
            is_weak = result.verdict == PROVED and check.needs_epoch and not result.within_epoch
            if (result.verdict and not is_weak) or self._ended:
                return result
        if not result.verdict:
            return result
        return replace(result, verdict="", text=f"{result.text}; make the epochs of this rehearsal longer")

    def _interrupt(self, check: Check) -> CheckResult:
        generation = self._wait(lambda: self._find_due(check), "before it could be interrupted")
        if generation is None:
            return CheckResult(check.name, "", self._ended)
        check.interrupt(self._cluster)
        event = self._wait(lambda: self._find_verdict(generation), "before it resumed")
        if event is None:
            return CheckResult(check.name, "", self._ended)
        if event["event"] == "failure":
            return CheckResult(check.name, NOT_PROVED, str(event["message"]))
        if event["event"] != "proof":
            return CheckResult(check.name, "", str(event["message"]))
        if event["verdict"] == NOT_PROVED:  # the job goes back first
            self._wait(lambda: self._find_start(event["generation"]), "before it went back")
        steps = event["step"] - event["first_step"]
        return CheckResult(check.name, event["verdict"], event["message"], steps, event["within_epoch"])

    def _wait(self, condition: Callable[[], Any], before: str) -> Any:
        """Return the first true value of ``condition``; None if the job or the time has ended."""
        while not self._ended:
            self.files.look(record.worker.pid for _, record in self._cluster.rank_progress())
            if found := condition():
                return found
            if not any(node.alive for node in self._cluster.nodes):
                self._ended = f"{self._describe_end()} {before}"
            elif time.monotonic() > self._deadline:
                self._ended = f"the time was over (--time-limit) {before}"
            time.sleep(POLL_S)
        return None

    def _describe_end(self) -> str:
        failure = _first(self._cluster.events(), "failure", lambda event: not event.get("is_proving"))
        if failure is None:
            return "the script ended (give it more epochs or samples)"
        return f"the script failed ({failure.get('type')}: {failure.get('message')}, {failure.get('frame')})"

    def _find_due(self, check: Check) -> int | None:
        for _, record in self._cluster.rank_progress():
            if record.worker.rank == 0 and check.is_due(record):
                return record.generation
        return None

    def _find_start(self, generation: int) -> Event | None:
        return _first(self._cluster.events(), "resume", lambda event: event["generation"] > generation)

    def _find_verdict(self, generation: int) -> Event | None:
        """Return the proof after that generation, or an event whose message says why there is none."""
        events = self._cluster.events()
        start = _first(events, "resume", lambda event: event["generation"] > generation)
        if start is None:
            return None
        if start.get("proves_step") is None:
            return {**start, "message": NOT_MADE}
        generation = start["generation"]
        proof = _first(events, "proof", lambda event: event["generation"] == generation)
        if proof is not None:
            return proof
        # Another node may have written the error that follows from the proof before rank 0 wrote the proof.
        failure = _first(events, "failure", lambda e: e.get("generation") == generation and _is_cause(e))
        if failure is not None:
            error = f"{failure.get('type')}: {failure.get('message')} ({failure.get('frame')})"
            return {**failure, "message": f"THE RESUME IS NOT PROVED: the resumed script failed: {error}"}
        if _first(events, "resume", lambda event: event["generation"] > generation) is not None:
            return {**start, "message": "the resumed job ended before the verdict"}
        return None


def _is_cause(failure: Event) -> bool:
    kind = failure.get("type")
    return kind != "NotProvedError" and not looks_secondary(f"{kind} {failure.get('message')}")


def _first(events: Iterable[Event], kind: str, condition: Callable[[Event], bool]) -> Event | None:
    return next((event for event in events if event["event"] == kind and condition(event)), None)


# ---- the result ----------------------------------------------------------------------------------------


def format_results(
    results: Sequence[CheckResult], seconds: float, output: str, notes: Sequence[str] = ()
) -> str:
    """Return the table of the checks, and what the failed ones have found."""
    rows = [
        (result.name, result.verdict or "not made", "-" if result.steps is None else str(result.steps))
        for result in results
    ]
    lines = ["", *formatting.format_table(("resumed", "verdict", "steps again"), rows), ""]
    for result in results:
        lines += formatting.wrap_text(f"{result.name}: {result.text.rstrip('.')}.")
    for note in notes:
        lines += ["", *formatting.wrap_text(note)]
    passed = sum(result.has_passed for result in results)
    warnings = f", {formatting.format_count(len(notes), 'warning')} above" if notes else ""
    lines += ["", f"{passed} of {len(results)} checks passed{warnings}, in {seconds:.0f} s"]
    if output:
        lines += ["", "the end of the nodes' output:", output]
    return "\n".join(lines) + "\n"
