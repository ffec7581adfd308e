"""Export a checkpoint as a safetensors file, a torch.save file or a directory of torch's DCP.

Invariant: every written byte was verified when it was read. The target appears whole or not at all, and
replaces an existing file only with ``force``. ``torch.load(weights_only=True)`` reads the torch file.

Tied tensors are stored under each of their names, as in a ``state_dict()``. A torch file shares them; the
other formats cannot share and hold copies.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from elastic_resume.checkpoint.atomic_io import DISK, temporary_name, translate_os_errors
from elastic_resume.checkpoint.json_codec import TensorRef
from elastic_resume.checkpoint.layout import Layout, TensorSpec
from elastic_resume.checkpoint.manifest import Manifest
from elastic_resume.checkpoint.stored import StoredCheckpoint
from elastic_resume.console import show_progress
from elastic_resume.errors import MachineError, UsageError
from elastic_resume.state.open_checkpoint import OpenCheckpoint, iter_leaves, open_image
from elastic_resume.state.state_dict import TensorBuffer, view_bytes

_TORCH_SUFFIXES = {".pt", ".pth", ".bin", ".ckpt"}
_COMPLEX_DTYPES = {"complex64": "C64", "complex128": "C128"}  # stored as pairs of reals


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
    stored: StoredCheckpoint,
    manifest: Manifest,
    target: Path,
    *,
    name: str = "model",
    file_format: str = "safetensors",
    force: bool = False,
) -> ExportResult:
    """Write the tensors of the tracked object ``name`` to ``target``.

    Args:
        stored: a checkpoint, on disk or in an archive.
        manifest: its manifest.
        target: the file to write.
        name: the tracked object: ``model`` for ``er.resume(model=…)``.
        file_format: safetensors, torch or dcp.
        force: replace an existing file. An existing directory is never replaced.

    Raises:
        UsageError: the target exists, there is no such object, or the format cannot hold it.
        CheckpointError: the checkpoint's bytes are not those that were saved.
        MachineError: the disk refuses.

    """
    _check_target(target, force=force)
    with show_progress(f"reading {stored.place.name}", manifest.file_bytes) as set_done:
        image = stored.read_image(manifest, set_done)
    checkpoint = open_image(stored.place, manifest, image)
    references, skipped = _find_references(checkpoint.state, name)
    if file_format == "safetensors":
        byte_count = _write_safetensors(target, checkpoint, references)
    else:
        # One tensor object for each reference: torch.save then stores tied tensors once.
        tensor_by_ref = {ref: checkpoint.tensor(ref) for ref in references.values()}
        tensors = {key: tensor_by_ref[ref] for key, ref in references.items()}
        state = tensors if file_format == "torch" else {name: tensors}
        byte_count = _write_state(target, state, file_format)
    return ExportResult(len(references), byte_count, tuple(skipped))


def _check_target(target: Path, *, force: bool) -> None:
    if target.is_dir():
        raise UsageError(f"{target}: is a directory. Give a name that does not exist, or remove it first.")
    if os.path.lexists(target) and not force:
        raise UsageError(f"{target}: exists. Give another name, or replace it with --force.")


def _find_references(state: Mapping[str, Any], name: str) -> tuple[dict[str, TensorRef], list[str]]:
    """Return one object's tensors by name, and the names of its other values."""
    with_tensors = [
        n for n, part in state.items() if any(_is_tensor_ref(leaf) for _, leaf in iter_leaves(part))
    ]
    if name not in with_tensors:
        problem = "holds no tensor" if name in state else "is not in this checkpoint"
        known = ", ".join(with_tensors) or "none"
        raise UsageError(
            f"object {name!r} {problem}; objects with tensors: {known}. Choose one with --object."
        )
    references = [(key, leaf) for key, leaf in iter_leaves(state[name]) if _is_tensor_ref(leaf)]
    counts = Counter(key for key, _ in references)
    duplicates = sorted(key for key, count in counts.items() if count > 1)
    if duplicates:
        raise UsageError(f"object {name!r} has two tensors under one name: {', '.join(duplicates[:4])}.")
    return dict(references), [key for key, leaf in iter_leaves(state[name]) if not _is_tensor_ref(leaf)]


def _is_tensor_ref(leaf: Any) -> bool:
    return isinstance(leaf, TensorRef)


def _make_spec(buffer: TensorBuffer, key: str, ref: TensorRef) -> TensorSpec:
    extent = buffer.layout.extents[ref.stored_names[0]]
    shape = extent.shape if ref.shards is None else ref.shards.whole_shape(extent.shape)
    if ref.kind not in _COMPLEX_DTYPES:
        return TensorSpec(key, extent.dtype, shape)
    if ref.kind == "complex128":
        raise UsageError(f"{key}: safetensors has no complex128; use --format torch.")
    return TensorSpec(key, _COMPLEX_DTYPES[ref.kind], shape[:-1])


def _write_safetensors(target: Path, checkpoint: OpenCheckpoint, references: Mapping[str, TensorRef]) -> int:
    layout = Layout.build(_make_spec(checkpoint.buffer, key, ref) for key, ref in references.items())

    def write(file: IO[bytes]) -> None:
        with show_progress(f"writing {target.name}", layout.total_bytes) as set_done:
            file.write(layout.header)
            for key in layout.extents:
                tensor = checkpoint.tensor(references[key]).contiguous()
                file.write(view_bytes(tensor))
                set_done(file.tell())

    return _write_file(target, write)


def _write_state(target: Path, state: Any, file_format: str) -> int:
    if file_format == "torch":
        return _write_file(target, lambda file: torch.save(state, file))
    with _write_temporary(target) as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns that there is no process group
        try:
            save(state, checkpoint_id=temporary, no_dist=True)  # syncs its files
        except CheckpointException as error:  # wraps the disk's error
            raise error.failures[0][0] from error
        DISK.sync_dir(temporary)
        return sum(path.stat().st_size for path in temporary.iterdir())


def _write_file(target: Path, write: Callable[[IO[bytes]], object]) -> int:
    """Write a file with ``write``; return its size."""
    with _write_temporary(target) as temporary, temporary.open("xb") as file:
        write(file)
        file.flush()
        DISK.sync_file(file.fileno(), temporary)
        return file.tell()


@contextlib.contextmanager
def _write_temporary(target: Path) -> Iterator[Path]:
    """Yield a temporary name beside ``target``. Rename the result to ``target``, or remove it on an error."""
    temporary = target.with_name(temporary_name(target.name))
    try:
        with translate_os_errors("write", temporary):
            yield temporary
        DISK.rename(temporary, target)
    except BaseException:
        with contextlib.suppress(MachineError):
            if temporary.exists():
                DISK.remove_tree(temporary)
        raise
    DISK.sync_dir(target.parent)
