"""Decide which samples each rank reads at each step, for any world size.

Step k of an epoch is one slice of one permutation of the dataset. The permutation depends on (seed, epoch)
only. The slice is divided into one share per rank. A position is therefore (epoch, step) and nothing else:
prefetching moves no counter, and a world of another size continues with the next sample. torch's
ElasticDistributedSampler stores a number of samples per rank instead; when 4 ranks became 3 it repeated
243 of 1000 samples and skipped 243 others.

If the global batch itself changes with the world (``keep_local_batch``), the rest of the current epoch is
divided anew, from the next sample on. `BatchSizing` records where, and is stored with the order.

Invariant: seeking the same (epoch, step) reads the same samples, each once per epoch, before and after a
crash.

The order is that of `torch.randperm`. torch does not promise to keep it between releases; a test pins it.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.utils.data import BatchSampler

from elastic_resume.checkpoint.manifest import Position
from elastic_resume.data import batch_size
from elastic_resume.data.batch_size import (
    KEEP_LOCAL,
    BatchSizing,
    EpochPlan,
    check_bool,
    check_integer,
    compute_share,
)
from elastic_resume.data.rng import SeededIndices
from elastic_resume.errors import ConfigError, MismatchError, UsageError


@dataclass(frozen=True)
class MicroBatch:
    """One batch of a loader: its optimizer step, the factor for its mean loss, and if it ends the step."""

    step_in_epoch: int
    loss_weight: float
    is_last: bool


# Arguments that decide the order; the checkpoint uses the same names.
ORDER_ARGUMENTS = ("dataset_size", "global_batch", "seed", "shuffle", "drop_last")
SECOND_SHARDING = (
    "Something divides the batches among the ranks once more, so most samples would never be read. Leave the "
    "loader out of accelerator.prepare(), give Lightning's Trainer use_distributed_sampler=False, and do not "
    "use dispatch_batches=True."
)
SIZING_KEY = "cut"  # key in the checkpoint of the sizing after a change of the world


class GlobalBatches(BatchSampler):
    """A batch sampler: ``DataLoader(dataset, batch_sampler=GlobalBatches(len(dataset), 256))``.

    ``global_batch`` is the number of samples of one optimizer step over all ranks. It stays the same when
    the world changes. With ``on_world_change="keep_local_batch"`` in `resume` it is the batch of the job's
    first world, and grows with the number of ranks. Shares of one batch differ by at most one sample.
    Multiply the loss by ``run.loss_weight``: DDP's mean over the ranks is then the exact mean over the batch.

    ``micro_batch`` is the largest number of samples in one forward pass of a rank. Each share is split
    evenly into as many parts as the step's largest share needs, so all ranks do the same number of passes.
    Read them through ``run.micro_batches(loader)``.

    A batch with fewer samples than ranks leaves some ranks without a share, and a share may have fewer
    samples than the step has parts. Such a rank must still take part in the all-reduce. It reads a sample
    that another rank counts, with a loss weight of 0.0. ``drop_last=True`` leaves out a partial last
    batch.

    Before `resume`, rank and world size are those of the process group or of torchrun's environment, so that
    ``len()`` is right for a schedule. The permutation of the current epoch is kept (8 bytes per sample);
    ``shuffle=False`` keeps none.
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
        """Sizes are in samples.

        Raises:
            ConfigError: a size or flag is of the wrong kind, or ``drop_last`` drops the only batch.

        """
        self.dataset_size = check_integer("dataset_size", dataset_size, least=1)
        self._requested_global_batch = check_integer("global_batch", global_batch, least=1)
        self._initial_global_batch = self._requested_global_batch  # global batch of the job's first world
        self.seed = check_integer("seed", seed, least=-(2**63))
        self.shuffle = check_bool("shuffle", shuffle)
        self.drop_last = check_bool("drop_last", drop_last)
        self.micro_batch = None if micro_batch is None else check_integer("micro_batch", micro_batch, least=1)
        self._bound: tuple[int, int] | None = None
        self._policy: str | None = None
        self._sizing = self._make_sizing(self._requested_global_batch)
        self._epoch, self._step = 0, 0
        self._on_batch_request: Callable[[bool], None] | None = None
        self.worker_seed: int | None = None  # of the loader's workers; None: they are left alone
        # Whether the first iterator since `seek` has passed the end of the epoch. A script may read the epoch
        # once more with others, to evaluate.
        self.exhausted = False
        self.iterators = 0  # since `seek`
        self.handed_out = 0  # batches of the iterator of `exhausted`
        self.requesting_thread = 0  # It asked for the last of them.
        self.loader_prefetch: int | None = None  # batches that the loader requests ahead, if it is known
        self._cached_permutation: tuple[int, Tensor] | None = None  # (epoch, its permutation)

    @property
    def _rank(self) -> int:
        return (self._bound or batch_size.read_rank_and_world_size())[0]

    @property
    def _world_size(self) -> int:
        # Read only where it matters: before er.resume() a process may have no world yet.
        return (self._bound or batch_size.read_rank_and_world_size())[1]

    # ---- what the Run calls ------------------------------------------------------------------------

    def bind(
        self,
        rank: int,
        world_size: int,
        on_batch_request: Callable[[bool], None] | None = None,
        *,
        policy: str | None = None,
    ) -> None:
        """Set the rank, the world size and the policy for a changed world, for iterators made from now on.

        This starts a new job, until `load_state_dict` and `begin_generation` are called.

        ``on_batch_request(first)`` is called whenever such an iterator is asked for a batch, also after
        the last one. A DataLoader draws a seed for its workers from torch's global generator between
        making the iterator and the first batch. A resumed run draws it in mid-epoch, the uninterrupted run
        does not. The callback seeds the step's generators again, which removes that difference.
        """
        size = check_integer("world_size", world_size, least=1)
        self._bound = check_integer("rank", rank, least=0, most=size - 1), size
        self._on_batch_request = on_batch_request
        self._policy = policy
        self._initial_global_batch = self._requested_global_batch
        self._sizing = self._sizing_for_world(None, size)

    def begin_generation(self, position: Position | None, old_world_size: int | None) -> int | None:
        """Begin a generation after `load_state_dict`: set the global batch of this world.

        If it differs from the checkpoint's, the rest of the epoch after ``position`` is divided anew.

        Returns:
            The previous global batch; None after a cold start.

        Raises:
            ConfigError: with this world's global batch ``drop_last`` leaves an epoch without a step.
            MismatchError: the batch changes although the policy forbids it.

        """
        if position is None:
            return None
        before = self._sizing
        wanted = self._sizing_for_world(before, old_world_size or self._world_size)
        self._sizing = before.switch_to(wanted, self.dataset_size, position.epoch, position.step_in_epoch)
        self.seek(position.epoch, position.step_in_epoch)
        return before.global_batch

    def seek(self, epoch: int, step_in_epoch: int) -> None:
        """Make the next ``iter()`` start at this step, at most ``steps``. Raises ConfigError for others."""
        epoch = check_integer("epoch", epoch, least=0)
        plan = self._sizing.plan_epoch(self.dataset_size, epoch)
        step = check_integer("step_in_epoch", step_in_epoch, least=plan.first_step, most=plan.steps)
        self._epoch, self._step = epoch, step
        self.handed_out, self.exhausted, self.iterators = 0, False, 0

    def seek_start(self, epoch: int) -> None:
        """Make the next ``iter()`` start at the epoch's first step, for a loop that skips finished steps.

        Raises:
            UsageError: a world of another size took the epoch's first steps, which are not in this order.

        """
        if first := self._sizing.plan_epoch(self.dataset_size, epoch).first_step:
            raise UsageError(
                f"the number of ranks changed after step {first} of epoch {epoch}, so a loop cannot read the "
                "epoch from its start and skip the finished steps. Read on from run.begin_epoch() instead."
            )
        self.seek(epoch, 0)

    def advance(self, step_in_epoch: int) -> None:
        """Make the next ``iter()`` start at this step of the current epoch.

        A loader that is left in mid-epoch thus continues where training is. If nothing is left of the
        epoch, start at its beginning: a script may read it again, for BatchNorm's statistics for example.
        """
        plan = self._epoch_plan()
        self._step = step_in_epoch if step_in_epoch < plan.steps else plan.first_step

    def state_dict(self) -> dict[str, Any]:
        """Return what decides the order of samples. The Run stores the position."""
        state = self._order_arguments(self._initial_global_batch)
        if self._sizing != self._make_sizing(self._initial_global_batch):
            state[SIZING_KEY] = asdict(self._sizing)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that the checkpoint has the same order of samples, and load its sizing.

        Raises:
            MismatchError: the order differs; continuing would repeat some samples and skip others.

        """
        sizing = BatchSizing(**state[SIZING_KEY]) if SIZING_KEY in state else None
        here = self._order_arguments(self._resolve_initial_batch(state, sizing))
        differing = [
            f"{name} is {value!r} here, {state.get(name, 'missing')!r} in the checkpoint"
            for name, value in here.items()
            if name not in state or state[name] != value
        ]
        if differing:
            raise MismatchError(
                f"The order of samples differs: {'; '.join(differing)}. Continuing would repeat some samples "
                f"and skip others. Give {self._class_name} the checkpoint's values, or start from scratch "
                "(--resume never, or another --rdzv-id)."
            )
        self._initial_global_batch = here.get("global_batch", self._requested_global_batch)
        self._sizing = sizing or self._make_sizing(self._initial_global_batch)

    # ---- what a DataLoader calls -------------------------------------------------------------------

    def __iter__(self) -> Iterator[SeededIndices]:
        """Yield this rank's indices for each step from the sought one to the end of the epoch, part by part.

        Start, rank and order are read now, so several iterators do not disturb each other.
        """
        indices = self._iterate(
            self._step,
            self._epoch_plan(),
            self._permutation(),
            (self._rank, self._world_size),
            self._order_epoch(),
        )
        if self._on_batch_request is None:
            return indices
        return _NotifyingIterator(indices, self._on_batch_request)

    def __len__(self) -> int:
        """Return the number of batches that a loader yields in a whole epoch, also after `seek`.

        With ``micro_batch`` that is the number of parts. Steps that another world took count as if this
        one had.
        """
        plan = self._epoch_plan()
        if self.micro_batch is None:
            return plan.steps
        last_parts = self.parts(plan.steps - 1) if plan.steps > plan.first_step else self.batches_before(1)
        return self.batches_before(plan.steps - 1) + last_parts

    def batches_before(self, step_in_epoch: int) -> int:
        """Return the number of the loader's batches before a step, as if this world had taken them all."""
        global_batch = self._epoch_plan().global_batch
        return step_in_epoch * batch_size.count_micro_batches(
            global_batch, self._world_size, self.micro_batch
        )

    # ---- what libraries read from a BatchSampler -----------------------------------------------------

    @property
    def sampler(self) -> range:  # type: ignore[override]
        """All samples, since a BatchSampler has a sampler. It is not the order."""
        return range(self.dataset_size)

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        """The largest number of samples in one batch of the loader."""
        return min(-(-self.global_batch // self._world_size), self.micro_batch or self.global_batch)

    # ---- arithmetic of one step --------------------------------------------------------------------

    @property
    def global_batch(self) -> int:
        """The number of samples of one optimizer step over all ranks of this world."""
        return self._sizing.global_batch

    @property
    def steps(self) -> int:
        """The number of optimizer steps of the current epoch, as OneCycleLR needs it."""
        return self._epoch_plan().steps

    def samples(self, step_in_epoch: int) -> int:
        """Return the number of samples of a step. Raises ConfigError if this world does not take it."""
        plan = self._epoch_plan()
        step = check_integer("step_in_epoch", step_in_epoch, least=plan.first_step, most=plan.steps - 1)
        return plan.sample_count(step)

    def share(self, step_in_epoch: int) -> range:
        """Return this rank's part of the step's global batch, as positions in the batch; never empty."""
        return _nonempty_share(self.samples(step_in_epoch), self._rank, self._world_size)

    def parts(self, step_in_epoch: int) -> int:
        """Return the number of micro-batches of a step, the same on all ranks; 1 without ``micro_batch``."""
        return batch_size.count_micro_batches(self.samples(step_in_epoch), self._world_size, self.micro_batch)

    def loss_weight(self, step_in_epoch: int, part: int | None = None) -> float:
        """Return the factor for the mean loss over this rank's share, or over one part of it.

        It is (share size) * (world size) / (batch size). The mean over ranks of ``loss_weight *
        mean(share)`` is then the mean over the global batch. It is 0.0 for a sample that another rank
        counts. The weights of a share's parts add up to the weight of the share.
        """
        samples = self.samples(step_in_epoch)
        share_size = len(compute_share(samples, self._rank, self._world_size))
        if part is not None:
            share_size = len(compute_share(share_size, part, self.parts(step_in_epoch)))
        return share_size * self._world_size / samples

    def micro_batches_from(self, step_in_epoch: int) -> Iterator[MicroBatch]:
        """Yield what belongs to each batch that a loader yields from this step to the end of the epoch."""
        for step in range(step_in_epoch, self.steps):
            parts = self.parts(step)
            for part in range(parts):
                yield MicroBatch(step, self.loss_weight(step, part), part == parts - 1)

    # ---- overridden by the batches of an ElasticSampler ----------------------------------------------

    # Whether all batches of a step have the same weight, so that a loop may count them itself.
    has_equal_parts = False
    _class_name = "GlobalBatches"

    def explain_accumulation(self, batches_per_step: int) -> str:
        """Return how to read ``batches_per_step`` of the present batches in each optimizer step."""
        return (
            f"give GlobalBatches the samples of all {batches_per_step} batches as global_batch=, those of "
            f"one forward pass as micro_batch={self.batch_size}, and read run.micro_batches(loader)."
        )

    def _order_arguments(self, global_batch: int) -> dict[str, Any]:
        """Return what decides the order of samples in the job's first world, by name."""
        return {**{name: getattr(self, name) for name in ORDER_ARGUMENTS}, "global_batch": global_batch}

    def _sizing_for_world(self, before: BatchSizing | None, old_world_size: int) -> BatchSizing:
        """Return how this world divides epochs. ``before`` is the previous sizing, None in a new job."""
        if self._policy != KEEP_LOCAL:
            return self._make_sizing(self._initial_global_batch)
        # of_world is 0 if the batch was the same in any world
        first_world = (before and before.of_world) or old_world_size
        size = batch_size.scale_global_batch(self._initial_global_batch, first_world, self._world_size)
        return self._make_sizing(size, reference_world_size=first_world)

    def _make_sizing(self, global_batch: int, reference_world_size: int = 0) -> BatchSizing:
        if self.drop_last and self.dataset_size < global_batch:
            raise ConfigError(
                f"drop_last=True leaves an epoch without a step: dataset_size {self.dataset_size} is less "
                f"than global_batch {global_batch}. Use a smaller global_batch or drop_last=False."
            )
        return BatchSizing(global_batch, global_batch if self.drop_last else 1, reference_world_size)

    def _order_epoch(self) -> int:
        """Return the epoch whose order the next iterator uses."""
        return self._epoch

    def _resolve_initial_batch(self, state: Mapping[str, Any], sizing: BatchSizing | None) -> int:
        """Return the global batch that the argument means in the job's first world.

        A script may pass the same number in every world, or compute it from the number of ranks.
        """
        initial = state.get("global_batch")
        if self._policy != KEEP_LOCAL or sizing is None or not sizing.of_world or type(initial) is not int:
            return self._requested_global_batch
        scaled = batch_size.scale_global_batch(initial, sizing.of_world, self._world_size)
        return initial if self._requested_global_batch == scaled else self._requested_global_batch

    def _epoch_plan(self) -> EpochPlan:
        return self._sizing.plan_epoch(self.dataset_size, self._epoch)

    def _permutation(self) -> Tensor | None:
        if not self.shuffle:
            return None
        epoch = self._order_epoch()
        if self._cached_permutation is None or self._cached_permutation[0] != epoch:
            self._cached_permutation = None  # free its memory before the next one is made
            self._cached_permutation = epoch, make_permutation(self.dataset_size, self.seed, epoch)
        return self._cached_permutation[1]

    def _iterate(
        self,
        first_step: int,
        plan: EpochPlan,
        order: Tensor | None,
        rank_and_world_size: tuple[int, int],
        epoch: int,
    ) -> Iterator[SeededIndices]:
        self.iterators += 1
        is_first = self.iterators == 1
        for step in range(first_step, plan.steps):
            samples, first = plan.sample_count(step), plan.sample_offset(step)
            share = _nonempty_share(samples, *rank_and_world_size)
            parts = batch_size.count_micro_batches(samples, rank_and_world_size[1], self.micro_batch)
            for part in range(parts):
                if is_first:
                    self.handed_out, self.requesting_thread = self.handed_out + 1, threading.get_ident()
                in_share = _nonempty_share(len(share), part, parts)
                start, stop = first + share[in_share.start], first + share[in_share.stop - 1] + 1
                indices = range(start, stop) if order is None else order[start:stop].tolist()
                yield SeededIndices(indices, self.seed, epoch, self.worker_seed)
        if is_first:
            self.exhausted = True


class _NotifyingIterator(Iterator[SeededIndices]):
    """Calls back before each request, also those that a prefetching loader makes after the last batch."""

    def __init__(self, inner: Iterator[SeededIndices], on_batch_request: Callable[[bool], None]) -> None:
        self._indices, self._on_batch_request, self._is_first = inner, on_batch_request, True

    def __next__(self) -> SeededIndices:
        first, self._is_first = self._is_first, False
        self._on_batch_request(first)
        return next(self._indices)


def make_permutation(dataset_size: int, seed: int, epoch: int) -> Tensor:
    """Return the permutation of the dataset in an epoch."""
    mixed = xxhash.xxh3_64_intdigest(struct.pack("<qq", seed, epoch))
    # torch's CPU generator uses the low 32 bits only, so (seed, epoch) must be mixed into them.
    generator = torch.Generator().manual_seed(mixed >> 1)
    return torch.randperm(dataset_size, generator=generator)


def _nonempty_share(samples: int, rank: int, world_size: int) -> range:
    share = compute_share(samples, rank, world_size)
    if share:
        return share
    repeated = rank % samples
    return range(repeated, repeated + 1)
