"""What a look has to ask for each time: hyperparameters, tensors that get replaced, objects of other kinds.

Each question has a place in the order of `state.flatten`, since of tied tensors the first gives the name.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from elastic_resume.store import typed
from elastic_resume.store.typed import TensorRef
from elastic_resume.worker.guards import Place
from elastic_resume.worker.state import REPLICATED, Walk, flatten_object


class Changed(Exception):  # noqa: N818  not an error: what was fixed has to be made anew
    """What a look finds is not what was fixed."""


@dataclass(frozen=True)
class Asked:
    """An object whose state is asked for as a whole."""

    order: int  # among all tensors and questions, as `flatten` comes by them
    name: str
    item: Any

    def ask(self, walk: Walk, dynamic: dict[str, Any]) -> None:
        """Call its state_dict()."""
        dynamic[self.name] = flatten_object(walk, self.name, self.item)


@dataclass(frozen=True)
class Volatile:
    """A tensor that may be another one each time, of the same dtype and shape."""

    order: int
    place: Place
    reference: TensorRef
    spec: tuple[Any, ...]

    def ask(self, walk: Walk, _dynamic: dict[str, Any]) -> None:
        """Take the tensor that stands there now; what refers to it does not change."""
        tensor = self.place.holder.get(self.place.key)
        if not isinstance(tensor, Tensor) or (tensor.dtype, tensor.shape) != self.spec:
            raise Changed
        if walk.refer(tensor, self.place.path, self.place.kind) != self.reference:
            raise Changed


class Hyperparameters:
    """What an optimizer's groups say beside their parameters: the learning rate, for one."""

    def __init__(self, order: int, name: str, optimizer: Optimizer) -> None:
        self.order, self._name, self._optimizer = order, name, optimizer
        self._last: list[tuple[list[Any], dict[str, Any]]] = []
        self._keys: list[list[str]] = []

    def begin(self, walk: Walk, dynamic: dict[str, Any]) -> list[dict[str, Any]]:
        """Ask for the first time; give the static part, which keeps the order of the names."""
        self._keys = [list(group) for group in self._optimizer.param_groups]
        self._last = [([], {}) for _ in self._keys]
        self.ask(walk, dynamic)
        numbers = self._optimizer.state_dict()["param_groups"]
        names = ({"param_names": group["param_names"]} if "param_names" in group else {} for group in numbers)
        return [
            {
                **dict.fromkeys((key for key in group if key != "params"), None),
                **typed.encode({**own, "params": group["params"]}, f"{self._name}['param_groups'][{i}]"),
            }
            for i, (group, own) in enumerate(zip(numbers, names, strict=True))
        ]

    def ask(self, walk: Walk, dynamic: dict[str, Any]) -> None:
        """Encode the groups that have changed."""
        groups = self._optimizer.param_groups
        if [list(group) for group in groups] != self._keys:
            raise Changed
        encoded = []
        for i, group in enumerate(groups):
            values = list(group.values())
            before, known = self._last[i]
            if not (before and all(map(is_, values, before))):
                known = self._encode(walk, i, group)
                self._last[i] = (values if _is_simple(group) else [], known)
            encoded.append(known)
        dynamic[self._name] = {"param_groups": encoded}

    def _encode(self, walk: Walk, i: int, group: dict[str, Any]) -> dict[str, Any]:
        path = f"{self._name}/param_groups/{i}"
        plain = {
            key: walk.replace(value, f"{path}/{key}", REPLICATED)
            for key, value in group.items()
            if key not in {"params", "param_names"}
        }
        encoded: dict[str, Any] = typed.encode(plain, f"{self._name}['param_groups'][{i}]")
        return encoded


def _is_simple(group: dict[str, Any]) -> bool:
    """Whether the same objects have the same values: numbers, words and tuples of them."""
    atoms = {type(None), bool, int, float, str}
    return all(
        key in {"params", "param_names"}
        or type(value) in atoms
        or (type(value) is tuple and {type(item) for item in value} <= atoms)
        for key, value in group.items()
    )


Question = Asked | Volatile | Hyperparameters
