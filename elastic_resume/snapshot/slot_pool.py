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
from elastic_resume.snapshot.slots import Control, Slot, SlotState

SLOTS = 3  # the newest whole one, one being written, one being committed to disk
SHARE = 0.5  # of the memory that is free: the rest is for what training itself still takes


def slots_that_fit(slot_bytes: int, *, free_bytes: int, allowed_bytes: int | None = None) -> int:
    """Give the number of slots, 0 to `SLOTS`.

    Args:
        slot_bytes: of one slot.
        free_bytes: that the node could still take, slots that would make room for these included.
        allowed_bytes: what the user grants all slots together; None: `SHARE` of what is free.

    """
    allowed = int(free_bytes * SHARE) if allowed_bytes is None else allowed_bytes
    return min(SLOTS, allowed // max(1, slot_bytes))


def describe(slots: int, slot_bytes: int, *, free_bytes: int, allowed_bytes: int | None = None) -> str:
    """Say in one line what the node's snapshots get, and what that means."""
    allowed = int(free_bytes * SHARE) if allowed_bytes is None else allowed_bytes
    source = f"half of the {size(free_bytes)} free" if allowed_bytes is None else "--snapshot-memory"
    of = f"{size(slot_bytes)} of memory each"
    within = f"({size(allowed)} allowed, {source})"
    if slots >= SLOTS:
        return f"snapshots: {slots} slots with {of} {within}"
    if slots == 2:
        return f"snapshots: 2 slots with {of} {within}; none is taken while a second one is being saved"
    if slots == 1:
        return (
            f"snapshots: 1 slot with {of} {within}: memory holds what is being saved, and a failure costs "
            "the steps since the last save"
        )
    return (
        f"snapshots: none, {size(slot_bytes)} of memory do not fit {within}: training waits for the disk at "
        "each save, and a failure costs the steps since"
    )


def size(count: int) -> str:
    """Bytes for people."""
    if count >= 10**9:
        return f"{count / 1e9:.1f} GB"
    return f"{count / 1e6:.0f} MB" if count >= 10**6 else f"{count / 1e3:.0f} kB"


@dataclass
class _Kept:
    descriptor: int
    slot: Slot
    readers: Counter[str] = field(default_factory=Counter)  # by the word that says so


class Rack:
    """The slots of one node."""

    def __init__(
        self,
        allowed_bytes: int | None,
        *,
        say: Callable[[str], None],
        free: Callable[[], int] = resources.available,
    ) -> None:
        """Make the control block; slots come with `reserve`.

        Args:
            allowed_bytes: for all slots together; None: half of what is free then. 0: there are none.
            say: gets the line that says what there is.
            free: tells how much memory the node could still take.

        """
        self._allowed = allowed_bytes
        self._say = say
        self._free = free
        self.descriptor = Control.make()
        self.control = Control(self.descriptor)
        # A name for guards, to which torchelastic hands no descriptor on. It ends with this process.
        self.path = f"/proc/{os.getpid()}/fd/{self.descriptor}"
        self._kept: dict[int, _Kept] = {}
        self._serial = 0
        self._planned = (-1, 0)
        self._short = 0  # of which size there was no memory
        self._closed = False
        self._lock = threading.RLock()
        self._growing = threading.Lock()

    def expect(self, nbytes: int, *, tell: bool = True) -> None:
        """A state of about that size will come: take memory for it in the background.

        Not ``tell``: it may be that none comes; what there is is said when somebody asks for it.
        """
        threading.Thread(
            target=self._fill_up, args=(nbytes,), kwargs={"tell": tell}, name="rack", daemon=True
        ).start()

    def reserve(self, nbytes: int, *, all_now: bool = True) -> int:
        """Have slots of at least ``nbytes``; give how many there will be. One of them exists on return.

        Of small ones all do: they take milliseconds. Of large ones the others are made in the background, or,
        without ``all_now``, when they are asked for again.
        """
        planned = self._fill_up(nbytes, least=1 if nbytes > slots.SMALL_BYTES else 0)
        if planned > 1 and nbytes > slots.SMALL_BYTES and all_now:
            self.expect(nbytes)
        return planned

    def descriptor_of(self, index: int, serial: int) -> int | None:
        """The file of that slot, for another process; None where it is gone."""
        with self._lock:
            kept = self._kept.get(index)
            return kept.descriptor if kept is not None and kept.slot.serial == serial else None

    @contextlib.contextmanager
    def held(self, state: SlotState, *, firmly: bool = True) -> Iterator[Slot | None]:
        """Keep the lead from overwriting that slot meanwhile; None where it has been already.

        Not ``firmly``: it may, where it has no other. Then the slot stays mapped, and counts no more.
        """
        word = "held" if firmly else "read"
        with self._lock:
            kept = self._kept.get(state.index)
            if kept is None or kept.slot.serial != state.serial:
                kept = None
            else:
                kept.readers[word] += 1
                kept.slot.record.set(word, state.target)
        try:
            yield kept.slot if kept is not None and kept.slot.record.counts() == state.target else None
        finally:
            if kept is not None:
                with self._lock:
                    kept.readers[word] -= 1
                    if not kept.readers[word]:
                        kept.slot.record.set(word, 0)

    def distrust(self, generation: int, step: int) -> None:
        """Let no snapshot of that generation count that is of a later step."""
        for state in self.control.states():
            order = slots.order_of(state.target)
            if order[0] == generation and order[1] > step:
                self.discard(state.index)

    def discard(self, index: int) -> None:
        """Let what lies in that slot count no more."""
        self.control.record(index).set("target", 0)

    def close(self) -> None:
        """Give the memory back. Workers that have mapped it keep it until they end."""
        with self._growing, self._lock:
            if self._closed:
                return
            self._closed = True
            for index in list(self._kept):
                self._drop(index)
            self.control.close()
            os.close(self.descriptor)

    # ---- inside ----------------------------------------------------------------------------------------

    def _fill_up(self, nbytes: int, least: int = 0, *, tell: bool = True) -> int:
        """Make slots until there are as many as planned (``least``, if given); give the plan.

        What lies in a slot that is too small stays until a larger one holds something newer: until then there
        may be fewer than planned, and who wants the others asks again.
        """
        capacity = slots.aligned(nbytes)
        with self._growing:
            if self._closed:  # a worker of the last moment asked
                return 0
            allowed = self._allowed
            # A size for which there is no memory at all costs nobody what there is.
            if slots_that_fit(capacity, free_bytes=self._could_take(), allowed_bytes=allowed):
                self._make_room(capacity)
            newest, free = slots.newest(self.control.states()), self._could_take()
            planned = slots_that_fit(capacity, free_bytes=free, allowed_bytes=allowed)
            stays = newest.capacity if newest is not None and newest.capacity < capacity else 0
            left = None if allowed is None else allowed - stays
            now = slots_that_fit(capacity, free_bytes=free - stays, allowed_bytes=left)
            if stays and now == 0:
                planned = 0  # there is no way to anything newer
            fitting = sum(kept.slot.capacity >= capacity for kept in self._kept.values())
            before = self._planned
            # Whoever asks for less, of what is there already, changes nothing that is worth a line.
            news = before[0] != planned or (before[1] != capacity and fitting < planned)
            if tell:
                self._planned = (planned, capacity)
            if tell and news:
                self._say(describe(planned, capacity, free_bytes=free, allowed_bytes=allowed))
            while fitting < (min(least, now) if least else now) and not self._closed:
                if not self._add(capacity):
                    return fitting
                fitting += 1
            return planned

    def _could_take(self) -> int:
        """Bytes for all slots together, those included that there are."""
        return self._free() + sum(kept.slot.capacity for kept in self._kept.values())

    def _make_room(self, capacity: int) -> None:
        """Drop slots that are too small, but for the newest whole one and what is being read."""
        states = self.control.states()
        newest = slots.newest(states)
        for state in states:
            if state.capacity < capacity and state is not newest and not (state.held or state.read):
                self._drop(state.index)

    def _add(self, capacity: int) -> bool:
        with self._lock:
            index = next((i for i in range(slots.MAX_SLOTS) if i not in self._kept), None)
        if index is None:
            return False
        try:
            descriptor = slots.memory_file(f"elastic_resume-slot-{index}", capacity)
        except OSError as error:
            if self._short != capacity:  # it is asked for again and again
                self._short = capacity
                self._say(f"snapshots: no memory for another slot of {size(capacity)}: {error}")
            return False
        with self._lock:
            self._serial += 1
            record = self.control.record(index)
            record.clear()
            self._kept[index] = _Kept(descriptor, Slot(descriptor, capacity, self._serial, record))
            record.set("serial", self._serial)
            record.set("capacity", capacity)
        return True

    def _drop(self, index: int) -> None:
        with self._lock:
            record = self.control.record(index)
            record.set("target", 0)
            record.set("capacity", 0)
            kept = self._kept.pop(index, None)
            if kept is not None:
                os.close(kept.descriptor)
