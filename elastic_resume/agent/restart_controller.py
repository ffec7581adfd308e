"""Decide on one node, after each generation's workers end, whether to restart, exclude this node or give up.

The controller keeps the history of generations, asks `policy.restart` for a decision, and emits what was
decided; `restart_log` logs it::

    workers run --(a worker fails, or the view ends)--> workers are dead
        report_generation  this node's failure is reported to the leader
        end_generation     ends the job for failures that need no other node's view
        (rendezvous)       the leader distributes the failures of all nodes
        start_generation   decides from the failures of all nodes; the next generation begins

Every node decides from the same failures, because each reports its own before it joins the next rendezvous.
How workers ended is read from memory (`FailureEvents`), and their steps from a page that the kernel keeps in
memory, so a full or failing disk changes no decision.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from elastic_resume import events
from elastic_resume.agent.failure_evidence import FailureEvents, MemoryMonitor
from elastic_resume.agent.restart_log import RestartLog
from elastic_resume.agent.workers.lease_page import LeasePage
from elastic_resume.errors import JobFailedError, NodeExcludedError
from elastic_resume.mechanisms.mechanism import AgentPart
from elastic_resume.policy import (
    checkpoint_interval,
    failure_classification,
    reporting_node,
    restart,
)
from elastic_resume.policy.failure_classification import Failure, FailureVerdict, separate_root_causes
from elastic_resume.policy.reasons import to_json
from elastic_resume.policy.restart import Continue, Exclude, GaveUp, GenerationResult, GiveUp
from elastic_resume.policy.wording import describe, format_node_names
from elastic_resume.rendezvous.core.interface import EmitEvent, EndJob, StartWorkers, StopReason
from elastic_resume.slots.progress_page import MAX_LOCAL_RANKS, read_own_records

logger = logging.getLogger(__name__)


class RestartController:
    """The history of one node's generations, and the decisions that follow from it."""

    def __init__(
        self,
        event_log: events.EventLog,
        lease_page: LeasePage,
        evidence: FailureEvents,
        memory_monitor: MemoryMonitor,
        *,
        node: str,
        limits: restart.RestartLimits,
    ) -> None:
        self.on_workers_dead: Callable[[], object] = lambda: None  # called when a generation's workers ended
        self.parts: Collection[AgentPart] = ()  # of the mechanisms
        self.is_spare = False  # a view runs without this node
        self.job_failure: GaveUp | None = None  # why this node ends the job for all nodes
        self.log = RestartLog(node, evidence)
        self._started_at = time.monotonic()
        self._node = node
        self._event_log = event_log
        self._lease_page = lease_page
        self._evidence = evidence
        self._limits = limits
        self._memory_monitor = memory_monitor
        self._history: tuple[GenerationResult, ...] = ()
        self._own_failures = 0  # generations that workers of this node ended by a failure
        self._view: StartWorkers | None = None  # the newest with this node
        self._end: EndJob | None = None  # how the job ended on all nodes
        self._view_end: StopReason | None = None  # why other nodes ended it
        self._last_verdict = FailureVerdict()  # about the last generation in which any node failed

    @property
    def generation(self) -> int:
        """The generation whose workers run, or ran last; 0 before the first."""
        return self._view.generation if self._view else 0

    @property
    def node_rank(self) -> int | None:
        """This node's rank in the newest view; None before the first view."""
        return self._view.rank if self._view else None

    @property
    def mtbf_s(self) -> float:
        """The estimated mean time between failures."""
        failed = sum(result.failed for result in self._history)
        return checkpoint_interval.estimate_mtbf_s(failed, time.monotonic() - self._started_at)

    def read_evidence(self) -> list[events.Event]:
        """Return the events of this generation by which this agent decides. From any thread."""
        return self._evidence.read()

    def has_resumed(self) -> bool:
        """Return whether a worker of this generation has come out of `er.resume`. From any thread."""
        return any(event["event"] == "worker-start" for event in self.read_evidence())

    def has_finished_a_step(self) -> bool:
        """Return whether this node has finished a step since its agent started."""
        return any(result.finished_a_step for result in (*self._history, self._observe()))

    def on_rendezvous_event(self, event: EmitEvent) -> None:
        """Emit an event of the rendezvous, and log it if it concerns people."""
        fields = {"generation": event.generation} if event.generation else {}
        text = self.log.log_rendezvous_event(event)
        self._event_log.emit(
            "rendezvous", what=event.kind, reason=to_json(event.reason), message=text, **fields
        )
        if event.kind == "spare":
            self.is_spare = True

    def revoke_grace(self) -> None:
        """Let supervisors kill this generation's workers without grace when torchelastic stops them."""
        self._lease_page.revoke_grace(self.generation)

    def begin_stop(self, cause: str) -> None:
        """Tell the mechanisms why this agent is being stopped. From any thread."""
        for part in self.parts:
            part.begin_stop(cause)

    # ---- between two generations -----------------------------------------------------------------------

    def report_generation(self) -> restart.GenerationReport:
        """Summarize the generation that ended, for the other nodes; its workers are dead."""
        result = self._observe()
        history = (*self._history, result)
        return restart.GenerationReport(
            result.verdict.root_cause, restart.find_newest_step(history), self._restart_delay_s(history)
        )

    def end_generation(self, view_end: StopReason | None) -> None:
        """Record the generation that ended, and end the job for failures that this node can judge alone.

        ``view_end`` says why other nodes ended it; None if workers of this node failed.

        Raises:
            JobFailedError: the failure is deterministic.
            NodeExcludedError: no worker can be started on this node.

        """
        self.on_workers_dead()
        self.log.stop_watching()  # the evidence of the next generation says nothing about this one
        # Another node's failure may have ended the generation before this node noticed its own.
        result = self._observe(failed=view_end is None)
        self._history = (*self._history, result)
        self._view_end, self._last_verdict = view_end, result.verdict
        root_cause = result.verdict.root_cause
        decision: restart.RestartDecision = self._decide_own_exclusion(result.failures)
        self._own_failures += view_end is None and result.failed
        if isinstance(decision, Continue) and root_cause is not None and root_cause.is_deterministic:
            decision = restart.decide_restart(self._history, self._limits)
        if isinstance(decision, Continue) and self._own_failures > self._limits.max_restarts:
            failure = root_cause or Failure(failure_classification.EXIT, self._node, None)
            decision = GiveUp(restart.RestartsExhausted(failure))
        if not isinstance(decision, Continue):
            self._emit_verdict(self.generation, None, decision)
            self._carry_out(decision)
        self.log.log_not_parked()
        self.log.log_refused_processes()
        if result.failures or result.failed:
            delay_s = self._restart_delay_s(self._history)
            self.log.log_failure(root_cause, restarts=self._will_continue(self._history), delay_s=delay_s)
        else:
            self.log.log_view_end(view_end)

    def start_generation(self, view: StartWorkers, *, membership_changed: bool = False) -> None:
        """Decide about the last generation from all nodes' failures, then begin the next.

        ``membership_changed``: agents have joined or left since the last view.

        Raises:
            JobFailedError: the job is to end.
            NodeExcludedError: this node is to leave the job.

        """
        was_spare = self.is_spare
        former, self._view, self.is_spare = self._view, view, False
        if former is None:
            self.log.end_wait()
        else:
            self._judge_generation(former, view, membership_changed=membership_changed, was_spare=was_spare)
        # Nothing has asked before the first start, so that this node joins without waiting for a driver.
        self._carry_out(self._decide_own_exclusion())
        self._evidence.clear()
        self._memory_monitor.reset()
        self._event_log.emit(
            "generation-start",
            generation=view.generation,
            node_rank=view.rank,
            num_nodes=len(view.members),
            begins_job=not (former or was_spare or view.newest_step or view.failures),
        )
        self.log.log_arguments(view.arguments)
        if view.rank == 0 and not self._has_ever_resumed():
            self.log.watch_for_resume(self.has_resumed)
        logger.debug("generation %d: node %d of %d.", view.generation, view.rank, len(view.members))

    def _judge_generation(
        self, former: StartWorkers, view: StartWorkers, *, membership_changed: bool, was_spare: bool
    ) -> None:
        result = restart.merge_reported_failures(
            self._history[-1], view.failures, membership_changed=membership_changed
        )
        self._history = (*self._history[:-1], result)
        if view.failures:
            self._last_verdict = result.verdict
        nodes, former_nodes = _list_nodes(view), _list_nodes(former)
        joined = [node for node in nodes if node not in former_nodes]
        lost = [node for node in former_nodes if node not in {*nodes, *view.preparing_nodes}]
        decision = restart.decide_restart(self._history, self._limits, self._world)
        ends_here = isinstance(decision, GiveUp) or self._leaves(decision)
        self._emit_verdict(
            former.generation,
            None if ends_here else view.generation,
            decision,
            joined,
            lost,
            # A spare was not in the view before.
            speaks_for_job=not was_spare and reporting_node.reports_restart(self._node, nodes, former_nodes),
        )
        if not isinstance(decision, GiveUp):
            self.log.log_restart(result.verdict, decision, joined, lost, view.preparing_nodes)
        self._carry_out(decision)
        # The workers had their time, since all ranks resume. One that was killed may have been importing.
        root_cause = result.verdict.root_cause
        ended_itself = root_cause is not None and root_cause.kind in {
            failure_classification.EXCEPTION,
            failure_classification.EXIT,
        }
        if view.rank == 0 and not self._has_ever_resumed() and ended_itself:
            self.log.warn_of_no_resume("the workers ended before er.resume() returned")

    def _has_ever_resumed(self) -> bool:
        return any(result.start_step is not None for result in self._history)

    def _emit_verdict(
        self,
        generation: int,
        next_generation: int | None,
        decision: restart.RestartDecision,
        joined: Sequence[str] = (),
        lost: Sequence[str] = (),
        *,
        speaks_for_job: bool = False,
    ) -> None:
        verdict = self._history[-1].verdict
        self._event_log.emit(
            "verdict",
            generation=generation,
            next_generation=next_generation,
            reason=to_json(self._view_end),
            joined=list(joined),
            lost=list(lost),
            root_causes=to_json(verdict.root_causes),
            secondary_failures=to_json(verdict.secondary_failures),
            decision=to_json(decision),
            speaks_for_job=speaks_for_job,
        )

    def _decide_own_exclusion(self, failures: tuple[Failure, ...] = ()) -> Continue | Exclude:
        faults = (fault for part in self.parts for fault in part.find_faults())
        return restart.decide_own_exclusion(self._node, itertools.chain(failures, faults))

    def _leaves(self, decision: restart.RestartDecision) -> bool:
        return isinstance(decision, Exclude) and decision.node == self._node

    def _carry_out(self, decision: restart.RestartDecision) -> None:
        """Give up or leave, if that is the decision."""
        if isinstance(decision, GiveUp):
            self.job_failure = GaveUp(self._node, decision.reason)
            raise JobFailedError(describe(self.job_failure), reason=self.job_failure)
        if self._leaves(decision):
            raise NodeExcludedError(
                f"node {self._node} leaves the job: {describe(decision)}", reason=decision
            )

    def _restart_delay_s(self, history: Sequence[GenerationResult]) -> float:
        """Return the pause before the next start; 0 unless this node had the root cause and will restart."""
        if not history[-1].verdict.is_certain or not self._will_continue(history):
            return 0.0
        return restart.restart_delay_s(history)

    def _will_continue(self, history: Sequence[GenerationResult]) -> bool:
        """Return whether the policy restarts this node if no other node reports a failure."""
        return isinstance(restart.decide_restart(history, self._limits, self._world), Continue)

    @property
    def _world(self) -> restart.WorldSummary:
        view = self._view
        if view is None:
            return restart.WorldSummary()
        return restart.WorldSummary(_list_nodes(view), view.newest_step, view.finished_nodes)

    def limit_last_step(self, view: StartWorkers) -> str:
        """Return `constants.ENV_LAST_STEP`: the last step that this view may take, if nodes have finished.

        It may recompute what they had finished. Too few nodes take no step: the ranks' samples would differ.
        """
        if not view.finished_nodes:
            return ""
        is_enough = len(view.members) >= self._limits.min_nodes
        if is_enough and not view.newest_step:
            return ""  # agents that have all started again do not know how far training was
        # All ranks finish a step together, but one of them may be counted before the others.
        last_step = view.newest_step + 1 if is_enough else 0
        return f"{last_step} {format_node_names(view.finished_nodes)}"

    # ---- the end of the job ----------------------------------------------------------------------------

    def fail_after_last_restart(self, failure: Failure) -> GaveUp:
        """Return why this node ends the job: torchelastic has given up after its worker's ``failure``.

        Raises:
            NodeExcludedError: a GPU of this node is broken, so only this node leaves.

        """
        if self.job_failure is None:
            verdict = self._observe(failed=True).verdict
            if verdict.root_cause is not None and verdict.root_cause.kind == failure_classification.GPU:
                self._carry_out(Exclude(self._node, restart.GpuBroken(verdict.root_cause)))
            self._last_verdict = verdict if verdict.root_cause else FailureVerdict((failure,))
            self.job_failure = GaveUp(self._node, restart.RestartsExhausted(verdict.root_cause or failure))
        return self.job_failure

    def record_end(self, end: EndJob | None) -> None:
        """Record how the job ended, with the failures that the leader reported; None if it has not."""
        self._end = end
        if end is not None and end.failures:
            self._last_verdict = separate_root_causes(end.failures)

    def speaks_for_job(self, outcome: str) -> bool:
        """Return whether this node reports the end of the job; ``outcome`` is that of its agent."""
        members = _list_nodes(self._view) if self._view and not self.is_spare else ()
        if self._end is None and outcome == "signalled":
            return reporting_node.reports_stop(self._node, members)
        return reporting_node.reports_end(self._node, members, self._end.reason if self._end else None)

    def log_failure_summary(self, log_dir: str) -> None:
        """Log what ended the job; ``log_dir`` is where the user redirects the workers' output."""
        self.log.log_summary(self._last_verdict, self._event_log.path, log_dir)

    # ---- what a generation's workers did ---------------------------------------------------------------

    def _observe(self, *, failed: bool = False) -> GenerationResult:
        """Return the outcome of the generation as this node sees it; it ``failed`` with any failure, too."""
        result = restart.summarize_generation(
            self._evidence.read(),
            node=self._node,
            newest_step=self._read_newest_step(),
            num_nodes=len(self._view.members) if self._view else 1,
            memory_pressure=self._memory_monitor.read_pressure(),
        )
        found = (failure for part in self.parts for failure in part.find_failures())
        result = replace(result, failures=(*found, *result.failures))
        failed = (failed or bool(result.failures)) and not restart.is_way_back(result.failures)
        return replace(result, failed=failed)

    def _read_newest_step(self) -> int | None:
        """Return the newest step of this generation's workers, from the progress page.

        The event log would have to be read whole, which takes seconds after a day, and misses what a full
        disk has refused.
        """
        # In a container every agent has the same pid, but no agent of this node reuses a generation.
        records = read_own_records(self._event_log.path.parent, MAX_LOCAL_RANKS)
        own = (record.step for record in records if record.worker.assigned_generation == self.generation)
        return max(own, default=None)


def _list_nodes(view: StartWorkers) -> tuple[str, ...]:
    return tuple(member.node for member in view.members)
