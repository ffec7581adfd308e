"""Tensors that a script keeps by itself: one, or a list, tuple or dict of them, tracked as they are.

A hand-made average of the weights, say: ``ema=shadow``, or ``ema={"shadow": shadow, "updates": count}``
where each is a tensor or holds tensors. What is tracked is the list or dict that was given: a tensor in it
may be changed in place, or replaced by one like it. Another list that takes its place is not seen.

Promise: a state is loaded into the very tensors that stand there, after their names, shapes and dtypes were
compared (`restoring.load`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from elastic_resume.errors import UntrackableError


class Tensors:
    """What was given, as an object with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, name: str, given: Any) -> None:
        """``given`` is what `are_tensors` says yes to; ``name`` is what it is tracked as."""
        self._name, self._given = name, given

    def state_dict(self) -> dict[str, Tensor]:
        """Give the tensors that stand there now, by key or number.

        Raises:
            UntrackableError: something else has come to stand among them.

        """
        given = self._given
        if isinstance(given, Tensor):
            return {"value": given}
        items = given.items() if isinstance(given, dict) else enumerate(given)
        found = {str(key): value for key, value in items}
        for key, value in found.items():
            if not isinstance(value, Tensor):
                raise UntrackableError(
                    f"{self._name}/{key}: {type(value).__name__} stands among tracked tensors and cannot be "
                    "put back in place; keep it as a 0-d tensor, or track an object with state_dict()."
                )
        return found

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy into the tensors that stand there."""
        with torch.no_grad():
            for key, tensor in self.state_dict().items():
                tensor.copy_(state[key])


def are_tensors(item: Any) -> bool:
    """Whether ``item`` is a tensor or a list, tuple or dict that begins with one."""
    if isinstance(item, dict):
        return bool(item) and all(isinstance(value, Tensor) for value in item.values())
    if isinstance(item, (list, tuple)):
        return bool(item) and isinstance(item[0], Tensor)
    return isinstance(item, Tensor)
