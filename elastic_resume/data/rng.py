"""Seeds random numbers by step, so that a resumed run draws the same ones as the uninterrupted run.

Mode ``derived``: nothing but the seed is stored. At each step boundary, and again when the next batch is
requested, every rank seeds its generators from (seed, rank, step). A new rank therefore has its own
stream. Numbers that a script draws in between, for an evaluation or a new DataLoader, do not change later
steps. At any step no two ranks have the same seed, although torch's CPU generator and numpy use only 32
bits of it; streams of different steps may coincide.

Mode ``off``: random numbers are left alone.

Generators are seeded directly, since `torch.manual_seed` formats the stack and takes ten times as long. It is
called only if there is a device that is not in use yet.
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
_RANK_SALT = 2  # seeded_dataset uses 1 for samples


class RandomNumbers:
    """One rank's random numbers. Checkpoints store only the seed."""

    def __init__(self, mode: str, seed: int, rank: int = 0) -> None:
        """Start with ``seed``, of at most 64 bits; ``mode`` is one of MODES."""
        self.seed = seed
        self._mode, self._rank = mode, rank
        self._stepping_thread = 0  # the thread that ended the last step, until it requests a batch

    def state_dict(self) -> dict[str, int]:
        """Return the seed."""
        return {"seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the job's first seed. Older checkpoints may hold generator states beside it."""
        self.seed = state["seed"]

    def start_at(self, step: int) -> None:
        """Seed for the step after ``step``, at the beginning of a generation or an epoch."""
        if self._mode == DERIVED:
            self._seed(step)

    def before_batch(self, step: int, *, first: bool) -> None:
        """Seed again when the next batch is requested, to discard draws since the step boundary.

        Skip the second of several batches of a step, and threads that read ahead.
        """
        if self._mode == DERIVED and (first or self._stepping_thread == threading.get_ident()):
            self._stepping_thread = 0
            self._seed(step)

    def after_step(self, step: int) -> None:
        """Seed for the next step."""
        self._stepping_thread = threading.get_ident()
        if self._mode == DERIVED:
            self._seed(step)

    def _seed(self, step: int) -> None:
        seed_all_generators(derive_seed(self.seed, self._rank, step))


def derive_seed(seed: int, rank: int, step: int) -> int:
    """Return the 63-bit seed of ``rank`` at ``step``.

    No two ranks have the same low 32 bits. Independent 32-bit seeds of 1,024 ranks would collide about
    once in 8,000 steps.
    """
    low = (mix_words(seed, step, 0, _RANK_SALT) + rank) & _LOW_32_BITS
    low = ((low ^ low >> 16) * 0x85EBCA6B) & _LOW_32_BITS  # MurmurHash3's fmix32, a bijection
    low = ((low ^ low >> 13) * 0xC2B2AE35) & _LOW_32_BITS
    low ^= low >> 16
    return mix_words(seed, rank, step) & ~_LOW_32_BITS | low


def mix_words(first: int, second: int, third: int, salt: int = 0) -> int:
    """Mix three words into 63 bits with xxh3-64. Each purpose has its own ``salt``."""
    return xxhash.xxh3_64_intdigest(struct.pack("<qqq", first, second, third), salt) >> 1


def seed_cpu_generators(seed: int) -> None:
    """Seed torch's CPU generator, `random`, and numpy's global generator if numpy is imported."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & _LOW_32_BITS)


def seed_all_generators(seed: int) -> None:
    """Seed the CPU generators and those of all devices, also of devices not in use yet."""
    seed_cpu_generators(seed)
    if torch.cuda.is_initialized():
        for generator in torch.cuda.default_generators:
            generator.manual_seed(seed)
    elif _has_accelerator():
        torch.manual_seed(seed)  # also seeds devices when they come into use


@functools.cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


@contextlib.contextmanager
def preserve_cpu_generators() -> Iterator[None]:
    """Restore the state of the CPU generators on exit. Takes 0.1 ms, mostly for numpy's."""
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
