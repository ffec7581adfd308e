"""Give one rank the notice at the agreed step boundary, and hold it there while that is not agreed yet."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from elastic_resume import constants, grace
from elastic_resume.errors import ElasticResumeError
from elastic_resume.mechanisms.mechanism import StepObserver, WorkerContext
from elastic_resume.mechanisms.preemption.judge import Action, decide_at_boundary, is_end_due
from elastic_resume.mechanisms.preemption.notice import Preemption
from elastic_resume.mechanisms.preemption.notice_page import NoticePage

STEP_WEIGHT = 0.2
"""Of the newest step in the mean."""


def observe(context: WorkerContext) -> BoundaryObserver | None:
    """Open the agent's page; None without an agent of this worker."""
    path, generation = (
        os.environ.get(name, "") for name in (constants.ENV_NOTICE_PAGE, constants.ENV_GENERATION)
    )
    if not path.startswith(f"/proc/{os.environ.get(constants.ENV_AGENT_PID)}/") or not generation.isdigit():
        return None
    try:
        page = NoticePage.open(path)
    except (OSError, ValueError):  # the agent has ended, and so will this worker
        return None
    return BoundaryObserver(page, context, int(generation))


class BoundaryObserver(StepObserver):
    """Counts the step boundaries of one rank, in one generation."""

    def __init__(self, page: NoticePage, context: WorkerContext, generation: int) -> None:
        """``generation`` is that of the view."""
        self._page, self._local_rank, self._generation = page, context.local_rank, generation
        self._emit = context.emit
        self._count = self._limit = 0
        self._step_s, self._ended_at = 0.0, time.monotonic()
        self._held_since: float | None = None
        self._is_over = False  # no notice comes any more
        self._preemption: Preemption | None = None
        page.join(self._local_rank, generation)

    def ask(self) -> None:
        """Let the agents know that a script asks for notices."""
        self._page.use(self._local_rank)

    def end_step(self, step: int) -> None:
        """Count this boundary."""
        del step
        now = time.monotonic()
        last_s, self._ended_at = now - self._ended_at, now
        self._step_s = self._step_s + STEP_WEIGHT * (last_s - self._step_s) if self._step_s else last_s
        self._count += 1
        is_noticed = self._page.count(self._local_rank, self._count, int(self._step_s * 1e6))
        self._held_since = None
        if is_noticed and not self._is_over:
            self._look(now)

    def is_held(self) -> bool:
        """Return whether this rank waits for the agreed boundary.

        Raises:
            ElasticResumeError: it has waited so long that something is wrong. If it went on, it would have
                another value than ranks that know the boundary.

        """
        if self._held_since is None:
            return False
        self._look(time.monotonic())
        return self._held_since is not None

    def _look(self, now: float) -> None:
        action, self._limit = decide_at_boundary(
            self._count, self._limit, self._page.read_agent(), self._generation
        )
        if action is Action.WAIT:
            self._held_since = self._held_since or now
            if now >= self._held_since + self._page.held_limit_s:
                raise _explain_wait(now - self._held_since)
        elif action is Action.DROP:
            self._is_over = True
        elif action is Action.TAKE:
            self._is_over = True
            self._take()
        if self._is_over or action is Action.GO:
            self._held_since = None

    def _take(self) -> None:
        notice: dict[str, Any] = json.loads(self._page.read_text())
        self._preemption = Preemption(**notice)
        if self._local_rank == 0:
            self._emit("preemption", **notice)

    def find_notice(self) -> Preemption | None:
        """Return the notice, from the agreed boundary on."""
        return self._preemption

    def may_end(self, requested_at: float) -> bool:
        """Return whether a drained worker ends here, or first takes the notice."""
        left_s = grace.find_left_s(requested_at) or 0.0
        return is_end_due(
            self._page.read_agent(),
            self._generation,
            self._count,
            step_s=self._step_s,
            waited_s=time.monotonic() - requested_at,
            left_s=left_s,
        )

    def close(self) -> None:
        """Unmap the page."""
        self._page.close()


def _explain_wait(waited_s: float) -> ElasticResumeError:
    error = ElasticResumeError(
        f"this rank has waited {waited_s:.0f} s for the step at which all ranks get a preemption notice, and "
        "its agent has neither passed it on nor withdrawn it; all ranks restart, so that none goes on "
        "without a notice that others have. Look at this node's agent and its machine if it happens again."
    )
    error.is_deterministic = False
    return error
