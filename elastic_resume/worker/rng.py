"""Random numbers that a resumed run draws as the uninterrupted one did.

``derived``: nothing is stored. At each step boundary, and again when the next batch is asked for, every rank
seeds its generators from (seed, rank, step). So a rank that never existed before has its stream too, and
what a script draws in between (an evaluation every N steps, the seed that each DataLoader draws for its
workers) is not missed by a run that resumes behind it. At any step no two ranks have the same seed, although
torch's CPU generator and numpy take 32 bits of it only; streams of different steps may coincide.

``saved``: nothing is seeded, and the states of the generators are part of each copy, so that a job draws what
the plain script draws, resumed or not. In a world of one only: a node's copy stands for the whole job
because its ranks are equal, and in their generators they are not. When a rank dies its state is gone, and to
send it to the others at each step would be a collective in the save path. What a script draws between
``run.step()`` and the next batch is not in the copy of that step. A copy takes 0.8 ms more.

``off``: random numbers are left alone.

The words are mixed by xxh3-64. A step takes 15 us for it, twice 7 (torch 1, `random` 4, numpy 2;
benchmarks/random_numbers.py). With `torch.manual_seed` it were 200 and more: that formats the stack, in case
CUDA comes into use later. (It is what is called where there is a device and nobody uses it yet.)
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import random
import struct
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash

from elastic_resume.worker.telling import say

DERIVED, SAVED, OFF = MODES = ("derived", "saved", "off")
_LOW = 0xFFFFFFFF
_RANKS = 2  # salt of what all ranks have in common at a step; 1 is that of samples, see `seeding`


class RandomNumbers:
    """One rank's random numbers, and what checkpoints keep of them: the seed, with ``saved`` states too."""

    def __init__(self, mode: str, seed: int, rank: int = 0) -> None:
        """Begin with ``seed``, of at most 64 bits; ``mode`` is one of MODES."""
        self.seed = seed
        self._mode, self._rank = mode, rank
        self._saved: dict[str, Any] | None = None  # until a step is made with them
        self._stepped_in = 0  # the thread that has made a step, until it asks for the next batch

    def state_dict(self) -> dict[str, Any]:
        """Give what a resume needs."""
        return {"seed": self.seed, **({"generators": states()} if self._mode == SAVED else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the seed that the job began with; states are put in place by `begin`.

        Raises:
            ValueError: the states are none of generators that there are here.

        """
        generators = state.get("generators") if self._mode == SAVED else None
        if generators is not None:
            check_states(generators)
        self.seed, self._saved = state["seed"], generators

    def begin(self, step: int, *, resumed: bool) -> None:
        """Begin a generation behind ``step``."""
        if self._mode == DERIVED:
            self._seed(step)
        elif self._saved is not None:
            set_states(self._saved)
        elif self._mode == SAVED and resumed:
            self._seed(step)
            told = "rng='saved', but this checkpoint was written without states of generators: seeded anew."
            say(told)

    def begin_epoch(self, step: int) -> None:
        """Begin an epoch, or what is left of one: what was drawn before a resume does not draw."""
        if self._mode == DERIVED:
            self._seed(step)
        elif self._saved is not None:
            set_states(self._saved)

    def before_batch(self, step: int, *, first: bool, mid_epoch: bool) -> None:
        """Take back what was drawn since the step boundary, when the next batch is asked for.

        Not for the second of several batches of a step, nor in a thread that reads ahead.
        """
        if self._mode == DERIVED and (first or self._stepped_in == threading.get_ident()):
            self._stepped_in = 0
            self._seed(step)
        elif self._saved is not None and first and mid_epoch:
            set_states(self._saved)  # the uninterrupted run made its loader when the epoch began

    def after_step(self, step: int) -> None:
        """Pass a step boundary."""
        self._saved = None
        self._stepped_in = threading.get_ident()
        if self._mode == DERIVED:
            self._seed(step)

    def _seed(self, step: int) -> None:
        seed_all(word_of(self.seed, self._rank, step))


def word_of(seed: int, rank: int, step: int) -> int:
    """Give the 63 bits that ``rank`` seeds its generators with at ``step``.

    No two ranks have the same low 32 bits. Independent 32-bit seeds would collide for 1,024 ranks about once
    in 8,000 steps.
    """
    low = (mix(seed, step, 0, _RANKS) + rank) & _LOW
    low = ((low ^ low >> 16) * 0x85EBCA6B) & _LOW  # MurmurHash3's fmix32, which is one to one
    low = ((low ^ low >> 13) * 0xC2B2AE35) & _LOW
    low ^= low >> 16
    return mix(seed, rank, step) & ~_LOW | low


def mix(first: int, second: int, third: int, salt: int = 0) -> int:
    """Mix three words into 63 bits; another ``salt`` for another purpose."""
    return xxhash.xxh3_64_intdigest(struct.pack("<qqq", first, second, third), salt) >> 1


def seed_host(word: int) -> None:
    """Seed what draws on the CPU: torch, `random`, and numpy's global generator where it is imported."""
    torch.default_generator.manual_seed(word)
    random.seed(word)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(word & _LOW)


def seed_all(word: int) -> None:
    """Seed the same, and the generators of all devices, also of those that come into use later."""
    seed_host(word)
    if torch.cuda.is_initialized():
        for generator in torch.cuda.default_generators:
            generator.manual_seed(word)
    elif _has_device():
        torch.manual_seed(word)  # any kind of device; one that is not in use yet is seeded when it is


@functools.cache
def _has_device() -> bool:
    return torch.accelerator.is_available()


@contextlib.contextmanager
def kept() -> Iterator[None]:
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


def states() -> dict[str, Any]:
    """Give the states of all generators, of devices that are in use too."""
    version, words, gauss = random.getstate()
    numpy = sys.modules.get("numpy")
    return {
        "torch": torch.default_generator.get_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "random": [version, torch.tensor(words), gauss],
        "numpy": numpy.random.get_state(legacy=False) if numpy is not None else None,
    }


def check_states(kept: Mapping[str, Any]) -> None:
    """Try states on generators that nobody uses. Raises ValueError."""
    devices = torch.cuda.device_count()
    if len(kept["cuda"]) > devices:
        raise ValueError(f"it holds the generators of {len(kept['cuda'])} GPUs, and here are {devices}")
    try:
        torch.Generator().set_state(kept["torch"])
        random.Random().setstate(_of_random(kept["random"]))  # noqa: S311  no secrets here
        if kept["numpy"] is not None:
            random_state = importlib.import_module("numpy").random.RandomState()
            random_state.set_state(kept["numpy"])
    except (TypeError, ValueError, LookupError, RuntimeError, ImportError) as error:
        raise ValueError(f"what it holds is no state of a generator here: {error}") from error


def set_states(kept: Mapping[str, Any]) -> None:
    """Put what `states` gave in place."""
    torch.default_generator.set_state(kept["torch"])
    for device, state in enumerate(kept["cuda"]):
        torch.cuda.set_rng_state(state, device)
    random.setstate(_of_random(kept["random"]))
    if kept["numpy"] is not None:
        importlib.import_module("numpy").random.set_state(kept["numpy"])


def _of_random(kept: list[Any]) -> tuple[Any, ...]:
    version, words, gauss = kept
    return version, tuple(words.tolist()), gauss
