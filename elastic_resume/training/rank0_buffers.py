"""Give every rank the buffers of rank 0 at each step boundary.

Each rank's BatchNorm sees its own share of a batch, and DDP sends rank 0's statistics to all ranks before the
next forward pass. A snapshot is taken before that. So the buffers are sent at the end of the step too, and
every node's snapshot holds rank 0's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
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
        # A walk through a thousand modules takes two milliseconds. So the parts with buffers are kept, while
        # no other part gets a buffer or a first child, and all children stay the same.
        self._parts: list[tuple[str, nn.Module]] = []
        self._empty_dicts: list[dict[str, Any]] = []
        self._child_dicts: list[dict[str, Any]] = []
        self._children: list[Any] = []
        self._find_parts()

    def receive(self) -> None:
        """Overwrite the buffers with rank 0's. Every rank calls this at a step boundary.

        Raises:
            DivergenceError: on all ranks; their buffers differ in number, dtype or shape after the first step
                or after a step that has changed them on all ranks.

        """
        if not self._modules:
            return
        if any(self._empty_dicts) or self._list_children() != self._children:
            self._find_parts()
        buffers = [buffer for _, buffer in self.iter_named()]
        formats = [(buffer.device.type, buffer.dtype, buffer.shape) for buffer in buffers]
        if formats != self._formats:  # at the first step, and where modules get other buffers
            self._require_equal_formats()
            self._formats = formats
        self._context.collectives.broadcast_tensors(buffers, 0)

    def _require_equal_formats(self) -> None:
        named = {
            name: f"{buffer.device.type} {buffer.dtype} {list(buffer.shape)}"
            for name, buffer in self.iter_named()
        }
        if difference := find_first_difference(self._context, lambda: named):
            raise DivergenceError(
                f"the buffer {difference.name!r} has another dtype, shape or device on "
                f"{difference.ranks_text}. run.step() gives all ranks the buffers of rank 0, so "
                "modules need the same buffers everywhere. Register a buffer of this rank alone with "
                "persistent=False."
            )

    def _find_parts(self) -> None:
        parts = [
            (f"{name}/{path}." if path else f"{name}/", part)
            for name, item in self._modules.items()
            for path, part in item.named_modules()
        ]
        dicts = [own for _, part in parts for own in (part._buffers, part._modules)]  # noqa: SLF001
        self._parts = [(prefix, part) for prefix, part in parts if part._buffers]  # noqa: SLF001
        self._empty_dicts = [own for own in dicts if not own]
        self._child_dicts = [part._modules for _, part in parts if part._modules]  # noqa: SLF001
        self._children = self._list_children()

    def _list_children(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._child_dicts)))

    def iter_named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers that state_dict() stores, with their names."""
        for prefix, part in self._parts:
            for key, buffer in part._buffers.items():  # noqa: SLF001  named_buffers() has the others too
                if buffer is not None and key not in part._non_persistent_buffers_set:  # noqa: SLF001
                    yield prefix + key, buffer
