"""Give one local rank access to its node's slots: reserve, map, fill and read them.

Mapping and populating a large slot takes a moment, so a thread does it. `SlotClient.list_writable` returns
only slots that are ready. `capture` writes snapshots through this class, and `restore` fills slots with
received ones.
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
from elastic_resume.snapshot.ipc import SnapshotClient
from elastic_resume.snapshot.slots import ControlBlock, Slot, SlotState

RESERVE_RETRY_S = 1.0  # a second slot may fit only after a smaller one was dropped


@dataclass(frozen=True)
class LocalSnapshot:
    """A complete snapshot of this node; its manifest's blocks have no digests yet."""

    slot: Slot
    snapshot_id: int
    manifest: Manifest
    image: memoryview

    @property
    def version(self) -> tuple[int, int]:
        """(generation, step)."""
        return self.manifest.version


class SlotClient:
    """The slots of this node, for one of its local ranks."""

    def __init__(self, socket_name: str, local_rank: int, *, is_local_leader: bool) -> None:
        """Connect to the committer's socket.

        Raises:
            ElasticResumeError: the committer does not answer.

        """
        self.is_local_leader = is_local_leader
        self.local_rank = local_rank
        self.slot_count = slot_pool.SLOT_COUNT  # existing or planned; exact after `reserve`
        self.reserved_bytes = 0  # slot size for which `slot_count` is exact
        self._reserved_at = 0.0
        self._client = SnapshotClient(socket_name)
        self.control_block = ControlBlock(self._client.control_descriptor)
        self._slots: dict[tuple[int, int], Slot] = {}
        self._populated: set[tuple[int, int]] = set()
        self._lock = threading.Lock()
        self._prepare_thread: threading.Thread | None = None

    # ---- for snapshots ---------------------------------------------------------------------------------

    def prepare_slots(self, nbytes: int, *, is_estimate: bool = False) -> None:
        """Reserve (as local leader), map and populate slots of ``nbytes`` in a thread.

        ``is_estimate``: the true size is unknown, so do not record how many slots fit.
        """
        if self._prepare_thread is None or not self._prepare_thread.is_alive():
            self._reserved_at = time.monotonic()
            self._prepare_thread = threading.Thread(
                target=self._prepare, args=(nbytes, is_estimate), name="elastic-resume-slots", daemon=True
            )
            self._prepare_thread.start()

    def reserve(self, nbytes: int, *, is_estimate: bool = False, all_now: bool = True) -> int:
        """Reserve slots of ``nbytes`` and return how many there will be; one exists on return.

        Only the local leader calls this. ``all_now``: create the others at once, in the background.
        """
        count = 0
        with contextlib.suppress(OSError, KeyError, TypeError, ValueError):
            answer, _ = self._client.call("reserve", bytes=nbytes, all=all_now)
            count = int(answer["slots"])
        if not is_estimate:
            self.slot_count, self.reserved_bytes = count, nbytes
        return count

    def list_writable(self, nbytes: int) -> list[SlotState]:
        """Return the slots of at least ``nbytes`` that can be written without waiting."""
        fitting = [state for state in self.control_block.read_slots() if state.capacity >= nbytes]
        if nbytes <= slots.SMALL_SLOT_BYTES:
            for state in fitting:
                self._map_and_populate(state)
        elif any((state.index, state.serial) not in self._populated for state in fitting):
            # The present capacity, so that the metadata has room to grow.
            self.prepare_slots(min(state.capacity for state in fitting))
        may_retry = time.monotonic() > self._reserved_at + RESERVE_RETRY_S
        if fitting and len(fitting) < self.slot_count and may_retry:
            self.prepare_slots(min(state.capacity for state in fitting))
        return [state for state in fitting if (state.index, state.serial) in self._populated]

    def map_slot(self, index: int, serial: int | None = None) -> Slot | None:
        """Map slot ``index``; return None if it no longer exists or the committer does not answer."""
        serial = self.control_block.slot_record(index).get("serial") if serial is None else serial
        with self._lock:
            if (index, serial) not in self._slots:
                self._unmap_stale()
                try:
                    answer, descriptor = self._client.call(
                        "slot", expect_descriptor=True, index=index, serial=serial
                    )
                except OSError:
                    return None
                if descriptor < 0:
                    return None
                try:
                    record = self.control_block.slot_record(index)
                    self._slots[index, serial] = Slot(descriptor, int(answer["capacity"]), serial, record)
                finally:
                    os.close(descriptor)
            return self._slots[index, serial]

    def find_slot(self, snapshot_id: int) -> Slot | None:
        """Map the slot assigned to ``snapshot_id``; return None if there is none."""
        for state in self.control_block.read_slots():
            if state.target == snapshot_id:
                return self.map_slot(state.index, state.serial)
        return None

    def send(self, operation: str, **fields: Any) -> None:
        """Send the committer a request without an answer; see `ipc`."""
        self._client.send(operation, **fields)

    def commit(self, snapshot_id: int) -> dict[str, Any]:
        """Wait until the committer has committed ``snapshot_id``; return its answer."""
        answer, _ = self._client.call("commit", timeout_s=None, snapshot_id=snapshot_id)
        return answer

    # ---- for resuming ----------------------------------------------------------------------------------

    def find_newest(self) -> LocalSnapshot | None:
        """Return this node's newest complete snapshot, None if there is none.

        Raises:
            CheckpointError: its words or metadata are damaged.

        """
        state = slots.newest_complete(self.control_block.read_slots())
        slot = self.map_slot(state.index, state.serial) if state is not None else None
        if state is None or slot is None:
            return None
        try:
            image = slot.image()
            manifest = slots.build_manifest(*slot.read_metadata(), len(image))
            Layout.parse(image, len(image))
        except ValueError as error:
            raise CorruptError(f"snapshot: {error}.") from error
        if slots.decode_snapshot_id(state.target) != manifest.version:
            raise CorruptError(f"snapshot: its metadata is of {manifest.version}, its id {state.target:#x}.")
        return LocalSnapshot(slot, state.target, manifest, image)

    def discard(self, index: int) -> None:
        """Make the slot's snapshot incomplete."""
        self._client.send("discard", index=index)
        self.control_block.slot_record(index).set("target", 0)

    def acquire_slot(self, image_bytes: int, manifest: Manifest) -> Slot | None:
        """Return a slot into which an image can be received; None if none is free.

        Only one slot is created now; creating the others would delay the transfer.
        """
        needed = slots.required_slot_bytes(image_bytes, *map(len, _encode_manifest(manifest)))
        if self.reserve(needed, is_estimate=True, all_now=False) == 0:
            return None
        # This never chooses the only snapshot: the source rank may die while it sends.
        state = slots.choose_overwritable(
            [state for state in self.control_block.read_slots() if state.capacity >= needed]
        )
        return self.map_slot(state.index, state.serial) if state is not None else None

    def populate(self, slot: Slot) -> None:
        """Map all pages of a slot; another thread may fill it meanwhile."""
        slot.populate()
        self._populated.add((slot.index, slot.serial))

    def begin_fill(self, slot: Slot) -> None:
        """Make the slot incomplete until `finish_fill`."""
        for name in ("target", "layout", "watermark"):
            slot.record.set(name, 0)

    def finish_fill(self, slot: Slot, manifest: Manifest, *, on_disk: bool) -> None:
        """Make the verified image in ``slot`` this node's snapshot; request its commit unless ``on_disk``."""
        snapshot_id = slots.encode_snapshot_id(*manifest.version)
        static, dynamic = _encode_manifest(manifest)
        slot.write_metadata(b"", manifest.file_bytes, static, dynamic, secrets.randbits(63) | 1)
        slot.record.set("parts", 1)
        slot.record.set_copied(0, snapshot_id)
        slot.record.set("committed" if on_disk else "commit_requested", snapshot_id)
        slot.record.set("target", snapshot_id)
        if not on_disk:
            self._client.send("request_commit", snapshot_id=snapshot_id)

    def close(self) -> None:
        """Close the connection; mapped slots stay mapped."""
        self._client.close()

    # ---- inside ----------------------------------------------------------------------------------------

    def _prepare(self, nbytes: int, is_estimate: bool) -> None:
        if self.is_local_leader:
            self.reserve(nbytes, is_estimate=is_estimate)
        with contextlib.suppress(CheckpointError, OSError):
            for state in self.control_block.read_slots():
                if state.capacity >= nbytes:
                    self._map_and_populate(state)

    def _map_and_populate(self, state: SlotState) -> None:
        key = (state.index, state.serial)
        if key in self._populated:
            return
        slot = self.map_slot(*key)
        if slot is not None:
            self.populate(slot)

    def _unmap_stale(self) -> None:
        existing = {(state.index, state.serial) for state in self.control_block.read_slots()}
        for key in self._slots.keys() - existing:
            self._populated.discard(key)
            del self._slots[key]


def _encode_manifest(manifest: Manifest) -> tuple[bytes, bytes]:
    static = {
        "run_id": manifest.run_id,
        "node": manifest.node,
        "rank": manifest.rank,
        "world_size": manifest.world_size,
        "writer": manifest.writer,
        "follows_rank0": list(manifest.follows_rank0),
        "state": manifest.state,
    }
    dynamic = slots.dynamic_metadata(manifest.generation, manifest.position, manifest.written_at, {})
    return slots.encode_metadata(static), slots.encode_metadata(dynamic)
