"""Buffers that are being filled, and what reads them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elastic_resume.checkpoint import reader
from elastic_resume.errors import CheckpointError, CorruptError, PeerFailedError
from elastic_resume.restore import streaming
from elastic_resume.restore.streaming import (
    WATERMARK_FAILED,
    BackgroundTask,
    LocalWatermark,
    Prefetcher,
    StreamingBuffer,
)
from tests.support.checkpoint_samples import RUN, flip_bits, make_image, save_checkpoint
from tests.support.thread_ranks import ThreadCollectives, run_ranks


@pytest.fixture
def arriving() -> Iterator[StreamingBuffer]:
    """Give a buffer of which nothing has arrived."""
    buffer = StreamingBuffer(memoryview(bytearray(make_image(1))), LocalWatermark())
    yield buffer
    buffer.fail(PeerFailedError("over"))


def test_streaming_buffer_returns_tensor_after_its_last_byte(arriving: StreamingBuffer) -> None:
    """It does not wait for later bytes; the shape is available after the header."""
    seen: list[object] = []
    header = len(make_image(1)) - 1  # more than the header, less than all
    reader = BackgroundTask("test", lambda: seen.append(float(arriving.get_tensor("model.weight").sum())))
    last = BackgroundTask("test", lambda: seen.append(arriving.get_tensor("model.mask").shape))
    stop = 4096 + 8 + 40 * 30 * 4
    arriving.advance(stop - 1)
    assert arriving.peek_tensor("model.weight").shape == (40, 30)
    assert not seen
    arriving.advance(stop)
    assert reader.join() is None
    assert len(seen) == 1
    arriving.advance(header + 1)
    assert last.join() is None
    assert len(seen) == 2


def test_streaming_buffer_raises_fillers_error_in_all_readers(arriving: StreamingBuffer) -> None:
    """Other processes see the failed watermark and raise a PeerFailedError."""
    error = CorruptError("block 3")
    readers = [BackgroundTask("test", lambda: arriving.get_tensor("model.mask")) for _ in range(2)]
    arriving.fail(error)
    assert [reader.join() for reader in readers] == [error, error]
    elsewhere = StreamingBuffer(arriving.memory, LocalWatermark(WATERMARK_FAILED))
    with pytest.raises(PeerFailedError, match="local leader"):
        elsewhere.wait_for_bytes(1)
    arriving.fail(PeerFailedError("its consequence"))
    assert (arriving.error, arriving.arrived_bytes()) == (error, 0)
    assert BackgroundTask("test", lambda: arriving.wait_for_bytes(1)).join() is error


def test_filler_that_stalls_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank waits for ever."""
    monkeypatch.setattr(streaming, "STALL_TIMEOUT_S", 0.01)
    stalled = StreamingBuffer(memoryview(bytearray(8)), LocalWatermark(3), is_filled_elsewhere=True)
    with pytest.raises(PeerFailedError, match="no byte of the state arrived for 0 s, after 3 bytes"):
        stalled.wait_for_bytes(4)


def test_prefetcher_returns_separate_copies_and_raises_fillers_error(arriving: StreamingBuffer) -> None:
    """Objects with tied tensors do not share them."""
    before = set(threading.enumerate())
    copies = Prefetcher(["model.weight", "model.mask"], lambda name: arriving.get_tensor(name).clone())
    arriving.advance(len(arriving.memory) - 1)
    first, second = copies.make_tensor("model.weight"), copies.make_tensor("model.weight")
    first.zero_()
    kept = arriving.get_tensor("model.weight")
    assert torch.equal(second.view(torch.uint8), kept.view(torch.uint8))
    arriving.fail(CorruptError("block 3"))
    with pytest.raises(CorruptError, match="block 3"):
        copies.make_tensor("model.mask")
    copies.close()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("", ["whole", "whole", "whole"]),
        ("source", ["CorruptError", "PeerFailedError", "PeerFailedError"]),
        ("transit", ["whole", "CorruptError", "whole"]),
    ],
)
def test_broadcast_buffer_verifies_each_block_and_announces_failure(
    fault: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that got a damaged block still takes part in the broadcast of the others."""
    monkeypatch.setattr(streaming, "BROADCAST_BLOCK_BYTES", 4096)
    image = make_image(1)

    def broadcast(collectives: ThreadCollectives) -> str:
        buffer = StreamingBuffer(memoryview(bytearray(len(image))), LocalWatermark())
        if collectives.rank == 0:
            buffer = StreamingBuffer.from_complete(memoryview(bytearray(image)))
            buffer.cancel()  # this thread only reads it
            if fault == "source":
                buffer.fail(CorruptError("block 1"))
        if fault == "transit" and collectives.rank == 1:
            receive = collectives.broadcast

            def receive_damaged(tensor: torch.Tensor, source_rank: int) -> None:
                receive(tensor, source_rank)
                tensor[-1] ^= len(tensor) == 4096

            monkeypatch.setattr(collectives, "broadcast", receive_damaged)
        try:
            streaming.broadcast_buffer(collectives, buffer, 0)
        except CheckpointError as error:
            return type(error).__name__
        return "whole" if (buffer.memory, buffer.available_bytes()) == (image, len(image)) else "incomplete"

    assert run_ranks(3, broadcast) == expected


def test_read_image_reports_progress_and_stops_at_corrupt_block(tmp_path: Path) -> None:
    """Reported bytes are verified; a cancelled buffer stops the read."""
    before = set(threading.enumerate())
    path = save_checkpoint(tmp_path, 1, 1)
    found = reader.quick_check(path, RUN)
    progress: list[int] = []
    into = memoryview(bytearray(found.file_bytes))
    reader.read_image(path, found, into, progress.append)
    assert progress == [*range(2048, found.file_bytes, 2048), found.file_bytes]
    assert into == make_image(1)
    flip_bits(path / "state.safetensors", 4 * 2048)
    progress.clear()
    with pytest.raises(CorruptError, match="bytes 8192 to 8977"):
        reader.read_image(path, found, into, progress.append)
    assert progress == [2048, 4096, 6144, 8192]
    stopped = StreamingBuffer(into, LocalWatermark())
    stopped.cancel()
    with pytest.raises(PeerFailedError):
        reader.read_image(path, found, into, stopped.advance)
    assert set(threading.enumerate()) <= before
