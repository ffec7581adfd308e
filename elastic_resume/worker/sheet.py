"""What a snapshot of a given structure looks like: its layout, its notes, and who copies what.

Made anew only when a tensor comes, goes or is replaced. Every local rank makes the same one for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import xxhash
from torch import Tensor

from elastic_resume.store import note, slots
from elastic_resume.store.layout import Layout
from elastic_resume.store.slots import Slot
from elastic_resume.worker.image import spec_of
from elastic_resume.worker.state import REPLICATED, Leaf, fingerprints
from elastic_resume.worker.tracking import Sight, without_collection

# Below this the lead copies all: another rank's thread would cost more than its share takes.
SPLIT_BYTES = 32 << 20
VERSIONS = 64  # of so many tensors the version is looked at, for it takes 60 ns each


class Share:
    """Tensors that are copied together. What can be known of them ahead of a copy is worked out once.

    At 80,000 tensors that is 40 ms of each step: lists of names and tensors, where each tensor is, and
    where in a slot it goes.
    """

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.leaves = tuple(leaves)
        self.tensors = [leaf.tensor for leaf in leaves]
        self._looked_at = self.leaves[:: 1 + len(self.leaves) // VERSIONS]
        self.devices = frozenset(tensor.device for tensor in self.tensors if tensor.is_cuda)
        self._targets: dict[tuple[int, int], list[Tensor]] = {}

    def targets(self, slot: Slot, views: Callable[[], Mapping[str, Tensor]]) -> list[Tensor]:
        """Where the tensors go in ``slot``; ``views`` gives its tensors by name, and is asked once."""
        key = (slot.index, slot.serial)
        if key not in self._targets:
            by_name = views()
            self._targets[key] = [by_name[leaf.name] for leaf in self.leaves]
        return self._targets[key]

    def versions(self) -> list[int]:
        """How often some of the tensors, all over the share, have been changed in place."""
        return [0 if leaf.tensor.is_inference() else leaf.tensor._version for leaf in self._looked_at]  # noqa: SLF001

    def rewritten(self, versions: list[int], among: Collection[int] | None) -> list[str]:
        """Name those whose version is not among the ``versions`` any more: for certain changed.

        ``among``: addresses of those to look at; None: all.
        """
        both = zip(self._looked_at, versions, self.versions(), strict=True)
        return [leaf.name for leaf, was, now in both if was != now and _is_among(leaf, among)]

    def differing(self, views: Mapping[str, Tensor], among: Collection[int] | None) -> list[str]:
        """Name those that are not as they are in ``views``, all bytes of which are read; see `rewritten`."""
        leaves = [leaf for leaf in self.leaves if _is_among(leaf, among)]
        copied = fingerprints(replace(leaf, tensor=views[leaf.name]) for leaf in leaves)
        return [name for name, now in fingerprints(leaves).items() if now != copied[name]]

    def forget(self, alive: Collection[tuple[int, int]]) -> None:
        """Let go of slots that are not among those (index, serial): else their memory stays."""
        self._targets = {key: found for key, found in self._targets.items() if key in alive}


@dataclass(frozen=True)
class Sheet:
    """The plan of a snapshot.

    ``number`` stands for layout, static notes and who copies what. ``at_once`` is copied in ``run.step()`` by
    the lead; ``shares`` by local rank, behind the fence.
    """

    layout: Layout
    static: bytes
    number: int
    at_once: Share
    shares: tuple[Share, ...]
    whole: Share

    def room(self, dynamic: bytes) -> int:
        """Bytes that a slot should have."""
        return slots.room_for(self.layout.total_bytes, len(self.static), len(dynamic))

    def least(self, dynamic: bytes) -> int:
        """Bytes that a slot must have at least."""
        return slots.aligned(slots.aligned(self.layout.total_bytes) + len(self.static)) + len(dynamic)

    def undivided(self) -> Sheet:
        """Give the same, with all of it the lead's."""
        return self if len(self.shares) == 1 else replace(self, shares=(self.whole,))

    def forget(self, alive: Collection[tuple[int, int]]) -> None:
        """See `Share.forget`."""
        for share in (self.at_once, self.whole, *self.shares):
            share.forget(alive)


@dataclass(frozen=True)
class Task:
    """What a rank copies of one snapshot. ``slot`` None: the lead has still to say which."""

    sheet: Sheet
    slot: Slot | None
    mark: int
    share: Share
    clones: list[tuple[str, Tensor]]  # on devices, of what is copied at once
    after: dict[torch.device, Any]


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
    at_once = Share([leaf for leaf, overlapped in filled if not overlapped])
    whole = Share(later)
    shares = (whole,) if parts == 1 else tuple(map(Share, _dealt(later, parts)))
    # Local ranks find for themselves what has to be copied at once, by what they have seen of it: only if all
    # have found the same is everything copied by somebody.
    split = "\n\n".join("\n".join(leaf.name for leaf in share.leaves) for share in (at_once, *shares))
    number = xxhash.xxh3_64_intdigest(layout.header + static + split.encode()) | 1
    return Sheet(layout, static, number, at_once, shares, whole)


def size_of(tensor: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def some(names: Sequence[str]) -> str:
    """Name the first, and say how many more there are."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _is_among(leaf: Leaf, addresses: Collection[int] | None) -> bool:
    return addresses is None or leaf.tensor.data_ptr() in addresses


def _dealt(leaves: Sequence[Leaf], parts: int) -> list[list[Leaf]]:
    """Deal leaves out so that shares are about equal in bytes: the largest first, to whoever has least."""
    shares: list[list[Leaf]] = [[] for _ in range(parts)]
    sizes = [0] * parts
    for leaf in sorted(leaves, key=lambda leaf: -size_of(leaf.tensor)):
        part = sizes.index(min(sizes))
        shares[part].append(leaf)
        sizes[part] += size_of(leaf.tensor)
    return shares
