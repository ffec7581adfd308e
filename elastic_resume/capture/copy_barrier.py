"""Delay ``optimizer.step()`` until the background copy has read the parameters: the copy barrier.

A snapshot is copied while forward and backward run. The barrier is a hook before each ``optimizer.step()``.
It waits until the copy has read its sources. `OverlapRule` decides which tensors may be copied that way:
those that usually only a hooked optimizer step changes. If a script changes them elsewhere, `source_digests`
finds that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from elastic_resume.errors import UsageError
from elastic_resume.state.state_dict import EMA_NAME, make_name_canonicalizer


class CopyBarrier:
    """Calls a function before each step of some optimizers."""

    def __init__(self, optimizers: Iterable[Optimizer], wait_for_copy: Callable[[], None]) -> None:
        self._wait_for_copy = wait_for_copy
        self._hooks = [optimizer.register_step_pre_hook(self._before_step) for optimizer in optimizers]
        self._pid = os.getpid()

    @property
    def has_hooks(self) -> bool:
        """Whether there is any optimizer to wait before."""
        return bool(self._hooks)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._wait_for_copy = lambda: None  # else a cycle keeps the mapped slots of an earlier generation

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del optimizer, args, kwargs
        if os.getpid() != self._pid:
            return
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise UsageError(
                "optimizer.step() is being captured in a CUDA graph. A replay runs no hooks, so it would "
                "change parameters while er.resume() copies them. Capture forward and backward only, and "
                "call optimizer.step() outside of the graph."
            )
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
