"""Decide when a node drains ahead of its job's time limit, and with which exit code its agent ends.

`EXIT_REQUEUE` (75) requests that the agent's launcher run the job again. Under Slurm that is the batch
script, which reads the exit code of srun. No agent requests a requeue itself. Agents query Slurm only for the
job's time limit.
"""

from __future__ import annotations

from enum import Enum

from elastic_resume import constants

# Time to deliver signals and to take leave of the leader.
SIGNAL_SLACK_S = 5.0


class AgentEnd(Enum):
    """How an agent ends, as far as its exit code depends on it."""

    OTHER = "other"  # the job ended here, or was stopped by a signal whose sender decides about a restart
    JOB_DRAINED = "job drained"  # the time limit of all nodes is near
    NODE_LEFT = "node left"  # unfit, or about to be stopped; other nodes may continue


def decide_exit_code(end: AgentEnd, code: int, *, speaks_for_job: bool) -> int:
    """Return the exit code of an agent that would otherwise end with ``code``.

    srun returns the highest exit code of all nodes, even of a node that left long ago. With 75 the batch
    script would requeue a job that the other nodes have finished. So a node that leaves ends with 0, unless
    it speaks for the job: it has rank 0 and may be the last one, or srun merges its code with no other.
    """
    if end is AgentEnd.OTHER:
        return code
    return constants.EXIT_REQUEUE if speaks_for_job or end is AgentEnd.JOB_DRAINED else constants.EXIT_SUCCESS


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
