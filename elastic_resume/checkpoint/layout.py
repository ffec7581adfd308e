"""Compute and validate where each tensor lies in an image, which is byte for byte a safetensors file.

    8 bytes     header length, little-endian
    header      JSON, padded with spaces so that the data starts at a multiple of 4096
    data        the tensors without gaps, larger item sizes first, so that each is aligned to its item size

The same bytes lie in memory, on disk and on the wire, and any safetensors reader opens them. `Layout.parse`
accepts only extents that tile the file exactly, so slices by its extents never leave the buffer. This module
knows no tensor values; digests of the bytes are in the manifest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any

from elastic_resume.checkpoint.json_codec import reject_constant
from elastic_resume.errors import CorruptError, TornError

ALIGNMENT = 4096  # a page, so that the data can be mapped and registered as pinned memory
MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors; about 700,000 tensors
MAX_FILE_BYTES = 1 << 53  # other JSON readers round greater numbers
MAX_TENSOR_DIMENSIONS = 64  # torch's own limit
FORMAT_NAME = "elastic_resume.image/1"
METADATA_KEY = "__metadata__"

_DTYPES_BY_ITEM_BYTES = {
    8: "C64 F64 I64 U64",
    4: "F32 I32 U32",
    2: "F16 BF16 I16 U16",
    1: "F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ I8 U8 BOOL",
}
ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {dtype: size for size, dtypes in _DTYPES_BY_ITEM_BYTES.items() for dtype in dtypes.split()}
)


@dataclass(frozen=True)
class TensorSpec:
    """Name, safetensors dtype and shape of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the densely packed elements."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Extent:
    """The place of one tensor: ``image[start:stop]``, counted from the image's first byte."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """The header of an image, from `build` or `parse`; equal layouts have equal headers, byte for byte."""

    header: bytes = field(repr=False)
    extents: Mapping[str, Extent] = field(compare=False, repr=False)
    total_bytes: int = field(compare=False)

    @staticmethod
    def build(specs: Iterable[TensorSpec]) -> Layout:
        """Lay out tensors; those of equal item size keep the given order.

        Raises:
            ValueError: a name is reserved or given twice, a dtype is unknown, or a shape is impossible.

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
        text = json.dumps(table, separators=(",", ":"), ensure_ascii=True).encode()
        padded = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT - 8
        header = padded.to_bytes(8, "little") + text.ljust(padded)
        if len(header) > MAX_HEADER_BYTES or len(header) + relative > MAX_FILE_BYTES:
            raise ValueError(
                f"{len(ordered)} tensors of {relative} bytes do not fit into one safetensors file."
            )
        return Layout(header, _absolute_extents(table, len(header)), len(header) + relative)

    @staticmethod
    def parse(prefix: bytes | bytearray | memoryview, file_bytes: int) -> Layout:
        """Parse and validate the header of an image of ``file_bytes`` bytes.

        ``prefix`` must reach to the end of the header; `header_size` returns how far that is.

        Raises:
            TornError: the file ends too early.
            CorruptError: the header is invalid in any other way.

        """
        size = header_size(prefix, file_bytes)
        if len(prefix) < size:
            raise TornError(f"header: {size} bytes announced, {len(prefix)} given.")
        header = bytes(prefix[:size])
        try:
            table = json.loads(
                header[8:], object_pairs_hook=_reject_duplicates, parse_constant=reject_constant
            )
        except (ValueError, RecursionError) as error:
            raise CorruptError(f"header: not the JSON of a safetensors file ({error}).") from error
        if not isinstance(table, dict):
            raise CorruptError("header: not a JSON object.")
        for name, entry in table.items():
            if name != METADATA_KEY:
                _check_entry(name, entry)
        extents = _absolute_extents(table, size)
        _check_tiling(extents, size, file_bytes)
        return Layout(header, extents, file_bytes)


def header_size(prefix: bytes | bytearray | memoryview, file_bytes: int) -> int:
    """Return the bytes of length field and header, read from an image's first 8 bytes."""
    if len(prefix) < 8 or file_bytes < 8:
        raise TornError(f"header: the file ends after {min(len(prefix), file_bytes)} bytes.")
    size = 8 + int.from_bytes(prefix[:8], "little")
    if size > MAX_HEADER_BYTES:
        raise CorruptError(f"header: announces {size} bytes, more than the limit of {MAX_HEADER_BYTES}.")
    if size > file_bytes:
        raise TornError(f"header: {size} bytes announced, the file has {file_bytes}.")
    return size


def _sort_specs(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    names: set[str] = set()
    valid: list[TensorSpec] = []
    for spec in specs:
        if spec.name in names or spec.name == METADATA_KEY:
            raise ValueError(f"two tensors are named {spec.name!r}, or the name is reserved.")
        if spec.dtype not in ITEM_BYTES:
            raise ValueError(f"tensor {spec.name!r}: safetensors knows no dtype {spec.dtype!r}.")
        if len(spec.shape) > MAX_TENSOR_DIMENSIONS or any(n < 0 for n in spec.shape):
            raise ValueError(f"tensor {spec.name!r}: impossible shape {spec.shape}.")
        names.add(spec.name)
        valid.append(spec)
    return sorted(valid, key=lambda spec: -ITEM_BYTES[spec.dtype])


def _absolute_extents(table: Mapping[str, Any], data_start: int) -> Mapping[str, Extent]:
    extents = []
    for name, entry in table.items():
        if name != METADATA_KEY:
            start, stop = (data_start + offset for offset in entry["data_offsets"])
            extents.append((name, Extent(entry["dtype"], tuple(entry["shape"]), start, stop)))
    return MappingProxyType(dict(sorted(extents, key=lambda item: (item[1].start, item[1].stop))))


def _check_entry(name: str, entry: Any) -> None:
    """Raise CorruptError unless an entry is a tensor whose shape and extent agree."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CorruptError(f"header: entry {name!r} is not dtype, shape and data_offsets.")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    is_valid = (
        isinstance(dtype, str)
        and dtype in ITEM_BYTES
        and _is_size_list(shape)
        and len(shape) <= MAX_TENSOR_DIMENSIONS
        and prod(filter(None, shape)) < 1 << 53
        and _is_size_list(offsets)
        and len(offsets) == 2
        and offsets[1] - offsets[0] == prod(shape) * ITEM_BYTES[dtype]
    )
    if not is_valid:
        raise CorruptError(f"header: tensor {name!r} has an impossible dtype, shape or data_offsets.")


def _check_tiling(extents: Mapping[str, Extent], data_start: int, file_bytes: int) -> None:
    """Raise on a gap, an overlap, a misaligned tensor, or a wrong end of file."""
    end = data_start
    for name, extent in extents.items():
        if extent.start != end:
            defect = "overlaps the one before it" if extent.start < end else "leaves a gap before it"
            raise CorruptError(f"header: tensor {name!r} {defect} (byte {extent.start}, expected {end}).")
        if extent.start % ITEM_BYTES[extent.dtype] and extent.stop > extent.start:
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
