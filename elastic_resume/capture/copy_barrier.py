"""The barrier between copying state and changing it: a hook before each ``optimizer.step()``.

Python runs the hook, so it says nothing of parameters that change otherwise: a replayed CUDA graph that
contains the step runs no hook, nor does a function that writes into parameters. So a copy runs in the
background only if the hooks of all optimizers ran in the previous step, since one of two may be in a graph.
The next step is checked as well.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from elastic_resume.errors import UsageError

T = TypeVar("T")
UNHOOKED_CHANGE_MESSAGE = (
    "{} changed although optimizer.step() was not called, for example by a replayed CUDA graph. The snapshot "
    "was discarded; later ones block run.step(). Call optimizer.step() outside CUDA graphs"
)


class CopyBarrier(Generic[T]):
    """Calls ``wait`` before each step of some optimizers, and knows whether it was called."""

    def __init__(self, optimizers: Iterable[Optimizer], wait_for_copy: Callable[[], None]) -> None:
        """Put the hooks in place."""
        self._wait_for_copy = wait_for_copy
        self._optimizers = list(optimizers)
        self._hooks = [one.register_step_pre_hook(self._before_step) for one in self._optimizers]
        self._pid = os.getpid()
        self._step = -1
        self._passed_ids: set[int] = set()  # ids of optimizers, since the last step boundary
        self._background_copy: T | None = None
        self.skipped_optimizers: list[Optimizer] = []  # that have not passed it in the step that ended last
        self.all_hooks_ran = False  # whether all have

    @property
    def unprotected_addresses(self) -> Collection[int] | None:
        """Addresses of what only the `missing` optimizers change; None where all of them are missing."""
        if len(self.skipped_optimizers) == len(self._optimizers):
            return None
        others = [one for one in self._optimizers if one not in self.skipped_optimizers]
        return (
            set[int]()
            .union(*map(_collect_addresses, self.skipped_optimizers))
            .difference(*map(_collect_addresses, others))
        )

    @property
    def has_hooks(self) -> bool:
        """Whether there is an optimizer to wait before."""
        return bool(self._hooks)

    def set_background_copy(self, copy: T) -> None:
        """Note ``what`` is copied while training goes on."""
        self._background_copy = copy

    def end_step(self, step: int) -> T | None:
        """End ``step``; give what was copied during it, if an optimizer is `missing`: it may be torn.

        An optimizer's step may rightly be left out, as a GradScaler does after an overflow.
        """
        if step == self._step:  # the second look at an epoch's last step
            return None
        self._step = step
        self.skipped_optimizers = [one for one in self._optimizers if id(one) not in self._passed_ids]
        self.all_hooks_ran = self.has_hooks and not self.skipped_optimizers
        self._passed_ids.clear()
        behind, self._background_copy = self._background_copy, None
        return None if self.all_hooks_ran else behind

    def close(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._optimizers = [], []

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if os.getpid() != self._pid:
            return
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise UsageError(
                "optimizer.step() is being captured in a CUDA graph: replays of it would change parameters "
                "while er.resume() copies them, since they run no hooks. Capture forward and backward only, "
                "and call optimizer.step() outside of the graph."
            )
        self._passed_ids.add(id(optimizer))
        self._wait_for_copy()


def _collect_addresses(optimizer: Optimizer) -> set[int]:
    """Give where an optimizer's parameters and state lie."""
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return {tensor.data_ptr() for tensor in chain(parameters, _iter_tensors(optimizer.state))}


def _iter_tensors(value: Any) -> Iterator[Tensor]:
    """Find tensors, in containers too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple, deque)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _iter_tensors(item)
