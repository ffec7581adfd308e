"""What a snapshot of a given structure looks like: its layout, its notes, and who copies what.

Made anew only when a tensor comes, goes or is replaced. Every local rank makes the same one for itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import xxhash
from torch import Tensor

from elastic_resume.store import note, slots
from elastic_resume.store.layout import Layout
from elastic_resume.worker.image import spec_of
from elastic_resume.worker.state import REPLICATED, Leaf
from elastic_resume.worker.tracking import Sight, without_collection

# Below this the lead copies all: another rank's thread would cost more than its share takes.
SPLIT_BYTES = 32 << 20


@dataclass(frozen=True)
class Sheet:
    """The plan of a snapshot.

    ``number`` stands for layout and static notes. ``at_once`` is copied in ``run.step()`` by the lead;
    ``shares`` by local rank, behind the fence.
    """

    layout: Layout
    static: bytes
    number: int
    at_once: tuple[Leaf, ...]
    shares: tuple[tuple[Leaf, ...], ...]

    def room(self, dynamic: bytes) -> int:
        """Bytes that a slot should have."""
        return slots.room_for(self.layout.total_bytes, len(self.static), len(dynamic))

    def least(self, dynamic: bytes) -> int:
        """Bytes that a slot must have at least."""
        return slots.aligned(slots.aligned(self.layout.total_bytes) + len(self.static)) + len(dynamic)

    def undivided(self) -> Sheet:
        """Give the same, with all of it the lead's."""
        whole = tuple(leaf for share in self.shares for leaf in share)
        return self if len(self.shares) == 1 else replace(self, shares=(whole,))


@without_collection
def make(sight: Sight, about: Mapping[str, Any], parts: int) -> Sheet:
    """Plan a snapshot of what is seen.

    Args:
        sight: of the tracker.
        about: the static notes without state (see `note`).
        parts: how many local ranks share the copying.

    """
    fixed = sight.fixed
    leaves = (*fixed.leaves, *sight.live)
    layout = Layout.build([spec_of(leaf.name, leaf.tensor) for leaf in leaves])
    follows = [leaf.name for leaf in leaves if leaf.kind != REPLICATED]
    static = note.to_bytes({**about, "follows_rank0": follows, "state": fixed.static})
    filled = [pair for pair in zip(fixed.leaves, fixed.overlapped, strict=True) if pair[0].tensor.numel()]
    later = [leaf for leaf, overlapped in filled if overlapped]
    if sum(size_of(leaf.tensor) for leaf in later) < SPLIT_BYTES:
        parts = 1
    return Sheet(
        layout,
        static,
        xxhash.xxh3_64_intdigest(layout.header + static) | 1,
        tuple(leaf for leaf, overlapped in filled if not overlapped),
        _dealt(later, parts),
    )


def size_of(tensor: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def _dealt(leaves: Sequence[Leaf], parts: int) -> tuple[tuple[Leaf, ...], ...]:
    """Deal leaves out so that shares are about equal in bytes: the largest first, to whoever has least."""
    shares: list[list[Leaf]] = [[] for _ in range(parts)]
    sizes = [0] * parts
    for leaf in leaves if parts == 1 else sorted(leaves, key=lambda leaf: -size_of(leaf.tensor)):
        part = sizes.index(min(sizes))
        shares[part].append(leaf)
        sizes[part] += size_of(leaf.tensor)
    return tuple(tuple(share) for share in shares)
