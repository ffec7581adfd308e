"""This rank's view of its node's slots: mapped, and ready to be written or read.

Slots are mapped and populated by a thread, since both take a moment for a large state; until then they are
not `usable`. Knows nothing of what is copied (`snapshot`) or resumed (`resume`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from dataclasses import dataclass
from typing import Any

from elastic_resume.checkpoint.layout import Layout
from elastic_resume.checkpoint.manifest import Manifest
from elastic_resume.errors import CheckpointError, CorruptError
from elastic_resume.snapshot import slot_pool, slots
from elastic_resume.snapshot.ipc import Line
from elastic_resume.snapshot.slots import Control, Slot, SlotState

ASK_AGAIN_S = 1.0  # for slots that there was no room for, before a smaller one could go


@dataclass(frozen=True)
class Held:
    """A snapshot that this node holds whole. The manifest's blocks have no digests yet."""

    slot: Slot
    mark: int
    manifest: Manifest
    image: memoryview

    @property
    def order(self) -> tuple[int, int]:
        """(generation, step)."""
        return self.manifest.order


class Memory:
    """The slots of this node, for one of its local ranks."""

    def __init__(self, keeper: str, local_rank: int, *, lead: bool) -> None:
        """Reach the keeper of that name.

        Raises:
            ElasticResumeError: it does not answer.

        """
        self.lead = lead
        self.local_rank = local_rank
        self.slots = slot_pool.SLOTS  # that there are, or will be: known once some were asked for
        self._asked_at = 0.0
        self.known_bytes = 0  # of a slot, for which that is known
        self._line = Line(keeper)
        self.control = Control(self._line.control)
        self._slots: dict[tuple[int, int], Slot] = {}
        self._ready: set[tuple[int, int]] = set()
        self._lock = threading.Lock()
        self._preparing: threading.Thread | None = None

    # ---- for snapshots ---------------------------------------------------------------------------------

    def prepare(self, nbytes: int, *, guessed: bool = False) -> None:
        """Have slots of ``nbytes`` made, mapped and populated in the background. For the lead.

        ``guessed``: the true size is not known yet, so what there is room for says nothing.
        """
        if self._preparing is None or not self._preparing.is_alive():
            self._asked_at = time.monotonic()
            self._preparing = threading.Thread(
                target=self._prepare, args=(nbytes, guessed), name="elastic-resume-slots", daemon=True
            )
            self._preparing.start()

    def reserve(self, nbytes: int, *, guessed: bool = False, all_now: bool = True) -> int:
        """Have slots of ``nbytes`` made; give how many there will be, of which one is there. For the lead.

        ``all_now``: whether the others are to be made at once, in the background.
        """
        count = 0
        with contextlib.suppress(OSError, KeyError, TypeError, ValueError):
            answer, _ = self._line.ask("reserve", bytes=nbytes, all=all_now)
            count = int(answer["slots"])
        if not guessed:
            self.slots, self.known_bytes = count, nbytes
        return count

    def usable(self, nbytes: int) -> list[SlotState]:
        """The slots that can be written now without waiting, of those that are large enough."""
        fitting = [state for state in self.control.states() if state.capacity >= nbytes]
        if nbytes <= slots.SMALL_BYTES:
            for state in fitting:
                self._attach(state)
        elif any((state.index, state.serial) not in self._ready for state in fitting):
            # Not less than there is, so that notes have room to grow.
            self.prepare(min(state.capacity for state in fitting))
        if fitting and len(fitting) < self.slots and time.monotonic() > self._asked_at + ASK_AGAIN_S:
            self.prepare(min(state.capacity for state in fitting))
        return [state for state in fitting if (state.index, state.serial) in self._ready]

    def slot(self, index: int, serial: int | None = None) -> Slot | None:
        """Map a slot; None where it is gone."""
        serial = self.control.record(index).get("serial") if serial is None else serial
        with self._lock:
            if (index, serial) not in self._slots:
                self._forget_old()
                try:
                    answer, descriptor = self._line.ask(
                        "slot", wants_descriptor=True, index=index, serial=serial
                    )
                except OSError:
                    return None
                if descriptor < 0:
                    return None
                try:
                    record = self.control.record(index)
                    self._slots[index, serial] = Slot(descriptor, int(answer["capacity"]), serial, record)
                finally:
                    os.close(descriptor)
            return self._slots[index, serial]

    def find(self, mark: int) -> Slot | None:
        """The slot into which the lead wants ``mark`` written; None where there is none."""
        for state in self.control.states():
            if state.target == mark:
                return self.slot(state.index, state.serial)
        return None

    def tell(self, ask: str, **fields: Any) -> None:
        """Tell the keeper something; see `handing`."""
        self._line.tell(ask, **fields)

    def commit(self, mark: int) -> dict[str, Any]:
        """Wait until the keeper has committed ``mark``; give its answer."""
        answer, _ = self._line.ask("commit", timeout_s=None, mark=mark)
        return answer

    # ---- for resuming ----------------------------------------------------------------------------------

    def newest(self) -> Held | None:
        """The newest snapshot of this node.

        Raises:
            CheckpointError: there is one, and its words or notes cannot be true.

        """
        state = slots.newest(self.control.states())
        slot = self.slot(state.index, state.serial) if state is not None else None
        if state is None or slot is None:
            return None
        try:
            image = slot.image()
            manifest = slots.manifest_of(*slot.notes(), len(image))
            Layout.parse(image, len(image))
        except ValueError as error:
            raise CorruptError(f"snapshot: {error}.") from error
        if slots.order_of(state.target) != manifest.order:
            raise CorruptError(f"snapshot: its notes are of {manifest.order}, its mark of {state.target:#x}.")
        return Held(slot, state.target, manifest, image)

    def discard(self, index: int) -> None:
        """Let what lies in that slot count no more."""
        self._line.tell("discard", index=index)
        self.control.record(index).set("target", 0)

    def room(self, image_bytes: int, manifest: Manifest) -> Slot | None:
        """A slot into which an image with that manifest can be filled; None: there is none to spare.

        The others have to wait: to make them takes a third of the time in which the image arrives.
        """
        needed = slots.room_for(image_bytes, *map(len, _notes(manifest)))
        if self.reserve(needed, guessed=True, all_now=False) == 0:
            return None
        # An older snapshot stays where it is the only one: the source may die while it sends.
        chosen = slots.choose([state for state in self.control.states() if state.capacity >= needed])
        return self.slot(chosen.index, chosen.serial) if chosen is not None else None

    def populate(self, slot: Slot) -> None:
        """Have all pages of a slot mapped; whoever fills it may be doing so already."""
        slot.populate()
        self._ready.add((slot.index, slot.serial))

    def begin_fill(self, slot: Slot) -> None:
        """From now on nothing counts in ``slot``, until `finish_fill`."""
        for name in ("target", "layout", "arrived"):
            slot.record.set(name, 0)

    def finish_fill(self, slot: Slot, manifest: Manifest, *, on_disk: bool) -> None:
        """The image in ``slot`` is whole and verified: it counts as this node's snapshot from now on.

        Where the node's disk has no such copy (``on_disk`` says), the keeper commits it.
        """
        mark = slots.mark_of(*manifest.order)
        static, dynamic = _notes(manifest)
        slot.describe(b"", manifest.file_bytes, static, dynamic, secrets.randbits(63) | 1)
        slot.record.set("parts", 1)
        slot.record.mark(0, mark)
        slot.record.set("saved" if on_disk else "want", mark)
        slot.record.set("target", mark)
        if not on_disk:
            self._line.tell("wanted", mark=mark)

    def close(self) -> None:
        """End the connection; what is mapped stays."""
        self._line.close()

    # ---- inside ----------------------------------------------------------------------------------------

    def _prepare(self, nbytes: int, guessed: bool) -> None:
        if self.lead:
            self.reserve(nbytes, guessed=guessed)
        with contextlib.suppress(CheckpointError, OSError):
            for state in self.control.states():
                if state.capacity >= nbytes:
                    self._attach(state)

    def _attach(self, state: SlotState) -> None:
        key = (state.index, state.serial)
        if key in self._ready:
            return
        slot = self.slot(*key)
        if slot is not None:
            self.populate(slot)

    def _forget_old(self) -> None:
        alive = {(state.index, state.serial) for state in self.control.states()}
        for key in [key for key in self._slots if key not in alive]:
            self._ready.discard(key)
            del self._slots[key]


def _notes(manifest: Manifest) -> tuple[bytes, bytes]:
    static = {
        "run_id": manifest.run_id,
        "node": manifest.node,
        "rank": manifest.rank,
        "world_size": manifest.world_size,
        "writer": manifest.writer,
        "follows_rank0": list(manifest.follows_rank0),
        "state": manifest.state,
    }
    moving = slots.moving(manifest.generation, manifest.position, manifest.written_at, {})
    return slots.to_bytes(static), slots.to_bytes(moving)
