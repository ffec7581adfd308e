"""Buffers that are being filled, and what reads them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elastic_resume.checkpoint import reader
from elastic_resume.errors import CorruptError, PeerFailedError
from elastic_resume.restore.streaming import (
    WATERMARK_FAILED,
    BackgroundTask,
    LocalWatermark,
    Prefetcher,
    StreamingBuffer,
)
from tests.support.checkpoint_samples import RUN, flip_bits, make_image, save_checkpoint


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


def test_prefetcher_returns_separate_copies_and_raises_fillers_error(arriving: StreamingBuffer) -> None:
    """Objects with tied tensors do not share them."""
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
