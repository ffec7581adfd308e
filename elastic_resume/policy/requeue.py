"""Decide whether a job that has ended is queued again, and which node asks the scheduler.

Three errors must be prevented:

1. No node requeues an unfinished job.
2. A job is requeued that was cancelled or that fails every time.
3. A requeue stops a job that still runs on other nodes.

Slurm 22.05 behaves as follows. A job that ends by itself within the grace of a preemption has failed and is
not queued again, even with PreemptMode=REQUEUE. A requeue request brings a cancelled job back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from elastic_resume import constants
from elastic_resume.events import Event

# After so many starts in a row without a new step the job is not requeued any more.
MAX_STARTS_WITHOUT_PROGRESS = 3
# Time to deliver signals, to take leave of the leader, and to send the request.
SIGNAL_SLACK_S = 5.0
SCHEDULER_ENDS_JOB = "the scheduler has been told to end or to requeue it"


class AgentEnd(Enum):
    """How this agent ended."""

    DONE = "done"
    DETERMINISTIC_FAILURE = "at fault"
    NO_QUORUM = "lost"  # this node can form no world any more; other nodes may continue
    NODE_UNFIT = "left"  # this node is unfit; the others continue
    INTERRUPTED = "interrupted"  # SIGINT, SIGHUP, SIGQUIT: a person at a keyboard
    TERMINATED = "terminated"  # SIGTERM, whose sender is unknown
    PREEMPTION_NOTICE = "notice"  # a signal announced the end ahead of time
    DEADLINE = "deadline"  # the time limit is near


class TerminationReason(Enum):
    """Why the processes of a job got SIGTERM, according to the scheduler."""

    UNKNOWN = "nothing"  # the scheduler cannot be asked, or does not answer
    RUNNING = "running"  # the scheduler has no reason to end the job
    PREEMPTED = "preempted"
    TIME_LIMIT = "time limit"
    JOB_ENDING = "ending"  # cancelled, or requeued by somebody else


@dataclass(frozen=True)
class RequeueFacts:
    """The facts for the decision.

    ``starts_without_progress`` counts the starts in a row, this one included, that brought no new step on
    this node's disk. ``is_single_node``: the scheduler's job is this node alone. ``is_requester``: this node
    speaks for all nodes. ``only_this_node_ends``: only this node was told to end. ``other_requeuer`` names
    another program that requeues.
    """

    end: AgentEnd
    termination_reason: TerminationReason = TerminationReason.UNKNOWN
    scheduler: str = "slurm"
    starts_without_progress: int = 0
    is_single_node: bool = False
    is_requester: bool = True
    only_this_node_ends: bool = False
    other_requeuer: str = ""
    has_scontrol: bool = True
    is_disabled: bool = False


def drain_margin_s(grace_s: float, commit_s: float, time_to_limit_s: float) -> float:
    """Return how long before its time limit a node is drained.

    Each node of a job computes it, and all should start together. Commit times differ a little between them,
    so the result is rounded up to the next of 10, 20, 40, ... seconds.

    Args:
        grace_s: grace of a worker.
        commit_s: time of a commit; 0 if there has been none.
        time_to_limit_s: from this agent's start to the limit; training gets at least half of it.
    """
    commit = 10.0
    while commit < min(2 * commit_s, 3600.0):  # twice: at the end all nodes may write to one disk
        commit *= 2
    return min(grace_s + commit + SIGNAL_SLACK_S, max(0.0, time_to_limit_s) // 2)


def count_starts_without_progress(events: Iterable[Event], restarts: int) -> int:
    """Count the starts in a row, the last included, that finished no new step on this node.

    Args:
        events: all events of the node's log.
        restarts: how often the scheduler has restarted the job. Earlier starts belong to other jobs.
    """
    idle = 0
    start: int | None = None
    for event in events:
        step = event.get("step")
        if event["event"] == "agent-start":
            idle, start = idle + 1, None
        elif event["event"] == "worker-start" and isinstance(step, int):
            start = step if start is None else min(start, step)
        elif event["event"] in {"step", "commit"} and isinstance(step, int) and start is not None:
            idle = 0 if step > start else idle
    return min(idle, restarts + 1)


class RequeueAction(Enum):
    """The possible actions; ``EXIT_CODE`` leaves the requeue to the reader of the exit code."""

    REQUEUE = "requeue"
    EXIT_CODE = "exit code"
    NODE_DONE = "over"  # the part of this node is over; the other nodes continue
    LEAVE_ALONE = "leave alone"


@dataclass(frozen=True)
class RequeueDecision:
    """The action and its reason, as the end of a sentence."""

    action: RequeueAction
    reason: str

    def exit_code(self, default: int) -> int:
        """Return the exit code of an agent that would otherwise end with ``default``."""
        if self.action is RequeueAction.NODE_DONE:
            return constants.EXIT_SUCCESS
        return default if self.action is RequeueAction.LEAVE_ALONE else constants.EXIT_REQUEUE


def decide_requeue(facts: RequeueFacts) -> RequeueDecision:
    """Decide about one end of one agent."""
    for action, find_reason in (
        (RequeueAction.NODE_DONE, _why_only_this_node_is_done),
        (RequeueAction.LEAVE_ALONE, _why_not_again),
        (RequeueAction.EXIT_CODE, _why_others_requeue),
    ):
        reason = find_reason(facts)
        if reason is not None:
            return RequeueDecision(action, reason)
    return RequeueDecision(RequeueAction.REQUEUE, _describe_cause(facts))


def _why_only_this_node_is_done(facts: RequeueFacts) -> str | None:
    """Return the reason if this node's end says nothing about the job.

    srun returns the highest exit code of all nodes, even of a node that left long ago. With 75 it would queue
    a job again that its other nodes have finished. A node that speaks for all is excepted: it may be the last
    one.
    """
    if facts.scheduler != "slurm" or facts.is_single_node or facts.is_requester:
        return None
    if facts.termination_reason is TerminationReason.JOB_ENDING:
        return None
    has_left = facts.end is AgentEnd.NODE_UNFIT
    if has_left or (facts.end is AgentEnd.PREEMPTION_NOTICE and facts.only_this_node_ends):
        return "the other nodes of the job continue"
    if facts.end is AgentEnd.PREEMPTION_NOTICE:
        return "the node of rank 0 asks for the requeue, if all were told"
    return None


def _why_not_again(facts: RequeueFacts) -> str | None:
    """Return the reason if the job must not run again, as far as this node knows."""
    plain = {
        AgentEnd.DONE: "the job is done",
        AgentEnd.DETERMINISTIC_FAILURE: "the job is at fault and would end like this again",
        AgentEnd.INTERRUPTED: "somebody interrupted it",
    }
    if facts.end in plain:
        return plain[facts.end]
    if facts.termination_reason is TerminationReason.JOB_ENDING:
        return SCHEDULER_ENDS_JOB
    explained = facts.termination_reason in {TerminationReason.PREEMPTED, TerminationReason.TIME_LIMIT}
    if facts.end is AgentEnd.TERMINATED and not explained:
        if facts.scheduler == "slurm" and not (facts.is_requester or facts.is_single_node):
            return "the node of rank 0 asks Slurm why SIGTERM came"
        return "the sender of SIGTERM decides about a restart"
    others_go_on = facts.end is AgentEnd.NODE_UNFIT and not facts.is_single_node
    if facts.starts_without_progress > MAX_STARTS_WITHOUT_PROGRESS and not others_go_on:
        return f"it has lived {facts.starts_without_progress} times without a new step"
    return None


def _why_others_requeue(facts: RequeueFacts) -> str | None:
    """Return the reason if another node or program asks the scheduler."""
    if facts.end in {AgentEnd.NO_QUORUM, AgentEnd.NODE_UNFIT} and not facts.is_single_node:
        return "other nodes of the job may continue"
    if facts.other_requeuer:
        return f"{facts.other_requeuer} requeues it"
    if facts.is_disabled:
        return "requeue is off (ELASTIC_RESUME_REQUEUE)"
    if facts.scheduler != "slurm":
        return f"exit code {constants.EXIT_REQUEUE} asks the launcher to run the job again"
    if not facts.is_single_node and facts.only_this_node_ends:
        return "the other nodes of the job continue"
    if not facts.is_single_node and not facts.is_requester:
        return "the node of rank 0 asks for the requeue"
    if not facts.has_scontrol:
        return (
            "there is no scontrol here: the batch script has to requeue the job, as exit code "
            f"{constants.EXIT_REQUEUE} tells it"
        )
    return None


def _describe_cause(facts: RequeueFacts) -> str:
    if facts.end is AgentEnd.TERMINATED:
        is_preempted = facts.termination_reason is TerminationReason.PREEMPTED
        return "it is preempted" if is_preempted else "its time limit is reached"
    return {
        AgentEnd.PREEMPTION_NOTICE: "a signal told ahead of time that it will end",
        AgentEnd.DEADLINE: "its time limit is near",
        AgentEnd.NO_QUORUM: "no world can be formed any more",
        AgentEnd.NODE_UNFIT: "this node left",
    }[facts.end]
