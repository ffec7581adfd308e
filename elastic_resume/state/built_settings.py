"""Record the settings with which a script builds optimizers and schedulers, to name a changed argument.

A resume restores hyperparameters and schedules, so another ``--lr`` has no effect. The checkpoint says what
the script built at its first start: a schedule changes the values meanwhile, and these stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elastic_resume.state.open_checkpoint import iter_leaves

RANKS = "ranks"  # how many the first start had; beside the paths, which have a slash
MAX_SETTINGS = 200  # of one object: a schedule may be a table
_FOLLOWING = {"base_lrs", "_last_lr", "params", "param_names"}  # they follow from others
_PLAIN = (bool, int, float, str, type(None))

Settings = dict[str, Any]  # path -> plain value; an optimizer's have one entry for each group


class BuiltSettings:
    """The settings of tracked optimizers and schedulers: as built now, and at the first start."""

    def __init__(self, tracked: Mapping[str, Any]) -> None:
        """Read the settings. Call it when the script has built the objects, before anything is restored."""
        self._items = {
            name: item
            for name, item in tracked.items()
            if isinstance(item, (Optimizer, LRScheduler)) or name.split(".")[0] == "scheduler"
        }
        self._built = self._read()
        self._first = dict(self._built)
        self._restored: Settings | None = None

    def state_dict(self) -> Settings:
        """Return the settings of the first start."""
        return dict(self._first)

    def load_state_dict(self, state: Settings) -> None:
        """Take those of the first start from a checkpoint. Other objects are restored before."""
        self._first, self._restored = dict(state), self._read()

    def note_ranks(self, count: int) -> int:
        """Record the number of ranks at the first start; return that one."""
        first: int = self._first.setdefault(RANKS, count)
        return first

    def take_unused(self) -> list[str]:
        """Describe the settings that the script built in vain, once after a restore.

        What the script has changed since the restore it has seen to itself: it counts as built so.
        """
        restored, self._restored = self._restored, None
        if restored is None:
            return []
        now, unused = self._read(), []
        for path, value in self._built.items():
            if path not in self._first or self._first[path] == value:
                continue
            pair = [path, path.replace("/initial_lr", "/lr")]
            if any(now.get(each) != restored.get(each) for each in pair):
                self._first[path] = value
            elif not path.endswith("/lr") or path.replace("/lr", "/initial_lr") not in self._built:
                unused.append(f"{pair[-1]} {_show(value)} (first start: {_show(self._first[path])})")
        return unused

    def _read(self) -> Settings:
        settings: Settings = {}
        for name, item in self._items.items():
            found = _iter_groups(item) if isinstance(item, Optimizer) else iter_leaves(item.state_dict(), "")
            plain = {
                f"{name}/{path.lstrip('/')}": value
                for path, value in found
                if _is_plain(value) and not _FOLLOWING & set(path.split("/"))
            }
            settings |= dict(list(plain.items())[:MAX_SETTINGS])
        return settings


def _iter_groups(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield each hyperparameter: one value, or a list if the groups differ."""
    groups = optimizer.param_groups
    for key in dict.fromkeys(key for group in groups for key in group):
        values = [group.get(key) for group in groups]
        values = [v.item() if isinstance(v, Tensor) and v.dim() == 0 else v for v in values]
        values = [list(v) if isinstance(v, tuple) else v for v in values]
        if key not in _FOLLOWING:
            yield key, values[0] if all(_is_plain(v) and v == values[0] for v in values) else values


def _is_plain(value: Any) -> bool:
    if type(value) is list:
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


def _show(value: Any) -> str:
    return f"{value:.6g}" if type(value) is float else repr(value)
