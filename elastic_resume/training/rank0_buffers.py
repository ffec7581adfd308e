"""Give every rank the buffers of rank 0 at each step boundary.

Each rank's BatchNorm sees its own share of a batch, and DDP sends rank 0's statistics to all ranks before the
next forward pass. A snapshot is taken before that. So the buffers are sent at the end of the step too, and
every node's snapshot holds rank 0's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from elastic_resume.errors import DivergenceError
from elastic_resume.ranks.rank_context import RankContext
from elastic_resume.restore.replica_check import find_first_difference

Format = tuple[str, torch.dtype, torch.Size]  # of a buffer; its device's index differs between ranks


class Rank0Buffers:
    """The persistent buffers of all tracked modules."""

    def __init__(self, context: RankContext, tracked: Mapping[str, Any]) -> None:
        modules = {name: item for name, item in tracked.items() if isinstance(item, nn.Module)}
        self._modules = modules if context.collectives.size > 1 else {}
        self._context = context
        self._formats: list[Format] | None = None

    def receive(self) -> None:
        """Overwrite the buffers with rank 0's. Every rank calls this at a step boundary.

        Raises:
            DivergenceError: on all ranks; their buffers differ in number, dtype or shape after the first step
                or after a step that has changed them on all ranks.

        """
        if not self._modules:
            return
        buffers = [buffer for item in self._modules.values() for _, _, buffer in _iter_buffers(item)]
        formats = [(buffer.device.type, buffer.dtype, buffer.shape) for buffer in buffers]
        if formats != self._formats:  # at the first step, and where modules get other buffers
            self._require_equal_formats()
            self._formats = formats
        self._context.collectives.broadcast_tensors(buffers, 0)

    def _require_equal_formats(self) -> None:
        named = {
            f"{name}/{part_name}.{key}".replace("/.", "/"): f"{b.device.type} {b.dtype} {list(b.shape)}"
            for name, item in self._modules.items()
            for part_name, key, b in _iter_buffers(item)
        }
        if difference := find_first_difference(self._context, lambda: named):
            raise DivergenceError(
                f"the buffer {difference.name!r} has another dtype, shape or device on "
                f"{difference.ranks_text}. run.step() gives all ranks the buffers of rank 0, so "
                "modules need the same buffers everywhere. Register a buffer of this rank alone with "
                "persistent=False."
            )


def _iter_buffers(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the buffers that state_dict() stores, each with its module's name and its own."""
    for part_name, part in module.named_modules():
        for key, buffer in part._buffers.items():  # noqa: SLF001  named_buffers() has the others too
            if buffer is not None and key not in part._non_persistent_buffers_set:  # noqa: SLF001
                yield part_name, key, buffer
