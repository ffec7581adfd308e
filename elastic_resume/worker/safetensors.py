"""Reads safetensors files of anybody: one, or several with their index.

Promise: no byte outside of a file is ever looked at, whatever its header says; a tensor is read when it is
asked for. The format carries no digests, so that its form is right is all that can be known.
"""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elastic_resume.errors import CorruptError, ForeignError
from elastic_resume.store import layout as layouts
from elastic_resume.store.layout import Layout
from elastic_resume.store.reading import fill, open_regular, read_small
from elastic_resume.worker.contents import INDEX_SUFFIX, MAX_PICKLE_BYTES, Stored, names_a_file_beside
from elastic_resume.worker.image import DTYPES

_MORE_DTYPES = {
    "C64": torch.complex64,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}


def read_path(path: Path) -> dict[str, Any]:
    """Give what lies in a file, in those of an index, or in a directory of either, by name.

    Raises CorruptError, TornError or ForeignError.
    """
    return _nested(_named(path))


def _named(path: Path) -> dict[str, Stored]:
    if path.is_dir():
        path = _one_of(path)
    if not path.name.endswith(INDEX_SUFFIX):
        return _file(path)
    found: dict[str, Stored] = {}
    files: dict[str, dict[str, Stored]] = {}
    for name, file in _index(path).items():
        if file not in files:
            files[file] = _file(path.parent / file)
        if name not in files[file]:
            raise CorruptError(f"{path.name}: {name!r} should be in {file}, and is not.")
        found[name] = files[file][name]
    return found


def _one_of(directory: Path) -> Path:
    names = sorted(os.listdir(directory))  # noqa: PTH208  names only
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    files = indexes or [name for name in names if name.endswith(".safetensors")]
    if len(files) != 1:
        raise ForeignError(
            f"holds {len(files)} safetensors files ({', '.join(files[:4])}): name one of them."
        )
    return directory / files[0]


def _index(path: Path) -> dict[str, str]:
    """Read which tensor lies in which file beside the index."""
    try:
        table = json.loads(read_small(path, MAX_PICKLE_BYTES))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptError(f"{path.name}: is no index of safetensors files ({error!r}).") from error
    if not isinstance(table, dict):
        raise CorruptError(f"{path.name}: its weight_map is no table.")
    for file in table.values():
        if not names_a_file_beside(file) or not file.endswith(".safetensors"):
            raise CorruptError(f"{path.name}: names {file!r}, which is no safetensors file beside it.")
    return table


def _file(path: Path) -> dict[str, Stored]:
    with open_regular(path) as descriptor:
        size = os.fstat(descriptor).st_size
        head = bytearray(min(8, size))
        fill(descriptor, 0, memoryview(head))
        head = bytearray(layouts.header_bytes(head, size))
        fill(descriptor, 0, memoryview(head))
        layout = Layout.parse(head, size, aligned=False)
        memory = memoryview(mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE))
    return {name: _of_file(memory, extent) for name, extent in layout.extents.items()}


def _of_file(memory: memoryview, extent: layouts.Extent) -> Stored:
    dtype = DTYPES.get(extent.dtype) or _MORE_DTYPES[extent.dtype]

    def read() -> Tensor:
        if extent.start == extent.stop:
            return torch.empty(extent.shape, dtype=dtype)
        part = memory[extent.start : extent.stop]
        if extent.start % dtype.itemsize:  # the format lets tensors begin anywhere
            part = memoryview(bytearray(part))
        return torch.frombuffer(part, dtype=dtype).view(extent.shape)

    return Stored(dtype, extent.shape, read)


def _nested(flat: dict[str, Stored]) -> dict[str, Any]:
    """Take names apart where a file holds several objects: ``model/conv1.weight``, as our own images do."""
    if not flat or not all("/" in name for name in flat):
        return dict(flat)
    tree: dict[str, Any] = {}
    for name, stored in flat.items():
        part, rest = name.split("/", 1)
        tree.setdefault(part, {})[rest] = stored
    return tree
