"""How an epoch is cut into steps, and what another number of ranks changes about that.

A step's samples are a slice of the epoch's order, each rank's share a slice of those, each micro-batch a
slice of the share. All of it is arithmetic on (samples done, global batch, ranks): a world of another size
goes on with the very next sample, be the global batch the same as before or not.

Pure. Does not know samples, loaders, nor who decides that the world changes.

Checks of the numbers and flags that samplers are given, and that checkpoints say of them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from elastic_resume import console
from elastic_resume.errors import ConfigError, MismatchError, UsageError, WorldChangedError
from elastic_resume.units import format_count

MAX_INT64 = 2**63 - 1  # seeds and epochs are mixed as 64-bit words


def check_integer(name: str, value: object, least: int, most: int = MAX_INT64) -> int:
    """Take whatever is an integer (numpy's too), but neither a bool nor a float."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        bounds = f"from {least} to {most}" if most < MAX_INT64 else f"of at least {least}"
        plain = isinstance(value, (int, float, str, type(None)))
        shown = repr(value) if plain else f"a {type(value).__name__}"
        advice = "; pass len(dataset)" if name == "dataset_size" and hasattr(value, "__len__") else ""
        raise ConfigError(f"{name} must be an integer {bounds}, got {shown}{advice}.")
    return number


def check_bool(name: str, value: object) -> bool:
    """Take a bool and nothing that only looks like one."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {value!r}.")
    return value


KEEP_GLOBAL, KEEP_LOCAL, ERROR = "keep_global_batch", "keep_local_batch", "error"
POLICIES = (KEEP_GLOBAL, KEEP_LOCAL, ERROR)


@dataclass(frozen=True)
class EpochPlan:
    """The steps of one epoch.

    Step ``first_step`` begins at sample ``first_sample``, and it and all that follow read ``global_batch``
    samples, the last one what is left before ``stop``. Of the steps before ``first_step``, which another
    world took with another global batch, only their sum is known.
    """

    end_sample: int
    global_batch: int
    first_step: int = 0
    first_sample: int = 0

    @property
    def steps(self) -> int:
        """How many steps the whole epoch has, those before ``first_step`` too."""
        left = max(0, self.end_sample - self.first_sample)
        return self.first_step + -(-left // self.global_batch)

    def sample_offset(self, step: int) -> int:
        """Give the sample at which a step begins; for the step after the last one, where the epoch ends."""
        return min(self.first_sample + (step - self.first_step) * self.global_batch, self.end_sample)

    def sample_count(self, step: int) -> int:
        """Count the samples of a step."""
        return self.sample_offset(step + 1) - self.sample_offset(step)


@dataclass(frozen=True)
class BatchSizing:
    """The global batch in force, and from where on; stored with the order of samples.

    What is read of an epoch under this sizing is a multiple of ``multiple``. ``of_world`` is the number of
    ranks for which the job's own global batch was meant, 0 where it is the same for any number. Step
    ``first_step`` of ``epoch`` is the first one under this sizing, and begins at ``first_sample``.
    """

    global_batch: int
    multiple: int = 1
    of_world: int = 0
    epoch: int = 0
    first_step: int = 0
    first_sample: int = 0

    def plan_epoch(self, dataset_size: int, epoch: int) -> EpochPlan:
        """Cut an epoch."""
        step, sample = (self.first_step, self.first_sample) if epoch == self.epoch else (0, 0)
        stop = sample + (dataset_size - sample) // self.multiple * self.multiple
        return EpochPlan(stop, self.global_batch, step, sample)

    def switch_to(self, other: BatchSizing, dataset_size: int, epoch: int, step: int) -> BatchSizing:
        """Give ``other``'s sizes, in force from this step on; without a difference nothing is cut anew."""
        if (other.global_batch, other.multiple) == (self.global_batch, self.multiple):
            return replace(self, of_world=other.of_world)
        cut = self.plan_epoch(dataset_size, epoch)
        # At the epoch's end nothing is left, not even of what was left out because it was no multiple.
        done = dataset_size if step >= cut.steps else cut.sample_offset(step)
        return replace(other, epoch=epoch, first_step=step, first_sample=done) if step else other

    def to_state(self) -> dict[str, int]:
        """Give plain numbers."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @staticmethod
    def parse(state: object, dataset_size: int) -> BatchSizing:
        """Read what `to_state` gave. Raises MismatchError."""
        names = [field.name for field in fields(BatchSizing)]
        if not isinstance(state, Mapping) or set(state) != set(names):
            raise MismatchError(f"the checkpoint's data/cut is not of this version: {str(state)[:200]}.")
        least, most = {"global_batch": 1, "multiple": 1}, {"first_sample": dataset_size}
        try:
            return BatchSizing(
                **{
                    n: check_integer(n, state[n], least=least.get(n, 0), most=most.get(n, MAX_INT64))
                    for n in names
                }
            )
        except ConfigError as error:
            raise MismatchError(f"the checkpoint's data/cut is impossible: {error}") from error


def compute_share(samples: int, rank: int, world_size: int) -> range:
    """Cut ``samples`` into one share per rank, in rank order.

    The first ``samples % world_size`` ranks get one more; a share is empty where ranks outnumber samples.
    """
    least, more = divmod(samples, world_size)
    start = rank * least + min(rank, more)
    return range(start, start + least + (rank < more))


def count_micro_batches(samples: int, world_size: int, micro_batch: int | None) -> int:
    """Count the micro-batches of a step: as many on all ranks as the largest share needs."""
    if micro_batch is None:
        return 1
    return max(1, -(-len(compute_share(samples, 0, world_size)) // micro_batch))


def scale_global_batch(global_batch: int, reference_world_size: int, world_size: int) -> int:
    """Give the global batch of ``world_size`` ranks if each reads what each of ``of_world`` did; 1 at least.

    Rounded, half up, from what the job began with and not from the last world's: so it does not drift, and
    the same world has the same global batch whatever came between.
    """
    return max(1, (2 * global_batch * world_size + reference_world_size) // (2 * reference_world_size))


@dataclass(frozen=True)
class WorldChange:
    """What is not as it was when the copy was made that this generation started from.

    The global batches, in samples, are None where `resume` was given no data that says how it cuts an epoch.
    """

    old_world_size: int
    world_size: int
    old_global_batch: int | None
    global_batch: int | None

    @property
    def factor(self) -> float:
        """The new global batch by the old one: what a learning rate may be multiplied with.

        Raises:
            UsageError: the global batches are not known.

        """
        if self.old_global_batch is None or self.global_batch is None:
            raise UsageError(
                "the global batch is not known, and so nothing by which to scale: pass data= to resume(), "
                "a GlobalBatches or a loader with an ElasticSampler."
            )
        return self.global_batch / self.old_global_batch

    def log(self) -> None:
        """Say in a line what changed about the batch; nothing where nothing did."""
        if self.old_global_batch != self.global_batch:
            console.say(
                f"global batch {self.old_global_batch} -> {self.global_batch}, world {self.old_world_size} "
                f"-> {self.world_size}. The learning rate is as it was; scale it in run.on_world_change, if "
                "it should follow."
            )


def check_change_allowed(policy: str | None, old_world_size: int | None, world_size: int) -> None:
    """Hold ``on_world_change="error"``; ``old_world_size`` is None after a cold start.

    Raises:
        WorldChangedError: the copy was made by another number of ranks, which the script does not want.

    """
    if policy == ERROR and old_world_size not in {None, world_size}:
        old = format_count(old_world_size or 0, "rank")
        raise WorldChangedError(
            f"the newest copy was made by {old}, and this world has {world_size}, which "
            f'on_world_change="error" refuses. Start {old} again (--nnodes N, without a '
            f'range, waits for all nodes), or go on with {world_size}: on_world_change="{KEEP_GLOBAL}" '
            f'leaves the batch of an optimizer step as it is, "{KEEP_LOCAL}" what each rank reads of it.'
        )
