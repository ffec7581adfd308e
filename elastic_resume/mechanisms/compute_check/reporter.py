"""Keep what compute checks have found on this node, for `status` and metrics."""

from __future__ import annotations

from dataclasses import replace

from elastic_resume.events import Event, get_count
from elastic_resume.mechanisms.compute_check.description import (
    CHECK_EVENT,
    DIFFERENCE_EVENT,
    ComputeCheckStatus,
)
from elastic_resume.mechanisms.mechanism import AgentContext, AgentPart
from elastic_resume.rendezvous.client import RendezvousClient


class ComputeCheckReporter(AgentPart):
    """Knows the newest check of this node's workers."""

    def __init__(self, context: AgentContext) -> None:
        del context
        self._status: ComputeCheckStatus | None = None

    def observe(self, event: Event) -> None:
        """Note a check, or a rank of this node that was named."""
        status = self._status or ComputeCheckStatus(0, is_equal=False)
        if event["event"] == CHECK_EVENT:
            is_equal = event.get("is_equal") is True
            self._status = replace(status, step=get_count(event, "step") or 0, is_equal=is_equal)
        elif event["event"] == DIFFERENCE_EVENT:
            is_named = event.get("rank") is not None
            step = get_count(event, "step") or 0
            self._status = ComputeCheckStatus(step, is_equal=False, wrong=status.wrong + is_named)

    def update(self, client: RendezvousClient) -> ComputeCheckStatus | None:
        """Return the newest check; None before the first."""
        del client
        return self._status
