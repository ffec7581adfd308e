"""Reads directories of torch.distributed.checkpoint (DCP) without unpickling what could run.

DCP's ``.metadata`` is a pickle, and torch's own reader executes whatever stands in it. Here it is read by a
reader that knows the dozen names which DCP writes, and makes inert records of them: no class or function of
torch, or of anybody else, is ever called. Any other name is a ForeignError that tells it. The tensors lie in
files that ``torch.load(weights_only=True)`` reads.

Promise: a tensor is given whole: its pieces, of however many ranks, lie in it, do not overlap, and fill it.
Not known: what DCP's extensions do to its files (compression, say); those are refused.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elastic_resume.errors import CorruptError, ForeignError, TornError
from elastic_resume.store.layout import MAX_DIMENSIONS
from elastic_resume.store.reading import fill, open_regular, read_small
from elastic_resume.worker.contents import (
    DCP_METADATA,
    MAX_PICKLE_BYTES,
    Stored,
    Unreadable,
    check_archive,
    is_archive,
    load_safely,
    names_a_file_beside,
    replace_leaves,
    tree_of,
)

_NUMBERING = {"PUT", "BINPUT", "LONG_BINPUT"}
_HOME = "torch.distributed.checkpoint."


class Record:
    """What stands for an object of DCP: its fields, and nothing that acts."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str, default: Any = None) -> Any:
        """Give a field."""
        state = self.__dict__.get("state")
        return state.get(name, default) if isinstance(state, dict) else default


class Metadata(Record):
    """All of ``.metadata``."""


class TensorEntry(Record):
    """A tensor's dtype, size and pieces."""


class BytesEntry(Record):
    """Something that is not a tensor."""


class Piece(Record):
    """A part of a tensor: offsets and sizes."""


class Index(Record):
    """Which piece of what: fqn and offset. A key of a dict, so it is told apart by identity."""


class Where(Record):
    """In which file a piece lies, and from where to where."""


class Properties(Record):
    """A tensor's dtype and the like: (dtype, layout, requires_grad, memory format, pinned)."""


def as_tuple(items: Sequence[Any] = ()) -> tuple[Any, ...]:
    """Stand for torch.Size."""
    return tuple(items)


KNOWN: Mapping[tuple[str, str], Callable[..., Any]] = {
    (_HOME + "metadata", "Metadata"): Metadata,
    (_HOME + "metadata", "TensorStorageMetadata"): TensorEntry,
    (_HOME + "metadata", "BytesStorageMetadata"): BytesEntry,
    (_HOME + "metadata", "ChunkStorageMetadata"): Piece,
    (_HOME + "metadata", "MetadataIndex"): Index,
    (_HOME + "metadata", "TensorProperties"): Properties,
    (_HOME + "metadata", "_MEM_FORMAT_ENCODING"): Record,
    (_HOME + "metadata", "StorageMeta"): Record,
    (_HOME + "filesystem", "_StorageInfo"): Where,
    ("torch", "Size"): as_tuple,
    ("torch.serialization", "_get_layout"): str,
    ("pathlib", "PosixPath"): Record,
    ("pathlib._local", "PosixPath"): Record,  # as Python 3.13 calls it
    ("collections", "OrderedDict"): OrderedDict,
}


class Reader(pickle.Unpickler):
    """Knows `KNOWN` and torch's dtypes, and no other name."""

    def find_class(self, module: str, name: str) -> Any:
        """Give what stands for ``module.name``. Raises ForeignError."""
        if (module, name) in KNOWN:
            return KNOWN[module, name]
        if module == "torch" and name.isidentifier() and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise ForeignError(
            f"{DCP_METADATA} names {module}.{name}, which DCP's own files do not; nothing of it was run."
        )

    def persistent_load(self, _: Any) -> Any:
        """Refuse: DCP has no use for it."""
        raise CorruptError(f"{DCP_METADATA} is not one of DCP's.")


def read_directory(path: Path) -> Any:
    """Give what a DCP directory holds, as the nested dicts and lists that were saved.

    Raises:
        ForeignError: a name that DCP does not write, or a file of an extension of it.
        TornError, CorruptError: files that are missing, cut off or contradict each other.

    """
    metadata = _metadata(path)
    entries, where = metadata.get("state_dict_metadata"), metadata.get("storage_data")
    if not isinstance(entries, dict) or not isinstance(where, dict):
        raise CorruptError(f"{DCP_METADATA} has no table of what is stored.")
    lying: dict[Any, list[tuple[Any, Where]]] = {}
    for index, place in where.items():
        if not isinstance(index, Index) or not isinstance(place, Where):
            raise CorruptError(f"{DCP_METADATA}: its storage_data is not DCP's.")
        lying.setdefault(index.get("fqn"), []).append((index.get("offset"), place))
    _require_apart(where.values())
    flat = {}
    for name, entry in entries.items():
        if type(name) is not str:
            raise CorruptError(f"{DCP_METADATA} names something by a {type(name).__name__}.")
        if isinstance(entry, TensorEntry):
            flat[name] = _tensor(path, name, entry, lying.get(name, []))
        else:
            flat[name] = _plain(path, name, lying.get(name, []))
    return _unflattened(flat, metadata.get("planner_data"))


def _require_apart(places: Iterable[Where]) -> None:
    """Refuse pieces that share bytes: a small file would be read as any amount of memory."""
    ranges = [(place.get("relative_path"), place.get("offset"), place.get("length")) for place in places]
    for file, start, size in ranges:
        if type(file) is not str or type(start) is not int or type(size) is not int or start < 0 or size < 0:
            raise CorruptError(f"{DCP_METADATA}: something lies at an impossible place in {file!r}.")
    last = ("", 0)
    for file, start, size in sorted(ranges):
        if file == last[0] and start < last[1]:
            raise CorruptError(f"{DCP_METADATA}: two pieces lie at byte {start} of {file}.")
        last = (file, start + size)


def _metadata(path: Path) -> Metadata:
    data = read_small(path / DCP_METADATA, MAX_PICKLE_BYTES)
    try:
        _require_small_memo(data)
        metadata = Reader(io.BytesIO(data)).load()
    except (ForeignError, CorruptError, MemoryError):
        raise
    except Exception as error:  # a hostile pickle makes its reader raise nearly anything
        raise CorruptError(
            f"{DCP_METADATA} is not one of DCP's ({type(error).__name__}: {error})."
        ) from error
    if not isinstance(metadata, Metadata):
        raise CorruptError(f"{DCP_METADATA} holds a {type(metadata).__name__} and not DCP's metadata.")
    return metadata


def _require_small_memo(data: bytes) -> None:
    """Refuse a pickle that numbers its objects beyond its own length: five bytes would take 32 GB."""
    for code, argument, _ in pickletools.genops(data):
        if code.name in _NUMBERING and int(argument or 0) > len(data):
            raise CorruptError(f"{DCP_METADATA} is none of DCP's (object {argument} in {len(data)} bytes).")


# ---- tensors -------------------------------------------------------------------------------------------


def _tensor(path: Path, name: str, entry: TensorEntry, lying: list[tuple[Any, Where]]) -> Stored:
    properties, pieces = entry.get("properties"), entry.get("chunks")
    state = properties.__dict__.get("state") if isinstance(properties, Properties) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    shape = _sizes(name, entry.get("size"))
    if not isinstance(dtype, torch.dtype) or not isinstance(pieces, list):
        raise CorruptError(f"{DCP_METADATA}: {name!r} has no dtype or no pieces.")
    boxes = [(_sizes(name, piece.get("offsets")), _sizes(name, piece.get("sizes"))) for piece in pieces]
    _require_tiling(name, shape, boxes)
    at = {offset if offset is None else tuple(offset): place for offset, place in lying}
    places = [at.get(offset, at.get(None) if len(boxes) == 1 else None) for offset, _ in boxes]
    files = []
    for place, (_, sizes) in zip(places, boxes, strict=True):
        if place is None:
            raise CorruptError(f"{DCP_METADATA}: {name!r} has a piece that lies nowhere.")
        files.append(_slice(path, name, place, least=prod(sizes) * dtype.itemsize))

    def read() -> Tensor:
        parts = [_piece(name, file(), dtype, sizes) for file, (_, sizes) in zip(files, boxes, strict=True)]
        if len(boxes) == 1:
            return parts[0]
        whole = torch.empty(shape, dtype=dtype)
        for part, (offset, sizes) in zip(parts, boxes, strict=True):
            whole[tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))] = part
        return whole

    return Stored(dtype, shape, read)


def _unpacked(data: bytes) -> Any:
    """Read a piece, which torch.save has written: in memory it is as large as in the file."""
    if is_archive(io.BytesIO(data)):
        check_archive(io.BytesIO(data))
    return load_safely(io.BytesIO(data), mapped=False)


def _piece(name: str, data: bytes, dtype: torch.dtype, sizes: tuple[int, ...]) -> Tensor:
    tensor = _unpacked(data)
    if not isinstance(tensor, Tensor) or tensor.dtype != dtype or tuple(tensor.shape) != sizes:
        raise CorruptError(
            f"the file's piece of {name!r} is not the {dtype} of {list(sizes)} that it should be."
        )
    return tensor.detach()


def _sizes(name: str, value: Any) -> tuple[int, ...]:
    sizes = tuple(value) if isinstance(value, (tuple, list)) else (-1,)
    whole = all(type(size) is int and 0 <= size < 1 << 53 for size in sizes)
    if len(sizes) > MAX_DIMENSIONS or not whole or prod(filter(None, sizes)) >= 1 << 53:
        raise CorruptError(f"{DCP_METADATA}: {name!r} has an impossible shape.")
    return sizes


def _require_tiling(
    name: str, shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    """Refuse pieces that do not fill the tensor: what they leave out would be whatever memory held."""
    for offset, sizes in boxes:
        inside = len(offset) == len(sizes) == len(shape) and all(
            o + n <= whole for o, n, whole in zip(offset, sizes, shape, strict=True)
        )
        if not inside:
            raise CorruptError(f"{DCP_METADATA}: a piece of {name!r} lies outside of it.")
    if sum(prod(sizes) for _, sizes in boxes) != prod(shape):
        raise CorruptError(f"{DCP_METADATA}: the pieces of {name!r} do not fill it.")
    boxes = [box for box in boxes if prod(box[1])]
    # Along the dimension that is cut most: along another one each piece would be compared with all.
    along = max(range(len(shape)), key=lambda d: len({offset[d] for offset, _ in boxes}), default=0)
    boxes.sort(key=lambda box: box[0][along : along + 1])
    open_: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for offset, sizes in boxes if len(boxes) > 1 else ():
        open_ = [box for box in open_ if box[0][along] + box[1][along] > offset[along]]
        for other, extent in open_:
            pairs = zip(offset, sizes, other, extent, strict=True)
            if all(o < p + m and p < o + n for o, n, p, m in pairs):
                raise CorruptError(f"{DCP_METADATA}: pieces of {name!r} overlap.")
        open_.append((offset, sizes))


def _slice(path: Path, name: str, place: Where, least: int) -> Callable[[], bytes]:
    """Give what reads a piece's bytes; checked now, read then."""
    file, start, size = place.get("relative_path"), place.get("offset"), place.get("length")
    if not names_a_file_beside(file):
        raise CorruptError(f"{DCP_METADATA}: {name!r} lies in {file!r}, which is no file beside it.")
    if place.get("transform_descriptors"):
        raise ForeignError(
            f"{name!r} was written by an extension of DCP ({place.get('transform_descriptors')})."
        )
    if type(start) is not int or type(size) is not int or start < 0 or size < least:
        raise CorruptError(f"{DCP_METADATA}: {name!r} lies at an impossible place in {file}.")
    try:
        have = (path / file).stat().st_size
    except FileNotFoundError:
        raise TornError(f"{file}, which holds {name!r}, is missing.") from None
    if start + size > have:
        raise TornError(f"{file} has {have} bytes; {name!r} ends at {start + size}.")

    def read() -> bytes:
        with open_regular(path / file) as descriptor:
            data = bytearray(size)
            fill(descriptor, start, memoryview(data))
            return bytes(data)

    return read


# ---- the rest ------------------------------------------------------------------------------------------


def _plain(path: Path, name: str, lying: list[tuple[Any, Where]]) -> Any:
    if len(lying) != 1:
        raise CorruptError(f"{DCP_METADATA}: {name!r} lies at {len(lying)} places.")
    data = _slice(path, name, lying[0][1], least=0)()
    try:
        return tree_of(_unpacked(data))
    except ForeignError as error:  # one object that is not data need not spoil the rest
        return Unreadable(str(error))


def _unflattened(flat: dict[str, Any], paths: Any) -> Any:
    """Build the nested containers again, as DCP's planner noted them: (key or index, …) for each name."""
    if not isinstance(paths, dict) or not all(isinstance(paths.get(name), tuple) for name in flat):
        return flat
    tree: dict[Any, Any] = {}
    for name, value in flat.items():
        steps = paths[name]
        if not steps or not all(type(step) in {str, int} for step in steps):
            raise CorruptError(f"{DCP_METADATA}: {name!r} has no place among what was saved.")
        inside = tree
        for step in steps[:-1]:
            inside = inside.setdefault(step, {})
            if not isinstance(inside, dict):
                raise CorruptError(f"{DCP_METADATA}: {name!r} lies within something else.")
        if steps[-1] in inside:
            raise CorruptError(f"{DCP_METADATA}: two things are called {name!r}.")
        inside[steps[-1]] = value
    return _with_lists(replace_leaves(tree, lambda leaf, _: leaf))


def _with_lists(tree: Any) -> Any:
    """Containers whose keys are 0, 1, 2 … as ints were lists; DCP writes a dict's keys as strings."""
    if not isinstance(tree, dict):
        return tree
    parts = {key: _with_lists(part) for key, part in tree.items()}
    if set(parts) == set(range(len(parts))) and parts:
        return [parts[at] for at in range(len(parts))]
    return parts
