"""Random numbers that a resumed run draws as the uninterrupted one did.

``derived``: nothing is stored. At each step boundary, and again when the next batch is asked for, every rank
seeds its generators from (seed, rank, step). So a rank that never existed before has its stream too, and
what a script draws in between (an evaluation every N steps, the seed that each DataLoader draws for its
workers) is not missed by a run that resumes behind it. At any step no two ranks have the same seed, although
torch's CPU generator and numpy take 32 bits of it only; streams of different steps may coincide.

``off``: random numbers are left alone.

The words are mixed by xxh3-64. A step takes 15 us for it, twice 7 (torch 1, `random` 4, numpy 2;
benchmarks/random_numbers.py). With `torch.manual_seed` it were 200 and more: that formats the stack, in case
CUDA comes into use later. (It is what is called where there is a device and nobody uses it yet.)
"""

from __future__ import annotations

import contextlib
import functools
import random
import struct
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash

DERIVED, OFF = MODES = ("derived", "off")
_LOW_32_BITS = 0xFFFFFFFF
_RANK_SALT = 2  # salt of what all ranks have in common at a step; 1 is that of samples, see `seeding`


class RandomNumbers:
    """One rank's random numbers, and what checkpoints keep of them: the seed."""

    def __init__(self, mode: str, seed: int, rank: int = 0) -> None:
        """Begin with ``seed``, of at most 64 bits; ``mode`` is one of MODES."""
        self.seed = seed
        self._mode, self._rank = mode, rank
        self._stepping_thread = 0  # the thread that has made a step, until it asks for the next batch

    def state_dict(self) -> dict[str, int]:
        """Return the seed."""
        return {"seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the seed that the job began with; older checkpoints may hold generators beside it."""
        self.seed = state["seed"]

    def start_at(self, step: int) -> None:
        """Seed for the step after ``step``, when a generation or an epoch begins, or what is left of it."""
        if self._mode == DERIVED:
            self._seed(step)

    def before_batch(self, step: int, *, first: bool) -> None:
        """Take back what was drawn since the step boundary, when the next batch is asked for.

        Not for the second of several batches of a step, nor in a thread that reads ahead.
        """
        if self._mode == DERIVED and (first or self._stepping_thread == threading.get_ident()):
            self._stepping_thread = 0
            self._seed(step)

    def after_step(self, step: int) -> None:
        """Pass a step boundary."""
        self._stepping_thread = threading.get_ident()
        if self._mode == DERIVED:
            self._seed(step)

    def _seed(self, step: int) -> None:
        seed_all_generators(derive_seed(self.seed, self._rank, step))


def derive_seed(seed: int, rank: int, step: int) -> int:
    """Give the 63 bits that ``rank`` seeds its generators with at ``step``.

    No two ranks have the same low 32 bits. Independent 32-bit seeds would collide for 1,024 ranks about once
    in 8,000 steps.
    """
    low = (mix_words(seed, step, 0, _RANK_SALT) + rank) & _LOW_32_BITS
    low = ((low ^ low >> 16) * 0x85EBCA6B) & _LOW_32_BITS  # MurmurHash3's fmix32, which is one to one
    low = ((low ^ low >> 13) * 0xC2B2AE35) & _LOW_32_BITS
    low ^= low >> 16
    return mix_words(seed, rank, step) & ~_LOW_32_BITS | low


def mix_words(first: int, second: int, third: int, salt: int = 0) -> int:
    """Mix three words into 63 bits; another ``salt`` for another purpose."""
    return xxhash.xxh3_64_intdigest(struct.pack("<qqq", first, second, third), salt) >> 1


def seed_cpu_generators(seed: int) -> None:
    """Seed what draws on the CPU: torch, `random`, and numpy's global generator where it is imported."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & _LOW_32_BITS)


def seed_all_generators(seed: int) -> None:
    """Seed the same, and the generators of all devices, also of those that come into use later."""
    seed_cpu_generators(seed)
    if torch.cuda.is_initialized():
        for generator in torch.cuda.default_generators:
            generator.manual_seed(seed)
    elif _has_accelerator():
        torch.manual_seed(seed)  # any kind of device; one that is not in use yet is seeded when it is


@functools.cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


@contextlib.contextmanager
def preserve_cpu_generators() -> Iterator[None]:
    """Leave what draws on the CPU as it was found. 0.1 ms, most of it numpy's."""
    before = torch.default_generator.get_state()
    plain = random.getstate()
    numpy = sys.modules.get("numpy")
    arrays = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        torch.default_generator.set_state(before)
        random.setstate(plain)
        if numpy is not None:
            numpy.random.set_state(arrays)
