"""Which samples each rank reads at each step, whatever the world size.

Step k of an epoch is one slice of one permutation of the dataset. The permutation comes from (seed, epoch)
alone; the slice is cut into one share per rank. So a position is (epoch, step) and nothing else: no counter
runs ahead with prefetching, and a world of another size goes on with the very next sample. torch's own
ElasticDistributedSampler keeps a number of samples per rank instead; when 4 ranks became 3 it repeated 243
of 1000 samples and never showed 243 others.

After a crash: whoever seeks the same (epoch, step) reads the same samples, each one once per epoch.

Not known here: how a position is saved, and which steps were finished. The `Run` binds and seeks. The order
is that of `torch.randperm`, which torch does not promise to keep between releases; a test pins it.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.utils.data import Sampler

from elastic_resume.errors import ConfigError, MismatchError
from elastic_resume.worker.seeding import Indices

IDENTITY = ("dataset_size", "global_batch", "seed", "shuffle", "drop_last")  # what decides the order
LARGEST = 2**63 - 1  # the seed and the epoch are mixed as 64-bit words


class GlobalBatches(Sampler[list[int]]):
    """A batch sampler: ``DataLoader(dataset, batch_sampler=GlobalBatches(len(dataset), 256))``.

    ``global_batch`` counts the samples of one optimizer step over all ranks. It stays what it is when the
    world changes; only the shares do. Shares of one batch differ by one sample at most, so multiply the loss
    by `loss_weight` (``run.loss_weight``): DDP's mean over the ranks is then the exact mean over the batch.

    A batch with fewer samples than there are ranks leaves some without a share. Such a rank reads one sample
    that another rank has too, because it must take part in the all-reduce, and its loss weight is 0.0, so
    nothing is counted twice. ``drop_last=True`` leaves a partial last batch out.

    An unbound object is rank 0 of a world of 1. The permutation (8 bytes per sample) is kept for the current
    epoch only; ``shuffle=False`` keeps none.
    """

    def __init__(
        self,
        dataset_size: int,
        global_batch: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        """Sizes in samples.

        Raises:
            ConfigError: a size is not a positive integer, a flag is not a bool, or an epoch would have no
                step because ``drop_last`` drops the only batch.

        """
        self.dataset_size = _integer("dataset_size", dataset_size, least=1)
        self.global_batch = _integer("global_batch", global_batch, least=1)
        self.seed = _integer("seed", seed, least=-(2**63))
        self.shuffle = _flag("shuffle", shuffle)
        self.drop_last = _flag("drop_last", drop_last)
        if self.drop_last and self.dataset_size < self.global_batch:
            raise ConfigError(
                f"drop_last=True leaves an epoch without a step: dataset_size {self.dataset_size} is less "
                f"than global_batch {self.global_batch}. Use a smaller global_batch or drop_last=False."
            )
        self._rank, self._world_size = 0, 1
        self._epoch, self._step = 0, 0
        self._on_ask: Callable[[bool], None] | None = None
        self.exhausted = False  # whether the newest iterator was asked for more than the epoch has
        self._order: tuple[int, Tensor] | None = None  # (epoch, its permutation)

    # ---- what the Run calls ------------------------------------------------------------------------

    def bind(self, rank: int, world_size: int, on_ask: Callable[[bool], None] | None = None) -> None:
        """Give the place in the world to iterators made from now on.

        ``on_ask(first)`` is called when such an iterator is asked for a batch, before it gives one or has
        none left. A DataLoader draws a seed for its workers from torch's global generator after it has made
        the iterator and before the first batch; a resumed run draws it in the middle of an epoch, the
        uninterrupted run does not. Seeding the step's generators in ``on_ask`` takes that difference back.
        """
        size = _integer("world_size", world_size, least=1)
        self._rank = _integer("rank", rank, least=0, most=size - 1)
        self._world_size = size
        self._on_ask = on_ask

    def seek(self, epoch: int, step_in_epoch: int) -> None:
        """Make the next ``iter()`` start at this step; at ``len(self)`` nothing is left of the epoch.

        Raises:
            ConfigError: there is no such step.

        """
        step = _integer("step_in_epoch", step_in_epoch, least=0, most=len(self))
        self._epoch, self._step = _integer("epoch", epoch, least=0), step

    def state_dict(self) -> dict[str, Any]:
        """Say what decides the order of samples. The position is not part of it: the Run keeps that."""
        return {name: getattr(self, name) for name in IDENTITY}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that the checkpoint's order is this one; nothing is changed.

        Raises:
            MismatchError: it is another order, in which going on would repeat some samples and skip others.

        """
        mine = self.state_dict()
        differing = [
            f"{name} is {mine.get(name, 'unknown')!r} here, {state.get(name, 'missing')!r} in the checkpoint"
            for name in [*IDENTITY, *sorted(set(state) - set(IDENTITY))]
            if name not in state or name not in mine or mine[name] != state[name]
        ]
        if differing:
            raise MismatchError(
                f"The order of samples differs: {'; '.join(differing)}. Going on would repeat some samples "
                "and skip others: give GlobalBatches the checkpoint's values, or start afresh (--resume "
                "never, or another --rdzv-id)."
            )

    # ---- what a DataLoader calls -------------------------------------------------------------------

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's indices for each step from the sought one to the epoch's end.

        Start, place and order are taken now, so iterators that live at once do not disturb each other.
        """
        steps = range(self._step, len(self))
        walk = self._walk(steps, self._permutation(), self._rank, self._world_size, self._epoch)
        return walk if self._on_ask is None else _Telling(walk, self._on_ask)

    def __len__(self) -> int:
        """Count the steps of a whole epoch, also after `seek`: what a progress bar or OneCycleLR needs."""
        whole, partial = divmod(self.dataset_size, self.global_batch)
        return whole if self.drop_last or not partial else whole + 1

    # ---- arithmetic of one step --------------------------------------------------------------------

    @property
    def samples_per_epoch(self) -> int:
        """The samples that one epoch shows: all, or with ``drop_last`` those of whole batches."""
        return len(self) * self.global_batch if self.drop_last else self.dataset_size

    def samples(self, step_in_epoch: int) -> int:
        """Count the samples of this global batch; the last one of an epoch may be partial.

        Raises:
            ConfigError: there is no such step.

        """
        step = _integer("step_in_epoch", step_in_epoch, least=0, most=len(self) - 1)
        return min(self.global_batch, self.dataset_size - step * self.global_batch)

    def share(self, step_in_epoch: int) -> range:
        """Give the part of this global batch that this rank reads, as positions in the batch; never empty."""
        return _read(self.samples(step_in_epoch), self._rank, self._world_size)

    def loss_weight(self, step_in_epoch: int) -> float:
        """Factor for the mean loss over this rank's share.

        The mean over the ranks of ``loss_weight * mean(share)`` is the mean over the global batch:
        share size times world size over batch size. It is 0.0 where the share is another rank's sample.
        """
        samples = self.samples(step_in_epoch)
        return len(share_of(samples, self._rank, self._world_size)) * self._world_size / samples

    # ---- inside ------------------------------------------------------------------------------------

    def _permutation(self) -> Tensor | None:
        if not self.shuffle:
            return None
        if self._order is None or self._order[0] != self._epoch:
            self._order = None  # before the next one is made: two would be twice the memory
            word = xxhash.xxh3_64_intdigest(struct.pack("<qq", self.seed, self._epoch))
            # torch's CPU generator is seeded by the low 32 bits alone: (seed, epoch) must be mixed into them.
            generator = torch.Generator().manual_seed(word >> 1)
            self._order = self._epoch, torch.randperm(self.dataset_size, generator=generator)
        return self._order[1]

    def _walk(
        self,
        steps: range,
        order: Tensor | None,
        rank: int,
        world_size: int,
        epoch: int,
    ) -> Iterator[list[int]]:
        self.exhausted = False
        for step in steps:
            read = _read(self.samples(step), rank, world_size)
            first = step * self.global_batch
            here = range(first + read.start, first + read.stop)
            indices = here if order is None else order[here.start : here.stop].tolist()
            yield Indices(indices, self.seed, epoch)
        self.exhausted = True


class _Telling(Iterator[list[int]]):
    """An iterator that tells when it is asked, when nothing is left too."""

    def __init__(self, inner: Iterator[list[int]], tell: Callable[[bool], None]) -> None:
        self._inner, self._tell, self._first = inner, tell, True

    def __next__(self) -> list[int]:
        first, self._first = self._first, False
        self._tell(first)
        return next(self._inner)


def share_of(samples: int, rank: int, world_size: int) -> range:
    """Cut ``samples`` into one share per rank, in rank order.

    The first ``samples % world_size`` ranks get one more; a share is empty where ranks outnumber samples.
    """
    least, more = divmod(samples, world_size)
    start = rank * least + min(rank, more)
    return range(start, start + least + (rank < more))


def _read(samples: int, rank: int, world_size: int) -> range:
    share = share_of(samples, rank, world_size)
    if share:
        return share
    repeated = rank % samples
    return range(repeated, repeated + 1)


def _integer(name: str, value: object, least: int, most: int = LARGEST) -> int:
    """Take whatever is an integer (numpy's too), but neither a bool nor a float."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        bounds = f"from {least} to {most}" if most < LARGEST else f"of at least {least}"
        plain = isinstance(value, (int, float, str, type(None)))
        shown = repr(value) if plain else f"a {type(value).__name__}"
        advice = "; pass len(dataset)" if name == "dataset_size" and hasattr(value, "__len__") else ""
        raise ConfigError(f"{name} must be an integer {bounds}, got {shown}{advice}.")
    return number


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {value!r}.")
    return value
