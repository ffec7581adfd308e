"""Random numbers that a resumed run draws as the uninterrupted one did.

State is derived, not saved: at each step boundary every rank seeds its generators from (seed, rank, step).
So a rank that never existed before has its stream too, two ranks never share one, and nothing about
random numbers needs to be stored or sent. The words are mixed by xxh3-64.
"""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Mapping

import torch
import xxhash


class Seed:
    """The job's seed, kept in its checkpoints."""

    def __init__(self, value: int) -> None:
        """Begin with ``value``, of at most 64 bits."""
        self.value = value

    def state_dict(self) -> dict[str, int]:
        """Give the seed."""
        return {"seed": self.value}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take the seed that the job began with."""
        self.value = state["seed"]


def derive(seed: int, rank: int, step: int) -> int:
    """Mix (seed, rank, step) into 63 bits."""
    return xxhash.xxh3_64_intdigest(struct.pack("<qqq", seed, rank, step)) >> 1


def seed_all(seed: int, rank: int, step: int) -> None:
    """Seed torch (CPU, and CUDA where it is in use), `random`, and numpy where it is imported."""
    word = derive(seed, rank, step)
    torch.manual_seed(word)
    random.seed(word)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(word & 0xFFFFFFFF)
