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

from elastic_resume.errors import MachineError, UsageError
from elastic_resume.store import checkpoint, typed
from elastic_resume.store.durable import DISK, Disk, machine, temporary_name
from elastic_resume.store.layout import Layout, TensorSpec
from elastic_resume.store.manifest import Manifest
from elastic_resume.store.typed import TensorRef
from elastic_resume.worker import contents
from elastic_resume.worker.contents import Stored
from elastic_resume.worker.image import Image

PREFIXES = {"plain": "", "dp": "module.", "ddp": "module."}
_TORCH_SUFFIXES = {".pt", ".pth", ".bin", ".ckpt"}
INTERNAL = "elastic_resume."
_LOADABLE = {bool, int, float, str, bytes, complex, set}  # what torch's safe reader takes, beside containers
_PAIRS = {"complex64": "C64", "complex128": "C128"}  # stored as pairs of reals

Write = Callable[[bytes | memoryview], None]


@dataclass(frozen=True)
class Exported:
    """What was written: how many tensors, bytes of the file, and what could not come along."""

    tensors: int
    bytes: int
    left_out: tuple[str, ...]


def format_for(target: Path) -> str:
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
) -> Exported:
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
    _require_room(target, file_format, force=force)
    if name is None:
        return _export_all(source, target, file_format, wrapped, disk)
    references, left_out = _references(manifest, name, PREFIXES[wrapped])
    memory = checkpoint.read_image(source, manifest)
    image = Image(Layout.parse(memory, manifest.file_bytes), memory)
    for key, ref in references.items():
        if ref.name not in image.layout.extents:
            raise UsageError(
                f"{source}: {key} refers to the tensor {ref.name!r}, which is not in the checkpoint."
            )
    if file_format != "safetensors":
        one_each = {ref: _tensor(image, ref) for ref in references.values()}  # torch.save sees what is tied
        tensors = {key: one_each[ref] for key, ref in references.items()}
        state = tensors if file_format == "torch" else {name: tensors}
        return Exported(len(references), _put_state(target, state, file_format, disk), tuple(left_out))
    layout = Layout.build(_spec(image, key, ref) for key, ref in references.items())

    def produce(write: Write) -> None:
        write(layout.header)
        for key in layout.extents:
            write(image.bytes_of(references[key].name))

    return Exported(len(references), _put(target, produce, disk), tuple(left_out))


def _require_room(target: Path, file_format: str, *, force: bool) -> None:
    """Refuse a name that is taken; a directory always, unless it is DCP's and another is to replace it."""
    if target.is_dir() and not (file_format == "dcp" and (target / contents.DCP_METADATA).is_file()):
        raise UsageError(f"{target}: is a directory; give the name of a file.")
    if os.path.lexists(target) and not force:
        raise UsageError(f"{target}: exists; give another name, or --force to replace it.")


def _export_all(source: Path, target: Path, file_format: str, wrapped: str, disk: Disk) -> Exported:
    """Write all objects and the position: what a script of its own, or `resume`, goes on from."""
    if file_format == "safetensors":
        raise UsageError(
            "safetensors holds tensors and nothing else: use --format torch or dcp, or give one --object."
        )
    found = contents.look_into(source)
    left_out: list[str] = []

    def leaf(item: Any, path: str) -> Any:
        if isinstance(item, Stored):
            return item.read()
        if item is not None and type(item) not in _LOADABLE:
            left_out.append(path)
            return None
        return item

    state = {name: part for name, part in found.tree.items() if not name.startswith(INTERNAL)}
    if PREFIXES[wrapped] and isinstance(state.get("model"), dict):
        state["model"] = {PREFIXES[wrapped] + key: value for key, value in state["model"].items()}
    tensors = sum(isinstance(value, Stored) for _, value in contents.leaves(state))
    whole = {
        **_lists(contents.replace_leaves(state, leaf)),
        "epoch": found.about["epoch"],
        "step": found.about["step"],
    }
    return Exported(tensors, _put_state(target, whole, file_format, disk), tuple(left_out))


def _references(manifest: Manifest, name: str, prefix: str) -> tuple[dict[str, TensorRef], list[str]]:
    """Tensors of one object by the name they get, and the names of what is not a tensor."""
    state = manifest.state if isinstance(manifest.state, dict) else {}
    with_tensors = [key for key, part in state.items() if _walk(typed.decode(part))[0]]
    if name not in with_tensors:
        what = "holds no tensor" if name in state else "is not in this checkpoint"
        known = ", ".join(with_tensors) or "none"
        raise UsageError(f"object {name!r} {what}; objects with tensors: {known}. Choose one with --object.")
    found, rest = _walk(typed.decode(state[name]))
    names = [key for key, _ in found]
    doubled = sorted({key for key in names if names.count(key) > 1}) if len(set(names)) < len(names) else []
    if doubled:
        raise UsageError(f"object {name!r} has two tensors under one name: {', '.join(doubled[:4])}.")
    return {prefix + key: ref for key, ref in found}, rest


def _walk(value: Any, path: str = "") -> tuple[list[tuple[str, TensorRef]], list[str]]:
    """Tensors inside ``value`` with their paths, and the paths of everything else."""
    if isinstance(value, TensorRef):
        return [(path, value)], []
    inside: Mapping[Any, Any] | None = None
    if isinstance(value, dict):
        inside = value
    elif isinstance(value, (list, tuple, deque)):
        inside = dict(enumerate(value))
    if inside is None:
        return [], [path]
    found, rest = [], []
    for key, item in inside.items():
        more, other = _walk(item, f"{path}/{key}" if path else str(key))
        found += more
        rest += other
    return found, rest


def _tensor(image: Image, ref: TensorRef) -> Tensor:
    tensor = image.tensor(ref.name)
    return torch.view_as_complex(tensor) if ref.kind in _PAIRS else tensor


def _spec(image: Image, key: str, ref: TensorRef) -> TensorSpec:
    extent = image.layout.extents[ref.name]
    if ref.kind not in _PAIRS:
        return TensorSpec(key, extent.dtype, extent.shape)
    if ref.kind == "complex128":
        raise UsageError(f"{key}: safetensors has no complex128; use --format torch.")
    return TensorSpec(key, _PAIRS[ref.kind], extent.shape[:-1])


def _lists(tree: Any) -> Any:
    """Give lists in the place of deques, which torch's safe reader refuses."""
    if isinstance(tree, dict):
        return {key: _lists(part) for key, part in tree.items()}
    return list(map(_lists, tree)) if type(tree) in {list, deque} else tree


def _put_state(target: Path, state: Any, file_format: str, disk: Disk) -> int:
    if file_format == "dcp":
        return _put_dcp(target, state, disk)
    return _put(target, lambda write: torch.save(state, cast("IO[bytes]", _Sink(write))), disk)


def _put_dcp(target: Path, state: Any, disk: Disk) -> int:
    """Have DCP write under a temporary name, rename that; return the size of all files."""
    if os.path.lexists(target):
        disk.require_exchange(target)
    temporary = target.with_name(temporary_name(target.name))
    try:
        with warnings.catch_warnings(), machine("write", temporary):
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


class _Sink:
    """What torch.save wants of a file."""

    def __init__(self, write: Write) -> None:
        self._write = write

    def write(self, data: bytes | memoryview) -> int:
        self._write(data)
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""


def _put(target: Path, produce: Callable[[Write], None], disk: Disk) -> int:
    """Write what ``produce`` gives under a temporary name, sync it, rename it; return its size."""
    temporary = target.with_name(temporary_name(target.name))
    descriptor = disk.create(temporary)
    try:
        try:
            produce(lambda data: disk.write(descriptor, data, temporary))
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
