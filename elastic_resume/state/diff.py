"""Compare two checkpoints: tensors by name, and every other value by its path.

Tensors are compared in pieces, so memory does not grow with the checkpoints. Tensors are equal if dtype,
shape and bits are: -0.0 differs from 0.0, and a NaN equals only a NaN with the same bits.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elastic_resume.archive.address import Address
from elastic_resume.checkpoint.json_codec import TensorRef
from elastic_resume.state import open_checkpoint
from elastic_resume.state.load_objects import describe_tensor
from elastic_resume.state.open_checkpoint import OpenCheckpoint, iter_leaves

_CHUNK_ELEMENTS = 1 << 20  # elements that are compared at a time
_INTEGER_DTYPE_BY_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# What a run measures of itself, by the names that a log gives it. Equal runs differ in it.
MEASURED = re.compile(r"time|per_sec|/s(ec)?$|speed|elapsed|duration|throughput|memory|tflops|mfu")
# Of `integrations.transformers`: when a job first started, and what it and its logs have measured.
_NOT_COMPARED = re.compile(
    rf"trainer_start/nanoseconds|trainer_log/values/\d+/1|trainer_attributes/.*({MEASURED.pattern}).*"
)
ABSENT = object()  # for a name that one checkpoint lacks; None is a value


@dataclass(frozen=True)
class ComparedCheckpoint:
    """One of the two checkpoints."""

    path: str
    generation: int
    step: int


@dataclass(frozen=True)
class Difference:
    """One name at which the checkpoints differ.

    ``kind`` is "values", "dtype", "shape", "value", "only in A" or "only in B". A relative difference is
    relative to the greater value; differences are infinite if NaN or infinity meets a number.
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
    """Both checkpoints, all differences in the order of A's names, and how much was compared."""

    checkpoint_a: ComparedCheckpoint
    checkpoint_b: ComparedCheckpoint
    differences: tuple[Difference, ...]
    tensor_count: int
    other_count: int


def compare(path_a: Path | Address, path_b: Path | Address) -> Comparison:
    """Compare two checkpoints. For the directory of a run or a node, use its newest valid checkpoint.

    Raises:
        CheckpointError, NoValidCheckpointError, ArchiveError: one of them cannot be read.

    """
    first, second = (open_checkpoint.open_checkpoint(path, shows_progress=True) for path in (path_a, path_b))
    checkpoints = first, second
    state_a, state_b = (dict(_iter_state(checkpoint)) for checkpoint in checkpoints)
    names = list(dict.fromkeys([*state_a, *state_b]))
    differences: list[Difference] = []
    tensor_count = 0
    for name in names:
        values = [
            checkpoint.tensor(value) if isinstance(value, TensorRef) else value
            for checkpoint, value in zip(
                checkpoints, (state_a.get(name, ABSENT), state_b.get(name, ABSENT)), strict=True
            )
        ]
        differences += find_differences(name, *values)
        tensor_count += any(isinstance(value, Tensor) for value in values)
    compared_a, compared_b = (
        ComparedCheckpoint(str(checkpoint.place), checkpoint.manifest.generation, checkpoint.manifest.step)
        for checkpoint in checkpoints
    )
    return Comparison(compared_a, compared_b, tuple(differences), tensor_count, len(names) - tensor_count)


def _iter_state(checkpoint: OpenCheckpoint) -> Iterator[tuple[str, Any]]:
    """Yield every value with its path, and references to tensors."""
    position = asdict(checkpoint.manifest.position)
    if "data" not in checkpoint.state:
        del position["step_in_epoch"]  # without data= a resumed run counts them from its own start
    for name, leaf in iter_leaves({"position": position, **checkpoint.state}):
        if is_compared(name, leaf):
            yield name, leaf


def is_compared(name: str, value: Any) -> bool:
    """Return whether equal runs have the same value of this name.

    A float in a plain attribute of a Trainer or callback may be a duration, under any name, and is left out.
    A wrong one shows only where weights, the log or a count follow from it.
    """
    is_maybe_duration = type(value) is float and name.startswith("trainer_attributes/")
    return not is_maybe_duration and _NOT_COMPARED.fullmatch(name) is None


def find_differences(name: str, a: Any, b: Any) -> Iterator[Difference]:
    """Yield how two values differ, if they do: tensors on the CPU, plain values, or `ABSENT`."""
    if a is ABSENT or b is ABSENT:
        kind = "only in B" if a is ABSENT else "only in A"
        yield Difference(name, kind, describe_value(a), describe_value(b))
    elif not isinstance(a, Tensor) or not isinstance(b, Tensor):
        are_nan = isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)
        if type(a) is not type(b) or not (are_nan or a == b):
            yield Difference(name, "value", *_describe_values(a, b))
    elif a.shape != b.shape:
        yield Difference(name, "shape", describe_value(a), describe_value(b))
    elif a.dtype != b.dtype:
        yield _measure_difference(name, "dtype", a, b)
    elif not _have_same_bits(a, b):
        yield _measure_difference(name, "values", a, b)


def are_equal(a: Any, b: Any) -> bool:
    """Return whether two tensors on the CPU have one dtype, one shape and the same bits; false for others."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return _have_same_bits(a, b)


def _have_same_bits(a: Tensor, b: Tensor) -> bool:
    return all(torch.equal(_view_as_integers(x), _view_as_integers(y)) for x, y in iter_chunks(a, b))


def describe_value(value: Any) -> str:
    """Describe a value in at most 60 characters."""
    if value is ABSENT:
        return "absent"
    if isinstance(value, Tensor):
        return describe_tensor(value)
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _describe_values(a: Any, b: Any) -> tuple[str, str]:
    """Describe two values that differ, as `describe_value`; of long texts show where they begin to differ."""
    texts = [repr(a), repr(b)]
    same = (x == y for x, y in zip(*texts, strict=False))
    begin = sum(itertools.takewhile(bool, same)) - 20
    if begin <= 0 or max(map(len, texts)) <= 60 or isinstance(a, Tensor) or isinstance(b, Tensor):
        return describe_value(a), describe_value(b)
    ends = [text[begin:] if len(text) <= begin + 54 else f"{text[begin : begin + 54]}..." for text in texts]
    return f"...{ends[0]}", f"...{ends[1]}"


def iter_chunks(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the elements of two tensors of one shape in pieces."""
    flat = [(torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).reshape(-1) for t in (a, b)]
    for start in range(0, flat[0].numel(), _CHUNK_ELEMENTS):
        yield flat[0][start : start + _CHUNK_ELEMENTS], flat[1][start : start + _CHUNK_ELEMENTS]


def _view_as_integers(chunk: Tensor) -> Tensor:
    return chunk.contiguous().view(_INTEGER_DTYPE_BY_SIZE[chunk.element_size()])


def _measure_difference(name: str, kind: str, a: Tensor, b: Tensor) -> Difference:
    """Count the elements that differ, and measure by how much."""
    count = total = 0
    max_abs = max_rel = 0.0
    for chunk_a, chunk_b in iter_chunks(_widen_float8(a), _widen_float8(b)):
        total += chunk_a.numel()
        if chunk_a.dtype == chunk_b.dtype:
            differs = _view_as_integers(chunk_a) != _view_as_integers(chunk_b)
        else:
            differs = chunk_a.double() != chunk_b.double()
        x, y = chunk_a[differs].double(), chunk_b[differs].double()
        count += x.numel()
        if not x.numel():
            continue
        distance = (x - y).abs()
        distance[x.isnan() & y.isnan()] = 0.0  # NaNs with different bits
        relative = torch.where(distance == 0, 0.0, distance / torch.maximum(x.abs(), y.abs()))
        max_abs = max(max_abs, float(distance.nan_to_num(nan=math.inf, posinf=math.inf).max()))
        max_rel = max(max_rel, float(relative.nan_to_num(nan=math.inf, posinf=math.inf).max()))
    return Difference(name, kind, describe_value(a), describe_value(b), count, total, max_abs, max_rel)


def _widen_float8(tensor: Tensor) -> Tensor:
    """Convert eight-bit floats to float32: torch cannot compute with them."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor
