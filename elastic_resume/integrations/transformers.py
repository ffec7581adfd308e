"""Continue Hugging Face's Trainer after failures, as the class `ElasticTrainer`.

    from elastic_resume.integrations.transformers import Trainer  # or SFTTrainer, DPOTrainer, … of TRL

    class MyTrainer(ElasticTrainer, Trainer):  # the same for a class of your own

The Trainer keeps its loop, arguments, callbacks and checkpoints. A `GlobalBatches` decides the order of
samples. All state is restored before the first step, and a step counts after its log, evaluation and save. A
callback could not do this: the Trainer computes its position before ``on_train_begin``, and ``on_step_end``
comes before the log, evaluation and save of the same step.

These methods of the Trainer are overridden:

- ``train`` refuses what cannot work, and keeps ``resume_from_checkpoint`` for a new job.
- ``get_train_dataloader`` reads global batches, and sets the number of batches in a step.
- ``_init_training_state`` restores the state. That needs the optimizer, so it calls ``_prepare_for_training``
  early.
- ``_run_epoch`` begins an epoch where the restored state is, and counts it.
- ``get_batch_samples``, ``_get_num_items_in_batch`` and ``training_step`` multiply each loss by its weight,
  in an attribute ``compute_loss`` that wraps the class's own. So a step's loss is the mean over its global
  batch, also if the ranks' shares differ.
- ``_maybe_log_save_evaluate`` counts the step afterwards.
- ``_evaluate`` and ``_save_checkpoint`` are `Run.busy`.
- ``_load_rng_state`` does nothing, because the run seeds the generators.
- ``_finalize_training`` commits the final state before the best model is loaded. In another start of a
  finished job, this and ``log`` return the times and rates of the start that finished it. ``log`` closes the
  run then: its values belong to the last step.
- ``get_total_train_batch_size`` returns the global batch.
"""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from elastic_resume.data.batch_size import KEEP_LOCAL, read_rank_and_world_size
from elastic_resume.data.global_batches import GlobalBatches, MicroBatch
from elastic_resume.data.rank_values import RankValues
from elastic_resume.data.rng import preserve_cpu_generators, seeded
from elastic_resume.errors import MachineError, UsageError
from elastic_resume.integrations import (
    LOADER_ARGUMENTS,
    WAIT_LIMIT_S,
    log_numbers,
    require_methods,
    require_versions,
    set_known,
    trainer_start,
)
from elastic_resume.integrations.plain_attributes import Preserved
from elastic_resume.integrations.trainer_state import ChangedAttributes, LogHistory, list_own_attributes
from elastic_resume.training.resume import resume
from elastic_resume.training.run import Run

OLDEST, BELOW = "5.23", "5.30"
require_versions("transformers", OLDEST, BELOW)

import transformers  # noqa: E402  after the check of its version
from transformers.integrations import TensorBoardCallback  # noqa: E402
from transformers.trainer_callback import ExportableState, TrainerCallback  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402

# The overridden methods, with the parameters on which they rely.
METHODS = (
    "train resume_from_checkpoint trial ignore_keys_for_eval",
    "get_train_dataloader",
    "get_total_train_batch_size args",
    "_init_training_state max_steps num_update_steps_per_epoch num_train_epochs resume_from_checkpoint trial",
    "_prepare_for_training max_steps train_dataloader resume_from_checkpoint",
    "_run_epoch epoch resume_from_checkpoint epochs_trained steps_trained_in_current_epoch",
    "get_batch_samples epoch_iterator num_batches device",
    "_get_train_sampler train_dataset",
    "_get_num_items_in_batch batch_samples device",
    "training_step model inputs num_items_in_batch",
    "_maybe_log_save_evaluate tr_loss grad_norm learning_rate",
    "_evaluate trial ignore_keys_for_eval skip_scheduler",
    "_save_checkpoint model trial",
    "_load_rng_state checkpoint",
    "_finalize_training trial num_train_samples start_time",
    "log logs",
)
require_methods("transformers", OLDEST, BELOW, {"transformers.Trainer": METHODS})

logger = logging.getLogger(__name__)

# Fields of TrainerState that a snapshot holds; its log_history is kept by `LogHistory`.
STATE_FIELDS = (
    *("global_step", "epoch", "max_steps", "num_input_tokens_seen", "total_flos"),
    *("best_metric", "best_global_step", "best_model_checkpoint"),
)
STEPPING_OPTIMIZERS = ("lomo", "layerwise")  # parts of their names; they step within backward()
UNCOUNTED_LABEL = -100  # transformers does not count it
IN_EPOCH = "the restored state"  # makes _run_epoch() begin within the epoch; nothing reads it as a path


class TrainerProgress:
    """The state of a Trainer besides its model, optimizer, scheduler and order of samples."""

    def __init__(self, trainer: ElasticTrainer) -> None:
        self._trainer = trainer
        self.stopped_training = self.stopped_epoch = False  # as they were loaded
        self.old_max_steps = 0
        self.first_step = 0  # greater if the job began with a checkpoint of another one
        self.last_step: tuple[Any, Any] = (None, None)  # its gradient's norm, and its learning rate
        self._losses: dict[str, Any] = {"_total_loss_scalar": 0.0, "_globalstep_last_logged": 0}

    def state_dict(self) -> dict[str, Any]:
        """Return counters, the best metric, the logged losses, and what the callbacks export."""
        trainer = self._trainer
        state = {name: _to_plain(getattr(trainer.state, name)) for name in STATE_FIELDS}
        return {
            "state": state,
            "losses": {name: getattr(trainer, name, value) for name, value in self._losses.items()},
            "last_step": [_to_plain(value) for value in self.last_step],
            "first_step": self.first_step,
            "stops": [trainer.control.should_training_stop, trainer.control.should_epoch_stop],
            "callbacks": [
                {"class": type(callback).__name__, "attributes": callback.state().get("attributes", {})}
                for callback in self._exporting_callbacks()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set all of it. A callback that the checkpoint lacks keeps its state."""
        for name, value in state["state"].items():
            if name != "max_steps":  # it follows from the arguments
                setattr(self._trainer.state, name, value)
        self.old_max_steps = state["state"]["max_steps"]
        self.stopped_training, self.stopped_epoch = state["stops"]
        self.last_step, self.first_step = tuple(state["last_step"]), state["first_step"]
        self._losses = dict(state["losses"])
        saved = list(state["callbacks"])
        for callback in self._exporting_callbacks():
            found = next((one for one in saved if one["class"] == type(callback).__name__), None)
            if found is not None:
                saved.remove(found)
                for name, value in found["attributes"].items():
                    setattr(callback, name, value)

    def start_at(self, step: int) -> None:
        """Begin a new job after ``step`` steps of another one, whose losses are not known."""
        self.first_step = self._losses["_globalstep_last_logged"] = step

    def set_losses(self) -> None:
        """Set the logged losses. The Trainer sets them to zero when its loop begins."""
        for name, value in self._losses.items():
            set_known(self._trainer, name, value)

    def _exporting_callbacks(self) -> list[ExportableState]:
        callbacks = self._trainer.callback_handler.callbacks
        return [one for one in callbacks if isinstance(one, ExportableState)]


class _StartTime:
    """When the job first started, in ns since 1970, the same on all ranks."""

    def __init__(self, device: torch.device) -> None:
        now = torch.tensor(time.time_ns(), device=device)
        if dist.is_initialized():
            dist.broadcast(now, 0)
        self.nanoseconds = int(now)

    def state_dict(self) -> dict[str, int]:
        return {"nanoseconds": self.nanoseconds}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.nanoseconds = state["nanoseconds"]


class _LoopBegin(TrainerCallback):
    """Tells that all other callbacks have begun. Some set their counts to zero there."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Tell it."""
        self._tell()


class _RunLog(TrainerCallback):
    """Logs to the run what the Trainer logs, under the Trainer's names and steps."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Log it, with what callbacks before this one have added or removed (transformers' own do)."""
        del args, control
        last = state.log_history[-1] if state.log_history else {}
        if last.get("step") != state.global_step:  # somebody has called on_log past Trainer.log()
            last = {}
        whole = {**last, **(logs or {})}
        whole.pop("step", None)
        log_numbers(self._run, whole, state.global_step)


def _purge_once(callback: TensorBoardCallback, step: int) -> Callable[..., Any]:
    """Return what makes the callback's first writer. It hides what was logged from ``step`` on.

    The arguments, which belong to no step, are not written again.
    """
    kind: Any = callback._SummaryWriter  # noqa: SLF001  the callback makes its writers of this

    def add_text(self: Any, tag: str, text: str, global_step: int | None = None, *more: Any) -> None:
        if global_step is not None:
            kind.add_text(self, tag, text, global_step, *more)

    def make(*args: Any, **kwargs: Any) -> Any:
        set_known(callback, "_SummaryWriter", kind)  # an evaluation after the training makes another
        return type("ContinuedWriter", (kind,), {"add_text": add_text})(*args, purge_step=step, **kwargs)

    return make


def _to_plain(value: Any) -> Any:
    """Return a number of numpy as one of Python."""
    return value.item() if hasattr(value, "item") else value


class ElasticTrainer(transformers.Trainer):
    """A Trainer whose training goes on after the loss of workers and nodes.

    Derive from it first, then from the Trainer that you use. One optimizer step has
    ``per_device_train_batch_size`` x ranks x ``gradient_accumulation_steps`` samples, with the number of
    ranks of the job's first start. With fewer ranks each accumulates more. ``elastic_global_batch`` sets
    another number of samples; then leave out ``gradient_accumulation_steps``.

    ``elastic_options`` are further arguments of `er.resume`, such as ``ckpt_dir``, ``save_every`` or
    ``track``. ``elastic_run`` is the `Run`, from ``on_train_begin`` on.
    """

    elastic_global_batch: int = 0
    elastic_options: Mapping[str, Any] = {}
    elastic_run: Run | None = None

    _elastic_loader: DataLoader[Any] | None = None
    _elastic_upcoming: Iterator[MicroBatch] = iter(())
    _elastic_step_batches: list[MicroBatch]
    _elastic_weights: tuple[float, float] | None = None  # of the batch in training_step(): see there
    _elastic_attributes: ChangedAttributes | None = None
    _elastic_checkpoint: str | bool | None = None  # resume_from_checkpoint
    _elastic_has_sum: bool | None = None  # see `_elastic_is_sum`; None until a loss was computed
    _elastic_is_loop_set = _elastic_is_finalizing = False
    _elastic_finished: Mapping[str, Any] = {}  # recorded by an earlier start, if it has finished the training
    _initial_global_step: int  # the Trainer's: where this process began

    # ---- before the first step -------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train, from the newest state that any node holds on.

        Raises:
            UsageError: an argument or setting cannot work with it; the text says which, and what to do.

        """
        for obstacle in self._elastic_obstacles(trial):
            raise UsageError(f"ElasticTrainer cannot train here: {obstacle}.")
        self._elastic_step_batches, self._elastic_checkpoint = [], resume_from_checkpoint
        if not self.elastic_global_batch:
            self.elastic_global_batch = trainer_start.find_global_batch(self, dict(self.elastic_options))
        return super().train(None, trial, ignore_keys_for_eval)

    def _elastic_obstacles(self, trial: Any) -> Iterator[str]:
        """Yield what cannot work, and what to do instead."""
        args, batch, dataset = self.args, self.elastic_global_batch, self.train_dataset
        if self.elastic_run is not None:
            yield "train() was called before; start another training as a job with its own --rdzv-id"
        if type(batch) is not int or batch < 0:
            yield (
                f"elastic_global_batch is {batch!r}; leave it out, or set it to the number of samples of one "
                "optimizer step over all ranks"
            )
        if batch and args.gradient_accumulation_steps != 1 and self._elastic_loader is None:
            yield (
                "leave out gradient_accumulation_steps or elastic_global_batch. With the latter it follows "
                "from the number of ranks and per_device_train_batch_size"
            )
        is_fsdp2, degrees = self.accelerator.is_fsdp2, self.accelerator.parallelism_config
        if (
            (self.is_deepspeed_enabled or self.is_fsdp_xla_enabled or (self.is_fsdp_enabled and not is_fsdp2))
            or getattr(self, "is_distributed_loading_by_transformers", False)
            or (degrees is not None and (degrees.non_data_parallel_size > 1 or not is_fsdp2))
        ):
            yield (
                "the model is divided among ranks, and not by FSDP2 over the ranks of each node (DeepSpeed, "
                "FSDP1, tensor or context parallel, a parallelism_config without FSDP)"
            )
        if (ranks := read_rank_and_world_size()[1]) != args.world_size:
            yield (
                f"the Trainer works with {args.world_size} of {ranks} ranks, so each would train alone. On "
                "CPUs set use_cpu=True in TrainingArguments"
            )
        if args.n_gpu > 1:
            yield "one process has several GPUs; start one process for each GPU"
        if trial is not None:
            yield "hyperparameter search trains several models in one job"
        if getattr(self.data_collator, "seed", None) is not None and hasattr(self.data_collator, "generator"):
            yield (
                f"{type(self.data_collator).__name__} has seed=, and so random numbers that no restart "
                "restores. Leave seed= out, and it draws from those that are restored"
            )
        if args.auto_find_batch_size:
            yield "set per_device_train_batch_size in place of auto_find_batch_size"
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            yield "the train_dataset has no length, so its samples have no global order"
        if args.train_sampling_strategy not in {"random", "sequential"}:
            yield f"train_sampling_strategy is {args.train_sampling_strategy!r}; use 'random' or 'sequential'"
        if self._elastic_orders_itself():
            yield (
                "get_train_dataloader() or _get_train_sampler() is overridden, and its order of samples "
                "would be ignored. Prepare the data in train_dataset and data_collator instead"
            )
        if args.ignore_data_skip:
            yield "leave out ignore_data_skip; finished batches are skipped and not read"
        if getattr(args, "enable_jit_checkpoint", False):
            yield "leave out enable_jit_checkpoint; SIGTERM saves the state without it"
        if args.world_size > 1 and not args.average_tokens_across_devices:
            yield "average_tokens_across_devices=False gives ranks with fewer tokens the same weight"
        optimizer = str(getattr(args.optim, "value", args.optim))
        if any(word in optimizer for word in STEPPING_OPTIMIZERS):
            yield f"the optimizer {optimizer} steps within backward()"
        if self.elastic_options.get("on_world_change") == KEEP_LOCAL:
            yield (
                "on_world_change='keep_local_batch' would change the number of steps, on which the schedule "
                "of the learning rate depends"
            )

    def _elastic_orders_itself(self) -> bool:
        """Return whether another class decides the order of samples, before or after this one."""
        kind, below = type(self), super().get_train_dataloader
        return (
            kind.get_train_dataloader is not ElasticTrainer.get_train_dataloader
            or below.__func__ is not transformers.Trainer.get_train_dataloader
            or not self._elastic_has_plain_sampler()
        )

    def _elastic_has_plain_sampler(self) -> bool:
        """Return whether the sampler is the Trainer's own, or one like it: that of TRL's KTO is."""
        if type(self)._get_train_sampler is transformers.Trainer._get_train_sampler:  # noqa: SLF001
            return True
        is_random = self.args.train_sampling_strategy == "random"
        sampler, kind = self._get_train_sampler(), RandomSampler if is_random else SequentialSampler
        is_whole = len(sampler) == len(self.train_dataset) if type(sampler) is kind else False
        return is_whole and not getattr(sampler, "replacement", False)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of this rank's part of each global batch, with the Trainer's settings."""
        plain: Any = super().get_train_dataloader()
        if not self.elastic_global_batch:  # before train(), by a script that asks for its length
            return cast("DataLoader[Any]", plain)
        args = self.args
        batches = GlobalBatches(
            len(plain.dataset),
            self.elastic_global_batch,
            seed=args.seed if args.data_seed is None else args.data_seed,
            shuffle=args.train_sampling_strategy == "random",
            drop_last=args.dataloader_drop_last,
            micro_batch=self._train_batch_size,
        )
        args.gradient_accumulation_steps = batches.parts(0)
        # A worker's generators depend on the step at which it started, so each sample gets its own seed.
        dataset = seeded(plain.dataset) if plain.num_workers else plain.dataset
        options = {name: getattr(plain, name) for name in LOADER_ARGUMENTS}
        self._elastic_loader = DataLoader(dataset, batch_sampler=batches, **options)
        return self._elastic_loader

    def get_total_train_batch_size(self, args: Any) -> int:  # noqa: ARG002  the Trainer's signature
        """Return the global batch."""
        return self.elastic_global_batch

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: Any,  # noqa: ARG002  the Trainer's signature
        trial: Any,
    ) -> tuple[int, int]:
        """Restore the newest state; return the epoch to begin with."""
        super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, None, trial)
        loader = self._elastic_loader
        if loader is None:
            raise UsageError("ElasticTrainer cannot train here: get_train_dataloader() was not called.")
        self._elastic_prepared = super()._prepare_for_training(max_steps, loader, None)
        self._elastic_loss = torch.tensor(0.0, device=self.args.device)
        self._elastic_operations = torch.zeros((), dtype=torch.float64)
        self._elastic_progress = progress = TrainerProgress(self)
        options = {"seed": self.args.seed, **self.elastic_options}
        start = _StartTime(self.args.device)
        given = [*(options.get("track") or {}).values(), options.get("ema")]
        self._elastic_attributes = ChangedAttributes(
            self,
            list_own_attributes(transformers.Trainer, ElasticTrainer) | {"compute_loss"},
            [self.model, self.model_wrapped, self.optimizer, self.lr_scheduler, *given],
        )
        tracked = {
            "trainer": progress,
            "trainer_log": LogHistory(self),
            "trainer_attributes": self._elastic_attributes,
            "trainer_loss": RankValues(self._elastic_loss),
            "trainer_operations": RankValues(self._elastic_operations, "sum"),
            "trainer_start": start,  # `state.diff` does not compare it
        }
        run = self.elastic_run = resume(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.lr_scheduler,
            scaler=self.accelerator.scaler,
            data=loader,
            **{**options, "track": {**(options.get("track") or {}), **tracked}},
        )
        trainer_start.record(run, global_batch=self.elastic_global_batch)
        if self._elastic_checkpoint:
            self._elastic_start_from(max_steps, num_update_steps_per_epoch, num_train_epochs, trial)
        self._elastic_continue_loggers(start.nanoseconds)
        self.add_callback(_LoopBegin(self._elastic_begin_loop))
        self.add_callback(_RunLog(run))
        if not self.is_fsdp_enabled:
            run.ddp(self.model_wrapped)  # it is wrapped; this restores the bucket order
        # An attribute of the object, so that a subclass's own compute_loss() is weighted too.
        plain: Callable[..., Any] = self.compute_loss
        self.__dict__["compute_loss"] = functools.partial(self._elastic_compute_loss, plain)
        if progress.stopped_epoch and run.position.step_in_epoch > 0:
            run.end_epoch()
        step = self.state.global_step
        was_stopped = progress.stopped_training and step < progress.old_max_steps
        is_over = was_stopped or step >= max_steps
        return (num_train_epochs if is_over else run.position.epoch), 0

    def _elastic_start_from(self, max_steps: int, steps_per_epoch: int, epochs: int, trial: Any) -> None:
        """Begin a new job with the checkpoint that `train` was given. A resumed job has its own state."""
        run, path = self._elastic_get_run(), self._elastic_checkpoint
        if run.plan.kind != "cold":
            if run.rank == 0:
                logger.info(
                    f"resume_from_checkpoint={path!r} is not read: the job continues at step "
                    f"{run.position.step}, from its own newest state."
                )
            return
        if not isinstance(path, str):
            path = get_last_checkpoint(self.args.output_dir)
        trainer_start.check_same_checkpoint(self, path)
        if path is None:
            raise UsageError(
                "ElasticTrainer cannot train here: resume_from_checkpoint is True, and there is no "
                f"checkpoint in {self.args.output_dir}. Leave it out: the job continues by itself."
            )
        super()._init_training_state(max_steps, steps_per_epoch, epochs, path, trial)
        self._load_from_checkpoint(path, self.model_wrapped if self.is_fsdp_enabled else None)
        self._load_optimizer_and_scheduler(path)
        self._load_scaler(path)
        self._elastic_progress.start_at(self.state.global_step)
        loader: Any = self._elastic_loader
        trainer_start.set_position(run, loader.batch_sampler, self.state.global_step)
        if run.rank == 0:
            logger.info(f"a new job begins with the values of {path}, after step {self.state.global_step}.")
            if self.state.global_step >= max_steps:
                logger.warning(
                    f"NOTHING IS LEFT TO TRAIN: that is the last of {max_steps} steps. To train anew, give "
                    "another output_dir, or leave out resume_from_checkpoint."
                )

    def _elastic_begin_loop(self) -> None:
        """Restore what the callbacks hold, now that they have begun, and write the last step's log again."""
        if self._elastic_attributes is not None:
            self._elastic_attributes.begin()
        if self._elastic_get_run().plan.kind != "cold":
            step = self.state.global_step
            last = [entry for entry in self.state.log_history if entry.get("step") == step]
            for callback in self._elastic_tensorboards():
                for entry in last:
                    logs = {name: value for name, value in entry.items() if name != "step"}
                    callback.on_log(self.args, self.state, self.control, logs=logs)

    def _elastic_tensorboards(self) -> list[Any]:
        return [one for one in self.callback_handler.callbacks if isinstance(one, TensorBoardCallback)]

    def _elastic_continue_loggers(self, nanoseconds: int) -> None:
        """Let TensorBoard and Weights & Biases go on in one run, named after the job's first start.

        TensorBoard then leaves out what was logged from the restored step on. That step's log comes again.
        """
        started = time.strftime("%Y%m%d-%H%M%S", time.gmtime(nanoseconds // 10**9))
        name = f"elastic-resume-{started}-{nanoseconds % 10**9:09d}"
        os.environ.setdefault("WANDB_RUN_ID", name)
        os.environ.setdefault("WANDB_RESUME", "allow")
        for callback in self._elastic_tensorboards():
            if callback.logging_dir is None:
                callback.logging_dir = str(Path(self.args.output_dir, "runs", name))
            if self._elastic_get_run().plan.kind != "cold":
                set_known(callback, "_SummaryWriter", _purge_once(callback, self.state.global_step))

    def _prepare_for_training(self, *_: Any, **__: Any) -> Any:
        return self._elastic_prepared

    # ---- one epoch -------------------------------------------------------------------------------------

    def _run_epoch(self, **kwargs: Any) -> None:
        run = self._elastic_get_run()
        self._elastic_set_loop()
        run.begin_epoch(from_start=True)  # the Trainer skips the finished batches, without reading them
        self._elastic_upcoming = run.upcoming_batches()
        if steps := run.position.step_in_epoch:
            kwargs["resume_from_checkpoint"] = IN_EPOCH
            kwargs["epochs_trained"] = kwargs["epoch"]
            kwargs["steps_trained_in_current_epoch"] = steps * self.args.gradient_accumulation_steps
        super()._run_epoch(**kwargs)
        self._elastic_count_step()
        if run.position.step_in_epoch >= self._elastic_steps() or not self.control.should_training_stop:
            self.control.should_epoch_stop = False  # else a state saved after this epoch would end the next
            self._elastic_note_operations()
            run.end_epoch()

    def _maybe_log_save_evaluate(
        self, tr_loss: Tensor, grad_norm: Any, *args: Any, learning_rate: Any = None, **kwargs: Any
    ) -> None:
        if learning_rate is None:  # restored after the epoch's last step: the log below is of that step
            grad_norm, learning_rate = self._elastic_progress.last_step
        self._elastic_progress.last_step = grad_norm, learning_rate
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, learning_rate=learning_rate, **kwargs)
        # A step that ends the epoch early counts when the epoch's other work is done: see _run_epoch().
        if not (self.control.should_epoch_stop or self.control.should_training_stop):
            self._elastic_count_step()

    def _elastic_count_step(self) -> None:
        run = self._elastic_get_run()
        if self.state.global_step > run.position.step:
            self._elastic_note_operations()
            run.step()

    def _elastic_note_operations(self) -> None:
        """Note this rank's floating-point operations since the last log or save, which set them to zero."""
        self._elastic_operations.fill_(self.current_flos)

    def _elastic_steps(self) -> int:
        sampler = None if self._elastic_loader is None else self._elastic_loader.batch_sampler
        return sampler.steps if isinstance(sampler, GlobalBatches) else 0

    def _elastic_get_run(self) -> Run:
        if self.elastic_run is None:
            raise UsageError(
                "ElasticTrainer cannot train here: call train(), which restores the state first."
            )
        return self.elastic_run

    def _elastic_set_loop(self) -> None:
        """Set what the Trainer has set to zero when its loop began."""
        if not self._elastic_is_loop_set:
            self._elastic_is_loop_set = True
            set_known(self, "_tr_loss", self._elastic_loss)
            set_known(self, "current_flos", float(self._elastic_operations))
            self._elastic_progress.set_losses()
            if self._elastic_attributes is not None:
                if self._elastic_get_run().position.step_in_epoch:
                    self._elastic_attributes.set_loaded()  # a callback has begun the epoch once more
                self._elastic_attributes.forget_loaded()

    def _load_rng_state(self, checkpoint: Any) -> None:
        pass

    # ---- the loss of one batch -------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Read the batches of one step, and note their weights."""
        self._elastic_step_batches = list(itertools.islice(self._elastic_upcoming, num_batches))
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """Leave out the labels of samples that another rank counts."""
        weights = [batch.loss_weight for batch in self._elastic_step_batches]  # empty in an evaluation
        if 0.0 in weights:
            pairs = zip(batch_samples, weights, strict=True)
            batch_samples = [batch if weight else _without_labels(batch) for batch, weight in pairs]
        return super()._get_num_items_in_batch(batch_samples, device)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Weigh the loss of one batch, so that those of all ranks add up to the mean of the global batch."""
        weight = self._elastic_step_batches.pop(0).loss_weight
        is_scaled = self.loss_is_scaled_for_ga
        if is_scaled is None:  # as the Trainer finds it out
            takes_count = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            is_scaled = takes_count or self.compute_loss_func is not None
        # The Trainer divides other losses by the number of batches afterwards.
        mean_weight = weight if is_scaled else weight * self.current_gradient_accumulation_steps
        self._elastic_weights = float(weight > 0), mean_weight
        try:
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        finally:
            self._elastic_weights = None
        return loss

    def _elastic_compute_loss(
        self,
        compute_loss: Callable[..., Any],
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Compute the loss of one batch; in training, times its weight."""
        is_sum = self._elastic_is_sum(compute_loss, model, inputs, num_items_in_batch)
        # The Trainer multiplies a loss by the number of ranks if there is a count, also a mean.
        count = num_items_in_batch if is_sum else None
        result = compute_loss(model, inputs, return_outputs=return_outputs, num_items_in_batch=count)
        if self._elastic_weights is None:  # an evaluation
            return result
        sum_weight, mean_weight = self._elastic_weights
        weight = sum_weight if is_sum else mean_weight
        return (result[0] * weight, *result[1:]) if return_outputs else result * weight

    def _elastic_is_sum(
        self, compute_loss: Callable[..., Any], model: nn.Module, inputs: Any, count: Any
    ) -> bool:
        """Return whether the loss is a sum over the batch, divided by the items of the whole step.

        Otherwise it is a mean over the batch. Many models take ``num_items_in_batch`` and ignore it.
        """
        if self.loss_is_scaled_for_ga is not None:
            return bool(self.loss_is_scaled_for_ga)
        if count is None:
            return False
        if self._elastic_has_sum is None:
            self._elastic_has_sum = self._elastic_try_loss(compute_loss, model, inputs, count)
        return self._elastic_has_sum is not False

    def _elastic_try_loss(
        self, compute_loss: Callable[..., Any], model: nn.Module, inputs: Any, count: Any
    ) -> bool | None:
        """Return whether twice the count halves the loss, or leaves it; None if no rank has a loss here."""
        was_training, losses = model.training, []
        devices = [torch.cuda.current_device()] if self.args.device.type == "cuda" else []
        model.train(False)
        attributes = self._elastic_attributes
        owners = attributes.list_owners() if attributes is not None else {}
        for factor in (1, 2):
            with (
                torch.no_grad(),
                preserve_cpu_generators(),
                torch.random.fork_rng(devices),
                Preserved(owners),
            ):
                loss = compute_loss(model, copy.copy(inputs), num_items_in_batch=count * factor)
                losses.append(float(loss.mean()))
        model.train(was_training)
        first, second = losses
        ratio = second / first if first and math.isfinite(first) else 0.0
        found = torch.tensor([ratio], device=self.args.device)
        ratios = [one for one in self.accelerator.gather(found).tolist() if one]
        for expected, is_sum in ((0.5, True), (1.0, False)):
            if ratios and all(math.isclose(one, expected, rel_tol=0.01) for one in ratios):
                return is_sum
        if ratios:
            raise UsageError(
                "ElasticTrainer cannot train here: the loss is neither a mean over the batch nor a sum "
                "divided by num_items_in_batch. Set loss_is_scaled_for_ga = False in your class, and the "
                "loss is computed without this count, as a mean. Set True if the count divides all of it."
            )
        return None

    # ---- evaluation, checkpoints, the end --------------------------------------------------------------

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> Any:
        run = self._elastic_get_run()
        if skip_scheduler and run.position.step > self._elastic_progress.first_step:
            return {}  # eval_on_start, which was done when the job started
        with run.busy("evaluation"):
            return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with self._elastic_get_run().busy("save_checkpoint", WAIT_LIMIT_S):
            super()._save_checkpoint(model, trial)

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        self._elastic_set_loop()
        run = self._elastic_get_run()
        self._elastic_is_finalizing = True
        try:
            if sys.exc_info()[0] is None:
                with run._generation.heartbeat.idle_afterwards():  # noqa: SLF001  not for scripts, as the next
                    run._save_final_state()  # noqa: SLF001  before the Trainer's totals change
            return self._elastic_finalize(run, trial, num_train_samples, start_time)
        finally:
            run._close(must_save=False)  # noqa: SLF001  it may be closed

    def _elastic_finalize(self, run: Run, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        # train_loss is the mean over all steps. The rates belong to the steps of this process, so the time
        # of the others is estimated from these.
        first = self._elastic_progress.first_step
        if own_steps := self.state.global_step - self._initial_global_step:
            now = time.time()
            start_time = now - (now - start_time) * (self.state.global_step - first) / own_steps
        else:
            self._elastic_finished = trainer_start.read_finished(run)
        self._initial_global_step = first
        output = super()._finalize_training(trial, num_train_samples, start_time)
        if self._elastic_finished:
            output.metrics.update(self._elastic_finished["metrics"])  # log() may have had a copy
            self.state.stateful_callbacks = self._elastic_finished["callbacks"]
            self.state.log_history[-1:] = self._elastic_finished["logged"]
            self._elastic_finished = {}
        elif own_steps:
            metrics, callbacks = trainer_start.measured(output.metrics), self.state.stateful_callbacks
            finished = {"step": run.position.step, "metrics": metrics, "callbacks": callbacks}
            trainer_start.record(run, finished={**finished, "logged": self.state.log_history[-1:]})
        return output

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log; another start of a finished job has the measured values of the start that finished it."""
        logs.update(self._elastic_finished.get("metrics", {}))
        super().log(logs, *args, **kwargs)
        if self._elastic_is_finalizing:
            self._elastic_get_run()._close(must_save=False)  # noqa: SLF001  the state is saved


def _without_labels(batch: Any) -> Any:
    if not isinstance(batch, Mapping):
        return batch
    uncounted = {
        name: torch.full_like(batch[name], UNCOUNTED_LABEL)
        for name in ("labels", "shift_labels")
        if isinstance(batch.get(name), Tensor)
    }
    return {**batch, **uncounted}


class Trainer(ElasticTrainer):
    """transformers' Trainer, by one changed import: it comes from this module.

    The Trainers of TRL, and transformers' Seq2SeqTrainer, are here under their names too.
    """


def __getattr__(name: str) -> Any:
    """Return the class of this name of transformers or TRL, derived from `ElasticTrainer`."""
    if not name.endswith("Trainer"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = getattr(transformers, name, None)
    if base is None:
        try:
            base = getattr(importlib.import_module("trl"), name)
        except ImportError as error:
            raise MachineError(
                f"elastic_resume.integrations.transformers: {name} is none of transformers, and TRL cannot "
                f"be imported ({error}): pip install trl."
            ) from error
    kind = type(name, (ElasticTrainer, base), {"__module__": __name__, "__doc__": base.__doc__})
    globals()[name] = kind
    return kind
