"""The rack: a node's slots and their control block, made as large as the state turns out to be.

Promise: making room never takes away the newest snapshot that counts, nor one that is being read. Memory
beyond what the budget allows is never taken. Does not know what slots are written with.

How many slots of memory a node gives to snapshots. Pure: sizes come in as numbers.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from elastic_resume.schedulers import resources
from elastic_resume.snapshot import slots
from elastic_resume.snapshot.slots import ControlBlock, Slot, SlotState
from elastic_resume.units import format_bytes

SLOT_COUNT = 3  # the newest whole one, one being written, one being committed to disk
FREE_MEMORY_FRACTION = 0.5  # of the memory that is free: the rest is for what training itself still takes


def count_fitting_slots(slot_bytes: int, *, free_bytes: int, allowed_bytes: int | None = None) -> int:
    """Give the number of slots, 0 to `SLOTS`.

    Args:
        slot_bytes: of one slot.
        free_bytes: that the node could still take, slots that would make room for these included.
        allowed_bytes: what the user grants all slots together; None: `SHARE` of what is free.

    """
    allowed = int(free_bytes * FREE_MEMORY_FRACTION) if allowed_bytes is None else allowed_bytes
    return min(SLOT_COUNT, allowed // max(1, slot_bytes))


def describe_budget(
    slot_count: int, slot_bytes: int, *, free_bytes: int, allowed_bytes: int | None = None
) -> str:
    """Say in one line what the node's snapshots get, and what that means."""
    allowed = int(free_bytes * FREE_MEMORY_FRACTION) if allowed_bytes is None else allowed_bytes
    source = f"half of the {format_bytes(free_bytes)} free" if allowed_bytes is None else "--snapshot-memory"
    of = f"{format_bytes(slot_bytes)} of memory each"
    within = f"({format_bytes(allowed)} allowed, {source})"
    if slot_count >= SLOT_COUNT:
        return f"snapshots: {slot_count} slots with {of} {within}"
    if slot_count == 2:
        return f"snapshots: 2 slots with {of} {within}; none is taken while a second one is being saved"
    if slot_count == 1:
        return (
            f"snapshots: 1 slot with {of} {within}: memory holds what is being saved, and a failure costs "
            "the steps since the last save"
        )
    return (
        f"snapshots: none, {format_bytes(slot_bytes)} of memory do not fit {within}: training waits for the disk at "
        "each save, and a failure costs the steps since"
    )


@dataclass
class _OwnedSlot:
    descriptor: int
    slot: Slot
    pins: Counter[str] = field(default_factory=Counter)  # by the word that says so


class SlotPool:
    """The slots of one node."""

    def __init__(
        self,
        allowed_bytes: int | None,
        *,
        log: Callable[[str], None],
        measure_free_bytes: Callable[[], int] = resources.available_memory_bytes,
    ) -> None:
        """Make the control block; slots come with `reserve`.

        Args:
            allowed_bytes: for all slots together; None: half of what is free then. 0: there are none.
            say: gets the line that says what there is.
            free: tells how much memory the node could still take.

        """
        self._allowed_bytes = allowed_bytes
        self._log = log
        self._measure_free_bytes = measure_free_bytes
        self.control_descriptor = ControlBlock.create()
        self.control_block = ControlBlock(self.control_descriptor)
        # A name for guards, to which torchelastic hands no descriptor on. It ends with this process.
        self.control_path = f"/proc/{os.getpid()}/fd/{self.control_descriptor}"
        self._owned: dict[int, _OwnedSlot] = {}
        self._last_serial = 0
        self._last_plan = (-1, 0)
        self._failed_capacity = 0  # of which size there was no memory
        self._closed = False
        self._lock = threading.RLock()
        self._growth_lock = threading.Lock()

    def reserve_in_background(self, nbytes: int, *, log: bool = True) -> None:
        """A state of about that size will come: take memory for it in the background.

        Not ``tell``: it may be that none comes; what there is is said when somebody asks for it.
        """
        threading.Thread(
            target=self._create_slots,
            args=(nbytes,),
            kwargs={"log": log},
            name="elastic-resume-reserve",
            daemon=True,
        ).start()

    def reserve(self, nbytes: int, *, all_now: bool = True) -> int:
        """Have slots of at least ``nbytes``; give how many there will be. One of them exists on return.

        Of small ones all do: they take milliseconds. Of large ones the others are made in the background, or,
        without ``all_now``, when they are asked for again.
        """
        planned = self._create_slots(nbytes, min_count=1 if nbytes > slots.SMALL_SLOT_BYTES else 0)
        if planned > 1 and nbytes > slots.SMALL_SLOT_BYTES and all_now:
            self.reserve_in_background(nbytes)
        return planned

    def slot_descriptor(self, index: int, serial: int) -> int | None:
        """The file of that slot, for another process; None where it is gone."""
        with self._lock:
            kept = self._owned.get(index)
            return kept.descriptor if kept is not None and kept.slot.serial == serial else None

    @contextlib.contextmanager
    def pin(self, state: SlotState, *, hard: bool = True) -> Iterator[Slot | None]:
        """Keep the lead from overwriting that slot meanwhile; None where it has been already.

        Not ``firmly``: it may, where it has no other. Then the slot stays mapped, and counts no more.
        """
        word = "pinned" if hard else "soft_pinned"
        with self._lock:
            kept = self._owned.get(state.index)
            if kept is None or kept.slot.serial != state.serial:
                kept = None
            else:
                kept.pins[word] += 1
                kept.slot.record.set(word, state.target)
        try:
            yield (
                kept.slot
                if kept is not None and kept.slot.record.complete_snapshot_id() == state.target
                else None
            )
        finally:
            if kept is not None:
                with self._lock:
                    kept.pins[word] -= 1
                    if not kept.pins[word]:
                        kept.slot.record.set(word, 0)

    def distrust_after(self, generation: int, step: int) -> None:
        """Let no snapshot of that generation count that is of a later step."""
        for state in self.control_block.read_slots():
            order = slots.decode_snapshot_id(state.target)
            if order[0] == generation and order[1] > step:
                self.discard(state.index)

    def discard(self, index: int) -> None:
        """Let what lies in that slot count no more."""
        self.control_block.slot_record(index).set("target", 0)

    def close(self) -> None:
        """Give the memory back. Workers that have mapped it keep it until they end."""
        with self._growth_lock, self._lock:
            if self._closed:
                return
            self._closed = True
            for index in list(self._owned):
                self._drop_slot(index)
            self.control_block.close()
            os.close(self.control_descriptor)

    # ---- inside ----------------------------------------------------------------------------------------

    def _create_slots(self, nbytes: int, min_count: int = 0, *, log: bool = True) -> int:
        """Make slots until there are as many as planned (``least``, if given); give the plan.

        What lies in a slot that is too small stays until a larger one holds something newer: until then there
        may be fewer than planned, and who wants the others asks again.
        """
        capacity = slots.round_up_to_page(nbytes)
        with self._growth_lock:
            if self._closed:  # a worker of the last moment asked
                return 0
            allowed = self._allowed_bytes
            # A size for which there is no memory at all costs nobody what there is.
            if count_fitting_slots(capacity, free_bytes=self._available_bytes(), allowed_bytes=allowed):
                self._drop_small_slots(capacity)
            newest, free = slots.newest_complete(self.control_block.read_slots()), self._available_bytes()
            planned = count_fitting_slots(capacity, free_bytes=free, allowed_bytes=allowed)
            stays = newest.capacity if newest is not None and newest.capacity < capacity else 0
            left = None if allowed is None else allowed - stays
            now = count_fitting_slots(capacity, free_bytes=free - stays, allowed_bytes=left)
            if stays and now == 0:
                planned = 0  # there is no way to anything newer
            fitting = sum(kept.slot.capacity >= capacity for kept in self._owned.values())
            before = self._last_plan
            # Whoever asks for less, of what is there already, changes nothing that is worth a line.
            news = before[0] != planned or (before[1] != capacity and fitting < planned)
            if log:
                self._last_plan = (planned, capacity)
            if log and news:
                self._log(describe_budget(planned, capacity, free_bytes=free, allowed_bytes=allowed))
            while fitting < (min(min_count, now) if min_count else now) and not self._closed:
                if not self._create_slot(capacity):
                    return fitting
                fitting += 1
            return planned

    def _available_bytes(self) -> int:
        """Bytes for all slots together, those included that there are."""
        return self._measure_free_bytes() + sum(kept.slot.capacity for kept in self._owned.values())

    def _drop_small_slots(self, capacity: int) -> None:
        """Drop slots that are too small, but for the newest whole one and what is being read."""
        states = self.control_block.read_slots()
        newest = slots.newest_complete(states)
        for state in states:
            if state.capacity < capacity and state is not newest and not (state.pinned or state.soft_pinned):
                self._drop_slot(state.index)

    def _create_slot(self, capacity: int) -> bool:
        with self._lock:
            index = next((i for i in range(slots.MAX_SLOTS) if i not in self._owned), None)
        if index is None:
            return False
        try:
            descriptor = slots.create_memory_file(f"elastic_resume-slot-{index}", capacity)
        except OSError as error:
            if self._failed_capacity != capacity:  # it is asked for again and again
                self._failed_capacity = capacity
                self._log(f"snapshots: no memory for another slot of {format_bytes(capacity)}: {error}")
            return False
        with self._lock:
            self._last_serial += 1
            record = self.control_block.slot_record(index)
            record.reset()
            self._owned[index] = _OwnedSlot(descriptor, Slot(descriptor, capacity, self._last_serial, record))
            record.set("serial", self._last_serial)
            record.set("capacity", capacity)
        return True

    def _drop_slot(self, index: int) -> None:
        with self._lock:
            record = self.control_block.slot_record(index)
            record.set("target", 0)
            record.set("capacity", 0)
            kept = self._owned.pop(index, None)
            if kept is not None:
                os.close(kept.descriptor)
