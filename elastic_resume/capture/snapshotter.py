"""Copy the state of one node into a slot while training continues.

At a step boundary::

    local leader                              each local rank
    takes a free slot
    writes buffers, scalars, position
    announces id and decided_id ──────────> starts copying its share in a thread
                                              forward, backward
                                              optimizer.step() waits at the copy barrier for its share
                                              marks its share in the slot as copied

The slot is valid when all shares are in place; if a rank dies during its copy the slot never becomes valid.

Large parameters and their optimizer state on a device are copied in the background, because usually only an
optimizer step changes them. All other tensors are copied at once, because the next forward pass may change
them, and so are tensors in host memory: to digest one twice costs more than to copy it. The whole copy is
synchronous without a tracked optimizer. If a script changes a tensor while it is copied in the background,
`source_digests` finds that: the snapshot is discarded, and later copies of this node are synchronous.

A tensor that is divided over the ranks of a node (FSDP) is copied by all of them, each its own shard. If the
next forward pass may change one of them, the copy of that rank is synchronous.

`snapshot_plan` says which tensors are copied when, `slot_access` is the protocol of the slots, and
`copy_engine` copies.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from elastic_resume import __version__, failpoints
from elastic_resume.capture.copy_barrier import CopyBarrier
from elastic_resume.capture.copy_engine import (
    CopyJob,
    CopyThread,
    CudaCopyStreams,
    copy_tensors,
    run_job,
    wait_until_mutable,
)
from elastic_resume.capture.slot_access import PEER_TIMEOUT_S, SlotAccess
from elastic_resume.capture.snapshot_plan import (
    PlannedState,
    SlotViews,
    SnapshotPlan,
    TensorGroup,
    make_plan,
    summarize_names,
)
from elastic_resume.capture.source_digests import SourceDigests
from elastic_resume.checkpoint.manifest import Position, encode_ways_back
from elastic_resume.milestone import WayBack
from elastic_resume.ranks.rank_context import RankContext
from elastic_resume.slots import slot_memory
from elastic_resume.slots.ipc import SlotClient
from elastic_resume.slots.slot_memory import Slot, encode_snapshot_id
from elastic_resume.state import state_dict
from elastic_resume.state.state_dict import Leaf

logger = logging.getLogger(__name__)

# Used for synchronous copies: the local leader may still evaluate before it ends the same step.
LONG_PEER_TIMEOUT_S = 60.0
LEAVING_PEER_TIMEOUT_S = 0.2
NamedTensors = list[tuple[str, Tensor]]


@dataclass(frozen=True)
class CopyTask:
    """One rank's share of one snapshot. ``slot`` is None until the local leader has announced it."""

    plan: SnapshotPlan
    slot: Slot | None
    snapshot_id: int
    share: TensorGroup
    uncached: TensorGroup  # this rank's shards of divided tensors that are not in the cached plan
    device_clones: NamedTensors  # clones of immediate tensors that are on devices
    start_events: dict[torch.device, Any]
    digests: SourceDigests | None  # of the share at the step boundary; None if training waits for the copy


class Snapshotter:
    """Takes this rank's part in its node's snapshots, in one generation."""

    def __init__(
        self,
        tracked: Mapping[str, Any],
        slot_client: SlotClient,
        context: RankContext,
        generation: int,
        ways_back: Sequence[WayBack],
    ) -> None:
        """Put the copy barrier before the steps of all tracked optimizers; ``ways_back``: see `Manifest`."""
        self._context = context
        self._generation = generation
        optimizers = [item for item in tracked.values() if isinstance(item, Optimizer)]
        self._barrier = CopyBarrier(optimizers, self._wait_before_step)
        local_world_size = context.node_by_rank.count(context.node)
        base_metadata = {
            "run_id": context.settings.run_id,
            "node": context.node,
            "rank": context.local_leader_by_node[context.node],
            "world_size": context.collectives.size,
            "writer": __version__,
            "ways_back": encode_ways_back(ways_back),
        }
        share_count = local_world_size if self._barrier.has_hooks else 1
        self._state = PlannedState(
            tracked, lambda view: make_plan(view, base_metadata, share_count, context.local_rank)
        )
        self.is_sharded = self._state.read()[1].is_sharded
        self._slots = SlotAccess(slot_client, context.local_rank, local_world_size)
        self._plan: SnapshotPlan | None = None  # of the newest state that was read
        self._views_by_slot: dict[tuple[int, int, int], SlotViews] = {}
        self._cuda_streams = CudaCopyStreams()
        self._copy_thread = CopyThread()
        self._job: CopyJob | None = None
        self._failed_plan_id = 0  # id of the plan whose shares did not all arrive
        self._is_split = False  # whether other ranks copy a share of the newest snapshot
        self._is_background = False  # whether the newest snapshot was copied in the background
        self._failure_logged = False
        self._pid = os.getpid()
        self.stall_s = 0.0  # time that the newest snapshot has taken from the training thread
        self.cpu_s = 0.0  # CPU time of this rank's share
        self.copy_problem = ""  # why the newest copy failed; "" if it did not
        self.snapshot_id = 0  # id of the newest snapshot in which this rank took part

    @property
    def problem(self) -> str:
        """Why the newest snapshot failed or was not taken; "" if it was taken."""
        return self._slots.problem or self.copy_problem

    def start_snapshot(
        self,
        position: Position,
        *,
        is_epoch_over: bool = False,
        commit_requested: bool = False,
        leader_only: bool = False,
    ) -> bool:
        """Start a snapshot at a step boundary. Return whether one was started; the local leader decides.

        ``is_epoch_over``: see `encode_snapshot_id`. ``commit_requested`` asks the committer to commit it.
        ``leader_only`` leaves out the other local ranks, which may be at another step.

        Raises:
            UntrackableError: an object has come to hold state that cannot be stored.

        """
        began = time.perf_counter()
        self.wait_for_copy()
        self._wait_for_previous()
        snapshot_id = encode_snapshot_id(self._generation, position.step, is_epoch_over=is_epoch_over)
        state_view, plan = self._state.read()
        if plan is not self._plan:
            if not self.is_sharded:
                state_dict.refuse_divided(state_view.leaves)
            self._plan, self._views_by_slot = plan, {}
        plan = plan.as_single_share() if leader_only or self._failed_plan_id == plan.plan_id else plan
        digests = self._digest_share(plan)
        slot: Slot | None = None
        clones: NamedTensors = []
        if self._context.is_local_leader:
            dynamic_metadata = slot_memory.encode_metadata(
                slot_memory.dynamic_metadata(
                    self._generation, position, time.time(), state_view.dynamic_structure
                )
            )
            slot = self._slots.take(snapshot_id, *plan.slot_bytes(dynamic_metadata))
            if slot is None:
                return False
            failpoints.hit("snapshot.started")
            slot.write_metadata(
                plan.layout.header,
                plan.layout.total_bytes,
                plan.static_metadata,
                dynamic_metadata,
                plan.plan_id,
            )
            clones = self._copy_immediate(slot, plan, state_view.uncached_leaves)
            failpoints.hit("snapshot.written")
            self._slots.announce(slot, snapshot_id, len(plan.shares), commit_requested=commit_requested)
        elif len(plan.shares) <= self._context.local_rank:
            return False
        self.copy_problem = ""
        own = [leaf for leaf in state_view.uncached_leaves if leaf.is_divided and leaf.tensor.numel()]
        share, uncached = self._get_share(plan), TensorGroup(own)
        devices = share.devices.union(uncached.devices, (tensor.device for _, tensor in clones))
        events = self._cuda_streams.record_start_events(devices)  # the copies wait for the digests too
        self._start_copy(CopyTask(plan, slot, snapshot_id, share, uncached, clones, events, digests))
        self.snapshot_id, self._is_split = snapshot_id, len(plan.shares) > 1
        self.stall_s = time.perf_counter() - began
        return True

    def has_snapshot(self, position: Position, *, is_epoch_over: bool = False) -> bool:
        """Return whether the newest snapshot that was started is of that step."""
        return self.snapshot_id == encode_snapshot_id(
            self._generation, position.step, is_epoch_over=is_epoch_over
        )

    def wait_for_copy(self) -> None:
        """Wait until this rank's share is copied. Return at once if no copy is running."""
        job = self._job
        if job is None or os.getpid() != self._pid:
            return
        began = time.perf_counter()
        self._job = None
        job.wait_until_done()
        self.stall_s += time.perf_counter() - began
        self._check_result(job)

    def wait_until_complete(self, timeout_s: float = PEER_TIMEOUT_S) -> bool:
        """Wait for all shares of the newest snapshot. Return whether the snapshot is valid."""
        self.wait_for_copy()
        return self._slots.wait_until_complete(self.snapshot_id, timeout_s)

    def stop_waiting_for_peers(self) -> None:
        """Let the running copy fail unless the local leader has announced its slot, or does so now.

        The step of the snapshot may have ended on this rank alone.
        """
        if (job := self._job) is not None:  # another thread may end it meanwhile
            job.peer_timeout_s = LEAVING_PEER_TIMEOUT_S

    def close(self) -> None:
        """Finish the running copy and remove the copy barrier."""
        if os.getpid() != self._pid:
            return
        self.wait_for_copy()
        self._barrier.close()
        self._copy_thread.close()
        self._cuda_streams.unpin_stale_slots()
        self._views_by_slot.clear()

    # ---- in the training thread ------------------------------------------------------------------------

    def _wait_before_step(self) -> None:
        job = self._job
        if job is None:
            return
        began = time.perf_counter()
        wait_until_mutable(job)
        self.stall_s += time.perf_counter() - began

    def _wait_for_previous(self) -> None:
        """Wait until the previous snapshot is complete, or one of its shares has failed."""
        if self._is_split and not self.wait_until_complete() and self._plan is not None:
            was_torn = self._is_background and self._slots.copies_at_once  # It does not happen again.
            if not was_torn:
                # A local rank has another plan, or is late: the local leader copies everything from now on.
                self._failed_plan_id = self._plan.plan_id
        self._is_split = False

    def _digest_share(self, plan: SnapshotPlan) -> SourceDigests | None:
        """Return the digests of this rank's share; None if training waits for the copy."""
        share = self._get_share(plan)
        at_once = plan.copies_at_once or self._slots.copies_at_once or not share.devices
        self._is_background = self._barrier.has_hooks and not at_once
        if not self._is_background:
            return None
        try:
            return SourceDigests(share.leaves)
        except RuntimeError as error:  # the device has no memory for it
            self._copy_at_once(f"the state could not be digested: {error}"[:300], 0.0)
            return None

    def _copy_at_once(self, why: str, copy_s: float) -> None:
        """From now on let training wait for each copy of this node; log it once."""
        is_known = self._slots.copies_at_once
        self._slots.copy_at_once()
        if not is_known:
            rank, about = self._context.collectives.rank, f", about {copy_s * 1e3:.0f} ms" if copy_s else ""
            logger.warning(
                f"rank {rank}: {why}. From now on run.step() of this node waits for the copy of each "
                f"snapshot{about}."
            )

    def _copy_immediate(
        self, slot: Slot, plan: SnapshotPlan, uncached_leaves: Iterable[Leaf]
    ) -> NamedTensors:
        """Copy the tensors that the next forward pass may change; return clones of those on devices."""
        uncached = TensorGroup(
            [leaf for leaf in uncached_leaves if leaf.tensor.numel() and not leaf.is_divided]
        )
        views = self._get_views(slot, plan)
        clones: NamedTensors = []
        for group, targets in (
            (plan.immediate, views.get_targets(plan.immediate)),
            (uncached, views.find_targets(uncached.leaves)),
        ):
            copy_tensors(*_select_host_pairs(targets, group.tensors, group.devices))
            on_device = [leaf for leaf in group.leaves if leaf.tensor.is_cuda] if group.devices else []
            clones += [(leaf.name, leaf.tensor.detach().clone()) for leaf in on_device]
        return clones

    def _start_copy(self, task: CopyTask) -> None:
        """Copy this rank's share: in the background if its digests are there, else now."""
        self._slots.set_copying(task.snapshot_id, awaiting_slot=task.slot is None)
        peer_timeout_s = LONG_PEER_TIMEOUT_S if task.digests is None else PEER_TIMEOUT_S
        job = self._job = CopyJob(lambda job: self._run_task(job, task), peer_timeout_s)
        self._copy_thread.submit(job) if self._barrier.has_hooks else run_job(job)
        if task.digests is None:
            job.wait_until_done()

    def _check_result(self, job: CopyJob) -> None:
        """Report how a copy ended. A failed copy costs a snapshot and never stops training."""
        if job.error is not None:
            self._report_failure(f"{type(job.error).__name__}: {job.error}"[:500])
            self._state.forget()
        elif job.torn_names:
            names = summarize_names(job.torn_names)
            self.copy_problem = f"{names} changed before optimizer.step() while it was copied"
            self._context.events.emit(
                "snapshot-failed", generation=self._generation, reason=self.copy_problem
            )

    def _report_failure(self, problem: str) -> None:
        """Emit an event for a failed snapshot. Log the first one."""
        self.copy_problem = problem
        self._context.events.emit("snapshot-failed", generation=self._generation, reason=problem)
        if not self._failure_logged:
            self._failure_logged = True
            logger.warning(
                f"rank {self._context.collectives.rank}: a snapshot failed ({problem}). Training continues; "
                "older snapshots are untouched."
            )

    def _get_share(self, plan: SnapshotPlan) -> TensorGroup:
        rank = self._context.local_rank
        return plan.shares[rank] if rank < len(plan.shares) else TensorGroup(())

    # ---- in the thread ---------------------------------------------------------------------------------

    def _run_task(self, job: CopyJob, task: CopyTask) -> None:
        began = time.thread_time()
        rank, slot = self._context.local_rank, task.slot
        try:
            if slot is None:
                slot = self._slots.wait_for_slot(task.snapshot_id, job)
                self._slots.set_copying(task.snapshot_id)
            # Otherwise the local leader copies everything.
            if slot is not None and rank < slot.record.get("share_count"):
                self._copy_into_slot(slot, task, job)
                if self._is_torn(slot, task, job):
                    self._slots.fail(slot, task.snapshot_id)
                    return
                self._slots.confirm(slot, task.snapshot_id)
                failpoints.hit("snapshot.confirmed")
        except BaseException as error:
            if isinstance(error, ValueError) and task.digests is not None:  # from `copy_tensors`
                self._copy_at_once(f"a snapshot is discarded, since {error} while it was copied", 0.0)
            if slot is not None:
                self._slots.fail(slot, task.snapshot_id)
            raise
        finally:
            self._slots.set_copying(0)
            self.cpu_s = time.thread_time() - began

    def _copy_into_slot(self, slot: Slot, task: CopyTask, job: CopyJob) -> None:
        if slot.record.get("plan_id") != task.plan.plan_id:
            raise RuntimeError(
                f"local rank {self._context.local_rank} tracks or freezes other tensors than local rank 0"
            )
        views = self._get_views(slot, task.plan)
        sources, targets, formats = task.share.tensors, views.get_targets(task.share), task.share.formats
        if task.uncached.leaves:
            sources = sources + task.uncached.tensors
            targets = targets + views.find_targets(task.uncached.leaves)
            formats = []
        if task.start_events:
            sources = sources + [tensor for _, tensor in task.device_clones]
            targets = targets + [views.by_name[name] for name, _ in task.device_clones]
            self._cuda_streams.pin_slot(slot)
            self._cuda_streams.enqueue_copies(targets, sources, task.start_events, job)
            targets, sources = _select_host_pairs(targets, sources, task.start_events)
            formats = []
        failpoints.hit("snapshot.copying")
        began = time.perf_counter()
        copy_tensors(targets, sources, formats=formats)
        job.sources_read.set()
        for _, event in job.copy_events:
            event.synchronize()
        job.copy_s = time.perf_counter() - began
        failpoints.hit("snapshot.copied")

    def _is_torn(self, slot: Slot, task: CopyTask, job: CopyJob) -> bool:
        """Check a background copy. If it is torn, the node copies at once from now on."""
        if task.digests is not None:
            try:
                job.torn_names = task.digests.find_torn(self._get_views(slot, task.plan).by_name)
            except Exception as error:
                self._copy_at_once(f"a snapshot is discarded, since it could not be digested: {error}", 0.0)
                raise
        if job.torn_names:
            change = f"{summarize_names(job.torn_names)} changed before optimizer.step() while it was copied"
            self._copy_at_once(f"a snapshot is discarded, since {change}", job.copy_s)
        return bool(job.torn_names)

    def _get_views(self, slot: Slot, plan: SnapshotPlan) -> SlotViews:
        key = (slot.index, slot.serial, plan.plan_id)
        if key not in self._views_by_slot:
            # A view of a replaced slot would keep all of its memory.
            live_slots = self._slots.list_live_slots()
            kept = {k: views for k, views in self._views_by_slot.items() if k[:2] in live_slots}
            self._cuda_streams.unpin_stale_slots(live_slots)
            self._views_by_slot = {**kept, key: SlotViews(slot, plan)}
        return self._views_by_slot[key]


def _select_host_pairs(
    targets: list[Tensor], sources: list[Tensor], devices: Collection[torch.device]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the pairs whose source is in host memory. Without ``devices`` that is all of them."""
    if not devices:
        return targets, sources
    pairs = [(t, s) for t, s in zip(targets, sources, strict=True) if not s.is_cuda]
    return [target for target, _ in pairs], [source for _, source in pairs]
