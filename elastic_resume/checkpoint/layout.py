"""Where each tensor of a checkpoint lies: the image is byte for byte a safetensors file.

An image is an 8-byte little-endian header length, a JSON header padded with spaces so that the first
tensor starts at a multiple of 4096, and the tensors without holes (safetensors refuses holes), ordered by
item size, greatest first: so each tensor is aligned to its item size without padding. The same bytes lie
in memory, on disk and on the wire, and any safetensors reader opens the file.

Promise: `Layout.parse` accepts only what lies wholly inside the file, without overlap or hole, so a
buffer cut up by its extents is never read past its end. It says nothing about whether the bytes are the
right ones: digests do, in `checkpoint`.

Does not know files, torch or numpy: names, shapes and byte offsets only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any, NoReturn

from elastic_resume.errors import CorruptError, TornError

ALIGNMENT = 4096  # a page: the image can be mapped, and registered as pinned memory, from its data on
MAX_HEADER_BYTES = 100_000_000  # safetensors itself refuses a longer header; about 700,000 tensors
MAX_FILE_BYTES = 1 << 53  # beyond this JSON numbers of other readers lose bits
MAX_TENSOR_DIMENSIONS = 64  # torch's own limit
FORMAT_NAME = "elastic_resume.image/1"
METADATA_KEY = "__metadata__"

ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "C64": 8,
        "F64": 8,
        "I64": 8,
        "U64": 8,
        "F32": 4,
        "I32": 4,
        "U32": 4,
        "F16": 2,
        "BF16": 2,
        "I16": 2,
        "U16": 2,
        "F8_E4M3": 1,
        "F8_E5M2": 1,
        "F8_E8M0": 1,
        "F8_E4M3FNUZ": 1,
        "F8_E5M2FNUZ": 1,
        "I8": 1,
        "U8": 1,
        "BOOL": 1,
    }
)


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor is: its name, its safetensors dtype and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's elements, densely packed."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Extent:
    """Where a tensor lies: ``image[start:stop]``, offsets counted from the image's first byte."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Layout:
    """The header of an image and what it means. Equal layouts have equal headers, byte for byte."""

    __slots__ = ("extents", "header", "total_bytes")

    header: bytes
    extents: Mapping[str, Extent]
    total_bytes: int

    def __init__(self, header: bytes, extents: Mapping[str, Extent], total_bytes: int) -> None:
        """Taken as given: use `build` or `parse`."""
        self.header = header
        self.extents = MappingProxyType(dict(extents))
        self.total_bytes = total_bytes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.header == other.header

    def __hash__(self) -> int:
        return hash(self.header)

    def __repr__(self) -> str:
        return f"Layout({len(self.extents)} tensors, {self.total_bytes} bytes)"

    @staticmethod
    def build(specs: Iterable[TensorSpec]) -> Layout:
        """Lay out tensors; ties in item size keep the given order.

        Raises ValueError for a name given twice or reserved, an unknown dtype, or an impossible shape.
        """
        ordered = _sort_specs(specs)
        table: dict[str, Any] = {METADATA_KEY: {"format": "pt", "layout": FORMAT_NAME}}
        relative = 0
        for spec in ordered:
            stop = relative + spec.nbytes
            table[spec.name] = {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "data_offsets": [relative, stop],
            }
            relative = stop
        header = _frame_header(json.dumps(table, separators=(",", ":"), ensure_ascii=True).encode())
        if len(header) > MAX_HEADER_BYTES or len(header) + relative > MAX_FILE_BYTES:
            raise ValueError(
                f"{len(ordered)} tensors of {relative} bytes do not fit into one safetensors file."
            )
        return Layout(header, _absolute_extents(table, len(header)), len(header) + relative)

    @staticmethod
    def parse(prefix: bytes | bytearray | memoryview, file_bytes: int, *, aligned: bool = True) -> Layout:
        """Read the layout from the beginning of an image that is ``file_bytes`` long.

        ``head`` must reach at least to the end of the header (`header_bytes` tells how far that is).
        ``aligned`` False: a tensor may start anywhere, as in safetensors files of others.
        Raises TornError when the file ends too early, CorruptError for everything else that is wrong.
        """
        size = header_size(prefix, file_bytes)
        if len(prefix) < size:
            raise TornError(f"header: {size} bytes announced, {len(prefix)} given.")
        header = bytes(prefix[:size])
        try:
            table = json.loads(
                header[8:], object_pairs_hook=_reject_duplicates, parse_constant=_reject_constant
            )
        except (ValueError, RecursionError) as error:
            raise CorruptError(f"header: not the JSON of a safetensors file ({error}).") from error
        if not isinstance(table, dict):
            raise CorruptError("header: not a JSON object.")
        for name, entry in table.items():
            if name != METADATA_KEY:
                _check_entry(name, entry)
        extents = _absolute_extents(table, size)
        _check_tiling(extents, size, file_bytes, aligned=aligned)
        return Layout(header, extents, file_bytes)

    def tensors_in_range(self, start: int, stop: int) -> list[str]:
        """Names of the tensors that have bytes in ``image[start:stop]``, in the order they lie there."""
        return [n for n, e in self.extents.items() if e.start < stop and start < e.stop]


def header_size(prefix: bytes | bytearray | memoryview, file_bytes: int) -> int:
    """Length of header and its length field, from an image's first 8 bytes: how much `Layout.parse` needs."""
    if len(prefix) < 8 or file_bytes < 8:
        raise TornError(f"header: the file ends after {min(len(prefix), file_bytes)} bytes.")
    size = 8 + int.from_bytes(prefix[:8], "little")
    if size > MAX_HEADER_BYTES:
        raise CorruptError(f"header: announces {size} bytes, more than the limit of {MAX_HEADER_BYTES}.")
    if size > file_bytes:
        raise TornError(f"header: {size} bytes announced, the file has {file_bytes}.")
    return size


def _sort_specs(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    seen: set[str] = set()
    given: list[TensorSpec] = []
    for spec in specs:
        if spec.name in seen or spec.name == METADATA_KEY:
            raise ValueError(f"two tensors are named {spec.name!r}, or the name is reserved.")
        if spec.dtype not in ITEM_BYTES:
            raise ValueError(f"tensor {spec.name!r}: safetensors knows no dtype {spec.dtype!r}.")
        if len(spec.shape) > MAX_TENSOR_DIMENSIONS or any(n < 0 for n in spec.shape):
            raise ValueError(f"tensor {spec.name!r}: impossible shape {spec.shape}.")
        seen.add(spec.name)
        given.append(spec)
    return sorted(given, key=lambda spec: -ITEM_BYTES[spec.dtype])


def _frame_header(text: bytes) -> bytes:
    padded = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT - 8
    return padded.to_bytes(8, "little") + text.ljust(padded)


def _absolute_extents(table: Mapping[str, Any], data_start: int) -> dict[str, Extent]:
    extents = {
        name: Extent(
            entry["dtype"],
            tuple(entry["shape"]),
            data_start + entry["data_offsets"][0],
            data_start + entry["data_offsets"][1],
        )
        for name, entry in table.items()
        if name != METADATA_KEY
    }
    return dict(sorted(extents.items(), key=lambda item: (item[1].start, item[1].stop)))


def _check_entry(name: str, entry: Any) -> None:
    """Refuse an entry of the header that is not a tensor whose shape and extent agree."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CorruptError(f"header: entry {name!r} is not dtype, shape and data_offsets.")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CorruptError(f"header: tensor {name!r} has the unknown dtype {dtype!r}.")
    if not _is_size_list(shape) or len(shape) > MAX_TENSOR_DIMENSIONS or prod(filter(None, shape)) >= 1 << 53:
        raise CorruptError(f"header: tensor {name!r} has an impossible shape.")
    if not _is_size_list(offsets) or len(offsets) != 2:
        raise CorruptError(f"header: tensor {name!r} has impossible data_offsets.")
    if offsets[1] - offsets[0] != prod(shape) * ITEM_BYTES[dtype]:
        raise CorruptError(
            f"header: tensor {name!r} of dtype {dtype} and shape {shape} does not fill "
            f"bytes {offsets[0]} to {offsets[1]}."
        )


def _check_tiling(extents: Mapping[str, Extent], data_start: int, file_bytes: int, *, aligned: bool) -> None:
    """Refuse a hole, an overlap, a misaligned tensor, or an end that is not the file's."""
    end = data_start
    for name, extent in extents.items():
        if extent.start != end:
            what = "overlaps what lies before it" if extent.start < end else "leaves a hole before it"
            raise CorruptError(f"header: tensor {name!r} {what} (byte {extent.start}, expected {end}).")
        if aligned and extent.start % ITEM_BYTES[extent.dtype] and extent.stop > extent.start:
            raise CorruptError(f"header: tensor {name!r} starts at byte {extent.start}, not aligned.")
        end = extent.stop
    if end > file_bytes:
        raise TornError(f"the tensors end at byte {end}, the file at {file_bytes}.")
    if end < file_bytes:
        raise CorruptError(f"the tensors end at byte {end}, the file only at {file_bytes}.")


def _is_size_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= MAX_FILE_BYTES for n in value)


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name occurs twice")
    return table


def _reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
