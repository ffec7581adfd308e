"""Seed random numbers, so that a resumed run draws the same ones as the uninterrupted run.

Mode ``derived``: nothing but the seed is stored. At each step boundary, and again when the next batch is
requested, every rank seeds its generators from (seed, rank, step). A new rank therefore has its own
stream. Numbers that a script draws in between, for an evaluation or a new DataLoader, do not change later
steps. At one step all ranks have different seeds. Different steps may share a seed, because torch's CPU
generator and numpy use only 32 bits.

Mode ``off``: random numbers are left alone.

A DataLoader seeds its workers by their number and by a draw of its own. What ``__getitem__`` draws would
depend on the worker, on the samples that the worker read before, and on where a resume began. So a worker
that receives a batch of ours seeds its generators from (seed, epoch, index) before each sample. Seed and
epoch are sent with the batch, so prefetching and persistent workers change nothing. The main process
(``num_workers=0``) draws the numbers of the step.

Invariant: a sample of an epoch draws the same numbers in any worker, at any world size, before and after a
resume. With `seeded` it draws them in the main process too, whose generators do not change.

Not covered: generators that the dataset makes itself (``numpy.random.default_rng()``). Make them in
``__getitem__`` from ``torch.initial_seed()``, which is the sample's seed.

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
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import xxhash
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from elastic_resume.errors import ConfigError, UsageError

DERIVED, OFF = MODES = ("derived", "off")
_LOW_32_BITS = 0xFFFFFFFF
_SAMPLE_SALT, _RANK_SALT = 1, 2  # a sample must not get the seed of a step

T = TypeVar("T")


class RandomNumbers:
    """One rank's random numbers. Checkpoints store the seed, and ``marks`` beside it."""

    def __init__(self, mode: str, seed: int, rank: int = 0) -> None:
        """Start with ``seed``, of at most 64 bits; ``mode`` is one of MODES."""
        self.seed = seed
        self.marks: dict[str, int] = {}  # facts about the job; here because checkpoints have no other place
        self._mode, self._rank = mode, rank
        self._stepping_thread = 0  # the thread that ended the last step, until it requests a batch

    def state_dict(self) -> dict[str, int]:
        """Return the seed and the marks."""
        return {"seed": self.seed, **self.marks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the job's first seed, and its marks."""
        self.seed = state["seed"]
        self.marks = {name: value for name, value in state.items() if name != "seed"}

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


# ---- samples ------------------------------------------------------------------------------------------


class SeededIndices(list[int]):
    """The indices of one batch, with the seed and the epoch of their order.

    A DataLoader's worker seeds its generators from ``worker_seed``; it does not if that is None.
    """

    __slots__ = ("epoch", "seed", "worker_seed")

    def __init__(self, indices: Iterable[int], seed: int, epoch: int, worker_seed: int | None = None) -> None:
        super().__init__(indices)
        self.seed = seed
        self.epoch = epoch
        self.worker_seed = worker_seed

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive_batch, (list(self), self.seed, self.epoch, self.worker_seed)


class _WorkerIndices(SeededIndices):
    """A batch in a worker. It seeds for a sample when the loader asks for its index.

    So the dataset stays the script's own object, and `collate_fn` draws on from the last sample.
    """

    __slots__ = ()

    def __iter__(self) -> Iterator[int]:
        for index in super().__iter__():
            self.seed_for(index)
            yield index

    def seed_for(self, index: int) -> None:
        seed_cpu_generators(mix_words(self.worker_seed or 0, self.epoch, index, _SAMPLE_SALT))


def _receive_batch(indices: list[int], seed: int, epoch: int, worker_seed: int | None) -> SeededIndices:
    """Unpickle a batch."""
    if worker_seed is None or get_worker_info() is None:
        return SeededIndices(indices, seed, epoch, worker_seed)
    batch = _WorkerIndices(indices, seed, epoch, worker_seed)
    batch.seed_for(indices[0])  # for a dataset that reads the whole batch with one call
    return batch


class SeededIndex(int):
    """One index with its seed and epoch, for a sampler whose batches a DataLoader makes.

    Slower than `SeededIndices`: for 10,000 indices 45 ms instead of 0.04 ms to send.
    """

    seed: int
    epoch: int
    worker_seed: int | None

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive_index, (int(self), self.seed, self.epoch, self.worker_seed)


def attach_epoch(
    indices: Iterable[int], seed: int, epoch: int, worker_seed: int | None = None
) -> Iterator[SeededIndex]:
    """Yield each index with the seed and epoch of its order."""
    for plain_index in indices:
        index = SeededIndex(plain_index)
        index.seed, index.epoch, index.worker_seed = seed, epoch, worker_seed
        yield index


def _receive_index(plain_index: int, seed: int, epoch: int, worker_seed: int | None) -> SeededIndex:
    """Unpickle an index. It is a task of its own if the dataset's items are whole batches."""
    _receive_batch([plain_index], seed, epoch, worker_seed)
    return next(attach_epoch([plain_index], seed, epoch, worker_seed))


class SeededDataset(Dataset[T]):
    """A dataset whose samples draw the same random numbers wherever they are read. Made by `seeded`."""

    def __init__(self, dataset: Dataset[T]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: Any) -> T:
        if isinstance(index, SeededIndex):
            return self.__getitems__([index])[0]
        raise UsageError(
            _NO_EPOCH_MESSAGE.format(got=f"the index {index!r}" if type(index) is int else "no batch")
        )

    def __getitems__(self, indices: list[int]) -> list[T]:
        """Read a batch. A DataLoader calls this."""
        if get_worker_info() is not None:
            return _read_samples(self.dataset, indices)
        with preserve_cpu_generators():
            return _read_samples(self.dataset, indices)


def seeded(dataset: Dataset[T]) -> SeededDataset[T]:
    """Make each sample of ``dataset`` draw its random numbers from (seed, epoch, index).

    Use ``DataLoader(er.seeded(dataset), batch_sampler=batches, num_workers=4)`` with a `GlobalBatches`,
    which has the seed; or ``sampler=er.ElasticSampler(seeded)``, made from the seeded dataset. The samples
    are then the same for any ``num_workers``, 0 included, any world size, and after a resume within an
    epoch. Use another ``seed`` there for other augmentation. torch's CPU generator, `random` and numpy's
    global generator are seeded before each ``dataset[index]``. Samples are read one by one, even if the
    dataset has ``__getitems__``.

    A ``collate_fn`` that draws continues with its batch's last sample in a worker, and with the numbers of
    the step in the main process (``num_workers=0``).

    Raises:
        ConfigError: the dataset is iterable, so its samples have no index.

    """
    if isinstance(dataset, SeededDataset):
        return dataset
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"er.seeded: {type(dataset).__name__} is an IterableDataset, whose samples have no index to seed "
            "from. Make it a map-style dataset with __getitem__ and __len__, or seed in its __iter__."
        )
    return SeededDataset(dataset)


_NO_EPOCH_MESSAGE = (
    "a seeded dataset got {got} without an epoch. Read it through "
    "DataLoader(er.seeded(dataset), batch_sampler=er.GlobalBatches(...)), with seeded() around all other "
    "wrappers of the dataset, or with an ElasticSampler made from the seeded dataset. To look at one sample, "
    "index the dataset itself."
)


def _read_samples(dataset: Any, indices: list[int]) -> list[Any]:
    samples = []
    for index in indices:
        origin = indices if isinstance(indices, SeededIndices) else index
        if not isinstance(origin, (SeededIndices, SeededIndex)):
            raise UsageError(_NO_EPOCH_MESSAGE.format(got=f"a plain {type(indices).__name__} of indices"))
        seed_cpu_generators(mix_words(origin.seed, origin.epoch, index, _SAMPLE_SALT))
        samples.append(dataset[int(index)])
    return samples
