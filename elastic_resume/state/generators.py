"""Give random generators of torch, numpy and Python the two methods that tracked objects have."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from elastic_resume.errors import UntrackableError


class TrackedGenerator:
    """A random generator with ``state_dict`` and ``load_state_dict``; both act on the generator itself."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        generator = self.generator
        if isinstance(generator, torch.Generator):
            return {"state": generator.get_state().numpy().tobytes()}
        if isinstance(generator, random.Random):
            version, numbers, gauss = generator.getstate()
            return {"version": version, "numbers": list(numbers), "gauss": gauss}
        if hasattr(generator, "bit_generator"):
            return {"state": _to_plain(generator.bit_generator.state)}
        return {"state": _to_plain(generator.get_state(legacy=False))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the generator's state."""
        generator = self.generator
        if isinstance(generator, torch.Generator):
            generator.set_state(torch.frombuffer(bytearray(state["state"]), dtype=torch.uint8))
        elif isinstance(generator, random.Random):
            generator.setstate((state["version"], tuple(state["numbers"]), state["gauss"]))
        elif hasattr(generator, "bit_generator"):
            generator.bit_generator.state = state["state"]
        else:
            generator.set_state(state["state"])


def wrap_generator(name: str, item: Any) -> Any:
    """Return ``item``, or an object that tracks it if it is a random generator.

    Raises:
        UntrackableError: it draws from the system, which has no state.

    """
    numpy = sys.modules.get("numpy.random")
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if numpy is not None:
        kinds += (numpy.Generator, numpy.RandomState)
    if not isinstance(item, kinds):
        return item
    if isinstance(item, random.SystemRandom):
        raise UntrackableError(
            f"{name}: SystemRandom draws from the system and has no state: use random.Random."
        )
    return TrackedGenerator(item)


def _to_plain(value: Any) -> Any:
    """Turn numpy's arrays into lists, which it takes back."""
    if isinstance(value, dict):
        return {key: _to_plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
