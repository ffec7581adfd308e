"""Give readers the bytes of a state while they arrive.

A `StreamingBuffer` is a buffer that is filled from the front: threads read a file, or receive from other
nodes (`transfer.py`). A watermark follows it: all bytes below the watermark are written and verified.
The watermark is an integer in the slot's control block, which all ranks of the node see
(`slots/slot_memory.py`), or a private integer. Readers wait until the watermark passes a tensor. So reading,
sending and loading overlap, and each byte is written once.

- No byte that is read from disk or received is used before its digest was checked. A snapshot in this node's
  memory has no digest.
- Nobody waits longer than `STALL_TIMEOUT_S` without progress.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from elastic_resume.checkpoint.layout import Layout, header_size
from elastic_resume.errors import CheckpointError, CorruptError, PeerFailedError
from elastic_resume.ranks.collectives import Collectives
from elastic_resume.state.state_dict import TensorBuffer

WATERMARK_FAILED = (1 << 64) - 1
BROADCAST_BLOCK_BYTES = 1 << 20
STALL_TIMEOUT_S = 1800.0  # the same as `collectives.COLLECTIVE_TIMEOUT`
_PREFETCH_THREADS = 2  # in addition to the thread that loads
_POLL_INTERVAL_S = 0.0005  # interval to read another process's watermark; a disk reads 16 MiB in about 8 ms


def is_local_state_error(error: BaseException | None) -> bool:
    """Return whether ``error`` means that this node's own saved state cannot be loaded."""
    return isinstance(error, CheckpointError) and not isinstance(error, PeerFailedError)


# ---- buffers that are being filled -------------------------------------------------------------------


class Watermark(Protocol):
    """The holder of a watermark: a slot, or a `LocalWatermark`."""

    watermark: int


class LocalWatermark:
    """A watermark that only this process reads."""

    def __init__(self, watermark: int = 0) -> None:
        self.watermark = watermark


class StreamingBuffer:
    """The bytes of a state, and the watermark below which they may be used."""

    def __init__(
        self, memory: memoryview, watermark: Watermark, *, is_filled_elsewhere: bool = False
    ) -> None:
        """``memory`` has exactly the size of the state.

        ``is_filled_elsewhere``: another process fills it, so readers poll.
        """
        self.memory = memory
        self.error: BaseException | None = None
        self._watermark = watermark
        self._poll_interval_s = _POLL_INTERVAL_S if is_filled_elsewhere else STALL_TIMEOUT_S
        self._cancelled = False
        self._tensor_buffer: TensorBuffer | None = None
        self._changed = threading.Condition()

    @classmethod
    def from_complete(cls, memory: memoryview) -> StreamingBuffer:
        """Return a buffer whose bytes are all in place."""
        return cls(memory, LocalWatermark(len(memory)))

    # ---- for the thread that fills it ------------------------------------------------------------------

    def advance(self, arrived_bytes: int) -> None:
        """Record that the first ``arrived_bytes`` are in place and verified.

        Raises:
            PeerFailedError: the attempt was cancelled.

        """
        self.raise_if_cancelled()
        with self._changed:
            self._watermark.watermark = arrived_bytes
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Record that no more bytes arrive. Readers raise ``error``, in other processes a PeerFailedError."""
        with self._changed:
            self.error = self.error or error
            self._watermark.watermark = WATERMARK_FAILED
            self._changed.notify_all()

    def cancel(self) -> None:
        """Stop the filling thread at its next block."""
        self._cancelled = True

    def raise_if_cancelled(self) -> None:
        """Raise PeerFailedError if the attempt was cancelled."""
        if self._cancelled:
            raise PeerFailedError("cancelled, because another node's state failed")

    # ---- for readers -----------------------------------------------------------------------------------

    def available_bytes(self) -> int:
        """Return how many bytes may be used now. Raises the filling thread's error."""
        count = self._watermark.watermark
        if self.error is not None:
            raise self.error
        if count == WATERMARK_FAILED:
            raise PeerFailedError("the local leader could not bring the state into the node's memory")
        return count

    def wait_for_bytes(self, count: int) -> None:
        """Wait until the first ``count`` bytes may be used. Raises the filling thread's error."""
        available = self.available_bytes()
        while available < count:
            available = self._wait_for_progress(available)

    def _wait_for_progress(self, before: int) -> int:
        deadline = time.monotonic() + STALL_TIMEOUT_S
        while (available := self.available_bytes()) <= before:
            if time.monotonic() > deadline:
                raise PeerFailedError(
                    f"no byte of the state arrived for {STALL_TIMEOUT_S:.0f} s, after {available} bytes"
                )
            with self._changed:
                self._changed.wait_for(lambda: self._watermark.watermark > before, self._poll_interval_s)
        return available

    def wait_at_most(self, timeout_s: float, is_there: Callable[[], bool]) -> None:
        """Wait until ``is_there``, which changes with an advance. Raises the filling thread's error.

        It does not poll, so call it only in the process that fills the buffer.
        """

        def is_over() -> bool:
            return self._watermark.watermark == WATERMARK_FAILED or is_there()

        with self._changed:
            self._changed.wait_for(is_over, timeout_s)
        self.available_bytes()

    def arrived_bytes(self) -> int:
        """Return how many bytes may be used now, to show it; 0 after an error."""
        count = self._watermark.watermark
        return count if count != WATERMARK_FAILED else 0

    @property
    def layout(self) -> Layout:
        """The layout in the header; waits for the header."""
        return self._wait_for_header().layout

    def get_tensor(self, name: str) -> Tensor:
        """Return a view of the tensor ``name`` once it has arrived. Raises KeyError or the filler's error."""
        return self._wait_for_tensor(name).tensor(name)

    def peek_tensor(self, name: str) -> Tensor:
        """Return the tensor ``name`` for its shape and dtype; its values may not have arrived."""
        return self._wait_for_header().tensor(name)

    def tensor_bytes(self, name: str) -> memoryview:
        """Return the bytes of the tensor ``name`` once they have arrived."""
        return self._wait_for_tensor(name).tensor_bytes(name)

    def _wait_for_tensor(self, name: str) -> TensorBuffer:
        buffer = self._wait_for_header()
        self.wait_for_bytes(buffer.layout.extents[name].stop)
        return buffer

    def _wait_for_header(self) -> TensorBuffer:
        if self._tensor_buffer is None:
            self.wait_for_bytes(min(8, len(self.memory)))
            size = header_size(self.memory[:8], len(self.memory))
            self.wait_for_bytes(size)
            layout = Layout.parse(self.memory[:size], len(self.memory))
            self._tensor_buffer = TensorBuffer(layout, self.memory)
        return self._tensor_buffer


class BackgroundTask:
    """A function in a thread. Its exception is kept for `join`, and fails a buffer."""

    def __init__(
        self, name: str, action: Callable[[], object], buffer: StreamingBuffer | None = None
    ) -> None:
        """Start the thread. The readers of ``buffer`` get an exception at once."""
        self.error: BaseException | None = None
        self._action = action
        self._buffer = buffer
        # A daemon, because a thread that waits for a dead peer must not delay the exit of this process.
        self._thread = threading.Thread(target=self._run, name=f"elastic-resume-{name}", daemon=True)
        self._thread.start()

    def join(self) -> BaseException | None:
        """Wait for the end of the thread; return its exception."""
        self._thread.join()
        return self.error

    def has_ended_within(self, timeout_s: float) -> bool:
        """Wait for the end of the thread, at most ``timeout_s``; return whether it has come."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._action()
        except BaseException as error:  # noqa: BLE001 - the caller of `join` raises it
            self.error = error
            if self._buffer is not None:
                self._buffer.fail(error)


class Prefetcher:
    """Makes tensors in threads, ahead of the thread that loads them.

    A copy touches new memory: for 415 MB that takes 0.2 s, longer than everything else in a load from memory.
    """

    def __init__(self, names: Iterable[str], copy_tensor: Callable[[str], Tensor]) -> None:
        """Start copying ``names``, in that order; ``copy_tensor`` waits for a tensor and returns a copy."""
        self._copy = copy_tensor
        self._executor = ThreadPoolExecutor(_PREFETCH_THREADS, "elastic-resume-copy")
        self._copies = {name: self._executor.submit(copy_tensor, name) for name in names}

    def make_tensor(self, name: str) -> Tensor:
        """Return a copy of a tensor, which the caller owns. Raises the errors of ``copy_tensor``."""
        copy = self._copies.pop(name, None)
        if copy is None or copy.cancel():  # no thread has begun with it
            return self._copy(name)
        return copy.result()

    def close(self) -> None:
        """Stop copying, and join the threads."""
        self._executor.shutdown(cancel_futures=True)


def broadcast_buffer(collectives: Collectives, buffer: StreamingBuffer, source_rank: int) -> None:
    """Fill ``buffer`` with the source's, block by block as they arrive there, and verify each block.

    One thread of a rank may call this while no other collective runs.

    Raises:
        CheckpointError: the source's buffer failed; on the other ranks a PeerFailedError.
        CorruptError: a block arrived with a wrong digest.

    """
    memory = buffer.memory
    failure: CheckpointError | None = None
    for start in range(0, len(memory), BROADCAST_BLOCK_BYTES):
        block = memory[start : start + BROADCAST_BLOCK_BYTES]
        digest = torch.zeros(16, dtype=torch.uint8)  # zeros announce a failure
        if collectives.rank == source_rank:
            try:
                buffer.wait_for_bytes(start + len(block))
                digest = torch.frombuffer(bytearray(xxhash.xxh3_128_digest(block)), dtype=torch.uint8)
            except CheckpointError as error:
                failure = error
        collectives.broadcast(digest, source_rank)
        if not digest.any():
            raise failure or PeerFailedError(f"rank {source_rank} could not send all of its values")
        collectives.broadcast(torch.frombuffer(block, dtype=torch.uint8), source_rank)
        if buffer.error is not None or collectives.rank == source_rank:
            continue  # after a bad block the others still take part in each broadcast
        if xxhash.xxh3_128_digest(block) == bytes(digest.tolist()):
            buffer.advance(start + len(block))
        else:
            buffer.fail(CorruptError(f"bytes {start} to {start + len(block)} arrived damaged"))
    if buffer.error is not None:
        raise buffer.error
