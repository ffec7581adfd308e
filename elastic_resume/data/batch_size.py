"""Compute the samples of each step, rank and micro-batch, also after the number of ranks has changed.

A step's samples are a slice of the epoch's order. Each rank's share is a slice of the step, and each
micro-batch a slice of the share. This is pure arithmetic on (samples read, global batch, ranks);
`global_batches` applies it. So a world of another size continues with the next sample, whether the global
batch changes or not.
"""

from __future__ import annotations

import logging
import operator
import os
from dataclasses import dataclass, replace

import torch.distributed as dist

from elastic_resume.errors import ConfigError, UsageError, WorldChangedError
from elastic_resume.units import format_count

logger = logging.getLogger(__name__)

MAX_INT64 = 2**63 - 1  # seeds and epochs are mixed as 64-bit words


def check_integer(name: str, value: object, least: int, most: int = MAX_INT64) -> int:
    """Return ``value`` as an int. numpy integers pass; bools and floats raise ConfigError."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        bounds = f"from {least} to {most}" if most < MAX_INT64 else f"of at least {least}"
        is_plain = isinstance(value, (int, float, str, type(None)))
        shown = repr(value) if is_plain else f"a {type(value).__name__}"
        advice = "; pass len(dataset)" if name == "dataset_size" and hasattr(value, "__len__") else ""
        raise ConfigError(f"{name} must be an integer {bounds}, got {shown}{advice}.")
    return number


def check_bool(name: str, value: object) -> bool:
    """Return ``value`` if it is a bool; raise ConfigError otherwise."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {value!r}.")
    return value


def read_rank_and_world_size() -> tuple[int, int]:
    """Return those of the process group; before it exists those of torchrun's environment, else 0 and 1.

    The environment is that of torchrun if `er.resume` would create a process group from it.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if any(name not in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return 0, 1
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except ValueError as error:
        raise ConfigError(f"RANK and WORLD_SIZE must be integers: {error}.") from None
    if not 0 <= rank < size:
        raise ConfigError(f"RANK is {rank} and WORLD_SIZE {size}: the rank must be 0 to {size - 1}.")
    return rank, size


KEEP_GLOBAL, KEEP_LOCAL, ERROR = "keep_global_batch", "keep_local_batch", "error"
POLICIES = (KEEP_GLOBAL, KEEP_LOCAL, ERROR)


@dataclass(frozen=True)
class EpochPlan:
    """The steps of one epoch.

    Step ``first_step`` begins at sample ``first_sample``. It and all later steps read ``global_batch``
    samples; the last one reads the rest before ``end_sample``. Another world took the steps before
    ``first_step`` with another global batch; only their total is known.
    """

    end_sample: int
    global_batch: int
    first_step: int = 0
    first_sample: int = 0

    @property
    def steps(self) -> int:
        """Number of steps of the whole epoch, including those before ``first_step``."""
        remaining = max(0, self.end_sample - self.first_sample)
        return self.first_step + -(-remaining // self.global_batch)

    def sample_offset(self, step: int) -> int:
        """Return the first sample of ``step``; the end of the epoch for the step after the last."""
        return min(self.first_sample + (step - self.first_step) * self.global_batch, self.end_sample)

    def sample_count(self, step: int) -> int:
        """Return the number of samples of a step."""
        return self.sample_offset(step + 1) - self.sample_offset(step)


@dataclass(frozen=True)
class BatchSizing:
    """The global batch in force, and from where on. Stored with the order of samples.

    Attributes:
        global_batch: samples of a step over all ranks.
        multiple: an epoch reads a multiple of this many samples.
        of_world: number of ranks of the job's first world; 0 if the global batch is the same for any number.
        epoch, first_step, first_sample: the first step under this sizing, and its first sample.

    """

    global_batch: int
    multiple: int = 1
    of_world: int = 0
    epoch: int = 0
    first_step: int = 0
    first_sample: int = 0

    def plan_epoch(self, dataset_size: int, epoch: int) -> EpochPlan:
        """Divide an epoch into steps."""
        step, sample = (self.first_step, self.first_sample) if epoch == self.epoch else (0, 0)
        end_sample = sample + (dataset_size - sample) // self.multiple * self.multiple
        return EpochPlan(end_sample, self.global_batch, step, sample)

    def switch_to(self, other: BatchSizing, dataset_size: int, epoch: int, step: int) -> BatchSizing:
        """Return ``other``, in force from this step on. With equal sizes the epoch is not divided anew."""
        if (other.global_batch, other.multiple) == (self.global_batch, self.multiple):
            return replace(self, of_world=other.of_world)
        plan = self.plan_epoch(dataset_size, epoch)
        # After the last step, samples that were left out because of `multiple` must not be read either.
        first_sample = dataset_size if step >= plan.steps else plan.sample_offset(step)
        return replace(other, epoch=epoch, first_step=step, first_sample=first_sample) if step else other


def compute_share(samples: int, rank: int, world_size: int) -> range:
    """Return one rank's share of ``samples``. Shares follow each other in rank order.

    The first ``samples % world_size`` ranks get one more. A share is empty if there are more ranks than
    samples.
    """
    least, more = divmod(samples, world_size)
    start = rank * least + min(rank, more)
    return range(start, start + least + (rank < more))


def count_micro_batches(samples: int, world_size: int, micro_batch: int | None) -> int:
    """Return the number of micro-batches of a step, for all ranks: as many as the largest share needs."""
    if micro_batch is None:
        return 1
    return max(1, -(-len(compute_share(samples, 0, world_size)) // micro_batch))


def scale_global_batch(global_batch: int, reference_world_size: int, world_size: int) -> int:
    """Return the global batch of ``world_size`` ranks, at least 1.

    Each rank reads as much as in the reference world, rounded half up from the job's first batch. So the
    batch does not drift over several changes, and the same world always has the same global batch.
    """
    return max(1, (2 * global_batch * world_size + reference_world_size) // (2 * reference_world_size))


@dataclass(frozen=True)
class WorldChange:
    """World size and global batch before and after a change of the world.

    The global batches, in samples, are None if `resume` got no data that defines them.
    """

    old_world_size: int
    world_size: int
    old_global_batch: int | None
    global_batch: int | None

    @property
    def factor(self) -> float:
        """The factor for the learning rate, which is the new global batch divided by the old one."""
        if self.old_global_batch is None or self.global_batch is None:
            raise UsageError(
                "the global batch is not known, so a learning-rate factor cannot be computed. Pass a "
                "GlobalBatches, or a loader with an ElasticSampler, as data= to resume()."
            )
        return self.global_batch / self.old_global_batch

    def describe(self) -> str:
        """Describe what changes in a step; return an empty text if it is not known."""
        if self.old_global_batch == self.global_batch:
            if self.global_batch is None or self.old_world_size == self.world_size:
                return ""
            before, now = (-(-self.global_batch // size) for size in (self.old_world_size, self.world_size))
            return f"global batch {self.global_batch} kept, {before} -> {now} samples on each rank"
        return (
            f"global batch {self.old_global_batch} -> {self.global_batch}, learning rate unchanged (see "
            "run.on_world_change)"
        )


def check_change_allowed(policy: str | None, old_world_size: int | None, world_size: int) -> None:
    """Raise WorldChangedError if the policy is ``error`` and another number of ranks made the saved state.

    ``old_world_size`` is None after a cold start.
    """
    if policy == ERROR and old_world_size not in {None, world_size}:
        old = format_count(old_world_size or 0, "rank")
        raise WorldChangedError(
            f"the newest saved state is from {old}, and this world has {world_size}, which "
            f'on_world_change="error" refuses. Start {old} again (--nnodes N, without a range, waits for all '
            f'nodes), or continue with {world_size}: on_world_change="{KEEP_GLOBAL}" keeps the global batch, '
            f'"{KEEP_LOCAL}" keeps the batch of each rank.'
        )
