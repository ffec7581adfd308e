"""Snapshots: the state copied into memory that outlives this process, while training goes on.

At a step boundary the lead of the node takes a slot, writes what the next forward pass may change (buffers,
scalars, the position) at once, and says in the control block where the snapshot goes. All local ranks
then copy their shares of parameters and optimizer state in a thread, while forward and backward run. A hook
before ``optimizer.step()`` waits until this rank's share is copied: the fence. A slot counts when every
share is in place; one that somebody died over never does.

Without a tracked optimizer, or after a step in which one ran no hook (`barrier`), the copy is synchronous.
What changes parameters otherwise, between ``run.step()`` and ``optimizer.step()``, would be copied half:
`verify` finds that.

Does not know when (`saver`) nor what becomes of a snapshot (the keeper).

What a snapshot of a given structure looks like: its layout, its notes, and who copies what.

Made anew only when a tensor comes, goes or is replaced. Every local rank makes the same one for itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.optim import Optimizer

from elastic_resume import __version__, console, failpoints
from elastic_resume.capture.copy_barrier import UNHOOKED_CHANGE_MESSAGE, CopyBarrier
from elastic_resume.capture.copy_engine import (
    CopyJob,
    CopyThread,
    CudaCopyStreams,
    copy_tensors,
    make_tensor_views,
    run_job,
    wait_until_mutable,
)
from elastic_resume.capture.state_cache import StateTracker, StateView, without_garbage_collection
from elastic_resume.checkpoint.layout import Layout
from elastic_resume.checkpoint.manifest import Position
from elastic_resume.errors import UsageError
from elastic_resume.restore.rank_context import RankContext
from elastic_resume.snapshot import slots
from elastic_resume.snapshot.slot_client import SlotClient
from elastic_resume.snapshot.slots import Slot, encode_snapshot_id
from elastic_resume.state import state_dict
from elastic_resume.state.state_dict import REPLICATED, Leaf, digest_leaves
from elastic_resume.state.tensor_buffer import make_spec

# Below this the lead copies all: another rank's thread would cost more than its share takes.
MIN_BYTES_TO_SHARD = 32 << 20
MAX_VERSIONS_CHECKED = 64  # of so many tensors the version is looked at, for it takes 60 ns each


class TensorGroup:
    """Tensors that are copied together. What can be known of them ahead of a copy is worked out once.

    At 80,000 tensors that is 40 ms of each step: lists of names and tensors, where each tensor is, and
    where in a slot it goes.
    """

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.leaves = tuple(leaves)
        self.tensors = [leaf.tensor for leaf in leaves]
        self._version_checked = self.leaves[:: 1 + len(self.leaves) // MAX_VERSIONS_CHECKED]
        self.devices = frozenset(tensor.device for tensor in self.tensors if tensor.is_cuda)
        self._targets_by_slot: dict[tuple[int, int], list[Tensor]] = {}

    def get_targets(self, slot: Slot, get_views: Callable[[], Mapping[str, Tensor]]) -> list[Tensor]:
        """Where the tensors go in ``slot``; ``views`` gives its tensors by name, and is asked once."""
        key = (slot.index, slot.serial)
        if key not in self._targets_by_slot:
            by_name = get_views()
            self._targets_by_slot[key] = [by_name[leaf.name] for leaf in self.leaves]
        return self._targets_by_slot[key]

    def read_versions(self) -> list[int]:
        """How often some of the tensors, all over the share, have been changed in place."""
        return [0 if leaf.tensor.is_inference() else leaf.tensor._version for leaf in self._version_checked]  # noqa: SLF001

    def find_rewritten(self, versions: list[int], addresses: Collection[int] | None) -> list[str]:
        """Name those whose version is not among the ``versions`` any more: for certain changed.

        ``among``: addresses of those to look at; None: all.
        """
        both = zip(self._version_checked, versions, self.read_versions(), strict=True)
        return [leaf.name for leaf, was, now in both if was != now and _has_address(leaf, addresses)]

    def find_differing(
        self, copied_tensors: Mapping[str, Tensor], addresses: Collection[int] | None
    ) -> list[str]:
        """Name those that are not as they are in ``views``, all bytes of which are read; see `rewritten`."""
        leaves = [leaf for leaf in self.leaves if _has_address(leaf, addresses)]
        copied = digest_leaves(replace(leaf, tensor=copied_tensors[leaf.name]) for leaf in leaves)
        return [name for name, now in digest_leaves(leaves).items() if now != copied[name]]

    def drop_stale_slots(self, live_slots: Collection[tuple[int, int]]) -> None:
        """Let go of slots that are not among those (index, serial): else their memory stays."""
        self._targets_by_slot = {
            key: found for key, found in self._targets_by_slot.items() if key in live_slots
        }


@dataclass(frozen=True)
class SnapshotPlan:
    """The plan of a snapshot.

    ``number`` stands for layout, static notes and who copies what. ``at_once`` is copied in ``run.step()`` by
    the lead; ``shares`` by local rank, behind the fence.
    """

    layout: Layout
    static_metadata: bytes
    plan_id: int
    immediate: TensorGroup
    shards: tuple[TensorGroup, ...]
    overlapped: TensorGroup

    def preferred_slot_bytes(self, dynamic_metadata: bytes) -> int:
        """Bytes that a slot should have."""
        return slots.required_slot_bytes(
            self.layout.total_bytes, len(self.static_metadata), len(dynamic_metadata)
        )

    def min_slot_bytes(self, dynamic_metadata: bytes) -> int:
        """Bytes that a slot must have at least."""
        return slots.round_up_to_page(
            slots.round_up_to_page(self.layout.total_bytes) + len(self.static_metadata)
        ) + len(dynamic_metadata)

    def as_single_shard(self) -> SnapshotPlan:
        """Give the same, with all of it the lead's."""
        return self if len(self.shards) == 1 else replace(self, shards=(self.overlapped,))

    def drop_stale_slots(self, live_slots: Collection[tuple[int, int]]) -> None:
        """See `Share.forget`."""
        for share in (self.immediate, self.overlapped, *self.shards):
            share.drop_stale_slots(live_slots)


@dataclass(frozen=True)
class CopyTask:
    """What a rank copies of one snapshot. ``slot`` None: the lead has still to say which."""

    plan: SnapshotPlan
    slot: Slot | None
    snapshot_id: int
    shard: TensorGroup
    device_clones: list[tuple[str, Tensor]]  # on devices, of what is copied at once
    start_events: dict[torch.device, Any]


@without_garbage_collection
def make_plan(state_view: StateView, base_metadata: Mapping[str, Any], shard_count: int) -> SnapshotPlan:
    """Plan a snapshot of what is seen.

    Args:
        sight: of the tracker.
        about: the static notes without state (see `note`).
        parts: how many local ranks share the copying.

    """
    fixed = state_view.cached
    leaves = (*fixed.leaves, *state_view.uncached_leaves)
    layout = Layout.build([make_spec(leaf.name, leaf.tensor) for leaf in leaves])
    follows = [leaf.name for leaf in leaves if leaf.kind != REPLICATED]
    static = slots.encode_metadata(
        {**base_metadata, "follows_rank0": follows, "state": fixed.static_skeleton}
    )
    filled = [pair for pair in zip(fixed.leaves, fixed.may_overlap, strict=True) if pair[0].tensor.numel()]
    later = [leaf for leaf, overlapped in filled if overlapped]
    if sum(tensor_nbytes(leaf.tensor) for leaf in later) < MIN_BYTES_TO_SHARD:
        shard_count = 1
    at_once = TensorGroup([leaf for leaf, overlapped in filled if not overlapped])
    whole = TensorGroup(later)
    shares = (whole,) if shard_count == 1 else tuple(map(TensorGroup, _split_leaves(later, shard_count)))
    # Local ranks find for themselves what has to be copied at once, by what they have seen of it: only if all
    # have found the same is everything copied by somebody.
    split = "\n\n".join("\n".join(leaf.name for leaf in share.leaves) for share in (at_once, *shares))
    number = xxhash.xxh3_64_intdigest(layout.header + static + split.encode()) | 1
    return SnapshotPlan(layout, static, number, at_once, shares, whole)


def tensor_nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def summarize_names(names: Sequence[str]) -> str:
    """Name the first, and say how many more there are."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _has_address(leaf: Leaf, addresses: Collection[int] | None) -> bool:
    return addresses is None or leaf.tensor.data_ptr() in addresses


def _split_leaves(leaves: Sequence[Leaf], shard_count: int) -> list[list[Leaf]]:
    """Deal leaves out so that shares are about equal in bytes: the largest first, to whoever has least."""
    shares: list[list[Leaf]] = [[] for _ in range(shard_count)]
    sizes = [0] * shard_count
    for leaf in sorted(leaves, key=lambda leaf: -tensor_nbytes(leaf.tensor)):
        part = sizes.index(min(sizes))
        shares[part].append(leaf)
        sizes[part] += tensor_nbytes(leaf.tensor)
    return shares


# The other local ranks finish the same step at about the same time, or are gone.
PEER_TIMEOUT_S = 2.0
# Where training waits for the copy at once, the lead may still evaluate before it ends the same step.
LONG_PEER_TIMEOUT_S = 60.0
POLL_S = 0.0002
SLOW_POLL_S = 0.005  # when it takes longer


class Snapshotter:
    """This rank's part in its node's snapshots, in one generation."""

    def __init__(
        self, tracked: Mapping[str, Any], slot_client: SlotClient, context: RankContext, generation: int
    ) -> None:
        """Put the fence before every tracked optimizer's step."""
        self._tracked = tracked
        self._tracker = StateTracker(tracked)
        self._slot_client = slot_client
        self._context = context
        self._generation = generation
        self._local_world_size = context.node_by_rank.count(context.node)
        self._cached_plan: tuple[tuple[Any, ...], SnapshotPlan] | None = None
        self._tensor_views: dict[tuple[int, int, int], dict[str, torch.Tensor]] = {}
        self._cuda_streams = CudaCopyStreams()
        self._copy_thread = CopyThread()
        self._job: CopyJob | None = None
        self._digests: dict[str, str] = {}
        self._digested_leaves: tuple[state_dict.Leaf, ...] = ()  # whose prints those are
        self._failed_plan_id = 0  # number of the sheet whose shares did not come together
        self._is_sharded = False  # whether others have a share in the newest snapshot
        self._device_clones: list[tuple[str, torch.Tensor]] = []
        self._torn_names: list[str] = []  # what has changed while it was copied
        self._failure_logged = False
        self._pid = os.getpid()
        optimizers = [item for item in tracked.values() if isinstance(item, Optimizer)]
        self._barrier: CopyBarrier[tuple[int, SnapshotPlan, list[int]]] = CopyBarrier(
            optimizers, self._wait_before_step
        )
        slot_client.control_block.set_copying(context.local_rank, 0)
        self.verify_copies = False
        self.stall_s = 0.0  # that the newest snapshot has cost the training thread so far
        self.cpu_s = 0.0  # of processors, for this rank's share of it
        self.problem = ""  # why the newest one did not come about
        self.snapshot_id = 0  # the newest mark that this rank has taken part in

    def end_step(self, step: int) -> None:
        """End a step. What was copied during it, and has changed without the barrier, counts no more."""
        if (behind := self._barrier.end_step(step)) is None:
            return
        self.wait_for_copy()
        began = time.perf_counter()
        (mark, sheet, versions), among = behind, self._barrier.unprotected_addresses
        share = self._get_shard(sheet)
        rewritten = share.find_rewritten(versions, among)
        self._slot_client.control_block.set_copying(
            self._context.local_rank, mark
        )  # so nobody takes the slot
        job = self._job = CopyJob(lambda _: self._check_unchanged(mark, sheet, rewritten, among))
        # A device is read in the training stream's turn; what lies on the host while training goes on.
        run_job(job) if rewritten or share.devices else self._copy_thread.submit(job)
        self.stall_s += time.perf_counter() - began
        if job.done.is_set():
            self.wait_for_copy()

    def start_snapshot(
        self,
        position: Position,
        *,
        epoch_over: bool = False,
        commit_requested: bool = False,
        leader_only: bool = False,
    ) -> bool:
        """Begin a snapshot at a step boundary; whether one was begun, which the lead decides.

        ``want``: the keeper is to commit it. ``epoch_over``: see `slots.mark_of`. ``alone``: the lead does
        not count on the other local ranks, which need not be at the same step.

        Raises:
            UntrackableError: an object has come to hold state that cannot be stored.

        """
        self.wait_for_copy()
        began = time.perf_counter()
        self._wait_for_previous()
        mark = encode_snapshot_id(self._generation, position.step, epoch_ended=epoch_over)
        sight = self._tracker.read_state()
        sheet = self._get_plan(sight)
        sheet = sheet.as_single_shard() if leader_only or self._failed_plan_id == sheet.plan_id else sheet
        if self._slot_client.is_local_leader:
            slot = self._fill_leader_part(sight, sheet, position, mark, commit_requested=commit_requested)
            if slot is None:
                return False
        elif len(sheet.shards) <= self._context.local_rank:
            return False
        else:
            slot = None
        self._start_copy(sheet, slot, mark)
        if self.verify_copies:
            self._digested_leaves = self._get_shard(sheet).leaves
            self._digests = state_dict.digest_leaves(self._digested_leaves)
        self.snapshot_id, self._is_sharded = mark, len(sheet.shards) > 1
        self.stall_s = time.perf_counter() - began
        return True

    def has_snapshot(self, position: Position, *, epoch_over: bool = False) -> bool:
        """Whether the newest snapshot that was begun is of that step."""
        return self.snapshot_id == encode_snapshot_id(self._generation, position.step, epoch_ended=epoch_over)

    def is_decided(self, position: Position) -> bool:
        """Whether the lead has decided about a snapshot of that step."""
        return self._slot_client.control_block.get("decided_id") == encode_snapshot_id(
            self._generation, position.step
        )

    def announce_skip(self, position: Position) -> None:
        """Tell the other local ranks that there is none of that step: they may be waiting. For the lead."""
        self._slot_client.control_block.set("decided_id", encode_snapshot_id(self._generation, position.step))

    def wait_for_copy(self) -> None:
        """Wait until this rank's share is in place; nothing to do where none is being copied.

        Raises:
            UsageError: `verify` is on, and state was changed since the step boundary.

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
        """Wait until the newest snapshot counts, all shares of it; whether it does."""
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
        """Finish what is being copied; take the fence away."""
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
        live = tuple((leaf.name, leaf.tensor.dtype, leaf.tensor.shape) for leaf in state_view.uncached_leaves)
        key = (state_view.cached.version, live)
        if self._cached_plan is None or self._cached_plan[0] != key:
            about = {
                "run_id": self._context.settings.run_id,
                "node": self._context.node,
                "rank": self._context.local_leader_by_node[self._context.node],
                "world_size": self._context.collectives.size,
                "writer": __version__,
            }
            self._cached_plan = (
                key,
                make_plan(state_view, about, self._local_world_size if self._barrier.has_hooks else 1),
            )
            self._tensor_views = {}
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
        """Take a slot and write the lead's part of it; None where no slot is free."""
        control = self._slot_client.control_block
        moving = slots.dynamic_metadata(self._generation, position, time.time(), state_view.dynamic_skeleton)
        dynamic = slots.encode_metadata(moving)
        slot = self._choose_slot(plan, dynamic, snapshot_id)
        if slot is not None:
            slot.record.set("target", 0)
            # One that had found its slot before that word was taken away may be writing into this very one.
            slot = None if self._is_peer_behind(snapshot_id) else slot
        if slot is None:
            control.set("decided_id", snapshot_id)
            return None
        record = slot.record
        failpoints.hit("snapshot.started")
        slot.write_metadata(
            plan.layout.header, plan.layout.total_bytes, plan.static_metadata, dynamic, plan.plan_id
        )
        self._copy_immediate(
            slot, plan, TensorGroup([leaf for leaf in state_view.uncached_leaves if leaf.tensor.numel()])
        )
        failpoints.hit("snapshot.written")
        record.set("parts", len(plan.shards))
        record.set("commit_requested", snapshot_id if commit_requested else 0)
        record.set("target", snapshot_id)
        control.set("decided_id", snapshot_id)
        if commit_requested:
            self._slot_client.send("request_commit", snapshot_id=snapshot_id)
        return slot

    def _choose_slot(self, plan: SnapshotPlan, dynamic_metadata: bytes, snapshot_id: int) -> Slot | None:
        if not self._wait_for_peers(snapshot_id):
            return None
        least = plan.min_slot_bytes(dynamic_metadata)
        states = self._slot_client.list_writable(least)
        if (
            not states or self._slot_client.reserved_bytes < least
        ):  # of what was guessed at first nobody may know
            needed = plan.preferred_slot_bytes(dynamic_metadata)
            if needed > slots.SMALL_SLOT_BYTES:
                self._slot_client.prepare_slots(needed)
            elif self._slot_client.reserve(needed):
                states = self._slot_client.list_writable(least)
        chosen = slots.choose_overwritable(states, is_only_slot=self._slot_client.slot_count == 1)
        if chosen is None:
            self.problem = "all slots are being saved" if states else "memory is still being taken for it"
            return None
        self.problem = ""
        return self._slot_client.map_slot(chosen.index, chosen.serial)

    def _wait_for_previous(self) -> None:
        """No rank starts on the next slot before the last one is complete, or a share of it has failed."""
        if self._is_sharded and not self.wait_until_complete() and self._cached_plan is not None:
            # A local rank shares the copying otherwise, or is late: the lead copies all from now on.
            self._failed_plan_id = self._cached_plan[1].plan_id
        self._is_sharded = False

    def _wait_for_peers(self, snapshot_id: int) -> bool:
        """Whether nobody writes into an older slot any more: it might be the next to be taken."""
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
        self.problem = "a local rank still copies its share of the one before"
        return True

    def _copy_immediate(self, slot: Slot, plan: SnapshotPlan, uncached: TensorGroup) -> None:
        """Copy what the next forward pass may change; on a device into a copy there, which is quick."""
        for share in (plan.immediate, uncached):
            targets = share.get_targets(slot, lambda: self._get_views(slot, plan)) if share.tensors else []
            if not share.devices:
                copy_tensors(targets, share.tensors)
                continue
            near = [(t, s) for t, s in zip(targets, share.tensors, strict=True) if not s.is_cuda]
            copy_tensors([t for t, _ in near], [s for _, s in near])
            far = [leaf for leaf in share.leaves if leaf.tensor.is_cuda]
            self._device_clones += [(leaf.name, leaf.tensor.detach().clone()) for leaf in far]

    def _start_copy(self, plan: SnapshotPlan, slot: Slot | None, snapshot_id: int) -> None:
        """Copy this rank's share: behind the fence where there is one, else now."""
        share = self._get_shard(plan)
        clones, self._device_clones = self._device_clones, []
        devices = share.devices.union(tensor.device for _, tensor in clones)
        task = CopyTask(
            plan, slot, snapshot_id, share, clones, self._cuda_streams.record_start_events(devices)
        )
        self._slot_client.control_block.set_copying(
            self._context.local_rank, snapshot_id, awaiting_slot=slot is None
        )
        patience_s = PEER_TIMEOUT_S if self._barrier.all_hooks_ran else LONG_PEER_TIMEOUT_S
        job = self._job = CopyJob(lambda job: self._run_task(job, task), patience_s)
        self._copy_thread.submit(job) if self._barrier.has_hooks else run_job(job)
        if self._barrier.all_hooks_ran:
            self._barrier.set_background_copy((snapshot_id, plan, share.read_versions()))
        else:
            job.wait_until_done()

    def _check_result(self, job: CopyJob) -> None:
        """See how a copy ended. One that failed costs a snapshot and not the training."""
        if job.error is not None:
            self._report_failure(f"{type(job.error).__name__}: {job.error}"[:500])
            self._tracker = StateTracker(self._tracked)  # it may have overlooked something
        torn, self._torn_names = self._torn_names, []
        if torn:
            self._is_sharded = False
            self._report_failure(UNHOOKED_CHANGE_MESSAGE.format(summarize_names(torn)))
        prints, self._digests = self._digests, {}
        now = state_dict.digest_leaves(self._digested_leaves) if prints else {}
        changed = [name for name, was in prints.items() if now.get(name) != was]
        if changed:
            raise UsageError(
                f"{summarize_names(changed)} changed between run.step() and the next optimizer.step(), while it was "
                "being copied: a snapshot would hold half of the change. Make all changes of a step before "
                "run.step(), or track what changes elsewhere under a name of its own, not as optimizer state."
            )

    def _report_failure(self, problem: str) -> None:
        """Write an event for a snapshot that failed; tell people of the first."""
        self.problem = problem
        self._context.events.emit("snapshot-failed", generation=self._generation, reason=problem)
        if not self._failure_logged:
            self._failure_logged = True
            text = f"a snapshot failed ({problem}). Training goes on; older copies are untouched."
            console.say(f"rank {self._context.collectives.rank}: {text}")

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
            if slot is not None and rank < slot.record.get("parts"):  # else the lead has decided otherwise
                self._copy_into_slot(slot, task, job)
                slot.record.set_copied(rank, task.snapshot_id)
                failpoints.hit("snapshot.confirmed")
        except BaseException:
            if slot is not None:
                slot.record.set_copied(rank, slots.COPY_FAILED)
            raise
        finally:
            self._slot_client.control_block.set_copying(rank, 0)
            self.cpu_s = time.thread_time() - began

    def _copy_into_slot(self, slot: Slot, task: CopyTask, job: CopyJob) -> None:
        if slot.record.get("layout") != task.plan.plan_id:
            raise RuntimeError(
                f"local rank {self._context.local_rank} tracks or freezes other tensors than local rank 0"
            )
        sources, targets = task.shard.tensors, []
        if sources:
            targets = task.shard.get_targets(slot, lambda: self._get_views(slot, task.plan))
        if task.start_events:
            by_name = self._get_views(slot, task.plan)
            sources = sources + [tensor for _, tensor in task.device_clones]
            targets = targets + [by_name[name] for name, _ in task.device_clones]
            self._cuda_streams.pin_slot(slot)
            self._cuda_streams.enqueue_copies(targets, sources, task.start_events, job)
            near = [(t, s) for t, s in zip(targets, sources, strict=True) if not s.is_cuda]
            targets, sources = [t for t, _ in near], [s for _, s in near]
        failpoints.hit("snapshot.copying")
        copy_tensors(targets, sources)
        job.sources_read.set()
        for _, event in job.copy_events:
            event.synchronize()
        failpoints.hit("snapshot.copied")

    def _check_unchanged(
        self, snapshot_id: int, plan: SnapshotPlan, rewritten: list[str], addresses: Collection[int] | None
    ) -> None:
        """Let the snapshot fail if something is ``rewritten``, or differs from what was copied."""
        began, holds = time.thread_time(), False
        slot = self._slot_client.find_slot(snapshot_id)
        try:
            if slot is not None:
                self._torn_names = rewritten or self._get_shard(plan).find_differing(
                    self._get_views(slot, plan), addresses
                )
            holds = not self._torn_names
        finally:
            if slot is not None and not holds:
                slot.record.set_copied(self._context.local_rank, slots.COPY_FAILED)
            self._slot_client.control_block.set_copying(self._context.local_rank, 0)
            self.cpu_s += time.thread_time() - began

    def _wait_for_slot(self, snapshot_id: int, job: CopyJob) -> Slot | None:
        """Wait for the lead's word about ``mark``: a slot, or that there is none.

        Patience ends only when training waits for it: the lead may evaluate before it ends its step.
        """
        control = self._slot_client.control_block
        began = time.monotonic()
        while control.get("decided_id") < snapshot_id:
            now = time.monotonic()
            if now > job.wait_started_at + job.peer_timeout_s:
                raise RuntimeError(
                    f"local rank 0 has not come to the same step within {job.peer_timeout_s:g} s"
                )
            time.sleep(POLL_S if now < began + PEER_TIMEOUT_S else SLOW_POLL_S)
        return self._slot_client.find_slot(snapshot_id)

    def _get_views(self, slot: Slot, plan: SnapshotPlan) -> dict[str, torch.Tensor]:
        key = (slot.index, slot.serial, plan.plan_id)
        found = self._tensor_views.get(key)
        if found is None:
            # Views of slots that are no more would keep their memory, all of it.
            alive = {(state.index, state.serial) for state in self._slot_client.control_block.read_slots()}
            self._tensor_views = {at: kept for at, kept in self._tensor_views.items() if at[:2] in alive}
            plan.drop_stale_slots(alive)
            self._cuda_streams.unpin_stale_slots(alive)
            found = self._tensor_views[key] = make_tensor_views(slot.memory, plan.layout)
        return found
