"""What ranks need not agree on takes the source's values on all of them, whatever their own copies hold.

BatchNorm's buffers, schedulers, anything tracked that is neither parameter nor optimizer state: a thread of
every rank takes part in their broadcast, in an order that all know, while the ranks load. They go into
memory of their own, never into the image, which stays what its node had saved.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from elastic_resume.errors import CheckpointError, CorruptError
from elastic_resume.store.layout import MAX_DIMENSIONS, MAX_FILE_BYTES, Layout, TensorSpec
from elastic_resume.worker.arriving import Arriving, PeerFailedError
from elastic_resume.worker.image import DTYPES, memory_of
from elastic_resume.worker.world import Channel

PACKED_BYTES = 1 << 20  # smaller ones travel together; larger ones alone, and become the state themselves
_ALIGNMENT = 16
_GOES_ON, _FAILED = 1, 2


def describe(layout: Layout, names: Sequence[str]) -> list[list[Any]]:
    """Say what the tensors ``names`` are, so that ranks without the image can make room for them.

    Raises:
        CorruptError: the image has no such tensor.

    """
    try:
        return [[name, layout.extents[name].dtype, list(layout.extents[name].shape)] for name in names]
    except KeyError as error:
        raise CorruptError(f"the manifest names a tensor that is not there: {error}.") from error


def parse(told: Any, limit_bytes: int) -> list[TensorSpec]:
    """Read what `describe` gave on another rank. Raises CorruptError."""
    try:
        specs = [TensorSpec(str(name), str(dtype), tuple(map(int, shape))) for name, dtype, shape in told]
    except (TypeError, ValueError) as error:
        raise CorruptError(f"what the source's values are is not said rightly ({error}).") from error
    possible = all(
        spec.dtype in DTYPES
        and len(spec.shape) <= MAX_DIMENSIONS
        and all(0 <= size <= MAX_FILE_BYTES for size in spec.shape)
        for spec in specs
    )
    if not possible or sum(spec.nbytes for spec in specs) > limit_bytes:
        raise CorruptError("the source's values are of impossible dtypes or sizes.")
    return specs


class Overlay:
    """The source's values of some tensors, as they come."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._tensors: dict[str, Tensor] = {}
        self._error: BaseException | None = None
        self._news = threading.Condition()

    def __bool__(self) -> bool:
        return bool(self._specs)

    def __contains__(self, name: str) -> bool:
        return name in self._specs

    def tensor(self, name: str) -> Tensor:
        """Give a tensor when it has come. Raises what went wrong."""
        with self._news:
            self._news.wait_for(lambda: name in self._tensors or self._error is not None)
            if self._error is not None:
                raise self._error
            return self._tensors[name]

    def own(self, name: str) -> Tensor:
        """Give a tensor for keeps: a large one lies in memory of its own already."""
        tensor = self.tensor(name)
        return tensor if self._specs[name].nbytes > PACKED_BYTES else tensor.clone()

    def look(self, name: str) -> Tensor:
        """Give an empty tensor of its shape and dtype."""
        spec = self._specs[name]
        return torch.empty(spec.shape, dtype=DTYPES[spec.dtype])

    def exchange(self, channel: Channel, image: Arriving | None, source_rank: int) -> None:
        """Send them (where ``image`` is given) or receive them, all; to be called on every rank."""
        try:
            for batch in _batches(list(self._specs.values())):
                self._exchange(channel, batch, image, source_rank)
        except BaseException as error:
            with self._news:
                self._error = error
                self._news.notify_all()
            raise

    def _exchange(
        self, channel: Channel, batch: list[TensorSpec], image: Arriving | None, source_rank: int
    ) -> None:
        packed = torch.empty(sum(_padded(spec) for spec in batch), dtype=torch.uint8)
        status = torch.tensor([_GOES_ON], dtype=torch.uint8)
        problem: CheckpointError | None = None
        if image is not None:
            try:
                _pack(packed, batch, image)
            except CheckpointError as error:
                status[0], problem = _FAILED, error
        channel.broadcast(status, source_rank)
        if int(status) != _GOES_ON:
            raise problem or PeerFailedError(f"rank {source_rank} could not send the values that all take")
        if packed.numel():
            channel.broadcast(packed, source_rank)
        with self._news:
            self._tensors.update(_unpack(packed, batch))
            self._news.notify_all()


def _pack(packed: Tensor, batch: Sequence[TensorSpec], image: Arriving) -> None:
    memory, at = memory_of(packed), 0
    for spec in batch:
        memory[at : at + spec.nbytes] = image.bytes_of(spec.name)
        at += _padded(spec)


def _unpack(packed: Tensor, batch: Sequence[TensorSpec]) -> dict[str, Tensor]:
    tensors, at = {}, 0
    for spec in batch:
        flat = packed[at : at + spec.nbytes].view(DTYPES[spec.dtype])
        tensors[spec.name] = flat.view(spec.shape)
        at += _padded(spec)
    return tensors


def _padded(spec: TensorSpec) -> int:
    return -(-spec.nbytes // _ALIGNMENT) * _ALIGNMENT


def _batches(specs: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    batches: list[list[TensorSpec]] = []
    room = 0
    for spec in specs:
        if spec.nbytes > PACKED_BYTES:
            batches.append([spec])
            room = 0
            continue
        if not batches or _padded(spec) > room:
            batches.append([])
            room = PACKED_BYTES
        batches[-1].append(spec)
        room -= _padded(spec)
    return batches
