"""Digests of snapshots, so that nodes can compare what must be equal on all of them.

A thread of low priority digests the snapshots that the lead names while they lie in their slots; one that is
written over meanwhile is passed by. What ranks need not agree on (BatchNorm's buffers, say:
`Manifest.follows_rank0`) is left out.

Promise: a digest that is told is of bytes that were whole and of that step. Does not know who compares.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection

import xxhash

from elastic_resume.checkpoint.layout import Layout
from elastic_resume.errors import CheckpointError
from elastic_resume.snapshot import slots
from elastic_resume.snapshot.committer import lower_priority
from elastic_resume.snapshot.slot_pool import SlotPool
from elastic_resume.snapshot.slots import Slot, decode_snapshot_id

COPY_TIMEOUT_S = 1.0  # for the local ranks that still copy
POLL_S = 0.003
CHUNK_BYTES = 16 * 1024 * 1024  # 2 ms


def digest_image(
    image: memoryview,
    layout: Layout,
    excluded: Collection[str],
    *,
    is_current: Callable[[], bool] = lambda: True,
) -> str | None:
    """Digest an image without those tensors; None as soon as ``still`` says that it is being written over.

    The caller makes sure of that after the last byte as well.
    """
    digest = xxhash.xxh3_128()
    for name, extent in layout.extents.items():
        if name in excluded:
            continue
        digest.update(f"{name} {extent.dtype} {extent.shape} ".encode())
        for start in range(extent.start, extent.stop, CHUNK_BYTES):
            if not is_current():
                return None
            digest.update(image[start : min(start + CHUNK_BYTES, extent.stop)])
    return digest.hexdigest()


class SnapshotDigester:
    """Digests what is named to it, from `start` to `close`."""

    def __init__(self, slot_pool: SlotPool) -> None:
        # Gets generation, step and the digest of it all, 32 hexadecimal digits, in a thread.
        self.on_digest: Callable[[int, int, str], None] = lambda *_: None
        self._slot_pool = slot_pool
        self._queue: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._cached_layout: tuple[int, Layout, frozenset[str]] | None = (
            None  # by the number that stands for it
        )
        self._thread = threading.Thread(target=self._run, name="elastic-resume-digest", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def enqueue(self, snapshot_id: int) -> None:
        """Have that snapshot digested. From any thread."""
        self._queue.put(snapshot_id)

    def close(self) -> None:
        """End it."""
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        lower_priority()
        while (mark := self._queue.get()) is not None:
            with contextlib.suppress(CheckpointError, ValueError):  # words that cannot be true: never counted
                self._digest(mark)

    def _digest(self, snapshot_id: int) -> None:
        limit = time.monotonic() + COPY_TIMEOUT_S
        while time.monotonic() < limit:
            state = next(
                (one for one in self._slot_pool.control_block.read_slots() if one.target == snapshot_id), None
            )
            if state is None:
                return
            if state.complete:
                with self._slot_pool.pin(state, hard=False) as slot:
                    if slot is not None:
                        self._digest_slot(slot, snapshot_id)
                return
            time.sleep(POLL_S)

    def _digest_slot(self, slot: Slot, snapshot_id: int) -> None:
        used = time.thread_time()
        image, control = slot.image(), self._slot_pool.control_block
        number = slot.record.get("layout")
        layout = self._cached_layout
        if layout is None or layout[0] != number:
            follows = slots.build_manifest(*slot.read_metadata(), len(image)).follows_rank0
            layout = (number, Layout.parse(image, len(image)), frozenset(follows))
        found = digest_image(
            image, *layout[1:], is_current=lambda: slot.record.complete_snapshot_id() == snapshot_id
        )
        used_us = int((time.thread_time() - used) * 1e6)
        if (
            found is None or slot.record.complete_snapshot_id() != snapshot_id
        ):  # written over meanwhile, what was parsed as well
            control.set("digest_cpu_us", max(control.get("digest_cpu_us"), used_us))  # as much at the least
            return
        self._cached_layout = layout
        control.set("digest_cpu_us", used_us)
        self.on_digest(*decode_snapshot_id(snapshot_id), found)
