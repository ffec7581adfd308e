"""Compare the live state of a rank with a snapshot in its node's memory, byte for byte.

The rank on which the snapshot counts compares everything. The others compare what every rank holds alike, and
their own shards: the rest may differ between ranks, and was rank 0's since the restore.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from elastic_resume.checkpoint import json_codec
from elastic_resume.checkpoint.manifest import Manifest, Position
from elastic_resume.checkpoint.shards import shard_index
from elastic_resume.policy import proof
from elastic_resume.policy.proof import HYPERPARAMETERS, DifferingValue, RankComparison
from elastic_resume.state import diff, state_dict
from elastic_resume.state.open_checkpoint import iter_leaves
from elastic_resume.state.state_dict import REPLICATED, RESERVED_PREFIX, TensorBuffer

MAX_DIFFERENCES = 4
_HEX_FLOAT = re.compile(r"'(-?0x[01]\.[0-9a-f]+p[+-]\d+)'")


@dataclass(frozen=True)
class Snapshots:
    """The snapshot to compare with, and the one from which it was computed again, if it is still there."""

    manifest: Manifest  # of the target
    target: TensorBuffer
    base: TensorBuffer | None


def compare_rank(
    tracked: Mapping[str, Any],
    position: Position,
    snapshots: Snapshots,
    *,
    is_source: bool,
    local_rank: int,
    knows_data: bool,
    is_resized: bool = False,
) -> RankComparison:
    """Compare the tracked objects with a snapshot.

    ``is_source``: the snapshot is this rank's own, and counts for all. ``knows_data``: `er.resume` knows the
    order of samples, so that the position within the epoch is restored too. ``is_resized``: the number of
    ranks has changed, so only hyperparameters and schedules must be equal.
    """
    flat = state_dict.flatten(tracked)
    manifest, target = snapshots.manifest, snapshots.target
    live = {leaf.name: leaf for leaf in flat.leaves}
    may_differ = {leaf.name for leaf in flat.leaves if leaf.kind != REPLICATED} | {*manifest.rank0_tensors}
    names = [
        name
        for name in dict.fromkeys([*target.layout.extents, *live])
        if shard_index(name) in {None, local_rank}
        and (is_source or name not in may_differ)
        and not name.startswith(RESERVED_PREFIX)
    ]
    found: list[diff.Difference] = []
    differing: list[str] = []
    for name in names:
        there = target.tensor(name) if name in target.layout.extents else diff.ABSENT
        here = live[name].tensor.cpu() if name in live else diff.ABSENT
        if not diff.are_equal(there, here):
            differing.append(name)
            if len(found) < MAX_DIFFERENCES:  # to measure one takes ten times as long as to compare it
                found += diff.find_differences(name, there, here)
    values_then = _collect_values(manifest.state, manifest.position, knows_data=knows_data)
    structure = json.loads(json.dumps(flat.structure))
    values_now = _collect_values(structure, position, knows_data=knows_data)
    prefixes: tuple[str, ...] = () if is_resized else ("position/",)
    prefixes += tuple(
        f"{name}/"
        for name, item in tracked.items()
        if isinstance(item, Optimizer) or (is_source and (not is_resized or name.startswith(HYPERPARAMETERS)))
    )
    value_names = [name for name in dict.fromkeys([*values_then, *values_now]) if name.startswith(prefixes)]
    values = [
        difference
        for name in value_names
        for difference in diff.find_differences(
            name, values_then.get(name, diff.ABSENT), values_now.get(name, diff.ABSENT)
        )
    ]
    rounding = _measure(live, snapshots, differing) if differing else 0.0
    if is_resized:  # sums are rounded differently, and each rank draws other numbers
        found, differing = [], []
    beyond_rounding = bool(values) or any(not _may_be_rounding(name, live, target) for name in differing)
    shown = [*(_describe(d) for d in _sort_values(values)), *(_describe(d) for d in found)]
    return RankComparison(
        len(names),
        len(value_names),
        tuple(shown[:MAX_DIFFERENCES]),
        len(values) + len(differing),
        beyond_rounding,
        rounding,
        is_batch_changed=position.samples != manifest.position.samples,
    )


def _collect_values(state: Any, position: Position, *, knows_data: bool) -> dict[str, Any]:
    fields = vars(position) if knows_data else {"step": position.step}
    leaves = iter_leaves({"position": fields, **json_codec.decode(state)})
    return {
        name: value
        for name, value in leaves
        if diff.is_compared(name, value) and not name.startswith(RESERVED_PREFIX)
    }


def _sort_values(values: list[diff.Difference]) -> list[diff.Difference]:
    """Hyperparameters first, which say most, and what only follows last."""
    return sorted(
        values,
        key=lambda each: (
            not each.name.startswith(HYPERPARAMETERS),
            each.name.startswith(("position", "data")),
        ),
    )


def _may_be_rounding(name: str, live: Mapping[str, state_dict.Leaf], target: TensorBuffer) -> bool:
    """Return whether a differing tensor is there in both, in one form, and has floating point numbers."""
    if name not in live or name not in target.layout.extents:
        return False
    here, there = live[name].tensor, target.tensor(name)
    # A number alone is a count, as an optimizer's, or a hyperparameter.
    return (
        here.is_floating_point() and here.dim() > 0 and (here.dtype, here.shape) == (there.dtype, there.shape)
    )


def _describe(difference: diff.Difference) -> DifferingValue:
    if difference.kind == "values":
        text = (
            f"{difference.differing_elements:,} of {difference.total_elements:,} elements, by up to "
            f"{difference.max_rel_difference:.2g} of their value"
        )
        return DifferingValue(difference.name, text, is_tensor=True)
    was, now = (_HEX_FLOAT.sub(_to_decimal, text) for text in (difference.value_a, difference.value_b))
    text = f"was {was}, now {now}"
    return DifferingValue(difference.name, text, is_tensor=difference.kind in {"dtype", "shape"})


def _to_decimal(found: re.Match[str]) -> str:
    """Return a number of `RankValues`, which is stored exactly, as a person reads it."""
    return repr(float.fromhex(found[1]))


# ---- how much differs --------------------------------------------------------------------------------


def _measure(live: Mapping[str, state_dict.Leaf], snapshots: Snapshots, differing: list[str]) -> float:
    """Return how much the differing tensors differ; see `proof.summarize_ratios`."""
    target, base = snapshots.target, snapshots.base
    errors, changes = [], []
    for name in differing:
        if name in live and name in target.layout.extents:
            there = target.tensor(name)
            errors.append(_distance(there, live[name].tensor.cpu()))
            has_base = base is not None and name in base.layout.extents
            changes.append(_distance(base.tensor(name), there) if base is not None and has_base else 0.0)
    return proof.summarize_ratios(errors, changes) if errors else proof.UNMEASURED


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the Euclidean distance of two floating point tensors of one shape; 0 for others."""
    if a.shape != b.shape or not (a.is_floating_point() and b.is_floating_point()):
        return 0.0
    return math.sqrt(sum(float((x - y).square().sum(dtype=torch.float64)) for x, y in _iter_pairs(a, b)))


def _iter_pairs(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for x, y in diff.iter_chunks(a, b):
        yield (x, y) if x.dtype == torch.float64 else (x.float(), y.float())
