"""Keeps a node's history of rounds, asks the policy what to do, and speaks to the user.

Promise: what is decided and why is said in a line and stands in the event log. A failure is told to the other
nodes before this one asks for another world; so what the policy is asked about is what all nodes know. How
workers ended is read from memory (`round_events`): a disk that is full or fails changes no decision.

Does not know how worlds form (`handler`), nor what the policy is (`policy.restart`).
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from elastic_resume import constants, events
from elastic_resume.agent.memory_pressure import MemoryMonitor
from elastic_resume.agent.round_events import RoundEvents
from elastic_resume.agent.workers.lease_page import LeasePage
from elastic_resume.errors import JobFailedError, NodeExcludedError
from elastic_resume.policy import checkpoint_interval, failure_classification, restart
from elastic_resume.policy.failure_classification import (
    Failure,
    FailureVerdict,
    describe_failure,
    separate_root_causes,
)
from elastic_resume.policy.requeue import count_starts_without_progress
from elastic_resume.rendezvous.core.events import EmitEvent
from elastic_resume.snapshot.progress_page import MAX_LOCAL_RANKS, ProgressRecord, WorkerProcess, read_records

# What the rendezvous tells that a person wants to read; the rest is in the event log only.
LOGGED_KINDS = {
    "waiting",
    "refused",
    "spare",
    "disk",
    "unauthenticated",
    "lease-expired",
    "quorum-forced",
    "workers-finished",
}


class RestartController:
    """The observer of one agent's rendezvous (`handler.Observer`)."""

    def __init__(
        self,
        node: str,
        event_log: events.EventLog,
        events_path: Path,
        lease_page: LeasePage,
        round_events: RoundEvents,
        *,
        limits: restart.RestartLimits | None = None,
        memory_monitor: MemoryMonitor | None = None,
    ) -> None:
        """``path`` is that of the node's log; ``gauge`` tells of its memory."""
        self.on_workers_dead: Callable[[], object] = lambda: (
            None
        )  # called when the workers of a round are dead
        self._started_at = time.monotonic()
        self._node = node
        self._event_log = event_log
        self._events_path = events_path
        self._lease_page = lease_page
        self._round_events = round_events
        self._limits = limits or restart.RestartLimits()
        self._memory_monitor = memory_monitor
        self._history: list[restart.RoundResult] = []
        self._round = 0
        self._generation: int | None = None
        self._num_nodes = 1
        self._node_rank: int | None = None
        self.is_spare = False  # a world runs without this node
        self._world = restart.WorldSummary()
        self._round_offset = 0  # of the first event of the round, in the node's file
        self._stale_workers: frozenset[WorkerProcess] = frozenset()  # on the board before the round began
        self._end_reason = ""
        self._last_verdict = FailureVerdict()  # of the last round that failed anywhere
        self._pending_traceback = ""  # the traceback of our own part in it
        self._printed_traceback = ""  # the last that was printed

    @property
    def node_rank(self) -> int | None:
        """This node's rank in the last world; None where there was none."""
        return self._node_rank

    def starts_without_progress(self, restarts: int) -> int:
        """How many lives of the job in a row, this one included, have brought no new step on this node."""
        if any(this.finished_a_step for this in (*self._history, self._build_round(failed=False))):
            return 0
        return count_starts_without_progress(self._read_events(0), restarts)

    def log(self, text: str) -> None:
        """Print one line for people."""
        with contextlib.suppress(OSError):  # a terminal or a pipe that is gone must not end the job
            print(f"elastic_resume[{self._node}] {text}", file=sys.stderr, flush=True)

    def on_rendezvous_event(self, event: EmitEvent) -> None:
        """Note what the rendezvous did, and say what a person wants to know of it."""
        self._event_log.emit("rendezvous", what=event.kind, message=event.text)
        if event.kind == "spare":
            self.is_spare = True
        if event.kind in LOGGED_KINDS:
            self.log(event.text)

    def emit(self, event: str, /, **fields: object) -> None:
        """Write an event into the node's log."""
        self._event_log.emit(event, **fields)

    def end_round(self) -> None:
        """Let the workers of this round be killed at once where torchelastic asks them to end."""
        self._lease_page.end_round(self._round)

    # ---- between two rounds ----------------------------------------------------------------------------

    def summarize_round(self) -> restart.RoundSummary:
        """Tell what became of the round that ended: to be known by others before anything is decided."""
        this = self._build_round(failed=False)
        history = [*self._history, replace(this, failed=bool(this.failures))]
        return restart.RoundSummary(
            this.verdict.root_cause, restart.find_newest_step(history), self._restart_delay_s(history)
        )

    def _restart_delay_s(self, history: Sequence[restart.RoundResult]) -> float:
        """How long to wait: not for what came from elsewhere, nor where no other start is likely."""
        root = history[-1].verdict.root_cause
        if (
            root is None
            or root.is_secondary
            or self._expected_decision(history).action is not restart.RestartAction.CONTINUE
        ):
            return 0.0
        return restart.restart_delay_s(history)

    def _expected_decision(self, history: Sequence[restart.RoundResult]) -> restart.RestartDecision:
        """What is decided if no other node has failed."""
        return restart.decide_restart(history, self._limits, self._world)

    def before_round(self, *, failed: bool, reason: str = "") -> None:
        """Judge the round that ended; raise GaveUpError or NodeUnfitError when there is to be no other.

        Only what is sure without the other nodes is judged here.
        """
        self.on_workers_dead()
        # Others may have been told of the end before our own part in it was noticed.
        this = self._build_round(failed=failed)
        this = replace(this, failed=failed or bool(this.failures))
        self._history.append(this)
        self._last_verdict, self._pending_traceback = (
            this.verdict,
            self._find_traceback(this.verdict.root_cause),
        )
        for failure in this.failures:
            if failure.kind == failure_classification.STUCK:
                self._leave_job(
                    f"{describe_failure(failure)}. Nothing can be started beside it: repair or reboot this node."
                )
        if not this.failed:
            self.log(f"{reason or 'nodes have come or gone'}: forming a new world.")
            return
        root = this.verdict.root_cause
        if root is not None and root.is_deterministic:
            decision = restart.decide_restart(self._history, self._limits)
            if decision.ends_job:
                self._give_up(decision.reason)
        pause_s = self._restart_delay_s(self._history)
        told = (
            "; starting again"
            if self._expected_decision(self._history).action is restart.RestartAction.CONTINUE
            else ""
        )
        told += f" in {pause_s:g} s, since nothing has advanced" if pause_s else ""
        self.log(f"{describe_failure(root)}{told}.")

    def after_rendezvous(
        self,
        *,
        node_rank: int,
        num_nodes: int,
        generation: int,
        membership_changed: bool = False,
        nodes: Sequence[str] = (),
        step: int = 0,
        failures: Sequence[Failure] = (),
    ) -> None:
        """Note a new round; its workers start now. Raise GaveUpError or NodeUnfitError when they should not.

        ``told`` is what the coordinator heard of the last round's end, ``step`` how far any member has come.
        """
        self._world = restart.WorldSummary(tuple(nodes), step)
        if self._history:
            self._judge_round(failures, membership_changed=membership_changed)
        self._round += 1
        self._num_nodes, self._node_rank, self.is_spare = num_nodes, node_rank, False
        self._generation = generation
        self._round_offset = _file_size(self._events_path)
        # In a container each life's agent has the same pid, and the board's volume may outlive the pod.
        self._stale_workers = frozenset(line.worker for line in self._read_progress())
        self._round_events.clear()
        if self._memory_monitor is not None:
            self._memory_monitor.reset()
        failed = sum(one.failed for one in self._history)
        mtbf = checkpoint_interval.estimate_mtbf_s(failed, time.monotonic() - self._started_at)
        os.environ[constants.ENV_MTBF_S] = f"{mtbf:.3f}"
        os.environ[constants.ENV_ROUND] = str(self._round)  # torchelastic hands its environment to workers
        os.environ[constants.ENV_GENERATION] = str(generation)
        self._event_log.emit(
            "round", round=self._round, node_rank=node_rank, num_nodes=num_nodes, generation=generation
        )
        self.log(f"generation {generation}: node {node_rank} of {num_nodes}.")

    def _judge_round(self, failures: Sequence[Failure], *, membership_changed: bool) -> None:
        """Judge the last round by what all nodes know of it."""
        own = self._history[-1].verdict.root_cause
        last = self._history[-1] = restart.merge_reported_failures(
            self._history[-1], failures, membership_changed=membership_changed
        )
        if failures:
            self._last_verdict = last.verdict
            self._event_log.emit(
                "verdict",
                generation=self._generation,
                causes=[asdict(one) for one in last.verdict.root_causes],
                cascade=[asdict(one) for one in last.verdict.secondary_failures],
            )
            root = last.verdict.root_cause
            if (
                root is not None
                and root.node != self._node
                and root.kind not in failure_classification.NODE_FAILURE_KINDS
            ):
                followed = (
                    " What failed here followed from that." if own is not None and own.is_secondary else ""
                )
                self.log(f"{describe_failure(root, with_node=True)}.{followed}")
        decision = restart.decide_restart(self._history, self._limits, self._world)
        if decision.ends_job:
            self._give_up(decision.reason)
        if decision.action is restart.RestartAction.EXCLUDE:
            if decision.node == self._node:
                self._leave_job(decision.reason)
            self.log(f"node {decision.node} is to leave: {decision.reason}")
        if self._pending_traceback and self._pending_traceback != self._printed_traceback:
            self._print_traceback(self._pending_traceback)
        self._pending_traceback = ""

    def _give_up(self, reason: str) -> None:
        self._end_reason = f"node {self._node} gave up: {reason}"
        raise JobFailedError(self._end_reason)

    def _leave_job(self, reason: str) -> None:
        raise NodeExcludedError(f"node {self._node} leaves the job: {reason}")

    # ---- the end ---------------------------------------------------------------------------------------

    def end_reason(self, *, workers_failed: bool = False) -> str:
        """Why this node ends the job for all nodes; empty when its workers finished.

        ``workers_failed``: torchelastic has ended because they did, and asked nobody.
        """
        if workers_failed and not self._end_reason:
            this = self._build_round(failed=True)
            root = this.verdict.root_cause
            if root is not None:
                self._last_verdict, self._pending_traceback = this.verdict, self._find_traceback(root)
                self._end_reason = f"node {self._node} gave up: {describe_failure(root)}."
        return self._end_reason

    def record_failures(self, failures: Sequence[Failure]) -> None:
        """Take in what the coordinator heard of failures before the job ended."""
        if failures:
            self._last_verdict = separate_root_causes(failures)

    def log_failure_summary(self, log_dir: str = "") -> None:
        """Say what failed first and what followed, with the user's traceback, and where the rest is.

        ``logs`` is where the user has the workers' output put.
        """
        verdict, root = self._last_verdict, self._last_verdict.root_cause
        if root is None:
            return
        for line in failure_classification.explain_verdict(verdict):
            self.log(line)
        if root.node == self._node:
            trace = self._pending_traceback or self._find_traceback(root)
            if trace:
                self._print_traceback(trace)
        elif root.kind not in failure_classification.NODE_FAILURE_KINDS and root.type:
            self.log(f"its traceback is in the output and in the events of node {root.node}.")
        places = [f"events in {self._events_path}"]
        places += [f"stacks of the hang in {path}" for path in self._list_hang_reports()[-1:]]
        places += [f"workers' output in {log_dir}"] if log_dir else []
        self.log(f"more: {'; '.join(places)}.")

    def _print_traceback(self, traceback_text: str) -> None:
        self._printed_traceback = traceback_text
        with contextlib.suppress(OSError):
            print(traceback_text.rstrip("\n"), file=sys.stderr, flush=True)

    def _find_traceback(self, failure: Failure | None) -> str:
        """The traceback that a worker of this node left in its event, if it printed a line only."""
        if failure is None or failure.node != self._node:
            return ""
        for event in self._round_events.read():
            if event["event"] == "failure" and event.get("type") == failure.type:
                rank = event.get("rank")
                if (rank is None or rank == failure.rank) and isinstance(event.get("traceback"), str):
                    return str(event["traceback"])
        return ""

    def _list_hang_reports(self) -> list[str]:
        found = (event for event in self._round_events.read() if event["event"] == "hang")
        return [str(event["report"]) for event in found if event.get("report")]

    def _build_round(self, *, failed: bool) -> restart.RoundResult:
        return restart.summarize_round(
            [*self._round_events.read(), *self._read_steps()],
            node=self._node,
            failed=failed,
            num_nodes=self._num_nodes,
            memory_pressure=self._memory_monitor.read_pressure()
            if self._memory_monitor is not None
            else None,
        )

    def _read_steps(self) -> list[events.Event]:
        """How far this round came: by the log, and by the board, which has steps that a full disk refused."""
        lines = [line for line in self._read_progress() if line.worker not in self._stale_workers]
        ours = [
            line for line in lines if (line.worker.agent_pid, line.worker.round) == (os.getpid(), self._round)
        ]
        logged = [
            event for event in self._read_events(self._round_offset) if event["event"] in {"step", "commit"}
        ]
        return [*logged, *({"event": "step", "step": line.step} for line in ours)]

    def _read_progress(self) -> list[ProgressRecord]:
        return read_records(self._events_path.with_name(constants.PROGRESS_FILE), MAX_LOCAL_RANKS)

    def _read_events(self, offset: int) -> list[events.Event]:
        """What the node's log holds from there on, as far as its disk gives it."""
        found: list[events.Event] = []
        with contextlib.suppress(OSError):
            found.extend(events.read(self._events_path, offset))  # keeps what comes before an error
        return found


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
