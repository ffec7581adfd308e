"""Decide on one node, after each generation's workers end, whether to restart, exclude this node or give up.

A round is one generation of workers on this node. The controller keeps the history of rounds,
asks `policy.restart` for a decision, emits what was decided and logs why::

    workers run --(a worker fails, or the view changes)--> workers are dead
        summarize_round    this node's failure is reported to the leader
        before_round       ends the job for failures that need no other node's view
        (rendezvous)       the leader distributes the failures of all nodes
        after_rendezvous   decides from the failures of all nodes; the next round begins

Every node decides from the same failures, because each reports its own before it joins the next rendezvous.
How workers ended is read from memory (`round_events`), so a full or failing disk changes no decision.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn

from elastic_resume import constants, events
from elastic_resume.agent.failure_evidence import MemoryMonitor, RoundEvents
from elastic_resume.agent.status_reporter import file_size
from elastic_resume.agent.workers.lease_page import LeasePage
from elastic_resume.errors import JobFailedError, NodeExcludedError
from elastic_resume.policy import checkpoint_interval, failure_classification, restart
from elastic_resume.policy.failure_classification import (
    Failure,
    FailureVerdict,
    describe_failure,
    separate_root_causes,
)
from elastic_resume.policy.reasons import format_node_names
from elastic_resume.rendezvous.core.interface import EmitEvent, StartWorkers
from elastic_resume.rendezvous.core.world import Incarnation
from elastic_resume.slots.progress_page import MAX_LOCAL_RANKS, ProgressRecord, WorkerProcess, read_records

logger = logging.getLogger(__name__)

# Kinds of rendezvous events that are logged for people; the others are only in the event log.
WARNING_KINDS = {"refused", "disk", "unauthenticated", "left-out"}
STATE_KINDS = {"waiting", "spare", "workers-finished"}  # logged only if the state lasts
LASTING_S = 5.0
MAX_LOST_NAMED = 3


class WaitLog:
    """Logs why this node has no running workers, if that lasts longer than ``delay_s``.

    A start or a restart that goes well passes through these states in a moment, and needs no line for each.
    """

    def __init__(self, delay_s: float = LASTING_S) -> None:
        self._delay_s = delay_s
        self._lock = threading.Lock()
        self._texts: dict[str, str] = {}  # not logged yet: the newest text of each kind
        self._is_lasting = False
        self._timer: threading.Timer | None = None

    def add(self, kind: str, text: str) -> None:
        """Log ``text`` once the wait has lasted long enough, unless a newer text of its kind replaces it."""
        with self._lock:
            if self._is_lasting:
                logger.info(text)
                return
            self._texts[kind] = text
            if self._timer is None:
                self._timer = threading.Timer(self._delay_s, self._log_texts)
                self._timer.daemon = True
                self._timer.start()

    def end(self) -> bool:
        """End the wait, and forget what was not logged. Return whether the wait was logged."""
        with self._lock:
            was_lasting, self._is_lasting = self._is_lasting, False
            self._texts.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            return was_lasting

    def _log_texts(self) -> None:
        with self._lock:
            if threading.current_thread() is not self._timer:
                return  # the wait ended as the timer fired
            self._is_lasting = True
            for text in self._texts.values():
                logger.info(text)
            self._texts.clear()


class RestartController:
    """The history of one node's rounds, and the decisions that follow from it."""

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
        self.on_workers_dead: Callable[[], object] = lambda: None  # called when a round's workers are dead
        self.list_unreachable_nodes: Callable[[], tuple[str, ...]] = tuple  # names members it cannot reach
        self.is_spare = False  # a view runs without this node
        self.node_rank: int | None = None  # this node's rank in the newest view; None before the first view
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
        self._world = restart.WorldSummary()
        self._round_offset = 0  # offset in the event log at which the round begins
        # Workers that were on the progress page before the round began.
        self._stale_workers: frozenset[WorkerProcess] = frozenset()
        self._end_reason = ""
        self._last_verdict = FailureVerdict()  # verdict about the last round in which any node failed
        self._pending_traceback = ""  # traceback of this node's failure in that round
        self._printed_traceback = ""
        self._wait_log = WaitLog()
        self._has_warned_of_no_resume = False
        self._restart_text = ""  # why the last round ended, as far as this node knows
        self._restart_logged = False

    def has_resumed(self) -> bool:
        """Return whether a worker of this round has come out of `er.resume`. From any thread."""
        return any(event["event"] == "worker-start" for event in self._round_events.read())

    def has_finished_a_step(self) -> bool:
        """Return whether this node has finished a step since its agent started."""
        current = self._build_round(failed=False)
        return any(result.finished_a_step for result in (*self._history, current))

    def on_rendezvous_event(self, event: EmitEvent) -> None:
        """Emit an event of the rendezvous, and log it if it concerns people."""
        missing = {"missing": list(event.missing)} if event.missing else {}
        self._event_log.emit("rendezvous", what=event.kind, message=event.text, **missing)
        if event.kind == "spare":
            self.is_spare = True
        if event.kind in WARNING_KINDS:
            logger.warning(event.text)
        elif event.kind in STATE_KINDS:
            self._wait_log.add(event.kind, event.text)
        else:
            logger.debug(event.text)

    def end_wait(self) -> None:
        """Log no more about waiting: this node's part of the job is over."""
        self._wait_log.end()

    def end_round(self) -> None:
        """Let supervisors kill this round's workers without a grace period when torchelastic stops them."""
        self._lease_page.end_round(self._round)

    # ---- between two rounds ----------------------------------------------------------------------------

    def summarize_round(self) -> restart.RoundSummary:
        """Summarize the round that ended, for the other nodes; its workers are dead."""
        result = self._build_round(failed=False)
        history = [*self._history, replace(result, failed=bool(result.failures))]
        return restart.RoundSummary(
            result.verdict.root_cause, restart.find_newest_step(history), self._restart_delay_s(history)
        )

    def before_round(self, *, failed: bool, reason: str = "") -> None:
        """Record the round that ended, and end the job for failures that this node can judge alone.

        Args:
            failed: whether workers of this node failed.
            reason: what other nodes did, if that ended the round.

        Raises:
            JobFailedError: the failure is deterministic.
            NodeExcludedError: no worker can be started on this node.

        """
        self.on_workers_dead()
        # Another node's failure may have ended the round before this node noticed its own.
        result = self._build_round(failed=failed)
        result = replace(result, failed=failed or bool(result.failures))
        self._history.append(result)
        root_cause = result.verdict.root_cause
        self._last_verdict = result.verdict
        self._pending_traceback = self._find_traceback(root_cause)
        for failure in result.failures:
            if failure.kind == failure_classification.STUCK:
                self._leave_job(
                    f"{describe_failure(failure)}. No worker can be started beside it: repair or reboot "
                    "this node."
                )
        self._restart_logged = False
        if not result.failed:
            self._restart_text = f"{reason or 'nodes have joined or left'}; restarting."
            self._wait_log.add("restart", self._restart_text)
            return
        if root_cause is not None and root_cause.is_deterministic:
            decision = restart.decide_restart(self._history, self._limits)
            if decision.ends_job:
                self._give_up(decision.reason)
        plan = "; restarting" if self._will_continue(self._history) else ""
        delay_s = self._restart_delay_s(self._history)
        if delay_s:
            plan += f" in {delay_s:g} s, because training made no progress"
        self._restart_text = f"{describe_failure(root_cause)}{plan}."
        if root_cause is not None and root_cause.is_secondary:
            self._wait_log.add("restart", self._restart_text)  # another node will report the root cause
        else:
            self._restart_logged = True
            logger.warning(self._restart_text)

    def after_rendezvous(self, world: StartWorkers, *, membership_changed: bool = False) -> None:
        """Decide about the last round from all nodes' failures, then begin the next; its workers start now.

        ``membership_changed``: agents have joined or left since the last view.

        Raises:
            JobFailedError: the job is to end.
            NodeExcludedError: this node is to leave the job.

        """
        self._restart_logged |= self._wait_log.end()
        joined = [member for member in world.members if member.node not in self._world.nodes]
        nodes = tuple(member.node for member in world.members)
        lost = [node for node in self._world.nodes if node not in nodes]
        self._world = restart.WorldSummary(nodes, world.newest_step)
        if self._history:
            self._judge_round(world.failures, joined, lost, membership_changed=membership_changed)
            is_cut = any(failure.kind == failure_classification.NETWORK for failure in world.failures)
            if world.rank == 0 and not is_cut and (world.failures or lost):
                # The workers had their time; all ranks resume.
                self._warn_of_no_resume()
        self._round += 1
        self._num_nodes, self.node_rank, self.is_spare = len(world.members), world.rank, False
        self._generation = world.generation
        self._round_offset = file_size(self._events_path)
        # In a container every agent has the same pid, and the page may be on a volume that outlives the pod.
        self._stale_workers = frozenset(record.worker for record in self._read_progress())
        self._round_events.clear()
        if self._memory_monitor is not None:
            self._memory_monitor.reset()
        failed_rounds = sum(result.failed for result in self._history)
        mtbf_s = checkpoint_interval.estimate_mtbf_s(failed_rounds, time.monotonic() - self._started_at)
        # torchelastic passes its environment on to workers.
        os.environ[constants.ENV_MTBF_S] = f"{mtbf_s:.3f}"
        os.environ[constants.ENV_ROUND] = str(self._round)
        os.environ[constants.ENV_GENERATION] = str(world.generation)
        self._event_log.emit(
            "round",
            round=self._round,
            node_rank=world.rank,
            num_nodes=self._num_nodes,
            generation=world.generation,
        )
        logger.debug("generation %d: node %d of %d.", world.generation, world.rank, self._num_nodes)

    def _judge_round(
        self,
        failures: Sequence[Failure],
        joined: Sequence[Incarnation],
        lost: Sequence[str],
        *,
        membership_changed: bool,
    ) -> None:
        result = restart.merge_reported_failures(
            self._history[-1], failures, membership_changed=membership_changed
        )
        self._history[-1] = result
        if failures:
            self._last_verdict = result.verdict
            self._event_log.emit(
                "verdict",
                generation=self._generation,
                root_causes=[asdict(failure) for failure in result.verdict.root_causes],
                secondary_failures=[asdict(failure) for failure in result.verdict.secondary_failures],
            )
        decision = restart.decide_restart(self._history, self._limits, self._world)
        if decision.ends_job:
            self._give_up(decision.reason)
        self._log_restart(result.verdict.root_cause, joined, lost)
        if decision.action is restart.RestartAction.EXCLUDE:
            if decision.node == self._node:
                self._leave_job(decision.reason)
            logger.warning("node %s is excluded: %s", decision.node, decision.reason)
        is_root_cause = any(failure.node == self._node for failure in result.verdict.root_causes)
        if is_root_cause and self._pending_traceback not in {"", self._printed_traceback}:
            self._print_traceback(self._pending_traceback, logging.WARNING)
        self._pending_traceback = ""

    def _log_restart(
        self, root_cause: Failure | None, joined: Sequence[Incarnation], lost: Sequence[str]
    ) -> None:
        """Log why the last round ended, unless this node has logged its own failure as the cause.

        ``lost`` are the nodes of that round that the new view lacks.
        """
        if root_cause is not None and root_cause.node != self._node:
            also_lost = _describe_also_lost(root_cause, lost)
            logger.warning("%s%s; restarting.", describe_failure(root_cause, with_node=True), also_lost)
        elif root_cause is None and joined and not self._restart_logged:
            logger.info("joined: %s; restarting.", format_node_names(joined))
        elif not self._restart_logged:
            logger.info(self._restart_text)

    def _warn_of_no_resume(self) -> None:
        """Warn once if no worker of this node has come out of `er.resume` in any round."""
        if self._has_warned_of_no_resume or any(result.start_step is not None for result in self._history):
            return
        self._has_warned_of_no_resume = True
        logger.warning(
            "the workers ended before er.resume() returned. A script that never calls it starts over at each "
            "restart: call er.resume(...) in it, as docs/getting-started/port-your-script.md shows."
        )

    def _restart_delay_s(self, history: Sequence[restart.RoundResult]) -> float:
        """Return the pause before the next round; 0 unless this node had the root cause and will restart."""
        root_cause = history[-1].verdict.root_cause
        if root_cause is None or root_cause.is_secondary or not self._will_continue(history):
            return 0.0
        return restart.restart_delay_s(history)

    def _will_continue(self, history: Sequence[restart.RoundResult]) -> bool:
        """Return whether the policy restarts this node if no other node reports a failure."""
        decision = restart.decide_restart(history, self._limits, self._world)
        return decision.action is restart.RestartAction.CONTINUE

    def _give_up(self, reason: str) -> NoReturn:
        self._end_reason = f"node {self._node} gave up: {reason}"
        raise JobFailedError(self._end_reason)

    def _leave_job(self, reason: str) -> NoReturn:
        raise NodeExcludedError(f"node {self._node} leaves the job: {reason}")

    # ---- the end of the job ----------------------------------------------------------------------------

    def end_reason(self, *, workers_failed: bool = False) -> str:
        """Return why this node ends the job for all nodes; empty if its workers finished.

        With ``workers_failed`` torchelastic ended because workers failed, without asking for another round.
        """
        if workers_failed and not self._end_reason:
            verdict = self._build_round(failed=True).verdict
            if verdict.root_cause is not None:
                self._last_verdict = verdict
                self._pending_traceback = self._find_traceback(verdict.root_cause)
                self._end_reason = f"node {self._node} gave up: {describe_failure(verdict.root_cause)}."
        return self._end_reason

    def record_failures(self, failures: Sequence[Failure]) -> None:
        """Record the failures that the leader reported with the job's end."""
        if failures:
            self._last_verdict = separate_root_causes(failures)

    def log_failure_summary(self, log_dir: str = "") -> None:
        """Log root cause and secondary failures, print the traceback, and name the files with the details.

        ``log_dir`` is where the user redirects the workers' output; empty if nowhere.
        """
        root_cause = self._last_verdict.root_cause
        if root_cause is None:
            return
        for line in failure_classification.explain_verdict(self._last_verdict):
            logger.error(line)
        if root_cause.node == self._node:
            traceback_text = self._pending_traceback or self._find_traceback(root_cause)
            if traceback_text:
                self._print_traceback(traceback_text, logging.ERROR)
        elif root_cause.kind not in failure_classification.NODE_FAILURE_KINDS and root_cause.type:
            logger.error("the traceback is in the output and in the events of node %s.", root_cause.node)
        places = [f"events in {self._events_path}"]
        hangs = [event for event in self._round_events.read() if event["event"] == "hang"]
        reports = [str(event["report"]) for event in hangs if event.get("report")]
        places += [f"stacks of the hang in {path}" for path in reports[-1:]]
        places += [f"workers' output in {log_dir}"] if log_dir else []
        logger.error("more: %s.", "; ".join(places))

    def _print_traceback(self, traceback_text: str, level: int) -> None:
        if not logger.isEnabledFor(level):
            return
        self._printed_traceback = traceback_text
        with contextlib.suppress(OSError):  # a closed pipe or terminal must not end the job
            print(traceback_text.rstrip("\n"), file=sys.stderr, flush=True)

    def _find_traceback(self, failure: Failure | None) -> str:
        """Return the traceback in a worker's `failure` event; empty if the worker printed it itself."""
        if failure is None or failure.node != self._node:
            return ""
        for event in self._round_events.read():
            if event["event"] == "failure" and event.get("type") == failure.type:
                rank = event.get("rank")
                if (rank is None or rank == failure.rank) and isinstance(event.get("traceback"), str):
                    return str(event["traceback"])
        return ""

    # ---- what a round's workers did --------------------------------------------------------------------

    def _build_round(self, *, failed: bool) -> restart.RoundResult:
        monitor = self._memory_monitor
        result = restart.summarize_round(
            [*self._round_events.read(), *self._read_steps()],
            node=self._node,
            failed=failed,
            num_nodes=self._num_nodes,
            memory_pressure=monitor.read_pressure() if monitor is not None else None,
        )
        unreachable = self.list_unreachable_nodes()
        if unreachable:
            failure = failure_classification.make_network_failure(self._node, unreachable)
            result = replace(result, failures=(failure, *result.failures))
        return result

    def _read_steps(self) -> list[events.Event]:
        """Return this round's steps from the event log and the progress page.

        The page has steps that a full disk kept out of the log.
        """
        logged = [
            event for event in self._read_events(self._round_offset) if event["event"] in {"step", "commit"}
        ]
        own_records = [
            record
            for record in self._read_progress()
            if record.worker not in self._stale_workers
            and (record.worker.agent_pid, record.worker.round) == (os.getpid(), self._round)
        ]
        return [*logged, *({"event": "step", "step": record.step} for record in own_records)]

    def _read_progress(self) -> list[ProgressRecord]:
        return read_records(self._events_path.with_name(constants.PROGRESS_FILE), MAX_LOCAL_RANKS)

    def _read_events(self, offset: int) -> list[events.Event]:
        """Return the node's events from byte ``offset`` on, up to the first read error."""
        found: list[events.Event] = []
        with contextlib.suppress(OSError):
            found.extend(events.read(self._events_path, offset))  # extend keeps what precedes an error
        return found


def _describe_also_lost(root_cause: Failure, lost: Sequence[str]) -> str:
    """Name the lost nodes that the root cause does not name; it counts towards `MAX_LOST_NAMED`."""
    is_node_failure = root_cause.kind in failure_classification.NODE_FAILURE_KINDS
    names = sorted(node for node in lost if not (is_node_failure and node == root_cause.node))
    shown = MAX_LOST_NAMED - is_node_failure
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"; also lost: {', '.join(names[:shown])}{more}" if names else ""
