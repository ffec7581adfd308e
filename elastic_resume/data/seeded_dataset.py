"""Random augmentation that depends on the sample and the epoch, and on nothing else.

A DataLoader's workers are seeded by their number and by what the loader drew when it was made. So what
``__getitem__`` draws depends on which worker reads the sample and what that has read before: on
``num_workers``, on the world's size, and on where a resume began. Here the generators are seeded from
(seed, epoch, index) before each sample instead. Seed and epoch are those of the `GlobalBatches`, and travel
with each batch of indices: no worker has to be told of an epoch, and prefetching and persistent workers
change nothing.

Promise: the same sample in the same epoch draws the same numbers in the main process and in workers however
they are started, at any world size, before and after a resume; and reading leaves no trace in
the generators of the main process.

Not covered: generators that the dataset has made for itself (``numpy.random.default_rng()``). Make them in
``__getitem__``, from ``torch.initial_seed()``, which is the sample's.

Cost (benchmarks/random_numbers.py): 7 us for each sample; 0.04 ms to send the seed and epoch of a batch of
10,000 indices along. An epoch on each index costs 2 ms to make and 45 ms to send for that batch: so it is
only for an `ElasticSampler`, whose batches a DataLoader makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from torch.utils.data import Dataset, IterableDataset, get_worker_info

from elastic_resume.data import rng
from elastic_resume.errors import ConfigError, UsageError

T = TypeVar("T")

_SAMPLE_SALT = 1  # salt: a sample draws other numbers than a step whose words are the same


class SeededIndices(list[int]):
    """The indices of one batch, with the seed and the epoch of the order that they are from."""

    __slots__ = ("epoch", "seed")

    def __init__(self, indices: Iterable[int], seed: int, epoch: int) -> None:
        super().__init__(indices)
        self.seed = seed
        self.epoch = epoch


class SeededIndex(int):
    """One index with the seed and the epoch, for samplers, whose batches are made by others."""

    seed: int
    epoch: int


def attach_epoch(indices: Iterable[int], seed: int, epoch: int) -> Iterator[SeededIndex]:
    """Have each index carry its order's seed and epoch."""
    for number in indices:
        index = SeededIndex(number)
        index.seed, index.epoch = seed, epoch
        yield index


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
        """Read a batch; this is what a DataLoader calls."""
        if get_worker_info() is not None:
            return _read_samples(self.dataset, indices)
        with rng.preserve_cpu_generators():
            return _read_samples(self.dataset, indices)


def seeded(dataset: Dataset[T]) -> SeededDataset[T]:
    """Have each sample of ``dataset`` draw its random numbers from (seed, epoch, index).

    ``DataLoader(er.seeded(dataset), batch_sampler=batches, num_workers=4)``, with a `GlobalBatches`, whose
    ``seed`` it is; or with ``sampler=er.ElasticSampler(seeded)``, made from the seeded dataset. The samples
    are then the same for any ``num_workers``, 0 too, and any world size, and a run that resumes in mid-epoch
    goes on with the very same; a trial with other augmentation has another ``seed`` there. torch's CPU
    generator, `random` and numpy's global one are seeded before each ``dataset[index]``. Samples are read one
    by one, also where the dataset has a ``__getitems__``: what a batch draws would depend on who is in it.

    A ``collate_fn`` that draws comes after that: in a worker it continues with its batch's last sample, in
    the main process (``num_workers=0``) with the numbers of the step.

    Raises:
        ConfigError: the dataset is iterable: its samples have no index.

    """
    if isinstance(dataset, SeededDataset):
        return dataset
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"er.seeded: {type(dataset).__name__} is an IterableDataset, whose samples have no index to seed "
            "from. Give it a __getitem__ and a __len__ (a map-style dataset), or seed in its __iter__."
        )
    return SeededDataset(dataset)


_NO_EPOCH_MESSAGE = (
    "a seeded dataset was asked for {got}, which does not say of which epoch it is: read it through "
    "DataLoader(er.seeded(dataset), batch_sampler=er.GlobalBatches(...)), with seeded() around all other "
    "wrappers of the dataset, or with an ElasticSampler that was made from the seeded dataset. For a look at "
    "one sample take it from the dataset itself."
)


def _read_samples(dataset: Any, indices: list[int]) -> list[Any]:
    samples = []
    for index in indices:
        origin = indices if isinstance(indices, SeededIndices) else index
        if not isinstance(origin, (SeededIndices, SeededIndex)):
            raise UsageError(_NO_EPOCH_MESSAGE.format(got=f"a plain {type(indices).__name__} of indices"))
        rng.seed_cpu_generators(rng.mix_words(origin.seed, origin.epoch, index, _SAMPLE_SALT))
        samples.append(dataset[int(index)])
    return samples
