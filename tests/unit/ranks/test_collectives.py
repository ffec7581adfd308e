"""Values that a rank broadcasts are verified block by block."""

from __future__ import annotations

import pytest
import torch
import xxhash
from torch import Tensor

from elastic_resume.errors import CorruptError
from elastic_resume.ranks.collectives import Collectives
from elastic_resume.restore.streaming import LocalWatermark, StreamingBuffer, broadcast_buffer


def test_broadcast_block_with_wrong_digest_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes come from a peer's memory, over a network."""
    wire = [xxhash.xxh3_128_digest(b"sent"), b"sEnt"]
    receiver, buffer = Collectives(1, 2, None), StreamingBuffer(memoryview(bytearray(4)), LocalWatermark())

    def receive(tensor: Tensor, _: int) -> None:
        tensor.copy_(torch.frombuffer(bytearray(wire.pop(0)), dtype=torch.uint8))

    monkeypatch.setattr(receiver, "broadcast", receive)
    with pytest.raises(CorruptError, match="bytes 0 to 4 arrived damaged"):
        broadcast_buffer(receiver, buffer, 0)
