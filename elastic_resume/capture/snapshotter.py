"""Copy the state of one node into a slot while training continues.

At a step boundary::

    local leader                              each local rank
    takes a free slot
    writes buffers, scalars, position
    announces id and decided_id ──────────> starts copying its shard in a thread
                                              forward, backward
                                              optimizer.step() waits at the copy barrier for its shard
                                              marks its shard in the slot as copied

The slot is valid when all shards are in place; if a rank dies during its copy the slot never becomes valid.

Parameters and optimizer state are copied in the background, because only an optimizer step changes them.
All other tensors are copied at once, because the next forward pass may change them. The whole copy is
synchronous without a tracked optimizer, or after a step in which an optimizer ran no hook
(`copy_barrier`). A parameter that changes elsewhere between ``run.step()`` and ``optimizer.step()`` would
be copied half-changed; `verify_copies` finds that.

A `SnapshotPlan` holds what follows from the structure of the state: the layout, the static metadata and the
shards. Every local rank computes the same plan, and makes a new one only when a tensor is added, removed or
replaced.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.optim import Optimizer

from elastic_resume import __version__, failpoints
from elastic_resume.capture.copy_barrier import UNHOOKED_CHANGE_MESSAGE, CopyBarrier
from elastic_resume.capture.copy_engine import (
    CopyJob,
    CopyThread,
    CudaCopyStreams,
    copy_tensors,
    get_format,
    make_tensor_views,
    run_job,
    wait_until_mutable,
)
from elastic_resume.capture.state_cache import (
    StateTracker,
    StateView,
    share_equal,
    without_garbage_collection,
)
from elastic_resume.checkpoint.layout import Layout
from elastic_resume.checkpoint.manifest import Position
from elastic_resume.errors import UsageError
from elastic_resume.ranks.rank_context import RankContext
from elastic_resume.slots import slot_memory
from elastic_resume.slots.ipc import SlotClient
from elastic_resume.slots.slot_memory import Slot, encode_snapshot_id
from elastic_resume.state import state_dict
from elastic_resume.state.state_dict import REPLICATED, Leaf, digest_leaves, make_spec

logger = logging.getLogger(__name__)

# The local leader copies smaller states alone: another rank's thread would cost more than it saves.
MIN_BYTES_TO_SHARD = 32 << 20
MAX_VERSIONS_CHECKED = 64  # limit for one group; reading a version takes 60 ns
# The other local ranks finish the same step at about the same time, or have died.
PEER_TIMEOUT_S = 2.0
# Used for synchronous copies: the local leader may still evaluate before it ends the same step.
LONG_PEER_TIMEOUT_S = 60.0
POLL_S = 0.0002
SLOW_POLL_S = 0.005  # poll interval after PEER_TIMEOUT_S


class TensorGroup:
    """Tensors that are copied together. For 80,000 tensors new lists would take 40 ms of each step."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.leaves = tuple(leaves)
        self.tensors = [leaf.tensor for leaf in leaves]
        self.formats = share_equal(map(get_format, self.tensors))
        self._version_checked = self.leaves[:: 1 + len(self.leaves) // MAX_VERSIONS_CHECKED]
        self.devices = frozenset(tensor.device for tensor in self.tensors if tensor.is_cuda)

    def read_versions(self) -> list[int]:
        """Return the in-place version of a sample of the tensors."""
        return [0 if leaf.tensor.is_inference() else leaf.tensor._version for leaf in self._version_checked]  # noqa: SLF001

    def find_rewritten(self, versions: list[int], addresses: Collection[int] | None) -> list[str]:
        """Return names of tensors that were certainly changed: their version is not in ``versions`` any more.

        Only tensors at ``addresses`` are checked; None checks all.
        """
        rows = zip(self._version_checked, versions, self.read_versions(), strict=True)
        return [leaf.name for leaf, was, now in rows if was != now and _has_address(leaf, addresses)]

    def find_differing(
        self, copied_tensors: Mapping[str, Tensor], addresses: Collection[int] | None
    ) -> list[str]:
        """Return names of tensors whose bytes differ from ``copied_tensors``.

        Only tensors at ``addresses`` are checked; None checks all.
        """
        leaves = [leaf for leaf in self.leaves if _has_address(leaf, addresses)]
        copied = digest_leaves(replace(leaf, tensor=copied_tensors[leaf.name]) for leaf in leaves)
        return [name for name, now in digest_leaves(leaves).items() if now != copied[name]]


@dataclass(frozen=True)
class SnapshotPlan:
    """Layout and division of a snapshot."""

    layout: Layout
    static_metadata: bytes  # encoded JSON that is the same for all steps
    plan_id: int  # digest of layout, static metadata and division
    immediate: TensorGroup  # copied in run.step() by the local leader
    shards: tuple[TensorGroup, ...]  # one for each local rank, copied behind the copy barrier
    overlapped: TensorGroup  # the tensors of all shards

    def min_slot_bytes(self, dynamic_metadata: bytes) -> int:
        """Return the size that a slot must have at least."""
        return slot_memory.round_up_to_page(
            slot_memory.round_up_to_page(self.layout.total_bytes) + len(self.static_metadata)
        ) + len(dynamic_metadata)

    def as_single_shard(self) -> SnapshotPlan:
        """Return the same plan with everything in the local leader's shard."""
        return self if len(self.shards) == 1 else replace(self, shards=(self.overlapped,))


class SlotViews:
    """The tensors of a plan in one slot, and the targets of the groups that are copied again and again."""

    def __init__(self, slot: Slot, plan: SnapshotPlan) -> None:
        self.by_name = make_tensor_views(slot.memory, plan.layout)
        self._targets_by_group: dict[TensorGroup, list[Tensor]] = {}

    def get_targets(self, group: TensorGroup) -> list[Tensor]:
        """Return the targets of one of the plan's groups."""
        if group not in self._targets_by_group:
            self._targets_by_group[group] = self.find_targets(group.leaves)
        return self._targets_by_group[group]

    def find_targets(self, leaves: Iterable[Leaf]) -> list[Tensor]:
        """Return the targets of some leaves."""
        return [self.by_name[leaf.name] for leaf in leaves]


@dataclass(frozen=True)
class CopyTask:
    """One rank's share of one snapshot. ``slot`` is None until the local leader has announced it."""

    plan: SnapshotPlan
    slot: Slot | None
    snapshot_id: int
    shard: TensorGroup
    device_clones: list[tuple[str, Tensor]]  # clones of immediate tensors that are on devices
    start_events: dict[torch.device, Any]


@without_garbage_collection
def make_plan(state_view: StateView, base_metadata: Mapping[str, Any], shard_count: int) -> SnapshotPlan:
    """Plan a snapshot of ``state_view``, copied by ``shard_count`` local ranks.

    ``base_metadata`` is the static metadata without the state.
    """
    cached, leaves = state_view.cached, state_view.leaves
    layout = Layout.build([make_spec(leaf.name, leaf.tensor) for leaf in leaves])
    follows = [leaf.name for leaf in leaves if leaf.kind != REPLICATED]
    static_metadata = slot_memory.encode_metadata(
        {**base_metadata, "follows_rank0": follows, "state": cached.static_skeleton}
    )
    filled = [pair for pair in zip(cached.leaves, cached.may_overlap, strict=True) if pair[0].tensor.numel()]
    overlapped = [leaf for leaf, may_overlap in filled if may_overlap]
    if sum(leaf.tensor.nbytes for leaf in overlapped) < MIN_BYTES_TO_SHARD:
        shard_count = 1
    immediate = TensorGroup([leaf for leaf, may_overlap in filled if not may_overlap])
    whole = TensorGroup(overlapped)
    shards = (whole,) if shard_count == 1 else tuple(map(TensorGroup, _split_leaves(overlapped, shard_count)))
    # Each local rank divides the leaves itself. Every leaf is copied only if all ranks divide them alike, so
    # the division is part of the digest.
    division = "\n\n".join("\n".join(leaf.name for leaf in group.leaves) for group in (immediate, *shards))
    plan_id = xxhash.xxh3_64_intdigest(layout.header + static_metadata + division.encode()) | 1
    return SnapshotPlan(layout, static_metadata, plan_id, immediate, shards, whole)


def summarize_names(names: Sequence[str]) -> str:
    """Return the first name and the number of the others."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _has_address(leaf: Leaf, addresses: Collection[int] | None) -> bool:
    return addresses is None or leaf.tensor.data_ptr() in addresses


def _split_leaves(leaves: Sequence[Leaf], shard_count: int) -> list[list[Leaf]]:
    """Divide leaves into shards of about equal bytes: largest first, each to the smallest shard."""
    shards: list[list[Leaf]] = [[] for _ in range(shard_count)]
    sizes = [0] * shard_count
    for leaf in sorted(leaves, key=lambda leaf: -leaf.tensor.nbytes):
        smallest = sizes.index(min(sizes))
        shards[smallest].append(leaf)
        sizes[smallest] += leaf.tensor.nbytes
    return shards


class Snapshotter:
    """Takes this rank's part in its node's snapshots, in one generation."""

    def __init__(
        self, tracked: Mapping[str, Any], slot_client: SlotClient, context: RankContext, generation: int
    ) -> None:
        """Put the copy barrier before the steps of all tracked optimizers."""
        self._tracked = tracked
        self._tracker = StateTracker(tracked)
        self._slot_client = slot_client
        self._context = context
        self._generation = generation
        self._local_world_size = context.node_by_rank.count(context.node)
        self._cached_plan: tuple[tuple[Any, ...], SnapshotPlan] | None = None
        self._views_by_slot: dict[tuple[int, int, int], SlotViews] = {}
        self._cuda_streams = CudaCopyStreams()
        self._copy_thread = CopyThread()
        self._job: CopyJob | None = None
        self._digests: dict[str, str] = {}
        self._digested_leaves: tuple[state_dict.Leaf, ...] = ()  # leaves that _digests describes
        self._failed_plan_id = 0  # id of the plan whose shards did not all arrive
        self._is_sharded = False  # whether other ranks copy a shard of the newest snapshot
        self._device_clones: list[tuple[str, torch.Tensor]] = []
        self._torn_names: list[str] = []  # tensors that changed while they were copied
        self._failure_logged = False
        self._pid = os.getpid()
        optimizers = [item for item in tracked.values() if isinstance(item, Optimizer)]
        self._barrier: CopyBarrier[tuple[int, SnapshotPlan, list[int]]] = CopyBarrier(
            optimizers, self._wait_before_step
        )
        slot_client.control_block.set_copying(context.local_rank, 0)
        self.verify_copies = False
        self.stall_s = 0.0  # time that the newest snapshot has taken from the training thread
        self.cpu_s = 0.0  # CPU time of this rank's shard
        self.problem = ""  # why the newest snapshot failed; "" if it did not
        self.snapshot_id = 0  # id of the newest snapshot in which this rank took part

    def end_step(self, step: int) -> None:
        """End a step. Check the copy that ran during it if a hook did not run, and discard a torn one."""
        if (background_copy := self._barrier.end_step(step)) is None:
            return
        self.wait_for_copy()
        began = time.perf_counter()
        snapshot_id, plan, versions = background_copy
        addresses = self._barrier.unprotected_addresses
        shard = self._get_shard(plan)
        rewritten = shard.find_rewritten(versions, addresses)
        # Keeps the local leader from overwriting the slot.
        self._slot_client.control_block.set_copying(self._context.local_rank, snapshot_id)
        job = self._job = CopyJob(lambda _: self._check_unchanged(snapshot_id, plan, rewritten, addresses))
        # Device tensors must be read in the order of the training stream.
        run_job(job) if rewritten or shard.devices else self._copy_thread.submit(job)
        self.stall_s += time.perf_counter() - began
        if job.done.is_set():
            self.wait_for_copy()

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
        self.wait_for_copy()
        began = time.perf_counter()
        self._wait_for_previous()
        snapshot_id = encode_snapshot_id(self._generation, position.step, is_epoch_over=is_epoch_over)
        state_view = self._tracker.read_state()
        plan = self._get_plan(state_view)
        plan = plan.as_single_shard() if leader_only or self._failed_plan_id == plan.plan_id else plan
        slot = None
        if self._slot_client.is_local_leader:
            slot = self._fill_leader_part(
                state_view, plan, position, snapshot_id, commit_requested=commit_requested
            )
            if slot is None:
                return False
        elif len(plan.shards) <= self._context.local_rank:
            return False
        self._start_copy(plan, slot, snapshot_id)
        if self.verify_copies:
            self._digested_leaves = self._get_shard(plan).leaves
            self._digests = state_dict.digest_leaves(self._digested_leaves)
        self.snapshot_id, self._is_sharded = snapshot_id, len(plan.shards) > 1
        self.stall_s = time.perf_counter() - began
        return True

    def has_snapshot(self, position: Position, *, is_epoch_over: bool = False) -> bool:
        """Return whether the newest snapshot that was started is of that step."""
        return self.snapshot_id == encode_snapshot_id(
            self._generation, position.step, is_epoch_over=is_epoch_over
        )

    def wait_for_copy(self) -> None:
        """Wait until this rank's shard is copied. Return at once if no copy is running.

        Raises:
            UsageError: `verify_copies` is on, and state changed since the step boundary.

        """
        job = self._job
        if job is None or os.getpid() != self._pid:
            return
        began = time.perf_counter()
        self._job = None
        job.wait_until_done()
        self.stall_s += time.perf_counter() - began
        self._check_result(job)

    def wait_until_complete(self, timeout_s: float = PEER_TIMEOUT_S) -> bool:
        """Wait for all shards of the newest snapshot. Return whether the snapshot is valid."""
        self.wait_for_copy()
        limit = time.monotonic() + timeout_s
        while time.monotonic() < limit:
            slot = self._slot_client.find_slot(self.snapshot_id)
            if slot is None:
                return False
            if slot.record.complete_snapshot_id() == self.snapshot_id:
                return True
            if slot.record.has_failed_copy():
                return False
            time.sleep(POLL_S)
        return False

    def close(self) -> None:
        """Finish the running copy and remove the copy barrier."""
        if os.getpid() != self._pid:
            return
        self.wait_for_copy()
        self._barrier.close()
        self._copy_thread.close()
        self._cuda_streams.unpin_stale_slots()

    # ---- in the training thread ------------------------------------------------------------------------

    def _wait_before_step(self) -> None:
        job = self._job
        if job is None:
            return
        began = time.perf_counter()
        wait_until_mutable(job)
        self.stall_s += time.perf_counter() - began
        if self.verify_copies:
            self.wait_for_copy()

    def _get_plan(self, state_view: StateView) -> SnapshotPlan:
        uncached_formats = tuple(
            (leaf.name, leaf.tensor.dtype, leaf.tensor.shape) for leaf in state_view.uncached_leaves
        )
        key = (state_view.cached.version, uncached_formats)
        if self._cached_plan is None or self._cached_plan[0] != key:
            base_metadata = {
                "run_id": self._context.settings.run_id,
                "node": self._context.node,
                "rank": self._context.local_leader_by_node[self._context.node],
                "world_size": self._context.collectives.size,
                "writer": __version__,
            }
            shard_count = self._local_world_size if self._barrier.has_hooks else 1
            self._cached_plan = key, make_plan(state_view, base_metadata, shard_count)
            self._views_by_slot = {}
        return self._cached_plan[1]

    def _fill_leader_part(
        self,
        state_view: StateView,
        plan: SnapshotPlan,
        position: Position,
        snapshot_id: int,
        *,
        commit_requested: bool,
    ) -> Slot | None:
        """Take a slot and write the local leader's part. Return None if no slot is free."""
        control = self._slot_client.control_block
        dynamic_metadata = slot_memory.encode_metadata(
            slot_memory.dynamic_metadata(self._generation, position, time.time(), state_view.dynamic_skeleton)
        )
        slot = self._choose_slot(plan, dynamic_metadata, snapshot_id)
        # A peer that found the slot before it was taken may be writing into it.
        if slot is None or not slot.take(snapshot_id) or self._is_peer_behind(snapshot_id):
            control.set("decided_id", snapshot_id)
            return None
        failpoints.hit("snapshot.started")
        slot.write_metadata(
            plan.layout.header, plan.layout.total_bytes, plan.static_metadata, dynamic_metadata, plan.plan_id
        )
        self._copy_immediate(slot, plan, state_view.uncached_leaves)
        failpoints.hit("snapshot.written")
        slot.announce(snapshot_id, shard_count=len(plan.shards), commit_requested=commit_requested)
        control.set("decided_id", snapshot_id)
        if commit_requested:
            self._slot_client.send("request_commit", snapshot_id=snapshot_id)
        return slot

    def _choose_slot(self, plan: SnapshotPlan, dynamic_metadata: bytes, snapshot_id: int) -> Slot | None:
        if not self._wait_for_peers(snapshot_id):
            return None
        min_bytes = plan.min_slot_bytes(dynamic_metadata)
        states = self._slot_client.list_writable(min_bytes)
        if not states or self._slot_client.reserved_bytes < min_bytes:  # the first reservation was a guess
            needed = slot_memory.required_slot_bytes(
                plan.layout.total_bytes, len(plan.static_metadata), len(dynamic_metadata)
            )
            if needed > slot_memory.SMALL_SLOT_BYTES:
                self._slot_client.prepare_slots(needed)
            elif self._slot_client.reserve(needed):
                states = self._slot_client.list_writable(min_bytes)
        chosen = slot_memory.choose_overwritable(states, is_only_slot=self._slot_client.slot_count == 1)
        if chosen is None:
            self.problem = (
                "all slots are being committed" if states else "its memory is still being allocated"
            )
            return None
        self.problem = ""
        return self._slot_client.map_slot(chosen.index, chosen.serial)

    def _wait_for_previous(self) -> None:
        """Wait until the previous snapshot is complete, or one of its shards has failed."""
        if self._is_sharded and not self.wait_until_complete() and self._cached_plan is not None:
            # A local rank has another plan, or is late: the local leader copies everything from now on.
            self._failed_plan_id = self._cached_plan[1].plan_id
        self._is_sharded = False

    def _wait_for_peers(self, snapshot_id: int) -> bool:
        """Return whether no peer writes into an older slot any more. That slot might be taken next."""
        limit = time.monotonic() + PEER_TIMEOUT_S
        while self._is_peer_behind(snapshot_id):
            if time.monotonic() > limit:
                return False
            time.sleep(POLL_S)
        return True

    def _is_peer_behind(self, snapshot_id: int) -> bool:
        others = (rank for rank in range(self._local_world_size) if rank != self._context.local_rank)
        if not self._slot_client.control_block.is_copying_older(others, snapshot_id):
            return False
        self.problem = "a local rank is still copying its shard of the previous snapshot"
        return True

    def _copy_immediate(self, slot: Slot, plan: SnapshotPlan, uncached_leaves: Iterable[Leaf]) -> None:
        """Copy the tensors that the next forward pass may change; clone those on devices."""
        uncached = TensorGroup([leaf for leaf in uncached_leaves if leaf.tensor.numel()])
        views = self._get_views(slot, plan)
        for group, targets in (
            (plan.immediate, views.get_targets(plan.immediate)),
            (uncached, views.find_targets(uncached.leaves)),
        ):
            copy_tensors(*_select_host_pairs(targets, group.tensors, group.devices))
            on_device = [leaf for leaf in group.leaves if leaf.tensor.is_cuda] if group.devices else []
            self._device_clones += [(leaf.name, leaf.tensor.detach().clone()) for leaf in on_device]

    def _start_copy(self, plan: SnapshotPlan, slot: Slot | None, snapshot_id: int) -> None:
        """Copy this rank's shard: in the background if the copy barrier protects it, else now."""
        shard = self._get_shard(plan)
        clones, self._device_clones = self._device_clones, []
        devices = shard.devices.union(tensor.device for _, tensor in clones)
        task = CopyTask(
            plan, slot, snapshot_id, shard, clones, self._cuda_streams.record_start_events(devices)
        )
        self._slot_client.control_block.set_copying(
            self._context.local_rank, snapshot_id, awaiting_slot=slot is None
        )
        peer_timeout_s = PEER_TIMEOUT_S if self._barrier.all_hooks_ran else LONG_PEER_TIMEOUT_S
        job = self._job = CopyJob(lambda job: self._run_task(job, task), peer_timeout_s)
        self._copy_thread.submit(job) if self._barrier.has_hooks else run_job(job)
        if self._barrier.all_hooks_ran:
            self._barrier.set_background_copy((snapshot_id, plan, shard.read_versions()))
        else:
            job.wait_until_done()

    def _check_result(self, job: CopyJob) -> None:
        """Report how a copy ended. A failed copy costs a snapshot and never stops training."""
        if job.error is not None:
            self._report_failure(f"{type(job.error).__name__}: {job.error}"[:500])
            self._tracker = StateTracker(self._tracked)  # its cache may be stale
        torn, self._torn_names = self._torn_names, []
        if torn:
            self._is_sharded = False
            self._report_failure(UNHOOKED_CHANGE_MESSAGE.format(summarize_names(torn)))
        before, self._digests = self._digests, {}
        now = state_dict.digest_leaves(self._digested_leaves) if before else {}
        changed = [name for name, digest in before.items() if now.get(name) != digest]
        if changed:
            raise UsageError(
                f"{summarize_names(changed)} changed between run.step() and the next optimizer.step(), while "
                "a snapshot was copied: the snapshot would hold half of the change. Make all changes of a "
                "step before run.step(), or pass tensors that change elsewhere to er.resume() under a name "
                "of their own, not as optimizer state."
            )

    def _report_failure(self, problem: str) -> None:
        """Emit an event for a failed snapshot. Log the first one."""
        self.problem = problem
        self._context.events.emit("snapshot-failed", generation=self._generation, reason=problem)
        if not self._failure_logged:
            self._failure_logged = True
            logger.warning(
                f"rank {self._context.collectives.rank}: a snapshot failed ({problem}). Training continues; "
                "older snapshots are untouched."
            )

    def _get_shard(self, plan: SnapshotPlan) -> TensorGroup:
        rank = self._context.local_rank
        return plan.shards[rank] if rank < len(plan.shards) else TensorGroup(())

    # ---- in the thread ---------------------------------------------------------------------------------

    def _run_task(self, job: CopyJob, task: CopyTask) -> None:
        began = time.thread_time()
        rank, slot = self._context.local_rank, task.slot
        try:
            if slot is None:
                slot = self._wait_for_slot(task.snapshot_id, job)
                self._slot_client.control_block.set_copying(rank, task.snapshot_id)
            # Otherwise the local leader copies everything.
            if slot is not None and rank < slot.record.get("shard_count"):
                self._copy_into_slot(slot, task, job)
                slot.record.set_copied(rank, task.snapshot_id)
                failpoints.hit("snapshot.confirmed")
        except BaseException:
            if slot is not None:
                slot.record.set_copied(rank, slot_memory.COPY_FAILED)
            raise
        finally:
            self._slot_client.control_block.set_copying(rank, 0)
            self.cpu_s = time.thread_time() - began

    def _copy_into_slot(self, slot: Slot, task: CopyTask, job: CopyJob) -> None:
        if slot.record.get("plan_id") != task.plan.plan_id:
            raise RuntimeError(
                f"local rank {self._context.local_rank} tracks or freezes other tensors than local rank 0"
            )
        views = self._get_views(slot, task.plan)
        sources, targets, formats = task.shard.tensors, views.get_targets(task.shard), task.shard.formats
        if task.start_events:
            sources = sources + [tensor for _, tensor in task.device_clones]
            targets = targets + [views.by_name[name] for name, _ in task.device_clones]
            self._cuda_streams.pin_slot(slot)
            self._cuda_streams.enqueue_copies(targets, sources, task.start_events, job)
            targets, sources = _select_host_pairs(targets, sources, task.start_events)
            formats = []
        failpoints.hit("snapshot.copying")
        copy_tensors(targets, sources, formats=formats)
        job.sources_read.set()
        for _, event in job.copy_events:
            event.synchronize()
        failpoints.hit("snapshot.copied")

    def _check_unchanged(
        self, snapshot_id: int, plan: SnapshotPlan, rewritten: list[str], addresses: Collection[int] | None
    ) -> None:
        """Fail the snapshot if ``rewritten`` is not empty, or a tensor differs from its copy."""
        began, is_intact = time.thread_time(), False
        slot = self._slot_client.find_slot(snapshot_id)
        try:
            if slot is not None:
                copied_tensors = self._get_views(slot, plan).by_name
                self._torn_names = rewritten or self._get_shard(plan).find_differing(
                    copied_tensors, addresses
                )
            is_intact = not self._torn_names
        finally:
            if slot is not None and not is_intact:
                slot.record.set_copied(self._context.local_rank, slot_memory.COPY_FAILED)
            self._slot_client.control_block.set_copying(self._context.local_rank, 0)
            self.cpu_s += time.thread_time() - began

    def _wait_for_slot(self, snapshot_id: int, job: CopyJob) -> Slot | None:
        """Wait until the local leader announces the slot of ``snapshot_id``. Return None if it took none.

        The timeout begins only when training waits for the copy: the local leader may evaluate before its
        step ends.
        """
        control = self._slot_client.control_block
        began = time.monotonic()
        while control.get("decided_id") < snapshot_id:
            now = time.monotonic()
            if now > job.wait_started_at + job.peer_timeout_s:
                raise RuntimeError(
                    f"local rank 0 did not reach the same step within {job.peer_timeout_s:g} s"
                )
            time.sleep(POLL_S if now < began + PEER_TIMEOUT_S else SLOW_POLL_S)
        return self._slot_client.find_slot(snapshot_id)

    def _get_views(self, slot: Slot, plan: SnapshotPlan) -> SlotViews:
        key = (slot.index, slot.serial, plan.plan_id)
        if key not in self._views_by_slot:
            # A view of a replaced slot would keep all of its memory.
            states = self._slot_client.control_block.read_slots()
            live_slots = {(state.index, state.serial) for state in states}
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
