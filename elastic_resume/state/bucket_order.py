"""Record the order of DDP's gradient buckets, and replay it in a resumed run.

After the first backward pass of a process, DDP assigns gradients to buckets in the order in which they became
ready. A gradient's place in its bucket decides the order in which the ranks' values are added. With three or
more ranks a resumed run would therefore round its first steps differently from the uninterrupted run.

The order is recorded once and kept in the checkpoint. Before the first resumed step, one backward pass of
zeros makes the gradients ready in that order. DDP then rebuilds its buckets as usual. The pass goes through
the bare parameters: a dummy module replaces the model inside DDP for its duration, so compiled code and hooks
do not run.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

# With static_graph DDP analyses one backward pass, records the order in a second, then builds its buckets.
_STEPS_UNTIL_FINAL = 2


class BucketOrder:
    """The order in which each tracked model's gradients became ready, by parameter name."""

    def __init__(self) -> None:
        self.revision = 0  # grows when the result of state_dict() changes
        self._orders: dict[str, list[str]] = {}
        self._single_pass_models: set[str] = set()  # models whose gradients each became ready once
        self._step_count = 0  # steps of the job, at most _STEPS_UNTIL_FINAL
        self._recorded_names: dict[str, list[str]] = {}
        self._hooks: list[RemovableHandle] = []
        self._prepared: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @property
    def has_ddp(self) -> bool:
        """Whether a tracked model is known to be in DDP."""
        return len(self._prepared) > 0

    def state_dict(self) -> dict[str, Any]:
        """Return the known orders by tracked name, the models with a single pass, and the step count."""
        orders = {name: list(order) for name, order in self._orders.items()}
        return {"orders": orders, "single": sorted(self._single_pass_models), "steps": self._step_count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self._orders = {name: list(order) for name, order in state["orders"].items()}
        self._single_pass_models = set(state["single"])
        self._step_count = state["steps"]
        self.revision += 1

    def prepare(self, name: str, model: nn.Module, ddp: DistributedDataParallel) -> None:
        """Replay the known order of the model ``name`` in ``ddp``, or record it in the next backward pass.

        ``model`` is the tracked model without wrappers. Later calls for the same ``ddp`` do nothing.
        """
        if ddp in self._prepared:
            return
        self._prepared.add(ddp)
        parameters = {key: p for key, p in model.named_parameters() if p.requires_grad}
        order = self._orders.get(name)
        if ddp.find_unused_parameters and not ddp.static_graph:
            return  # DDP never rebuilds its buckets then
        if order is None or (parameters.keys() != set(order) and not ddp.static_graph):
            self._record(name, parameters)  # again if the script has frozen or unfrozen parameters
        elif self._can_replay(name, parameters, ddp):
            passes = self._step_count if ddp.static_graph else 1
            _replay_order([parameters[key] for key in order], _find_sparse_ids(model), ddp, passes)

    def get_keys(self, name: str) -> list[str] | None:
        """Return the parameters of a model whose order is recorded, or None."""
        return self._orders.get(name)

    def end_step(self) -> None:
        """Count an optimizer step. After the first one the recorded order is complete."""
        if self._step_count < _STEPS_UNTIL_FINAL:
            self._step_count += 1
            self.revision += 1
        if not self._hooks:
            return
        self.close()
        for name, seen in self._recorded_names.items():
            self._orders[name] = list(dict.fromkeys(seen))
            if len(seen) == len(self._orders[name]):
                self._single_pass_models.add(name)
        self._recorded_names.clear()
        self.revision += 1

    def close(self) -> None:
        """Stop recording; a backward pass that is not finished leaves no order."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _record(self, name: str, parameters: Mapping[str, nn.Parameter]) -> None:
        seen = self._recorded_names.setdefault(name, [])
        for key, parameter in parameters.items():
            hook = parameter.register_post_accumulate_grad_hook(lambda _, key=key: seen.append(key))
            self._hooks.append(hook)

    def _can_replay(
        self, name: str, parameters: Mapping[str, nn.Parameter], ddp: DistributedDataParallel
    ) -> bool:
        """Return whether a pass of zeros has no side effects and gives DDP the same order as a real one.

        With ``static_graph`` the first pass also tells DDP which gradients never come and how often the
        others come (checkpointed blocks run more than once). So every gradient must have come exactly
        once.
        """
        order = self._orders[name]
        if ddp.static_graph:
            fits = name in self._single_pass_models and parameters.keys() >= set(order) != set()
        else:
            fits = parameters.keys() == set(order) != set()  # all may be frozen, as in a teacher
        in_backward = any(hasattr(p, "_in_backward_optimizers") for p in parameters.values())
        is_plain = ddp.mixed_precision is None and not ddp._comm_hooks and not ddp._use_python_reducer  # noqa: SLF001
        return fits and is_plain and not in_backward


class _ZeroGradientModel(nn.Module):
    """Stands in for the model: a zero that gives each parameter a zero gradient, in order."""

    def __init__(self, parameters: Sequence[nn.Parameter], sparse_ids: set[int]) -> None:
        super().__init__()
        self._ordered_parameters = tuple(parameters)  # a tuple does not register them
        self._sparse_ids = sparse_ids

    def forward(self, _unused: None) -> Tensor:
        """Add up zeros from the last parameter to the first: autograd runs the last operation first."""
        total = torch.zeros((), device=self._ordered_parameters[0].device)
        for parameter in reversed(self._ordered_parameters):
            if id(parameter) in self._sparse_ids:
                index = torch.zeros(1, dtype=torch.int64, device=parameter.device)
                part = nn.functional.embedding(index, parameter, sparse=True)
            else:
                part = torch.view_as_real(parameter) if parameter.is_complex() else parameter
            total = total + (part.sum() * 0).to(total)
        return total


def _find_sparse_ids(model: nn.Module) -> set[int]:
    """Return the ids of parameters whose gradients are sparse, by DDP's own rule."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {id(part.weight) for part in model.modules() if isinstance(part, kinds) and part.sparse}


def _replay_order(
    parameters: Sequence[nn.Parameter], sparse_ids: set[int], ddp: DistributedDataParallel, passes: int
) -> None:
    """Make the gradients of ``parameters`` ready in this order, all of them zero."""
    gradients = [parameter.grad for parameter in parameters]
    model, broadcast = ddp.module, ddp.broadcast_buffers
    ddp.module, ddp.broadcast_buffers = _ZeroGradientModel(parameters, sparse_ids), False
    try:
        with _suspend_hooks(parameters), torch.enable_grad():
            for _ in range(passes):
                ddp.forward(None).backward()  # on a GPU, DDP fails without any input
    finally:
        ddp.module, ddp.broadcast_buffers = model, broadcast
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


@contextlib.contextmanager
def _suspend_hooks(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Disable the script's hooks on parameters: one of them may step an optimizer.

    torch runs the hooks that are in these dicts at that moment.
    """
    hook_dicts = [(p._backward_hooks, p._post_accumulate_grad_hooks) for p in parameters]  # noqa: SLF001
    suspended = [(hooks, dict(hooks)) for pair in hook_dicts for hooks in pair if hooks]
    for hooks, _ in suspended:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, entries in suspended:
            hooks.update(entries)
