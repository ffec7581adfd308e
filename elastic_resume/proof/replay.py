"""Compute the steps up to the newest snapshot again, and compare; see `policy.proof`.

Until the verdict no snapshot is taken and nothing is saved: the newest state of the job stays the one in
memory and on disk, and whatever dies meanwhile, the next generation resumes from it, without a proof.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_resume import failpoints
from elastic_resume.checkpoint.layout import Layout
from elastic_resume.checkpoint.manifest import Position
from elastic_resume.checkpoint.reader import checkpoint_name
from elastic_resume.errors import CheckpointError, NotProvedError
from elastic_resume.policy import proof, reasons
from elastic_resume.policy.proof import RankComparison, Verdict
from elastic_resume.policy.resume_plan import ResumePlan, SavedState
from elastic_resume.proof import record
from elastic_resume.proof.comparison import Snapshots, compare_rank
from elastic_resume.ranks.rank_context import RankContext
from elastic_resume.slots.ipc import LocalSnapshot, SlotClient
from elastic_resume.state.state_dict import TensorBuffer

logger = logging.getLogger(__name__)


class Replay:
    """The steps of one generation that are computed again, on one rank."""

    def __init__(
        self,
        context: RankContext,
        plan: ResumePlan,
        target: SavedState,
        tracked: Mapping[str, Any],
        slot_client: SlotClient,
        *,
        knows_data: bool,
        within_epoch: bool,
    ) -> None:
        """Begin the replay of ``target`` from the state that ``plan`` has loaded. Every rank calls it.

        ``knows_data``: see `compare_rank`. ``within_epoch``: the replay does not begin with an epoch. One
        that does tells nothing about the next resume, as the script's loop starts as always.
        """
        self._within_epoch = within_epoch
        self._is_resized = plan.previous_world_size != context.collectives.size
        self._context, self._plan, self._target = context, plan, target
        self._tracked, self._slot_client, self._knows_data = tracked, slot_client, knows_data
        if context.is_local_leader:
            record.record_replay(context.node_dir, slot_client, target.version)

    def has_reached(self, position: Position) -> bool:
        """Return whether the target's step boundary is reached, or passed."""
        return (position.step, position.epoch) >= (self._target.step, self._target.epoch)

    def finish(self, position: Position) -> None:
        """Compare the state of the target's step boundary. Every rank calls it there.

        Raises:
            NotProvedError: on all ranks.

        """
        started_at = time.monotonic()
        is_target = (position.step, position.epoch) == (self._target.step, self._target.epoch)

        def compare() -> tuple[None, Any]:
            return None, reasons.to_json(self._compare(position)) if is_target else None

        _, gathered = self._context.run_and_gather(compare)
        passed = "" if is_target else self._describe_other_end(f"it came to step {position.step}")
        self._conclude([each for each in gathered if each is not None], passed, time.monotonic() - started_at)

    def end(self, position: Position) -> None:
        """End the proof where the script ends, at ``position``: at the target, or before it.

        Raises:
            NotProvedError: on all ranks.

        """
        if self.has_reached(position):
            self.finish(position)
        else:
            self._conclude([], self._describe_other_end(f"it ended at step {position.step}"), 0.0)

    def find_checkpoint(self) -> Path | None:
        """Return the path of the newest state, if this node has it on disk."""
        path = self._context.node_dir / checkpoint_name(*self._target.version)
        return path if path.is_dir() else None

    def _describe_other_end(self, what: str) -> str:
        return (
            f"the script had finished step {self._target.step} in epoch {self._target.epoch}; resumed at "
            f"step {self._plan.step} {what} without it. Does it count its epochs or steps itself, or read "
            "another number of batches?"
        )

    def _conclude(self, encoded: list[Any], reason: str, seconds: float) -> None:
        context = self._context
        comparisons = [reasons.from_json(RankComparison, each) for each in encoded]
        if not comparisons:
            reason = reason or "the state to compare with is gone from memory"
        verdict = proof.judge(
            self._plan.step,
            self._target.step,
            comparisons,
            reason,
            within_epoch=self._within_epoch,
            is_resized=self._is_resized,
        )
        if context.is_local_leader:
            is_enough = self._within_epoch or verdict.kind == proof.NOT_PROVED
            record.record_verdict(context.node_dir, verdict.kind if is_enough else "")
        if context.collectives.rank == 0:
            self._report(verdict, seconds)
        failpoints.hit("proof.judged")
        if verdict.kind == proof.NOT_PROVED:
            self._raise(verdict)

    def _report(self, verdict: Verdict, seconds: float) -> None:
        self._context.events.emit(
            "proof",
            generation=self._plan.generation,
            step=verdict.step,
            first_step=verdict.first_step,
            verdict=verdict.kind,
            ranks=verdict.ranks,
            rounding=verdict.rounding,
            within_epoch=verdict.within_epoch,
            seconds=round(seconds, 4),
            message=proof.describe(verdict),
        )
        text, level = proof.describe(verdict), logging.INFO
        if verdict.kind == proof.ROUNDING:
            level = logging.WARNING
        elif verdict.kind == proof.NOT_PROVED:
            text, level = f"{text} See {proof.PAGE}", logging.WARNING
        logger.log(level, f"{text}.")

    def _raise(self, verdict: Verdict) -> None:
        is_end = self._context.settings.prove == proof.STOP
        what = (
            "the job ends (--prove stop), and nothing is lost"
            if is_end
            else "the job goes back to what it had; no step is lost, but the script still resumes wrongly"
        )
        error = NotProvedError(f"the resume to step {verdict.step} is not proved: {what}.")
        error.is_deterministic = is_end
        raise error

    def _compare(self, position: Position) -> RankComparison | None:
        """Compare with the target in this node's memory; return None if it is not there."""
        target = self._find(self._target)
        if target is None:
            return None
        base = self._find(self._plan.holders[0][1])
        comparison = compare_rank(
            self._tracked,
            position,
            Snapshots(target.manifest, _open_tensors(target), _open_tensors(base) if base else None),
            is_source=self._context.is_local_leader and self._context.node == self._target.owner_node,
            local_rank=self._context.local_rank,
            knows_data=self._knows_data,
            is_resized=self._is_resized,
        )
        is_there = target.slot.record.complete_snapshot_id() == target.snapshot_id
        return comparison if is_there else None

    def _find(self, state: SavedState) -> LocalSnapshot | None:
        with contextlib.suppress(CheckpointError):
            return self._slot_client.find_snapshot(state.version, state.epoch)
        return None


def _open_tensors(snapshot: LocalSnapshot) -> TensorBuffer:
    return TensorBuffer(Layout.parse(snapshot.image, len(snapshot.image)), snapshot.image)
