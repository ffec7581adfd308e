"""Delay ``optimizer.step()`` until the background copy has read the parameters: the copy barrier.

A snapshot is copied while forward and backward run. The barrier is a hook before each ``optimizer.step()``.
It waits until the copy has read its sources. `OverlapRule` decides which tensors may be copied that way:
those that only a hooked optimizer step changes.

Python runs the hook, so the barrier cannot see other changes: a replayed CUDA graph that contains the step
runs no hook, nor does a function that writes into parameters. A copy therefore runs in the background only if
the hooks of all optimizers ran in the previous step. The step during which it ran is checked as well.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from elastic_resume.errors import UsageError
from elastic_resume.state.dtensors import to_local
from elastic_resume.state.state_dict import EMA_NAME, make_name_canonicalizer

T = TypeVar("T")
UNHOOKED_CHANGE_MESSAGE = (
    "{} changed although optimizer.step() was not called, for example by a replayed CUDA graph. The snapshot "
    "was discarded; later ones block run.step(). Call optimizer.step() outside CUDA graphs"
)


class CopyBarrier(Generic[T]):
    """Calls a function before each step of some optimizers, and records which optimizers called it."""

    def __init__(self, optimizers: Iterable[Optimizer], wait_for_copy: Callable[[], None]) -> None:
        self._wait_for_copy = wait_for_copy
        self._optimizers = list(optimizers)
        self._hooks = [optimizer.register_step_pre_hook(self._before_step) for optimizer in self._optimizers]
        self._pid = os.getpid()
        self._step = -1
        self._hooked_ids: set[int] = set()  # ids of optimizers that stepped since the last step boundary
        self._background_copy: T | None = None
        self.skipped_optimizers: list[Optimizer] = []  # optimizers whose hook did not run in the last step
        self.all_hooks_ran = False  # whether the hooks of all optimizers ran in the last step

    @property
    def unprotected_addresses(self) -> Collection[int] | None:
        """Addresses that only `skipped_optimizers` change; None if every optimizer was skipped."""
        if len(self.skipped_optimizers) == len(self._optimizers):
            return None
        others = [optimizer for optimizer in self._optimizers if optimizer not in self.skipped_optimizers]
        unprotected = set[int]().union(*map(_collect_addresses, self.skipped_optimizers))
        return unprotected.difference(*map(_collect_addresses, others))

    @property
    def has_hooks(self) -> bool:
        """Whether there is any optimizer to wait before."""
        return bool(self._hooks)

    def set_background_copy(self, copy: T) -> None:
        """Record the copy that runs until the next step of the optimizers."""
        self._background_copy = copy

    def end_step(self, step: int) -> T | None:
        """End ``step``. Return the copy that ran during it if an optimizer was skipped: it may be torn.

        A script may skip an optimizer's step on purpose, as a GradScaler does after an overflow.
        """
        if step == self._step:  # the last step of an epoch reaches a boundary twice
            return None
        self._step = step
        self.skipped_optimizers = [
            optimizer for optimizer in self._optimizers if id(optimizer) not in self._hooked_ids
        ]
        self.all_hooks_ran = self.has_hooks and not self.skipped_optimizers
        self._hooked_ids.clear()
        copy, self._background_copy = self._background_copy, None
        return None if self.all_hooks_ran else copy

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._optimizers = [], []

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if os.getpid() != self._pid:
            return
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise UsageError(
                "optimizer.step() is being captured in a CUDA graph. A replay runs no hooks, so it would "
                "change parameters while er.resume() copies them. Capture forward and backward only, and "
                "call optimizer.step() outside of the graph."
            )
        self._hooked_ids.add(id(optimizer))
        self._wait_for_copy()


class OverlapRule:
    """Decides which tensors may be copied after ``run.step()`` has returned, until the next optimizer step.

    These are the state of hooked optimizers, the parameters that they step, and the parameters of a model
    tracked as ``ema``. Nothing else: a forward pass changes buffers, embeddings with max_norm, and parameters
    that no optimizer steps (MoCo's second encoder).
    """

    def __init__(
        self, tracked: Mapping[str, Any], cached_optimizers: list[Optimizer], frozen_names: set[str]
    ) -> None:
        """Add parameters that are frozen now to ``frozen_names``: they never overlap again."""
        optimizers = {name: item for name, item in tracked.items() if isinstance(item, Optimizer)}
        self._hooked_names = {
            name for name, item in optimizers.items() if item in cached_optimizers and _is_hookable(item)
        }
        self._all_hooked = bool(self._hooked_names) and len(self._hooked_names) == len(optimizers)
        hooked_ids, other_ids = set[int](), set[int]()
        for name, item in optimizers.items():
            ids = {id(parameter) for group in item.param_groups for parameter in group["params"]}
            (hooked_ids if name in self._hooked_names else other_ids).update(ids)
        self._stepped_ids = hooked_ids - other_ids
        self._parameters = _find_parameters(tracked, frozen_names)
        self._frozen_names = frozen_names

    @property
    def trained_parameters(self) -> list[nn.Parameter]:
        """The parameters that were never seen frozen."""
        return [item for name, item in self._parameters.items() if name not in self._frozen_names]

    def may_overlap(self, leaf_name: str) -> bool:
        """Return whether only a hooked optimizer step changes the tensor of this name."""
        name = leaf_name.split("/", maxsplit=1)[0]
        if leaf_name not in self._parameters:  # optimizer state, or a buffer
            return name in self._hooked_names
        if name.split(".", maxsplit=1)[0] == EMA_NAME:
            return self._all_hooked  # changed after each step of whichever optimizer
        return id(self._parameters[leaf_name]) in self._stepped_ids and leaf_name not in self._frozen_names


def _find_parameters(tracked: Mapping[str, Any], frozen_names: set[str]) -> dict[str, nn.Parameter]:
    """Find the models' parameters. Add those to ``frozen_names`` that are frozen or changed by forward()."""
    parameters: dict[str, nn.Parameter] = {}
    for name, model in tracked.items():
        if not isinstance(model, nn.Module):
            continue
        canonical = make_name_canonicalizer(model)
        clipped = [part for part in model.modules() if getattr(part, "max_norm", None) is not None]
        clipped_ids = {id(parameter) for part in clipped for parameter in part.parameters(recurse=False)}
        for key, parameter in model.named_parameters(remove_duplicate=False):
            leaf_name = f"{name}/{canonical(key)}"
            parameters[leaf_name] = parameter
            if not parameter.requires_grad or id(parameter) in clipped_ids:
                frozen_names.add(leaf_name)
    return parameters


def _is_hookable(optimizer: Optimizer) -> bool:
    """Return whether torch runs hooks before each step of ``optimizer``, and parameters change only there.

    LBFGS evaluates the model several times within one step.
    """
    return not isinstance(optimizer, LBFGS) and getattr(type(optimizer).step, "hooked", False) is True


def _collect_addresses(optimizer: Optimizer) -> set[int]:
    """Return the addresses of an optimizer's parameters and of their state."""
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    tensors = chain(parameters, _iter_tensors(optimizer.state))
    return {to_local(tensor).data_ptr() for tensor in tensors}


def _iter_tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested containers, such as the lists of LBFGS."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple, deque)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _iter_tensors(item)
