"""A state in short: digests of the tensors that must be equal on all nodes, and one digest of those.

What ranks need not agree on (BatchNorm's buffers, say: `Manifest.follows_rank0`) is left out. Where there are
more tensors than `policy.divergence.MAX_GROUPS`, neighbours share a digest. Two nodes whose states are equal
bit for bit have equal prints; of unequal ones the prints differ in just the groups that do.

Promise: reads the image once, in pieces between which it can be told that the image is being written over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import xxhash

from elastic_resume.policy.divergence import span
from elastic_resume.store.layout import Layout

PIECE_BYTES = 16 * 1024 * 1024  # 2 ms


@dataclass(frozen=True)
class StatePrints:
    """``names`` are all tensors that were looked at, in order; ``groups`` and ``digest`` are what is told."""

    names: tuple[str, ...]
    groups: tuple[str, ...]
    digest: str


def prints_of(
    image: memoryview,
    layout: Layout,
    follows_rank0: Collection[str],
    *,
    still: Callable[[], bool] = lambda: True,
) -> StatePrints | None:
    """Digest an image; None as soon as ``still`` says that it is not what it was any more.

    The caller makes sure of that after the last byte as well.
    """
    left_out = frozenset(follows_rank0)
    names = tuple(name for name in layout.extents if name not in left_out)
    size = span(len(names))
    groups = []
    for first in range(0, len(names), size):
        group = xxhash.xxh3_64()
        for name in names[first : first + size]:
            extent = layout.extents[name]
            group.update(f"{name} {extent.dtype} {extent.shape} ".encode())
            for start in range(extent.start, extent.stop, PIECE_BYTES):
                if not still():
                    return None
                group.update(image[start : min(start + PIECE_BYTES, extent.stop)])
        groups.append(group.hexdigest())
    return StatePrints(names, tuple(groups), xxhash.xxh3_128_hexdigest("".join(groups).encode()))
