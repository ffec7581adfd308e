"""Provide `epochs` and `steps`, by which the loop of a script resumes with one changed line.

They call `er.resume` at once, and count the steps by what the loop asks for (`StepCounter`). `epochs` takes a
DistributedSampler over, so that an interrupted epoch continues at its next sample.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from elastic_resume.data.batch_size import check_integer, read_rank_and_world_size
from elastic_resume.data.elastic_sampler import ElasticSampler, find_batches, find_loader, has_our_batches
from elastic_resume.errors import ConfigError
from elastic_resume.training import worker_exit
from elastic_resume.training.resume import resume
from elastic_resume.training.run import Run
from elastic_resume.training.step_counter import StepCounter

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Epochs:
    """The remaining epochs of a script; `epochs` returns it. ``run`` is the `Run`."""

    def __init__(self, count: int, run: Run, counter: StepCounter) -> None:
        self.run = run
        self._count, self._counter = count, counter
        self._numbers: Iterator[int] | None = None

    def __iter__(self) -> Iterator[int]:
        _note_counted_steps(self.run)
        for epoch in self.run.epochs(self._count):
            self._counter.begin_epoch()
            yield epoch
            self._counter.end_epoch()

    def __next__(self) -> int:
        if self._numbers is None:
            self._numbers = iter(self)
        return next(self._numbers)

    def enumerate(self, loader: Iterable[T]) -> Iterator[tuple[int, T]]:
        """Yield (index, batch), and go on with the index of an interrupted epoch: see `Run.enumerate`."""
        return self.run.enumerate(loader)


class Steps:
    """The remaining steps of a script; `steps` returns it. ``run`` is the `Run`."""

    def __init__(self, count: int, run: Run, counter: StepCounter) -> None:
        self.run = run
        self._count, self._counter = count, counter
        self._numbers: Iterator[int] | None = None

    def __iter__(self) -> Iterator[int]:
        def begin() -> int:
            self._counter.begin_step()
            return self.run.position.step

        _note_counted_steps(self.run)
        iterate = self.run._iterate  # noqa: SLF001  not for scripts
        yield from iterate(
            "step", self._count, lambda: self.run.position.step, begin, self._counter.end_open_step
        )

    def __next__(self) -> int:
        if self._numbers is None:
            self._numbers = iter(self)
        return next(self._numbers)


def epochs(count: int, data: Any = None, *, accumulate: int = 1, **arguments: Any) -> Epochs:
    """Restore the newest state, and yield the remaining epochs of ``count``. Steps need no ``run.step()``.

    ::

        for epoch in er.epochs(EPOCHS, loader, model=model, optimizer=optimizer, scheduler=scheduler):
            for batch in loader:
                ...

    It calls `er.resume` at once. A step ends when the loop asks ``loader`` for the next batch after an
    optimizer step, or asks for the next epoch. So what follows ``optimizer.step()`` belongs to the step.
    Several optimizers may step on one batch. A batch that the loop skips counts as a step too, and so does
    one whose optimizer step a GradScaler leaves out.

    Write ``epochs.run.stop()`` before a ``break`` that ends the training.

    Args:
        count: the number of epochs of the whole training.
        data: the loader that the loop reads in each epoch. A DistributedSampler in it is replaced by an
            `ElasticSampler` with its seed, ``shuffle`` and ``drop_last``; its ``set_epoch`` still works. The
            loader of an `ElasticSampler` or a `GlobalBatches`, and a `ShardedStream`, stay as they are. An
            object around one DataLoader, as timm's PrefetchLoader, is one too.
        accumulate: how many batches an optimizer step reads, for gradient accumulation.
        **arguments: those of `er.resume`, with at least one optimizer of torch.

    Raises:
        ConfigError: there is no loader or no optimizer, or an argument of `er.resume` is wrong.
        UsageError: later, in the loop: it reads another number of batches per optimizer step, or reads ahead.
        ElasticResumeError: see `er.resume`.

    """
    worker_exit.install_startup_hook()  # `resume` replaces it; errors before it are reported too
    count = check_integer("count", count, least=0)
    accumulate = check_integer("accumulate", accumulate, least=1)
    if data is None or isinstance(data, ElasticSampler):
        raise ConfigError(
            "er.epochs() got no loader, so it cannot tell where a step ends: write er.epochs(count, loader, "
            "...) with the loader that the loop reads. A loop that draws its batches itself takes er.steps()."
        )
    explain: Callable[[int], str] = "write er.epochs(..., accumulate={}).".format
    loader = find_loader(data)
    length = _take_over_sampler(loader, accumulate)
    if length is None and has_our_batches(loader):
        explain = _explain_own_order(loader, accumulate)
    run = resume(data=loader, **arguments)
    if length is not None and length != len(loader) and run.rank == 0 and run.plan.kind == "cold":
        logger.warning(
            f"WARNING: len(loader) was {length} before er.epochs(), and is {len(loader)}: an epoch has whole "
            "steps only. A schedule that was built from the former number does not end with the training: "
            "count its steps from the latter."
        )
    counter = _count_steps(run, accumulate, explain)
    replace_iterators(data, counter.read)
    return Epochs(count, run, counter)


def steps(count: int, **arguments: Any) -> Steps:
    """Restore the newest state, and yield the numbers of the remaining steps of ``count``.

    For a loop that draws its batches itself, without epochs::

        for step in er.steps(MAX_STEPS, model=model, optimizer=optimizer):
            inputs, targets = draw_batch()
            ...

    A step ends when the loop asks for the next one. Draw its batch within it: random numbers are derived from
    the step's number, so a resumed run draws the same ones.

    Args:
        count: the number of steps of the whole training.
        **arguments: those of `er.resume` but ``data``, with at least one optimizer of torch.

    Raises:
        ConfigError: there is a loader or no optimizer, or an argument of `er.resume` is wrong.
        ElasticResumeError: see `er.resume`.

    """
    worker_exit.install_startup_hook()
    count = check_integer("count", count, least=0)
    if arguments.get("data") is not None:
        raise ConfigError(
            "er.steps() got data=: for a loop that reads a loader use er.epochs(count, loader)."
        )
    run = resume(**arguments)
    return Steps(count, run, _count_steps(run, 1, _explain_nothing))


def _count_steps(run: Run, accumulate: int, explain: Callable[[int], str]) -> StepCounter:
    """Count the steps of ``run`` by its optimizers.

    ``accumulate`` is for a data order that does not know it.
    """
    run._step_counter = StepCounter(  # noqa: SLF001  not for scripts, as below
        run._generation.tracked,  # noqa: SLF001
        finish=run._finish_steps,  # noqa: SLF001
        count_batches=lambda: run._generation.progress.count_step_batches(accumulate),  # noqa: SLF001
        get_marks=lambda: run._generation.random_numbers.marks,  # noqa: SLF001
        explain=explain,
    )
    return run._step_counter  # noqa: SLF001


def _note_counted_steps(run: Run) -> None:
    """Let this generation's checks know who counts the steps."""
    run._generation.progress.is_counted_by_requests = True  # noqa: SLF001
    run._generation.first_steps.note_counted_steps()  # noqa: SLF001


def _explain_nothing(batches_per_step: int) -> str:
    return f"use er.resume() and run.step() after every {batches_per_step} batches."


def _take_over_sampler(loader: Any, accumulate: int) -> int | None:
    """Replace a plain DistributedSampler of ``loader`` by an `ElasticSampler` with the same arguments.

    Return the former length of the loader. Leave other loaders, and return None: `er.resume` refuses those
    whose position it cannot restore.
    """
    if not isinstance(loader, DataLoader):
        return None
    holder: Any = loader if loader.batch_sampler is None else loader.batch_sampler
    old = holder.sampler
    if type(old) in {RandomSampler, SequentialSampler} and type(loader.batch_sampler) is BatchSampler:
        raise ConfigError(
            "er.epochs(): the loader has no DistributedSampler, so each rank would read the whole dataset, "
            "and a resume could not find its place. Write sampler = DistributedSampler(dataset), or without "
            "a process group er.ElasticSampler(dataset); DataLoader(dataset, batch_size=n, sampler=sampler); "
            "and sampler.set_epoch(epoch) in the loop."
        )
    if type(old) is not DistributedSampler or (holder is not loader and type(holder) is not BatchSampler):
        return None
    rank, world_size = read_rank_and_world_size()
    if (old.rank, old.num_replicas) != (rank, world_size):
        raise ConfigError(
            f"the loader's DistributedSampler was made for rank {old.rank} of {old.num_replicas}, and this "
            f"is rank {rank} of {world_size}. Leave its num_replicas and rank out, so that they are those of "
            "the process group."
        )
    batch_size = None if loader.batch_size is None and holder is loader else holder.batch_size
    dataset: Any = old.dataset
    new = ElasticSampler(
        dataset,
        shuffle=old.shuffle,
        seed=old.seed,
        drop_last=old.drop_last,
        batch_size=(batch_size or 1) if accumulate > 1 else None,
        accumulate=accumulate,
    )
    before = len(loader)
    object.__setattr__(holder, "sampler", new)  # a DataLoader refuses a plain assignment
    if loader.sampler is old:
        object.__setattr__(loader, "sampler", new)
    vars(old)["set_epoch"] = new.set_epoch  # the script calls it
    return before


def _explain_own_order(data: Any, accumulate: int) -> Callable[[int], str]:
    """Return how a data order of this package reads several batches per step.

    Raise ConfigError if ``accumulate`` is given, and that order has another number.
    """
    batches = find_batches(data)
    explain = _explain_nothing if batches is None else batches.explain_accumulation
    sampler = getattr(getattr(data, "batch_sampler", None) or data, "sampler", None)
    if accumulate not in {1, getattr(sampler, "accumulate", 1)}:
        raise ConfigError(
            f"er.epochs() got accumulate={accumulate}, and the loader's own data order decides how many "
            f"batches a step reads: {explain(accumulate)}"
        )
    return explain


def replace_iterators(loader: Any, replace: Callable[[Callable[[], Iterator[Any]]], Iterator[Any]]) -> None:
    """Let ``replace`` return each iterator over ``loader``. It takes what makes the loader's own.

    A ``for`` statement looks up ``__iter__`` in the object's class, so the object gets a class of its own.
    """
    kind = type(loader)

    def iterate(self: Any) -> Iterator[Any]:
        return replace(lambda: kind.__iter__(self))

    names = {"__iter__": iterate, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    loader.__class__ = type(kind.__name__, (kind,), names)
