"""Send a state's bytes from one rank to the nodes that lack them, while they arrive and are loaded.

A `StreamingBuffer` is a buffer that one thread of one process fills from the front: it reads a file, or
receives from the network. A watermark follows it: all bytes below the watermark are written and verified. The
watermark is an integer in the slot's control block, which all ranks of the node see (`snapshot/slots.py`), or
a private integer. Readers wait until the watermark passes a tensor. So reading, sending and loading overlap,
and each byte is written once.

The source and the receivers of a transfer share a channel. The source broadcasts, for every few blocks::

    frame: status, count, digests │ block │ block │ frame │ block │ …

A digest comes from the checkpoint's manifest. For a snapshot in memory the source computes it while earlier
blocks are in flight. Invariants:

- No byte is used before its digest was checked.
- A source that fails (its disk fails, a block is corrupt) sends a failed frame, so no receiver waits for it.
  A source that dies closes its connections.
- A receiver that finds a bad block still receives the rest, because others share the broadcasts.
- Nobody waits longer than `STALL_TIMEOUT_S` without progress.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
import xxhash
from torch import Tensor
from torch.distributed import Work

from elastic_resume import failpoints
from elastic_resume.checkpoint.layout import Layout, header_size
from elastic_resume.errors import CheckpointError, CorruptError, PeerFailedError
from elastic_resume.restore.collectives import Channel
from elastic_resume.state.state_dict import TensorBuffer

WATERMARK_FAILED = (1 << 64) - 1
STALL_TIMEOUT_S = 1800.0  # the same as `collectives.COLLECTIVE_TIMEOUT`
FRAME_BLOCKS = 2  # a frame costs 0.2 ms, two blocks 12 ms
_MAX_BLOCKS_IN_FLIGHT = 2  # 2.6 to 3.4 GB/s; one at a time reaches 2.6
_PREFETCH_THREADS = 2  # in addition to the thread that loads
_POLL_INTERVAL_S = 0.0005  # interval to read another process's watermark; a disk reads 16 MiB in about 8 ms
_DIGEST_BYTES = 16
_FRAME_BYTES = 8 + FRAME_BLOCKS * _DIGEST_BYTES
_STATUS_OK, _STATUS_FAILED = 1, 2


def is_local_copy_error(error: BaseException | None) -> bool:
    """Return whether ``error`` means that this node's own copy cannot be loaded."""
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

    def __init__(self, memory: memoryview, watermark: Watermark) -> None:
        """``memory`` has exactly the size of the state."""
        self.memory = memory
        self.error: BaseException | None = None
        self._watermark = watermark
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
        if self._cancelled:
            raise PeerFailedError("cancelled, because another node's copy failed")
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
        deadline = time.monotonic() + STALL_TIMEOUT_S
        while available < count:
            with self._changed:
                self._changed.wait(_POLL_INTERVAL_S)
            before, available = available, self.available_bytes()
            if available > before:
                deadline = time.monotonic() + STALL_TIMEOUT_S
            elif time.monotonic() > deadline:
                raise PeerFailedError(
                    f"no byte of the state arrived for {STALL_TIMEOUT_S:.0f} s, after {available} bytes"
                )

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

    def _run(self) -> None:
        try:
            self._action()
        except BaseException as error:  # noqa: BLE001 - the caller of `join` raises it
            self.error = error
            if self._buffer is not None:
                self._buffer.fail(error)


class Prefetcher:
    """Copies tensors out of a buffer in threads, ahead of the thread that loads them.

    A copy touches new memory: for 415 MB that takes 0.2 s, longer than everything else in a load from memory.
    """

    def __init__(self, names: Iterable[str], get_tensor: Callable[[str], Tensor]) -> None:
        """Start copying ``names``, in that order; ``get_tensor`` waits for a tensor and returns a view."""
        self._get_tensor = get_tensor
        self._executor = ThreadPoolExecutor(_PREFETCH_THREADS, "elastic-resume-copy")
        self._copies = {name: self._executor.submit(self._copy, name) for name in names}

    def make_tensor(self, name: str) -> Tensor:
        """Return a copy of a tensor, which the caller owns. Raises the errors of ``get_tensor``."""
        copy = self._copies.pop(name, None)
        if copy is None or copy.cancel():  # no thread has begun with it
            return self._copy(name)
        return copy.result()

    def close(self) -> None:
        """Stop copying, and join the threads."""
        self._executor.shutdown(cancel_futures=True)

    def _copy(self, name: str) -> Tensor:
        return self._get_tensor(name).clone()


# ---- transfer ----------------------------------------------------------------------------------------


def send(
    channel: Channel,
    buffer: StreamingBuffer,
    known_digests: Sequence[str],
    block_bytes: int,
    source_rank: int,
    *,
    sent: Watermark,
) -> None:
    """Send all blocks of ``buffer`` as they arrive here, in ``channel`` of this rank and the receivers.

    ``known_digests`` has the digests of all blocks from a manifest, or nothing. ``sent`` follows the bytes
    that were sent.

    Raises:
        CheckpointError: the buffer failed; the receivers have been informed.

    """
    count = -(-len(buffer.memory) // block_bytes)
    in_flight: deque[Work] = deque()
    index = 0
    while index < count:
        try:
            digests = _wait_for_digests(buffer, known_digests, block_bytes, index)
        except CheckpointError:
            in_flight.append(channel.start_broadcast(_encode_frame(_STATUS_FAILED, ()), source_rank))
            _wait_until_at_most(in_flight, 0)
            raise
        in_flight.append(channel.start_broadcast(_encode_frame(_STATUS_OK, digests), source_rank))
        for _ in digests:
            failpoints.hit("transfer.send")
            block = failpoints.mutate("transfer.block", _slice_block(buffer.memory, index, block_bytes))
            in_flight.append(channel.start_broadcast(torch.frombuffer(block, dtype=torch.uint8), source_rank))
            _wait_until_at_most(in_flight, _MAX_BLOCKS_IN_FLIGHT + 1)
            index += 1
            sent.watermark = min(index * block_bytes, len(buffer.memory))
    _wait_until_at_most(in_flight, 0)


def receive(channel: Channel, buffer: StreamingBuffer, block_bytes: int, source_rank: int) -> None:
    """Receive into ``buffer`` the blocks that `send` sends, and verify them.

    Raises:
        PeerFailedError: the source failed.
        CorruptError: a block arrived with a wrong digest.

    """
    count = -(-len(buffer.memory) // block_bytes)
    in_flight: deque[tuple[Work, int, bytes]] = deque()
    index = 0
    while index < count:
        frame = torch.empty(_FRAME_BYTES, dtype=torch.uint8)
        channel.start_broadcast(frame, source_rank).wait()
        digests = _decode_frame(frame, count - index)
        if not digests:
            for work, _, _ in in_flight:
                work.wait()
            raise PeerFailedError(f"rank {source_rank} could not send all of the state")
        for digest in digests:
            failpoints.hit("transfer.receive")
            while len(in_flight) >= _MAX_BLOCKS_IN_FLIGHT:
                _finish_block(buffer, in_flight.popleft(), block_bytes)
            block = _slice_block(buffer.memory, index, block_bytes)
            work = channel.start_broadcast(torch.frombuffer(block, dtype=torch.uint8), source_rank)
            in_flight.append((work, index, digest))
            index += 1
    while in_flight:
        _finish_block(buffer, in_flight.popleft(), block_bytes)
    if buffer.error is not None:
        raise buffer.error


def _finish_block(buffer: StreamingBuffer, received: tuple[Work, int, bytes], block_bytes: int) -> None:
    """Wait for a block and verify it. After the first bad block the rest is received and ignored."""
    work, index, digest = received
    work.wait()
    if buffer.error is not None:
        return
    block = _slice_block(buffer.memory, index, block_bytes)
    start = index * block_bytes
    stop = start + len(block)
    if xxhash.xxh3_128_digest(block) == digest:
        buffer.advance(stop)
    else:
        buffer.fail(CorruptError(f"bytes {start} to {stop} of the state arrived damaged; nothing was kept."))


def _wait_for_digests(
    buffer: StreamingBuffer, known_digests: Sequence[str], block_bytes: int, first_block: int
) -> list[bytes]:
    """Wait for one block; return its digest, and those of further blocks of the frame that have arrived."""
    buffer.wait_for_bytes(min((first_block + 1) * block_bytes, len(buffer.memory)))
    available = buffer.available_bytes()
    # The last block may be shorter than the others.
    complete = -(-available // block_bytes) if available == len(buffer.memory) else available // block_bytes
    stop = min(first_block + FRAME_BLOCKS, complete)
    if known_digests:
        return [bytes.fromhex(digest) for digest in known_digests[first_block:stop]]
    blocks = (_slice_block(buffer.memory, index, block_bytes) for index in range(first_block, stop))
    return [xxhash.xxh3_128_digest(block) for block in blocks]


def _encode_frame(status: int, digests: Sequence[bytes]) -> torch.Tensor:
    data = bytes([status, len(digests)]).ljust(8, b"\0") + b"".join(digests)
    return torch.frombuffer(bytearray(data.ljust(_FRAME_BYTES, b"\0")), dtype=torch.uint8)


def _decode_frame(frame: torch.Tensor, max_count: int) -> list[bytes]:
    """Return the digests of the next blocks; none if the source failed."""
    data = bytes(frame.tolist())
    status, count = data[0], data[1]
    if status == _STATUS_FAILED:
        return []
    if status != _STATUS_OK or not 0 < count <= min(FRAME_BLOCKS, max_count):
        raise CorruptError(f"a frame of a transfer is invalid: {data[:8].hex()}.")
    return [data[8 + i * _DIGEST_BYTES : 8 + (i + 1) * _DIGEST_BYTES] for i in range(count)]


def _wait_until_at_most(in_flight: deque[Work], max_count: int) -> None:
    while len(in_flight) > max_count:
        in_flight.popleft().wait()


def _slice_block(memory: memoryview, index: int, block_bytes: int) -> memoryview:
    return memory[index * block_bytes : (index + 1) * block_bytes]
