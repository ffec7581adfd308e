"""Restore the state in ``setup`` of Lightning's DDPStrategy, and record each step after its validation.

``lightning.pytorch`` and ``pytorch_lightning`` share it. Lightning owns the loops, so the strategy hooks into
them where Lightning has no callback. It extends these methods of DDPStrategy:

- ``setup_environment`` gives loggers the versions of an earlier start (`lightning_loggers`);
- ``restore_checkpoint_after_setup``: Lightning reads a ``ckpt_path`` after ``setup``, if at all;
- ``setup`` calls `er.resume` when model, optimizers and loader exist, and restores the loops' counters;
- ``process_dataloader`` puts a `GlobalBatches` in the place of the DistributedSampler that Lightning adds;
- ``backward`` multiplies the loss by its weight, and ``on_train_batch_start`` takes the weight of the batch
  and lets DDP's buffers follow rank 0;
- ``on_validation_start``, ``on_validation_end`` and ``save_checkpoint`` are `Run.busy`, and
  ``validation_step`` goes on with that;
- ``on_train_start`` records that the training loop ran;
- ``setup_distributed``, ``configure_ddp``, ``barrier`` and ``broadcast``: with ``restartable=True`` ranks
  meet in `er.resume`, and the fit loop is the restartable function;
- ``parallel_devices``, ``num_nodes`` and ``distributed_sampler_kwargs`` follow the launcher's world.

It wraps these methods of Lightning's objects (`_replace`), for the reason given:

- the epoch loop's ``on_advance_end``: a step is counted when everybody's ``on_train_batch_end`` and a
  validation that was due are done, so a restart finds the loops between two batches and never within one;
- the epoch loop's ``reset``: it would set an interrupted epoch's counters to zero;
- the fit loop's ``on_advance_start`` and ``on_advance_end``: an epoch begins before anybody's
  ``on_train_epoch_start`` and ends after anybody's ``on_train_epoch_end``;
- the fit loop's ``run``: a job that was killed after its last step still gets its epoch's end, and its
  ``on_train_end``;
- the data connector's ``_prepare_dataloader``: it would divide a `GlobalBatches` once more;
- the checkpoint connector's ``_restore_modules_and_callbacks``: it would load a ``ckpt_path`` over the state;
- the signal connector's ``register_signal_handlers``: Lightning's handler of SIGTERM waits for all ranks.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from elastic_resume.data.batch_size import KEEP_LOCAL, count_micro_batches
from elastic_resume.data.elastic_sampler import ElasticSampler
from elastic_resume.data.global_batches import GlobalBatches, MicroBatch
from elastic_resume.data.rng import seeded
from elastic_resume.errors import ConfigError, UsageError
from elastic_resume.integrations import LOADER_ARGUMENTS, WAIT_LIMIT_S, lost_steps, require_methods, set_known
from elastic_resume.integrations.lightning_loggers import Loggers, RunLog
from elastic_resume.integrations.lightning_metrics import CarriedMetrics
from elastic_resume.integrations.lost_attributes import LostAttributes
from elastic_resume.training.resume import resume
from elastic_resume.training.run import Run

_Base: Any = object  # DDPStrategy of one of the two libraries is the next base class

logger = logging.getLogger(__name__)

RENEWAL_S = 60.0  # between two notes that a validation advances
EPOCH_END_LIMIT_S = 3 * WAIT_LIMIT_S  # hooks of the script may do long work there
_LIBRARIES = ("lightning.", "pytorch_lightning.", "lightning_fabric.")
# Attributes that ModelCheckpoint does not restore. The first three decide whether a step was saved already.
_UNRESTORED = (
    *("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation"),
    "current_score",
)
# Classes in the library's ``callbacks``, and the error for them and those derived from them. The last one is
# refused only for a module with BatchNorm.
_REFUSED_CALLBACKS = {
    "GradientAccumulationScheduler": (
        "Lightning: GradientAccumulationScheduler changes the number of batches in a step, which a position "
        "in an epoch cannot follow. Use accumulate_grad_batches=."
    ),
    "BaseFinetuning": (
        "Lightning: callbacks derived from BaseFinetuning add parameters to the optimizer during training, "
        "which a restart cannot do before it loads the optimizer's state. Give the optimizer all parameters "
        "from the start, in groups whose learning rate is 0 until they are to train."
    ),
    **{
        f"{what}Finder": f"Lightning: {what}Finder trains before the training itself. Run it without "
        "ElasticDDPStrategy, and write what it finds into the script."
        for what in ("LearningRate", "BatchSize")
    },
    "StochasticWeightAveraging": (
        "Lightning: StochasticWeightAveraging adds an epoch without optimizer steps for a module with "
        "BatchNorm, and a restart continues from a step. Keep an average with torch.optim.swa_utils, and "
        'pass it in resume_options={"track": {...}}.'
    ),
}
# Methods and properties that are extended or called, with their parameters.
_METHODS = {
    "strategies.ddp.DDPStrategy": (
        *("setup trainer", "distributed_sampler_kwargs", "num_nodes"),
        *("setup_distributed", "set_world_ranks", "configure_ddp", "barrier", "broadcast obj src"),
        *("setup_environment", "restore_checkpoint_after_setup"),
    ),
    "strategies.strategy.Strategy": (
        "process_dataloader dataloader",
        "backward closure_loss optimizer args kwargs",
        "save_checkpoint checkpoint filepath storage_options",
        "on_train_batch_start batch batch_idx",
        "validation_step",
        *("on_train_start", "on_validation_start", "on_validation_end"),
    ),
    "loops.fit_loop._FitLoop": (
        *("run", "setup_data", "reset", "advance", "on_iteration_done"),
        *("on_advance_start", "on_advance_end", "on_run_start", "on_run_end"),
    ),
    "loops.training_epoch_loop._TrainingEpochLoop": (
        *("reset", "on_advance_end data_fetcher"),
        *("state_dict destination prefix", "load_state_dict state_dict prefix"),
    ),
    "trainer.connectors.data_connector._DataConnector": ("_prepare_dataloader dataloader shuffle mode",),
    "trainer.connectors.checkpoint_connector._CheckpointConnector": (
        "_restore_modules_and_callbacks checkpoint_path weights_only",
    ),
    "trainer.connectors.signal_connector._SignalConnector": ("register_signal_handlers",),
    "trainer.connectors.logger_connector.result._Sync": ("__init__ fn _should rank_zero_only _op _group",),
    "trainer.connectors.logger_connector.result._ResultMetric": ("__init__ metadata is_tensor",),
}


def make_strategy(name: str, library: str, fabric: str, versions: tuple[str, str]) -> Any:
    """Return the class ``ElasticDDPStrategy`` of one of the two libraries, after a check of its methods."""
    methods = {f"{library}.{path}": lines for path, lines in _METHODS.items()}
    require_methods(name, *versions, methods)
    environments = importlib.import_module(f"{fabric}.plugins.environments.torchelastic")

    class WorldOfLauncher(environments.TorchElasticEnvironment):  # type: ignore[misc, name-defined]
        """Takes ranks and sizes from the launcher, not from Trainer's ``num_nodes`` and ``devices``."""

        def validate_settings(self, num_devices: int, num_nodes: int) -> None:
            """Accept any number: nodes may come and go, and may differ in their number of workers."""

    base = importlib.import_module(f"{library}.strategies").DDPStrategy
    parts = {"_library": importlib.import_module(library), "_environment_class": WorldOfLauncher}
    return type("ElasticDDPStrategy", (ElasticStrategy, base), {**parts, "__doc__": ElasticStrategy.__doc__})


def register(strategy: Any) -> None:
    """Let ``Trainer(strategy="elastic")`` and LightningCLI's ``--trainer.strategy elastic`` find it."""
    library = strategy._library.__name__  # noqa: SLF001
    registry = importlib.import_module(f"{library}.strategies").StrategyRegistry
    for end, options in (("", {}), ("_find_unused_parameters_true", {"find_unused_parameters": True})):
        description = "ddp" + end + ", continued after failures"
        registry.register("elastic" + end, strategy, description=description, override=True, **options)


def _replace(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Let ``around(original, ...)`` run in the place of a method of the object ``owner``."""
    setattr(owner, name, functools.partial(around, getattr(owner, name)))


class ElasticStrategy(_Base):  # type: ignore[misc]
    """DDPStrategy whose run continues after failures: ``Trainer(strategy=ElasticDDPStrategy())``.

    It takes the arguments of DDPStrategy, and ``resume_options``: arguments of `er.resume` such as
    ``{"save_every": 100, "track": {...}}``. With ``restartable=True`` the processes of other ranks outlive a
    failure: see `Run.restartable`. ``run`` is the `Run`, from ``on_fit_start`` on.
    """

    _library: Any
    _environment_class: Any

    def __init__(
        self,
        *args: Any,
        resume_options: Mapping[str, Any] | None = None,
        restartable: bool = False,
        **kwargs: Any,
    ) -> None:
        """See the class."""
        self._parallel_devices: Any = None
        self.cluster_environment: Any = None
        super().__init__(*args, **kwargs)
        self._resume_options = dict(resume_options or {})
        self._is_restartable = restartable
        self._has_begun = False  # whether a generation's fit loop has
        self._forward: Any = None  # the module's
        self._is_launched = bool(self._environment_class.detect())
        if self._is_launched and self.cluster_environment is None:
            self.cluster_environment = self._environment_class()
        self._run: Run | None = None
        self._trainer: Any = None
        self._loggers: Loggers | None = None
        self._run_log: Any = None  # a RunLog
        self._batches: Any = None  # the GlobalBatches of the training loader
        self._keeps_local_batch = False
        self._upcoming: Iterator[MicroBatch] = iter(())
        self._batch = MicroBatch(0, 1.0, is_last=True)
        self._is_mid_epoch = False  # until the loops continue an interrupted epoch
        self._has_trained = False
        self._is_in_step = False  # from a step's first batch until it is counted
        self._optimizer_steps = 0
        self._busy = contextlib.ExitStack()
        self._busy_since = 0.0
        self._attributes: LostAttributes | None = None

    @property
    def run(self) -> Run:
        """The run of this generation. Raises UsageError before `Trainer.fit` has built the model."""
        if self._run is None:
            raise UsageError(
                "Lightning: the run exists from on_fit_start on; use strategy.run in hooks after it."
            )
        return self._run

    # ---- the launcher's world ------------------------------------------------------------------------

    @property
    def parallel_devices(self) -> Any:
        """One device for each worker of this node."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: Any) -> None:
        workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if devices and self._environment_class.detect() and len(devices) != workers:
            if devices[0].type == "cpu":
                devices = [devices[0]] * workers
            elif len(devices) < workers:
                raise ConfigError(
                    f"Lightning: this node has {workers} workers, and Trainer has {len(devices)} devices for "
                    "them. Leave devices= out, or start fewer workers with --nproc-per-node."
                )
        self._parallel_devices = devices

    @property
    def num_nodes(self) -> int:
        """The number of nodes that train now."""
        return (
            int(os.environ.get("GROUP_WORLD_SIZE", self._num_nodes)) if self._is_launched else self._num_nodes
        )

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Rank and world size, also where nodes differ in their number of workers."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    # ---- before training -----------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Join the ranks, and let the loggers continue."""
        super().setup_environment()
        trainer = self.lightning_module.trainer
        if _is_fitting(trainer) and self._run is None:
            self._loggers = Loggers(trainer, self._library, self._resume_options)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether Lightning reads ``ckpt_path`` after `setup`, which knows if a state was restored."""
        return _is_fitting(self.lightning_module.trainer)

    def setup(self, trainer: Any) -> None:
        """Set up model and optimizers, then resume."""
        if not _is_fitting(trainer):
            super().setup(trainer)
            return
        self._trainer = trainer
        self._refuse_unsupported(trainer)
        _replace(trainer._data_connector, "_prepare_dataloader", _leave_global_batches)  # noqa: SLF001
        super().setup(trainer)
        trainer.fit_loop.setup_data()
        if self._is_restartable:  # later the ranks would compare their lengths, and some have done so
            trainer.validating = True
            trainer.fit_loop.epoch_loop.val_loop.setup_data()
            trainer.training = True
        loader = self._find_loader()
        model, precision = self.lightning_module, self.precision_plugin
        self._forward = model.forward
        options = dict(self._resume_options)
        if self._keeps_local_batch:
            options.setdefault("on_world_change", KEEP_LOCAL)
        track = {"loops": _Loops(trainer), "callbacks": _CallbackStates(trainer)}
        track["logged"] = CarriedMetrics(trainer, self._library)
        if self._loggers is not None:
            track["loggers"] = self._loggers
        if trainer.datamodule is not None:
            track["datamodule"] = trainer.datamodule
        self._run = run = resume(
            model=model,
            optimizer=_name_by_number(self.optimizers),
            scheduler=_name_by_number([config.scheduler for config in self.lr_scheduler_configs]),
            scaler=getattr(precision, "scaler", None),
            data=loader,
            track={**track, **options.pop("track", {})},
            **options,
        )
        if run.plan.kind == "resumed":
            set_known(trainer, "num_sanity_val_steps", 0)  # it would overwrite the restored counters
        self._run_log = RunLog(trainer, run)
        self._enter_loops(trainer)

    def _restore_no_checkpoint(
        self, original: Callable[..., None], path: Any = None, weights_only: bool | None = None
    ) -> None:
        """Let Lightning load no ``path`` over the restored state; refuse one at the job's first start.

        At a restart a script with ``ckpt_path="last"`` finds its own, even if no state of this job was saved.
        """
        if path is None or not _is_fitting(self._trainer):
            original(path, weights_only)
            return
        plan, step = self.run.plan, self.run.position.step
        is_resumed = plan.kind == "resumed"
        # Generations are no sign of a restart: after `--resume never` they go on. The world before is unknown
        # then, but known after a start that was refused here.
        has_started = self._loggers is not None and self._loggers.has_started
        if not is_resumed and not (has_started and plan.previous_world_size):
            raise ConfigError(
                f"Lightning: fit() would load {path}, but elastic_resume restores the whole state itself. "
                "Leave ckpt_path= out, or move that file away; remove hpc_ckpt_* files and "
                "OnExceptionCheckpoint. To start from its weights, load them into the module before fit()."
            )
        if self.run.rank == 0:
            state = f"the state of step {step} is restored" if is_resumed else "the job begins again"
            logger.info(f"Lightning: {path} is left out: {state}")
        original()

    def setup_distributed(self) -> None:
        """Join the ranks; if the run must do it in each generation, leave the first one to it too."""
        if self._is_restartable and _is_fitting(self.lightning_module.trainer):
            self.set_world_ranks()
        else:
            super().setup_distributed()

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks. Before the fit loop do not: processes that have stayed would not come."""
        if self._has_begun or not self._is_restartable:
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank ``src``. Before the fit loop return this rank's, as in `barrier`."""
        return super().broadcast(obj, src) if self._has_begun or not self._is_restartable else obj

    def configure_ddp(self) -> None:
        """Wrap the module in DDP; if it must be wrapped in each generation, not yet."""
        if not self._is_restartable:
            super().configure_ddp()

    def _begin_generation(self) -> None:
        """Set what follows from the restored state, and from the world of this generation."""
        self._has_begun = True
        if self._is_restartable:
            self.set_world_ranks()
            self.model = self.lightning_module
            self.model.forward = self._forward  # DDPStrategy replaces it while a step calls it
            super().configure_ddp()
            self._trainer.training = True  # the last generation may have ended in a validation
            self._busy.close()
        self.run.ddp(self.model)
        if self._loggers is not None:
            self._loggers.begin_generation(self.run)
        self._run_log.begin_generation()
        self._is_mid_epoch = self.run.position.step_in_epoch > 0
        self._has_trained = self._is_in_step = False
        if self.run.plan.kind == "resumed":
            set_known(self._trainer.fit_loop, "_restarting", self._is_mid_epoch)
        self._clean_up_after_lost_steps()

    def _enter_loops(self, trainer: Any) -> None:
        fit_loop, signals = trainer.fit_loop, trainer._signal_connector  # noqa: SLF001
        checkpoints = trainer._checkpoint_connector  # noqa: SLF001
        _replace(checkpoints, "_restore_modules_and_callbacks", self._restore_no_checkpoint)
        _replace(fit_loop, "run", self._run_fit_loop)
        _replace(fit_loop, "on_advance_start", self._begin_epoch)
        _replace(fit_loop, "on_advance_end", self._end_epoch)
        _replace(fit_loop.epoch_loop, "reset", self._reset_epoch_loop)
        _replace(fit_loop.epoch_loop, "on_advance_end", self._end_batch)
        _replace(signals, "register_signal_handlers", self._take_signals)

    def _refuse_unsupported(self, trainer: Any) -> None:
        """Raise ConfigError for what could not be continued exactly."""
        library, module = self._library, self.lightning_module
        if self._run is not None:
            raise UsageError(
                "Lightning: a job has one Trainer.fit() with an ElasticDDPStrategy. Give the second one a "
                "script and a run ID of its own."
            )
        for name, value in (
            ("reload_dataloaders_every_n_epochs", trainer.reload_dataloaders_every_n_epochs),
            ("limit_train_batches=0", trainer.limit_train_batches == 0),
            ("ddp_comm_state", self._ddp_comm_state is not None),
            (f"start_method={self._start_method!r}", self._start_method != "popen"),
        ):
            if value:
                raise ConfigError(
                    f"Lightning: {name} cannot be used with ElasticDDPStrategy, because a restart could not "
                    "continue from it. Leave it out."
                )
        if trainer.fast_dev_run:
            raise ConfigError(
                "Lightning: fast_dev_run with ElasticDDPStrategy would leave a checkpoint after a few "
                'batches, from which the real training would continue. Use strategy="ddp" for it.'
            )
        hooks = [(callback, library.Callback) for callback in trainer.callbacks]
        hooks += [(module, library.LightningModule)]
        hooks += [(trainer.datamodule, library.LightningDataModule)] if trainer.datamodule else []
        for item, base in hooks:
            own, plain = (getattr(kind, "on_load_checkpoint", None) for kind in (type(item), base))
            if self._is_restartable and getattr(type(item), "prepare_data", None) is not getattr(
                base, "prepare_data", None
            ):
                raise ConfigError(
                    f"Lightning: with restartable=True no rank waits for {type(item).__name__}.prepare_data. "
                    "Prepare the data in a script of its own, or leave restartable= out."
                )
            if own is not plain:
                raise ConfigError(
                    f"Lightning: {type(item).__name__} restores state in on_load_checkpoint, which only "
                    "Lightning's own checkpoints call. Keep the state in state_dict() and load_state_dict(), "
                    'in a buffer of the module, or in resume_options={"track": {...}}.'
                )
            for name, text in _REFUSED_CALLBACKS.items():
                if isinstance(item, getattr(library.callbacks, name)) and not (
                    name == "StochasticWeightAveraging" and not item.pl_module_contains_batch_norm(module)
                ):
                    raise ConfigError(text)

    def process_dataloader(self, dataloader: object) -> object:
        """Let a training loader read its share of global batches, from any position in an epoch on."""
        dataloader = super().process_dataloader(dataloader)
        trainer = self._trainer
        if not _is_fitting(trainer) or not trainer.training or not isinstance(dataloader, DataLoader):
            return dataloader
        sampler = dataloader.sampler
        if isinstance(dataloader.batch_sampler, GlobalBatches):
            self._batches = dataloader.batch_sampler
            trainer.accumulate_grad_batches = self._count_parts()  # schedules depend on it
            return dataloader
        if isinstance(sampler, ElasticSampler):
            if trainer.accumulate_grad_batches > 1 or sampler.accumulate > 1:
                raise ConfigError(
                    "Lightning: an ElasticSampler gives each step one batch. With accumulate_grad_batches= "
                    "leave the sampler out, or use GlobalBatches with micro_batch=."
                )
            return dataloader
        if type(sampler) is not DistributedSampler or not _has_plain_arguments(dataloader):
            return dataloader  # er.resume says what to do
        parts, batch = trainer.accumulate_grad_batches, dataloader.batch_size or 1
        self._keeps_local_batch = True
        batches = self._batches = GlobalBatches(
            len(sampler.dataset),  # type: ignore[arg-type]
            batch * parts * self.world_size,
            seed=sampler.seed,
            shuffle=sampler.shuffle,
            drop_last=dataloader.drop_last,
            micro_batch=batch if parts > 1 else None,
        )
        names = (*LOADER_ARGUMENTS, "generator")
        kept = {name: getattr(dataloader, name) for name in names if hasattr(dataloader, name)}
        if dataloader.batch_size is None:  # each item of the dataset is a batch
            kept["collate_fn"] = functools.partial(_convert_only_item, dataloader.collate_fn)
        # The random numbers of a sample must not depend on where this process began to read.
        dataset = seeded(dataloader.dataset) if dataloader.num_workers else dataloader.dataset
        return type(dataloader)(dataset, batch_sampler=batches, **kept)

    def _find_loader(self) -> Any:
        """Return the only training loader."""
        loaders = self._trainer.fit_loop._combined_loader.flattened  # noqa: SLF001
        if len(loaders) != 1 or not isinstance(loaders[0], DataLoader):
            raise ConfigError(
                f"Lightning: training reads {len(loaders)} loaders, or one that is no DataLoader. It must "
                "read one DataLoader, whose position in an epoch is kept. Combine the datasets in one."
            )
        return loaders[0]

    # ---- in the loops --------------------------------------------------------------------------------

    def _take_signals(self, original: Callable[[], None]) -> None:
        original()
        self.run.take_signals()

    def _run_fit_loop(self, original: Callable[[], None]) -> None:
        train = self._train_generation
        (self.run.restartable(train) if self._is_restartable else train)(original)
        self._trainer = None  # from here on as DDPStrategy

    def _train_generation(self, original: Callable[[], None]) -> None:
        self._begin_generation()
        original()
        if not self._has_trained:  # a kill came after the last step, perhaps before its epoch's end
            fit_loop = self._trainer.fit_loop
            fit_loop.reset()
            fit_loop.on_run_start()
            if self._is_mid_epoch:
                fit_loop.on_advance_start()
                fit_loop.advance()
                fit_loop.on_advance_end()
                fit_loop.on_iteration_done()
            self._run_log.begin_loop()
            fit_loop.on_run_end()
        self.run.close()

    def _begin_epoch(self, original: Callable[[], None]) -> None:
        fit_loop = self._trainer.fit_loop
        self.run.begin_epoch()
        self._run_log.begin_loop()
        self._upcoming = self.run.upcoming_batches()
        self._follow_batches()
        original()
        if self._trainer.current_epoch == 0:  # later epochs begin with it
            iter(fit_loop._data_fetcher)  # noqa: SLF001
        # Lightning skips schedulers that monitor a metric while it counts as restarting.
        set_known(fit_loop, "_restarting", False)

    def _follow_batches(self) -> None:
        """Tell Lightning the length of this epoch and the batches of a step, which a new world may change."""
        trainer, fit_loop = self._trainer, self._trainer.fit_loop
        combined = fit_loop._combined_loader  # noqa: SLF001
        length, parts = len(combined.flattened[0]), self._count_parts()
        limit = trainer.limit_train_batches
        limit = min(length, limit) if isinstance(limit, int) else int(length * limit)
        if limit < length and limit % parts:
            raise ConfigError(
                f"Lightning: limit_train_batches ends epochs after {limit} batches, in the middle of a step "
                f"of {parts} batches. Make it a multiple of {parts}."
            )
        trainer.accumulate_grad_batches = parts
        set_known(combined, "limits", [limit])
        set_known(fit_loop, "max_batches", limit)
        if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch is not None:
            trainer.val_check_batch = max(1, int(limit * trainer.val_check_interval))

    def _count_parts(self) -> int:
        """Return the number of the loader's batches in a full step."""
        batches = self._batches
        if batches is None:
            return 1
        return count_micro_batches(batches.global_batch, self.world_size, batches.micro_batch)

    def _reset_epoch_loop(self, original: Callable[[], None]) -> None:
        """Begin an epoch, or continue one: then keep the counters, and what the epoch has logged."""
        epoch_loop, is_mid_epoch = self._trainer.fit_loop.epoch_loop, self._is_mid_epoch
        self._is_mid_epoch = False
        if not is_mid_epoch:
            original()
            return
        kept = epoch_loop.state_dict()
        original()
        epoch_loop.load_state_dict(kept)
        _clear_restart(epoch_loop)
        # In a world of another size a step may have another number of batches.
        done = self.run.position.step_in_epoch * self._count_parts()
        current = epoch_loop.batch_progress.current
        current.ready = current.started = current.processed = current.completed = done
        # None or True would let the first self.log() reset what the epoch has logged.
        set_known(self._trainer._logger_connector, "_first_loop_iter", False)  # noqa: SLF001

    def _end_batch(self, original: Callable[[Any], None], data_fetcher: Any) -> None:
        original(data_fetcher)
        if not self._batch.is_last:
            return
        epoch_loop = self._trainer.fit_loop.epoch_loop
        steps = epoch_loop.global_step
        if steps == self._optimizer_steps:
            raise UsageError(
                f"Lightning: training_step took no optimizer step in batch {epoch_loop.batch_idx}. Gradients "
                "that are summed over several batches would be lost in a restart: use "
                "accumulate_grad_batches=, or GlobalBatches with micro_batch=."
            )
        self._optimizer_steps = steps
        self.run.step()
        self._is_in_step = False
        if self._attributes is not None:
            _warn_of_attributes(self._attributes.after_step())

    def _end_epoch(self, original: Callable[[], None]) -> None:
        with self.run.busy("Lightning's end of an epoch", EPOCH_END_LIMIT_S):
            original()
        self.run.end_epoch()
        if self._attributes is not None:
            _warn_of_attributes(self._attributes.find())
            self._attributes = None

    def _watch_attributes(self) -> None:
        """Watch what callbacks, module and data module keep outside of their state, at the job's start."""
        trainer, base = self._trainer, self._library.Callback
        if self.run.rank or self.run.plan.kind == "resumed":
            return
        items = [one for one in trainer.callbacks if type(one).state_dict is base.state_dict]
        items = [one for one in items if not type(one).__module__.startswith(_LIBRARIES)]
        items += [one for one in (self.lightning_module, trainer.datamodule) if one is not None]
        tracked = self._resume_options.get("track", {}).values()
        self._attributes = LostAttributes(items, {id(one) for one in tracked})

    def on_train_start(self) -> None:
        """Record that the training loop ran, so that `_run_fit_loop` need not finish an epoch."""
        super().on_train_start()
        self._has_trained = True
        self._watch_attributes()
        self._optimizer_steps = self._trainer.fit_loop.epoch_loop.global_step

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Take the weight of the batch."""
        super().on_train_batch_start(batch, batch_idx)
        if isinstance(self.model, DistributedDataParallel):
            # With manual optimization Lightning may switch off DDP's broadcast of buffers. Those of BatchNorm
            # would differ between ranks, and a checkpoint has those of one rank.
            self.model.require_forward_param_sync = True
        upcoming = next(self._upcoming, None)
        if upcoming is None:
            raise UsageError("Lightning: the training loader yields more batches than the epoch has.")
        self._batch, self._is_in_step = upcoming, True

    def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Weight the loss, so that the mean over ranks is the mean over the global batch."""
        if _is_fitting(self._trainer):
            # The weights include the division by the number of batches. Lightning divides again: undo that.
            is_automatic = self.lightning_module.automatic_optimization
            parts = self._trainer.accumulate_grad_batches if is_automatic else 1
            weight = self._batch.loss_weight * parts
            closure_loss = closure_loss if weight == 1.0 else closure_loss * weight
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def on_validation_start(self) -> None:
        """Keep the run busy during a validation."""
        super().on_validation_start()
        if _is_fitting(self._trainer):
            self._note_validation()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Note that the validation advances. A batch that takes too long is a hang."""
        if _is_fitting(self._trainer) and time.monotonic() - self._busy_since > RENEWAL_S:
            self._note_validation()
        return super().validation_step(*args, **kwargs)

    def _note_validation(self) -> None:
        self._busy.close()
        self._busy.enter_context(self.run.busy("Lightning's validation", WAIT_LIMIT_S))
        self._busy_since = time.monotonic()

    def on_validation_end(self) -> None:
        """Be busy no more."""
        self._busy.close()
        super().on_validation_end()

    # ---- checkpoints of Lightning --------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint of Lightning, and note the step in which it was first written."""
        if self._run is None or not _is_fitting(self._trainer):
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if self.is_global_zero and "://" not in str(filepath):
            # The step that is being taken, or the end of the epoch after the last one: see the method below.
            path = Path(filepath)
            order = 2 * self._run.position.step + (2 if self._is_in_step else 1)
            lost_steps.note(path.parent, path.name, order)
        with self._run.busy("a checkpoint of Lightning", WAIT_LIMIT_S):
            super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.is_global_zero and "://" not in str(filepath):
            lost_steps.drop_replaced(path.parent, path.name)

    def _clean_up_after_lost_steps(self) -> None:
        """Set aside the checkpoints of Lightning that were written after the state that is resumed.

        Those steps are repeated and write them again. Lightning would find the first ones, and give the
        second ones other names.
        """
        if not self.is_global_zero:
            return
        position = self.run.position
        # An even number for a step, the next odd one for the end of its epoch.
        order = 2 * position.step + (position.step_in_epoch == 0)
        resumed_at = order if self.run.plan.kind == "resumed" else None
        for callback in self._trainer.checkpoint_callbacks:
            directory = getattr(callback, "dirpath", None)
            if directory and "://" not in str(directory):
                set_newer_files_aside(Path(directory), resumed_at)


class _Loops:
    """The counters of Lightning's loops. The state is taken between two batches or two epochs."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return the counters."""
        fit_loop = self._trainer.fit_loop
        return {
            "epochs": fit_loop.epoch_progress.state_dict(),
            "epoch_loop": fit_loop.epoch_loop.state_dict(),
            "should_stop": self._trainer.should_stop,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the counters, without Lightning's ways to restart, which are for states within a batch."""
        fit_loop = self._trainer.fit_loop
        fit_loop.epoch_progress.load_state_dict(state["epochs"])
        fit_loop.epoch_loop.load_state_dict(dict(state["epoch_loop"]))
        _clear_restart(fit_loop.epoch_loop)
        self._trainer.should_stop = state["should_stop"]


def _clear_restart(loop: Any) -> None:
    """Let ``loop`` and those in it continue as if they had never stopped."""
    for name in ("_restarting", "_loaded_from_state_dict", "_resuming_from_checkpoint"):
        set_known(loop, name, False)
    for inner in vars(loop).values():
        if hasattr(inner, "_resuming_from_checkpoint"):
            _clear_restart(inner)


class _CallbackStates:
    """The states of all callbacks, by Lightning's key."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return the states."""
        return {
            callback.state_key: {
                **callback.state_dict(),
                **{name: getattr(callback, name) for name in _UNRESTORED if hasattr(callback, name)},
            }
            for callback in self._trainer.callbacks
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the callbacks that have a state."""
        for callback in self._trainer.callbacks:
            own = copy.deepcopy(state.get(callback.state_key, {}))
            for name in _UNRESTORED:
                if name in own:
                    setattr(callback, name, own.pop(name))
            if "dirpath" in own:  # a logger without a fixed version has chosen another one for this process
                callback.dirpath = own["dirpath"]
            if own:
                callback.load_state_dict(own)


def _warn_of_attributes(found: list[tuple[Any, list[str]]]) -> None:
    for item, names in found:
        logger.warning(
            f"WARNING: Lightning: {', '.join(f'{type(item).__name__}.{name}' for name in names[:4])} changed "
            "in training, outside of state_dict(): after a restart it starts anew. Return it there, keep it "
            'in a buffer of the module, or pass it in resume_options={"track": {...}}.'
        )


def _is_fitting(trainer: Any) -> bool:
    return trainer is not None and trainer.state.fn == "fit"


def _name_by_number(items: list[Any]) -> Any:
    """Return one object, or several by number; None without any."""
    if len(items) <= 1:
        return items[0] if items else None
    return {str(number): item for number, item in enumerate(items)}


def _leave_global_batches(original: Callable[..., Any], dataloader: object, *args: Any, **kwargs: Any) -> Any:
    if isinstance(getattr(dataloader, "batch_sampler", None), GlobalBatches):
        return dataloader
    return original(dataloader, *args, **kwargs)


def _convert_only_item(convert: Callable[[Any], Any], items: list[Any]) -> Any:
    return convert(items[0])


def _has_plain_arguments(loader: DataLoader[Any]) -> bool:
    """Return whether a loader of the same class can be made: DataLoader, or torchdata's."""
    return type(loader) is DataLoader or type(loader).__module__.startswith("torchdata.")


def set_newer_files_aside(directory: Path, order: int | None) -> None:
    """Set the files aside that were first written after ``order``; with None forget those of a former job."""
    for journal in list(directory.rglob(lost_steps.JOURNAL)):  # a filename may name subdirectories
        if order is None:
            lost_steps.forget(journal.parent)
        else:
            lost_steps.set_newer_aside(journal.parent, order)
