"""Keeps DDP's gradient buckets the same in a resumed run, so that its sums are.

DDP lays its buckets out anew after the first backward pass of a process, in the order in which gradients
became ready. Where a gradient lies in a bucket decides in which order the ranks' values are added up, so
with three ranks or more a resumed run would round its first step otherwise than the uninterrupted run did
(seen with gloo: weights differ in the last bits from the first resumed step on). So the order of
readiness is recorded once, kept in the checkpoint, and played to DDP before the first resumed step: one
backward pass of zeros through the bare parameters in that order. DDP does the rest itself.

The model has no part in that pass: something else stands in its place inside of DDP, so what is compiled,
wrapped or hooked in it is not touched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

# With static_graph DDP looks at one backward pass, notes the order in a second, and has its buckets then.
_STEPS_UNTIL_FINAL = 2


class BucketOrder:
    """The order in which each tracked model's gradients became ready, by parameter name."""

    def __init__(self) -> None:
        """Know no order yet."""
        self.revision = 0  # grows when state_dict() comes to give something else
        self._orders: dict[str, list[str]] = {}
        self._single_pass_models: set[str] = (
            set()
        )  # names of models of whose gradients each became ready once
        self._step_count = 0  # that the job has taken: those that count, at most _SETTLED
        self._recorded_names: dict[str, list[str]] = {}
        self._hooks: list[RemovableHandle] = []

    def state_dict(self) -> dict[str, Any]:
        """Give the known orders: tracked name -> parameter names; and which are of one backward pass."""
        orders = {name: list(order) for name, order in self._orders.items()}
        return {"orders": orders, "single": sorted(self._single_pass_models), "steps": self._step_count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave."""
        self._orders = {name: list(order) for name, order in state["orders"].items()}
        self._single_pass_models = set(state.get("single", ()))
        self._step_count = state.get("steps", _STEPS_UNTIL_FINAL)
        self.revision += 1

    def prepare(self, name: str, model: nn.Module, ddp: DistributedDataParallel) -> None:
        """Play the known order of ``name`` to ``ddp``, or record it in the backward pass to come.

        ``model`` is the tracked one, bare.
        """
        parameters = {key: p for key, p in model.named_parameters() if p.requires_grad}
        order = self._orders.get(name)
        if ddp.find_unused_parameters and not ddp.static_graph:
            return  # its buckets are never rebuilt
        if order is None:
            self._record(name, parameters)
        elif self._can_replay(name, parameters, ddp):
            passes = self._step_count if ddp.static_graph else 1
            _replay_order([parameters[key] for key in order], _find_sparse_ids(model), ddp, passes)

    def end_step(self) -> None:
        """After the first optimizer step the order is known."""
        if self._step_count < _STEPS_UNTIL_FINAL:
            self._step_count += 1
            self.revision += 1
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for name, seen in self._recorded_names.items():
            self._orders[name] = list(dict.fromkeys(seen))
            if len(seen) == len(self._orders[name]):
                self._single_pass_models.add(name)
        self._recorded_names.clear()
        self.revision += 1

    def _record(self, name: str, parameters: Mapping[str, nn.Parameter]) -> None:
        seen = self._recorded_names.setdefault(name, [])
        for key, parameter in parameters.items():
            hook = parameter.register_post_accumulate_grad_hook(lambda _, key=key: seen.append(key))
            self._hooks.append(hook)

    def _can_replay(
        self, name: str, parameters: Mapping[str, nn.Parameter], ddp: DistributedDataParallel
    ) -> bool:
        """Whether a pass of zeros goes unnoticed, and tells DDP what a real one would.

        With ``static_graph`` the first pass also teaches DDP which gradients never come and how often the
        others do (checkpointed blocks run more than once), so there each must have come once.
        """
        order = self._orders[name]
        if ddp.static_graph:
            fits = name in self._single_pass_models and parameters.keys() >= set(order) != set()
        else:
            fits = parameters.keys() == set(order)
        in_backward = any(hasattr(p, "_in_backward_optimizers") for p in parameters.values())
        alone = ddp.mixed_precision is None and not ddp._comm_hooks and not ddp._use_python_reducer  # noqa: SLF001
        return fits and alone and not in_backward


class _ZeroGradientModel(nn.Module):
    """Stands for the model: a zero to which each parameter adds a zero gradient, the first one first."""

    def __init__(self, parameters: Sequence[nn.Parameter], sparse_ids: set[int]) -> None:
        super().__init__()
        self._ordered_parameters = tuple(parameters)  # in a tuple they are not this module's
        self._sparse_ids = sparse_ids

    def forward(self, _unused: None) -> Tensor:
        """Autograd runs what was recorded last first: built from the last parameter to the first."""
        total = torch.zeros((), device=self._ordered_parameters[0].device)
        for parameter in reversed(self._ordered_parameters):
            if id(parameter) in self._sparse_ids:
                first = torch.zeros(1, dtype=torch.int64, device=parameter.device)
                part = nn.functional.embedding(first, parameter, sparse=True)
            else:
                part = torch.view_as_real(parameter) if parameter.is_complex() else parameter
            total = total + (part.sum() * 0).to(total)
        return total


def _find_sparse_ids(model: nn.Module) -> set[int]:
    """Find the parameters whose gradients are sparse, by DDP's own rule."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {id(part.weight) for part in model.modules() if isinstance(part, kinds) and part.sparse}


def _replay_order(
    parameters: Sequence[nn.Parameter], sparse_ids: set[int], ddp: DistributedDataParallel, passes: int
) -> None:
    """Let the gradients of ``parameters`` become ready in this order, all of them zero."""
    gradients = [parameter.grad for parameter in parameters]
    model, broadcast = ddp.module, ddp.broadcast_buffers
    ddp.module, ddp.broadcast_buffers = _ZeroGradientModel(parameters, sparse_ids), False
    try:
        with _suspend_hooks(parameters), torch.enable_grad():
            for _ in range(passes):
                ddp.forward(None).backward()  # on a GPU it wants something that it can move there
    finally:
        ddp.module, ddp.broadcast_buffers = model, broadcast
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


@contextlib.contextmanager
def _suspend_hooks(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Keep the script's hooks on parameters from running: one may step the optimizer in it.

    torch runs what is in these dicts at that moment.
    """
    found = [(p._backward_hooks, p._post_accumulate_grad_hooks) for p in parameters]  # noqa: SLF001
    kept = [(hooks, dict(hooks)) for pair in found for hooks in pair if hooks]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, entries in kept:
            hooks.update(entries)
