"""Run one experiment: a job on simulated nodes under a fault plan, from start to end.

`run` polls every few milliseconds: it injects the faults that are due, prints what the nodes report, and
checks that the job makes progress. When it returns or raises, the nodes are gone. Their files stay in the
job's directory.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_resume import constants
from elastic_resume.errors import UsageError
from elastic_resume.events import Event, parse_line
from elastic_resume.report import summary
from elastic_resume.report.loader import LoadedRun, load_run
from elastic_resume.report.summary import RunReport
from elastic_resume.testing.cluster import Cluster, Hosts
from elastic_resume.testing.fault_plan import FaultPlan
from elastic_resume.testing.fault_runner import DONE, FaultInjector, FaultOutcome
from elastic_resume.units import choose_verb, format_count

RUN_ID = "chaos"
POLL_S, EVENT_POLL_S = 0.02, 0.25
MAX_FAULT_WINDOW_S = 86400.0  # of what is drawn where nobody says for how long
STALL_TIMEOUT_S = 300.0
LATE_NODE_GRACE_S = 30.0  # for who was just being started again when the job ended on the others
STEP_EVENT_INTERVAL_S = 1.0  # a step of each rank in its events
STEPS_FOR_ALL_RANKS = (
    2  # of one rank, in which every other has taken one: it cannot be ahead by more than one
)
MAX_TAIL_BYTES = 1 << 20


@dataclass(frozen=True)
class Experiment:
    """The job, its nodes and its faults."""

    directory: Path
    nodes: int
    min_nodes: int
    workers_per_node: int
    hosts: Hosts
    flags: tuple[str, ...]
    script: tuple[str, ...]
    plan: FaultPlan
    node_resources: tuple[str, ...] = ()  # what each node has of its own, of `kinds.Kind.needs`
    disk_bytes: int | None = None
    fault_window_s: float | None = None
    drain: bool = False
    stall_timeout_s: float = STALL_TIMEOUT_S


@dataclass(frozen=True)
class ExperimentResult:
    """The result of an experiment.

    ``failure`` says why the job ended wrong; empty if it ended well. ``exit_codes`` are those of the agents
    (None: still running). ``drained_at`` is the Unix time at which the job was asked to end.
    """

    failure: str
    exit_codes: tuple[int | None, ...]
    fault_outcomes: tuple[FaultOutcome, ...]
    run_report: RunReport
    drained_at: float | None = None

    @property
    def missed_faults(self) -> list[FaultOutcome]:
        """List the faults of the plan that never happened. Random faults do not count."""
        return [fate for fate in self.fault_outcomes if fate.state != DONE and not fate.is_random]

    @property
    def had_no_fault(self) -> bool:
        """Whether no fault happened at all."""
        return not any(fate.state == DONE for fate in self.fault_outcomes)


class ExperimentInterrupted(Exception):  # noqa: N818  as KeyboardInterrupt, it is no error
    """The experiment was interrupted. It carries the result so far."""

    def __init__(self, result: ExperimentResult) -> None:
        super().__init__("interrupted")
        self.result = result


def run(experiment: Experiment, log: Callable[[str], None]) -> ExperimentResult:
    """Run the job to its end and print what happens.

    Raises:
        MachineError: these nodes are not available here.
        UsageError: these nodes have no disk of their own.
        ExperimentInterrupted: by a KeyboardInterrupt.

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
        env={constants.ENV_STEP_MARK_S: str(STEP_EVENT_INTERVAL_S)},
    ) as cluster:
        trial = _ExperimentRun(experiment, cluster, log)
        try:
            why = trial.run_to_end()
        except KeyboardInterrupt:
            raise ExperimentInterrupted(trial.result("it was interrupted")) from None
        finally:
            trial.close()
        return trial.result(why)


class _ExperimentRun:
    """An experiment in progress."""

    def __init__(self, experiment: Experiment, cluster: Cluster, log: Callable[[str], None]) -> None:
        self._experiment, self._cluster, self._log = experiment, cluster, log
        size = {"nodes": experiment.nodes, "workers_per_node": experiment.workers_per_node}
        until_s = MAX_FAULT_WINDOW_S if experiment.fault_window_s is None else experiment.fault_window_s
        schedule = experiment.plan.schedule(**size, until_s=until_s, node_resources=experiment.node_resources)
        self._injector = FaultInjector(
            cluster, schedule, cluster.failpoints, log, written_count=len(experiment.plan.faults)
        )
        self._event_tails = [_EventTail(node.directory / constants.EVENTS_FILE) for node in cluster.nodes]
        self._last_progress_at = time.monotonic()
        self._latest_progress = (0, 0)
        self._progress_when_idle: tuple[int, int] | None = (
            None  # the furthest step when the last fault was over
        )
        self._job_ended_at: float | None = None
        self._drained_at: float | None = None

    def run_to_end(self) -> str:
        """Start the job and wait for its end; return why it failed, or nothing."""
        script, *words = self._experiment.script
        nodes = self._experiment.nodes
        self._log(f"{format_count(nodes, 'node')} {choose_verb(nodes, 'starts', 'start')}")
        self._cluster.start(script, *words)
        next_news = 0.0
        while not self._injector.is_over:
            self._injector.poll()
            now = time.monotonic()
            if now >= next_news:
                next_news = now + EVENT_POLL_S
                self._log_new_events()
                why = self._stall_message(now)
                if why:
                    return why
                self._finish_faults()
                self._kill_late_nodes(now)
            time.sleep(POLL_S)
        self._log_new_events()
        return self._failure_message()

    def result(self, failure: str) -> ExperimentResult:
        """Return all that is known now."""
        try:
            found = load_run([self._cluster.run_dir])
        except UsageError:  # no agent has got so far as to write one
            found = LoadedRun()
        told = summary.build_run_report(found.events, checkpoint_entries=found.checkpoints)
        if not failure and told.history.last_step is None:
            failure = "no rank finished a step: does the script call er.resume() and run.step()?"
        return ExperimentResult(
            failure, tuple(self._exit_codes()), tuple(self._injector.outcomes), told, self._drained_at
        )

    def close(self) -> None:
        """Undo the faults that last."""
        self._injector.close()

    # ---- inside --------------------------------------------------------------------------------------

    def _log_new_events(self) -> None:
        for tail in self._event_tails:
            for said in tail.read_new_messages():
                self._log(said)

    def _stall_message(self, now: float) -> str:
        furthest = max(
            ((line.generation, line.step) for _, line in self._cluster.rank_progress()), default=(0, 0)
        )
        if furthest != self._latest_progress:
            self._latest_progress, self._last_progress_at = furthest, now
        if now < self._last_progress_at + self._experiment.stall_timeout_s:
            return ""
        return (
            f"no rank finished a step for {self._experiment.stall_timeout_s:.0f} s "
            f"(generation {furthest[0]}, step "
            f"{furthest[1]}).\n{self._cluster.output_tails()}"
        )

    def _finish_faults(self) -> None:
        for_s = self._experiment.fault_window_s
        if for_s is None or self._injector.elapsed_s < for_s:
            return
        if self._injector.pending:
            self._injector.cancel_pending("faults were to come no longer")
        if not self._experiment.drain or self._drained_at is not None:
            return
        if not self._injector.is_idle:
            self._progress_when_idle = None
        elif self._progress_when_idle is None:
            self._progress_when_idle = self._latest_progress
        elif self._has_progressed_past(*self._progress_when_idle):
            self._drained_at = time.time()
            self._injector.disable_restarts()
            self._log("all faults have come: the job is drained")
            for index in range(self._experiment.nodes):
                self._cluster.kill_agent(index, signal.SIGTERM)

    def _has_progressed_past(self, generation: int, step: int) -> bool:
        """Whether all living ranks have finished a step since then."""
        least = (generation, step + STEPS_FOR_ALL_RANKS)  # or any step of a later generation
        return any(
            line.step > line.first_step and (line.generation, line.step) >= least
            for _, line in self._cluster.rank_progress()
        )

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
                self._log(f"{node.name} is left of a job that has ended, and is stopped")
                self._cluster.kill_node(index)

    def _exit_codes(self) -> list[int | None]:
        return [node.agent.poll() if node.agent else None for node in self._cluster.nodes]

    def _failure_message(self) -> str:
        """Describe why this end is wrong; empty if it is right."""
        codes = self._exit_codes()
        drained = self._drained_at is not None
        wrong = {constants.EXIT_JOB_ERROR, constants.EXIT_USAGE} & {*codes}
        if (constants.EXIT_SUCCESS in codes or drained) and not wrong:
            return ""
        ends = self._cluster.events("agent-end")
        said = [str(one["message"]) for one in ends if one.get("outcome") == "failed" and one.get("message")]
        why = said[0].rstrip(".") if said else "nobody said why"
        told = f"exit codes {', '.join(str(code) for code in codes)}"
        return f"the job did not get to its end: {why} ({told}).\n{self._cluster.output_tails()}"


class _EventTail:
    """Reads the new lines of a node's event log, each once.

    Neither time nor position alone identifies a line: clocks jump, and a disk may be wiped.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self._logged_lines: set[bytes] = set()

    def read_new_messages(self) -> Iterator[str]:
        """Return the messages of the lines that are new since the last call."""
        try:
            with open(self._path, "rb") as file:
                if file.seek(0, 2) < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                data = file.read(MAX_TAIL_BYTES)
        except OSError:  # the disk is broken, or there is none: it comes back with another file, or with less
            self._offset = 0
            return
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        for line in data[:whole].splitlines():
            event = parse_line(line)
            said = _format_event(event) if event is not None else ""
            if said and line not in self._logged_lines:
                self._logged_lines.add(line)
                yield said


def _format_event(event: Event) -> str:
    """Format an event for the terminal; empty for most kinds."""
    kind, node = event.get("event"), event.get("node")
    if kind == "resume":
        lacking = event.get("lacking") or []
        sent = f", sent by {event.get('source_node')} to {', '.join(lacking)}" if lacking else ""
        lost = event.get("recomputed_steps")
        again = f"; {format_count(lost, 'step')} {choose_verb(lost, 'is', 'are')} run again" if lost else ""
        step = int(event.get("step", 0)) + 1
        size = int(event.get("world_size") or 0)
        ranks = f"{format_count(size, 'rank')} {choose_verb(size, 'trains', 'train')}"
        return f"generation {event.get('generation')}: {ranks} from step {step} on{sent}{again}"
    if kind == "hang":
        suspects = _format_suspects(event.get("suspects"))
        return f"{node}: a hang at step {event.get('step')}, suspected: {suspects}"
    if kind == "commit-failed":
        return f"{node}: {event.get('error')}"
    if kind == "replicas-differ":
        return (
            f"replicas differ at step {event.get('step')}: wrong on {', '.join(event.get('wrong') or ['?'])}"
        )
    if kind == "quarantine":
        return f"{node}: {event.get('path')} is set aside: {event.get('reason')}"
    if kind == "agent-end":
        return f"{node} has ended: {event.get('outcome')} {event.get('message') or ''}".rstrip()
    return ""


def _format_suspects(suspects: Sequence[object] | None) -> str:
    found = [str(one.get("rank")) for one in suspects or () if isinstance(one, dict)]
    return f"rank {', '.join(found)}" if found else "nobody here"
