"""Provide `resume` and `Run`, the objects by which a training script restores, counts steps and saves.

`resume` checks the script's arguments and creates one `Run` per rank and generation. `Run.step` is the commit
point: a finished step may be copied to memory and saved to disk from there on.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic_resume import console, constants, failpoints
from elastic_resume.checkpoint.manifest import Position
from elastic_resume.config import Settings, suggest_similar
from elastic_resume.data import batch_size, elastic_sampler, rng
from elastic_resume.data.batch_size import WorldChange
from elastic_resume.data.global_batches import GlobalBatches, MicroBatch
from elastic_resume.data.rank_values import exchange
from elastic_resume.data.sharded_stream import ShardedStream
from elastic_resume.errors import ConfigError, ElasticResumeError, MachineError, UsageError
from elastic_resume.policy.resume_plan import ResumePlan
from elastic_resume.ranks.collectives import Collectives
from elastic_resume.ranks.rank_context import RankContext
from elastic_resume.restore import coordinator, replica_check
from elastic_resume.restore.coordinator import ResumeResult
from elastic_resume.state import state_dict
from elastic_resume.state.state_dict import UntrackedOptimizerCheck
from elastic_resume.training import announce, worker_exit
from elastic_resume.training.heartbeat import count_collectives
from elastic_resume.training.own_time import OwnTime
from elastic_resume.training.progress import RunOptions
from elastic_resume.training.rank0_buffers import Rank0Buffers
from elastic_resume.training.run_parts import RunParts, restore_parts

logger = logging.getLogger(__name__)

Hook = Callable[["Run"], object]
H = TypeVar("H", bound=Hook)
W = TypeVar("W", bound=Callable[[WorldChange], object])
T = TypeVar("T")
P = ParamSpec("P")

MAX_FINAL_SAVE_ATTEMPTS = 3
RETRY_S = 1.0
# Node directories of this process's runs. A second run there would continue the first one.
_resumed: set[Path] = set()


class Run:
    """One rank's handle on the job, in one generation. `er.resume` creates it."""

    def __init__(self, parts: RunParts) -> None:
        """Start the generation of restored ``parts``."""
        self._context = context = parts.context
        self._tracked = parts.tracked
        self._rank_values = parts.rank_values
        self._rank0_buffers = Rank0Buffers(context, parts.tracked)
        self._first_steps_check = replica_check.FirstStepsCheck(context, parts.tracked)
        self._node_dir = parts.node_dir
        self._committer_connection = parts.committer_connection
        self._bucket_order = parts.bucket_order
        self._random_numbers = parts.random_numbers
        self._progress = parts.progress
        self._heartbeat = parts.heartbeat
        self._own_time = OwnTime(parts.heartbeat.set_own_time, count_collectives)
        self._snapshot_scheduler = parts.snapshot_scheduler
        self._plan = parts.result.plan
        self._drain_request = parts.drain_request
        self._start_hooks: list[Callable[[], object]] | None = []  # None after the hooks have run
        self._closed = False
        self._pid = os.getpid()
        self._step_event_interval_s = context.settings.step_mark_s
        self._next_step_event_s = 0.0
        self._recorded_step = self.position.step
        # "STEP NODES" if workers of other nodes have finished: see `RestartController.limit_last_step`.
        last_step, _, self._finished_nodes = os.environ.get(constants.ENV_LAST_STEP, "").partition(" ")
        self._last_step = int(last_step) if last_step else None
        worker_exit.set_generation(generation=self.generation, read_step=lambda: self._recorded_step)
        self._untracked_check = UntrackedOptimizerCheck(self._tracked) if self.rank == 0 else None
        self._start_generation(parts.result)

    # ---- position and size ---------------------------------------------------------------------------

    @property
    def position(self) -> Position:
        """The finished epochs, steps in the epoch, steps of the job, and samples."""
        return self._progress.position

    @property
    def generation(self) -> int:
        """The number of this generation of workers; it grows over the whole job."""
        return self._plan.generation

    @property
    def plan(self) -> ResumePlan:
        """The copy from which this generation started, and the rejected ones."""
        return self._plan

    @property
    def rank(self) -> int:
        """This rank, 0 to world_size - 1."""
        return self._context.collectives.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in this generation."""
        return self._context.collectives.size

    @property
    def loss_weight(self) -> float:
        """The factor for this rank's mean loss before backward().

        It makes DDP's mean over ranks the exact mean over the global batch if the ranks' shares differ in
        size. It is 1.0 if they do not, and without ``data=``.
        """
        return self._progress.loss_weight

    @property
    def last_micro_batch(self) -> bool:
        """Whether the last batch from `micro_batches` completes its step."""
        return self._progress.is_last_micro_batch

    @property
    def world_change(self) -> WorldChange | None:
        """The change of world size or global batch since the restored copy was made, or None."""
        return self._progress.world_change

    # ---- training ------------------------------------------------------------------------------------

    def ddp(self, model: nn.Module, **ddp_kwargs: Any) -> nn.Module:
        """Wrap ``model`` in DistributedDataParallel with the job's recorded bucket order.

        Without a process group, or if the script has wrapped the model, return it unchanged. A model that was
        wrapped before `er.resume` needs no call. A tracked model is not broadcast (``init_sync=False``),
        because `er.resume` has compared all ranks. ``ddp_kwargs`` override the arguments chosen here.
        """
        inner = state_dict.unwrap(model)
        name = next((name for name, item in self._tracked.items() if item is inner), None)
        wrapper = state_dict.find_parallel_wrapper(model)
        if wrapper is not None or not dist.is_initialized():
            if name is not None and isinstance(wrapper, DistributedDataParallel):
                self._bucket_order.prepare(name, inner, wrapper)
                self._own_time.watch(wrapper)
            return model
        kwargs: dict[str, Any] = {"init_sync": False} if name is not None else {}
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) == 1 and next(iter(devices)).type == "cuda":
            kwargs["device_ids"] = [next(iter(devices)).index]
        wrapped = DistributedDataParallel(model, **{**kwargs, **ddp_kwargs})
        if name is not None:
            self._bucket_order.prepare(name, inner, wrapped)
            self._own_time.watch(wrapped)
        failpoints.register_action("skip-collective", lambda: _skip_next_reduction(wrapped))
        return wrapped

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the remaining epochs of ``count``, an interrupted one first.

        The script's work after an epoch's last batch (a scheduler's step, an evaluation) belongs to the
        epoch: a save that is due at its last step is made when the script asks for the next epoch. After the
        last epoch the final state is committed on every node.
        """
        self._run_start_hooks()
        finished = self.position.epoch >= count
        self._earlier_run_notice.log_once(
            f"epoch {self.position.epoch} of {count} is over" if finished else ""
        )
        with self._heartbeat.idle_afterwards():
            while self.position.epoch < count:
                yield self.begin_epoch()
                self.end_epoch()
            self._save_final_state()
            self._context.events.emit("run-end", **self._position_fields(), **self._progress_fields())

    def begin_epoch(self, *, from_start: bool = False) -> int:
        """Begin the next epoch, or go on with an interrupted one; return its number.

        `epochs` calls this and `end_epoch`. Call both yourself if a library owns the loop over epochs. The
        loader then begins at the epoch's next batch. With ``from_start`` it begins at the epoch's first, for
        a loop that skips the batches of ``position.step_in_epoch`` steps itself.

        Raises:
            UsageError: ``from_start``, and the number of ranks has changed within this epoch, or ``data=`` is
                a `ShardedStream`.

        """
        self._run_start_hooks()
        self._random_numbers.start_at(self.position.step)
        return self._progress.start_epoch(from_start=from_start)

    def end_epoch(self) -> None:
        """Count the epoch, when the work after its last step is done too. Save if a save is due.

        On a node that is being drained, this saves the state and ends the process by SIGTERM.

        Raises:
            UsageError: the loader was read to its end, and `step` was never called, or for half of the
                epoch's steps or fewer. A later epoch without any call is accepted.

        """
        self._progress.end_epoch()
        exchange(self._rank_values, self._context.collectives)
        self._rank0_buffers.receive()
        if self._save_if_due():
            self._drain_request.terminate_process()

    def step(self) -> None:
        """Count the step that just finished. Call it once after each optimizer step.

        On a node that is being drained, this saves the state and ends the process by SIGTERM.

        Raises:
            UsageError: the run is closed, or the epoch has no such step.
            UntrackableError: a save is due, and an object now holds state that cannot be stored.

        """
        if self._closed:
            raise UsageError("run.step() was called after run.close(); close the run when training is over.")
        self._run_start_hooks()
        self._earlier_run_notice.log_once()
        self._earlier_run_notice.record_start()
        self._require_step_before_end()
        position = self._progress.finish_step()
        exchange(self._rank_values, self._context.collectives)
        self._rank0_buffers.receive()
        self._bucket_order.end_step()
        self._first_steps_check.after_step(position.step, has_ddp=self._bucket_order.has_ddp)
        failpoints.hit("step", position.step)
        self._random_numbers.after_step(position.step)
        is_drained = False
        if self._progress.has_no_batch_left:
            self._snapshot_scheduler.after_step(position, may_commit=False)
        else:
            is_drained = self._save_if_due()
        # A step counts as finished only now, when its snapshot has begun: a process that dies earlier leaves
        # no copy of it, and its peers may be stopped before they have one.
        self._record_step(position)
        if is_drained:
            self._drain_request.terminate_process()
        self._own_time.end_step()
        failpoints.hit("between-steps", position.step)

    def _require_step_before_end(self) -> None:
        """Refuse a step after the end of the training on other nodes."""
        nodes = self._finished_nodes
        if self._last_step is not None and self.position.step >= self._last_step:
            raise UsageError(
                f"the training has ended on {nodes}, and the ranks here would take step "
                f"{self.position.step + 1} without it. Do all nodes have the same arguments, and end after "
                f"the same step? What {nodes} saved is complete."
            )

    def _record_step(self, position: Position) -> None:
        self._heartbeat.finish_step(position.step)
        self._recorded_step = position.step
        if self._progress.has_no_batch_left:
            self._heartbeat.end_epoch(position.step)
        now = time.monotonic()
        if now >= self._next_step_event_s:
            self._next_step_event_s = now + self._step_event_interval_s
            self._context.events.emit("step", **self._position_fields(), **self._progress_fields())

    def micro_batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the batches of ``loader`` if one optimizer step reads several of them (``micro_batch=``).

        `loss_weight` then belongs to the last batch. With it the losses of a step add up to the mean over the
        global batch, also at the end of an epoch.
        """
        return self._progress.read_micro_batches(loader)

    def upcoming_batches(self) -> Iterator[MicroBatch]:
        """Yield a `MicroBatch` for each batch of the loader, from the position to the end of the epoch.

        Use it instead of `micro_batches` and `loss_weight` where a library reads the loader, perhaps ahead of
        the step: ``for batch, upcoming in zip(loader, run.upcoming_batches())``.

        Raises:
            UsageError: ``data=`` is missing, or is a `ShardedStream`.

        """
        return self._progress.upcoming_batches()

    def take_signals(self) -> None:
        """Handle SIGTERM again, after a library has put its own handler in place.

        A drained node then ends at its next step boundary. Without an agent nothing changes.

        Raises:
            UsageError: called outside the main thread.

        """
        if not self._closed:  # nothing would read the request
            self._drain_request.install_handler()

    def save(self) -> Path | None:
        """Commit the state now, and wait for the disk. Return the checkpoint's path on the local leader.

        Call it at a step boundary. After an epoch's last batch call it when the epoch's other work is done,
        because a resume from it begins with the next epoch. Return None on other ranks, if this generation
        started with the same step on disk, and if the disk failed (which is logged).
        """
        self._run_start_hooks()  # the state must include the hooks' changes for this world
        if not self._context.is_local_leader:
            return None
        position, is_epoch_over = self._progress.position_to_resume_from()
        with self._heartbeat.busy():
            return self._snapshot_scheduler.commit(position, is_epoch_over=is_epoch_over)

    def assert_ranks_equal(self) -> None:
        """Check that all ranks hold the same state, bit for bit.

        Compared are parameters, buffers, optimizer state, hyperparameters and ``ema``. Call it on every rank,
        after `step`. It reads the state once; ranks exchange digests and no tensors.

        Raises:
            DivergenceError: on all ranks; the text names the first different value and the ranks.
            UntrackableError: on all ranks; an object of some rank now holds state that cannot be stored.

        """
        with self._heartbeat.busy():
            replica_check.require_equal(self._context, self._tracked, self.position.step)

    @property
    def verify_copies(self) -> bool:
        """Whether each snapshot is checked for changes during the copy. Slow; for debugging.

        Parameters and optimizer state may change from ``optimizer.step()`` to ``run.step()`` only. With this
        check a change at another time raises a UsageError with the tensor's name, at the next
        ``optimizer.step()``.
        """
        return self._snapshot_scheduler.snapshotter.verify_copies

    @verify_copies.setter
    def verify_copies(self, value: bool) -> None:
        self._snapshot_scheduler.snapshotter.verify_copies = value

    def on_resume(self, hook: H) -> H:
        """Call ``hook(run)`` in each generation that resumes saved state, before it trains.

        Use it for what a restored state needs and a fresh start does not::

            @run.on_resume
            def report(run):
                print(f"continuing at step {run.position.step}, saved by {run.plan.source_node}")

        Hooks run on every rank, in the order of registration, before the first epoch, step or save. A hook
        that is registered later runs at once. If a hook raises, the exception reaches the script, and the
        hooks after it do not run.
        """
        if self._plan.kind == "resumed":
            self._add_start_hook(lambda: hook(self))
        return hook

    def on_world_change(self, hook: W) -> W:
        """Call ``hook(change)`` in each generation whose world size or global batch has changed.

        Nothing is scaled automatically: optimizer and scheduler are as in the checkpoint, with the changes
        that hooks made before. To scale the learning rate with the global batch::

            @run.on_world_change
            def scale(change):
                for group in optimizer.param_groups:
                    group["lr"] *= change.factor

        Hooks of this kind and of `on_resume` run in one order, under the same rules.
        """
        if (change := self.world_change) is not None:
            self._add_start_hook(lambda: hook(change))
        return hook

    @contextlib.contextmanager
    def busy(self, reason: str, limit_s: float = 0.0) -> Iterator[None]:
        """Pause hang detection during a long operation without steps, such as an evaluation.

        Use it on all ranks, because ranks that wait for others do not step either. After ``limit_s`` seconds
        the operation counts as a hang; 0 means never.
        """
        self._context.events.emit("busy", **self._position_fields(), reason=reason)
        with self._heartbeat.busy(limit_s):
            yield

    def close(self) -> None:
        """Commit the newest finished step and release the node's directory.

        Nothing is saved while an exception is being handled, because a step may be half done.

        Raises:
            MachineError: the job has one node, and its disk fails.

        """
        if not self._closed and sys.exc_info()[0] is not None:
            logger.debug(
                f"the run was closed at step {self.position.step} while an exception was being handled: "
                "nothing more was saved."
            )
            self._release()
        else:
            self._save_and_release()

    def __enter__(self) -> Run:  # noqa: PYI034  typing.Self needs Python 3.11
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._release()
        else:
            self._save_and_release()

    # ---- internals -----------------------------------------------------------------------------------

    def _start_generation(self, result: ResumeResult) -> None:
        """Emit the events of the start, and log it."""
        self._earlier_run_notice = announce.EarlierRunNotice(result, self._context, self.position, sys.argv)
        self._heartbeat.start_generation(self.generation, self.position.step)
        self._context.events.emit(
            "worker-start",
            **self._position_fields(),
            local_rank=self._context.local_rank,
            world_size=self.world_size,
            gpu=state_dict.find_gpu_uuid(self._tracked),
        )
        self._random_numbers.start_at(self.position.step)
        if self.rank == 0:
            self._context.events.emit(
                "resume", **announce.resume_event_fields(result, self.position, self.world_size)
            )
            announce.log_start(
                result,
                self.position,
                self.world_size,
                world_change=self.world_change,
                repeated_steps=self._progress.repeated_steps,
            )
        atexit.register(self._release)

    def _add_start_hook(self, hook: Callable[[], object]) -> None:
        """Register a hook, or run it now if the generation has started training."""
        if self._start_hooks is None:
            hook()
        else:
            self._start_hooks.append(hook)

    def _run_start_hooks(self) -> None:
        """Run the script's hooks once, before the generation's first epoch, step or save."""
        hooks, self._start_hooks = self._start_hooks or [], None
        for hook in hooks:
            hook()

    def _save_if_due(self) -> bool:
        """Take a snapshot or save if one is due. Return True if the process must end, for a drain."""
        if self._drain_request.requested and self._context.is_local_leader:
            with self._heartbeat.busy():
                self._snapshot_scheduler.keep_state(self.position, is_epoch_over=self._progress.is_epoch_over)
            return True
        self._snapshot_scheduler.after_step(self.position, is_epoch_over=self._progress.is_epoch_over)
        return False

    def _position_fields(self) -> dict[str, int]:
        return {"generation": self.generation, "step": self.position.step}

    def _progress_fields(self) -> dict[str, float]:
        return {
            "epoch": self.position.epoch,
            "stalled_s": round(self._snapshot_scheduler.meter.total_stall_s, 3),
        }

    def _save_and_release(self) -> None:
        try:
            if not self._closed:
                self._save_final_state()
        finally:
            self._release()

    def _save_final_state(self) -> None:
        """Commit the final state, in several attempts."""
        for _ in range(MAX_FINAL_SAVE_ATTEMPTS):
            self.save()
            if not self._context.is_local_leader or self._snapshot_scheduler.has_committed(self.position):
                break
            time.sleep(RETRY_S)
        else:
            if len(self._context.local_leader_by_node) == 1:  # other nodes hold the final state too
                raise MachineError(
                    f"the end state (step {self.position.step}) could not be saved in "
                    f"{self._context.node_dir}: see the log lines above, free space on the disk, and start "
                    "the job again."
                )

    def _release(self) -> None:
        if self._closed or os.getpid() != self._pid:  # a forked child owns nothing here
            return
        self._closed = True
        self._earlier_run_notice.log_once("the script has taken no step")
        self._earlier_run_notice.record_start()
        atexit.unregister(self._release)  # the registration would keep this run and its slots alive
        self._own_time.close()
        self._heartbeat.close()
        if self._untracked_check is not None:
            self._untracked_check.close()
        self._drain_request.restore_handler()
        self._snapshot_scheduler.close()
        self._committer_connection.close()
        self._node_dir.release()
        self._context.events.close()


def _skip_next_reduction(wrapped: DistributedDataParallel) -> None:
    """Skip the next gradient reduction, as no_sync() in the wrong place does; for the fault injector."""

    def restore_reduction(*_: Any) -> None:
        wrapped.require_backward_grad_sync = True
        hook.remove()

    wrapped.require_backward_grad_sync = False
    hook = wrapped.register_forward_hook(restore_reduction)


def _refuse_unknown_keywords(function: Callable[P, Run]) -> Callable[P, Run]:
    """Let ``function`` raise a ConfigError for an unknown keyword. Type checkers see its own signature."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> Run:
        unknown = {name: value for name, value in kwargs.items() if name not in known}
        if unknown:
            worker_exit.install_startup_hook()
            console.show_log("elastic_resume: ", os.environ)
            raise ConfigError(" ".join(_explain_unknown(name, unknown[name], known) for name in unknown))
        return function(*args, **kwargs)

    return checked


def _explain_unknown(name: str, value: Any, known: list[str]) -> str:
    similar = suggest_similar(name, known).replace("-", "_")
    try:
        is_trackable = bool(state_dict.collect_objects({name: value}))
    except Exception:  # noqa: BLE001 - the object's own code runs; the unknown name is the error to report
        is_trackable = False
    hint = f' Pass an object of your own as track={{"{name}": ...}}.' if is_trackable else ""
    return f"resume() has no argument {name!r}.{similar}{hint}"


@_refuse_unknown_keywords
def resume(
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    ema: Any = None,
    data: Any = None,
    track: Mapping[str, Any] | None = None,
    ckpt_dir: str | os.PathLike[str] | None = None,
    run_id: str | None = None,
    node_name: str | None = None,
    save_every: str | int | None = None,
    snapshot_every: str | int | None = None,
    keep: int | None = None,
    resume: Literal["auto", "must", "never"] | None = None,
    seed: int | None = None,
    rng: Literal["derived", "off"] = "derived",
    on_world_change: Literal["keep_global_batch", "keep_local_batch", "error"] | None = None,
) -> Run:
    """Restore the newest valid state that any node holds into the given objects, or start fresh.

    A fresh start takes rank 0's values, including anything that the script loaded into them before.

    Call it once on every rank, after the objects are built, before or after wrapping in DDP. It joins the
    process group of torchrun's environment, unless the script has done so.

    An argument beats a flag of ``elastic-resume run``, the flag beats the ``--config`` file, the file beats
    the environment (``ELASTIC_RESUME_KEEP=5``), and the environment beats the default. There is one
    exception: under ``elastic-resume run`` the agent decides ``ckpt_dir``, ``run_id`` and ``node_name``, and
    the arguments of these names are ignored. The agent has locked that directory before the script starts.

    Args:
        model: a module, bare or wrapped; or a dict of several (``{"g": G, "d": D}``).
        optimizer: an optimizer, or a dict of several.
        scheduler: a learning rate scheduler, or a dict of several.
        scaler: a GradScaler.
        ema: an averaged model, any object with ``state_dict`` and ``load_state_dict``, or tensors: one, a
            list, or a dict by name. Tensors are changed in place, or replaced in their container.
        data: a `GlobalBatches` or the DataLoader around one, the DataLoader around an `ElasticSampler`, or a
            `ShardedStream`, so that an interrupted epoch continues at its next sample.
        track: further objects by name, ``track={"discriminator": d, "best": best}``. A value has the same
            forms as ``ema``, and may be a dict of such objects. A number is a tensor without dimensions that
            is changed in place. A checkpoint stores each under its name.
        ckpt_dir: root of the checkpoints; default ``./checkpoints``. Ignored under ``elastic-resume run``, as
            are the next two arguments.
        run_id: the job's name; default from torchrun's ``--rdzv-id``, else the script's name.
        node_name: this node's name; default from the scheduler, else the host name.
        save_every: interval between checkpoints: a number of steps, a time ("30s"), or "auto".
        snapshot_every: interval between snapshots in memory: the same forms, or "off".
        keep: how many checkpoints each node keeps, at least 2.
        resume: "auto", "must" or "never". "never" moves an earlier run of this name to ``RUN_ID.old-N``;
            under ``elastic-resume run`` give it to the command.
        seed: the seed from which random numbers are derived, with rank and step. The default is rank 0's
            ``torch.manual_seed`` at the first start; it stays the same over restarts.
        rng: "derived" seeds torch, `random` and numpy (global) at each step boundary, so that a resumed run
            draws the same numbers as an uninterrupted one; "off" leaves random numbers alone. For
            augmentation see `er.seeded`.
        on_world_change: the policy if the number of ranks differs from the checkpoint's. "keep_global_batch"
            keeps the batch of an optimizer step, the default with `GlobalBatches`. "keep_local_batch" keeps
            each rank's share, the default with an `ElasticSampler`. "error" raises. The learning rate is
            never changed: see `Run.on_world_change`.

    Raises:
        ConfigError: an argument is unknown or has a wrong value.
        UsageError: the job had a run in this process before.
        UntrackableError: an object cannot be stored, for example because it has no ``state_dict``.
        ElasticResumeError: another subclass in `elastic_resume.errors`, on all ranks, before anything was
            loaded.

    """
    try:
        console.show_log("elastic_resume: ", os.environ)
        _check_random_options(seed, rng)
        _check_resume_mode(resume)
        batches = elastic_sampler.find_batches(data)
        _check_world_change_policy(data, batches, on_world_change)
        settings = Settings.for_worker(
            os.environ,
            sys.argv[0],
            ckpt_dir=ckpt_dir,
            run_id=run_id,
            node_name=node_name,
            save_every=save_every,
            snapshot_every=snapshot_every,
            keep=keep,
            resume=resume,
        )
        objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        objects |= {"ema": ema, "data": data if batches is None else batches}
        _check_track(track, objects)
        tracked = state_dict.collect_objects({**objects, **(track or {})})
        _check_single_data_order(tracked, batches)
        node_dir = settings.ckpt_dir / settings.run_id / settings.node_name
        _check_second_run(node_dir)
    except ElasticResumeError:
        worker_exit.install_startup_hook()  # the node's name is not known yet
        raise
    collectives = Collectives.join(model_gpus=state_dict.find_gpus(tracked))
    events = worker_exit.open_event_log(
        node_dir / constants.EVENTS_FILE, settings.node_name, collectives.rank
    )
    worker_exit.install_hook(events)
    if batches is None:
        elastic_sampler.check_no_per_rank_state(data, collectives.size)
    context = RankContext(collectives, settings, events)
    run = Run(restore_parts(context, tracked, batches, RunOptions(seed, rng, on_world_change)))
    for wrapper in state_dict.find_ddp_models({"model": model, **(track or {})}):
        run.ddp(wrapper)  # that the script has made; its bucket order is restored
    _resumed.add(node_dir)
    return run


def _check_second_run(node_dir: Path) -> None:
    """Raise UsageError if this process had a run in ``node_dir``. Without an agent only warn.

    A test without an agent may simulate a restart in one process.
    """
    if node_dir not in _resumed:
        return
    if constants.ENV_AGENT_PID in os.environ:
        raise UsageError(
            f"er.resume() was called before in this process, for {node_dir}. A second training, such as the "
            "next fold of a cross-validation, would continue the first one. Start it as a job of its own, "
            "with another --rdzv-id."
        )
    if os.environ.get("RANK", "0") == "0":
        logger.warning(
            f"WARNING: er.resume() was called before in this process, for {node_dir}. A second training, "
            "such as the next fold of a cross-validation, continues the first one. Give it another run_id=."
        )


def _check_track(track: object, objects: Mapping[str, Any]) -> None:
    if track is not None and not isinstance(track, Mapping):
        raise ConfigError(
            f"track is {state_dict.type_name(track)}: pass a dict of objects by name, "
            'track={"name": object}.'
        )
    for name in objects.keys() & (track or {}):
        raise ConfigError(f"track has the name {name!r}, which is an argument: pass the object as {name}=.")


def _check_resume_mode(resume: object) -> None:
    """Refuse "never" if the agent has not moved the earlier run aside: its states would be resumed."""
    if resume != "never" or constants.ENV_AGENT_PID not in os.environ:
        return
    if Settings.for_worker(os.environ, sys.argv[0]).resume != "never":
        raise ConfigError(
            "resume='never': under `elastic-resume run` the agent must move the earlier run aside before it "
            "starts workers. Give `--resume never` to the command."
        )


def _check_random_options(seed: object, rng_mode: object) -> None:
    if rng_mode not in rng.MODES:
        raise ConfigError(f"rng is {rng_mode!r}: use 'derived' or 'off'.")
    if seed is not None and (type(seed) is not int or not -(2**63) <= seed < 2**63):
        raise ConfigError(f"seed is {seed!r}: use an integer of at most 64 bits.")


def _check_world_change_policy(data: object, batches: GlobalBatches | None, policy: object) -> None:
    if policy is not None and policy not in batch_size.POLICIES:
        policies = ", ".join(map(repr, batch_size.POLICIES))
        raise ConfigError(f"on_world_change is {policy!r}: use one of {policies}.")
    if isinstance(data, ShardedStream):
        if policy == batch_size.KEEP_GLOBAL:
            raise ConfigError(
                f"on_world_change is {policy!r}, but a ShardedStream reads batch_size samples on each rank, "
                'so its global batch grows with the number of ranks: use "keep_local_batch".'
            )
    elif batches is None and policy not in {None, batch_size.ERROR}:
        raise ConfigError(
            f"on_world_change is {policy!r}, but without data= batches cannot be divided: pass a "
            "GlobalBatches or a loader with an ElasticSampler as data=."
        )


def _check_single_data_order(tracked: Mapping[str, Any], batches: GlobalBatches | None) -> None:
    """Refuse a second order of samples: it would get no position, and every rank would read all of it."""
    for name, item in tracked.items():
        is_order = isinstance(item, (GlobalBatches, elastic_sampler.ElasticSampler, ShardedStream))
        if is_order and item is not batches and name != coordinator.DATA:
            raise ConfigError(
                f"{name}: a run keeps its place in one order of samples, data=, and this is another one. "
                "Leave it out of resume(): read it with torch's DistributedSampler, or bind() and seek() it."
            )
