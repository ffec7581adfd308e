"""From a rank that holds an image to those whose nodes lack it.

Only the source and the receivers take part, in broadcasts. Before a few blocks of the image goes a *frame*
with their digests: of a checkpoint those of its manifest, of a snapshot in memory what the source finds while
the blocks before are under way. A receiver puts each block in its place once, straight into its node's slot,
and nothing may be used before its digest was checked.

A source that cannot go on (its disk fails, a block of it is bad) says so in a frame, so nobody waits for it.
One that dies closes its connections.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import xxhash
from torch.distributed import Work

from elastic_resume import failpoints
from elastic_resume.errors import CheckpointError, CorruptError
from elastic_resume.worker.arriving import Arriving, PeerFailedError
from elastic_resume.worker.world import Channel

FRAME_BLOCKS = 2  # a frame costs 0.2 ms, two blocks 12 ms
_IN_FLIGHT = (
    2  # blocks: 2.6 to 3.4 GB/s, where one after the other gives 2.6 and the whole in one piece 2.9 to 3.4
)
_DIGEST_BYTES = 16
_FRAME_BYTES = 8 + FRAME_BLOCKS * _DIGEST_BYTES
_GOES_ON, _FAILED = 1, 2


def send(channel: Channel, image: Arriving, known: Sequence[str], block_bytes: int, source_rank: int) -> None:
    """Send the whole of ``image``, as far as it has arrived here. ``known``: its blocks' digests, or nothing.

    Raises:
        CheckpointError: what the filler of ``image`` met; the receivers have been told.

    """
    count = -(-len(image.memory) // block_bytes)
    flying: deque[Work] = deque()
    at = 0
    while at < count:
        try:
            digests = _ready(image, known, block_bytes, at)
        except CheckpointError:
            flying.append(channel.start(_frame(_FAILED, ()), source_rank))
            _land(flying, 0)
            raise
        flying.append(channel.start(_frame(_GOES_ON, digests), source_rank))
        for index in range(at, at + len(digests)):
            failpoints.hit("transfer.send")
            block = failpoints.passing("transfer.block", _block(image.memory, index, block_bytes))
            flying.append(channel.start(torch.frombuffer(block, dtype=torch.uint8), source_rank))
            _land(flying, _IN_FLIGHT + 1)
        at += len(digests)
    _land(flying, 0)


def receive(channel: Channel, image: Arriving, block_bytes: int, source_rank: int) -> None:
    """Receive and verify what `send` sends.

    Whatever goes wrong here, all blocks are received first: the source and the other receivers are in the
    same broadcasts and would wait for this rank.

    Raises:
        PeerFailedError: the source could not go on.
        CorruptError: a block arrived with another digest than its source's.

    """
    count = -(-len(image.memory) // block_bytes)
    flying: deque[tuple[Work, int, bytes]] = deque()
    at = 0
    while at < count:
        frame = torch.empty(_FRAME_BYTES, dtype=torch.uint8)
        channel.start(frame, source_rank).wait()
        digests = _digests_of(frame, count - at)
        if not digests:
            for work, _, _ in flying:
                work.wait()
            raise PeerFailedError(f"rank {source_rank} could not send all of the state")
        for digest in digests:
            failpoints.hit("transfer.receive")
            while len(flying) >= _IN_FLIGHT:
                _arrive(image, flying.popleft(), block_bytes)
            block = _block(image.memory, at, block_bytes)
            work = channel.start(torch.frombuffer(block, dtype=torch.uint8), source_rank)
            flying.append((work, at, digest))
            at += 1
    while flying:
        _arrive(image, flying.popleft(), block_bytes)
    if image.error is not None:
        raise image.error


def _arrive(image: Arriving, flown: tuple[Work, int, bytes], block_bytes: int) -> None:
    work, index, digest = flown
    work.wait()
    block = _block(image.memory, index, block_bytes)
    if image.error is not None:
        return
    start = index * block_bytes
    if xxhash.xxh3_128_digest(block) != digest:
        text = f"bytes {start} to {start + len(block)} of the state arrived damaged; nothing was kept."
        image.fail(CorruptError(text))
        return
    image.advance(start + len(block))


def _ready(image: Arriving, known: Sequence[str], block_bytes: int, at: int) -> list[bytes]:
    """Wait until block ``at`` can be sent; give its digest, and those of what follows and is there too."""
    image.wait(min((at + 1) * block_bytes, len(image.memory)))
    here = image.arrived()
    stop = min(
        at + FRAME_BLOCKS, -(-here // block_bytes) if here == len(image.memory) else here // block_bytes
    )
    if known:
        return [bytes.fromhex(digest) for digest in known[at:stop]]
    blocks = (_block(image.memory, index, block_bytes) for index in range(at, stop))
    return [xxhash.xxh3_128_digest(block) for block in blocks]


def _frame(status: int, digests: Sequence[bytes]) -> torch.Tensor:
    data = bytes([status, len(digests)]).ljust(8, b"\0") + b"".join(digests)
    return torch.frombuffer(bytearray(data.ljust(_FRAME_BYTES, b"\0")), dtype=torch.uint8)


def _digests_of(frame: torch.Tensor, most: int) -> list[bytes]:
    """Give the digests of the blocks that come next; none where the source could not go on."""
    data = bytes(frame.tolist())
    status, count = data[0], data[1]
    if status == _FAILED:
        return []
    if status != _GOES_ON or not 0 < count <= min(FRAME_BLOCKS, most):
        raise CorruptError(f"a frame of a transfer is not one of ours: {data[:8].hex()}.")
    return [data[8 + i * _DIGEST_BYTES : 8 + (i + 1) * _DIGEST_BYTES] for i in range(count)]


def _land(flying: deque[Work], most: int) -> None:
    while len(flying) > most:
        flying.popleft().wait()


def _block(memory: memoryview, index: int, block_bytes: int) -> memoryview:
    return memory[index * block_bytes : (index + 1) * block_bytes]
