"""Decide at each step boundary whether to take a snapshot, and whether to commit it to disk.

The local leader decides for its node, from the measured cost of earlier copies. It stores the step of the
next snapshot in the control block, so the other local ranks know it before they finish that step. On a
node without memory for snapshots the local leader writes the live state to disk itself, and training
waits.

A failing disk costs checkpoints but never stops training; the committer logs the failure.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from elastic_resume import __version__, constants
from elastic_resume.capture.snapshotter import PEER_TIMEOUT_S, Snapshotter
from elastic_resume.checkpoint.layout import Layout
from elastic_resume.checkpoint.manifest import Manifest, Position
from elastic_resume.checkpoint.writer import CheckpointWriter, CommitResult, RetentionPolicy
from elastic_resume.console import ByteProgress
from elastic_resume.errors import MachineError
from elastic_resume.policy import checkpoint_interval, digests
from elastic_resume.policy.checkpoint_interval import SaveCost
from elastic_resume.policy.resume_plan import ResumePlan
from elastic_resume.ranks import rank_context
from elastic_resume.ranks.rank_context import RankContext
from elastic_resume.slots.ipc import SlotClient
from elastic_resume.slots.slot_memory import encode_snapshot_id
from elastic_resume.state import state_dict
from elastic_resume.state.state_dict import REPLICATED, FlatState, make_spec, view_bytes

logger = logging.getLogger(__name__)

NEVER = 1 << 62  # a step
METADATA_HEADROOM_BYTES = 1 << 18  # reserved for metadata while its size is unknown
WARM_UP_SNAPSHOTS = 3  # the first snapshot in each slot is slower than all later ones
SMOOTHING_WEIGHT = 0.3  # weight of the newest measurement
_CHUNK_ELEMENTS = 1 << 20  # elements of a tensor that are copied or made contiguous at a time


def build_layout(flat_state: FlatState) -> Layout:
    """Lay out the state as the image of a checkpoint."""
    return Layout.build([make_spec(leaf.name, leaf.tensor) for leaf in flat_state.leaves])


def build_manifest(
    context: RankContext, flat_state: FlatState, layout: Layout, generation: int, position: Position
) -> Manifest:
    """Describe the image of ``flat_state`` as it is now."""
    return Manifest(
        run_id=context.settings.run_id,
        node=context.node,
        rank=context.collectives.rank,
        world_size=context.collectives.size,
        generation=generation,
        position=position,
        written_at=time.time(),
        writer=__version__,
        state=flat_state.skeleton,
        follows_rank0=tuple(leaf.name for leaf in flat_state.leaves if leaf.kind != REPLICATED),
        file_bytes=layout.total_bytes,
    )


def iter_state_chunks(flat_state: FlatState, layout: Layout) -> Iterator[memoryview]:
    """Yield the image of ``flat_state`` in pieces, each valid until the next one is requested."""
    yield memoryview(layout.header)
    by_name = {leaf.name: leaf.tensor for leaf in flat_state.leaves}
    for name, extent in layout.extents.items():
        if extent.stop == extent.start:
            continue
        tensor = by_name[name].detach()
        if tensor.is_contiguous() and not tensor.is_cuda:
            yield view_bytes(tensor)
            continue
        rows = tensor.reshape(1, -1) if tensor.is_contiguous() or tensor.dim() == 0 else tensor
        for row in rows:
            for piece in (row.reshape(-1) if row.dim() else row.reshape(1)).split(_CHUNK_ELEMENTS):
                on_host = piece.cpu().contiguous()  # the view does not keep it alive
                yield view_bytes(on_host)


class SnapshotScheduler:
    """Schedules this rank's snapshots and commits in one generation."""

    def __init__(
        self,
        context: RankContext,
        plan: ResumePlan,
        saved_step: int,
        tracked: Mapping[str, Any],
        slot_client: SlotClient,
        *,
        waiting_for_disk: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        """Start the generation on this node, which already holds a checkpoint of ``saved_step`` (0: none).

        ``waiting_for_disk`` tells the hang detector that training waits for the disk.
        """
        settings = context.settings
        self.saved_step = saved_step  # step of the newest commit, requested or done
        self.committed_path: Path | None = None  # path of the last commit that this process waited for
        self.snapshotter = Snapshotter(tracked, slot_client, context, plan.generation)
        self.total_stall_s = 0.0  # time that training waited for copies in this generation
        self._counted_stall_s = 0.0
        self._loaded_step = saved_step
        self._waiting_for_disk = waiting_for_disk
        self._context = context
        self._tracked = tracked
        self._slot_client = slot_client
        self._generation = plan.generation
        self._mtbf_s = _read_mtbf_s()
        self._cpu_count = float(len(os.sched_getaffinity(0)))
        self._last_save_at = time.monotonic()
        self._step_started_at: float | None = None
        self._step_s: float | None = None
        self._snapshot_cost_s: float | None = None
        self._save_stall_s: float | None = None
        self._snapshot_count = 0
        self._last_direct_write: CommitResult | None = None
        has_agent = constants.ENV_AGENT_PID in os.environ  # nodes compare replicas through their agents
        self._compares_replicas = has_agent and len(context.local_leader_by_node) > 1
        if not context.is_local_leader:
            return
        # Only _write_directly uses it. The committer makes all other commits.
        self._checkpoint_writer = CheckpointWriter(context.node_dir, settings.run_id, context.events.emit)
        version = (plan.source_generation, plan.step)
        # State loaded from memory or a peer does not verify a checkpoint on this disk.
        trusted_version = version if plan.kind == "resumed" and saved_step >= 0 else None
        retention = RetentionPolicy(trusted_version, settings.keep)
        self._checkpoint_writer.start_generation(retention)
        slot_client.send("start_generation", trusted=retention.trusted_version, keep=retention.keep)
        slot_client.control_block.set("decided_id", 0)
        slot_client.control_block.set(
            "next_snapshot_step", NEVER if settings.snapshot_every.is_off else plan.step + 1
        )

    def reserve_memory(self, state_bytes: int) -> None:
        """Prepare slots for ``state_bytes`` before the first snapshot needs them. Local leader only."""
        if self._slot_client.is_local_leader:
            # The size is an estimate: slots filled by a restore or an earlier generation are kept.
            states = self._slot_client.control_block.read_slots()
            capacities = [slot.capacity for slot in states if slot.capacity > state_bytes]
            default = state_bytes + state_bytes // 64 + METADATA_HEADROOM_BYTES
            self._slot_client.prepare_slots(min(capacities, default=default), is_estimate=True)

    def after_step(self, position: Position, *, may_save: bool = True, epoch_over: bool = False) -> None:
        """Take the snapshot and the commit that are due at this step boundary.

        ``may_save`` allows a commit. ``epoch_over`` says that everything else that the epoch does is done
        too.

        Raises:
            UntrackableError: an object has come to hold state that cannot be stored.

        """
        with self._count_stall():
            self.snapshotter.end_step(position.step)
            self._take_due_snapshot(position, may_save=may_save, epoch_over=epoch_over)

    def _take_due_snapshot(self, position: Position, *, may_save: bool, epoch_over: bool) -> None:
        control, step = self._slot_client.control_block, position.step
        snapshot_id = encode_snapshot_id(self._generation, step)
        self._update_costs()
        if not self._slot_client.is_local_leader:
            # The local leader may have passed this step already and announced the next snapshot.
            is_decided = control.get("decided_id") == snapshot_id
            if not epoch_over and (is_decided or step >= control.get("next_snapshot_step")):
                self.snapshotter.start_snapshot(position)
            return
        save = may_save and self._is_save_due(step)
        announced = control.get("next_snapshot_step")
        if self._slot_client.slot_count <= 1 or self._context.settings.snapshot_every.is_off:
            if announced != NEVER:
                control.set("next_snapshot_step", NEVER)
                control.set("decided_id", snapshot_id)  # the other local ranks must not wait for it
            if save and self._slot_client.slot_count == 0:
                self._write_directly(position)
            elif save:
                self._start_snapshot(position, epoch_over=epoch_over, commit_requested=True, leader_only=True)
        else:
            compare = self._is_comparison_due(step) and not epoch_over
            if step >= announced or announced == NEVER or save or compare or epoch_over:
                # The other local ranks know announced steps only.
                leader_only = epoch_over or step < announced
                self._start_snapshot(
                    position, epoch_over=epoch_over, commit_requested=save, leader_only=leader_only
                )
                control.set("next_snapshot_step", step + 1 if epoch_over else self._next_snapshot_step(step))
                if compare and self.snapshotter.has_snapshot(position):
                    world = rank_context.assigned_generation() or self._generation
                    self._slot_client.send("compare", snapshot_id=self.snapshotter.snapshot_id, world=world)
        self._step_started_at = time.perf_counter()

    def save(self, position: Position, *, epoch_over: bool = False) -> Path | None:
        """Commit the state now and wait for the disk. Local leader only.

        Return None if the disk refuses, which is logged, or if this generation began with that step.
        """
        with self._count_stall():
            if position.step == self._loaded_step and not epoch_over:
                return None
            if not self._ensure_snapshot(position, epoch_over=epoch_over):
                self._write_directly(position)
                return self.committed_path
            path = self._slot_client.commit(self.snapshotter.snapshot_id).get("path")
            self.committed_path = Path(path) if path else None
            if path:
                self.saved_step, self._last_save_at = position.step, time.monotonic()
            return self.committed_path

    def has_saved(self, position: Position) -> bool:
        """Return whether the newest `save` committed that step, or this generation began with it."""
        return position.step == self._loaded_step or self.committed_path is not None

    def preserve(self, position: Position, *, epoch_over: bool = False) -> None:
        """Keep the state of this step after this process ends. Local leader only."""
        with self._count_stall():
            if not self._ensure_snapshot(position, epoch_over=epoch_over):
                self._write_directly(position)

    def close(self) -> None:
        """Finish the running copy."""
        self.snapshotter.close()

    @contextlib.contextmanager
    def _count_stall(self) -> Iterator[None]:
        """Count the time spent here, and the waits at the copy barrier since the last call."""
        began = time.perf_counter()
        self.total_stall_s += max(0.0, self.snapshotter.stall_s - self._counted_stall_s)
        try:
            yield
        finally:
            self._counted_stall_s = self.snapshotter.stall_s
            self.total_stall_s += time.perf_counter() - began

    def _ensure_snapshot(self, position: Position, *, epoch_over: bool) -> bool:
        """Return whether a complete snapshot of this step exists, after taking one if necessary."""
        limit = time.monotonic() + PEER_TIMEOUT_S
        while self._slot_client.slot_count and time.monotonic() < limit:
            if (
                self.snapshotter.has_snapshot(position, epoch_over=epoch_over)
                and self.snapshotter.wait_until_complete()
            ):
                return True
            if self.snapshotter.start_snapshot(position, epoch_over=epoch_over, leader_only=True):
                return self.snapshotter.wait_until_complete()
            time.sleep(0.005)  # every slot is being read or created
        return False

    def _start_snapshot(
        self, position: Position, *, epoch_over: bool, commit_requested: bool, leader_only: bool
    ) -> None:
        if not self.snapshotter.start_snapshot(
            position, epoch_over=epoch_over, commit_requested=commit_requested, leader_only=leader_only
        ):
            return
        self._snapshot_count += 1
        if commit_requested:
            self.saved_step, self._last_save_at = position.step, time.monotonic()
            self._save_stall_s = self.snapshotter.stall_s

    def _is_save_due(self, step: int) -> bool:
        control = self._slot_client.control_block
        cost = None
        if self._last_direct_write is not None:
            cost = SaveCost(self._last_direct_write.seconds, self._last_direct_write.seconds)
        elif self._save_stall_s is not None:
            commit_s, cpu_s = control.get("commit_us") / 1e6, control.get("commit_cpu_us") / 1e6
            cost = SaveCost(self._save_stall_s, commit_s, cpu_s, self._cpu_count)
        return checkpoint_interval.is_save_due(
            self._context.settings.save_every,
            step=step,
            last_saved_step=self.saved_step,
            elapsed_s=time.monotonic() - self._last_save_at,
            cost=cost,
            mtbf_s=self._mtbf_s,
        ) and not any(slot.needs_commit for slot in control.read_slots())

    def _is_comparison_due(self, step: int) -> bool:
        """Return whether all nodes compare their replicas at this step; see `policy.digests`."""
        if not self._compares_replicas:
            return False
        digest_s = self._slot_client.control_block.get("digest_cpu_us") / 1e6 or None
        if digest_s is not None and self._snapshot_cost_s is not None:
            digest_s += self._snapshot_cost_s * self._cpu_count  # the snapshot may be taken only for it
        gap = digests.digest_interval_steps(
            self._context.settings.check_replicas, cost_s=digest_s, step_s=self._step_s, cores=self._cpu_count
        )
        return digests.is_digest_due(step, gap)

    def _next_snapshot_step(self, step: int) -> int:
        every = self._context.settings.snapshot_every
        if self.snapshotter.problem:
            return step + 1
        gap = checkpoint_interval.snapshot_interval_steps(
            every, step_s=self._step_s, cost_s=self._snapshot_cost_s, mtbf_s=self._mtbf_s
        )
        return checkpoint_interval.next_snapshot_step(step, gap)

    def _update_costs(self) -> None:
        """Measure the step that has just ended and the cost of the last snapshot."""
        if self._step_started_at is not None:
            self._step_s = _smooth(self._step_s, time.perf_counter() - self._step_started_at)
        if self._snapshot_count > WARM_UP_SNAPSHOTS:
            cost = self.snapshotter.stall_s + self.snapshotter.cpu_s / self._cpu_count
            self._snapshot_cost_s = _smooth(self._snapshot_cost_s, cost)

    def _write_directly(self, position: Position) -> None:
        """Write the live state to disk while training waits."""
        with self._waiting_for_disk():
            flat_state = state_dict.flatten(self._tracked)
            layout = build_layout(flat_state)
            manifest = build_manifest(self._context, flat_state, layout, self._generation, position)
            try:
                what = f"writing the checkpoint of step {position.step}"
                with ByteProgress(what, layout.total_bytes) as progress:
                    chunks = progress.track(iter_state_chunks(flat_state, layout))
                    result = self._checkpoint_writer.commit(manifest, chunks)
            except MachineError as error:
                logger.warning(
                    f"node {self._context.node}: step {position.step} was not saved: {error} "
                    "Training continues; older checkpoints are untouched."
                )
                self.committed_path = None
            else:
                self._checkpoint_writer.prune()
                self._last_direct_write = result
                self.committed_path, self.saved_step = (result.path if result else None), position.step
            self._last_save_at = time.monotonic()


def _smooth(mean: float | None, newest: float) -> float:
    return newest if mean is None else (1 - SMOOTHING_WEIGHT) * mean + SMOOTHING_WEIGHT * newest


def _read_mtbf_s() -> float:
    """Return the mean time between failures that the agent measured, in seconds."""
    try:
        return float(os.environ[constants.ENV_MTBF_S])
    except (KeyError, ValueError):
        return checkpoint_interval.ASSUMED_MTBF_S
