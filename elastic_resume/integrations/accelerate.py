"""Prepare model, optimizer and scheduler with Hugging Face Accelerate, then restore their newest state.

The script keeps its loop and its `Accelerator`. `prepare` wraps model, optimizer and scheduler by the
accelerator, restores them by `er.resume`, and replaces these methods of the given accelerator:

- ``accumulate``: ends at the step's last micro-batch; the number of ranks decides how many there are;
- ``backward``: weights the loss, and does not divide it by ``gradient_accumulation_steps``;
- ``log``: logs to the run too, as `Run.log` does;
- ``save_state``, ``load_state``, ``skip_first_batches``: see `accelerate_folders`;
- ``prepare_data_loader``, ``register_for_checkpointing``: refuse what would read a part of the samples, or
  would not be restored.

It also takes over the loader that the script has made, and then lets ``gather`` take shares of different
sizes (`accelerate_loader`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from elastic_resume.data import batch_size
from elastic_resume.data.elastic_sampler import has_our_batches
from elastic_resume.data.global_batches import SECOND_SHARDING
from elastic_resume.errors import ConfigError, UsageError
from elastic_resume.integrations import log_numbers, require_methods, require_versions, set_known
from elastic_resume.state import state_dict
from elastic_resume.training import worker_exit
from elastic_resume.training.resume import resume
from elastic_resume.training.run import Run
from elastic_resume.units import format_count

OLDEST, BELOW = "1.15", "1.20"
require_versions("accelerate", OLDEST, BELOW)

from accelerate import Accelerator  # noqa: E402  a missing or other version is named before
from accelerate.scheduler import AcceleratedScheduler  # noqa: E402
from accelerate.utils import DDPCommunicationHookType  # noqa: E402

from elastic_resume.integrations import accelerate_loader  # noqa: E402  these import accelerate
from elastic_resume.integrations.accelerate_folders import SavedFolders, SaveIteration  # noqa: E402

PREPARED_LOADER = (
    f"accelerator.prepare() was given the loader of the run. {SECOND_SHARDING} Move each batch to "
    "accelerator.device in the loop; a loader with batch_size= that prepare() has taken over does so itself."
)
# The replaced methods, with the parameters that are relied on.
METHODS = (
    "accumulate models",
    "backward loss",
    "prepare_data_loader data_loader",
    "save_state output_dir",
    "load_state input_dir",
    "skip_first_batches dataloader",
    "register_for_checkpointing objects",
    "gather tensor",
    "log",
)
require_methods("accelerate", OLDEST, BELOW, {"accelerate.Accelerator": METHODS})


class Prepared(NamedTuple):
    """The run and the prepared objects. ``scheduler`` is None if none was given."""

    run: Run
    model: Any
    optimizer: Any
    scheduler: Any


def prepare(
    accelerator: Accelerator,
    *,
    model: Any,
    optimizer: Any,
    data: Any,
    scheduler: Any = None,
    track: Mapping[str, Any] | None = None,
    **options: Any,
) -> Prepared:
    """Prepare by the accelerator, then restore the newest state. Replaces ``accelerator.prepare``.

    Args:
        accelerator: for DDP, FSDP2 or a single process. Its mixed precision, trackers and arguments for both
            are kept.
        model: a module, or a dict of several; prepared or not. With FSDP2 one module and one optimizer.
        optimizer: an optimizer, or a dict of several.
        data: the DataLoader with ``batch_size=`` and perhaps ``shuffle=`` that the script has made. It reads
            global batches from here on: ``batch_size`` for each process of the first start, times
            ``gradient_accumulation_steps``. Or a `GlobalBatches`, or the DataLoader around one or around an
            `ElasticSampler`: then move each batch to ``accelerator.device``.
        scheduler: a scheduler, or a dict of several. With the script's own loader it steps once for each
            process of the first start, as under plain Accelerate; else once per optimizer step.
        track: as in `er.resume`. Objects that were given to ``register_for_checkpointing`` are tracked too.
        **options: further arguments of `er.resume`.

    Raises:
        ConfigError: no node would hold the whole state, or the accelerator divides the loader or accumulates
            gradients without ``micro_batch=``; or an argument of `er.resume` is wrong.
        ElasticResumeError: see `er.resume`.

    """
    worker_exit.install_startup_hook()  # `resume` replaces it; errors before it are reported too
    batches = accelerate_loader.take_over(accelerator, data)
    _check_accelerator(accelerator, data)
    if accelerator.is_fsdp2:  # it replaces the optimizer's parameters, so it needs both at once
        if type(model) is dict or type(optimizer) is dict:
            raise ConfigError("Accelerate shards one model: pass a module and an optimizer, and no dicts.")
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        model, optimizer = (_map(accelerator.prepare, item) for item in (model, optimizer))
    if scheduler is not None:
        scheduler = _prepare_scheduler(accelerator, scheduler, batches)
    if accelerator.has_lomo_optimizer:
        raise ConfigError(
            "LOMO optimizers change the weights during backward(), so no step boundary has a whole state. "
            "Use another optimizer."
        )
    # backward() divides by it; the loss weights do that exactly
    set_known(accelerator, "gradient_accumulation_steps", 1)
    registered = _find_registered(accelerator, model, optimizer, scheduler, *(track or {}).values())
    if accelerator.project_configuration.automatic_checkpoint_naming:
        registered["accelerate.iteration"] = SaveIteration(accelerator)
    run = resume(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=accelerator.scaler,
        data=data,
        track={**(track or {}), **registered},
        **options,
    )
    for module in _values(model):
        if state_dict.find_parallel_wrapper(module) is not None:
            run.ddp(module)  # sets the recorded bucket order in Accelerate's DDP
    if batches is not None:
        accelerate_loader.read_for_run(accelerator, data, run)
        accelerate_loader.gather_uneven(accelerator, batches)
    _replace_methods(accelerator, run, optimizer)
    return Prepared(run, model, optimizer, scheduler)


def _prepare_scheduler(
    accelerator: Accelerator, scheduler: Any, batches: accelerate_loader.FirstWorldBatches | None
) -> Any:
    """Prepare schedulers, and let each step as often in any world; ``batches`` are of the script's loader."""
    prepared = _map(accelerator.prepare, scheduler)
    for wrapper in _values(prepared):
        if isinstance(wrapper, AcceleratedScheduler):
            set_known(wrapper, "split_batches", True)  # else it steps once per process of now
            if batches is not None and not accelerator.split_batches:
                accelerate_loader.step_per_process(wrapper, batches)
    return prepared


def _replace_methods(accelerator: Accelerator, run: Run, optimizer: Any) -> None:
    folders = SavedFolders(accelerator, run)
    methods = _Methods(accelerator, run, folders)
    for one in _values(optimizer):
        state_dict.unwrap(one).register_step_pre_hook(methods.check_backward)
    for name in ("accumulate", "backward", "log", "prepare_data_loader", "register_for_checkpointing"):
        setattr(accelerator, name, getattr(methods, name))
    for name in ("save_state", "load_state", "skip_first_batches"):
        setattr(accelerator, name, getattr(folders, name))


class _Methods:
    """The methods that replace those of one accelerator. Its class's own do the work."""

    def __init__(self, accelerator: Accelerator, run: Run, folders: SavedFolders) -> None:
        self._accelerator, self._run, self._folders = accelerator, run, folders
        self._class = type(accelerator)
        self._has_backward = False  # whether `backward` was called

    @contextlib.contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Add up gradients until the step's last micro-batch."""
        self._accelerator.sync_gradients = is_last = self._run.last_micro_batch
        with contextlib.ExitStack() as stack:
            for model in () if is_last else models:
                stack.enter_context(self._accelerator.no_sync(model))
            yield

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Add the gradients of this rank's part of the loss over the global batch."""
        if self._accelerator.sync_gradients and not self._run.last_micro_batch:
            raise UsageError(
                "accelerator.backward() was called outside of accelerator.accumulate(), and the step has "
                "further micro-batches: put `with accelerator.accumulate(model):` around the work on each "
                "batch of run.micro_batches(loader)."
            )
        self._has_backward = self._folders.is_in_step = True
        self._class.backward(self._accelerator, loss * self._run.loss_weight, **kwargs)

    def log(self, values: dict[str, Any], step: int | None = None, *args: Any, **kwargs: Any) -> None:
        """Log to the trackers, and to the run."""
        self._class.log(self._accelerator, values, step, *args, **kwargs)
        log_numbers(self._run, values, step)

    def check_backward(self, *_: Any) -> None:
        """Refuse a step whose gradients have no weights: ranks with fewer samples would count too much."""
        if not self._has_backward:
            raise UsageError(
                "the optimizer's first step came without accelerator.backward(loss), which multiplies the "
                "loss by its weight: call it in the place of loss.backward()."
            )

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a loader for an evaluation; refuse that of the run."""
        if has_our_batches(data_loader):
            raise UsageError(PREPARED_LOADER)
        return self._class.prepare_data_loader(self._accelerator, data_loader, *args, **kwargs)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Register what the run tracks; refuse an object that would not be restored."""
        tracked = {id(item) for item in self._run._generation.tracked.values()}  # noqa: SLF001  not for scripts
        if not all(id(state_dict.unwrap(item)) in tracked for item in objects):
            raise UsageError(
                "accelerator.register_for_checkpointing() was called after prepare(), so the object would "
                "not be restored: call it before, or pass the object to prepare() in track=."
            )
        self._class.register_for_checkpointing(self._accelerator, *objects)


def _check_accelerator(accelerator: Accelerator, data: Any) -> None:
    """Raise ConfigError for what cannot be restored, or would train on other gradients."""
    kind, degrees = accelerator.distributed_type.name, accelerator.parallelism_config
    if kind == "FSDP" and not accelerator.is_fsdp2:
        kind = "FSDP1"
    if kind not in {"NO", "FSDP"} and not kind.startswith("MULTI_"):
        raise ConfigError(
            f"the accelerator uses {kind}, and elastic_resume needs a whole replica on each node: it works "
            "with Accelerate's DDP, with FSDP2 and with a single process."
        )
    if degrees is not None and (degrees.non_data_parallel_size > 1 or kind != "FSDP"):
        raise ConfigError(
            f"the accelerator has {' '.join(str(degrees).split())}. elastic_resume works with dp_shard_size "
            "and dp_replicate_size alone, the ranks of a node and the number of nodes, and only with an "
            "fsdp_plugin with fsdp_version=2, which Accelerate ignores on CPUs. For DDP leave it out."
        )
    processes = batch_size.read_rank_and_world_size()[1]
    if accelerator.num_processes != processes:
        raise ConfigError(
            f"the accelerator counts {format_count(accelerator.num_processes, 'process', 'processes')} and "
            f"the job has {processes}, so each would train alone. On CPUs write Accelerator(cpu=True), or "
            "set ACCELERATE_USE_CPU=true as `accelerate launch` does."
        )
    if accelerator.mixed_precision == "fp8":
        raise ConfigError(
            "mixed_precision='fp8' has not been tested with elastic_resume: use 'bf16', 'fp16' or 'no'."
        )
    hook = getattr(accelerator.ddp_handler, "comm_hook", None)
    if hook in {DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD}:
        raise ConfigError(
            "the PowerSGD hook of DDP has a state on each rank, which is not restored: use the fp16 or bf16 "
            "hook, or none."
        )
    if any(has_our_batches(loader) for loader in accelerator._dataloaders):  # noqa: SLF001  there is no public list
        raise ConfigError(PREPARED_LOADER)
    steps = accelerator.gradient_accumulation_steps
    if steps > 1 and getattr(getattr(data, "batch_sampler", data), "micro_batch", None) is None:
        raise ConfigError(
            f"the accelerator has gradient_accumulation_steps={steps}, but data= has one batch per step. "
            "Give GlobalBatches the samples of a whole step as global_batch=, and those of one forward pass "
            "as micro_batch=; or give prepare() a loader with batch_size=, and it makes both."
        )


def _find_registered(accelerator: Accelerator, *others: Any) -> dict[str, Any]:
    """Return the objects of ``register_for_checkpointing`` that are not among ``others``."""
    given = [state_dict.unwrap(item) for other in others for item in _values(other)]
    found = accelerator._custom_objects  # noqa: SLF001  there is no public list
    return {
        f"accelerate.registered_{number}": item
        for number, item in enumerate(found)
        if not any(state_dict.unwrap(item) is one for one in given)
    }


def _map(function: Callable[[Any], Any], item: Any) -> Any:
    return {name: _map(function, one) for name, one in item.items()} if type(item) is dict else function(item)


def _values(item: Any) -> list[Any]:
    return [value for one in item.values() for value in _values(one)] if type(item) is dict else [item]
