"""Take, find, confirm and fail slots for one local rank, by the protocol of `slots.slot_memory`."""

from __future__ import annotations

import time

from elastic_resume.capture.copy_engine import CopyJob
from elastic_resume.slots import slot_memory
from elastic_resume.slots.ipc import SlotClient
from elastic_resume.slots.slot_memory import Slot

# The other local ranks finish the same step at about the same time, or have died.
PEER_TIMEOUT_S = 2.0
POLL_S = 0.0002
SLOW_POLL_S = 0.005  # poll interval after PEER_TIMEOUT_S


class SlotAccess:
    """Takes slots as local leader, and finds, confirms or fails them as any local rank."""

    def __init__(self, slot_client: SlotClient, local_rank: int, local_world_size: int) -> None:
        self.problem = ""  # why the newest attempt to take a slot failed; "" if it did not
        self._client = slot_client
        self._control = slot_client.control_block
        self._local_rank = local_rank
        self._others = [rank for rank in range(local_world_size) if rank != local_rank]
        self.set_copying(0)

    @property
    def copies_at_once(self) -> bool:
        """Whether this script has changed state during a background copy, so that there is none any more."""
        return bool(self._control.get("copies_at_once"))

    # ---- local leader ----------------------------------------------------------------------------------

    def take(self, snapshot_id: int, min_bytes: int, needed_bytes: int) -> Slot | None:
        """Take a slot of at least ``min_bytes``. Return None if no slot is free, and announce that.

        ``needed_bytes`` is the size of a new slot.
        """
        slot = self._choose_slot(snapshot_id, min_bytes, needed_bytes)
        # A peer that found the slot before it was taken may be writing into it.
        if slot is None or not slot.take(snapshot_id) or self._is_peer_behind(snapshot_id):
            self._control.set("decided_id", snapshot_id)
            return None
        return slot

    def announce(self, slot: Slot, snapshot_id: int, share_count: int, *, commit_requested: bool) -> None:
        """Let the other local ranks copy their shares into ``slot``, and request the commit."""
        slot.announce(snapshot_id, share_count=share_count, commit_requested=commit_requested)
        self._control.set("decided_id", snapshot_id)
        if commit_requested:
            self._client.send("request_commit", snapshot_id=snapshot_id)

    def _choose_slot(self, snapshot_id: int, min_bytes: int, needed_bytes: int) -> Slot | None:
        client = self._client
        # A peer may still write into an older slot, which might be taken next.
        limit = time.monotonic() + PEER_TIMEOUT_S
        while self._is_peer_behind(snapshot_id):
            if time.monotonic() > limit:
                return None
            time.sleep(POLL_S)
        states = client.list_writable(min_bytes)
        if not states or client.reserved_bytes < min_bytes:  # the first reservation was a guess
            if needed_bytes > slot_memory.SMALL_SLOT_BYTES:
                client.prepare_slots(needed_bytes)
            elif client.reserve(needed_bytes):
                states = client.list_writable(min_bytes)
        chosen = slot_memory.choose_overwritable(states, is_only_slot=client.slot_count == 1)
        if chosen is None:
            self.problem = (
                "all slots are being committed" if states else "its memory is still being allocated"
            )
            return None
        self.problem = ""
        return client.map_slot(chosen.index, chosen.serial)

    def _is_peer_behind(self, snapshot_id: int) -> bool:
        if not self._control.is_copying(self._others, snapshot_id):
            return False
        self.problem = "a local rank is still copying its share of the previous snapshot"
        return True

    # ---- each local rank -------------------------------------------------------------------------------

    def set_copying(self, snapshot_id: int, *, awaiting_slot: bool = False) -> None:
        """Record which snapshot this rank copies, 0 for none: its slot must not be taken."""
        self._control.set_copying(self._local_rank, snapshot_id, awaiting_slot=awaiting_slot)

    def find_slot(self, snapshot_id: int) -> Slot | None:
        """Map the slot of ``snapshot_id``; return None if there is none."""
        return self._client.find_slot(snapshot_id)

    def wait_for_slot(self, snapshot_id: int, job: CopyJob) -> Slot | None:
        """Wait until the local leader announces the slot of ``snapshot_id``. Return None if it took none.

        The timeout begins only when training waits for the copy: the local leader may evaluate before its
        step ends.
        """
        began = time.monotonic()
        while self._control.get("decided_id") < snapshot_id:
            now = time.monotonic()
            if now > job.wait_started_at + job.peer_timeout_s:
                raise RuntimeError(
                    f"local rank 0 did not reach the same step within {job.peer_timeout_s:g} s"
                )
            time.sleep(POLL_S if now < began + PEER_TIMEOUT_S else SLOW_POLL_S)
        return self.find_slot(snapshot_id)

    def confirm(self, slot: Slot, snapshot_id: int) -> None:
        """Record that this rank has copied its share."""
        slot.record.set_copied(self._local_rank, snapshot_id)

    def copy_at_once(self) -> None:
        """Let no rank of this node copy in the background any more."""
        self._control.set("copies_at_once", 1)

    def fail(self, slot: Slot, snapshot_id: int) -> None:
        """Record that this rank's share is missing or torn."""
        slot.record.set_copied(self._local_rank, snapshot_id | slot_memory.COPY_FAILED)

    def wait_until_complete(self, snapshot_id: int, timeout_s: float) -> bool:
        """Wait for all shares of a snapshot; return whether it is complete."""
        limit = time.monotonic() + timeout_s
        while time.monotonic() < limit:
            slot = self.find_slot(snapshot_id)
            if slot is None or slot.record.has_failed_copy():
                return False
            if slot.record.complete_snapshot_id() == snapshot_id:
                return True
            time.sleep(POLL_S)
        return False

    def list_live_slots(self) -> set[tuple[int, int]]:
        """Return (index, serial) of each existing slot."""
        return {(state.index, state.serial) for state in self._control.read_slots()}
