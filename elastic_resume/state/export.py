"""Exports a checkpoint as a safetensors file, a torch.save file or a directory of torch's DCP.

Promise: every written byte was verified when it was read. The target appears whole or not at all, and
replaces an existing one only with ``force``. ``torch.load(weights_only=True)`` reads the torch file.

Tied tensors are stored under each of their names, as in a ``state_dict()``. A torch file shares them; the
other formats cannot share and hold copies.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

from elastic_resume.checkpoint import reader
from elastic_resume.checkpoint.atomic_io import DISK, Disk, temporary_name, translate_os_errors
from elastic_resume.checkpoint.json_codec import TensorRef
from elastic_resume.checkpoint.layout import Layout, TensorSpec
from elastic_resume.checkpoint.manifest import Manifest
from elastic_resume.errors import MachineError, UsageError
from elastic_resume.state.load import INTERNAL_PREFIX, OpenCheckpoint, iter_leaves, open_image
from elastic_resume.state.tensor_buffer import TensorBuffer

NAME_PREFIXES = {"plain": "", "dp": "module.", "ddp": "module."}
_DCP_METADATA = ".metadata"
_TORCH_SUFFIXES = {".pt", ".pth", ".bin", ".ckpt"}
_SAFE_TYPES = {bool, int, float, str, bytes, complex, set}  # torch.load(weights_only=True), beside containers
_COMPLEX_DTYPES = {"complex64": "C64", "complex128": "C128"}  # stored as pairs of reals

WriteBytes = Callable[[bytes | memoryview], None]


@dataclass(frozen=True)
class ExportResult:
    """Number of tensors, bytes written, and the names of values that the format cannot hold."""

    tensor_count: int
    byte_count: int
    skipped: tuple[str, ...]


def guess_format(target: Path) -> str:
    """Return the format for the suffix of ``target``."""
    return "torch" if target.suffix in _TORCH_SUFFIXES else "safetensors"


def export(
    source: Path,
    manifest: Manifest,
    target: Path,
    *,
    name: str | None = "model",
    file_format: str = "safetensors",
    wrapped: str = "plain",
    force: bool = False,
    disk: Disk = DISK,
) -> ExportResult:
    """Write the tensors of the tracked object ``name`` to ``target``.

    Args:
        source: the directory of a checkpoint.
        manifest: its manifest, from `reader.quick_check`.
        target: the file to write.
        name: the tracked object: ``model`` for ``er.resume(model=…)``. None exports all of them, each as in
            its
            state_dict(), with ``epoch`` and ``step``. Safetensors holds tensors only and refuses None.
        file_format: safetensors, torch or dcp.
        wrapped: plain, dp or ddp: the kind of model that will load the names.
        force: replace an existing target.
        disk: the disk to write to.

    Raises:
        UsageError: the target exists, there is no such object, or the format cannot hold it.
        CheckpointError: the checkpoint's bytes are not those that were saved.
        MachineError: the disk refuses.

    """
    _check_target(target, file_format, force=force)
    if name is None and file_format == "safetensors":
        raise UsageError(
            "safetensors holds tensors only. Use --format torch or dcp, or choose one object with --object."
        )
    checkpoint = open_image(source, manifest, reader.read_image(source, manifest))
    if name is None:
        return _export_all(checkpoint, target, file_format, wrapped, disk)
    references, skipped = _find_references(checkpoint.state, name, NAME_PREFIXES[wrapped])
    if file_format == "safetensors":
        byte_count = _write_safetensors(target, checkpoint, references, disk)
    else:
        # One tensor object for each reference: torch.save then stores tied tensors once.
        tensor_by_ref = {ref: checkpoint.tensor(ref) for ref in references.values()}
        tensors = {key: tensor_by_ref[ref] for key, ref in references.items()}
        state = tensors if file_format == "torch" else {name: tensors}
        byte_count = _write_state(target, state, file_format, disk)
    return ExportResult(len(references), byte_count, tuple(skipped))


def _check_target(target: Path, file_format: str, *, force: bool) -> None:
    """Refuse an existing target without ``force``, and any directory that DCP did not write."""
    if target.is_dir() and not (file_format == "dcp" and (target / _DCP_METADATA).is_file()):
        raise UsageError(f"{target}: is a directory. Give the name of a file.")
    if os.path.lexists(target) and not force:
        raise UsageError(f"{target}: exists. Give another name, or replace it with --force.")


def _export_all(
    checkpoint: OpenCheckpoint, target: Path, file_format: str, wrapped: str, disk: Disk
) -> ExportResult:
    """Export all objects and the position, as a training script would save them."""
    tensor_by_ref: dict[TensorRef, Tensor] = {}
    skipped: list[str] = []

    def make_safe(item: Any, path: str) -> Any:
        """Rebuild ``item`` from the types that torch.load(weights_only=True) accepts; a deque is not one."""
        if isinstance(item, TensorRef):
            return tensor_by_ref.setdefault(item, checkpoint.tensor(item))
        if isinstance(item, dict):
            return {key: make_safe(part, f"{path}/{key}") for key, part in item.items()}
        if type(item) in {list, tuple, deque}:
            parts = [make_safe(part, f"{path}/{i}") for i, part in enumerate(item)]
            return tuple(parts) if type(item) is tuple else parts
        if item is not None and type(item) not in _SAFE_TYPES:
            skipped.append(path)
            return None
        return item

    tracked = {name: part for name, part in checkpoint.state.items() if not name.startswith(INTERNAL_PREFIX)}
    state = {name: make_safe(part, name) for name, part in tracked.items()}
    if NAME_PREFIXES[wrapped] and isinstance(state.get("model"), dict):
        state["model"] = {NAME_PREFIXES[wrapped] + key: value for key, value in state["model"].items()}
    tensor_count = sum(isinstance(value, Tensor) for _, value in iter_leaves(state))
    position = checkpoint.manifest.position
    content = {**state, "epoch": position.epoch, "step": position.step}
    return ExportResult(tensor_count, _write_state(target, content, file_format, disk), tuple(skipped))


def _find_references(
    state: Mapping[str, Any], name: str, prefix: str
) -> tuple[dict[str, TensorRef], list[str]]:
    """Return one object's tensors by their exported name, and the names of its other values."""
    with_tensors = [
        n for n, part in state.items() if any(_is_tensor_ref(leaf) for _, leaf in iter_leaves(part))
    ]
    if name not in with_tensors:
        problem = "holds no tensor" if name in state else "is not in this checkpoint"
        known = ", ".join(with_tensors) or "none"
        raise UsageError(
            f"object {name!r} {problem}; objects with tensors: {known}. Choose one with --object."
        )
    references = [(prefix + key, leaf) for key, leaf in iter_leaves(state[name]) if _is_tensor_ref(leaf)]
    counts = Counter(key for key, _ in references)
    duplicates = sorted(key for key, count in counts.items() if count > 1)
    if duplicates:
        raise UsageError(f"object {name!r} has two tensors under one name: {', '.join(duplicates[:4])}.")
    return dict(references), [key for key, leaf in iter_leaves(state[name]) if not _is_tensor_ref(leaf)]


def _is_tensor_ref(leaf: Any) -> bool:
    return isinstance(leaf, TensorRef)


def _make_spec(buffer: TensorBuffer, key: str, ref: TensorRef) -> TensorSpec:
    extent = buffer.layout.extents[ref.name]
    if ref.kind not in _COMPLEX_DTYPES:
        return TensorSpec(key, extent.dtype, extent.shape)
    if ref.kind == "complex128":
        raise UsageError(f"{key}: safetensors has no complex128; use --format torch.")
    return TensorSpec(key, _COMPLEX_DTYPES[ref.kind], extent.shape[:-1])


def _write_safetensors(
    target: Path, checkpoint: OpenCheckpoint, references: Mapping[str, TensorRef], disk: Disk
) -> int:
    layout = Layout.build(_make_spec(checkpoint.buffer, key, ref) for key, ref in references.items())

    def produce(write: WriteBytes) -> None:
        write(layout.header)
        for key in layout.extents:
            write(checkpoint.buffer.tensor_bytes(references[key].name))

    return _write_atomically(target, produce, disk)


def _write_state(target: Path, state: Any, file_format: str, disk: Disk) -> int:
    if file_format == "dcp":
        return _write_dcp(target, state, disk)
    return _write_atomically(
        target, lambda write: torch.save(state, cast("IO[bytes]", _WriteOnlyFile(write))), disk
    )


def _write_dcp(target: Path, state: Any, disk: Disk) -> int:
    """Let DCP write to a temporary name, then rename it. Return the size of all files."""
    temporary = target.with_name(temporary_name(target.name))
    try:
        with warnings.catch_warnings(), translate_os_errors("write", temporary):
            warnings.simplefilter("ignore")  # DCP warns that there is no process group
            save(state, checkpoint_id=temporary, no_dist=True)  # syncs its files
            size = sum(path.stat().st_size for path in temporary.iterdir())
        disk.sync_dir(temporary)
        if os.path.lexists(target):
            # A crash between the renames leaves both directories whole, under temporary names.
            replaced = target.with_name(temporary_name(target.name))
            disk.rename(target, replaced)
            disk.rename(temporary, target)
            disk.sync_dir(target.parent)  # or a power loss could restore a partly removed directory
            disk.remove_tree(replaced)
        else:
            disk.rename(temporary, target)
    except BaseException:
        with contextlib.suppress(MachineError):
            if os.path.lexists(temporary):
                disk.remove_tree(temporary)
        raise
    disk.sync_dir(target.parent)
    return size


class _WriteOnlyFile:
    """The part of a file that torch.save uses."""

    def __init__(self, write: WriteBytes) -> None:
        self._write = write

    def write(self, data: bytes | memoryview) -> int:
        self._write(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: no data is buffered."""


def _write_atomically(target: Path, write_content: Callable[[WriteBytes], None], disk: Disk) -> int:
    """Write the content to a temporary name, sync and rename it. Return its size."""
    temporary = target.with_name(temporary_name(target.name))
    descriptor = disk.create(temporary)
    try:
        try:
            write_content(lambda data: disk.write(descriptor, data, temporary))
            disk.sync_file(descriptor, temporary)
            size = os.fstat(descriptor).st_size
        finally:
            disk.close(descriptor, temporary)
        disk.rename(temporary, target)
    except BaseException:
        with contextlib.suppress(MachineError):
            disk.unlink(temporary)
        raise
    disk.sync_dir(target.parent)
    return size
