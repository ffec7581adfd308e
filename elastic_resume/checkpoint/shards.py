"""Name the shards of a tensor that FSDP divides over the ranks of a node, and compute their shapes.

The image has one entry for each local rank's shard: ``model/w@0of2`` and ``model/w@1of2``. So the image of a
node holds the whole tensor, though no rank does. A tensor is divided if it has more than one shard. On a node
of one rank FSDP makes one shard, ``model/w@0of1``, which is handled as a whole tensor.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_SUFFIX = re.compile(r"@\d+of\d+\Z")
_DIVIDED_SUFFIX = re.compile(r"@(\d+)of(?!1\Z)\d+\Z")  # not @0of1


@dataclass(frozen=True)
class Shards:
    """How a tensor is divided: ``size`` elements of dimension ``dim`` into ``count`` shards."""

    dim: int
    size: int
    count: int

    def extent(self, index: int) -> tuple[int, int]:
        """Return where shard ``index`` begins and ends in dimension ``dim``.

        ``torch.chunk`` and DTensor's ``Shard`` divide like this: the last shards may be shorter, or empty.
        """
        length = -(-self.size // self.count)
        return min(index * length, self.size), min((index + 1) * length, self.size)

    def shape(self, index: int, like: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of shard ``index``; ``like`` is the shape of any shard of the tensor."""
        start, stop = self.extent(index)
        return (*like[: self.dim], stop - start, *like[self.dim + 1 :])

    def whole_shape(self, like: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the whole tensor; ``like`` is the shape of any shard of it."""
        return (*like[: self.dim], self.size, *like[self.dim + 1 :])

    def name(self, tensor_name: str, index: int) -> str:
        """Return the name of shard ``index`` in the image."""
        return f"{tensor_name}@{index}of{self.count}"

    def names(self, tensor_name: str) -> list[str]:
        """Return the names of all shards in the image."""
        return [self.name(tensor_name, index) for index in range(self.count)]


def shard_index(name: str) -> int | None:
    """Return which shard of a divided tensor an entry of the image is; None if it is a whole tensor."""
    found = _DIVIDED_SUFFIX.search(name)
    return int(found[1]) if found else None


def tensor_name(name: str) -> str:
    """Return the name of the tensor to which an entry of the image belongs."""
    return _SUFFIX.sub("", name)
