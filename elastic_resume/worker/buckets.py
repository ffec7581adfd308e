"""Keeps DDP's gradient buckets the same in a resumed run, so that its sums are.

DDP lays its buckets out anew after the first backward pass of a process, in the order in which gradients
became ready. Where a gradient lies in a bucket decides in which order the ranks' values are added up, so
with three ranks or more a resumed run would round its first step otherwise than the uninterrupted run did
(seen with gloo: weights differ in the last bits from the first resumed step on). So the order of
readiness is recorded once, kept in the checkpoint, and played to DDP before the first resumed step: one
backward pass of zeros through the bare parameters in that order. DDP does the rest itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from elastic_resume.worker import state


class BucketOrder:
    """The order in which each tracked model's gradients became ready, by parameter name."""

    def __init__(self) -> None:
        """Know no order yet."""
        self.revision = 0  # grows when state_dict() comes to give something else
        self._orders: dict[str, list[str]] = {}
        self._recording: dict[str, list[str]] = {}
        self._hooks: list[RemovableHandle] = []

    def state_dict(self) -> dict[str, Any]:
        """Give the known orders: tracked name -> parameter names."""
        return {"orders": {name: list(order) for name, order in self._orders.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave."""
        self._orders = {name: list(order) for name, order in state["orders"].items()}
        self.revision += 1

    def prepare(self, name: str, model: nn.Module, ddp: DistributedDataParallel) -> None:
        """Play the known order of ``name`` to ``ddp``, or record it in the backward pass to come."""
        parameters = {key: p for key, p in model.named_parameters() if p.requires_grad}
        order = self._orders.get(name)
        if ddp.find_unused_parameters or ddp.static_graph:
            return  # the first never rebuilds its buckets, the second may only see the model's own graph
        if order is None:
            self._record(name, parameters)
        elif set(order) == parameters.keys() and _is_playable(model, parameters.values()):
            _play([parameters[key] for key in order], model, ddp)

    def end_step(self) -> None:
        """After the first optimizer step the order is known."""
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._orders.update(self._recording)
        self._recording.clear()
        self.revision += 1

    def _record(self, name: str, parameters: Mapping[str, nn.Parameter]) -> None:
        order = self._recording.setdefault(name, [])

        def note(key: str) -> None:
            if key not in order:
                order.append(key)

        for key, parameter in parameters.items():
            hook = parameter.register_post_accumulate_grad_hook(lambda _, key=key: note(key))
            self._hooks.append(hook)


def _is_playable(model: nn.Module, parameters: Iterable[nn.Parameter]) -> bool:
    """Whether a pass of zeros goes unnoticed: nobody's hook runs in it and every gradient may be dense.

    An optimizer that steps inside of backward would take a step of its own; torch.compile's wrapper and an
    embedding with sparse gradients do not take such a pass at all.
    """
    if model._forward_hooks or model._forward_pre_hooks or model._backward_hooks:  # noqa: SLF001
        return False
    if any(getattr(part, "sparse", False) is True for part in model.modules()):
        return False
    if state.unwrap(model) is not model:
        return False
    return not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)  # noqa: SLF001


def _play(parameters: list[nn.Parameter], model: nn.Module, ddp: DistributedDataParallel) -> None:
    """Let the gradients of ``parameters`` become ready in this order, all of them zero.

    Autograd runs what was recorded last first, so the sum is built from the last parameter to the first.
    """
    gradients = [parameter.grad for parameter in parameters]

    def zero() -> Tensor:
        total = torch.zeros((), device=parameters[0].device)
        for parameter in reversed(parameters):
            total = total + (parameter * 0).sum().to(total)
        return total

    own = model.__dict__.get("forward")  # some libraries put a wrapper there: it must come back
    model.__dict__["forward"] = zero
    try:
        ddp().backward()
    finally:
        del model.__dict__["forward"]
        if own is not None:
            model.__dict__["forward"] = own
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
