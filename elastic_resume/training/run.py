"""What a training script holds: the commit point, the position, and the way to build DDP.

What a script wants to be called for when a generation begins, in the order in which it said so.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn

from elastic_resume import console, constants, failpoints
from elastic_resume.capture.schedule import SnapshotScheduler
from elastic_resume.checkpoint.manifest import Position
from elastic_resume.data import rng
from elastic_resume.data.global_batches import GlobalBatches
from elastic_resume.data.world_size import WorldChange
from elastic_resume.errors import MachineError, UsageError
from elastic_resume.policy.resume_plan import ResumePlan
from elastic_resume.restore import coordinator as resuming
from elastic_resume.restore import replica_check
from elastic_resume.restore.coordinator import ResumeResult
from elastic_resume.restore.rank_context import CommitterConnection, RankContext, open_node_dir
from elastic_resume.snapshot.progress_page import ProgressPage
from elastic_resume.state.bucket_order import BucketOrder
from elastic_resume.state.state_dict import ParameterOrder, UntrackedOptimizerCheck
from elastic_resume.training import announce, crash_reporting, ddp
from elastic_resume.training.graceful_shutdown import DrainRequest
from elastic_resume.training.heartbeat import Heartbeat
from elastic_resume.training.progress import RunOptions, TrainingProgress

Callback = Callable[[], object]


class StartHooks:
    """Calls that wait for the generation's first epoch, step or save; later ones are made at once."""

    def __init__(self) -> None:
        self._pending: list[Callback] = []
        self._started = False

    def add(self, callback: Callback) -> None:
        """Make ``call`` when the generation begins."""
        if self._started:
            callback()
        else:
            self._pending.append(callback)

    def run_pending(self) -> None:
        """Make the calls, the first time."""
        if not self._started:
            self._started = True
            for call in self._pending:
                call()


Hook = Callable[["Run"], object]
H = TypeVar("H", bound=Hook)
W = TypeVar("W", bound=Callable[[WorldChange], object])
T = TypeVar("T")

MAX_FINAL_SAVE_ATTEMPTS = 3


class Run:
    """One rank's view of the job, in one generation. Made by `start.resume`."""

    def __init__(
        self,
        context: RankContext,
        tracked: dict[str, Any],
        batches: GlobalBatches | None,
        options: RunOptions,
    ) -> None:
        """Resume; see `start.resume`."""
        self._context = context
        self._bucket_order = BucketOrder()
        seed = options.seed if options.seed is not None else _broadcast_seed(context)
        self._random_numbers = rng.RandomNumbers(options.rng, seed, context.collectives.rank)
        self._tracked = tracked = {
            **tracked,
            "elastic_resume.buckets": self._bucket_order,
            "elastic_resume.seed": self._random_numbers,
            resuming.PARAMETERS: ParameterOrder(tracked),
        }
        self._drain_request = DrainRequest()
        self._start_hooks = StartHooks()
        self._closed = False
        self._pid = os.getpid()
        self._step_event_interval_s = context.settings.step_mark_s
        self._next_step_event_s = 0.0
        if batches is not None:
            policy = options.on_world_change
            batches.bind(
                context.collectives.rank, context.collectives.size, self._before_batch, policy=policy
            )
        self._node_dir = context.run_on_all_ranks(lambda: open_node_dir(context))
        keeping: CommitterConnection | None = None
        try:
            context.check_node_names_unique(context.run_on_all_ranks(self._node_dir.read_identity))
            board = context.run_on_all_ranks(lambda: ProgressPage(context.node_dir / constants.PROGRESS_FILE))
            keeping = self._committer_connection = CommitterConnection(context)
            context.slot_client = keeping.slot_client
            resumed = resuming.restore(context, self._node_dir, board, tracked)
            self._progress = TrainingProgress(resumed.manifest, batches, options, context.collectives)
            if resuming.DATA in tracked:  # which keeps its place itself
                self._progress.repeated_steps = 0
        except BaseException:
            if keeping is not None:
                keeping.close()
            self._node_dir.release()  # a notebook may try again
            raise
        if options.seed is not None:
            self._random_numbers.seed = options.seed  # said now, and so meant
        self._plan = resumed.plan
        self._heartbeat = Heartbeat(board, context)
        self._snapshot_scheduler = SnapshotScheduler(
            context,
            self._plan,
            resumed.committed_step,
            tracked,
            keeping.slot_client,
            waiting_for_disk=self._heartbeat.busy,
        )
        self._snapshot_scheduler.reserve_memory(resuming.estimate_state_bytes(resumed.flat_state, tracked))
        context.run_on_all_ranks(
            lambda: None
        )  # no rank takes a step before its lead has said when snapshots come
        crash_reporting.set_generation(generation=self.generation, read_step=lambda: self.position.step)
        self._untracked_check = UntrackedOptimizerCheck(self._tracked) if self.rank == 0 else None
        self._start_generation(resumed)

    # ---- what the script reads -----------------------------------------------------------------------

    @property
    def position(self) -> Position:
        """Where training stands: epoch, step_in_epoch, step (of the whole job) and samples, all finished."""
        return self._progress.position

    @property
    def generation(self) -> int:
        """This lifetime of the worker group; grows over the whole job."""
        return self._plan.generation

    @property
    def plan(self) -> ResumePlan:
        """What this generation started from, and what was rejected."""
        return self._plan

    @property
    def rank(self) -> int:
        """This rank, 0 to world_size - 1."""
        return self._context.collectives.rank

    @property
    def world_size(self) -> int:
        """How many ranks this generation has."""
        return self._context.collectives.size

    @property
    def loss_weight(self) -> float:
        """What to multiply this rank's mean loss with before backward().

        DDP's plain mean over ranks is then the exact mean over the global batch, even where the
        shares differ in size. 1.0 where they do not, and without ``data=``.
        """
        return self._progress.loss_weight

    @property
    def last_micro_batch(self) -> bool:
        """Whether the batch that `micro_batches` gave last is its step's last: now step, and `run.step()`."""
        return self._progress.is_last_micro_batch

    @property
    def world_change(self) -> WorldChange | None:
        """What is not as it was when the copy was made that this generation started from; mostly None."""
        return self._progress.world_change

    # ---- what the script calls -----------------------------------------------------------------------

    def ddp(self, model: nn.Module, **ddp_kwargs: Any) -> nn.Module:
        """Wrap ``model`` in DistributedDataParallel; give it back as it is when there is no process group.

        For a tracked model nothing is broadcast (``init_sync=False``): `resume` has compared the digests of
        all ranks. ``ddp_kwargs`` go to DistributedDataParallel and win over what is chosen here.
        """
        return ddp.wrap(model, self._tracked, self._bucket_order, ddp_kwargs)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are left of ``count``, the interrupted one first.

        What the script does after an epoch's last batch (a scheduler's step, an evaluation) belongs to the
        epoch: a save that falls due with its last step is made when the script asks for the next one. After
        the last one the newest state is committed on every node.
        """
        self._start_hooks.run_pending()
        done = f"epoch {self.position.epoch} of {count} is over" if self.position.epoch >= count else ""
        self._earlier_run_notice.log_once(done)
        with self._heartbeat.idle_afterwards():
            while self.position.epoch < count:
                self._random_numbers.start_at(self.position.step)
                yield self._progress.start_epoch()
                self._progress.end_epoch()
                self._save_if_due()
            self._finish_training()

    def step(self) -> None:
        """Commit point: the step just finished counts. Call it once after each optimizer step.

        Raises:
            UntrackableError: a save is due and an object has come to hold state that cannot be stored.

        """
        if self._closed:
            raise UsageError("run.step() was called after run.close(); close the run when training is over.")
        self._start_hooks.run_pending()
        self._earlier_run_notice.log_once()
        self._earlier_run_notice.record_start()
        position = self._progress.finish_step()
        self._bucket_order.end_step()
        self._heartbeat.finish_step(position.step)
        failpoints.hit("step", position.step)
        self._random_numbers.after_step(position.step)
        now = time.monotonic()
        if now >= self._next_step_event_s:
            self._next_step_event_s = now + self._step_event_interval_s
            self._context.events.emit("step", **self._position_fields(), **self._progress_fields())
        if self._progress.has_no_batch_left:
            self._heartbeat.end_epoch(position.step)
            self._snapshot_scheduler.after_step(position, may_save=False)
        else:
            self._save_if_due()

    def micro_batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Read ``loader`` where one optimizer step reads several batches of it (see README).

        `loss_weight` is then that of the batch just read. So weighted, losses add up to the global batch's
        mean, at an epoch's end too.
        """
        return self._progress.read_micro_batches(loader)

    def save(self) -> Path | None:
        """Commit the state now, and wait for the disk. Give the path on the rank that leads its node.

        Call it at a step boundary; after an epoch's last batch call it when nothing else of the epoch is left
        to do, since a resume from it begins with the next epoch. None on other ranks, where the step was
        there already when this generation began, and where the disk refused (which is told aloud).
        """
        self._start_hooks.run_pending()  # or the copy would be of the new world, and what hooks change of the old one
        if not self._context.is_local_leader:
            return None
        position, epoch_over = self._progress.position_to_resume_from()
        with self._heartbeat.busy():
            return self._snapshot_scheduler.save(position, epoch_over=epoch_over)

    def assert_ranks_equal(self, *, buffers: bool = False) -> None:
        """Prove that all ranks hold the same parameters, optimizer state and ``ema``, bit for bit.

        Call it on every rank, between two steps. Ranks send each other digests and no tensors; what it costs
        is reading the state once. The same holds for the optimizers' hyperparameters. ``buffers``: a module's
        buffers too; BatchNorm's differ by design, since each rank has its own share of the batch. So does an
        average of them in an object of your own: pass the averaged module itself as ``ema``.

        Raises:
            DivergenceError: on all ranks, naming the first value that differs and the ranks on either side.
            UntrackableError: on all ranks; an object of one has come to hold state that cannot be stored.

        """
        with self._heartbeat.busy():
            replica_check.require_equal(self._context, self._tracked, self.position.step, buffers=buffers)

    @property
    def verify_copies(self) -> bool:
        """Whether each snapshot is checked for state that changes while it is copied. Slow: for looking.

        State that is tracked as a model's parameters or an optimizer's may change in ``optimizer.step()`` and
        before ``run.step()``, and not in between. With this on, what does is a UsageError that names the
        tensor, at the next ``optimizer.step()``.
        """
        return self._snapshot_scheduler.snapshotter.verify_copies

    @verify_copies.setter
    def verify_copies(self, value: bool) -> None:
        self._snapshot_scheduler.snapshotter.verify_copies = value

    def on_resume(self, hook: H) -> H:
        """Call ``hook(run)`` in each generation that starts from a checkpoint, before its first epoch.

        Hooks run in the new world, in the order of their registration. Can be used as a decorator.
        """
        self._start_hooks.add(lambda: hook(self) if self._plan.kind == "checkpoint" else None)
        return hook

    def on_world_change(self, hook: W) -> W:
        """Call ``hook(change)`` in each generation whose world, or global batch, is not its checkpoint's.

        Nothing is scaled for you: optimizer and scheduler are as the checkpoint has them, with what hooks did
        at former changes. Called with those of `on_resume`; can be used as a decorator.
        """
        if (change := self.world_change) is not None:
            self._start_hooks.add(lambda: hook(change))
        return hook

    @contextlib.contextmanager
    def busy(self, reason: str, limit_s: float = 0.0) -> Iterator[None]:
        """Mark a long stretch without steps (an evaluation, say), so that nobody takes it for a hang.

        Mark it on all ranks: those that wait for others do not step either. ``limit_s``: after so many
        seconds it is taken for a hang all the same; 0: never.
        """
        self._context.events.emit("busy", **self._position_fields(), reason=reason)
        with self._heartbeat.busy(limit_s):
            yield

    def close(self) -> None:
        """Commit the newest finished step and release the node's directory.

        While an exception is being handled nothing is saved: the state may be half way through a step.

        Raises:
            MachineError: the job has one node, and its disk refuses.

        """
        if not self._closed and sys.exc_info()[0] is not None:
            console.say("closed while an exception is being handled: nothing more was saved.")
            self._release()
        else:
            self._save_and_release()

    def __enter__(self) -> Run:  # noqa: PYI034  typing.Self needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._release()
        else:
            self._save_and_release()

    # ---- inside --------------------------------------------------------------------------------------

    def _start_generation(self, result: ResumeResult) -> None:
        world = self._context.collectives
        self._earlier_run_notice = announce.EarlierRunNotice(result, self._context, self.position, sys.argv)
        self._heartbeat.start_generation(self.generation, self.position.step)
        self._context.events.emit(
            "worker-start",
            **self._position_fields(),
            local_rank=self._context.local_rank,
            world_size=world.size,
        )
        self._random_numbers.start_at(self.position.step)
        if self.rank == 0:
            self._context.events.emit(
                "resume", **announce.resume_event_fields(result, self.position, world.size)
            )
            console.say(announce.format_resume_lines(result, self.position, world.size))
            if self.world_change is not None:
                self.world_change.log()
        atexit.register(self._release)

    def _before_batch(self, first: bool) -> None:
        at = self.position
        self._random_numbers.before_batch(at.step, first=first)

    def _save_if_due(self) -> None:
        if self._drain_request.requested and self._context.is_local_leader:
            with self._heartbeat.busy():
                self._snapshot_scheduler.preserve(self.position, epoch_over=self._progress.is_epoch_over)
            self._drain_request.terminate_process()
        self._snapshot_scheduler.after_step(self.position, epoch_over=self._progress.is_epoch_over)

    def _position_fields(self) -> dict[str, int]:
        return {"generation": self.generation, "step": self.position.step}

    def _progress_fields(self) -> dict[str, float]:
        return {"epoch": self.position.epoch, "stalled_s": round(self._snapshot_scheduler.total_stall_s, 3)}

    def _save_and_release(self) -> None:
        try:
            if not self._closed:
                self._save_final_state()
        finally:
            self._release()

    def _finish_training(self) -> None:
        self._save_final_state()
        self._context.events.emit("run-end", **self._position_fields(), **self._progress_fields())

    def _save_final_state(self) -> None:
        """Commit the end state; a disk that refuses gets two more chances, a second apart."""
        for _ in range(MAX_FINAL_SAVE_ATTEMPTS):
            self.save()
            if not self._context.is_local_leader or self._snapshot_scheduler.has_saved(self.position):
                break
            time.sleep(1.0)
        else:
            if len(self._context.local_leader_by_node) == 1:  # with more nodes others hold the end state
                raise MachineError(
                    f"the end state (step {self.position.step}) could not be saved in "
                    f"{self._context.node_dir}: see the lines above, make room, and start the job again."
                )

    def _release(self) -> None:
        if self._closed or os.getpid() != self._pid:  # a forked child ends: nothing here is its own
            return
        self._closed = True
        self._earlier_run_notice.log_once("the script has taken no step")
        self._earlier_run_notice.record_start()
        atexit.unregister(self._release)  # it would keep this run, and so its slots, until the process ends
        self._heartbeat.close()
        if self._untracked_check is not None:
            self._untracked_check.close()
        self._drain_request.restore_handler()
        self._snapshot_scheduler.close()
        self._committer_connection.close()
        self._node_dir.release()
        self._context.events.close()


def _broadcast_seed(context: RankContext) -> int:
    """What the script gave to torch.manual_seed; ranks may have given different numbers."""
    seed = torch.initial_seed()  # of 64 bits without a sign
    return int(context.collectives.broadcast_json(seed if seed < 1 << 63 else seed - (1 << 64), 0))
