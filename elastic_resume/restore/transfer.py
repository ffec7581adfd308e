"""From a rank that holds an image to those whose nodes lack it.

Only the source and the receivers take part, in broadcasts. Before a few blocks of the image goes a *frame*
with their digests: of a checkpoint those of its manifest, of a snapshot in memory what the source finds while
the blocks before are under way. A receiver puts each block in its place once, straight into its node's slot,
and nothing may be used before its digest was checked.

A source that cannot go on (its disk fails, a block of it is bad) says so in a frame, so nobody waits for it.
One that dies closes its connections.

An image whose bytes are still coming: each tensor can be had as soon as it is in place and verified.

One thread of one process fills the image and moves a watermark, a word that all ranks of the node may see
(`store/slots.py`); everybody else waits for the watermark before looking. So reading, sending and loading
overlap, and each byte is moved once.

Promise: what `tensor` and `bytes_of` give was verified by whoever filled it. Whoever waits hears of a filler
that fails, and never waits for one for longer than `LIMIT_S` without progress.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
import xxhash
from torch import Tensor
from torch.distributed import Work

from elastic_resume import failpoints
from elastic_resume.checkpoint.layout import Layout, header_size
from elastic_resume.errors import CheckpointError, CorruptError, UnreadableError
from elastic_resume.restore.collectives import Channel
from elastic_resume.state.tensor_buffer import TensorBuffer

WATERMARK_FAILED = (1 << 64) - 1
STALL_TIMEOUT_S = 1800.0  # as long as a collective may take: see `world.TIMEOUT`
_PREFETCH_THREADS = 2  # beside the thread that loads
_POLL_INTERVAL_S = 0.0005  # at the word of another process; a block of 16 MiB takes a disk some 8 ms


class PeerFailedError(UnreadableError):
    """Another rank could not give what this one needs; that rank tells why. Says nothing of a copy here."""


class Watermark(Protocol):
    """Where the watermark is kept: a slot, or a `Private` word."""

    watermark: int


class LocalWatermark:
    """The word of an image that this process alone looks at."""

    def __init__(self, arrived: int = 0) -> None:
        self.watermark = arrived


class StreamingBuffer:
    """An image, the watermark below which it may be used, and what went wrong with filling it."""

    def __init__(self, memory: memoryview, watermark: Watermark) -> None:
        """``memory`` is exactly the image."""
        self.memory = memory
        self.error: BaseException | None = None
        self._watermark = watermark
        self._cancelled = False
        self._tensor_buffer: TensorBuffer | None = None
        self._changed = threading.Condition()

    @classmethod
    def from_complete(cls, memory: memoryview) -> StreamingBuffer:
        """Give an image of which all has arrived."""
        return cls(memory, LocalWatermark(len(memory)))

    # ---- for who fills it ------------------------------------------------------------------------------

    def advance(self, arrived_bytes: int) -> None:
        """Say that the first ``count`` bytes are in place and verified.

        Raises:
            PeerFailedError: nobody wants them any more.

        """
        if self._cancelled:
            raise PeerFailedError("given up, since another node's copy failed")
        with self._changed:
            self._watermark.watermark = arrived_bytes
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Say that no more will come; who waits raises ``error``, in other processes a PeerFailedError."""
        with self._changed:
            self.error = self.error or error
            self._watermark.watermark = WATERMARK_FAILED
            self._changed.notify_all()

    def cancel(self) -> None:
        """Have the filler stop at its next block."""
        self._cancelled = True

    # ---- for who uses it -------------------------------------------------------------------------------

    def available_bytes(self) -> int:
        """How many bytes may be used now. Raises what the filler met."""
        count = self._watermark.watermark
        if self.error is not None:
            raise self.error
        if count == WATERMARK_FAILED:
            raise PeerFailedError("the rank that leads this node could not bring the state into its memory")
        return count

    def wait_for_bytes(self, count: int) -> None:
        """Return when the first ``count`` bytes may be used. Raises what the filler met."""
        here = self.available_bytes()
        until = time.monotonic() + STALL_TIMEOUT_S
        while here < count:
            with self._changed:
                self._changed.wait(_POLL_INTERVAL_S)
            before, here = here, self.available_bytes()
            if here > before:
                until = time.monotonic() + STALL_TIMEOUT_S
            elif time.monotonic() > until:
                raise PeerFailedError(
                    f"no byte of the state arrived for {STALL_TIMEOUT_S:.0f} s, after {here} bytes"
                )

    @property
    def layout(self) -> Layout:
        """What the header says; waits for it."""
        return self._wait_for_header().layout

    def get_tensor(self, name: str) -> Tensor:
        """Give the tensor ``name`` as a view, once it has arrived. Raises KeyError or the filler's error."""
        image = self._wait_for_header()
        self.wait_for_bytes(image.layout.extents[name].stop)
        return image.tensor(name)

    def peek_tensor(self, name: str) -> Tensor:
        """Give the tensor ``name`` for its shape and dtype: its values may not be there yet."""
        return self._wait_for_header().tensor(name)

    def tensor_bytes(self, name: str) -> memoryview:
        """Give the bytes of the tensor ``name``, when they have arrived."""
        image = self._wait_for_header()
        self.wait_for_bytes(image.layout.extents[name].stop)
        return image.tensor_bytes(name)

    def _wait_for_header(self) -> TensorBuffer:
        if self._tensor_buffer is None:
            self.wait_for_bytes(min(8, len(self.memory)))
            size = header_size(self.memory[:8], len(self.memory))
            self.wait_for_bytes(size)
            self._tensor_buffer = TensorBuffer(
                Layout.parse(self.memory[:size], len(self.memory)), self.memory
            )
        return self._tensor_buffer


class BackgroundTask:
    """A function that runs in a thread; what it raises is kept for `join`, and told to an image."""

    def __init__(
        self, name: str, action: Callable[[], object], buffer: StreamingBuffer | None = None
    ) -> None:
        """Start it. ``image``: whose users have to hear of an error at once."""
        self.error: BaseException | None = None
        self._action = action
        self._buffer = buffer
        # A daemon: whoever waits for a peer that is gone must not keep this process from ending.
        self._thread = threading.Thread(target=self._run, name=f"elastic-resume-{name}", daemon=True)
        self._thread.start()

    def join(self) -> BaseException | None:
        """Wait for its end; give what it raised."""
        self._thread.join()
        return self.error

    def _run(self) -> None:
        try:
            self._action()
        except BaseException as error:  # noqa: BLE001  raised by who joins
            self.error = error
            if self._buffer is not None:
                self._buffer.fail(error)


class Prefetcher:
    """Copies of tensors for objects to keep, made in threads ahead of who asks for them, as they arrive.

    A copy is memory that is touched for the first time: 415 MB took 0.2 s, which is longer than everything
    else that a load from memory does. ``tensor`` gives a view, and waits for it.
    """

    def __init__(self, names: Iterable[str], get_tensor: Callable[[str], Tensor]) -> None:
        """Begin to copy the tensors ``names``, in that order."""
        self._get_tensor = get_tensor
        self._pending = dict.fromkeys(names)
        self._in_progress: set[str] = set()
        self._finished: dict[str, Tensor] = {}
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._tasks = [
            BackgroundTask("copy", self._copy_pending)
            for _ in range(_PREFETCH_THREADS if self._pending else 0)
        ]

    def make_tensor(self, name: str) -> Tensor:
        """Give a copy of a tensor, which is the caller's. Raises what ``tensor`` does."""
        with self._changed:
            self._pending.pop(name, None)
            self._changed.wait_for(lambda: name not in self._in_progress or self._error is not None)
            if self._error is not None:
                raise self._error
            if name in self._finished:
                return self._finished.pop(name)
        return self._get_tensor(name).clone()

    def close(self) -> None:
        """Make no more of them."""
        with self._changed:
            self._pending.clear()
        for task in self._tasks:
            task.join()

    def _copy_pending(self) -> None:
        while True:
            with self._changed:
                name = next(iter(self._pending), None)
                if name is None or self._error is not None:
                    return
                del self._pending[name]
                self._in_progress.add(name)
            try:
                made = self._get_tensor(name).clone()
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                raise
            with self._changed:
                self._finished[name] = made
                self._in_progress.discard(name)
                self._changed.notify_all()


def is_local_copy_error(error: BaseException | None) -> bool:
    """Whether ``error`` says that this node's own copy cannot be loaded."""
    return isinstance(error, CheckpointError) and not isinstance(error, PeerFailedError)


FRAME_BLOCKS = 2  # a frame costs 0.2 ms, two blocks 12 ms
_MAX_BLOCKS_IN_FLIGHT = (
    2  # blocks: 2.6 to 3.4 GB/s, where one after the other gives 2.6 and the whole in one piece 2.9 to 3.4
)
_DIGEST_BYTES = 16
_FRAME_BYTES = 8 + FRAME_BLOCKS * _DIGEST_BYTES
_STATUS_OK, _STATUS_FAILED = 1, 2


def send(
    channel: Channel,
    buffer: StreamingBuffer,
    known_digests: Sequence[str],
    block_bytes: int,
    source_rank: int,
) -> None:
    """Send the whole of ``image``, as far as it has arrived here. ``known``: its blocks' digests, or nothing.

    Raises:
        CheckpointError: what the filler of ``image`` met; the receivers have been told.

    """
    count = -(-len(buffer.memory) // block_bytes)
    flying: deque[Work] = deque()
    at = 0
    while at < count:
        try:
            digests = _wait_for_digests(buffer, known_digests, block_bytes, at)
        except CheckpointError:
            flying.append(channel.start_broadcast(_encode_frame(_STATUS_FAILED, ()), source_rank))
            _wait_until_at_most(flying, 0)
            raise
        flying.append(channel.start_broadcast(_encode_frame(_STATUS_OK, digests), source_rank))
        for index in range(at, at + len(digests)):
            failpoints.hit("transfer.send")
            block = failpoints.mutate("transfer.block", _slice_block(buffer.memory, index, block_bytes))
            flying.append(channel.start_broadcast(torch.frombuffer(block, dtype=torch.uint8), source_rank))
            _wait_until_at_most(flying, _MAX_BLOCKS_IN_FLIGHT + 1)
        at += len(digests)
    _wait_until_at_most(flying, 0)


def receive(channel: Channel, buffer: StreamingBuffer, block_bytes: int, source_rank: int) -> None:
    """Receive and verify what `send` sends.

    Whatever goes wrong here, all blocks are received first: the source and the other receivers are in the
    same broadcasts and would wait for this rank.

    Raises:
        PeerFailedError: the source could not go on.
        CorruptError: a block arrived with another digest than its source's.

    """
    count = -(-len(buffer.memory) // block_bytes)
    flying: deque[tuple[Work, int, bytes]] = deque()
    at = 0
    while at < count:
        frame = torch.empty(_FRAME_BYTES, dtype=torch.uint8)
        channel.start_broadcast(frame, source_rank).wait()
        digests = _decode_frame(frame, count - at)
        if not digests:
            for work, _, _ in flying:
                work.wait()
            raise PeerFailedError(f"rank {source_rank} could not send all of the state")
        for digest in digests:
            failpoints.hit("transfer.receive")
            while len(flying) >= _MAX_BLOCKS_IN_FLIGHT:
                _finish_block(buffer, flying.popleft(), block_bytes)
            block = _slice_block(buffer.memory, at, block_bytes)
            work = channel.start_broadcast(torch.frombuffer(block, dtype=torch.uint8), source_rank)
            flying.append((work, at, digest))
            at += 1
    while flying:
        _finish_block(buffer, flying.popleft(), block_bytes)
    if buffer.error is not None:
        raise buffer.error


def _finish_block(buffer: StreamingBuffer, received: tuple[Work, int, bytes], block_bytes: int) -> None:
    work, index, digest = received
    work.wait()
    block = _slice_block(buffer.memory, index, block_bytes)
    if buffer.error is not None:
        return
    start = index * block_bytes
    if xxhash.xxh3_128_digest(block) != digest:
        text = f"bytes {start} to {start + len(block)} of the state arrived damaged; nothing was kept."
        buffer.fail(CorruptError(text))
        return
    buffer.advance(start + len(block))


def _wait_for_digests(
    buffer: StreamingBuffer, known_digests: Sequence[str], block_bytes: int, first_block: int
) -> list[bytes]:
    """Wait until block ``at`` can be sent; give its digest, and those of what follows and is there too."""
    buffer.wait_for_bytes(min((first_block + 1) * block_bytes, len(buffer.memory)))
    here = buffer.available_bytes()
    stop = min(
        first_block + FRAME_BLOCKS,
        -(-here // block_bytes) if here == len(buffer.memory) else here // block_bytes,
    )
    if known_digests:
        return [bytes.fromhex(digest) for digest in known_digests[first_block:stop]]
    blocks = (_slice_block(buffer.memory, index, block_bytes) for index in range(first_block, stop))
    return [xxhash.xxh3_128_digest(block) for block in blocks]


def _encode_frame(status: int, digests: Sequence[bytes]) -> torch.Tensor:
    data = bytes([status, len(digests)]).ljust(8, b"\0") + b"".join(digests)
    return torch.frombuffer(bytearray(data.ljust(_FRAME_BYTES, b"\0")), dtype=torch.uint8)


def _decode_frame(frame: torch.Tensor, max_count: int) -> list[bytes]:
    """Give the digests of the blocks that come next; none where the source could not go on."""
    data = bytes(frame.tolist())
    status, count = data[0], data[1]
    if status == _STATUS_FAILED:
        return []
    if status != _STATUS_OK or not 0 < count <= min(FRAME_BLOCKS, max_count):
        raise CorruptError(f"a frame of a transfer is not one of ours: {data[:8].hex()}.")
    return [data[8 + i * _DIGEST_BYTES : 8 + (i + 1) * _DIGEST_BYTES] for i in range(count)]


def _wait_until_at_most(in_flight: deque[Work], max_count: int) -> None:
    while len(in_flight) > max_count:
        in_flight.popleft().wait()


def _slice_block(memory: memoryview, index: int, block_bytes: int) -> memoryview:
    return memory[index * block_bytes : (index + 1) * block_bytes]
