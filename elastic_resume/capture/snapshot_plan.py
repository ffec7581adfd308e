"""Plan which tensors of the tracked state each local rank copies, when, and to where in a slot.

A `SnapshotPlan` holds what follows from the structure of the state: the layout, the static metadata and each
local rank's share, the tensors that it copies. Every local rank computes the same plan, and makes a new one
only when a tensor is added, removed or replaced. With a sharded model (FSDP) each rank's plan has its own
shards in its share. This module handles neither the slots' words nor threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import xxhash
from torch import Tensor

from elastic_resume.capture.copy_engine import get_format, make_tensor_views
from elastic_resume.capture.state_cache import (
    StateTracker,
    StateView,
    share_equal,
    without_garbage_collection,
)
from elastic_resume.checkpoint.layout import Layout
from elastic_resume.slots import slot_memory
from elastic_resume.slots.slot_memory import Slot
from elastic_resume.state.state_dict import REPLICATED, Leaf

# The local leader copies smaller states alone: another rank's thread would cost more than it saves.
MIN_BYTES_TO_SPLIT = 32 << 20
# On a device smaller tensors are copied at once, with those of the host: to digest one twice takes longer.
MIN_BACKGROUND_BYTES = 64 << 10


class TensorGroup:
    """Tensors that are copied together. For 80,000 tensors new lists would take 40 ms of each step."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.leaves = tuple(leaves)
        self.tensors = [leaf.tensor for leaf in leaves]
        self.formats = share_equal(map(get_format, self.tensors))
        self.devices = frozenset(tensor.device for tensor in self.tensors if tensor.is_cuda)


@dataclass(frozen=True)
class SnapshotPlan:
    """Layout of a snapshot, and which local rank copies which tensors."""

    layout: Layout
    static_metadata: bytes  # encoded JSON that is the same for all steps
    plan_id: int  # digest of layout, static metadata and split
    immediate: TensorGroup  # copied in run.step() by the local leader
    shares: tuple[TensorGroup, ...]  # one for each local rank, copied behind the copy barrier
    overlapped: TensorGroup  # the tensors of all shares
    is_sharded: bool = False  # tensors are divided: each local rank copies its own shards
    copies_at_once: bool = False  # the next forward pass may change one of this rank's shards

    def slot_bytes(self, dynamic_metadata: bytes) -> tuple[int, int]:
        """Return the size that a slot must have at least, and the size for a new one, with room to grow."""
        image_bytes, static_bytes = self.layout.total_bytes, len(self.static_metadata)
        needed = slot_memory.required_slot_bytes(image_bytes, static_bytes, len(dynamic_metadata))
        at = slot_memory.round_up_to_page(slot_memory.round_up_to_page(image_bytes) + static_bytes)
        return at + len(dynamic_metadata), needed

    def as_single_share(self) -> SnapshotPlan:
        """Return a plan in which the local leader copies everything; the same one if tensors are divided."""
        is_single = len(self.shares) == 1 or self.is_sharded
        return self if is_single else replace(self, shares=(self.overlapped,))


class SlotViews:
    """The tensors of a plan in one slot, and the targets of the groups that are copied again and again."""

    def __init__(self, slot: Slot, plan: SnapshotPlan) -> None:
        self.by_name = make_tensor_views(slot.memory, plan.layout)
        self._targets_by_group: dict[TensorGroup, list[Tensor]] = {}

    def get_targets(self, group: TensorGroup) -> list[Tensor]:
        """Return the targets of one of the plan's groups."""
        if group not in self._targets_by_group:
            self._targets_by_group[group] = self.find_targets(group.leaves)
        return self._targets_by_group[group]

    def find_targets(self, leaves: Iterable[Leaf]) -> list[Tensor]:
        """Return the targets of some leaves."""
        return [self.by_name[leaf.name] for leaf in leaves]


@without_garbage_collection
def make_plan(
    state_view: StateView, base_metadata: Mapping[str, Any], share_count: int, local_rank: int
) -> SnapshotPlan:
    """Plan a snapshot of ``state_view``, copied by ``share_count`` local ranks.

    ``base_metadata`` is the static metadata without the state. Tensors that are divided over the ranks of the
    node are not split: ``local_rank`` copies its own shards of them.
    """
    cached, leaves = state_view.cached, state_view.leaves
    layout = Layout.build(spec for leaf in leaves for spec in leaf.list_specs())
    rank0_tensors = [leaf.name for leaf in leaves if leaf.kind != REPLICATED and leaf.shards is None]
    static_metadata = slot_memory.encode_metadata(
        {**base_metadata, "rank0_tensors": rank0_tensors, "state": cached.static_structure}
    )
    filled = [pair for pair in zip(cached.leaves, cached.may_overlap, strict=True) if pair[0].tensor.numel()]
    own_shards = [(leaf, may_overlap) for leaf, may_overlap in filled if leaf.is_divided]
    whole = [pair for pair in filled if not pair[0].is_divided]
    if any(leaf.tensor.is_cuda for leaf, _ in whole):  # copied in the background, so with digests
        whole = [
            (leaf, may_overlap and leaf.tensor.is_cuda and leaf.tensor.nbytes >= MIN_BACKGROUND_BYTES)
            for leaf, may_overlap in whole
        ]
    overlapped = [leaf for leaf, may_overlap in whole if may_overlap]
    divided = [leaf for leaf in leaves if leaf.is_divided]
    if divided:  # all local ranks take part, with or without a copy barrier
        share_count = max(leaf.shards.count for leaf in divided if leaf.shards is not None)
    elif sum(leaf.tensor.nbytes for leaf in overlapped) < MIN_BYTES_TO_SPLIT:
        share_count = 1
    immediate = TensorGroup([leaf for leaf, may_overlap in whole if not may_overlap])
    split = [overlapped] if share_count == 1 else _split_leaves(overlapped, share_count)
    shares = tuple(map(TensorGroup, split))
    # Each local rank splits the leaves itself. Every leaf is copied only if all ranks split them alike, so
    # the split is part of the digest. A rank's own shards are not, since they differ from rank to rank.
    names = "\n\n".join("\n".join(leaf.name for leaf in group.leaves) for group in (immediate, *shares))
    plan_id = xxhash.xxh3_64_intdigest(layout.header + static_metadata + names.encode()) | 1
    if divided:
        split[local_rank] = [*split[local_rank], *(leaf for leaf, _ in own_shards)]
        shares = tuple(map(TensorGroup, split))
    is_uncached = any(leaf.is_divided for leaf in state_view.uncached_leaves)
    copies_at_once = is_uncached or not all(overlaps for _, overlaps in own_shards)
    return SnapshotPlan(
        layout,
        static_metadata,
        plan_id,
        immediate,
        shares,
        TensorGroup(overlapped),
        bool(divided),
        copies_at_once,
    )


def summarize_names(names: Sequence[str]) -> str:
    """Return the first name and the number of the others."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _split_leaves(leaves: Sequence[Leaf], share_count: int) -> list[list[Leaf]]:
    """Split leaves into shares of about equal bytes: largest first, each to the smallest share."""
    shares: list[list[Leaf]] = [[] for _ in range(share_count)]
    sizes = [0] * share_count
    for leaf in sorted(leaves, key=lambda leaf: -leaf.tensor.nbytes):
        smallest = sizes.index(min(sizes))
        shares[smallest].append(leaf)
        sizes[smallest] += leaf.tensor.nbytes
    return shares


class PlannedState:
    """The tracked state, read again and again, and the plan of its snapshots."""

    def __init__(self, tracked: Mapping[str, Any], make_plan: Callable[[StateView], SnapshotPlan]) -> None:
        """Plan with ``make_plan``, which has all its arguments but the state."""
        self._tracked = tracked
        self._make_plan = make_plan
        self._tracker = StateTracker(tracked)
        self._cached_plan: tuple[Any, SnapshotPlan] | None = None

    def read(self) -> tuple[StateView, SnapshotPlan]:
        """Read the state as it is now; its plan is the same object while only values change.

        Raises:
            UntrackableError: an object has come to hold state that cannot be stored.

        """
        view = self._tracker.read_state()
        formats = [(leaf.name, leaf.tensor.dtype, leaf.tensor.shape) for leaf in view.uncached_leaves]
        key = (view.cached.version, formats)
        if self._cached_plan is None or self._cached_plan[0] != key:
            self._cached_plan = key, self._make_plan(view)
        return view, self._cached_plan[1]

    def forget(self) -> None:
        """Find the tensors again: a copy has failed, so the cached ones may be stale."""
        self._tracker = StateTracker(self._tracked)
        self._cached_plan = None
