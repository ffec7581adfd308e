"""How long this rank works by itself at each step, waiting for nobody: what tells a slow one from the others.

From the end of an optimizer's step, over ``run.step()``, what the script does between two steps, the data and
the forward pass, to the first gradient of the next backward pass; from then on DDP waits for all. Where it
waits earlier, since it sends a module's buffers around before the forward pass, the time ends there.

Promise: where there is nothing to measure by (no tracked optimizer, a parameter without a gradient), nothing
is measured, and nobody is taken for slow. After the first step without that gradient (the batch took another
head, the parameter was frozen) this rank tells nothing any more. No time is one that was spent waiting inside
of DDP; where a script has collectives of its own in it all ranks look alike. Of several backward passes of a
step the first ends it.

On a GPU nothing is measured: its host runs ahead, and whoever asks for a loss waits for all that is queued.
A step costs 3.5 us for it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from elastic_resume.worker import state

CALIBRATION_STEPS = 3
"""Of a generation, which compile, warm up and touch memory for the first time."""


class OwnTime:
    """The own time of one rank, in one generation. ``total_ns``: of all steps so far."""

    def __init__(self, tracked: Mapping[str, Any]) -> None:
        """Put a hook behind every tracked optimizer's step, and on the last parameter of each."""
        self.total_ns = 0
        self._began = 0
        self._by: Optimizer | None = None  # whose step began it; others may step together with it
        self._is_given_up = False
        self._steps = 0
        self._hooks: list[RemovableHandle] = []
        for optimizer in tracked.values():
            if not isinstance(optimizer, Optimizer):
                continue
            stepped = [one for group in optimizer.param_groups for one in group["params"]]
            trained = [one for one in stepped if one.requires_grad and one.is_leaf]
            if trained and all(one.device.type == "cpu" for one in stepped):
                self._hooks.append(optimizer.register_step_post_hook(self._begin))
                self._hooks.append(trained[-1].register_post_accumulate_grad_hook(self._end))

    def watch(self, model: nn.Module) -> None:
        """End the time before ``model``'s DDP, if it has one, sends buffers around."""
        wrapper = state.parallel_wrapper(model)
        if not isinstance(wrapper, DistributedDataParallel) or not wrapper.broadcast_buffers:
            return
        if any(True for _ in wrapper.module.buffers()):
            self._hooks.append(wrapper.register_forward_pre_hook(self._end))

    def end_step(self) -> int:
        """Count a step; give what all have taken, in nanoseconds."""
        self._steps += 1
        return self.total_ns

    def close(self) -> None:
        """Measure no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if self._began and optimizer is self._by:
            self._is_given_up = True
            self.total_ns = self._began = 0
        elif self._steps >= CALIBRATION_STEPS and not self._is_given_up:
            self._by = self._by if self._began else optimizer
            self._began = time.perf_counter_ns()

    def _end(self, source: Tensor | nn.Module, args: Any = None) -> None:
        del source, args
        if self._began:
            self.total_ns += time.perf_counter_ns() - self._began
            self._began = 0
