"""From a checkpoint to what others read: a safetensors file, torch.save's, or a directory of DCP's.

Promise: every byte that is written was verified when it was read; the target appears whole or not at all,
and replaces nothing unless told to. Tied tensors stand under each of their names, as `state_dict` has them:
shared in a torch file, copied in the others, which have no sharing. Nothing that is written needs more than
``torch.load(weights_only=True)`` to be read.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections import deque
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
from elastic_resume.checkpoint.reader import translate_read_errors
from elastic_resume.errors import MachineError, UsageError
from elastic_resume.state.load import INTERNAL_PREFIX, OpenCheckpoint, decode_state, iter_leaves
from elastic_resume.state.tensor_buffer import TensorBuffer

NAME_PREFIXES = {"plain": "", "dp": "module.", "ddp": "module."}
_DCP_METADATA = ".metadata"
_TORCH_SUFFIXES = {".pt", ".pth", ".bin", ".ckpt"}
_SAFE_TYPES = {
    bool,
    int,
    float,
    str,
    bytes,
    complex,
    set,
}  # what torch's safe reader takes, beside containers
_COMPLEX_DTYPES = {"complex64": "C64", "complex128": "C128"}  # stored as pairs of reals

WriteBytes = Callable[[bytes | memoryview], None]


@dataclass(frozen=True)
class ExportResult:
    """What was written: how many tensors, bytes of the file, and what could not come along."""

    tensor_count: int
    byte_count: int
    skipped: tuple[str, ...]


def guess_format(target: Path) -> str:
    """The format that a file's name asks for."""
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
        source: a checkpoint's directory.
        manifest: its manifest, from `checkpoint.quick_check`.
        target: the file to make.
        name: which tracked object; ``model`` for ``er.resume(model=…)``. None: all, each under its name as
            its state_dict() has it, with ``epoch`` and ``step``; not as safetensors, which has tensors only.
        file_format: safetensors, torch or dcp.
        wrapped: plain, dp or ddp: for what kind of model the names are.
        force: replace a file that is there.
        disk: where to write.

    Raises:
        UsageError: the target exists, there is no such object, or the format cannot hold it.
        CheckpointError: the checkpoint's bytes are not those that were saved.
        MachineError: the disk refuses.

    """
    _check_target(target, file_format, force=force)
    if name is None and file_format == "safetensors":
        raise UsageError(
            "safetensors holds tensors and nothing else: use --format torch or dcp, or give one --object."
        )
    memory = reader.read_image(source, manifest)
    with translate_read_errors(source):
        layout = Layout.parse(memory, manifest.file_bytes)
        opened = OpenCheckpoint(
            source, manifest, TensorBuffer(layout, memory), decode_state(manifest, layout)
        )
    if name is None:
        return _export_all(opened, target, file_format, wrapped, disk)
    references, left_out = _find_references(opened.state, name, NAME_PREFIXES[wrapped])
    if file_format == "safetensors":
        return ExportResult(
            len(references), _write_safetensors(target, opened, references, disk), tuple(left_out)
        )
    one_each = {ref: opened.tensor(ref) for ref in references.values()}  # torch.save sees what is tied
    tensors = {key: one_each[ref] for key, ref in references.items()}
    state = tensors if file_format == "torch" else {name: tensors}
    return ExportResult(len(references), _write_state(target, state, file_format, disk), tuple(left_out))


def _check_target(target: Path, file_format: str, *, force: bool) -> None:
    """Refuse a name that is taken; a directory always, unless it is DCP's and another is to replace it."""
    if target.is_dir() and not (file_format == "dcp" and (target / _DCP_METADATA).is_file()):
        raise UsageError(f"{target}: is a directory; give the name of a file.")
    if os.path.lexists(target) and not force:
        raise UsageError(f"{target}: exists; give another name, or --force to replace it.")


def _export_all(
    checkpoint: OpenCheckpoint, target: Path, file_format: str, wrapped: str, disk: Disk
) -> ExportResult:
    """Write all objects and the position, as a script of its own would save them."""
    one_each: dict[TensorRef, Tensor] = {}
    left_out: list[str] = []

    def plain(item: Any, path: str) -> Any:
        """Rebuild ``item`` of what torch's safe reader takes: it refuses a deque, for one."""
        if isinstance(item, TensorRef):
            return one_each.setdefault(item, checkpoint.tensor(item))
        if isinstance(item, dict):
            return {key: plain(part, f"{path}/{key}") for key, part in item.items()}
        if type(item) in {list, tuple, deque}:
            parts = [plain(part, f"{path}/{at}") for at, part in enumerate(item)]
            return tuple(parts) if type(item) is tuple else parts
        if item is not None and type(item) not in _SAFE_TYPES:
            left_out.append(path)
            return None
        return item

    state = {n: plain(part, n) for n, part in checkpoint.state.items() if not n.startswith(INTERNAL_PREFIX)}
    if NAME_PREFIXES[wrapped] and isinstance(state.get("model"), dict):
        state["model"] = {NAME_PREFIXES[wrapped] + key: value for key, value in state["model"].items()}
    tensors = sum(isinstance(value, Tensor) for _, value in iter_leaves(state))
    position = checkpoint.manifest.position
    whole = {**state, "epoch": position.epoch, "step": position.step}
    return ExportResult(tensors, _write_state(target, whole, file_format, disk), tuple(left_out))


def _find_references(
    state: Mapping[str, Any], name: str, prefix: str
) -> tuple[dict[str, TensorRef], list[str]]:
    """Tensors of one object by the name they get, and the names of what is not a tensor."""
    with_tensors = [
        n for n, part in state.items() if any(_is_tensor_ref(leaf) for _, leaf in iter_leaves(part))
    ]
    if name not in with_tensors:
        what = "holds no tensor" if name in state else "is not in this checkpoint"
        known = ", ".join(with_tensors) or "none"
        raise UsageError(f"object {name!r} {what}; objects with tensors: {known}. Choose one with --object.")
    found = [(prefix + key, leaf) for key, leaf in iter_leaves(state[name]) if _is_tensor_ref(leaf)]
    names = [key for key, _ in found]
    doubled = sorted({key for key in names if names.count(key) > 1}) if len(set(names)) < len(names) else []
    if doubled:
        raise UsageError(f"object {name!r} has two tensors under one name: {', '.join(doubled[:4])}.")
    return dict(found), [key for key, leaf in iter_leaves(state[name]) if not _is_tensor_ref(leaf)]


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
    """Have DCP write under a temporary name, rename that; return the size of all files."""
    if os.path.lexists(target):
        disk.require_exchange(target)
    temporary = target.with_name(temporary_name(target.name))
    try:
        with warnings.catch_warnings(), translate_os_errors("write", temporary):
            warnings.simplefilter("ignore")  # that there is no process group is meant
            save(state, checkpoint_id=temporary, no_dist=True)  # which syncs its files
            size = sum(path.stat().st_size for path in temporary.iterdir())
        disk.sync_dir(temporary)
        if os.path.lexists(target):
            disk.exchange(temporary, target)  # now the temporary name is the old one's
            disk.sync_dir(target.parent)  # or a power cut gives it back its name, and not all of its files
            disk.remove_tree(temporary)
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
    """What torch.save wants of a file."""

    def __init__(self, write: WriteBytes) -> None:
        self._write = write

    def write(self, data: bytes | memoryview) -> int:
        self._write(data)
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""


def _write_atomically(target: Path, write_content: Callable[[WriteBytes], None], disk: Disk) -> int:
    """Write what ``produce`` gives under a temporary name, sync it, rename it; return its size."""
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
