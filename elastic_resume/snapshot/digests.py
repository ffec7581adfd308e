"""Digest snapshots in the background, so that replicas can be compared while training goes on.

A low-priority thread digests the snapshots that `SnapshotDigester.enqueue` names, while they lie in their
slots. It skips a snapshot that is overwritten meanwhile, and leaves out tensors that may differ between ranks
(`Manifest.follows_rank0`). A reported digest is always that of one complete snapshot.
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

COPY_TIMEOUT_S = 1.0  # while local ranks still copy their shares
POLL_S = 0.003
CHUNK_BYTES = 16 << 20  # takes 2 ms; `is_current` is checked for each


def digest_image(
    image: memoryview,
    layout: Layout,
    excluded: Collection[str],
    *,
    is_current: Callable[[], bool] = lambda: True,
) -> str | None:
    """Digest an image without the ``excluded`` tensors; return None once ``is_current`` is false.

    The caller must check again afterwards that the snapshot was not overwritten.
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
    """Digests requested snapshots in a thread, from `start` to `close`."""

    def __init__(self, slot_pool: SlotPool) -> None:
        # Called in the thread with generation, step and the digest (32 hexadecimal digits).
        self.on_digest: Callable[[int, int, str], None] = lambda *_: None
        self._slot_pool = slot_pool
        self._queue: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._cached_layout: tuple[int, Layout, frozenset[str]] | None = None  # layout id, layout, excluded
        self._thread = threading.Thread(target=self._run, name="elastic-resume-digest", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def enqueue(self, snapshot_id: int) -> None:
        """Request the digest of a snapshot; may be called from any thread."""
        self._queue.put(snapshot_id)

    def close(self) -> None:
        """Stop the thread."""
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        lower_priority()
        while (snapshot_id := self._queue.get()) is not None:
            with contextlib.suppress(CheckpointError, ValueError):  # damaged metadata; the commit reports it
                self._digest(snapshot_id)

    def _digest(self, snapshot_id: int) -> None:
        deadline = time.monotonic() + COPY_TIMEOUT_S
        while time.monotonic() < deadline:
            states = self._slot_pool.control_block.read_slots()
            state = next((state for state in states if state.target == snapshot_id), None)
            if state is None:
                return
            if state.complete:
                with self._slot_pool.pin(state, hard=False) as slot:
                    if slot is not None:
                        self._digest_slot(slot, snapshot_id)
                return
            time.sleep(POLL_S)

    def _digest_slot(self, slot: Slot, snapshot_id: int) -> None:
        def is_current() -> bool:
            return slot.record.complete_snapshot_id() == snapshot_id

        cpu_start = time.thread_time()
        image, control = slot.image(), self._slot_pool.control_block
        layout_id = slot.record.get("layout")
        cached = self._cached_layout
        if cached is None or cached[0] != layout_id:
            excluded = slots.build_manifest(*slot.read_metadata(), len(image)).follows_rank0
            cached = (layout_id, Layout.parse(image, len(image)), frozenset(excluded))
        digest = digest_image(image, *cached[1:], is_current=is_current)
        cpu_us = int((time.thread_time() - cpu_start) * 1e6)
        if digest is None or not is_current():  # overwritten, so the layout may be torn too
            control.set("digest_cpu_us", max(control.get("digest_cpu_us"), cpu_us))  # a lower bound
            return
        self._cached_layout = cached
        control.set("digest_cpu_us", cpu_us)
        self.on_digest(*decode_snapshot_id(snapshot_id), digest)
