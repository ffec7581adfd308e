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
from elastic_resume.capture.copy_barrier import UNSEEN, Barrier
from elastic_resume.capture.copy_engine import Copyist, Job, Streams, copy_now, fence, run, views
from elastic_resume.capture.state_cache import Sight, Tracker, without_collection
from elastic_resume.checkpoint.layout import Layout
from elastic_resume.checkpoint.manifest import Position
from elastic_resume.errors import UsageError
from elastic_resume.restore.rank_context import Place
from elastic_resume.snapshot import slots
from elastic_resume.snapshot.slot_client import Memory
from elastic_resume.snapshot.slots import Slot, mark_of
from elastic_resume.state import state_dict
from elastic_resume.state.state_dict import REPLICATED, Leaf, fingerprints
from elastic_resume.state.tensor_buffer import spec_of

# Below this the lead copies all: another rank's thread would cost more than its share takes.
SPLIT_BYTES = 32 << 20
VERSIONS = 64  # of so many tensors the version is looked at, for it takes 60 ns each


class Share:
    """Tensors that are copied together. What can be known of them ahead of a copy is worked out once.

    At 80,000 tensors that is 40 ms of each step: lists of names and tensors, where each tensor is, and
    where in a slot it goes.
    """

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.leaves = tuple(leaves)
        self.tensors = [leaf.tensor for leaf in leaves]
        self._looked_at = self.leaves[:: 1 + len(self.leaves) // VERSIONS]
        self.devices = frozenset(tensor.device for tensor in self.tensors if tensor.is_cuda)
        self._targets: dict[tuple[int, int], list[Tensor]] = {}

    def targets(self, slot: Slot, views: Callable[[], Mapping[str, Tensor]]) -> list[Tensor]:
        """Where the tensors go in ``slot``; ``views`` gives its tensors by name, and is asked once."""
        key = (slot.index, slot.serial)
        if key not in self._targets:
            by_name = views()
            self._targets[key] = [by_name[leaf.name] for leaf in self.leaves]
        return self._targets[key]

    def versions(self) -> list[int]:
        """How often some of the tensors, all over the share, have been changed in place."""
        return [0 if leaf.tensor.is_inference() else leaf.tensor._version for leaf in self._looked_at]  # noqa: SLF001

    def rewritten(self, versions: list[int], among: Collection[int] | None) -> list[str]:
        """Name those whose version is not among the ``versions`` any more: for certain changed.

        ``among``: addresses of those to look at; None: all.
        """
        both = zip(self._looked_at, versions, self.versions(), strict=True)
        return [leaf.name for leaf, was, now in both if was != now and _is_among(leaf, among)]

    def differing(self, views: Mapping[str, Tensor], among: Collection[int] | None) -> list[str]:
        """Name those that are not as they are in ``views``, all bytes of which are read; see `rewritten`."""
        leaves = [leaf for leaf in self.leaves if _is_among(leaf, among)]
        copied = fingerprints(replace(leaf, tensor=views[leaf.name]) for leaf in leaves)
        return [name for name, now in fingerprints(leaves).items() if now != copied[name]]

    def forget(self, alive: Collection[tuple[int, int]]) -> None:
        """Let go of slots that are not among those (index, serial): else their memory stays."""
        self._targets = {key: found for key, found in self._targets.items() if key in alive}


@dataclass(frozen=True)
class Sheet:
    """The plan of a snapshot.

    ``number`` stands for layout, static notes and who copies what. ``at_once`` is copied in ``run.step()`` by
    the lead; ``shares`` by local rank, behind the fence.
    """

    layout: Layout
    static: bytes
    number: int
    at_once: Share
    shares: tuple[Share, ...]
    whole: Share

    def room(self, dynamic: bytes) -> int:
        """Bytes that a slot should have."""
        return slots.room_for(self.layout.total_bytes, len(self.static), len(dynamic))

    def least(self, dynamic: bytes) -> int:
        """Bytes that a slot must have at least."""
        return slots.aligned(slots.aligned(self.layout.total_bytes) + len(self.static)) + len(dynamic)

    def undivided(self) -> Sheet:
        """Give the same, with all of it the lead's."""
        return self if len(self.shares) == 1 else replace(self, shares=(self.whole,))

    def forget(self, alive: Collection[tuple[int, int]]) -> None:
        """See `Share.forget`."""
        for share in (self.at_once, self.whole, *self.shares):
            share.forget(alive)


@dataclass(frozen=True)
class Task:
    """What a rank copies of one snapshot. ``slot`` None: the lead has still to say which."""

    sheet: Sheet
    slot: Slot | None
    mark: int
    share: Share
    clones: list[tuple[str, Tensor]]  # on devices, of what is copied at once
    after: dict[torch.device, Any]


@without_collection
def make(sight: Sight, about: Mapping[str, Any], parts: int) -> Sheet:
    """Plan a snapshot of what is seen.

    Args:
        sight: of the tracker.
        about: the static notes without state (see `note`).
        parts: how many local ranks share the copying.

    """
    fixed = sight.fixed
    leaves = (*fixed.leaves, *sight.live)
    layout = Layout.build([spec_of(leaf.name, leaf.tensor) for leaf in leaves])
    follows = [leaf.name for leaf in leaves if leaf.kind != REPLICATED]
    static = slots.to_bytes({**about, "follows_rank0": follows, "state": fixed.static})
    filled = [pair for pair in zip(fixed.leaves, fixed.overlapped, strict=True) if pair[0].tensor.numel()]
    later = [leaf for leaf, overlapped in filled if overlapped]
    if sum(size_of(leaf.tensor) for leaf in later) < SPLIT_BYTES:
        parts = 1
    at_once = Share([leaf for leaf, overlapped in filled if not overlapped])
    whole = Share(later)
    shares = (whole,) if parts == 1 else tuple(map(Share, _dealt(later, parts)))
    # Local ranks find for themselves what has to be copied at once, by what they have seen of it: only if all
    # have found the same is everything copied by somebody.
    split = "\n\n".join("\n".join(leaf.name for leaf in share.leaves) for share in (at_once, *shares))
    number = xxhash.xxh3_64_intdigest(layout.header + static + split.encode()) | 1
    return Sheet(layout, static, number, at_once, shares, whole)


def size_of(tensor: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def some(names: Sequence[str]) -> str:
    """Name the first, and say how many more there are."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _is_among(leaf: Leaf, addresses: Collection[int] | None) -> bool:
    return addresses is None or leaf.tensor.data_ptr() in addresses


def _dealt(leaves: Sequence[Leaf], parts: int) -> list[list[Leaf]]:
    """Deal leaves out so that shares are about equal in bytes: the largest first, to whoever has least."""
    shares: list[list[Leaf]] = [[] for _ in range(parts)]
    sizes = [0] * parts
    for leaf in sorted(leaves, key=lambda leaf: -size_of(leaf.tensor)):
        part = sizes.index(min(sizes))
        shares[part].append(leaf)
        sizes[part] += size_of(leaf.tensor)
    return shares


# The other local ranks finish the same step at about the same time, or are gone.
PATIENCE_S = 2.0
# Where training waits for the copy at once, the lead may still evaluate before it ends the same step.
LONG_PATIENCE_S = 60.0
LOOK_S = 0.0002
LATE_LOOK_S = 0.005  # when it takes longer


class Snapshots:
    """This rank's part in its node's snapshots, in one generation."""

    def __init__(self, tracked: Mapping[str, Any], memory: Memory, place: Place, generation: int) -> None:
        """Put the fence before every tracked optimizer's step."""
        self._tracked = tracked
        self._tracker = Tracker(tracked)
        self._memory = memory
        self._place = place
        self._generation = generation
        self._parts = place.node_of.count(place.node)
        self._sheet: tuple[tuple[Any, ...], Sheet] | None = None
        self._views: dict[tuple[int, int, int], dict[str, torch.Tensor]] = {}
        self._streams = Streams()
        self._copyist = Copyist()
        self._job: Job | None = None
        self._prints: dict[str, str] = {}
        self._shared: tuple[state_dict.Leaf, ...] = ()  # whose prints those are
        self._sheet_failed = 0  # number of the sheet whose shares did not come together
        self._divided = False  # whether others have a share in the newest snapshot
        self._clones: list[tuple[str, torch.Tensor]] = []
        self._torn: list[str] = []  # what has changed while it was copied
        self._said_failed = False
        self._pid = os.getpid()
        optimizers = [item for item in tracked.values() if isinstance(item, Optimizer)]
        self._barrier: Barrier[tuple[int, Sheet, list[int]]] = Barrier(optimizers, self._fence)
        memory.control.copying(place.local_rank, 0)
        self.verify = False
        self.stall_s = 0.0  # that the newest snapshot has cost the training thread so far
        self.cpu_s = 0.0  # of processors, for this rank's share of it
        self.problem = ""  # why the newest one did not come about
        self.taken = 0  # the newest mark that this rank has taken part in

    def end_step(self, step: int) -> None:
        """End a step. What was copied during it, and has changed without the barrier, counts no more."""
        if (behind := self._barrier.end_step(step)) is None:
            return
        self.wait()
        began = time.perf_counter()
        (mark, sheet, versions), among = behind, self._barrier.unfenced
        share = self._share(sheet)
        rewritten = share.rewritten(versions, among)
        self._memory.control.copying(self._place.local_rank, mark)  # so nobody takes the slot
        job = self._job = Job(lambda _: self._compare(mark, sheet, rewritten, among))
        # A device is read in the training stream's turn; what lies on the host while training goes on.
        run(job) if rewritten or share.devices else self._copyist.submit(job)
        self.stall_s += time.perf_counter() - began
        if job.done.is_set():
            self.wait()

    def take(
        self, position: Position, *, epoch_over: bool = False, want: bool = False, alone: bool = False
    ) -> bool:
        """Begin a snapshot at a step boundary; whether one was begun, which the lead decides.

        ``want``: the keeper is to commit it. ``epoch_over``: see `slots.mark_of`. ``alone``: the lead does
        not count on the other local ranks, which need not be at the same step.

        Raises:
            UntrackableError: an object has come to hold state that cannot be stored.

        """
        self.wait()
        began = time.perf_counter()
        self._await_shares()
        mark = mark_of(self._generation, position.step, epoch_over=epoch_over)
        sight = self._tracker.look()
        sheet = self._planned(sight)
        sheet = sheet.undivided() if alone or self._sheet_failed == sheet.number else sheet
        if self._memory.lead:
            slot = self._begin(sight, sheet, position, mark, want=want)
            if slot is None:
                return False
        elif len(sheet.shares) <= self._place.local_rank:
            return False
        else:
            slot = None
        self._start(sheet, slot, mark)
        if self.verify:
            self._shared = self._share(sheet).leaves
            self._prints = state_dict.fingerprints(self._shared)
        self.taken, self._divided = mark, len(sheet.shares) > 1
        self.stall_s = time.perf_counter() - began
        return True

    def has(self, position: Position, *, epoch_over: bool = False) -> bool:
        """Whether the newest snapshot that was begun is of that step."""
        return self.taken == mark_of(self._generation, position.step, epoch_over=epoch_over)

    def is_begun(self, position: Position) -> bool:
        """Whether the lead has decided about a snapshot of that step."""
        return self._memory.control.get("decided") == mark_of(self._generation, position.step)

    def decline(self, position: Position) -> None:
        """Tell the other local ranks that there is none of that step: they may be waiting. For the lead."""
        self._memory.control.set("decided", mark_of(self._generation, position.step))

    def wait(self) -> None:
        """Wait until this rank's share is in place; nothing to do where none is being copied.

        Raises:
            UsageError: `verify` is on, and state was changed since the step boundary.

        """
        job = self._job
        if job is None or os.getpid() != self._pid:
            return
        began = time.perf_counter()
        self._job = None
        job.await_done()
        self.stall_s += time.perf_counter() - began
        self._look_at(job)

    def finished(self, timeout_s: float = PATIENCE_S) -> bool:
        """Wait until the newest snapshot counts, all shares of it; whether it does."""
        self.wait()
        limit = time.monotonic() + timeout_s
        while time.monotonic() < limit:
            slot = self._memory.find(self.taken)
            if slot is None:
                return False
            if slot.record.counts() == self.taken:
                return True
            if slot.record.failed():
                return False
            time.sleep(LOOK_S)
        return False

    def close(self) -> None:
        """Finish what is being copied; take the fence away."""
        if os.getpid() != self._pid:
            return
        self.wait()
        self._barrier.close()
        self._copyist.close()
        self._streams.unpin()

    # ---- in the training thread ------------------------------------------------------------------------

    def _fence(self) -> None:
        job = self._job
        if job is None:
            return
        began = time.perf_counter()
        fence(job)
        self.stall_s += time.perf_counter() - began
        if self.verify:
            self.wait()

    def _planned(self, sight: Sight) -> Sheet:
        live = tuple((leaf.name, leaf.tensor.dtype, leaf.tensor.shape) for leaf in sight.live)
        key = (sight.fixed.number, live)
        if self._sheet is None or self._sheet[0] != key:
            about = {
                "run_id": self._place.settings.run_id,
                "node": self._place.node,
                "rank": self._place.lead_of[self._place.node],
                "world_size": self._place.world.size,
                "writer": __version__,
            }
            self._sheet = (key, make(sight, about, self._parts if self._barrier.exists else 1))
            self._views = {}
        return self._sheet[1]

    def _begin(self, sight: Sight, sheet: Sheet, position: Position, mark: int, *, want: bool) -> Slot | None:
        """Take a slot and write the lead's part of it; None where no slot is free."""
        control = self._memory.control
        moving = slots.moving(self._generation, position, time.time(), sight.dynamic)
        dynamic = slots.to_bytes(moving)
        slot = self._free_slot(sheet, dynamic, mark)
        if slot is not None:
            slot.record.set("target", 0)
            # One that had found its slot before that word was taken away may be writing into this very one.
            slot = None if self._somebody_is_behind(mark) else slot
        if slot is None:
            control.set("decided", mark)
            return None
        record = slot.record
        failpoints.hit("snapshot.begun")
        slot.describe(sheet.layout.header, sheet.layout.total_bytes, sheet.static, dynamic, sheet.number)
        self._copy_at_once(slot, sheet, Share([leaf for leaf in sight.live if leaf.tensor.numel()]))
        failpoints.hit("snapshot.written")
        record.set("parts", len(sheet.shares))
        record.set("want", mark if want else 0)
        record.set("target", mark)
        control.set("decided", mark)
        if want:
            self._memory.tell("wanted", mark=mark)
        return slot

    def _free_slot(self, sheet: Sheet, dynamic: bytes, mark: int) -> Slot | None:
        if not self._await_others(mark):
            return None
        least = sheet.least(dynamic)
        states = self._memory.usable(least)
        if not states or self._memory.known_bytes < least:  # of what was guessed at first nobody may know
            needed = sheet.room(dynamic)
            if needed > slots.SMALL_BYTES:
                self._memory.prepare(needed)
            elif self._memory.reserve(needed):
                states = self._memory.usable(least)
        chosen = slots.choose(states, only=self._memory.slots == 1)
        if chosen is None:
            self.problem = "all slots are being saved" if states else "memory is still being taken for it"
            return None
        self.problem = ""
        return self._memory.slot(chosen.index, chosen.serial)

    def _await_shares(self) -> None:
        """No rank starts on the next slot before the last one is complete, or a share of it has failed."""
        if self._divided and not self.finished() and self._sheet is not None:
            # A local rank shares the copying otherwise, or is late: the lead copies all from now on.
            self._sheet_failed = self._sheet[1].number
        self._divided = False

    def _await_others(self, mark: int) -> bool:
        """Whether nobody writes into an older slot any more: it might be the next to be taken."""
        limit = time.monotonic() + PATIENCE_S
        while self._somebody_is_behind(mark):
            if time.monotonic() > limit:
                return False
            time.sleep(LOOK_S)
        return True

    def _somebody_is_behind(self, mark: int) -> bool:
        others = (rank for rank in range(self._parts) if rank != self._place.local_rank)
        if not self._memory.control.is_behind(others, mark):
            return False
        self.problem = "a local rank still copies its share of the one before"
        return True

    def _copy_at_once(self, slot: Slot, sheet: Sheet, live: Share) -> None:
        """Copy what the next forward pass may change; on a device into a copy there, which is quick."""
        for share in (sheet.at_once, live):
            targets = share.targets(slot, lambda: self._views_of(slot, sheet)) if share.tensors else []
            if not share.devices:
                copy_now(targets, share.tensors)
                continue
            near = [(t, s) for t, s in zip(targets, share.tensors, strict=True) if not s.is_cuda]
            copy_now([t for t, _ in near], [s for _, s in near])
            far = [leaf for leaf in share.leaves if leaf.tensor.is_cuda]
            self._clones += [(leaf.name, leaf.tensor.detach().clone()) for leaf in far]

    def _start(self, sheet: Sheet, slot: Slot | None, mark: int) -> None:
        """Copy this rank's share: behind the fence where there is one, else now."""
        share = self._share(sheet)
        clones, self._clones = self._clones, []
        devices = share.devices.union(tensor.device for _, tensor in clones)
        task = Task(sheet, slot, mark, share, clones, self._streams.begin(devices))
        self._memory.control.copying(self._place.local_rank, mark, waits=slot is None)
        patience_s = PATIENCE_S if self._barrier.holds else LONG_PATIENCE_S
        job = self._job = Job(lambda job: self._copy(job, task), patience_s)
        self._copyist.submit(job) if self._barrier.exists else run(job)
        if self._barrier.holds:
            self._barrier.copies((mark, sheet, share.versions()))
        else:
            job.await_done()

    def _look_at(self, job: Job) -> None:
        """See how a copy ended. One that failed costs a snapshot and not the training."""
        if job.error is not None:
            self._tell_failed(f"{type(job.error).__name__}: {job.error}"[:500])
            self._tracker = Tracker(self._tracked)  # it may have overlooked something
        torn, self._torn = self._torn, []
        if torn:
            self._divided = False
            self._tell_failed(UNSEEN.format(some(torn)))
        prints, self._prints = self._prints, {}
        now = state_dict.fingerprints(self._shared) if prints else {}
        changed = [name for name, was in prints.items() if now.get(name) != was]
        if changed:
            raise UsageError(
                f"{some(changed)} changed between run.step() and the next optimizer.step(), while it was "
                "being copied: a snapshot would hold half of the change. Make all changes of a step before "
                "run.step(), or track what changes elsewhere under a name of its own, not as optimizer state."
            )

    def _tell_failed(self, problem: str) -> None:
        """Write an event for a snapshot that failed; tell people of the first."""
        self.problem = problem
        self._place.events.write("snapshot-failed", generation=self._generation, reason=problem)
        if not self._said_failed:
            self._said_failed = True
            text = f"a snapshot failed ({problem}). Training goes on; older copies are untouched."
            console.say(f"rank {self._place.world.rank}: {text}")

    def _share(self, sheet: Sheet) -> Share:
        rank = self._place.local_rank
        return sheet.shares[rank] if rank < len(sheet.shares) else Share(())

    # ---- in the thread ---------------------------------------------------------------------------------

    def _copy(self, job: Job, task: Task) -> None:
        began = time.thread_time()
        rank, slot = self._place.local_rank, task.slot
        try:
            if slot is None:
                slot = self._find(task.mark, job)
                self._memory.control.copying(rank, task.mark)
            if slot is not None and rank < slot.record.get("parts"):  # else the lead has decided otherwise
                self._copy_into(slot, task, job)
                slot.record.mark(rank, task.mark)
                failpoints.hit("snapshot.marked")
        except BaseException:
            if slot is not None:
                slot.record.mark(rank, slots.FAILED)
            raise
        finally:
            self._memory.control.copying(rank, 0)
            self.cpu_s = time.thread_time() - began

    def _copy_into(self, slot: Slot, task: Task, job: Job) -> None:
        if slot.record.get("layout") != task.sheet.number:
            raise RuntimeError(
                f"local rank {self._place.local_rank} tracks or freezes other tensors than local rank 0"
            )
        sources, targets = task.share.tensors, []
        if sources:
            targets = task.share.targets(slot, lambda: self._views_of(slot, task.sheet))
        if task.after:
            by_name = self._views_of(slot, task.sheet)
            sources = sources + [tensor for _, tensor in task.clones]
            targets = targets + [by_name[name] for name, _ in task.clones]
            self._streams.pin(slot)
            self._streams.copy(targets, sources, task.after, job)
            near = [(t, s) for t, s in zip(targets, sources, strict=True) if not s.is_cuda]
            targets, sources = [t for t, _ in near], [s for _, s in near]
        failpoints.hit("snapshot.copying")
        copy_now(targets, sources)
        job.read.set()
        for _, event in job.events:
            event.synchronize()
        failpoints.hit("snapshot.copied")

    def _compare(self, mark: int, sheet: Sheet, rewritten: list[str], among: Collection[int] | None) -> None:
        """Let the snapshot fail if something is ``rewritten``, or differs from what was copied."""
        began, holds = time.thread_time(), False
        slot = self._memory.find(mark)
        try:
            if slot is not None:
                self._torn = rewritten or self._share(sheet).differing(self._views_of(slot, sheet), among)
            holds = not self._torn
        finally:
            if slot is not None and not holds:
                slot.record.mark(self._place.local_rank, slots.FAILED)
            self._memory.control.copying(self._place.local_rank, 0)
            self.cpu_s += time.thread_time() - began

    def _find(self, mark: int, job: Job) -> Slot | None:
        """Wait for the lead's word about ``mark``: a slot, or that there is none.

        Patience ends only when training waits for it: the lead may evaluate before it ends its step.
        """
        control = self._memory.control
        began = time.monotonic()
        while control.get("decided") < mark:
            now = time.monotonic()
            if now > job.awaited + job.patience_s:
                raise RuntimeError(f"local rank 0 has not come to the same step within {job.patience_s:g} s")
            time.sleep(LOOK_S if now < began + PATIENCE_S else LATE_LOOK_S)
        return self._memory.find(mark)

    def _views_of(self, slot: Slot, sheet: Sheet) -> dict[str, torch.Tensor]:
        key = (slot.index, slot.serial, sheet.number)
        found = self._views.get(key)
        if found is None:
            # Views of slots that are no more would keep their memory, all of it.
            alive = {(state.index, state.serial) for state in self._memory.control.states()}
            self._views = {at: kept for at, kept in self._views.items() if at[:2] in alive}
            sheet.forget(alive)
            self._streams.unpin(alive)
            found = self._views[key] = views(slot.memory, sheet.layout)
        return found
