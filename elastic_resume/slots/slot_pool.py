"""Own a node's slots and their control block, and size them to the state and the memory budget.

The pool never exceeds the budget. When larger slots are needed, it drops small ones, but not the newest
complete snapshot and not one that is being read. `count_fitting_slots` and `describe_budget` are pure.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from elastic_resume import linux, machine, shared_page
from elastic_resume.slots import slot_memory
from elastic_resume.slots.slot_memory import ControlBlock, Slot, SlotState
from elastic_resume.units import format_bytes, format_count

logger = logging.getLogger(__name__)

SLOT_COUNT = 3  # the newest complete one, one being written, one being committed
FREE_MEMORY_FRACTION = 0.5  # training may still need the other half


def count_fitting_slots(slot_bytes: int, *, free_bytes: int, allowed_bytes: int | None = None) -> int:
    """Return how many slots fit, 0 to `SLOT_COUNT`.

    Args:
        slot_bytes: size of one slot.
        free_bytes: memory the node could still take, including slots that would be replaced.
        allowed_bytes: the user's limit for all slots; None: `FREE_MEMORY_FRACTION` of ``free_bytes``.

    """
    allowed = int(free_bytes * FREE_MEMORY_FRACTION) if allowed_bytes is None else allowed_bytes
    return min(SLOT_COUNT, allowed // max(1, slot_bytes))


def describe_budget(
    slot_count: int, slot_bytes: int, *, free_bytes: int, allowed_bytes: int | None = None
) -> str:
    """Describe in one line what the node's snapshots get, and what follows from it."""
    allowed = int(free_bytes * FREE_MEMORY_FRACTION) if allowed_bytes is None else allowed_bytes
    source = f"half of the {format_bytes(free_bytes)} free" if allowed_bytes is None else "snapshot-memory"
    consequences = {
        0: "; training waits for the disk at each checkpoint (a sharded model cannot be saved), and a "
        "failure costs the steps since",
        1: "; it serves commits only, and a failure costs the steps since the last checkpoint",
        2: "; no snapshot is taken during a commit of the older one",
    }
    size, budget = format_bytes(slot_bytes), f"({format_bytes(allowed)} allowed, {source})"
    count = f"{format_count(slot_count, 'slot')} of {size}"
    count = count if slot_count else f"none, a slot of {size} does not fit"
    return f"snapshots: {count} {budget}{consequences.get(slot_count, '')}"


@dataclass
class _OwnedSlot:
    descriptor: int
    slot: Slot
    pins: Counter[str] = field(default_factory=Counter)  # field of the record -> number of pins


class SlotPool:
    """The slots of one node."""

    def __init__(
        self,
        allowed_bytes: int | None,
        *,
        measure_free_bytes: Callable[[], int] = machine.available_memory_bytes,
    ) -> None:
        """Create the control block; `reserve` creates slots.

        Args:
            allowed_bytes: limit for all slots; None: half of the free memory; 0: no slots.
            measure_free_bytes: returns the memory the node could still take.

        """
        self._allowed_bytes = allowed_bytes
        self._measure_free_bytes = measure_free_bytes
        self.control_descriptor = ControlBlock.create()
        self.control_block = ControlBlock(self.control_descriptor)
        self.control_path = linux.name_descriptor(self.control_descriptor)
        self._owned: dict[int, _OwnedSlot] = {}
        self._last_serial = 0
        self._last_plan = (-1, 0)
        self._failed_capacity = 0  # the slot size for which an allocation failed last
        self._closed = False
        self._lock = threading.RLock()
        self._growth_lock = threading.Lock()

    def reserve_in_background(self, nbytes: int, *, log: bool = True) -> None:
        """Create slots of ``nbytes`` in a thread; ``log`` is false if they may never be used."""
        create = functools.partial(self._create_slots, nbytes, log=log)
        threading.Thread(target=create, name="elastic-resume-reserve", daemon=True).start()

    def reserve(self, nbytes: int, *, all_now: bool = True) -> int:
        """Return how many slots of at least ``nbytes`` exist or are planned; 0 if none fits.

        Small slots are created and allocated at once. Of large ones, one is created now and the others in the
        background. With ``all_now`` false, an existing slot is enough. Otherwise one large slot is created
        whose memory is allocated in the background; its writer populates the pages that it is about to fill.
        """
        if not all_now and (count := self._count_fitting(nbytes)):
            return count
        is_large = nbytes > slot_memory.SMALL_SLOT_BYTES
        planned = self._create_slots(nbytes, min_count=int(is_large), allocate=all_now or not is_large)
        if planned > 1 and is_large and all_now:
            self.reserve_in_background(nbytes)
        return planned

    def slot_descriptor(self, index: int, serial: int) -> int | None:
        """Return the slot's file descriptor; None if that slot no longer exists."""
        with self._lock:
            owned = self._owned.get(index)
            return owned.descriptor if owned is not None and owned.slot.serial == serial else None

    @contextlib.contextmanager
    def pin(self, state: SlotState, *, hard: bool = True) -> Iterator[Slot | None]:
        """Keep the local leader from overwriting the slot; yield None if that happened already.

        With ``hard`` false the local leader may overwrite it if no other slot is free. The memory then stays
        mapped.
        """
        pin_field = "pinned" if hard else "soft_pinned"
        with self._lock:
            owned = self._owned.get(state.index)
            if owned is not None and owned.slot.serial == state.serial:
                owned.pins[pin_field] += 1
                owned.slot.record.set(pin_field, state.snapshot_id)
                shared_page.barrier()
            else:
                owned = None
        if owned is None:
            yield None
            return
        try:
            yield owned.slot if owned.slot.record.complete_snapshot_id() == state.snapshot_id else None
        finally:
            with self._lock:
                owned.pins[pin_field] -= 1
                if not owned.pins[pin_field]:
                    owned.slot.record.set(pin_field, 0)

    def close(self) -> None:
        """Free the memory; workers that mapped it keep it until they exit."""
        with self._growth_lock, self._lock:
            if self._closed:
                return
            self._closed = True
            for index in list(self._owned):
                self._drop_slot(index)
            self.control_block.close()
            os.close(self.control_descriptor)

    # ---- inside ----------------------------------------------------------------------------------------

    def _create_slots(
        self, nbytes: int, min_count: int = 0, *, allocate: bool = True, log: bool = True
    ) -> int:
        """Create slots up to the plan (``min_count``, if given); return the planned number.

        A complete snapshot in a slot that is too small stays until a larger slot holds a newer one. Until
        then there may be fewer slots than planned, and the caller has to ask again.
        """
        capacity = slot_memory.round_up_to_page(nbytes)
        with self._growth_lock:
            if self._closed:
                return 0
            allowed = self._allowed_bytes
            # Keep the present slots if not even one of the new size fits.
            if count_fitting_slots(capacity, free_bytes=self._available_bytes(), allowed_bytes=allowed):
                self._drop_small_slots(capacity)
            newest = slot_memory.newest_complete(self.control_block.read_slots())
            free = self._available_bytes()
            planned = count_fitting_slots(capacity, free_bytes=free, allowed_bytes=allowed)
            kept_bytes = newest.capacity if newest is not None and newest.capacity < capacity else 0
            remaining = None if allowed is None else allowed - kept_bytes
            possible = count_fitting_slots(capacity, free_bytes=free - kept_bytes, allowed_bytes=remaining)
            if possible == 0:
                planned = 0  # no larger slot fits beside the newest snapshot
            fitting = self._count_fitting(capacity)
            if log:
                # A smaller request that existing slots satisfy changes nothing.
                last_count, last_capacity = self._last_plan
                if last_count != planned or (last_capacity != capacity and fitting < planned):
                    # With fewer than two slots a failure costs steps, or training waits for the disk.
                    level = logging.WARNING if planned < 2 and allowed != 0 else logging.DEBUG
                    text = describe_budget(planned, capacity, free_bytes=free, allowed_bytes=allowed)
                    logger.log(level, text)
                self._last_plan = (planned, capacity)
            while fitting < (min(min_count, possible) if min_count else possible):
                if not self._create_slot(capacity, allocate=allocate):
                    return fitting
                fitting += 1
            return planned

    def _count_fitting(self, nbytes: int) -> int:
        with self._lock:
            return sum(owned.slot.capacity >= nbytes for owned in self._owned.values())

    def _available_bytes(self) -> int:
        """Return the memory for all slots together, including the existing ones."""
        return self._measure_free_bytes() + sum(owned.slot.capacity for owned in self._owned.values())

    def _drop_small_slots(self, capacity: int) -> None:
        """Drop slots below ``capacity``, except the newest complete one and those being read."""
        states = self.control_block.read_slots()
        newest = slot_memory.newest_complete(states)
        for state in states:
            if state.capacity < capacity and state is not newest and not (state.pinned or state.soft_pinned):
                self._drop_slot(state.index)

    def _create_slot(self, capacity: int, *, allocate: bool) -> bool:
        with self._lock:
            index = next((i for i in range(slot_memory.MAX_SLOTS) if i not in self._owned), None)
        if index is None:
            return False
        record, descriptor = self.control_block.slot_record(index), -1
        try:
            name = f"elastic_resume-slot-{index}"
            descriptor = slot_memory.create_memory_file(name, capacity, allocate=allocate)
            slot = Slot(descriptor, capacity, self._last_serial + 1, record)
        except OSError as error:
            if descriptor >= 0:  # a limit on the address space refuses the mapping
                os.close(descriptor)
            if self._failed_capacity != capacity:  # log once; workers repeat the request
                self._failed_capacity = capacity
                logger.warning(f"snapshots: no memory for another slot of {format_bytes(capacity)}: {error}")
            return False
        with self._lock:
            self._last_serial += 1
            self._owned[index] = _OwnedSlot(descriptor, slot)
            record.set("serial", self._last_serial)  # what the old slot held no longer counts
            record.set("committed", 0)
            record.set("capacity", capacity)
        if not allocate:
            # Not left to the writer alone: allocating here is a quarter cheaper than by page faults there.
            threading.Thread(
                target=_allocate_slot,
                args=(os.dup(descriptor), capacity),
                name="elastic-resume-allocate",
                daemon=True,
            ).start()
        return True

    def _drop_slot(self, index: int) -> None:
        with self._lock:
            self.control_block.slot_record(index).set("capacity", 0)
            owned = self._owned.pop(index, None)
            if owned is not None:
                os.close(owned.descriptor)


def _allocate_slot(descriptor: int, capacity: int) -> None:
    try:
        with contextlib.suppress(OSError):  # the writer's own populating reports it
            slot_memory.allocate_memory_file(descriptor, capacity)
    finally:
        os.close(descriptor)
