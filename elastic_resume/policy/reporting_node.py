"""Choose the node that reports an event of the whole job, so that its user reads of it once.

Each node decides for itself, from what all nodes know: the members of a view in rank order, and the job's
end. So no message is needed, and the loss of any node, the first one too, is reported by the next.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_resume.policy.reasons import JobFinished
from elastic_resume.policy.restart import GaveUp, JobFailure


def reports_restart(node: str, members: Sequence[str], former_members: Sequence[str]) -> bool:
    """Return whether ``node`` is the first member of a view that was in the one before, too."""
    return next((member for member in members if member in former_members), None) == node


def reports_end(node: str, members: Sequence[str], end: JobFinished | JobFailure | None) -> bool:
    """Return whether ``node`` reports how the job ended.

    ``members`` are those of the last view; none if this node was not in it. ``end`` is the same on all
    nodes; None: only this node's part has ended. Then it reports that itself, unless a signal has stopped it:
    see `reports_stop`.
    """
    if end is None:
        return True
    if isinstance(end, GaveUp):
        return end.node == node
    absent = end.unfinished if isinstance(end, JobFinished) else ()
    return next((member for member in members if member not in absent), None) == node


def reports_stop(node: str, members: Sequence[str]) -> bool:
    """Return whether ``node`` reports that a signal has stopped it: whoever ends a job stops each node."""
    return node in members[:1]
