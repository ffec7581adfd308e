"""Name and measure the shards of a tensor of which each rank of a node holds a part, as FSDP makes them.

A sharded tensor has one entry in the image for each local rank: ``model/w@0of2`` and ``model/w@1of2``. So
the image of a node holds the whole tensor, though no rank does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_SUFFIX = re.compile(r"@\d+of\d+\Z")
_DIVIDED_SUFFIX = re.compile(r"@(\d+)of(?!1\Z)\d+\Z")


@dataclass(frozen=True)
class Shards:
    """How a tensor is divided: ``size`` elements of dimension ``dim`` into ``count`` shards."""

    dim: int
    size: int
    count: int

    def extent(self, index: int) -> tuple[int, int]:
        """Return where shard ``index`` begins and ends: all have equal sizes but the last ones.

        That is how ``torch.chunk`` divides, and so torch.distributed.tensor's ``Shard``.
        """
        length = -(-self.size // self.count)
        return min(index * length, self.size), min((index + 1) * length, self.size)

    def shape(self, index: int, like: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of shard ``index``, from that of another shard of the same tensor."""
        start, stop = self.extent(index)
        return (*like[: self.dim], stop - start, *like[self.dim + 1 :])

    def name(self, tensor_name: str, index: int) -> str:
        """Return the name of shard ``index`` in the image."""
        return f"{tensor_name}@{index}of{self.count}"

    def names(self, tensor_name: str) -> list[str]:
        """Return the names of all shards in the image."""
        return [self.name(tensor_name, index) for index in range(self.count)]


def shard_index(name: str) -> int | None:
    """Return which shard an entry of the image is; None for a tensor that is in one piece."""
    found = _DIVIDED_SUFFIX.search(name)
    return int(found[1]) if found else None


def tensor_name(name: str) -> str:
    """Return the name of the tensor to which an entry of the image belongs."""
    return _SUFFIX.sub("", name)
