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
from elastic_resume.capture.snapshotter import PATIENCE_S, Snapshots
from elastic_resume.checkpoint.layout import Layout
from elastic_resume.checkpoint.manifest import Manifest, Position
from elastic_resume.checkpoint.reader import fresh_memory
from elastic_resume.checkpoint.writer import Put, Shelf, Terms
from elastic_resume.errors import MachineError
from elastic_resume.policy import checkpoint_interval, divergence
from elastic_resume.policy.checkpoint_interval import SaveCost
from elastic_resume.policy.resume_plan import ResumePlan
from elastic_resume.restore import rank_context
from elastic_resume.restore.rank_context import Place
from elastic_resume.snapshot.slot_client import Memory
from elastic_resume.state import state_dict
from elastic_resume.state.state_dict import REPLICATED, FlatState
from elastic_resume.state.tensor_buffer import memory_of, spec_of

BUFFER_BYTES = 16 << 20
_PIECE_ITEMS = 1 << 20  # elements of a tensor that are brought to the host, or made contiguous, at a time


def layout_of(flat: FlatState) -> Layout:
    """Lay the state out as a checkpoint's image."""
    return Layout.build([spec_of(leaf.name, leaf.tensor) for leaf in flat.leaves])


def manifest_of(
    place: Place, flat: FlatState, layout: Layout, generation: int, position: Position
) -> Manifest:
    """Describe the image of ``flat`` as it is now."""
    return Manifest(
        run_id=place.settings.run_id,
        node=place.node,
        rank=place.world.rank,
        world_size=place.world.size,
        generation=generation,
        position=position,
        written_at=time.time(),
        writer=__version__,
        state=flat.skeleton,
        follows_rank0=tuple(leaf.name for leaf in flat.leaves if leaf.kind != REPLICATED),
        file_bytes=layout.total_bytes,
    )


def image_of(flat: FlatState, layout: Layout) -> Iterator[memoryview]:
    """Yield the image of ``flat`` in pieces, in one buffer: each is valid until the next is asked for."""
    buffer = fresh_memory(BUFFER_BYTES)
    used = 0
    for source in _bytes_of(flat, layout):
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


def _bytes_of(flat: FlatState, layout: Layout) -> Iterator[memoryview]:
    yield memoryview(layout.header)
    by_name = {leaf.name: leaf.tensor for leaf in flat.leaves}
    for name, extent in layout.extents.items():
        if extent.stop == extent.start:
            continue
        tensor = by_name[name].detach()
        if tensor.is_contiguous() and not tensor.is_cuda:
            yield memory_of(tensor)
            continue
        rows = tensor.reshape(1, -1) if tensor.is_contiguous() or tensor.dim() == 0 else tensor
        for row in rows:
            for piece in (row.reshape(-1) if row.dim() else row.reshape(1)).split(_PIECE_ITEMS):
                here = piece.cpu().contiguous()
                yield memory_of(here)


NEVER = 1 << 62
NOTES_BYTES = 1 << 18  # beside a state whose notes are not known yet
WARM_UP = 3  # snapshots that are dearer than all later ones: each slot's first
SMOOTH = 0.3  # weight of the newest measurement


class Saver:
    """Takes this rank's part in its node's copies, in one generation."""

    def __init__(
        self,
        place: Place,
        plan: ResumePlan,
        saved_step: int,
        tracked: Mapping[str, Any],
        memory: Memory,
        *,
        busy: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        """``saved_step`` is the step that this node already holds a checkpoint of (0 when none).

        ``busy`` tells those who look for hangs that training waits for the disk.
        """
        settings = place.settings
        self.saved_step = saved_step  # of the newest copy that is on disk, or on its way
        self.path: Path | None = None  # of the last commit that this process has waited for
        self.snapshots = Snapshots(tracked, memory, place, plan.generation)
        self.stalled_s = 0.0  # that training has waited for copies, in this generation
        self._stall_seen = 0.0
        self._loaded_step = saved_step
        self._busy = busy
        self._place = place
        self._tracked = tracked
        self._memory = memory
        self._generation = plan.generation
        self._mtbf = _mtbf()
        self._cores = float(len(os.sched_getaffinity(0)))
        self._since = time.monotonic()
        self._step_began: float | None = None
        self._step_s: float | None = None
        self._cost_s: float | None = None
        self._save_stall_s: float | None = None
        self._taken = 0
        self._streamed: Put | None = None
        # Nodes compare through their agents, and one node has nobody to compare with.
        self._compares = constants.ENV_AGENT_PID in os.environ and len(place.lead_of) > 1
        if not place.leads:
            return
        # A process of its own keeps the shelf too; of ours only what is streamed goes there.
        self._shelf = Shelf(place.node_dir, settings.run_id, place.events.write)
        order = (plan.source_generation, plan.step)
        # What came from memory or from a peer says nothing of a copy that this node's disk may hold.
        trusted = order if plan.kind == "checkpoint" and saved_step >= 0 else None
        terms = Terms(plan.floor, trusted, settings.keep)
        self._shelf.enter(terms)
        memory.tell("enter", floor=terms.floor, trusted=terms.trusted, keep=terms.keep)
        memory.control.set("decided", 0)
        memory.control.set("next_step", NEVER if settings.snapshot_every.off else plan.step + 1)

    def expect(self, nbytes: int) -> None:
        """Have memory taken for a state of that size before the first snapshot needs it. For the lead."""
        if self._memory.lead:
            # Slots that a resume has filled, or an earlier generation, are not made anew for a guess.
            there = [slot.capacity for slot in self._memory.control.states() if slot.capacity > nbytes]
            self._memory.prepare(min(there, default=nbytes + nbytes // 64 + NOTES_BYTES), guessed=True)

    def after_step(self, position: Position, *, may_save: bool = True, epoch_over: bool = False) -> None:
        """Take what is due at this step boundary.

        ``may_save``: whether it may go to disk. ``epoch_over``: all else that the epoch does is done too.

        Raises:
            UntrackableError: an object has come to hold state that cannot be stored.

        """
        with self._counted():
            self.snapshots.end_step(position.step)
            self._take_due(position, may_save=may_save, epoch_over=epoch_over)

    def _take_due(self, position: Position, *, may_save: bool, epoch_over: bool) -> None:
        control, step = self._memory.control, position.step
        self._measure()
        if not self._memory.lead:
            # The lead may have been here already, and have announced the one after.
            if not epoch_over and (step >= control.get("next_step") or self.snapshots.is_begun(position)):
                self.snapshots.take(position)
            return
        save = may_save and self._save_is_due(step)
        announced = control.get("next_step")
        if self._memory.slots <= 1 or self._place.settings.snapshot_every.off:
            if announced != NEVER:
                control.set("next_step", NEVER)
                self.snapshots.decline(position)
            if save and self._memory.slots == 0:
                self._stream(position)
            elif save:
                self._take(position, epoch_over=epoch_over, want=True, alone=True)
        else:
            compare = self._is_to_be_compared(step) and not epoch_over
            if step >= announced or announced == NEVER or save or compare or epoch_over:
                # The others know of no other steps than those that were announced.
                alone = epoch_over or step < announced
                self._take(position, epoch_over=epoch_over, want=save, alone=alone)
                control.set("next_step", step + 1 if epoch_over else self._next(step))
                if compare and self.snapshots.has(position):
                    world = rank_context.assigned_generation() or self._generation
                    self._memory.tell("compare", mark=self.snapshots.taken, world=world)
        self._step_began = time.perf_counter()

    def save(self, position: Position, *, epoch_over: bool = False) -> Path | None:
        """Commit the state now and wait for the disk. For the lead.

        None where the disk refuses, which is told, and where this generation has begun with that step.
        """
        with self._counted():
            return self._save(position, epoch_over=epoch_over)

    def _save(self, position: Position, *, epoch_over: bool) -> Path | None:
        if position.step == self._loaded_step and not epoch_over:
            return None
        if self._memory.slots == 0 or not self._snapshot(position, epoch_over=epoch_over):
            self._stream(position)
            return self.path
        answer = self._memory.commit(self.snapshots.taken)
        self.path = Path(answer["path"]) if answer.get("path") else None
        if self.path is not None:
            self.saved_step, self._since = position.step, time.monotonic()
        return self.path

    def has_saved(self, position: Position) -> bool:
        """Whether the newest `save` has brought that step to disk, or it was there when all began."""
        return position.step == self._loaded_step or self.path is not None

    def keep(self, position: Position, *, epoch_over: bool = False) -> None:
        """Hold the state of this step somewhere that outlives this process. For the lead."""
        with self._counted():
            if self._memory.slots == 0 or not self._snapshot(position, epoch_over=epoch_over):
                self._stream(position)

    def close(self) -> None:
        """Finish what is being copied."""
        self.snapshots.close()

    # ---- inside ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Count what training waits here, and what it has waited before its optimizer since the last time."""
        began = time.perf_counter()
        self.stalled_s += max(0.0, self.snapshots.stall_s - self._stall_seen)
        try:
            yield
        finally:
            self._stall_seen = self.snapshots.stall_s
            self.stalled_s += time.perf_counter() - began

    def _snapshot(self, position: Position, *, epoch_over: bool) -> bool:
        """Have a whole snapshot of this very step, taking one where there is none; whether there is."""
        limit = time.monotonic() + PATIENCE_S
        while time.monotonic() < limit:
            if self.snapshots.has(position, epoch_over=epoch_over) and self.snapshots.finished():
                return True
            if self.snapshots.take(position, epoch_over=epoch_over, alone=True):
                return self.snapshots.finished()
            time.sleep(0.005)  # all slots are being read, or are being made
        return False

    def _take(self, position: Position, *, epoch_over: bool, want: bool, alone: bool) -> None:
        if not self.snapshots.take(position, epoch_over=epoch_over, want=want, alone=alone):
            return
        self._taken += 1
        if want:
            self.saved_step, self._since = position.step, time.monotonic()
            self._save_stall_s = self.snapshots.stall_s

    def _save_is_due(self, step: int) -> bool:
        control = self._memory.control
        cost = None
        if self._streamed is not None:
            cost = SaveCost(self._streamed.seconds, self._streamed.seconds)
        elif self._save_stall_s is not None:
            commit_s, cpu_s = control.get("commit_us") / 1e6, control.get("commit_cpu_us") / 1e6
            cost = SaveCost(self._save_stall_s, commit_s, cpu_s, self._cores)
        return checkpoint_interval.is_due(
            self._place.settings.save_every,
            step=step,
            saved_step=self.saved_step,
            since_s=time.monotonic() - self._since,
            cost=cost,
            mtbf=self._mtbf,
        ) and not any(slot.wanted for slot in control.states())

    def _is_to_be_compared(self, step: int) -> bool:
        """Whether the other nodes tell of this step too; see `policy.divergence`."""
        if not self._compares:
            return False
        digest_s = self._memory.control.get("digest_cpu_us") / 1e6 or None
        if digest_s is not None and self._cost_s is not None:
            digest_s += self._cost_s * self._cores  # of the snapshot, which may be made for it
        gap = divergence.gap(
            self._place.settings.check_replicas, cost_s=digest_s, step_s=self._step_s, cores=self._cores
        )
        return divergence.due(step, gap)

    def _next(self, step: int) -> int:
        """The step of the next snapshot."""
        every = self._place.settings.snapshot_every
        if self.snapshots.problem:
            return step + 1
        gap = checkpoint_interval.snapshot_gap(
            every, step_s=self._step_s, cost_s=self._cost_s, mtbf=self._mtbf
        )
        return checkpoint_interval.next_snapshot(step, gap)

    def _measure(self) -> None:
        """Take the time of the step that has just ended, and of what the last snapshot has cost."""
        if self._step_began is not None:
            took = time.perf_counter() - self._step_began
            self._step_s = _smoothed(self._step_s, took)
        if self._taken > WARM_UP:
            cost = self.snapshots.stall_s + self.snapshots.cpu_s / self._cores
            self._cost_s = _smoothed(self._cost_s, cost)

    def _stream(self, position: Position) -> None:
        """Write the live state to disk, and wait for it."""
        with self._busy():
            self._write_out(position)

    def _write_out(self, position: Position) -> None:
        flat = state_dict.flatten(self._tracked)
        layout = layout_of(flat)
        manifest = manifest_of(self._place, flat, layout, self._generation, position)
        try:
            put = self._shelf.put(manifest, image_of(flat, layout))
        except MachineError as error:
            console.say(
                f"node {self._place.node}: step {position.step} was not saved: {error} "
                "Training goes on; older checkpoints are untouched."
            )
            self.path = None
        else:
            self._shelf.prune()
            self._streamed = put
            self.path, self.saved_step = (put.path if put else None), position.step
        self._since = time.monotonic()


def _smoothed(mean: float | None, newest: float) -> float:
    return newest if mean is None else (1 - SMOOTH) * mean + SMOOTH * newest


def _mtbf() -> float:
    """Seconds between failures, as the agent has seen them."""
    try:
        return float(os.environ[constants.ENV_MTBF_S])
    except (KeyError, ValueError):
        return checkpoint_interval.ASSUMED_MTBF_S
