"""Define why a rank stands still: a fact of a failure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from elastic_resume.policy.flight_recorder import Collective


class Activity(Enum):
    """What a rank does instead of a step."""

    ENDED = "ended"
    STOPPED = "stopped"
    """By SIGSTOP."""
    TRACED = "traced"
    """Stopped by a debugger."""
    UNINTERRUPTIBLE = "uninterruptible"
    LAST_STEP_DONE = "last-step-done"
    LEFT_BEHIND = "left-behind"
    """It did not end after the other ranks of its node had ended."""
    HOLDS_GIL = "holds-gil"
    DATA = "data"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    UNKNOWN = "unknown"
    COLLECTIVE = "collective"
    SPLIT_COLLECTIVE = "split-collective"
    """Ranks wait in different collectives, and no side is the larger."""
    SKIPPED_COLLECTIVE = "skipped-collective"
    """It left out a collective that the others wait in, or called one too many."""
    OTHER_NODE = "other-node"
    """It waits with all ranks of its node for another node."""


@dataclass(frozen=True, slots=True)
class Stall:
    """Why a rank stands still, and where in the user's code.

    ``kernel_function`` is where it sleeps. ``collective`` is what it waits in, or called last. ``others``
    wait in ``others_collective``, which it has not called yet, or another instead.
    """

    activity: Activity
    at: str = ""
    cpu_share: float = 0.0
    kernel_function: str = ""
    collective: Collective | None = None
    others: tuple[int, ...] = ()
    others_collective: Collective | None = None
