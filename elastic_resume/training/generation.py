"""Provide `Generation`: what a `Run` works with from one restore of the state to the end of its world."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic_resume import constants, failpoints
from elastic_resume.capture.schedule import SnapshotScheduler
from elastic_resume.checkpoint.manifest import Position
from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.config import Settings, read_worker_options
from elastic_resume.data import elastic_sampler, rng
from elastic_resume.data.dataset_digest import digest_dataset
from elastic_resume.data.global_batches import GlobalBatches
from elastic_resume.data.rank_values import RankState, exchange
from elastic_resume.data.sharded_stream import ShardedStream
from elastic_resume.errors import ElasticResumeError, MachineError, UsageError
from elastic_resume.mechanisms.mechanism import WorkerContext
from elastic_resume.mechanisms.registry import make_step_observers
from elastic_resume.milestone import Milestone
from elastic_resume.proof.replay import Replay
from elastic_resume.ranks.collectives import Collectives
from elastic_resume.ranks.rank_context import RankContext, open_node, open_slot_client
from elastic_resume.restore import coordinator, replica_check
from elastic_resume.restore.coordinator import ResumeResult
from elastic_resume.restore.warm_memory import TensorPool
from elastic_resume.slots.progress_page import ProgressPage
from elastic_resume.state.bucket_order import BucketOrder
from elastic_resume.state.built_settings import BuiltSettings
from elastic_resume.state.parameters import FrozenParameters, ParameterOrder
from elastic_resume.training import announce, ddp, ddp_check, worker_exit
from elastic_resume.training.first_steps import FirstSteps
from elastic_resume.training.heartbeat import RankHeartbeat, count_collectives
from elastic_resume.training.progress import RunOptions, StepLimit, TrainingProgress
from elastic_resume.training.rank0_buffers import Rank0Buffers

logger = logging.getLogger(__name__)

HOLD_POLL_S = 0.002
DATASET = "dataset"  # a mark of the checkpoint: the digest of rank 0's dataset at the first start


@dataclass(frozen=True)
class RunArguments:
    """What `er.resume` was called with, checked. It is the same in all generations of a process."""

    objects: dict[str, Any]
    batches: GlobalBatches | None
    data: Any
    options: RunOptions
    settings: Settings
    frozen: FrozenParameters
    built_settings: BuiltSettings
    start_s: float  # the process's age when it called er.resume

    @property
    def records(self) -> dict[str, Any]:
        """What is tracked of the script's objects beside their state."""
        return {"elastic_resume.frozen": self.frozen, "elastic_resume.built": self.built_settings}

    @functools.cached_property
    def dataset_digest(self) -> int:
        """The digest of the dataset as the script has built it; later it may keep other lists."""
        return digest_dataset(self.data)


def open_context(
    collectives: Collectives, arguments: RunArguments, base_hook: worker_exit.Hook
) -> RankContext:
    """Gather the nodes' names, and report the exception that ends this process as that of its rank.

    ``base_hook``: see `worker_exit.install_hook`.
    """
    settings = arguments.settings
    path = settings.node_dir / constants.EVENTS_FILE
    events = worker_exit.open_event_log(path, settings.node_name, collectives.rank)
    worker_exit.install_hook(events, base_hook)
    if arguments.batches is None:
        elastic_sampler.check_no_per_rank_state(arguments.data, collectives.size)
    return RankContext(collectives, settings, events)


class Generation:
    """One rank's part in a generation: made by the restore of its state, and closed for good at its end.

    A process that stays has one after the other, each with objects of its own.
    """

    def __init__(
        self,
        context: RankContext,
        arguments: RunArguments,
        wrappers: Collection[DistributedDataParallel],
        *,
        must_resume: bool = False,
        tensor_pool: TensorPool | None = None,
    ) -> None:
        """Restore the state on all ranks, build what works with it, and report the start.

        ``wrappers`` will have the DDP modules of this generation. ``must_resume``: refuse to start fresh.
        """
        objects, batches, options = arguments.objects, arguments.batches, arguments.options
        self.context, self._arguments = context, arguments
        self.drain_request = worker_exit.DrainRequest()  # before the restore, which may take long
        self.is_replicated = False  # by `Run.replicate`
        self._has_warned_of_metric = False
        self.unfinished_loop: str | None = None  # the place in the loop; empty after its end, None before it
        stream = self._bind_data()
        # Another generation may follow, or a later cell of a notebook that calls resume again.
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(context.events.close)
            node_dir, committer = open_node(context, cleanup)
            page, seed, self._options, digests = _share(context, node_dir, arguments.dataset_digest)
            self.slot_client = open_slot_client(context, committer, cleanup)
            self.bucket_order = BucketOrder()
            self.random_numbers = rng.RandomNumbers(options.rng, seed, self.rank)
            # Else a cold start would give all ranks rank 0's.
            self.rank_values = [item for item in objects.values() if isinstance(item, RankState)]
            exchange(self.rank_values, context.collectives)
            self.tracked: dict[str, Any] = {
                **objects,
                "elastic_resume.buckets": self.bucket_order,
                "elastic_resume.seed": self.random_numbers,
                coordinator.PARAMETERS: ParameterOrder(objects),
            } | arguments.records
            result = coordinator.restore(
                context, node_dir, page, self.slot_client, self.tracked, tensor_pool=tensor_pool
            )
            self.plan = result.plan
            arguments.built_settings.note_ranks(context.collectives.size)
            if must_resume and self.plan.kind == "cold":
                raise ElasticResumeError(
                    "no saved state is left that this process could go on from, so it has to start again."
                )
            self.progress = TrainingProgress(result.manifest, batches, options, context.collectives, stream)
            if coordinator.DATA in self.tracked:  # an object that keeps its own position
                self.progress.repeated_steps = 0
            _set_seeds(self.random_numbers, batches, options)
            _check_dataset(digests, self.random_numbers.marks, result, self.rank)
            self.heartbeat = RankHeartbeat(page, context)
            self.snapshot_scheduler = SnapshotScheduler(
                context,
                result.plan,
                result.committed_step,
                self.tracked,
                self.slot_client,
                waiting_for_disk=self.heartbeat.busy,
            )
            cleanup.callback(self.snapshot_scheduler.close)
            self.state_bytes = coordinator.estimate_state_bytes(result.flat_state, self.tracked)
            self.snapshot_scheduler.reserve_memory(self.state_bytes)
            self.replay = self._begin_replay()
            # Wait for all ranks: no rank may step before its local leader has scheduled snapshots.
            context.run_on_all_ranks(lambda: None)
            self._begin(result, wrappers, cleanup)
            self._cleanup = cleanup.pop_all()

    def _begin(
        self,
        result: ResumeResult,
        wrappers: Collection[DistributedDataParallel],
        cleanup: contextlib.ExitStack,
    ) -> None:
        """Prepare the checks of the first steps, and report the start."""
        context, position = self.context, self.progress.position
        cleanup.callback(self.drain_request.restore_handler)
        self._rank0_buffers = Rank0Buffers(context, self.tracked)
        self._ddp_check = ddp_check.DDPCheck(context, wrappers, self._rank0_buffers)
        self._replica_check = replica_check.FirstStepsCheck(context, self.tracked)
        self._next_step_event_s = 0.0
        self._step_limit = StepLimit(os.environ.get(constants.ENV_LAST_STEP, ""))
        self._recorded_step = position.step
        worker_exit.set_generation(
            generation=self.number,
            read_step=lambda: self._recorded_step,
            is_proving=lambda: self.replay is not None,
        )
        log_hint = functools.partial(announce.log_enumerate_hint, context, position)
        self.first_steps = FirstSteps(self.tracked, self._arguments.batches, result, self.rank, log_hint)
        cleanup.callback(self.first_steps.close)
        cleanup.callback(self.bucket_order.close)
        cleanup.callback(self.heartbeat.close)
        worker_context, record = self._describe_for_observers(), self.heartbeat.set_measurement
        self._observers = make_step_observers(worker_context, record, result.notes)
        for observer in self._observers:
            cleanup.callback(observer.close)
        self.earlier_run_notice = announce.EarlierRunNotice(result, context, position, sys.argv)
        self.heartbeat.start_generation(self.number, position.step)
        announce.start_worker(context, self.plan, position.step, self.tracked)
        self.random_numbers.start_at(position.step)
        if self.rank == 0:
            announce.log_start(result, context, position, world_change=self.progress.world_change)
        self._leave_abandoned_history(result)  # after the event: a kill meanwhile is no loss of these steps

    def _describe_for_observers(self) -> WorkerContext:
        context, collectives = self.context, self.context.collectives
        return WorkerContext(
            rank=collectives.rank,
            local_rank=context.local_rank,
            world_size=collectives.size,
            generation=self.number,
            step=self.progress.position.step,
            node_dir=context.node_dir,
            settings=self._options,
            tracked=self.tracked,
            emit=self.emit,
            record=lambda _: None,
            count_collectives=count_collectives,
            gather=collectives.gather,
            broadcast_tensors=collectives.broadcast_tensors,
            read_position=lambda: self.progress.position,
            plan=self.plan,
        )

    def _leave_abandoned_history(self, result: ResumeResult) -> None:
        """Let the history win to which the job goes back, and move what is newer aside on each node.

        The state is committed at once, under this generation: whatever dies from then on, no older generation
        has a newer one, and the request counts as done. A kill before that repeats it.
        """
        if not self.plan.goes_back:
            coordinator.move_abandoned_aside(self.context, result)  # of a node that was absent then
            return
        failpoints.hit("going-back.before-commit")
        path: Path | None = None
        if self.context.is_local_leader or self.snapshot_scheduler.is_sharded:
            # The position as it was loaded: the script's work after an epoch's last step may be still to do.
            with self.heartbeat.busy():
                path = self.snapshot_scheduler.commit(self.progress.position, of_this_generation=True)
        failpoints.hit("going-back.after-commit")
        if path is not None:  # else the disk has refused, which is logged
            coordinator.move_abandoned_aside(self.context, result)
        self.context.run_on_all_ranks(lambda: None)  # no rank trains before all nodes have tried

    @property
    def number(self) -> int:
        """The number of this generation; it grows over the whole job."""
        return self.plan.generation

    @property
    def rank(self) -> int:
        """This rank, 0 to world_size - 1."""
        return self.context.collectives.rank

    # ---- steps ---------------------------------------------------------------------------------------

    def watch(self, name: str, model: nn.Module, wrapper: DistributedDataParallel) -> None:
        """Give a tracked model's ``wrapper`` the recorded bucket order, and let mechanisms observe it."""
        self.bucket_order.prepare(name, model, wrapper)
        ddp.register_faults(wrapper)
        for observer in self._observers:
            observer.watch(wrapper)

    def finish_step(self, skipped: int) -> None:
        """Mark a step boundary after ``skipped`` steps and one more.

        Save if a save is due. On a node that is being drained, this ends the process.
        """
        self.earlier_run_notice.log_and_record()
        self._step_limit.check(self.progress.position.step)
        position = self.progress.finish_step(skipped)
        self._ddp_check.before_buffers()
        self.receive_from_ranks()
        self.bucket_order.end_step()
        self._replica_check.after_step(position.step, has_ddp=self.bucket_order.has_ddp)
        failpoints.hit("step", position.step)
        self.random_numbers.after_step(position.step)
        if is_at_end := self.progress.has_no_batch_left and self.replay is None:
            self.snapshot_scheduler.after_step(position, may_commit=False)
        is_drained = not is_at_end and self._save_if_due()
        # A step counts as finished only now, when its snapshot has begun: a process that dies earlier leaves
        # no copy of it, and its peers may be stopped before they have one.
        self._record_step(position)
        for observer in self._observers:
            observer.end_step(position.step)
        if is_drained:
            self.drain_request.terminate_process()
        self.first_steps.end_step()

    def log(self, values: Mapping[str, Any], *, of_last_step: bool = False, may_drop: bool = False) -> None:
        """Hand values that were logged to the mechanisms: see `StepObserver.log`."""
        for observer in self._observers:
            observer.log(values, of_last_step=of_last_step, may_drop=may_drop)

    def was_finished_before(self, step: int) -> bool:
        """Return whether an earlier generation has finished a step."""
        return any(observer.was_finished_before(step) for observer in self._observers)

    def _close_step(self, position: Position) -> None:
        for observer in self._observers:
            observer.close_step(position)

    def _record_step(self, position: Position) -> None:
        self.heartbeat.finish_step(position.step)
        self._recorded_step = position.step
        if self.progress.has_no_batch_left:
            self.heartbeat.end_epoch(position.step)
        now = time.monotonic()
        if now >= self._next_step_event_s:
            self._next_step_event_s = now + self.context.settings.step_mark_s
            self.emit_progress("step")

    def end_epoch(self) -> None:
        """Count the epoch; save if a save is due, as `finish_step` does."""
        self.progress.end_epoch()
        self._close_step(self.progress.position)
        self.receive_from_ranks()
        if self._save_if_due():
            self.drain_request.terminate_process()

    def receive_from_ranks(self) -> None:
        """Make equal what each rank has of its own: ranks' values, and the buffers of modules."""
        exchange(self.rank_values, self.context.collectives)
        self._rank0_buffers.receive()

    def emit(self, kind: str, **fields: Any) -> None:
        """Emit an event at the present position."""
        self.context.events.emit(kind, generation=self.number, step=self.progress.position.step, **fields)

    def emit_progress(self, kind: str) -> None:
        """Emit an event with the progress of the training."""
        stalled_s = round(self.snapshot_scheduler.meter.total_stall_s, 3)
        self.emit(kind, epoch=self.progress.position.epoch, stalled_s=stalled_s)

    # ---- saving --------------------------------------------------------------------------------------

    def save(self, milestone: Milestone | None = None) -> Path | None:
        """Commit the state now, as a milestone if one is given: see `Run.save`."""
        position, is_epoch_over = self.progress.position_to_resume_from()
        self._close_step(position)
        if not (self.context.is_local_leader or self.snapshot_scheduler.is_sharded):
            return None
        if self.replay is not None:  # a newer state is saved, and this one may prove wrong
            return self.replay.find_checkpoint() if self.context.is_local_leader else None
        if milestone is not None and milestone.metric is not None and not math.isfinite(milestone.metric):
            self._warn_of_metric(milestone, position.step)
            milestone = None
        self.snapshot_scheduler.await_all_ranks(position.step)  # not busy: it is a hang if one never comes
        with self.heartbeat.busy():
            path = self.snapshot_scheduler.commit(
                position, is_epoch_over=is_epoch_over, of_this_generation=milestone is not None
            )
            if milestone is not None and path is not None:
                self._add_milestone(path, milestone)
            return path

    def _warn_of_metric(self, milestone: Milestone, step: int) -> None:
        """Log once in a generation that a checkpoint is no milestone, since its metric is nan or infinite."""
        if self.rank == 0 and not self._has_warned_of_metric:
            self._has_warned_of_metric = True
            logger.warning(
                f"step {step} is no milestone {milestone.name!r}: its metric is {milestone.metric}. To go "
                "back to one, stop the job and start the same command with --resume-from "
                f"{milestone.name}. Later ones are not logged."
            )

    def _add_milestone(self, path: Path, milestone: Milestone) -> None:
        failpoints.hit("milestone.committed")
        try:
            self.context.catalog.add_milestone(path, milestone)
        except MachineError as error:
            logger.warning(
                f"node {self.context.node}: {path.name} is saved, and is no milestone "
                f"{milestone.name!r}: {error} It goes when --keep newer ones exist."
            )
            return
        except UsageError as error:  # no reason to end a training
            logger.warning(f"node {self.context.node}: {error}")
            return
        self.emit("milestone", name=milestone.name, metric=milestone.metric, path=str(path))
        if self.context.collectives.rank == 0:
            metric = "" if milestone.metric is None else f" (metric {milestone.metric:.6g})"
            step = self.progress.position.step
            logger.info(f"step {step} is saved as milestone {milestone.name!r}{metric}.")

    def end_replay(self) -> None:
        """End the proof of a resume where the script ends."""
        if self.replay is not None:
            self.replay.end(self.progress.position_to_resume_from()[0])
            self.replay = None

    def _save_if_due(self) -> bool:
        """Take a snapshot or save if one is due. Return True if the process must end, for a drain."""
        is_drained = self.context.is_local_leader and self._must_end()
        position, is_epoch_over = self.progress.position, self.progress.is_epoch_over
        if self.replay is not None:
            if self.replay.has_reached(position):
                with self.heartbeat.busy():
                    self.replay.finish(position)
                self.replay = None
            return is_drained
        scheduler = self.snapshot_scheduler
        if is_drained and not scheduler.is_sharded:
            with self.heartbeat.busy():
                scheduler.keep_state(position, is_epoch_over=is_epoch_over)
            return True
        scheduler.after_step(position, is_epoch_over=is_epoch_over, is_drained=is_drained)
        return is_drained and scheduler.has_kept(position, is_epoch_over=is_epoch_over)

    def _must_end(self) -> bool:
        request = self.drain_request
        return (
            request.requested
            and self.snapshot_scheduler.may_end(request.requested_at)
            and all(each.may_end(request.requested_at) for each in self._observers)
        )

    # ---- notices -------------------------------------------------------------------------------------

    def ask_for_notices(self) -> None:
        """Let the mechanisms know that the script asks for notices."""
        for observer in self._observers:
            observer.ask()

    def await_observers(self) -> None:
        """Wait at a step boundary until no mechanism holds this rank. The world may end meanwhile."""
        if any(observer.is_held() for observer in self._observers):
            with self.heartbeat.busy():
                while any(observer.is_held() for observer in self._observers):
                    time.sleep(HOLD_POLL_S)

    def find_notice(self) -> Any:
        """Return the notice that all ranks have; None in a proof, whose steps must repeat the first ones."""
        found = None if self.replay is not None else (each.find_notice() for each in self._observers)
        return next(filter(None, found or ()), None)

    # ---- the end -------------------------------------------------------------------------------------

    def has_saved_state(self) -> bool:
        """Return whether any node can hold a state of this job: this one does, or another one did."""
        return (
            self.plan.kind == "resumed"
            or any(slot.snapshot_id for slot in self.slot_client.control_block.read_slots())
            or bool(self.context.catalog.list_entries())
        )

    def stop_waiting_for_peers(self) -> None:
        """End the wait of a step for a snapshot that other ranks began. Any thread may call it."""
        self.snapshot_scheduler.snapshotter.stop_waiting_for_peers()

    def close(self, *, is_over: bool) -> None:
        """Release the node's directory and slots, and all that works with them.

        If the training ``is_over`` for this process, report that; else another generation follows.
        """
        if not is_over:
            self.stop_waiting_for_peers()
        else:
            worker_exit.report_caught_error()
            self.earlier_run_notice.log_and_record("the script has taken no step")
            if self.unfinished_loop == "" and not worker_exit.is_error_raised():
                self._close_step(self.progress.position)
            if self.unfinished_loop and self.rank == 0 and not worker_exit.is_error_raised():
                announce.warn_of_unfinished_loop(self.unfinished_loop)
        self._cleanup.close()

    # ---- the restore ---------------------------------------------------------------------------------

    def _bind_data(self) -> ShardedStream | None:
        """Bind the order of samples to this rank; return it if it is a stream."""
        data, collectives = self._arguments.objects.get(coordinator.DATA), self.context.collectives

        def before_batch(first: bool) -> None:
            self.random_numbers.before_batch(self.progress.position.step, first=first)

        if (batches := self._arguments.batches) is not None:
            policy = self._arguments.options.on_world_change
            batches.bind(collectives.rank, collectives.size, before_batch, policy=policy)
        if not isinstance(data, ShardedStream):
            return None
        data.bind(collectives, before_batch, lambda: self.heartbeat.end_epoch(self.progress.position.step))
        return data

    def _begin_replay(self) -> Replay | None:
        """Begin to compute the newest state again, if the generation starts from an earlier one."""
        if self.plan.target is None:
            return None
        knows_data = coordinator.DATA in self.tracked
        return Replay(
            self.context,
            self.plan,
            self.plan.target,
            self.tracked,
            self.slot_client,
            knows_data=knows_data,
            within_epoch=not knows_data or self.progress.position.step_in_epoch > 0,
        )


def _set_seeds(random_numbers: rng.RandomNumbers, batches: GlobalBatches | None, options: RunOptions) -> None:
    """Set the seeds, after that of the first start or of a checkpoint is known."""
    if options.seed is not None:
        random_numbers.seed = options.seed  # an explicit seed overrides both
    if batches is not None:
        batches.worker_seed = random_numbers.seed if options.rng == rng.DERIVED else None


def _share(
    context: RankContext, node_dir: NodeDir, dataset_digest: int
) -> tuple[ProgressPage, int, dict[str, Any], list[int]]:
    """Open the node's progress page, check the node names, and share values; it takes one gather.

    Return the page, rank 0's seed, its options of mechanisms, and the digest of each rank's dataset. Scripts
    may have given torch.manual_seed different numbers on each rank, and nodes have other settings.
    """

    def open_page() -> tuple[ProgressPage, Any]:
        page = ProgressPage(context.node_dir / constants.PROGRESS_FILE)
        seed = torch.initial_seed()  # 64 bits, unsigned
        seed = seed if seed < 1 << 63 else seed - (1 << 64)
        options = read_worker_options(os.environ)
        return page, [node_dir.read_identity(), seed, dataset_digest, options]

    page, shared = context.run_and_gather(open_page)
    context.check_node_names_unique([identity for identity, *_ in shared])
    _, seed, _, options = shared[0]
    return page, int(seed), options, [int(digest) for _, _, digest, _ in shared]


def _check_dataset(digests: list[int], marks: dict[str, int], result: ResumeResult, rank: int) -> None:
    """Warn if the ranks have built different datasets, or another one than at the job's first start."""
    first = marks.setdefault(DATASET, digests[0])
    other = next((each for each, digest in enumerate(digests) if digest != digests[0]), None)
    is_start = result.plan.kind == "cold" or result.earlier_command is not None
    if rank or (first == digests[0] and (other is None or not is_start)):
        return
    place = "at each start of this job" if first != digests[0] else f"on all ranks, as on 0 and {other}"
    logger.warning(
        f"WARNING: the dataset of data= is not the same {place}: its lists differ. So a resumed epoch goes "
        "on with other samples. If random_split() or a shuffle draws it without a seed, pass generator="
        "torch.Generator().manual_seed(0), or call torch.manual_seed(0) and random.seed(0) before it."
    )
