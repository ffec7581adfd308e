"""Where two checkpoints differ: tensors by name, and every other value by its path.

Promise: tensors are read one pair at a time and compared in pieces, so memory does not grow with the
checkpoints. Equal means the same dtype, shape and bits: -0.0 is not 0.0, and a NaN equals only its like.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elastic_resume.checkpoint.json_codec import TensorRef
from elastic_resume.state import load
from elastic_resume.state.load import OpenCheckpoint, iter_leaves

_CHUNK_ELEMENTS = 1 << 20  # elements that are compared at a time
_INTEGER_DTYPE_BY_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class ComparedCheckpoint:
    """One of the two: where it lies, and of which generation and step it is."""

    path: str
    generation: int
    step: int


@dataclass(frozen=True)
class Difference:
    """One name at which they differ; ``kind`` is values, dtype, shape, value, "only in A" or "only in B".

    ``a`` and ``b`` say what stands there. Of values: how many ``elements`` differ of ``of``, and by how much
    at most, absolutely and relative to the greater of the two; infinite where NaN or infinity meets a number.
    """

    name: str
    kind: str
    value_a: str
    value_b: str
    differing_elements: int = 0
    total_elements: int = 0
    max_abs_difference: float = 0.0
    max_rel_difference: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """Both sides, all differences in the order of A's names, and how much was compared."""

    checkpoint_a: ComparedCheckpoint
    checkpoint_b: ComparedCheckpoint
    differences: tuple[Difference, ...]
    tensor_count: int
    other_count: int


def compare(path_a: Path, path_b: Path) -> Comparison:
    """Compare two checkpoints; of a directory of a run or a node, its newest valid one.

    Raises:
        CheckpointError, NoValidCheckpointError: one of them cannot be read.

    """
    sides = (load.open_checkpoint(path_a), load.open_checkpoint(path_b))
    here, there = (dict(_iter_state(side)) for side in sides)
    names = list(dict.fromkeys([*here, *there]))
    found = [
        difference
        for name in names
        for difference in _find_differences(name, here.get(name, _ABSENT), there.get(name, _ABSENT))
    ]
    tensors = sum(isinstance(here.get(name), Tensor) or isinstance(there.get(name), Tensor) for name in names)
    one, other = (
        ComparedCheckpoint(str(side.path), side.manifest.generation, side.manifest.step) for side in sides
    )
    return Comparison(one, other, tuple(found), tensors, len(names) - tensors)


def _iter_state(checkpoint: OpenCheckpoint) -> Iterator[tuple[str, Any]]:
    """Yield position and state by path, tensors as views of the checkpoint."""
    for name, leaf in iter_leaves({"position": asdict(checkpoint.manifest.position), **checkpoint.state}):
        yield name, checkpoint.tensor(leaf) if isinstance(leaf, TensorRef) else leaf


class _Absent:
    """Stands where one side has nothing, which is not None."""


_ABSENT = _Absent()


# ---- one name ------------------------------------------------------------------------------------------


def _find_differences(name: str, a: Any, b: Any) -> Iterator[Difference]:
    if isinstance(a, _Absent) or isinstance(b, _Absent):
        yield Difference(
            name, "only in B" if isinstance(a, _Absent) else "only in A", describe_value(a), describe_value(b)
        )
    elif not isinstance(a, Tensor) or not isinstance(b, Tensor):
        if type(a) is not type(b) or not _are_equal(a, b):
            yield Difference(name, "value", describe_value(a), describe_value(b))
    elif a.shape != b.shape:
        yield Difference(name, "shape", describe_value(a), describe_value(b))
    elif a.dtype != b.dtype:
        yield _measure_difference(name, "dtype", a, b)
    elif not _have_same_bits(a, b):
        yield _measure_difference(name, "values", a, b)


def _are_equal(a: Any, b: Any) -> bool:
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def describe_value(value: Any) -> str:
    """Say in a few characters what stands at a name."""
    if isinstance(value, _Absent):
        return "absent"
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _have_same_bits(a: Tensor, b: Tensor) -> bool:
    return all(
        torch.equal(_view_as_integers(one), _view_as_integers(other)) for one, other in _iter_chunks(a, b)
    )


def _iter_chunks(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    flat = [(torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).reshape(-1) for t in (a, b)]
    for start in range(0, flat[0].numel(), _CHUNK_ELEMENTS):
        yield flat[0][start : start + _CHUNK_ELEMENTS], flat[1][start : start + _CHUNK_ELEMENTS]


def _view_as_integers(chunk: Tensor) -> Tensor:
    return chunk.contiguous().view(_INTEGER_DTYPE_BY_SIZE[chunk.element_size()])


def _measure_difference(name: str, kind: str, a: Tensor, b: Tensor) -> Difference:
    """Count what differs, and measure by how much."""
    count = total = 0
    most = relative = 0.0
    for one, other in _iter_chunks(_widen_float8(a), _widen_float8(b)):
        total += one.numel()
        alike = one.dtype == other.dtype
        apart = (
            _view_as_integers(one) != _view_as_integers(other) if alike else one.double() != other.double()
        )
        x, y = one[apart].double(), other[apart].double()
        count += x.numel()
        if not x.numel():
            continue
        distance = (x - y).abs()
        distance[x.isnan() & y.isnan()] = 0.0  # two NaNs of other bits
        distance = distance.nan_to_num(nan=math.inf, posinf=math.inf)
        scale = torch.maximum(x.abs(), y.abs())
        share = torch.where(distance == 0, 0.0, distance / scale).nan_to_num(nan=math.inf, posinf=math.inf)
        most, relative = max(most, float(distance.max())), max(relative, float(share.max()))
    return Difference(name, kind, describe_value(a), describe_value(b), count, total, most, relative)


def _widen_float8(tensor: Tensor) -> Tensor:
    """Give eight-bit floats as wider ones: torch computes with those."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor
