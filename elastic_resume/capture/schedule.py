"""When this node's state is copied to memory, and which of those copies go to disk.

The lead decides for its node, from what copies have cost so far, and says in the control block with which
step the next one comes: so the other ranks know it before they finish that step. Where there is no memory for
copies the lead writes the live state to disk itself, and training waits.

A disk that fails costs checkpoints, never training; the keeper says so.

Writes the live state straight to disk, for nodes that have no memory for a copy of it.

Training waits meanwhile. Needs one buffer, whatever the size of the state.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from elastic_resume import __version__, console, constants
from elastic_resume.capture.snapshotter import PEER_TIMEOUT_S, Snapshotter
from elastic_resume.checkpoint.layout import Layout
from elastic_resume.checkpoint.manifest import Manifest, Position
from elastic_resume.checkpoint.reader import allocate_memory
from elastic_resume.checkpoint.writer import CheckpointWriter, CommitResult, RetentionPolicy
from elastic_resume.errors import MachineError
from elastic_resume.policy import checkpoint_interval, divergence
from elastic_resume.policy.checkpoint_interval import SaveCost
from elastic_resume.policy.resume_plan import ResumePlan
from elastic_resume.restore import rank_context
from elastic_resume.restore.rank_context import RankContext
from elastic_resume.snapshot.slot_client import SlotClient
from elastic_resume.state import state_dict
from elastic_resume.state.state_dict import REPLICATED, FlatState
from elastic_resume.state.tensor_buffer import make_spec, view_bytes

BUFFER_BYTES = 16 << 20
_CHUNK_ELEMENTS = 1 << 20  # elements of a tensor that are brought to the host, or made contiguous, at a time


def build_layout(flat_state: FlatState) -> Layout:
    """Lay the state out as a checkpoint's image."""
    return Layout.build([make_spec(leaf.name, leaf.tensor) for leaf in flat_state.leaves])


def build_manifest(
    context: RankContext, flat_state: FlatState, layout: Layout, generation: int, position: Position
) -> Manifest:
    """Describe the image of ``flat`` as it is now."""
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
    """Yield the image of ``flat`` in pieces, in one buffer: each is valid until the next is asked for."""
    buffer = allocate_memory(BUFFER_BYTES)
    used = 0
    for source in _iter_tensor_bytes(flat_state, layout):
        rest = source
        while rest:
            piece, rest = rest[: BUFFER_BYTES - used], rest[BUFFER_BYTES - used :]
            buffer[used : used + len(piece)] = piece
            used += len(piece)
            if used == BUFFER_BYTES:
                yield buffer
                used = 0
    if used:
        yield buffer[:used]


def _iter_tensor_bytes(flat_state: FlatState, layout: Layout) -> Iterator[memoryview]:
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
                here = piece.cpu().contiguous()
                yield view_bytes(here)


NEVER = 1 << 62
METADATA_HEADROOM_BYTES = 1 << 18  # beside a state whose notes are not known yet
WARM_UP_SNAPSHOTS = 3  # snapshots that are dearer than all later ones: each slot's first
SMOOTHING_WEIGHT = 0.3  # weight of the newest measurement


class SnapshotScheduler:
    """Takes this rank's part in its node's copies, in one generation."""

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
        """``saved_step`` is the step that this node already holds a checkpoint of (0 when none).

        ``busy`` tells those who look for hangs that training waits for the disk.
        """
        settings = context.settings
        self.saved_step = saved_step  # of the newest copy that is on disk, or on its way
        self.committed_path: Path | None = None  # of the last commit that this process has waited for
        self.snapshotter = Snapshotter(tracked, slot_client, context, plan.generation)
        self.total_stall_s = 0.0  # that training has waited for copies, in this generation
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
        # Nodes compare through their agents, and one node has nobody to compare with.
        self._compares_replicas = (
            constants.ENV_AGENT_PID in os.environ and len(context.local_leader_by_node) > 1
        )
        if not context.is_local_leader:
            return
        # A process of its own keeps the shelf too; of ours only what is streamed goes there.
        self._checkpoint_writer = CheckpointWriter(context.node_dir, settings.run_id, context.events.emit)
        order = (plan.source_generation, plan.step)
        # What came from memory or from a peer says nothing of a copy that this node's disk may hold.
        trusted = order if plan.kind == "checkpoint" and saved_step >= 0 else None
        terms = RetentionPolicy(plan.min_generation, trusted, settings.keep)
        self._checkpoint_writer.start_generation(terms)
        slot_client.send(
            "start_generation", floor=terms.min_generation, trusted=terms.trusted_version, keep=terms.keep
        )
        slot_client.control_block.set("decided_id", 0)
        slot_client.control_block.set(
            "next_snapshot_step", NEVER if settings.snapshot_every.is_off else plan.step + 1
        )

    def reserve_memory(self, state_bytes: int) -> None:
        """Have memory taken for a state of that size before the first snapshot needs it. For the lead."""
        if self._slot_client.is_local_leader:
            # Slots that a resume has filled, or an earlier generation, are not made anew for a guess.
            there = [
                slot.capacity
                for slot in self._slot_client.control_block.read_slots()
                if slot.capacity > state_bytes
            ]
            self._slot_client.prepare_slots(
                min(there, default=state_bytes + state_bytes // 64 + METADATA_HEADROOM_BYTES),
                is_estimate=True,
            )

    def after_step(self, position: Position, *, may_save: bool = True, epoch_over: bool = False) -> None:
        """Take what is due at this step boundary.

        ``may_save``: whether it may go to disk. ``epoch_over``: all else that the epoch does is done too.

        Raises:
            UntrackableError: an object has come to hold state that cannot be stored.

        """
        with self._count_stall():
            self.snapshotter.end_step(position.step)
            self._take_due_snapshot(position, may_save=may_save, epoch_over=epoch_over)

    def _take_due_snapshot(self, position: Position, *, may_save: bool, epoch_over: bool) -> None:
        control, step = self._slot_client.control_block, position.step
        self._update_costs()
        if not self._slot_client.is_local_leader:
            # The lead may have been here already, and have announced the one after.
            if not epoch_over and (
                step >= control.get("next_snapshot_step") or self.snapshotter.is_decided(position)
            ):
                self.snapshotter.start_snapshot(position)
            return
        save = may_save and self._is_save_due(step)
        announced = control.get("next_snapshot_step")
        if self._slot_client.slot_count <= 1 or self._context.settings.snapshot_every.is_off:
            if announced != NEVER:
                control.set("next_snapshot_step", NEVER)
                self.snapshotter.announce_skip(position)
            if save and self._slot_client.slot_count == 0:
                self._write_directly(position)
            elif save:
                self._start_snapshot(position, epoch_over=epoch_over, commit_requested=True, leader_only=True)
        else:
            compare = self._is_comparison_due(step) and not epoch_over
            if step >= announced or announced == NEVER or save or compare or epoch_over:
                # The others know of no other steps than those that were announced.
                alone = epoch_over or step < announced
                self._start_snapshot(
                    position, epoch_over=epoch_over, commit_requested=save, leader_only=alone
                )
                control.set("next_snapshot_step", step + 1 if epoch_over else self._next_snapshot_step(step))
                if compare and self.snapshotter.has_snapshot(position):
                    world = rank_context.assigned_generation() or self._generation
                    self._slot_client.send("compare", snapshot_id=self.snapshotter.snapshot_id, world=world)
        self._step_started_at = time.perf_counter()

    def save(self, position: Position, *, epoch_over: bool = False) -> Path | None:
        """Commit the state now and wait for the disk. For the lead.

        None where the disk refuses, which is told, and where this generation has begun with that step.
        """
        with self._count_stall():
            return self._save_and_wait(position, epoch_over=epoch_over)

    def _save_and_wait(self, position: Position, *, epoch_over: bool) -> Path | None:
        if position.step == self._loaded_step and not epoch_over:
            return None
        if self._slot_client.slot_count == 0 or not self._ensure_snapshot(position, epoch_over=epoch_over):
            self._write_directly(position)
            return self.committed_path
        answer = self._slot_client.commit(self.snapshotter.snapshot_id)
        self.committed_path = Path(answer["path"]) if answer.get("path") else None
        if self.committed_path is not None:
            self.saved_step, self._last_save_at = position.step, time.monotonic()
        return self.committed_path

    def has_saved(self, position: Position) -> bool:
        """Whether the newest `save` has brought that step to disk, or it was there when all began."""
        return position.step == self._loaded_step or self.committed_path is not None

    def preserve(self, position: Position, *, epoch_over: bool = False) -> None:
        """Hold the state of this step somewhere that outlives this process. For the lead."""
        with self._count_stall():
            if self._slot_client.slot_count == 0 or not self._ensure_snapshot(
                position, epoch_over=epoch_over
            ):
                self._write_directly(position)

    def close(self) -> None:
        """Finish what is being copied."""
        self.snapshotter.close()

    # ---- inside ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _count_stall(self) -> Iterator[None]:
        """Count what training waits here, and what it has waited before its optimizer since the last time."""
        began = time.perf_counter()
        self.total_stall_s += max(0.0, self.snapshotter.stall_s - self._counted_stall_s)
        try:
            yield
        finally:
            self._counted_stall_s = self.snapshotter.stall_s
            self.total_stall_s += time.perf_counter() - began

    def _ensure_snapshot(self, position: Position, *, epoch_over: bool) -> bool:
        """Have a whole snapshot of this very step, taking one where there is none; whether there is."""
        limit = time.monotonic() + PEER_TIMEOUT_S
        while time.monotonic() < limit:
            if (
                self.snapshotter.has_snapshot(position, epoch_over=epoch_over)
                and self.snapshotter.wait_until_complete()
            ):
                return True
            if self.snapshotter.start_snapshot(position, epoch_over=epoch_over, leader_only=True):
                return self.snapshotter.wait_until_complete()
            time.sleep(0.005)  # all slots are being read, or are being made
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
        """Whether the other nodes tell of this step too; see `policy.divergence`."""
        if not self._compares_replicas:
            return False
        digest_s = self._slot_client.control_block.get("digest_cpu_us") / 1e6 or None
        if digest_s is not None and self._snapshot_cost_s is not None:
            digest_s += self._snapshot_cost_s * self._cpu_count  # of the snapshot, which may be made for it
        gap = divergence.digest_interval_steps(
            self._context.settings.check_replicas, cost_s=digest_s, step_s=self._step_s, cores=self._cpu_count
        )
        return divergence.is_digest_due(step, gap)

    def _next_snapshot_step(self, step: int) -> int:
        """The step of the next snapshot."""
        every = self._context.settings.snapshot_every
        if self.snapshotter.problem:
            return step + 1
        gap = checkpoint_interval.snapshot_interval_steps(
            every, step_s=self._step_s, cost_s=self._snapshot_cost_s, mtbf_s=self._mtbf_s
        )
        return checkpoint_interval.next_snapshot_step(step, gap)

    def _update_costs(self) -> None:
        """Take the time of the step that has just ended, and of what the last snapshot has cost."""
        if self._step_started_at is not None:
            took = time.perf_counter() - self._step_started_at
            self._step_s = _smooth(self._step_s, took)
        if self._snapshot_count > WARM_UP_SNAPSHOTS:
            cost = self.snapshotter.stall_s + self.snapshotter.cpu_s / self._cpu_count
            self._snapshot_cost_s = _smooth(self._snapshot_cost_s, cost)

    def _write_directly(self, position: Position) -> None:
        """Write the live state to disk, and wait for it."""
        with self._waiting_for_disk():
            self._write_checkpoint(position)

    def _write_checkpoint(self, position: Position) -> None:
        flat = state_dict.flatten(self._tracked)
        layout = build_layout(flat)
        manifest = build_manifest(self._context, flat, layout, self._generation, position)
        try:
            put = self._checkpoint_writer.commit(manifest, iter_state_chunks(flat, layout))
        except MachineError as error:
            console.say(
                f"node {self._context.node}: step {position.step} was not saved: {error} "
                "Training goes on; older checkpoints are untouched."
            )
            self.committed_path = None
        else:
            self._checkpoint_writer.prune()
            self._last_direct_write = put
            self.committed_path, self.saved_step = (put.path if put else None), position.step
        self._last_save_at = time.monotonic()


def _smooth(mean: float | None, newest: float) -> float:
    return newest if mean is None else (1 - SMOOTHING_WEIGHT) * mean + SMOOTHING_WEIGHT * newest


def _read_mtbf_s() -> float:
    """Seconds between failures, as the agent has seen them."""
    try:
        return float(os.environ[constants.ENV_MTBF_S])
    except (KeyError, ValueError):
        return checkpoint_interval.ASSUMED_MTBF_S
