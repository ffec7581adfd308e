"""Find what an object of a library changes while it trains and no checkpoint holds: its plain attributes.

A callback counts, collects or averages in attributes. Without a ``state_dict`` they start anew in each
process, and nothing shows it. Not named is what each process or step has of its own: times of a clock, what
was measured, and tensors of a step's graph. Open files and datetimes are no plain data.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain
from typing import Any

from torch import Tensor, nn

from elastic_resume.integrations.plain_attributes import Clocks, get_version
from elastic_resume.state.diff import MEASURED

MAX_ITEMS = 64  # of a container that are looked at
MAX_DEPTH = 2
CHECKED_STEPS = 3
NAMED = object()  # in the place of an attribute's value


class LostAttributes:
    """Compares the attributes of some objects with those at the start; names each attribute once."""

    def __init__(self, items: Iterable[Any], tracked: Collection[int]) -> None:
        """``tracked`` are the ids of values that a checkpoint holds."""
        self._tracked = tracked
        self._clocks = Clocks()
        self._before = [(item, self._read(item)) for item in items]
        self._steps = 0

    def after_step(self) -> list[tuple[Any, list[str]]]:
        """Return what `find` finds after a few steps, once."""
        self._steps += 1
        return self.find() if self._steps == CHECKED_STEPS else []

    def find(self) -> list[tuple[Any, list[str]]]:
        """Return the objects with the names of attributes that have changed and were not returned before."""
        found = []
        for item, before in self._before:
            names = [name for name, mark in self._read(item).items() if before.get(name) != mark]
            new = [name for name in names if before.get(name) != NAMED]
            before.update(dict.fromkeys(new, NAMED))
            if new:
                found.append((item, new))
        return found

    def _read(self, item: Any) -> dict[str, Any]:
        return {
            name: mark
            for name, value in vars(item).items()
            if not (name.startswith("_") or name == "training" or id(value) in self._tracked)
            if not (type(value) is float and MEASURED.search(name))
            if (mark := _mark(value, self._clocks)) is not None
        }


def _mark(value: Any, clocks: Clocks, depth: int = 0) -> Any:
    """Return what changes with a value of plain data or tensors; None for other objects, and for times."""
    if clocks.have_shown(value) or (isinstance(value, Tensor) and value.grad_fn is not None):
        return None
    if isinstance(value, (bool, int, float, complex, str)):
        return repr(value)
    if isinstance(value, Tensor):
        return "tensor", id(value), get_version(value)  # reading the values may wait for a GPU
    if isinstance(value, nn.Module):
        tensors = chain(value.parameters(), value.buffers())
        return "module", [get_version(tensor) for tensor in tensors]
    if not isinstance(value, (list, tuple, set, dict)) and type(value).__name__ != "deque":
        return None
    items = list(value.values() if isinstance(value, dict) else value)[:MAX_ITEMS]
    inner = [_mark(one, clocks, depth + 1) for one in items] if depth < MAX_DEPTH else []
    return type(value).__name__, len(value), inner
