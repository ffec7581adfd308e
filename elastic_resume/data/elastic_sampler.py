"""Provide `ElasticSampler`, and recognise the kind of object that a script passes as ``data=``.

`ElasticSampler` replaces DistributedSampler in scripts that keep ``batch_size=``. It gives each rank its
shares of global batches of ``batch_size`` times the number of ranks of the job's first world, one after the
other. So the loader's batches are those shares, and a position within an epoch has the same meaning in a
world of any size.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import asdict
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from elastic_resume import constants
from elastic_resume.checkpoint.manifest import Position
from elastic_resume.data.batch_size import (
    KEEP_GLOBAL,
    KEEP_LOCAL,
    BatchSizing,
    check_bool,
    check_integer,
    compute_share,
    read_rank_and_world_size,
)
from elastic_resume.data.global_batches import SECOND_SHARDING, SIZING_KEY, GlobalBatches, make_permutation
from elastic_resume.data.rng import SeededDataset, SeededIndices, attach_epoch
from elastic_resume.errors import ConfigError, MismatchError
from elastic_resume.units import format_count

logger = logging.getLogger(__name__)


class ElasticSampler(DistributedSampler[int]):
    """Drop-in for ``torch.utils.data.DistributedSampler`` that resumes within an epoch.

        sampler = er.ElasticSampler(dataset, shuffle=True)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler)
        run = er.resume(..., data=loader)

    It resumes in a world of any size. Every rank has the same number of batches, and each sample is read
    once in an epoch; nothing is padded. The last samples of an epoch are divided among the ranks, so the
    last batches differ by a sample: multiply the loss by ``run.loss_weight``. With ``drop_last=True`` up
    to a sample per rank of the first world is left out instead, and all weights are 1.0 there. If fewer
    samples are left than there are ranks, some ranks read a sample that another rank reads too, with a
    weight of 0.0.

    With ``accumulate=N`` an optimizer step reads N batches, of ``batch_size`` samples each::

        sampler = er.ElasticSampler(dataset, batch_size=32, accumulate=4)
        ...
        for i, (inputs, targets) in enumerate(loader):
            (loss_of(model(inputs), targets) / 4).backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
                run.step()

    An epoch then has whole steps only: its last samples, fewer than a step reads, are left out. So ``i``
    begins at a step in a resumed epoch too, no gradient is left at the end of an epoch, and all batches are
    equal.

    ``batch_size`` is for one rank of the job's first world. With another number of ranks the global batch
    stays, in shares of another size, and so do ``len(loader)`` and the schedule. With ``accumulate``, with a
    batch sampler of the script's own, or if the script gives another ``batch_size``, each rank reads
    ``batch_size`` samples, and the global batch follows the number of ranks; so it does with
    ``on_world_change="keep_local_batch"``. ``run.on_world_change`` reports each change.

    Without ``er.resume`` it pads as torch's sampler does and gives each rank as many samples.
    """

    def __init__(  # noqa: PLR0917  DistributedSampler's
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        batch_size: int | None = None,
        accumulate: int = 1,
    ) -> None:
        """See DistributedSampler.

        ``batch_size``, the loader's, is needed with ``accumulate``, and if `resume` gets no loader.
        ``num_replicas`` and ``rank`` may be omitted before there is a process group; they are read when an
        epoch begins.

        Raises:
            ConfigError: an argument has the wrong type, or is out of range, or ``batch_size`` is missing.

        """
        self.dataset: Any = dataset
        self.dataset_size = check_integer("len(dataset)", len(dataset), least=1)
        self.given_num_replicas = (
            None if num_replicas is None else check_integer("num_replicas", num_replicas, least=1)
        )
        most = {} if self.given_num_replicas is None else {"most": self.given_num_replicas - 1}
        self.given_rank = None if rank is None else check_integer("rank", rank, least=0, **most)
        self.shuffle, self.drop_last = check_bool("shuffle", shuffle), check_bool("drop_last", drop_last)
        self.seed = check_integer("seed", seed, least=-(2**63))
        self.batch_size = None if batch_size is None else check_integer("batch_size", batch_size, least=1)
        self.accumulate = check_integer("accumulate", accumulate, least=1)
        if self.accumulate > 1 and self.batch_size is None:
            raise ConfigError(
                f"er.ElasticSampler(accumulate={accumulate}) needs the loader's batch size too: add "
                "batch_size=. It decides how many batches an epoch has."
            )
        self.epoch = 0
        self._carries_epoch = isinstance(dataset, SeededDataset)  # then indices carry the epoch
        self._batches: LocalBatches | None = None
        self._seen_length: int | None = None  # what `len` has returned before `attach`

    def set_epoch(self, epoch: int) -> None:
        """Shuffle for this epoch. `resume` decides where in the epoch the next iterator begins."""
        self.epoch = check_integer("epoch", epoch, least=0)
        if self._batches is not None:
            self._batches.shuffle_epoch = self.epoch

    def attach(self, batch_size: int, drop_last: bool) -> LocalBatches:
        """Use the loader's batches from now on. Return the batches that a Run binds and seeks.

        Raise ConfigError if the sampler was made for batches of another size.
        """
        if self.batch_size not in {None, batch_size}:
            raise ConfigError(
                f"the ElasticSampler was made with batch_size={self.batch_size}, but its loader has "
                f"batch_size={batch_size}. Leave it out of the sampler, and pass the loader as data=."
            )
        self._batches = LocalBatches(self, batch_size, drop_last)
        return self._batches

    def log_other_length(self) -> None:
        """Warn if the script has seen another ``len(loader)`` before `resume` than an epoch has."""
        batches = self._batches
        if batches is None or self._seen_length is None or self.rank:
            return
        seen = -(-self._seen_length // (batches.batch_size * self.accumulate))
        if seen != batches.steps:
            logger.warning(
                f"WARNING: len(loader) was {seen} before er.resume(), and is {batches.steps}: the job keeps "
                "the global batch of its first world. If a schedule was built from it, such "
                "as LambdaLR's function, let the function read len(loader) when it is called."
            )

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's samples from the position of `resume` to the end of the epoch."""
        if self._batches is not None:
            return (index for share in self._batches for index in self._attach_epoch(share))
        order = list(range(self.dataset_size))
        if self.shuffle:
            order = make_permutation(self.dataset_size, self.seed, self.epoch).tolist()
        rank, size = self.rank, self.num_replicas
        count = self._count_own_samples()
        order += (order * -(-count * size // len(order)))[: max(0, count * size - len(order))]
        return iter(
            self._attach_epoch(SeededIndices(order[: count * size][rank::size], self.seed, self.epoch))
        )

    def _attach_epoch(self, share: SeededIndices) -> Iterable[int]:
        if self._carries_epoch or share.worker_seed is not None:
            return attach_epoch(share, share.seed, share.epoch, share.worker_seed)
        return share

    def __len__(self) -> int:
        """Return the number of this rank's samples in a whole epoch, also within an epoch."""
        batches = self._batches
        if batches is None:
            self._seen_length = self._count_own_samples()
            return self._seen_length
        last, in_step = batches.steps - 1, batches.full_share_size
        return last * in_step + (len(batches.share(last)) if batches.includes_step(last) else in_step)

    def _count_own_samples(self) -> int:
        """Return the length without `resume`."""
        size = self.num_replicas
        if self.batch_size is not None and self.accumulate > 1:
            step = self.batch_size * self.accumulate
            return self.dataset_size // (step * size) * step
        return self.dataset_size // size if self.drop_last else -(-self.dataset_size // size)

    # ---- what libraries read from a DistributedSampler -----------------------------------------------

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """The number of ranks."""
        return read_rank_and_world_size()[1] if self.given_num_replicas is None else self.given_num_replicas

    @property
    def rank(self) -> int:  # type: ignore[override]
        """The rank whose samples are read."""
        return read_rank_and_world_size()[0] if self.given_rank is None else self.given_rank

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """The number of this rank's samples in a whole epoch."""
        return len(self)

    @property
    def total_size(self) -> int:  # type: ignore[override]
        """``num_samples`` times the number of ranks."""
        return len(self) * self.num_replicas


class LocalBatches(GlobalBatches):
    """The batches of a loader with an `ElasticSampler`: ``batch_size`` samples for each rank."""

    has_equal_parts = True
    _class_name = "ElasticSampler"

    def __init__(self, sampler: ElasticSampler, batch_size: int, drop_last: bool) -> None:
        """``drop_last`` is the loader's, which drops batches; the sampler's own drops samples."""
        self._local_batch = check_integer("batch_size", batch_size, least=1)
        self.shuffle_epoch: int | None = None
        self.yields_shares = False  # the loader reads these batches themselves, whatever their size is
        self._saved_local_batch: int | None = None  # the batch size with which the global batch was chosen
        self._sampler = sampler
        micro_batch = batch_size if sampler.accumulate > 1 else None
        order = (sampler.seed, sampler.shuffle, drop_last)
        super().__init__(sampler.dataset_size, batch_size, *order, micro_batch=micro_batch)

    def bind(self, rank: int, world_size: int, *args: Any, **more: Any) -> None:
        """See GlobalBatches. Raise ConfigError if the sampler was made for another rank or world size."""
        for name, given, actual in (
            ("num_replicas", self._sampler.given_num_replicas, world_size),
            ("rank", self._sampler.given_rank, rank),
        ):
            if given not in {None, actual}:
                raise ConfigError(
                    f"the ElasticSampler was made with {name}={given}, but here it is {actual}. Leave "
                    "num_replicas and rank out, so that those of the process group are used."
                )
        self._saved_local_batch = None
        super().bind(rank, world_size, *args, **more)

    def begin_generation(self, position: Position | None, old_world_size: int | None) -> int | None:
        """See GlobalBatches."""
        before = super().begin_generation(position, old_world_size)
        if before is not None:
            self._sampler.log_other_length()
        elif (
            not self._can_keep_global
            and self._policy is None
            and self._bound
            and self._bound[0] == 0
            and os.environ.get(constants.ENV_FIXED_NODES) != "1"
        ):
            logger.info(
                "with another number of ranks an epoch has more or fewer steps, so a schedule that counts "
                "steps gets another length: each rank reads as many samples as now (see on_world_change=)"
            )
        return before

    def seek(self, epoch: int, step_in_epoch: int) -> None:
        """See GlobalBatches. The order is that of ``epoch`` until the script sets another one."""
        super().seek(epoch, step_in_epoch)
        self.shuffle_epoch = None

    def state_dict(self) -> dict[str, Any]:
        """See GlobalBatches. The sizing is always stored, since no argument implies it."""
        local_batch = self._saved_local_batch or self._local_batch
        return {**self._order_arguments(0), SIZING_KEY: asdict(self._sizing), "batch_size": local_batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See GlobalBatches."""
        super().load_state_dict(state)
        self._saved_local_batch = state.get("batch_size")

    @property
    def full_share_size(self) -> int:
        """The number of this rank's samples in a whole step."""
        return len(compute_share(self.global_batch, self._rank, self._world_size))

    @property
    def _can_keep_global(self) -> bool:
        """Whether a rank's batch may have another size than the loader's argument."""
        return self.yields_shares and self._sampler.accumulate == 1

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        """The number of samples in one batch of the loader."""
        return self._local_batch

    @property
    def sampler(self) -> ElasticSampler:  # type: ignore[override]
        """The sampler that the script made, whose ``set_epoch`` libraries call."""
        return self._sampler

    def includes_step(self, step: int) -> bool:
        """Return whether this world takes the step, and no earlier world took it."""
        return step >= self._epoch_plan().first_step

    def explain_accumulation(self, batches_per_step: int) -> str:
        """See GlobalBatches."""
        return (
            f"make the sampler with er.ElasticSampler(..., batch_size={self.batch_size}, "
            f"accumulate={batches_per_step})."
        )

    def _order_arguments(self, global_batch: int) -> dict[str, Any]:  # noqa: ARG002  it follows the world size
        return {
            **{name: getattr(self, name) for name in ("dataset_size", "seed", "shuffle", "drop_last")},
            "equal_shares": self._sampler.drop_last,
        }

    def _sizing_for_world(self, before: BatchSizing | None, old_world_size: int) -> BatchSizing:
        size = self.batch_size * self._sampler.accumulate * self._world_size
        if before is not None and self._policy != KEEP_LOCAL and self._can_keep_global:
            is_same_script = self._saved_local_batch == self._local_batch  # it divides no batch itself
            if is_same_script and before.global_batch >= self._world_size:
                return before
        self._saved_local_batch = None
        if self._policy == KEEP_GLOBAL and before is not None and before.global_batch != size:
            raise MismatchError(
                f"the global batch would be {size} (batch_size={self.batch_size} on "
                f"{format_count(self._world_size, 'rank')}) and was {before.global_batch} with "
                f"{format_count(old_world_size, 'rank')}, which "
                f'on_world_change="{KEEP_GLOBAL}" refuses. Set batch_size to {before.global_batch} divided '
                "by the number of ranks, or use GlobalBatches, which takes any number of ranks."
            )
        return self._make_sizing(size)

    def _make_sizing(self, global_batch: int, reference_world_size: int = 0) -> BatchSizing:
        if self.micro_batch is not None:
            if self.dataset_size < global_batch:
                raise ConfigError(
                    f"accumulate={self._sampler.accumulate} leaves an epoch without a step: a step reads "
                    f"{global_batch} samples on {format_count(self._world_size, 'rank')}, and the dataset "
                    f"has {self.dataset_size}. Use a smaller accumulate= or batch_size=."
                )
            return BatchSizing(global_batch, global_batch, reference_world_size)
        sizing = super()._make_sizing(global_batch, reference_world_size)
        if not self._sampler.drop_last or self.drop_last:
            return sizing
        if self.dataset_size < self._world_size:
            raise ConfigError(
                f"drop_last=True leaves an epoch without a step: the dataset has "
                f"{format_count(self.dataset_size, 'sample')} for {self._world_size} ranks."
            )
        return BatchSizing(global_batch, self._world_size, reference_world_size)

    def _order_epoch(self) -> int:
        return self._epoch if self.shuffle_epoch is None else self.shuffle_epoch


def find_loader(data: Any) -> Any:
    """Return the DataLoader within an object around one, such as timm's PrefetchLoader; else ``data``."""
    if isinstance(data, (DataLoader, GlobalBatches, DistributedSampler)) or hasattr(data, "state_dict"):
        return data
    held = [value for value in getattr(data, "__dict__", {}).values() if isinstance(value, DataLoader)]
    return held[0] if len(held) == 1 and hasattr(data, "__iter__") else data


def find_batches(data: Any) -> GlobalBatches | None:
    """Return the batches behind the ``data=`` of a script, or None if it keeps its own position.

    Raise ConfigError for a loader that shards them a second time, or whose position cannot be restored.
    """
    found = _find_batches(data)
    if found is not None:
        _check_not_prepared(data)
    if found is not None and isinstance(data, DataLoader):
        found.loader_prefetch = data.num_workers * (data.prefetch_factor or 0)
    return found


def _find_batches(data: Any) -> GlobalBatches | None:
    batches = getattr(data, "batch_sampler", data)
    if isinstance(batches, GlobalBatches):
        return batches
    sampler = getattr(data if batches is None else batches, "sampler", None)
    if isinstance(sampler, ElasticSampler) and isinstance(batches, BatchSampler):
        found = sampler.attach(batches.batch_size, batches.drop_last)
        if isinstance(data, DataLoader) and type(batches).__name__ == "BatchSampler":  # torch's, torchdata's
            _replace_batch_sampler(data, found)
        return found
    if isinstance(sampler, ElasticSampler) and batches is None:  # the dataset's items are whole batches
        return sampler.attach(1, drop_last=False)
    if isinstance(data, ElasticSampler):
        if data.batch_size is None:
            raise ConfigError(
                "data= is an ElasticSampler without a batch size. Pass its DataLoader, or make the sampler "
                "with batch_size=."
            )
        return data.attach(data.batch_size, drop_last=False)
    if has_our_batches(batches):
        raise ConfigError(f"data= has a {type(batches).__name__} around its batches. {SECOND_SHARDING}")
    if isinstance(data, DataLoader) and not _has_own_state(data):
        raise ConfigError(f"data= is a DataLoader whose position in an epoch cannot be restored. {_ADVICE}")
    return None


def _replace_batch_sampler(loader: DataLoader[Any], batches: LocalBatches) -> None:
    """Let ``loader`` read ``batches`` themselves, which carry the seed of its workers with each batch."""
    object.__setattr__(loader, "batch_sampler", batches)  # DataLoader's own refuses a change
    batches.yields_shares = True
    loader._iterator = None  # persistent workers of an earlier iterator read the former  # noqa: SLF001


def _check_not_prepared(loader: Any) -> None:
    """Raise ConfigError for a loader of Accelerate. It sets the sampler's epoch, from 0 in each process."""
    if any(kind.__module__ == "accelerate.data_loader" for kind in type(loader).__mro__):
        raise ConfigError(
            f"data= is a {type(loader).__name__} of Accelerate, which shuffles an ElasticSampler as in "
            "epoch 0 after each restart, and reads the batches of rank 0 only with dispatch_batches=True. "
            "Leave the loader out of accelerator.prepare(), and move each batch to accelerator.device."
        )


def has_our_batches(loader: Any, attribute: str = "batch_sampler") -> bool:
    """Return whether ``loader`` reads our batches, perhaps through another library's samplers.

    ``attribute`` holds the loader's first sampler.
    """
    for name in [attribute, *["batch_sampler"] * MAX_WRAPPERS]:
        batches = getattr(loader, name, None)
        loader = getattr(loader, "sampler", None) if batches is None else batches
        if isinstance(loader, (GlobalBatches, ElasticSampler)):
            return True
    return False


def check_no_per_rank_state(data: Any, world_size: int) -> None:
    """Raise ConfigError for a loader with a state of its own (torchdata's) if there are several ranks.

    A checkpoint would hold one rank's state, and all ranks would continue from it.
    """
    if world_size > 1 and _has_own_state(data):
        raise ConfigError(
            f"data= is a {type(data).__name__} with a state of its own for each of {world_size} ranks. A "
            "checkpoint holds one state for all ranks, so that any node's copy is enough if others are lost. "
            f"Another number of ranks could not continue from it either. {_ADVICE}"
        )


MAX_WRAPPERS = 8  # limit of samplers within samplers
_ADVICE = (
    "Use DataLoader(dataset, batch_sampler=er.GlobalBatches(len(dataset), global_batch)), or keep "
    "batch_size= and use sampler=er.ElasticSampler(dataset); the loader may then be torchdata's too."
)


def _has_own_state(data: Any) -> bool:
    return isinstance(data, DataLoader) and callable(getattr(data, "state_dict", None))
