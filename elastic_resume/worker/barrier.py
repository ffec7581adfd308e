"""The barrier between copying state and changing it: a hook before each ``optimizer.step()``.

Python runs the hook, so it says nothing of parameters that change otherwise: a replayed CUDA graph that
contains the step runs no hook, nor does a function that writes into parameters. So a copy runs in the
background only if the previous step ran the hook; the next step is checked as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch
from torch.optim import Optimizer

from elastic_resume.errors import UsageError

T = TypeVar("T")
UNSEEN = (
    "{} changed although optimizer.step() was not called, for example by a replayed CUDA graph. The snapshot "
    "was discarded; later ones block run.step(). Call optimizer.step() outside CUDA graphs"
)


class Barrier(Generic[T]):
    """Calls ``wait`` before each step of some optimizers, and knows whether it was called."""

    def __init__(self, optimizers: Iterable[Optimizer], wait: Callable[[], None]) -> None:
        """Put the hooks in place."""
        self._wait = wait
        self._hooks = [optimizer.register_step_pre_hook(self._before_step) for optimizer in optimizers]
        self._pid = os.getpid()
        self._step = -1
        self._passed = False  # since the last step boundary
        self._behind: T | None = None
        self.holds = False  # whether the step that ended last has passed it

    @property
    def exists(self) -> bool:
        """Whether there is an optimizer to wait before."""
        return bool(self._hooks)

    def copies(self, what: T) -> None:
        """Note ``what`` is copied while training goes on."""
        self._behind = what

    def end_step(self, step: int) -> T | None:
        """End ``step``; give what was copied during it, if it did not pass the barrier: it may be torn.

        An optimizer's step may rightly be left out, as a GradScaler does after an overflow.
        """
        if step == self._step:  # the second look at an epoch's last step
            return None
        self._step, self.holds, self._passed = step, self._passed, False
        behind, self._behind = self._behind, None
        return None if self.holds else behind

    def close(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del optimizer, args, kwargs
        if os.getpid() != self._pid:
            return
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise UsageError(
                "optimizer.step() is being captured in a CUDA graph: replays of it would change parameters "
                "while er.resume() copies them, since they run no hooks. Capture forward and backward only, "
                "and call optimizer.step() outside of the graph."
            )
        self._passed = True
        self._wait()
