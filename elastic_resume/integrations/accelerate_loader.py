"""Take over the loader that a script with Accelerate has made with ``batch_size=`` and ``shuffle=``.

The loader reads global batches from then on: those of ``accelerator.prepare(loader)``, ``batch_size`` times
the processes times ``gradient_accumulation_steps``. The number of processes is that of the job's first
start, and the checkpoint keeps it. As a prepared loader it moves each batch to the accelerator's device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import recursively_apply, send_to_device
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from elastic_resume.data.batch_size import KEEP_LOCAL, BatchSizing
from elastic_resume.data.elastic_sampler import has_our_batches
from elastic_resume.data.global_batches import GlobalBatches
from elastic_resume.errors import ConfigError
from elastic_resume.integrations import set_known
from elastic_resume.training.epochs import replace_iterators
from elastic_resume.training.run import Run


class FirstWorldBatches(GlobalBatches):
    """Global batches of a number of samples for each process of the job's first start."""

    _class_name = "the loader"
    read_weight = 1.0
    """`Run.loss_weight` of the batch that the loop has read; 1.0 outside of a loop over the loader."""

    def __init__(self, dataset_size: int, local_batch: int, processes: int, **arguments: Any) -> None:
        """``local_batch`` is the number of samples of one process in an optimizer step."""
        self.local_batch = local_batch
        super().__init__(dataset_size, local_batch * processes, **arguments)

    @property
    def first_processes(self) -> int:
        """The number of processes at the job's first start."""
        return self._initial_global_batch // self.local_batch

    def _order_arguments(self, global_batch: int) -> dict[str, Any]:
        return {**super()._order_arguments(global_batch), "local_batch": self.local_batch}

    def _resolve_initial_batch(self, state: Mapping[str, Any], sizing: BatchSizing | None) -> int:
        initial = state.get("global_batch")
        if self._policy == KEEP_LOCAL or type(initial) is not int:
            return super()._resolve_initial_batch(state, sizing)
        return initial


def take_over(accelerator: Accelerator, loader: Any) -> FirstWorldBatches | None:
    """Let ``loader`` read global batches; return them. Leave other loaders, and return None.

    `er.resume` refuses those whose position it cannot restore.
    """
    if getattr(loader, "_is_accelerate_prepared", False) and not has_our_batches(loader):
        raise ConfigError(
            "data= has been through accelerator.prepare(), which divides its batches among the processes. "
            "Leave the loader out there: prepare() of elastic_resume takes it as the script has made it."
        )
    batches = getattr(loader, "batch_sampler", None)
    if type(batches) is not BatchSampler or callable(getattr(loader, "state_dict", None)):
        return None
    sampler: Any = batches.sampler
    is_shuffled = type(sampler) is RandomSampler
    if not is_shuffled and type(sampler) is not SequentialSampler:
        return None
    if is_shuffled and (sampler.replacement or sampler.num_samples != len(loader.dataset)):
        return None
    processes, parts = accelerator.num_processes, accelerator.gradient_accumulation_steps
    batch = batches.batch_size
    if accelerator.split_batches:
        if batch % processes:
            raise ConfigError(
                f"split_batches=True divides a batch of {batch} samples among {processes} processes. Make "
                f"batch_size= a multiple of {processes}, or give data= a GlobalBatches."
            )
        batch //= processes
    made = FirstWorldBatches(
        len(loader.dataset),
        batch * parts,
        processes,
        seed=accelerator.dataloader_config.data_seed or 0,
        shuffle=is_shuffled,
        drop_last=batches.drop_last,
        micro_batch=batch if parts > 1 else None,
    )
    object.__setattr__(loader, "batch_sampler", made)  # a DataLoader refuses a plain assignment
    return made


def read_for_run(accelerator: Accelerator, loader: Any, run: Run) -> None:
    """Let ``for batch in loader`` count the micro-batches of ``run``, and move each batch to the device."""
    batches = loader.batch_sampler

    def iterate(make_iterator: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        try:
            plain = make_iterator()
            for batch in plain if batches.micro_batch is None else run.micro_batches(plain):
                batches.read_weight = run.loss_weight
                if not accelerator.device_placement:
                    yield batch
                else:
                    yield send_to_device(batch, accelerator.device, non_blocking=accelerator.non_blocking)
        finally:
            batches.read_weight = 1.0

    replace_iterators(loader, iterate)


def gather_uneven(accelerator: Accelerator, batches: FirstWorldBatches) -> None:
    """Let ``accelerator.gather``, and so ``gather_for_metrics``, take the unequal shares of a short batch.

    Shares are padded, and the result is cut to their samples. A rank without a share has read a sample of
    another one, whose row is left out.
    """
    original: Callable[[Any], Any] = accelerator.gather

    def gather_rows(tensor: Tensor) -> Any:
        if tensor.ndim == 0:
            return original(tensor)
        size = len(tensor)
        counted = 0 if size == 1 and batches.read_weight == 0.0 else size
        sizes = original(torch.tensor([[size, counted]], device=tensor.device)).tolist()
        most = max(size for size, _ in sizes)
        padding = tensor.new_zeros((most - size, *tensor.shape[1:]))
        parts = original(torch.cat([tensor, padding])).split(most)
        return torch.cat([part[:counted] for part, (_, counted) in zip(parts, sizes, strict=False)])

    def gather(tensor: Any) -> Any:
        # A weight of 1.0 means equal shares, and is one on all ranks or on none.
        if batches.read_weight == 1.0 or accelerator.gradient_state.in_dataloader:  # a loader for evaluation
            return original(tensor)
        return recursively_apply(gather_rows, tensor, error_on_other_type=True)

    functools.update_wrapper(gather, original)
    set_known(accelerator, "gather", gather)


def step_per_process(scheduler: AcceleratedScheduler, batches: FirstWorldBatches) -> None:
    """Let ``scheduler`` step as often as under plain Accelerate: once for each process of the first start."""

    def step(*args: Any, **kwargs: Any) -> None:
        inner = scheduler.scheduler
        is_counted = scheduler.step_with_optimizer and scheduler.gradient_state.sync_gradients
        for _ in range(batches.first_processes if is_counted else 1):
            total = getattr(inner, "total_steps", None)  # of OneCycleLR, which must not pass its end
            if total is None or inner._step_count <= total:  # noqa: SLF001
                type(scheduler).step(scheduler, *args, **kwargs)

    functools.update_wrapper(step, scheduler.step)
    scheduler.step = step
