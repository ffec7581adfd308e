"""Provide `Run`, the object by which a training script counts steps, saves, and stays when the world changes.

`Run.step` is the commit point: a finished step may be copied to memory and saved to disk from there on. A run
belongs to one process. It has one generation after the other if the script uses `Run.restartable`.
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
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic_resume import failpoints
from elastic_resume.checkpoint.manifest import Position
from elastic_resume.data.batch_size import WorldChange
from elastic_resume.data.global_batches import MicroBatch
from elastic_resume.errors import MachineError, UsageError, WorldChanged
from elastic_resume.policy.resume_plan import ResumePlan
from elastic_resume.ranks.collectives import Collectives
from elastic_resume.ranks.group_connections import GroupConnections
from elastic_resume.restore import replica_check
from elastic_resume.restore.warm_memory import TensorPool
from elastic_resume.state import state_dict
from elastic_resume.training import announce, ddp, hsdp, worker_exit
from elastic_resume.training.generation import Generation, RunArguments, open_context
from elastic_resume.training.heartbeat import BUSY_LIMIT_S
from elastic_resume.training.milestones import make_milestone
from elastic_resume.training.restartable import (
    Interrupter,
    RestartableCall,
    ScriptState,
    check_call,
    check_ddp_arguments,
    check_groups,
    check_world,
    check_wrappers,
    release_wrapper,
    uninterrupted,
)
from elastic_resume.training.script_hooks import ScriptHooks
from elastic_resume.training.step_counter import StepCounter
from elastic_resume.training.supervisor_link import SupervisorLink

if TYPE_CHECKING:
    from elastic_resume.mechanisms.preemption.notice import Preemption

logger = logging.getLogger(__name__)

Hook = Callable[["Run"], object]
H = TypeVar("H", bound=Hook)
W = TypeVar("W", bound=Callable[[WorldChange], object])
N = TypeVar("N", bound="Callable[[Preemption], object]")
T = TypeVar("T")
P = ParamSpec("P")

MAX_FINAL_SAVE_ATTEMPTS = 3
IS_STOPPED = "stopped"  # a mark of the checkpoint
RETRY_S = 1.0


class Run:
    """One rank's handle on the job. `er.resume` creates it."""

    def __init__(
        self,
        arguments: RunArguments,
        link: SupervisorLink | None,
        *,
        has_parked: bool = False,
        tensor_pool: TensorPool | None = None,
    ) -> None:
        """Restore the state and begin the process's first generation.

        ``link`` leads to the worker supervisor. If the process ``has_parked`` before, several worlds may end
        before one begins.
        ``tensor_pool`` is for the first restore.
        """
        self._tensor_pool = tensor_pool
        self._arguments = arguments
        self._link = link
        self._interrupter = Interrupter()
        self._connections = GroupConnections()
        self._collectives: Collectives | None = None
        self._wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._open: Generation | None = None  # the newest generation, unless it is closed
        self._pid = os.getpid()
        self._is_restartable = False  # a restartable function runs
        self._script_hooks = ScriptHooks(
            lambda: announce.log_unused_settings(arguments.built_settings, self.rank, self.world_size)
        )
        self._notice_hooks: list[Callable[[Preemption], object]] = []  # for the next notice
        self._is_in_hook = False  # one of these
        self._asks_for_notices = False
        self._script_state: ScriptState | None = None
        self._has_restored = False  # or has tried to: the objects may hold a part of a state
        self._fsdp_modules = weakref.WeakSet(hsdp.find_fsdp_modules() if has_parked else ())
        self._must_check_wrappers = False  # at the next step
        self._step_counter: StepCounter | None = None  # of `er.epochs` or `er.steps`
        self._generation: Generation  # the newest one; every run has one when it is made
        if has_parked and link is not None:
            self._make_call(link).run(self._enter_generation)
        else:
            self._enter_generation()

    # ---- position and size ---------------------------------------------------------------------------

    @property
    def position(self) -> Position:
        """The finished epochs, steps in the epoch, steps of the job, and samples."""
        self._generation.first_steps.note_position_read()
        return self._generation.progress.position

    @property
    def generation(self) -> int:
        """The number of this generation of workers; it grows over the whole job."""
        return self._generation.number

    @property
    def plan(self) -> ResumePlan:
        """The saved state from which this generation started, and the rejected ones."""
        return self._generation.plan

    @property
    def rank(self) -> int:
        """This rank, 0 to world_size - 1."""
        return self._generation.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in this generation."""
        return self._generation.context.collectives.size

    @property
    def loss_weight(self) -> float:
        """The factor for this rank's mean loss before backward().

        It makes DDP's mean over ranks the exact mean over the global batch if the ranks' shares differ in
        size. It is 1.0 if they do not, and without ``data=``.
        """
        return self._generation.progress.loss_weight

    @property
    def last_micro_batch(self) -> bool:
        """Whether the last batch from `micro_batches` completes its step."""
        return self._generation.progress.is_last_micro_batch

    @property
    def world_change(self) -> WorldChange | None:
        """The change of world size or global batch since the restored state was saved, or None."""
        return self._generation.progress.world_change

    @property
    def preemption(self) -> Preemption | None:
        """The notice that a node of the job is to stop, or None. It changes at a step boundary only.

        All ranks have the same notice from the same step boundary on, so a script may decide by it what all
        ranks do: finish an evaluation or leave it out, save things of its own. The node takes one more step,
        and leaves at the next boundary, if its time allows. Without that time it leaves at once, and no rank
        gets the notice. The next generation begins with None.
        """
        self._ask_for_notices()
        notice: Preemption | None = self._generation.find_notice()
        return notice

    # ---- training ------------------------------------------------------------------------------------

    def ddp(self, model: nn.Module, **ddp_kwargs: Any) -> nn.Module:
        """Wrap ``model`` in DistributedDataParallel with the job's recorded bucket order.

        Without a process group, or if the script has wrapped the model, return it unchanged. A model that was
        wrapped before `er.resume` needs no call. A tracked model is not broadcast (``init_sync=False``),
        because `er.resume` has compared all ranks. ``ddp_kwargs`` override the arguments chosen here.
        """
        generation, inner = self._generation, state_dict.unwrap(model)
        name = next((name for name, item in generation.tracked.items() if item is inner), None)
        wrapper = state_dict.find_parallel_wrapper(model)
        if wrapper is not None or not dist.is_initialized():
            if self._is_restartable and getattr(wrapper, "reducer", wrapper) is None:
                raise UsageError(
                    "run.restartable: this DistributedDataParallel was made outside the function, for an "
                    "earlier world: write `ddp = run.ddp(model)` in it, with the model itself."
                )
            if name is not None and isinstance(wrapper, DistributedDataParallel):
                generation.watch(name, inner, wrapper)
                self._wrappers.add(wrapper)
            return model
        if self._is_restartable:
            check_ddp_arguments(ddp_kwargs)
        keys = ddp.find_keys(name, inner, generation.bucket_order, self._wrappers)
        with self._arguments.frozen.thawed(name or "", keys):
            wrapped = ddp.wrap(model, is_tracked=name is not None, **ddp_kwargs)
            if name is not None:
                generation.watch(name, inner, wrapped)
        self._wrappers.add(wrapped)
        return wrapped

    def replicate(self, model: nn.Module) -> nn.Module:
        """Average the gradients of a sharded model over the nodes; return the model. Use it instead of `ddp`.

        ``model`` was given to ``fully_shard(..., mesh=er.shard_mesh())`` before `er.resume`. Each backward
        pass averages within the node, as FSDP does, and then over the nodes.

        Raises:
            UsageError: the model is not sharded, was not when `er.resume` was called, or FSDP replicates it
                already.

        """
        generation = self._generation
        hsdp.replicate(model, generation.context, was_sharded=generation.snapshot_scheduler.is_sharded)
        generation.is_replicated = True
        return model

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the remaining epochs of ``count``, an interrupted one first.

        The script's work after an epoch's last batch (a scheduler's step, an evaluation) belongs to the
        epoch: a save that is due at its last step is made when the script asks for the next epoch. After the
        last epoch the final state is committed on every node.
        """
        self._generation.first_steps.is_loop_over_epochs = True
        progress = self._generation.progress
        return self._iterate(
            "epoch", count, lambda: progress.position.epoch, self.begin_epoch, self.end_epoch
        )

    def _iterate(
        self,
        unit: str,
        count: int,
        get_number: Callable[[], int],
        begin: Callable[[], int],
        end: Callable[[], None],
    ) -> Iterator[int]:
        self._script_hooks.run()
        generation = self._generation
        generation.first_steps.is_loop_of_script = True
        generation.random_numbers.start_at(generation.progress.position.step)
        finished = f"{unit} {get_number()} of {count} is over" if get_number() >= count else ""
        generation.earlier_run_notice.begin_loop(finished, is_stopped=self._is_stopped)
        with generation.heartbeat.idle_afterwards():
            while get_number() < count and not self._is_stopped:
                generation.unfinished_loop = f"in {unit} {get_number() + 1} of {count}"
                yield begin()
                if not self._is_stopped:
                    end()
            self._end_training()

    def _end_training(self) -> None:
        self._generation.unfinished_loop = ""
        self._save_final_state()
        self._generation.emit_progress("run-end")

    def enumerate(self, loader: Iterable[T]) -> Iterator[tuple[int, T]]:
        """Yield (index, batch), like ``enumerate(loader)``; ``loader`` is that of the run, perhaps wrapped.

        In a resumed epoch the index goes on where the epoch was interrupted, while ``enumerate`` starts at 0.
        """
        self._generation.first_steps.note_enumerate()
        return self._generation.progress.enumerate_batches(loader)

    @uninterrupted
    def stop(self) -> None:
        """End the training before its last epoch, and save the final state: ``run.stop()``, then ``break``.

        Call it on all ranks. The checkpoint remembers it, so the same command trains no further step.

        Raises:
            UsageError: an exception is being handled within a step, or a hook of `on_preemption` runs.

        """
        self._script_hooks.run()
        if self._is_stopped:
            return
        if self._is_in_hook:
            raise UsageError(
                "run.stop() was called in a hook of run.on_preemption, after which the loop would go on. "
                "Stop in the loop: `if run.preemption: run.stop(); break`."
            )
        if self._step_counter is not None and self._step_counter.is_broken:
            raise UsageError("run.stop() was called while an exception was being handled, within a step.")
        generation = self._generation
        generation.random_numbers.marks[IS_STOPPED] = True  # before the snapshot of an open step
        if self._step_counter is not None:
            self._step_counter.end_step(must_decide=True)
        generation.progress.stop()
        generation.receive_from_ranks()
        with generation.heartbeat.idle_afterwards():
            self._end_training()

    @property
    def _is_stopped(self) -> bool:
        return bool(self._generation.random_numbers.marks.get(IS_STOPPED))

    def begin_epoch(self, *, from_start: bool = False) -> int:
        """Begin the next epoch, or go on with an interrupted one; return its number.

        `epochs` calls this and `end_epoch`. Call both yourself if a library owns the loop over epochs. The
        loader then begins at the epoch's next batch. With ``from_start`` it begins at the epoch's first, for
        a loop that skips the batches of ``position.step_in_epoch`` steps itself.

        Raises:
            UsageError: ``from_start``, and the number of ranks has changed within this epoch, or ``data=`` is
                a `ShardedStream`.

        """
        self._script_hooks.run()
        generation = self._generation
        generation.random_numbers.start_at(generation.progress.epoch_start_step)
        generation.first_steps.begin_epoch()
        return generation.progress.start_epoch(from_start=from_start)

    @uninterrupted
    def end_epoch(self) -> None:
        """Count the epoch, when the work after its last step is done too. Save if a save is due.

        On a node that is being drained, this saves the state and ends the process by SIGTERM.

        Raises:
            UsageError: the loader was read to its end, and `step` was never called, or for half of the
                epoch's steps or fewer. A later epoch without any call is accepted.

        """
        self._generation.end_epoch()

    def step(self) -> None:
        """Count the step that just finished. Call it once after each optimizer step.

        On a node that is being drained, this saves the state and ends the process by SIGTERM.

        Raises:
            UsageError: the run is closed, or the epoch has no such step.
            UntrackableError: a save is due, and an object now holds state that cannot be stored.

        """
        if self._step_counter is not None:
            raise UsageError(
                "run.step() was called in a loop over er.epochs() or er.steps(), which counts the steps: "
                "leave run.step() out, or write run = er.resume(...) and run.epochs()."
            )
        self._finish_steps(1)

    def _finish_steps(self, count: int) -> None:
        """Mark the step boundary after ``count`` steps, of which the loop has skipped all but the last."""
        if self._open is None:
            raise UsageError("run.step() was called after run.close(); close the run when training is over.")
        if self._is_stopped and not self._generation.unfinished_loop:
            raise UsageError(
                "the loop takes another step after run.stop(), which has ended the training of this job: "
                "leave the loop with `break`. To train on, start a job with another --rdzv-id."
            )
        self._script_hooks.run()
        self._count_step(count - 1)
        self._generation.await_observers()
        if self._notice_hooks and (notice := self._generation.find_notice()) is not None:
            hooks, self._notice_hooks = self._notice_hooks, []
            self._is_in_hook = True
            try:
                for hook in hooks:
                    hook(notice)
            finally:
                self._is_in_hook = False
        failpoints.hit("between-steps", self._generation.progress.position.step)

    @uninterrupted
    def _count_step(self, skipped: int) -> None:
        if self._must_check_wrappers:
            self._check_wrappers()
        self._generation.finish_step(skipped)

    def log(self, values: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Log values of the step that is being computed, for ``--log-metrics``: ``run.log(loss=loss)``.

        The trackers get each step once, whatever dies. Call it before `step`; rank 0's values count. What is
        logged after an epoch's last step, such as an evaluation, belongs to that step. Several calls in a
        step merge. Keys that are no names: ``run.log({"train/loss": loss})``.

        Args:
            values: numbers by name. Of a tensor with one element the value is read, for which the CPU waits.
            more: the same, as keywords.

        Raises:
            UsageError: ``values`` is no dict; or on rank 0, with ``--log-metrics``, a value is no number.

        """
        if values is not None and not isinstance(values, Mapping):
            raise UsageError(
                f"run.log() takes numbers by name, not a {type(values).__name__}: run.log(loss=loss) or "
                'run.log({"train/loss": loss}).'
            )
        self._generation.log({**values, **more} if values else more)

    @property
    def is_recomputed(self) -> bool:
        """Whether the step that is being computed was finished before a restart, and is computed again."""
        return self._generation.was_finished_before(self._generation.progress.position.step + 1)

    def micro_batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the batches of ``loader`` if one optimizer step reads several of them (``micro_batch=``).

        `loss_weight` then belongs to the last batch. With it the losses of a step add up to the mean over the
        global batch, also at the end of an epoch.
        """
        return self._generation.progress.read_micro_batches(loader)

    def upcoming_batches(self) -> Iterator[MicroBatch]:
        """Yield a `MicroBatch` for each batch of the loader, from the position to the end of the epoch.

        Use it instead of `micro_batches` and `loss_weight` where a library reads the loader, perhaps ahead of
        the step: ``for batch, upcoming in zip(loader, run.upcoming_batches())``.

        Raises:
            UsageError: ``data=`` is missing, or is a `ShardedStream`.

        """
        return self._generation.progress.upcoming_batches()

    def restartable(self, function: Callable[P, T]) -> Callable[P, T]:
        """Let this process outlive changes of the world: ``function`` is called again after each.

        ::

            run = er.resume(model=model, optimizer=optimizer, data=batches)

            @run.restartable
            def train():
                ddp = run.ddp(model)
                for epoch in run.epochs(EPOCHS):
                    ...

            train()

        What stands above it runs once per process. The state is restored before each call; what the function
        itself holds is lost. `WorldChanged` leaves the function. Under python and torchrun it is called once.

        Raises:
            UsageError: the script has made process groups or DDP modules that would outlive their world, the
                call is outside the main thread, or the second one of this process.

        """
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise UsageError(
                f"run.restartable: {function.__name__}() is a generator or a coroutine, whose body does not "
                "run within its call: write a plain function."
            )

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if self._is_restartable:  # called by the function itself
                return function(*args, **kwargs)
            self._check_restartable()
            self._is_restartable = True
            try:
                self._begin_training()
                if self._link is None:
                    return function(*args, **kwargs)
                restart = self._make_call(self._link)
                result: T = restart.run(lambda: function(*args, **kwargs), enter=self._enter_generation)
                return result
            finally:
                self._is_restartable = False

        return call

    def new_group(self, *args: Any, **kwargs: Any) -> Any:
        """Make a process group in a restartable function; the arguments are those of ``dist.new_group()``.

        It ends with the generation, and the function makes it again.
        """
        return self._generation.context.collectives.new_group(*args, **kwargs)

    def take_signals(self) -> None:
        """Handle SIGTERM again, after a library has put its own handler in place.

        A drained node then ends at its next step boundary. Without an agent nothing changes.

        Raises:
            UsageError: called outside the main thread.

        """
        if self._open is not None:  # else nothing would read the request
            self._open.drain_request.install_handler()

    def save(self, milestone: str | None = None, metric: float | None = None) -> Path | None:
        """Commit the state now, and wait for the disk. Return the checkpoint's path on the local leader.

        Call it at a step boundary, on every rank if the model is sharded; after an epoch's last batch when
        its other work is done, for a resume from it begins with the next epoch. None on other ranks, if this
        generation began with that step on disk, after a logged disk failure, and in a proof of a resume.

        In a loop over `er.epochs` or `er.steps` it ends the step. So call it there on all ranks, after all
        that belongs to the step, such as ``scheduler.step()``.

        Args:
            milestone: a name, by which ``--resume-from`` finds this checkpoint: 1 to 64 letters, digits, '.',
                '_' and '-'. The checkpoint is kept beside those of ``--keep``. Call it on all ranks, so that
                every node keeps it.
            metric: a number, the same on all ranks. Of the checkpoints of this name only the one with the
                greatest is kept: ``run.save(milestone="best", metric=-loss)``.

        Raises:
            UsageError: the name or the metric has a wrong form.

        """
        label = make_milestone(milestone, metric)
        self._script_hooks.run()  # the state must include the hooks' changes for this world
        if self._step_counter is not None and self._step_counter.is_broken:
            logger.warning("run.save() within a step, while an exception is being handled: nothing is saved.")
            return None
        if self._step_counter is not None:
            self._step_counter.end_step(must_decide=True)
            self._step_counter.note_save()
        return self._generation.save(label)

    def assert_ranks_equal(self) -> None:
        """Check that all ranks hold the same state, bit for bit.

        Compared are parameters, buffers, optimizer state, hyperparameters and ``ema``. Call it on every rank,
        after `step`. It reads the state once; ranks exchange digests and no tensors.

        Raises:
            DivergenceError: on all ranks; the text names the first different value and the ranks.
            UntrackableError: on all ranks; an object of some rank now holds state that cannot be stored.

        """
        generation = self._generation
        with generation.heartbeat.busy():
            step = generation.progress.position.step
            replica_check.require_equal(generation.context, generation.tracked, step)

    def on_resume(self, hook: H) -> H:
        """Call ``hook(run)`` in each generation that resumes saved state, before it trains.

        Use it for what a restored state needs and a fresh start does not::

            @run.on_resume
            def report(run):
                print(f"continuing at step {run.position.step}, saved by {run.plan.owner_node}")

        Hooks run on every rank, in the order of registration, before the first epoch, step or save. A hook
        that is registered later runs at once. If a hook raises, the exception reaches the script, and the
        hooks after it do not run.
        """

        def add() -> None:
            if self.plan.kind == "resumed":
                self._script_hooks.add(lambda: hook(self))

        self._script_hooks.register(add, is_permanent=not self._is_restartable)
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

        def add() -> None:
            if (change := self.world_change) is not None:
                self._script_hooks.add(lambda: hook(change))

        self._script_hooks.register(add, is_permanent=not self._is_restartable)
        return hook

    def on_preemption(self, hook: N) -> N:
        """Call ``hook(preemption)`` on all ranks at the step boundary at which they get the notice.

        ::

            @run.on_preemption
            def keep(preemption):
                print(f"{preemption.node} stops in {preemption.seconds:.0f} s: {preemption.reason}")
                run.save()

        It runs at most once in a generation: see `preemption`. If it raises, the exception reaches the
        script.
        """
        is_permanent = not self._is_restartable
        self._script_hooks.register(lambda: self._notice_hooks.append(hook), is_permanent=is_permanent)
        self._ask_for_notices()
        return hook

    def _ask_for_notices(self) -> None:
        if not self._asks_for_notices and self._open is not None:
            self._asks_for_notices = True
            self._generation.ask_for_notices()

    @contextlib.contextmanager
    def busy(self, reason: str, limit_s: float = BUSY_LIMIT_S) -> Iterator[None]:
        """Pause hang detection during a long operation without steps, such as an evaluation.

        Use it on all ranks, because ranks that wait for others do not step either. After ``limit_s`` seconds,
        four hours unless given, hang detection goes on; 0 means never.
        """
        self._generation.emit("busy", reason=reason)
        with self._generation.heartbeat.busy(limit_s):
            yield

    def close(self) -> None:
        """Commit the newest finished step and release the node's directory.

        Nothing is saved while an exception is being handled, because a step may be half done.

        Raises:
            MachineError: the job has one node, and its disk fails.

        """
        if is_broken := sys.exc_info()[0] is not None:
            logger.debug("the run was closed while an exception was being handled: nothing more was saved.")
        self._close(must_save=not is_broken)

    def __enter__(self) -> Run:  # noqa: PYI034  typing.Self needs Python 3.11
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close(must_save=kind is None)

    # ---- generations of one process ------------------------------------------------------------------

    @uninterrupted
    def _enter_generation(self) -> None:
        """Join the ranks of this generation, restore the state, and begin."""
        was_called = self._script_state is not None
        if self._script_state is not None:
            self._script_state.reset()
        self._collectives, self._connections = None, GroupConnections()
        if self._link is not None and self._link.is_world_over.is_set():
            raise WorldChanged  # the former connections were cut, not these
        base_hook = worker_exit.remove_hook()
        gpus = state_dict.find_gpus(self._arguments.objects)
        self._collectives = Collectives.join(gpus, self._connections)
        hsdp.reconnect(self._fsdp_modules)
        context = open_context(self._collectives, self._arguments, base_hook)
        may_be_changed, self._has_restored = self._has_restored, True
        self._generation = self._open = Generation(
            context,
            self._arguments,
            self._wrappers,
            must_resume=may_be_changed,
            tensor_pool=self._tensor_pool,
        )
        self._tensor_pool = None
        self._script_hooks.begin_generation()
        self._notice_hooks = []
        if self._asks_for_notices:
            self._generation.ask_for_notices()
        atexit.register(self._release)
        self._script_hooks.add_again()
        if was_called:
            self._begin_training()

    def _begin_training(self) -> None:
        """Note what the script may change, and let the agent know that this process can stay."""
        generation = self._generation
        if self._script_state is None:
            self._script_state = ScriptState(generation.tracked)
        self._must_check_wrappers = True
        generation.context.events.emit(
            "restartable",
            generation=generation.number,
            start_s=round(self._arguments.start_s, 3),
            state_bytes=generation.state_bytes,
        )

    def _leave_generation(self) -> str:
        """Release all that belongs to this generation; return why this process can enter no other, or ""."""
        obstacle = ""
        if self._open is not None and not self._open.has_saved_state():
            obstacle = "no snapshot or checkpoint exists that it could load"
        elif self._script_state is not None and not self._script_state.has_same_modes():
            obstacle = "it was interrupted at the begin or end of an autocast or inference block"
        self._release(is_over=False)
        for wrapper in list(self._wrappers):
            release_wrapper(wrapper)
        self._wrappers.clear()
        obstacle = hsdp.reset(self._fsdp_modules) or obstacle
        if self._collectives is not None:
            self._collectives.leave()
        return obstacle

    def _make_call(self, link: SupervisorLink) -> RestartableCall:
        return RestartableCall(
            link,
            self._interrupter,
            leave=self._leave_generation,
            get_connections=lambda: self._connections,
            stop_waiting=self._stop_waiting_for_peers,
        )

    def _stop_waiting_for_peers(self) -> None:
        if self._open is not None:
            self._open.stop_waiting_for_peers()

    def _check_restartable(self) -> None:
        check_call(is_second=self._script_state is not None)
        if self._link is None:
            return
        self._fsdp_modules = weakref.WeakSet(hsdp.find_survivors())
        check_world(
            owns_group=self._generation.context.collectives.created_default_group,
            is_wrapped=bool(self._wrappers) or self._generation.is_replicated,
        )

    def _check_wrappers(self) -> None:
        """Refuse, at the first step, what the function has made and could not be made anew."""
        self._must_check_wrappers = False
        if self._link is not None:
            check_groups(self._connections)
            may_lack = self._generation.is_replicated or self.world_size == 1
            check_wrappers(self._wrappers, may_lack=may_lack)

    # ---- internals -----------------------------------------------------------------------------------

    def _close(self, *, must_save: bool) -> None:
        try:
            if must_save and self._open is not None:
                self._save_final_state()
        finally:
            self._release()

    def _save_final_state(self) -> None:
        """Commit the final state, in several attempts."""
        generation = self._generation
        generation.end_replay()
        for _ in range(MAX_FINAL_SAVE_ATTEMPTS):
            self.save()
            if generation.snapshot_scheduler.has_committed(generation.progress.position):
                break
            time.sleep(RETRY_S)
        else:
            if len(generation.context.local_leader_by_node) == 1:  # other nodes hold the final state too
                raise MachineError(
                    f"the end state (step {generation.progress.position.step}) could not be saved in "
                    f"{generation.context.node_dir}: see the log lines above, free space, and start the job "
                    "again."
                )

    def _release(self, *, is_over: bool = True) -> None:
        generation = self._open
        if generation is None or os.getpid() != self._pid:  # a forked child owns nothing here
            return
        self._open = None
        atexit.unregister(self._release)  # the registration would keep this run and its slots alive
        generation.close(is_over=is_over)
