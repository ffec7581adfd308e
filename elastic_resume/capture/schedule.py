"""Take the snapshots, commits and comparisons that are due at each step boundary.

The local leader decides for its node (`decide_actions`), from the measured cost of earlier copies. It
stores the step of the next snapshot in the control block (a page of memory that the node's processes share),
so the other local ranks know it before they finish that step. With a sharded model all local ranks take a
snapshot together: one that becomes due within a step is announced, and taken at the end of the next step.

A failing disk costs checkpoints but never stops training; the committer logs the failure.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from elastic_resume import constants, grace
from elastic_resume.capture.direct_write import DirectWriter
from elastic_resume.capture.slot_access import PEER_TIMEOUT_S
from elastic_resume.capture.snapshotter import Snapshotter
from elastic_resume.checkpoint.manifest import Position
from elastic_resume.checkpoint.writer import RetentionPolicy
from elastic_resume.errors import MachineError, UsageError
from elastic_resume.mechanisms.mechanism import ReadingCosts
from elastic_resume.mechanisms.registry import READERS
from elastic_resume.policy import checkpoint_interval
from elastic_resume.policy.checkpoint_interval import SaveCost, StepBoundary, decide_actions
from elastic_resume.policy.restart import may_drained_worker_end
from elastic_resume.policy.resume_plan import ResumePlan
from elastic_resume.ranks import rank_context
from elastic_resume.ranks.rank_context import RankContext
from elastic_resume.slots import slot_memory
from elastic_resume.slots.ipc import SlotClient
from elastic_resume.slots.slot_memory import encode_snapshot_id

logger = logging.getLogger(__name__)

NEVER = 1 << 62  # a step
WARM_UP_SNAPSHOTS = 3  # the first snapshot in each slot is slower than all later ones
SMOOTHING_WEIGHT = 0.3  # weight of the newest measurement
SAVE_WARNING_S = 15.0  # before waiting counts as a hang


class CostMeter:
    """Measures what a step and a snapshot cost, and how long training waited."""

    def __init__(self, snapshotter: Snapshotter) -> None:
        self.total_stall_s = 0.0  # time that training waited for copies and commits
        self.step_s: float | None = None
        self.snapshot_cost_s: float | None = None
        self.cpu_count = float(len(os.sched_getaffinity(0)))
        self.snapshot_count = 0
        self._snapshotter = snapshotter
        self._counted_stall_s = 0.0
        self.step_started_at: float | None = None

    @contextlib.contextmanager
    def count_stall(self) -> Iterator[None]:
        """Count the time spent here, and the waits at the copy barrier since the last call."""
        began = time.perf_counter()
        self.total_stall_s += max(0.0, self._snapshotter.stall_s - self._counted_stall_s)
        try:
            yield
        finally:
            self._counted_stall_s = self._snapshotter.stall_s
            self.total_stall_s += time.perf_counter() - began

    def start_step(self) -> None:
        """Measure the next step from here."""
        self.step_started_at = time.perf_counter()

    def end_step(self) -> None:
        """Measure the step that has just ended and the cost of the last snapshot."""
        if self.step_started_at is not None:
            self.step_s = _smooth(self.step_s, time.perf_counter() - self.step_started_at)
        if self.snapshot_count > WARM_UP_SNAPSHOTS:
            cost = self._snapshotter.stall_s + self._snapshotter.cpu_s / self.cpu_count
            self.snapshot_cost_s = _smooth(self.snapshot_cost_s, cost)


class SnapshotScheduler:
    """Schedules this rank's snapshots and commits in one generation."""

    def __init__(
        self,
        context: RankContext,
        plan: ResumePlan,
        checkpoint_step: int,
        tracked: Mapping[str, Any],
        slot_client: SlotClient,
        *,
        waiting_for_disk: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        """Start the generation on this node, which holds a checkpoint of ``checkpoint_step``.

        It is 0 after a cold start, and -1 if this node's disk lacks the state.

        Within ``waiting_for_disk`` training waits for the disk, which is no hang.
        """
        settings = context.settings
        self._committed_path: Path | None = None  # of the last commit that this process waited for
        self.snapshotter = Snapshotter(tracked, slot_client, context, plan.generation, plan.ways_back)
        # Each local rank holds other shards of the state, so it takes part in every snapshot.
        self.is_sharded = self.snapshotter.is_sharded
        self.meter = CostMeter(self.snapshotter)
        self._committed_step = self._loaded_step = checkpoint_step  # of the newest commit, requested or done
        self._before_request: tuple[int, float] | None = None  # step and time of the commit before
        self._context = context
        self._slot_client = slot_client
        self._generation = plan.generation
        self._mtbf_s = _read_mtbf_s()
        self._last_commit_at = time.monotonic()
        self._commit_stall_s: float | None = None  # what the last commit cost the training thread
        self._is_end_known = False  # by all nodes, at the last step boundary of a drained worker
        self._has_peers = constants.ENV_AGENT_PID in os.environ and len(context.local_leader_by_node) > 1
        version = (plan.source_generation, plan.step)
        # State loaded from memory or a peer does not verify a checkpoint on this disk.
        trusted_version = version if plan.kind == "resumed" and checkpoint_step >= 0 else None
        retention = RetentionPolicy(trusted_version, settings.keep)
        self._direct_writer = DirectWriter(context, plan, tracked, retention, waiting_for_disk)
        if context.is_local_leader:
            slot_client.send("start_generation", trusted_version=trusted_version, keep=settings.keep)
            slot_client.control_block.set("decided_id", 0)
            self._announce(None if settings.snapshot_every.is_off else plan.step + 1)

    def reserve_memory(self, state_bytes: int) -> None:
        """Prepare slots for ``state_bytes`` before the first snapshot needs them. Local leader only."""
        if self._slot_client.is_local_leader:
            # The size is an estimate: slots filled by a restore or an earlier generation are kept.
            states = self._slot_client.control_block.read_slots()
            capacities = [slot.capacity for slot in states if slot.capacity > state_bytes]
            default = slot_memory.estimate_slot_bytes(state_bytes)
            self._slot_client.prepare_slots(min(capacities, default=default), is_estimate=True)

    def after_step(
        self,
        position: Position,
        *,
        may_commit: bool = True,
        is_epoch_over: bool = False,
        is_drained: bool = False,
    ) -> None:
        """Take the snapshot and the commit that are due at this step boundary.

        ``is_epoch_over``: the script's work after the epoch's last batch is done too. ``is_drained``: the
        node leaves as soon as all of its ranks have taken a snapshot.

        Raises:
            UntrackableError: an object has come to hold state that cannot be stored.

        """
        with self.meter.count_stall():
            self.meter.end_step()
            if self._slot_client.is_local_leader:
                self._act_as_leader(
                    position, may_commit=may_commit, is_epoch_over=is_epoch_over, is_drained=is_drained
                )
                self.meter.start_step()
            elif self._is_snapshot_expected(position.step, is_epoch_over=is_epoch_over):
                self.snapshotter.start_snapshot(position, is_epoch_over=is_epoch_over)

    def _is_snapshot_expected(self, step: int, *, is_epoch_over: bool) -> bool:
        """Return whether the local leader may take a snapshot of this step with this rank.

        See `StepBoundary.is_expected`. The local leader may have ended this step, and announced a later one.
        """
        if is_epoch_over:
            return self.is_sharded
        control, snapshot_id = self._slot_client.control_block, encode_snapshot_id(self._generation, step)
        return control.get("decided_id") == snapshot_id or step >= control.get("next_snapshot_step")

    def _act_as_leader(
        self, position: Position, *, may_commit: bool, is_epoch_over: bool, is_drained: bool
    ) -> None:
        step, client = position.step, self._slot_client
        if self._before_request is not None:
            self.snapshotter.wait_for_copy()
            if self.snapshotter.copy_problem:  # the snapshot to commit has failed, so a commit is due again
                self._committed_step, self._last_commit_at = self._before_request
            self._before_request = None
        if self.is_sharded and not client.slot_count:
            raise MachineError(
                f"node {self._context.node} has no memory for a snapshot, and a sharded model can only be "
                "saved from one. Raise ELASTIC_RESUME_SNAPSHOT_MEMORY, or free memory on the node."
            )
        announced = client.control_block.get("next_snapshot_step")
        boundary = StepBoundary(
            step=step,
            announced_step=announced if announced != NEVER else None,
            slot_count=client.slot_count,
            snapshots_off=self._context.settings.snapshot_every.is_off,
            is_commit_due=may_commit and self._is_commit_due(step),
            is_reading_due=self._is_reading_due(step),
            is_epoch_over=is_epoch_over,
            is_sharded=self.is_sharded,
            is_drained=is_drained,
            is_end_planned=self._is_end_planned(),
        )
        actions = decide_actions(boundary)
        if boundary.is_expected and not actions.takes_snapshot:
            # The other local ranks get no slot: end their waiting.
            snapshot_id = encode_snapshot_id(self._generation, step, is_epoch_over=is_epoch_over)
            client.control_block.set("decided_id", snapshot_id)
        if actions.writes_directly:
            self._write_directly(position)
        if actions.takes_snapshot and self.snapshotter.start_snapshot(
            position,
            is_epoch_over=is_epoch_over,
            commit_requested=actions.commits,
            leader_only=actions.leader_only,
        ):
            self.meter.snapshot_count += 1
            if actions.commits:
                self._before_request = self._committed_step, self._last_commit_at
                self._committed_step, self._last_commit_at = step, time.monotonic()
                self._commit_stall_s = self.snapshotter.stall_s
        # Only now: a local rank that ends this step late must find its snapshot announced, or decided.
        if actions.announces_next_step or (actions.announces and is_epoch_over):
            self._announce(step + 1)
        elif actions.announces:
            self._announce(self._next_snapshot_step(step))
        elif not boundary.takes_snapshots:
            self._announce(None)
        self._announce_requested_commit(step)
        if actions.is_read and self.snapshotter.has_snapshot(position):
            generation = rank_context.assigned_generation() or self._generation
            client.send("offer", snapshot_id=self.snapshotter.snapshot_id, generation=generation)

    def _is_end_planned(self) -> bool:
        """Return whether the view is to end, so that every step is to have a snapshot."""
        return self._has_peers and self._slot_client.control_block.get("planned_end_ms") > 0

    def may_end(self, requested_at: float) -> bool:
        """Return whether a drained worker may end at this step boundary.

        If there is time, it first trains on until the other nodes take a snapshot of each step. With a
        sharded model they begin at one boundary, and take the first one at the next. The drain was requested
        at ``requested_at`` of the monotonic clock.
        """
        is_off = self._context.settings.snapshot_every.is_off or self._slot_client.slot_count < 2
        if is_off or not self._has_peers:
            return True
        until_ms = self._slot_client.control_block.get("planned_end_ms")
        is_known = may_drained_worker_end(
            time.monotonic(),
            requested_at,
            announced_at=until_ms / 1000 if until_ms else None,
            left_s=grace.find_left_s(requested_at) or 0.0,
            step_s=self.meter.step_s or 0.0,
            snapshot_s=self.meter.snapshot_cost_s or 0.0,
            boundaries=2 if self.is_sharded else 1,
        )
        was_known, self._is_end_known = self._is_end_known, is_known
        return is_known and (was_known or not self.is_sharded)

    def _announce(self, step: int | None) -> None:
        """Tell the other local ranks the step of the next snapshot."""
        self._slot_client.control_block.set("next_snapshot_step", NEVER if step is None else step)

    def _announce_requested_commit(self, step: int) -> None:
        """Have all local ranks take part in the snapshot of the step that all nodes commit.

        It is later than the next step, which another rank may end before it reads this.
        """
        control = self._slot_client.control_block
        if step + 1 < control.get("commit_step") < control.get("next_snapshot_step"):
            self._announce(control.get("commit_step"))

    def commit(
        self, position: Position, *, is_epoch_over: bool = False, of_this_generation: bool = False
    ) -> Path | None:
        """Commit the state now. Return the checkpoint's path on the local leader, which waits for the disk.

        With a sharded model every rank of the job calls it, after `await_all_ranks`. Return None on
        the other ranks, if the disk refuses, which is logged, and if this generation began with that step,
        unless the checkpoint must be ``of_this_generation``.
        """
        self._committed_path = None
        with self.meter.count_stall():
            if position.step == self._loaded_step and not is_epoch_over and not of_this_generation:
                return None
            has_snapshot = self._ensure_snapshot(position, is_epoch_over=is_epoch_over)
            if not self._slot_client.is_local_leader:
                return None
            if not has_snapshot:
                self._write_directly(position)
            elif path := self._slot_client.commit(self.snapshotter.snapshot_id).get("path"):
                self._committed_path = Path(path)
                self._committed_step, self._last_commit_at = position.step, time.monotonic()
            return self._committed_path

    def await_all_ranks(self, step: int) -> None:
        """With a sharded model wait until all ranks of the job save, as some may evaluate for longer.

        Raises:
            UsageError: another rank saves another step.

        """
        if not self.is_sharded:
            return
        advice = "each rank of a sharded model has to call it, at the same step, and not rank 0 alone"
        text = (
            f"rank {self._context.collectives.rank} waits in run.save() or run.close() for others: {advice}."
        )
        warning = threading.Timer(SAVE_WARNING_S, logger.warning, [text])
        warning.daemon = True
        warning.start()
        try:
            _, calls = self._context.run_and_gather(lambda: (None, {"saves": step}))
        finally:
            warning.cancel()
        if any(call != {"saves": step} for call in calls):
            raise UsageError(f"run.save: other ranks do not save step {step}: {advice}.")

    def has_committed(self, position: Position) -> bool:
        """Return whether the newest `commit` committed that step, or this generation began with it.

        With a sharded model all ranks call it, and it is false if one node has not: then all ranks
        have to commit again.
        """
        has_own = position.step == self._loaded_step or self._committed_path is not None
        has_own = has_own or not self._context.is_local_leader
        return all(self._context.collectives.gather(has_own)) if self.is_sharded else has_own

    def keep_state(self, position: Position, *, is_epoch_over: bool = False) -> None:
        """Keep the state of this step after this process ends. Local leader only."""
        with self.meter.count_stall():
            if not self._ensure_snapshot(position, is_epoch_over=is_epoch_over):
                self._write_directly(position)

    def close(self) -> None:
        """Finish the running copy."""
        self.snapshotter.close()

    def _ensure_snapshot(self, position: Position, *, is_epoch_over: bool) -> bool:
        """Return whether a complete snapshot of this step exists, after taking one if necessary."""
        limit = time.monotonic() + PEER_TIMEOUT_S
        while self._slot_client.slot_count and time.monotonic() < limit:
            if self.has_kept(position, is_epoch_over=is_epoch_over):
                return True
            if self.snapshotter.start_snapshot(
                position, is_epoch_over=is_epoch_over, leader_only=not self.is_sharded
            ):
                is_complete = self.snapshotter.wait_until_complete()
                if is_complete or not self.is_sharded:
                    return is_complete
            time.sleep(0.005)  # every slot is being read or created
        return False

    def has_kept(self, position: Position, *, is_epoch_over: bool) -> bool:
        """Return whether a complete snapshot of this step exists. It may still be copied: wait for that."""
        is_newest = self.snapshotter.has_snapshot(position, is_epoch_over=is_epoch_over)
        return is_newest and self.snapshotter.wait_until_complete()

    def _write_directly(self, position: Position) -> None:
        """Write the live state to disk; log that none is written if no rank holds all of it."""
        if self.is_sharded:
            logger.warning(
                f"node {self._context.node}: step {position.step} was not saved: each rank of the node holds "
                "a part of the model, and not all of them took a snapshot of this step. Training continues; "
                "older checkpoints are untouched."
            )
            return
        result = self._direct_writer.write(position)
        self._committed_path, self._last_commit_at = result.path if result else None, time.monotonic()
        if result is not None:
            self._committed_step, self._commit_stall_s = position.step, result.seconds

    def _is_commit_due(self, step: int) -> bool:
        control, cost = self._slot_client.control_block, None
        if step == control.get("commit_step") and step > self._committed_step:
            return True
        commit_s, cpu_s = control.get("commit_us") / 1e6, control.get("commit_cpu_us") / 1e6
        # After a restart the committer has committed before, and the newest snapshot since: no need to hurry.
        if self._commit_stall_s is not None or commit_s > 0:
            stall_s = self._commit_stall_s or 0.0
            commit_s = max(commit_s, stall_s)  # a direct write stalls until it is done
            cost = SaveCost(stall_s, commit_s, cpu_s, self.meter.cpu_count)
        return checkpoint_interval.is_commit_due(
            self._context.settings.save_every,
            step=step,
            committed_step=self._committed_step,
            elapsed_s=time.monotonic() - self._last_commit_at,
            cost=cost,
            mtbf_s=self._mtbf_s,
        ) and not any(slot.needs_commit for slot in control.read_slots())

    def _is_reading_due(self, step: int) -> bool:
        """Return whether a mechanism reads a snapshot of this step, which is the same on all nodes."""
        if not self._has_peers:
            return False
        meter, settings = self.meter, vars(self._context.settings)
        snapshot_s = meter.snapshot_cost_s and meter.snapshot_cost_s * meter.cpu_count
        read_s = self._slot_client.control_block.get("read_cpu_us") / 1e6 or None
        costs = ReadingCosts(settings, meter.step_s, snapshot_s, read_s, meter.cpu_count)
        return any(is_due(step, costs) for is_due in READERS)

    def _next_snapshot_step(self, step: int) -> int:
        every = self._context.settings.snapshot_every
        if self.snapshotter.problem or self._is_end_planned():
            return step + 1
        gap = checkpoint_interval.snapshot_interval_steps(
            every, step_s=self.meter.step_s, cost_s=self.meter.snapshot_cost_s, mtbf_s=self._mtbf_s
        )
        return checkpoint_interval.next_snapshot_step(step, gap)


def _smooth(mean: float | None, newest: float) -> float:
    return newest if mean is None else (1 - SMOOTHING_WEIGHT) * mean + SMOOTHING_WEIGHT * newest


def _read_mtbf_s() -> float:
    """Return the mean time between failures that the agent measured, in seconds."""
    try:
        return float(os.environ[constants.ENV_MTBF_S])
    except (KeyError, ValueError):
        return checkpoint_interval.ASSUMED_MTBF_S
