"""Which samples each rank reads at each step, whatever the world size.

Step k of an epoch is one slice of one permutation of the dataset. The permutation comes from (seed, epoch)
alone; the slice is cut into one share per rank. So a position is (epoch, step) and nothing else: no counter
runs ahead with prefetching, and a world of another size goes on with the very next sample. torch's own
ElasticDistributedSampler keeps a number of samples per rank instead; when 4 ranks became 3 it repeated 243
of 1000 samples and never showed 243 others.

Where the global batch itself changes with the world (``keep_local_batch``) the epoch that is under way is cut
anew from the sample that comes next; from where, is stored with the order (`worldsize.Cut`).

After a crash: whoever seeks the same (epoch, step) reads the same samples, each one once per epoch.

Not known here: how a position is saved, and which steps were finished. The `Run` binds and seeks. The order
is that of `torch.randperm`, which torch does not promise to keep between releases; a test pins it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.utils.data import Sampler

from elastic_resume.checkpoint.manifest import Position
from elastic_resume.data import world_size
from elastic_resume.data.seeded_dataset import SeededIndices
from elastic_resume.data.world_size import (
    KEEP_LOCAL,
    BatchSizing,
    EpochPlan,
    check_bool,
    check_integer,
    compute_share,
)
from elastic_resume.errors import ConfigError, MismatchError

# What decides the order, in the names of the checkpoint and of the arguments.
ORDER_ARGUMENTS = ("dataset_size", "global_batch", "seed", "shuffle", "drop_last")
SIZING_KEY = "cut"  # the checkpoint's name for what a change of the world has made of the global batch


class GlobalBatches(Sampler[list[int]]):
    """A batch sampler: ``DataLoader(dataset, batch_sampler=GlobalBatches(len(dataset), 256))``.

    ``global_batch`` counts the samples of one optimizer step over all ranks. It stays what it is when the
    world changes, and only the shares do; or, with ``on_world_change="keep_local_batch"`` in `resume`, it
    follows the number of ranks, and is that of the ranks with which the job began. Shares of one batch differ
    by one sample at most, so multiply the loss by ``run.loss_weight``: DDP's mean over the ranks is then the
    exact mean over the batch.

    ``micro_batch`` is the largest number of samples that a rank shall have in one forward pass. Each share
    is split evenly into as many parts as the largest share of the step needs, so all ranks do the same number
    of passes. Read them through ``run.micro_batches(loader)``.

    A batch with fewer samples than there are ranks leaves some without a share, and a share may have fewer
    samples than the step has parts. Such a rank reads a sample that counts elsewhere, because it must take
    part in the all-reduce, and its loss weight is 0.0, so nothing is counted twice. ``drop_last=True`` leaves
    a partial last batch out.

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
        *,
        micro_batch: int | None = None,
    ) -> None:
        """Sizes in samples.

        Raises:
            ConfigError: a size is not a positive integer, a flag is not a bool, or an epoch would have no
                step because ``drop_last`` drops the only batch.

        """
        self.dataset_size = check_integer("dataset_size", dataset_size, least=1)
        self._initial_global_batch = check_integer(
            "global_batch", global_batch, least=1
        )  # in the job's first world
        self._requested_global_batch = self._initial_global_batch
        self.seed = check_integer("seed", seed, least=-(2**63))
        self.shuffle = check_bool("shuffle", shuffle)
        self.drop_last = check_bool("drop_last", drop_last)
        self.micro_batch = None if micro_batch is None else check_integer("micro_batch", micro_batch, least=1)
        self._rank, self._world_size = 0, 1
        self._policy: str | None = None
        self._sizing = self._make_sizing(self._requested_global_batch)
        self._epoch, self._step = 0, 0
        self._on_batch_request: Callable[[bool], None] | None = None
        self.exhausted = False  # whether the newest iterator was asked for more than the epoch has
        self._cached_permutation: tuple[int, Tensor] | None = None  # (epoch, its permutation)

    # ---- what the Run calls ------------------------------------------------------------------------

    def bind(
        self,
        rank: int,
        world_size: int,
        on_batch_request: Callable[[bool], None] | None = None,
        *,
        policy: str | None = None,
    ) -> None:
        """Give the place in the world to iterators made from now on, and what a change of the world means.

        All is as at a job's beginning then, until `load_state_dict` and `enter`.

        ``on_ask(first)`` is called when such an iterator is asked for a batch, before it gives one or has
        none left. A DataLoader draws a seed for its workers from torch's global generator after it has made
        the iterator and before the first batch; a resumed run draws it in the middle of an epoch, the
        uninterrupted run does not. Seeding the step's generators in ``on_ask`` takes that difference back.
        """
        size = check_integer("world_size", world_size, least=1)
        self._rank = check_integer("rank", rank, least=0, most=size - 1)
        self._world_size = size
        self._on_batch_request = on_batch_request
        self._policy = policy
        self._initial_global_batch = self._requested_global_batch
        self._sizing = self._sizing_for_world(None, size)

    def begin_generation(self, position: Position | None, old_world_size: int | None) -> int | None:
        """Begin a generation, after `load_state_dict`: have the global batch that this world is to have.

        Where that is another one than the checkpoint's, the epoch is cut anew from ``position`` on.

        Returns:
            The global batch before, None after a cold start.

        Raises:
            ConfigError: with this world's global batch ``drop_last`` leaves an epoch without a step.
            MismatchError: the batch is not to change, and does.

        """
        if position is None:
            return None
        before = self._sizing
        wanted = self._sizing_for_world(before, old_world_size or self._world_size)
        self._sizing = before.switch_to(wanted, self.dataset_size, position.epoch, position.step_in_epoch)
        self.seek(position.epoch, position.step_in_epoch)
        return before.global_batch

    def seek(self, epoch: int, step_in_epoch: int) -> None:
        """Make the next ``iter()`` start at this step; at ``steps`` nothing is left of the epoch.

        Raises:
            ConfigError: there is no such step.

        """
        epoch = check_integer("epoch", epoch, least=0)
        cut = self._sizing.plan_epoch(self.dataset_size, epoch)
        step = check_integer("step_in_epoch", step_in_epoch, least=cut.first_step, most=cut.steps)
        self._epoch, self._step = epoch, step

    def advance(self, step_in_epoch: int) -> None:
        """Make the next ``iter()`` of the sought epoch start here, or at its beginning when nothing is left.

        So a loader that is left in mid-epoch goes on where training stands; and who reads it once more behind
        the epoch's last step, for BatchNorm's statistics, say, reads all of it.
        """
        cut = self._epoch_plan()
        self._step = step_in_epoch if step_in_epoch < cut.steps else cut.first_step

    def state_dict(self) -> dict[str, Any]:
        """Say what decides the order of samples. The position is not part of it: the Run keeps that."""
        state = self._order_arguments(self._initial_global_batch)
        if self._sizing != self._make_sizing(self._initial_global_batch):
            state[SIZING_KEY] = self._sizing.to_state()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that the checkpoint's order is this one, and take how it was cut; `enter` says what follows.

        Raises:
            MismatchError: it is another order, in which going on would repeat some samples and skip others.

        """
        sizing = BatchSizing.parse(state[SIZING_KEY], self.dataset_size) if SIZING_KEY in state else None
        mine = self._order_arguments(self._resolve_initial_batch(state, sizing))
        known = [*mine, *sorted(set(state) - {*mine, SIZING_KEY})]
        differing = [
            f"{name} is {mine.get(name, 'unknown')!r} here, {state.get(name, 'missing')!r} in the checkpoint"
            for name in known
            if name not in state or name not in mine or mine[name] != state[name]
        ]
        if differing:
            raise MismatchError(
                f"The order of samples differs: {'; '.join(differing)}. Going on would repeat some samples "
                f"and skip others: give {self._class_name} the checkpoint's values, or start afresh (--resume "
                "never, or another --rdzv-id)."
            )
        self._initial_global_batch = mine.get("global_batch", self._requested_global_batch)
        self._sizing = sizing or self._make_sizing(self._initial_global_batch)

    # ---- what a DataLoader calls -------------------------------------------------------------------

    def __iter__(self) -> Iterator[SeededIndices]:
        """Yield this rank's indices for each step from the sought one to the epoch's end, part by part.

        Start, place and order are taken now, so iterators that live at once do not disturb each other.
        """
        place = self._rank, self._world_size
        walk = self._iterate(self._step, self._epoch_plan(), self._permutation(), place, self._order_epoch())
        return walk if self._on_batch_request is None else _NotifyingIterator(walk, self._on_batch_request)

    def __len__(self) -> int:
        """Count what a loader yields in a whole epoch, also after `seek`: what a progress bar needs.

        That is `steps`, or with ``micro_batch`` their parts (those of steps that another world took, as if
        this one had taken them).
        """
        cut = self._epoch_plan()
        if self.micro_batch is None:
            return cut.steps
        whole = world_size.count_micro_batches(cut.global_batch, self._world_size, self.micro_batch)
        return (cut.steps - 1) * whole + (self.parts(cut.steps - 1) if cut.steps > cut.first_step else whole)

    # ---- arithmetic of one step --------------------------------------------------------------------

    @property
    def global_batch(self) -> int:
        """The samples of one optimizer step over all ranks, in this world."""
        return self._sizing.global_batch

    @property
    def steps(self) -> int:
        """The optimizer steps of the whole epoch that was sought: what OneCycleLR needs."""
        return self._epoch_plan().steps

    @property
    def samples_per_epoch(self) -> int:
        """The samples that one epoch shows: all, or with ``drop_last`` those of whole batches."""
        return self._epoch_plan().end_sample

    def samples(self, step_in_epoch: int) -> int:
        """Count the samples of this global batch; the last one of an epoch may be partial.

        Raises:
            ConfigError: there is no such step, or it was taken before the epoch was cut anew.

        """
        cut = self._epoch_plan()
        step = check_integer("step_in_epoch", step_in_epoch, least=cut.first_step, most=cut.steps - 1)
        return cut.sample_count(step)

    def share(self, step_in_epoch: int) -> range:
        """Give the part of this global batch that this rank reads, as positions in the batch; never empty."""
        return _nonempty_share(self.samples(step_in_epoch), self._rank, self._world_size)

    def parts(self, step_in_epoch: int) -> int:
        """Count the micro-batches of a step, the same on all ranks; 1 without ``micro_batch``."""
        return world_size.count_micro_batches(self.samples(step_in_epoch), self._world_size, self.micro_batch)

    def loss_weight(self, step_in_epoch: int, part: int | None = None) -> float:
        """Factor for the mean loss over this rank's share, or over one part of it.

        The mean over the ranks of ``loss_weight * mean(share)`` is the mean over the global batch:
        share size times world size over batch size. It is 0.0 where what is read counts elsewhere. The
        weights of a share's parts add up to that of the share.
        """
        samples = self.samples(step_in_epoch)
        mine = len(compute_share(samples, self._rank, self._world_size))
        if part is not None:
            mine = len(compute_share(mine, part, self.parts(step_in_epoch)))
        return mine * self._world_size / samples

    # ---- what an ElasticSampler does otherwise -----------------------------------------------------

    _class_name = "GlobalBatches"

    def _order_arguments(self, global_batch: int) -> dict[str, Any]:
        """Give what decides the order of samples in the job's first world, by name."""
        return {**{name: getattr(self, name) for name in ORDER_ARGUMENTS}, "global_batch": global_batch}

    def _sizing_for_world(self, before: BatchSizing | None, old_world_size: int) -> BatchSizing:
        """Say how this world cuts epochs, which another one has cut as ``before``; None at the beginning."""
        if self._policy != KEEP_LOCAL:
            return self._make_sizing(self._initial_global_batch)
        first_world = (before and before.of_world) or old_world_size  # none: it was the same in any world
        size = world_size.scale_global_batch(self._initial_global_batch, first_world, self._world_size)
        return self._make_sizing(size, reference_world_size=first_world)

    def _make_sizing(self, global_batch: int, reference_world_size: int = 0) -> BatchSizing:
        if self.drop_last and self.dataset_size < global_batch:
            raise ConfigError(
                f"drop_last=True leaves an epoch without a step: dataset_size {self.dataset_size} is less "
                f"than global_batch {global_batch}. Use a smaller global_batch or drop_last=False."
            )
        return BatchSizing(global_batch, global_batch if self.drop_last else 1, reference_world_size)

    def _order_epoch(self) -> int:
        """Say which epoch's order the next iterator reads in."""
        return self._epoch

    # ---- inside ------------------------------------------------------------------------------------

    def _resolve_initial_batch(self, state: Mapping[str, Any], sizing: BatchSizing | None) -> int:
        """Give what the argument is in the job's first world.

        A script may say the same number in every world, or make it from the number of ranks itself.
        """
        first = state.get("global_batch")
        if self._policy != KEEP_LOCAL or sizing is None or not sizing.of_world or type(first) is not int:
            return self._requested_global_batch
        here = world_size.scale_global_batch(first, sizing.of_world, self._world_size)
        return first if self._requested_global_batch == here else self._requested_global_batch

    def _epoch_plan(self) -> EpochPlan:
        return self._sizing.plan_epoch(self.dataset_size, self._epoch)

    def _permutation(self) -> Tensor | None:
        if not self.shuffle:
            return None
        epoch = self._order_epoch()
        if self._cached_permutation is None or self._cached_permutation[0] != epoch:
            self._cached_permutation = None  # before the next one is made: two would be twice the memory
            self._cached_permutation = epoch, make_permutation(self.dataset_size, self.seed, epoch)
        return self._cached_permutation[1]

    def _iterate(
        self,
        start: int,
        plan: EpochPlan,
        order: Tensor | None,
        rank_and_world_size: tuple[int, int],
        epoch: int,
    ) -> Iterator[SeededIndices]:
        self.exhausted = False
        for step in range(start, plan.steps):
            samples, first = plan.sample_count(step), plan.sample_offset(step)
            share = _nonempty_share(samples, *rank_and_world_size)
            parts = world_size.count_micro_batches(samples, rank_and_world_size[1], self.micro_batch)
            for part in range(parts):
                read = _nonempty_share(len(share), part, parts)
                here = range(first + share[read.start], first + share[read.stop - 1] + 1)
                indices = here if order is None else order[here.start : here.stop].tolist()
                yield SeededIndices(indices, self.seed, epoch)
        self.exhausted = True


class _NotifyingIterator(Iterator[SeededIndices]):
    """An iterator that tells when it is asked, when nothing is left too."""

    def __init__(self, inner: Iterator[SeededIndices], on_batch_request: Callable[[bool], None]) -> None:
        self._indices, self._on_batch_request, self._is_first = inner, on_batch_request, True

    def __next__(self) -> SeededIndices:
        first, self._is_first = self._is_first, False
        self._on_batch_request(first)
        return next(self._indices)


def make_permutation(dataset_size: int, seed: int, epoch: int) -> Tensor:
    """Give an epoch's permutation of the dataset."""
    word = xxhash.xxh3_64_intdigest(struct.pack("<qq", seed, epoch))
    # torch's CPU generator is seeded by the low 32 bits alone: (seed, epoch) must be mixed into them.
    generator = torch.Generator().manual_seed(word >> 1)
    return torch.randperm(dataset_size, generator=generator)


def _nonempty_share(samples: int, rank: int, world_size: int) -> range:
    share = compute_share(samples, rank, world_size)
    if share:
        return share
    repeated = rank % samples
    return range(repeated, repeated + 1)
