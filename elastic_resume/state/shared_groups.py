"""Keep what optimizers share: a wrapper such as SAM or Lookahead has the param groups of its base optimizer.

torch's load_state_dict() gives each optimizer groups of its own. A scheduler would then set the learning rate
of one, and the other would step with the restored one for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim import Optimizer


class SharedGroups:
    """The optimizers that share param groups or state before a load, tracked or held by a tracked one."""

    def __init__(self, tracked: Mapping[str, Any]) -> None:
        """Note what is shared. Nothing is kept of optimizers that share nothing."""
        holders = list(_find_holders(tracked.values()))
        counts = Counter(id(group) for holder in holders for group in holder.param_groups)
        self._holders = [
            (holder, holder.param_groups, list(holder.param_groups))
            for holder in holders
            if any(counts[id(group)] > 1 for group in holder.param_groups)
        ]
        states = Counter(id(holder.state) for holder in holders)
        self._states = [(holder, id(holder.state)) for holder in holders if states[id(holder.state)] > 1]

    def restore(self) -> None:
        """Put the loaded values into the shared groups, and share them again."""
        for holder, groups, old in self._holders:
            for group, loaded in zip(old, holder.param_groups, strict=False):
                if loaded is not group:
                    values = dict(loaded)
                    group.clear()
                    group.update(values)
            groups[:] = [*old, *holder.param_groups[len(old) :]]
            holder.param_groups = groups
        first: dict[int, Any] = {}
        for holder, shared in self._states:
            holder.state = first.setdefault(shared, holder.state)


def list_with_inner(optimizer: Any) -> list[Optimizer]:
    """Return an optimizer, and those that it has as attributes, as wrappers such as SAM and Lookahead do."""
    parts = (optimizer, *getattr(optimizer, "__dict__", {}).values())
    return [part for part in parts if isinstance(part, Optimizer)]


def _find_holders(items: Iterable[Any]) -> Iterable[Optimizer]:
    """Return the optimizers among ``items`` and their attributes whose groups are an attribute of theirs."""
    found: dict[int, Optimizer] = {}
    for item in items:
        for each in list_with_inner(item) if hasattr(item, "param_groups") else ():
            if {"param_groups", "state"} <= vars(each).keys():
                found[id(each)] = each
    return found.values()
