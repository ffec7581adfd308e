"""The order of parameters in optimizers, compared before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from elastic_resume.worker.state import canonical_names


class ParameterOrder:
    """Which parameter each optimizer means by which number.

    An optimizer's own state knows numbers only: built over the same parameters in another order it would take
    the momentum of one for another's, in silence where their shapes agree.
    """

    def __init__(self, tracked: Mapping[str, Any]) -> None:
        """Note the order in each optimizer of ``tracked``, by the names that the tracked models give."""
        names: dict[int, str] = {}
        for name, item in tracked.items():
            if isinstance(item, nn.Module):
                canonical = canonical_names(item)  # walks the model: once, not for each parameter
                names |= {id(p): f"{name}/{canonical(key)}" for key, p in item.named_parameters()}
        self._optimizers = {name: item for name, item in tracked.items() if isinstance(item, Optimizer)}
        self._names = names

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers whose order this is: while theirs stays the same, so does `state_dict`."""
        return list(self._optimizers.values())

    def state_dict(self) -> dict[str, Any]:
        """Give, for each optimizer and group, the names of its parameters; "" for one that is not tracked."""
        return {
            name: [[self._names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
            for name, optimizer in self._optimizers.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to take: `differences` has compared."""

    def differences(self, stored: Mapping[str, Any]) -> list[str]:
        """List the optimizers whose groups or parameters are not those of the checkpoint."""
        problems = []
        for name, groups in self.state_dict().items():
            kept = stored.get(name, groups)
            sizes, were = [len(group) for group in groups], [len(group) for group in kept]
            if sizes != were:
                problems.append(f"{name}: groups of {sizes} parameters now, of {were} in the checkpoint")
                continue
            pairs = [(a, b) for g, k in zip(groups, kept, strict=True) for a, b in zip(g, k, strict=True)]
            moved = [(a, b) for a, b in pairs if a != b]
            if moved:
                here, there = moved[0]
                problems.append(f"{name}: {here or 'a parameter'} stands where the checkpoint has {there!r}")
        return problems
