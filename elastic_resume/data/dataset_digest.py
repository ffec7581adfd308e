"""Tell whether each start and each rank builds the same dataset.

A position counts samples, so it is right only if an index means the same sample after a restart. A script
that splits or shuffles its dataset without a seed draws another one at each start, and on each rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash

SAMPLED = 256  # entries of one list
MAX_DATASETS = 1000  # within each other


def digest_dataset(loader: Any) -> int:
    """Return a digest of entries of the lists by which the dataset of ``loader`` finds its samples.

    It reads the attributes of the dataset and of those within it, and no sample. It is 0 if it knows nothing.
    """
    digest, is_empty = xxhash.xxh3_64(), True
    for name, values in _iter_lists(getattr(loader, "dataset", None), set()):
        with contextlib.suppress(Exception):  # values of any kind: a nested tensor refuses even its shape
            digest.update(f"{name} {len(values)} {_describe_entries(values)}".encode())
            is_empty = False
    return 0 if is_empty else digest.intdigest() >> 1


def _iter_lists(dataset: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the lists with an entry for each sample; others, as of devices, may differ between ranks."""
    if id(dataset) in seen or len(seen) >= MAX_DATASETS:
        return
    seen.add(id(dataset))
    for name, value in sorted(getattr(dataset, "__dict__", {}).items()):
        if name == "dataset":  # as in torch's Subset
            yield from _iter_lists(value, seen)
        elif name == "datasets" and isinstance(value, (list, tuple)):
            for item in value:
                yield from _iter_lists(item, seen)
        else:
            with contextlib.suppress(Exception):  # see above
                if _has_entries(value, len(dataset)):
                    yield name, value


def _has_entries(value: Any, count: int) -> bool:
    """Return whether a list, an array or each of several arrays has ``count`` entries, one for a sample."""
    if isinstance(value, (list, tuple)):
        arrays = [item for item in value[:SAMPLED] if _is_array(item)]
        return len(value) == count > 1 or (len(arrays) == len(value) > 0 and _have_length(arrays, count))
    return _is_array(value) and _have_length([value], count)


def _have_length(arrays: list[Any], count: int) -> bool:
    return all(len(array.shape) > 0 and array.shape[0] == count > 1 for array in arrays)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "reshape")


def _describe_entries(values: Any) -> str:
    step = -(-len(values) // SAMPLED)
    return " ".join(_describe(values[index]) for index in range(0, len(values), step))


def _describe(value: Any) -> str:
    """Describe a number, the last part of a path, or the first of several values; else return ""."""
    if isinstance(value, (str, Path)):  # nodes may keep the files in different directories
        return Path(value).name
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return _describe(value[0]) if value else ""
    if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        return ""
    if _is_array(value):
        first = value if not value.shape else value.reshape(-1)[:1]
        return repr(first.tolist())
    return ""
