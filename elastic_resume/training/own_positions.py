"""Find a loader of the script's own that counts on, in a loop whose data no argument names.

A class with a position, or a function with ``yield``, begins anew after a restart. Its variable is known by a
number in it that has changed over a few steps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import GeneratorType
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from elastic_resume.state.state_dict import type_name
from elastic_resume.training.untracked import collect_held, iter_variables
from elastic_resume.training.worker_exit import is_library_file, is_own_module

_LOADER = re.compile(r"load|data|batch|sampl|stream|token|shard", re.IGNORECASE)


class OwnPositions:
    """The numbers that the script's own loaders hold at the end of a step."""

    def __init__(self, tracked: Mapping[str, Any]) -> None:
        """Read them. Objects within tracked ones are left out."""
        held = collect_held(tracked)
        variables = [(name, value) for name, value in iter_variables() if id(value) not in held]
        found = ((name, value, _read_numbers(name, value)) for name, value in variables)
        self._before = [each for each in found if each[2]]

    def describe(self) -> list[str]:
        """Describe each loader of which a number has changed since."""
        texts, seen = [], set()
        for name, value, before in self._before:
            now = _read_numbers(name, value)
            changed = [key for key, number in before.items() if now.get(key, number) != number]
            if not changed or id(value) in seen:
                continue
            seen.add(id(value))
            remedy = (
                "give it state_dict() and load_state_dict(), and pass "
                f'track={{"{name}": er.per_rank({name})}}.'
            )
            if isinstance(value, GeneratorType):
                remedy = (
                    "a function with yield cannot be saved: write a class with state_dict() and "
                    f'load_state_dict(), and pass track={{"{name}": er.per_rank({name})}}.'
                )
            texts.append(
                f"{name} (a {type_name(value)}) counts on: the first steps have changed its {changed[0]!r}, "
                f"and no checkpoint holds it. After a restart it begins anew. If training reads it, {remedy}"
            )
        return texts


def _read_numbers(name: str, value: Any) -> dict[str, int]:
    """Return the integers of a generator, or of an object that is a loader by its name."""
    if isinstance(value, GeneratorType):
        if value.gi_frame is None or value.gi_running or is_library_file(value.gi_code.co_filename):
            return {}
        held = value.gi_frame.f_locals
    elif _is_own_loader(name, type(value)):
        held = getattr(value, "__dict__", {})
    else:
        return {}
    return {key: number for key, number in held.items() if type(number) is int}


def _is_own_loader(name: str, kind: type) -> bool:
    if issubclass(kind, (nn.Module, Optimizer, DataLoader, type)):
        return False
    draws = any(hasattr(kind, method) for method in ("__iter__", "__next__", "next_batch", "get_batch"))
    if not (_LOADER.search(kind.__name__) or (draws and _LOADER.search(name))):  # batch_time is a meter
        return False
    return is_own_module(str(kind.__module__))
