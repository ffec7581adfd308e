"""Read checkpoints outside of a run: ``er.load``, and the readers that ``diff`` and ``export`` share.

Invariant: every byte is verified before any of it is returned.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elastic_resume import constants
from elastic_resume.archive.address import Address, parse_source
from elastic_resume.archive.location import find_archive
from elastic_resume.checkpoint import catalog, json_codec, reader
from elastic_resume.checkpoint.catalog import Catalog, CatalogEntry
from elastic_resume.checkpoint.json_codec import TensorRef
from elastic_resume.checkpoint.layout import Layout
from elastic_resume.checkpoint.manifest import Manifest
from elastic_resume.checkpoint.reader import translate_read_errors
from elastic_resume.checkpoint.stored import CheckpointInDirectory, Place, StoredCheckpoint
from elastic_resume.console import show_progress
from elastic_resume.errors import (
    CheckpointError,
    CorruptError,
    ForeignError,
    NoValidCheckpointError,
    UsageError,
)
from elastic_resume.state import dtensors, load_objects
from elastic_resume.state.state_dict import COMPLEX_KINDS, TensorBuffer

_MAX_ARCHIVED = 64  # the newest are looked at


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint: its manifest, its tensors, and each tracked object's state with references to them."""

    place: Place
    manifest: Manifest
    buffer: TensorBuffer
    state: Mapping[str, Any]

    def tensor(self, ref: TensorRef) -> Tensor:
        """Return the tensor of ``ref``, whole. It may share the image's memory: copy it to keep it."""
        tensor = dtensors.read_whole(ref, self.buffer.tensor)
        return torch.view_as_complex(tensor) if ref.kind in COMPLEX_KINDS.values() else tensor


def load(path: str | os.PathLike[str], name: str | None = "model") -> Any:
    """Read a checkpoint into CPU tensors: ``model.load_state_dict(er.load("checkpoints/train"))``.

    Needs no process group, no agent and no GPU, and changes nothing.

    Args:
        path: a checkpoint, or the directory of a node or a run, which means its newest valid checkpoint. Or
            an address in an archive: ``s3://BUCKET/PREFIX/RUN_ID``, or a checkpoint of that run.
        name: the object to read. "model" returns its state_dict, without ``module.`` and ``_orig_mod.``;
            "optimizer", "scheduler" … return the argument of their ``load_state_dict``. None returns all.

    Raises:
        UsageError: there is no such object; the text lists the existing ones.
        CheckpointError: there is nothing readable, or its bytes are damaged.
        NoValidCheckpointError: no checkpoint of the directory is valid.
        ArchiveError: the archive cannot be reached.

    """
    checkpoint = open_checkpoint(parse_source(path))
    if name is not None and name not in checkpoint.state:
        known = ", ".join(map(repr, list(checkpoint.state)[:20]))
        raise UsageError(
            f"{checkpoint.place}: holds no object {name!r}. It holds {known}; choose one with name=…, or "
            "None."
        )
    state = checkpoint.state if name is None else checkpoint.state[name]
    return load_objects.replace_references(
        state, load_objects.cache_by_name(lambda key: checkpoint.buffer.tensor(key).clone())
    )


def open_checkpoint(path: Path | Address, *, shows_progress: bool = False) -> OpenCheckpoint:
    """Open the checkpoint at ``path``, or the newest valid one of a node or a run. Verify every byte.

    ``shows_progress`` is for commands, which have the terminal for themselves.

    Raises:
        CheckpointError: there is nothing readable, or its bytes are damaged.
        NoValidCheckpointError: no checkpoint of the directory is valid.
        ArchiveError: the archive cannot be reached.

    """
    is_one, checkpoints = _list_archived(path) if isinstance(path, Address) else _list_directories(path)
    if not checkpoints:
        raise NoValidCheckpointError(f"{path}: there is no such checkpoint in the archive; ls shows what is.")
    problems = []
    for stored in checkpoints:
        try:
            return _open_stored(stored, shows_progress)
        except CheckpointError as error:
            if is_one:
                raise
            problems.append(str(error))
    more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
    raise NoValidCheckpointError(f"{path}: no checkpoint can be read ({'; '.join(problems[:4])}{more}).")


def iter_leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf of nested containers with its path, such as ``state/0/exp_avg``."""
    if type(tree) in {list, tuple, deque}:
        tree = dict(enumerate(tree))
    if not isinstance(tree, dict):
        yield path, tree
        return
    for key, part in tree.items():
        yield from iter_leaves(part, f"{path}/{key}" if path else str(key))


def _decode_state(manifest: Manifest, layout: Layout) -> dict[str, Any]:
    """Decode a manifest's state. Raise CorruptError if it refers to a tensor that ``layout`` lacks."""
    state = json_codec.decode(manifest.state)
    if not isinstance(state, dict):
        raise CorruptError("the manifest's state is not an object.")
    for _, leaf in iter_leaves(state):
        for name in leaf.stored_names if isinstance(leaf, TensorRef) else ():
            if name not in layout.extents:
                raise CorruptError(f"the manifest refers to the tensor {name!r}, which the data file lacks.")
    return state


def _list_directories(path: Path) -> tuple[bool, list[StoredCheckpoint]]:
    """Return whether ``path`` is one checkpoint, and each one of it, newest first."""
    if path.name in {constants.MANIFEST_FILE, constants.STATE_FILE}:
        path = path.parent
    with translate_read_errors(path):
        entries = _list_checkpoints(path)
    if not entries:
        return True, [CheckpointInDirectory(path)]
    entries = sorted(entries, key=lambda entry: entry.version, reverse=True)
    return False, [CheckpointInDirectory(entry.path, entry.error) for entry in entries]


def _list_archived(address: Address) -> tuple[bool, list[StoredCheckpoint]]:
    """Return what `_list_directories` does, for an archive."""
    found = find_archive(address)
    if len(found.run_ids) > 1:
        names = ", ".join(found.run_ids[:20])
        raise UsageError(f"{address}: holds {len(found.run_ids)} runs; add one to the address: {names}.")
    return found.level == "checkpoint", [*found.list_checkpoints(_MAX_ARCHIVED)]


def _open_stored(stored: StoredCheckpoint, shows_progress: bool) -> OpenCheckpoint:
    manifest = stored.read_manifest()
    if not shows_progress:
        return open_image(stored.place, manifest, stored.view_image(manifest, lambda _: None))
    with show_progress(f"reading {stored.place.name}", manifest.file_bytes) as set_done:
        return open_image(stored.place, manifest, stored.view_image(manifest, set_done))


def open_image(place: Place, manifest: Manifest, memory: memoryview) -> OpenCheckpoint:
    """Open the checkpoint at ``place`` whose verified data file is in ``memory``."""
    try:
        buffer = TensorBuffer(Layout.parse(memory, manifest.file_bytes), memory)
        return OpenCheckpoint(place, manifest, buffer, _decode_state(manifest, buffer.layout))
    except CheckpointError as error:
        raise type(error)(f"{place}: {error}") from error


def _list_checkpoints(path: Path) -> list[CatalogEntry]:
    """List the checkpoints of a node or of a run; [] for a checkpoint."""
    if not os.path.lexists(path):
        raise ForeignError("there is no such file or directory.")
    if not path.is_dir():
        raise ForeignError(
            "is not a checkpoint of elastic_resume. Read a file of torch.save with torch.load."
        )
    if (path / constants.MANIFEST_FILE).is_file() or reader.parse_checkpoint_name(path.name) is not None:
        return []
    entries = Catalog(path, None).list_entries() or [
        entry for entries in catalog.scan_run(path, None).values() for entry in entries
    ]
    if not entries:
        raise ForeignError("holds no checkpoint of elastic_resume. Give the directory of one run.")
    return entries
