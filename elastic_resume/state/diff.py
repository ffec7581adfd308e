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
from elastic_resume.state.load import Opened, leaves

_PIECE = 1 << 20  # elements that are compared at a time
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Side:
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
    a: str
    b: str
    elements: int = 0
    of: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """Both sides, all differences in the order of A's names, and how much was compared."""

    a: Side
    b: Side
    differences: tuple[Difference, ...]
    tensors: int
    others: int


def compare(a: Path, b: Path) -> Comparison:
    """Compare two checkpoints; of a directory of a run or a node, its newest valid one.

    Raises:
        CheckpointError, NoValidCheckpointError: one of them cannot be read.

    """
    sides = (load.opened(a), load.opened(b))
    here, there = (dict(_leaves(side)) for side in sides)
    names = list(dict.fromkeys([*here, *there]))
    found = [
        difference
        for name in names
        for difference in _differences(name, here.get(name, _NONE), there.get(name, _NONE))
    ]
    tensors = sum(isinstance(here.get(name), Tensor) or isinstance(there.get(name), Tensor) for name in names)
    one, other = (Side(str(side.path), side.manifest.generation, side.manifest.step) for side in sides)
    return Comparison(one, other, tuple(found), tensors, len(names) - tensors)


def _leaves(side: Opened) -> Iterator[tuple[str, Any]]:
    """Yield position and state by path, tensors as views of the checkpoint."""
    for name, leaf in leaves({"position": asdict(side.manifest.position), **side.state}):
        yield name, side.tensor(leaf) if isinstance(leaf, TensorRef) else leaf


class _Nothing:
    """Stands where one side has nothing, which is not None."""


_NONE = _Nothing()


# ---- one name ------------------------------------------------------------------------------------------


def _differences(name: str, a: Any, b: Any) -> Iterator[Difference]:
    if isinstance(a, _Nothing) or isinstance(b, _Nothing):
        yield Difference(name, "only in B" if isinstance(a, _Nothing) else "only in A", shown(a), shown(b))
    elif not isinstance(a, Tensor) or not isinstance(b, Tensor):
        if type(a) is not type(b) or not _equal(a, b):
            yield Difference(name, "value", shown(a), shown(b))
    elif a.shape != b.shape:
        yield Difference(name, "shape", shown(a), shown(b))
    elif a.dtype != b.dtype:
        yield _numbers(name, "dtype", a, b)
    elif not _same_bits(a, b):
        yield _numbers(name, "values", a, b)


def _equal(a: Any, b: Any) -> bool:
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def shown(value: Any) -> str:
    """Say in a few characters what stands at a name."""
    if isinstance(value, _Nothing):
        return "absent"
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return all(torch.equal(_bits(one), _bits(other)) for one, other in _pieces(a, b))


def _pieces(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    flat = [(torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).reshape(-1) for t in (a, b)]
    for start in range(0, flat[0].numel(), _PIECE):
        yield flat[0][start : start + _PIECE], flat[1][start : start + _PIECE]


def _bits(piece: Tensor) -> Tensor:
    return piece.contiguous().view(_BITS[piece.element_size()])


def _numbers(name: str, kind: str, a: Tensor, b: Tensor) -> Difference:
    """Count what differs, and measure by how much."""
    count = total = 0
    most = relative = 0.0
    for one, other in _pieces(_comparable(a), _comparable(b)):
        total += one.numel()
        alike = one.dtype == other.dtype
        apart = _bits(one) != _bits(other) if alike else one.double() != other.double()
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
    return Difference(name, kind, shown(a), shown(b), count, total, most, relative)


def _comparable(tensor: Tensor) -> Tensor:
    """Give eight-bit floats as wider ones: torch computes with those."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor
