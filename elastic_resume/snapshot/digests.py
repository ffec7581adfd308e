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
from elastic_resume.snapshot.slot_pool import Rack
from elastic_resume.snapshot.slots import Slot, order_of

WAIT_S = 1.0  # for the local ranks that still copy
LOOK_S = 0.003
PIECE_BYTES = 16 * 1024 * 1024  # 2 ms


def digest_of(
    image: memoryview, layout: Layout, left_out: Collection[str], *, still: Callable[[], bool] = lambda: True
) -> str | None:
    """Digest an image without those tensors; None as soon as ``still`` says that it is being written over.

    The caller makes sure of that after the last byte as well.
    """
    digest = xxhash.xxh3_128()
    for name, extent in layout.extents.items():
        if name in left_out:
            continue
        digest.update(f"{name} {extent.dtype} {extent.shape} ".encode())
        for start in range(extent.start, extent.stop, PIECE_BYTES):
            if not still():
                return None
            digest.update(image[start : min(start + PIECE_BYTES, extent.stop)])
    return digest.hexdigest()


class Digester:
    """Digests what is named to it, from `start` to `close`."""

    def __init__(self, rack: Rack) -> None:
        # Gets generation, step and the digest of it all, 32 hexadecimal digits, in a thread.
        self.tell: Callable[[int, int, str], None] = lambda *_: None
        self._rack = rack
        self._marks: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._layout: tuple[int, Layout, frozenset[str]] | None = None  # by the number that stands for it
        self._thread = threading.Thread(target=self._live, name="elastic-resume-digest", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def name(self, mark: int) -> None:
        """Have that snapshot digested. From any thread."""
        self._marks.put(mark)

    def close(self) -> None:
        """End it."""
        self._marks.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _live(self) -> None:
        lower_priority()
        while (mark := self._marks.get()) is not None:
            with contextlib.suppress(CheckpointError, ValueError):  # words that cannot be true: never counted
                self._digest(mark)

    def _digest(self, mark: int) -> None:
        limit = time.monotonic() + WAIT_S
        while time.monotonic() < limit:
            state = next((one for one in self._rack.control.states() if one.target == mark), None)
            if state is None:
                return
            if state.whole:
                with self._rack.held(state, firmly=False) as slot:
                    if slot is not None:
                        self._digest_slot(slot, mark)
                return
            time.sleep(LOOK_S)

    def _digest_slot(self, slot: Slot, mark: int) -> None:
        used = time.thread_time()
        image, control = slot.image(), self._rack.control
        number = slot.record.get("layout")
        layout = self._layout
        if layout is None or layout[0] != number:
            follows = slots.manifest_of(*slot.notes(), len(image)).follows_rank0
            layout = (number, Layout.parse(image, len(image)), frozenset(follows))
        found = digest_of(image, *layout[1:], still=lambda: slot.record.counts() == mark)
        used_us = int((time.thread_time() - used) * 1e6)
        if found is None or slot.record.counts() != mark:  # written over meanwhile, what was parsed as well
            control.set("digest_cpu_us", max(control.get("digest_cpu_us"), used_us))  # as much at the least
            return
        self._layout = layout
        control.set("digest_cpu_us", used_us)
        self.tell(*order_of(mark), found)
