"""What a checkpoint holds, of whatever format: ours, torch.save's, DCP's, safetensors.

`look_into` gives a tree of dicts and lists with a `Stored` in the place of each tensor, which is read when it
is asked for: whoever goes through it tensor by tensor needs memory for one.

Promise: nothing that a file says is executed. torch.save's pickle is read by torch's own restricted reader
(``weights_only=True``), DCP's by ours (`distcp`); what needs more than data is refused by name. Every limit
is checked before memory is taken. What is wrong is a CheckpointError with the path.
Of our own checkpoints every byte is verified before anything is given. `Contents.verify` does that for
torch.save's archives, which carry sums; DCP and safetensors have none, so there only form can be checked.
"""

from __future__ import annotations

import argparse
import os
import re
import zipfile
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elastic_resume import contract
from elastic_resume.errors import CheckpointError, CorruptError, ForeignError, TornError
from elastic_resume.store import checkpoint, typed
from elastic_resume.store.layout import Layout
from elastic_resume.store.reading import fill, located, open_regular
from elastic_resume.store.typed import TensorRef
from elastic_resume.worker.image import DTYPES, Image

OURS, TORCH, DCP, SAFETENSORS = "elastic_resume", "torch.save", "DCP", "safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
DCP_METADATA = ".metadata"
MAX_PICKLE_BYTES = 256 << 20  # of the part of a file that is not tensors
MAX_ITEMS = 5_000_000  # of a tree: a list that holds itself a hundred times over is a few bytes in a file
MAX_DEPTH = typed.MAX_DEPTH
_ZIP_MAGIC = b"PK\x03\x04"
_COMPLEX = {"complex64", "complex128"}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file. ``read`` gives it, sharing the file's memory: copy what is to be kept."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor] = field(compare=False)
    kind: str = "tensor"  # as of a `TensorRef`


@dataclass(frozen=True)
class Unreadable:
    """Stands where a file has something that is neither tensor nor plain data; says what."""

    what: str


@dataclass(frozen=True)
class Contents:
    """What lies at ``path``. Of our own format the tree's keys are the names of tracked objects."""

    path: Path
    format: str
    tree: Any
    about: Mapping[str, int] = field(default_factory=dict)  # of ours: generation, and the position's numbers
    verify: Callable[[], None] = field(default=lambda: None, compare=False)


def look_into(path: Path) -> Contents:
    """Open the checkpoint at ``path``: a file, or the directory of one checkpoint.

    Raises:
        ForeignError: nothing is there, it is of no known format, or it would have to be executed.
        TornError, CorruptError: it is not what its format says.
        UnreadableError: it cannot be read now.

    """
    with located(path):
        try:
            return _look_into(path)
        except CheckpointError as error:
            # located() puts the path before it; ours has done so already.
            raise type(error)(str(error).removeprefix(f"{path}: ")) from error


def format_of(path: Path) -> str:
    """Say of which format the file or directory is, by a look at its first bytes.

    Raises:
        ForeignError: none that is known.
        OSError: it cannot be read.

    """
    if path.is_dir():
        names = set(os.listdir(path))  # noqa: PTH208  names only
        if contract.MANIFEST_FILE in names or checkpoint.parse_name(path.name) is not None:
            return OURS  # also one that has lost its manifest, and with that its digests
        if DCP_METADATA in names:
            return DCP
        if any(name.endswith((".safetensors", INDEX_SUFFIX)) for name in names):
            return SAFETENSORS
        raise ForeignError(
            "holds no checkpoint: neither manifest.json (ours), .metadata (DCP) nor a safetensors file."
        )
    if path.name.endswith(INDEX_SUFFIX):
        return SAFETENSORS
    with open_regular(path) as descriptor:
        size = os.fstat(descriptor).st_size
        head = bytearray(min(9, size))
        fill(descriptor, 0, memoryview(head))
    if not size:
        raise TornError("is empty.")
    if head[8:9] == b"{" and path.name != contract.MANIFEST_FILE:
        return SAFETENSORS
    if head.startswith(_ZIP_MAGIC) or head[:1] == b"\x80":
        return TORCH
    raise ForeignError("is neither a torch.save file nor a safetensors one, by its first bytes.")


def _look_into(path: Path) -> Contents:
    named = path.name
    if named == DCP_METADATA or (
        named in {contract.MANIFEST_FILE, contract.STATE_FILE} and is_ours(path.parent)
    ):
        path = path.parent
    if not os.path.lexists(path):
        raise ForeignError("there is nothing here.")
    kind = format_of(path)
    if kind == OURS:
        return _ours(path)
    from elastic_resume.worker import distcp, safetensors  # noqa: PLC0415  they need this module's records

    if kind == DCP:
        return Contents(path, kind, distcp.read_directory(path))
    if kind == TORCH:
        return _torch(path)
    return Contents(path, kind, safetensors.read_path(path))


def looks_foreign(path: Path) -> bool:
    """Whether ``path`` is a directory in which another format's checkpoint lies."""
    try:
        return format_of(path) != OURS
    except ForeignError:
        return False


def names_a_file_beside(name: object) -> bool:
    """Whether a name that another file gives stays in that file's directory, and can be one."""
    if type(name) is not str or name in {"", ".", ".."} or Path(name).name != name or "\0" in name:
        return False
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return True


def is_ours(path: Path) -> bool:
    """Whether ``path`` is a checkpoint's directory of ours, by its look."""
    return (path / contract.MANIFEST_FILE).is_file()


# ---- ours ----------------------------------------------------------------------------------------------


def _ours(path: Path) -> Contents:
    manifest = checkpoint.quick_check(path, None)
    memory = checkpoint.map_image(path, manifest)
    image = Image(Layout.parse(memory, manifest.file_bytes), memory)
    known: dict[TensorRef, Stored] = {}

    def stored(ref: TensorRef) -> Stored:
        if ref.name not in image.layout.extents:
            raise CorruptError(f"the manifest names the tensor {ref.name!r}, which is not there.")
        if ref not in known:
            known[ref] = _of_image(image, ref)
        return known[ref]

    tree = replace_leaves(
        typed.decode(manifest.state), lambda leaf, _: stored(leaf) if isinstance(leaf, TensorRef) else leaf
    )
    return Contents(path, OURS, tree, {"generation": manifest.generation, **asdict(manifest.position)})


def _of_image(image: Image, ref: TensorRef) -> Stored:
    def read() -> Tensor:
        tensor = image.tensor(ref.name)
        return torch.view_as_complex(tensor) if ref.kind in _COMPLEX else tensor

    extent = image.layout.extents[ref.name]
    if ref.kind in _COMPLEX:
        return Stored(getattr(torch, ref.kind), extent.shape[:-1], read, ref.kind)
    return Stored(DTYPES[extent.dtype], extent.shape, read, ref.kind)


# ---- torch.save ----------------------------------------------------------------------------------------


def _torch(path: Path) -> Contents:
    zipped = is_archive(path)
    if zipped:
        check_archive(path)
    elif _starts_zipped(path):
        raise TornError("is the beginning of a torch.save file: its end is missing.")
    value = load_safely(path, mapped=zipped)
    return Contents(path, TORCH, tree_of(value), {}, lambda: _verify_archive(path) if zipped else None)


def load_safely(source: Any, *, mapped: bool) -> Any:
    """``torch.load`` without running anything that the file says; its errors are ours.

    Raises:
        ForeignError: the file names a class or function; the text says which.
        CorruptError: it is no torch.save file, or a part of it is missing.

    """
    try:
        # argparse's Namespace holds attributes and does nothing; many scripts save their arguments so.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a hostile file makes torch's reader raise nearly anything
        text = str(error)
        found = re.search(r"GLOBAL ([\w.]+)", text) or re.search(r"([\w]+\.[\w.]+) is not allowed", text)
        if found is not None or "Weights only" in text or "TorchScript" in text:
            what = f"it names {found[1]}" if found else "it is not plain data"
            raise ForeignError(
                f"cannot be read without running what it says ({what}), and nothing was run. Where you "
                "trust it, load it and save its state_dict() again, with tensors and plain data only."
            ) from error
        first = text.strip().splitlines()[0][:200] if text.strip() else type(error).__name__
        raise CorruptError(f"is not a whole torch.save file ({type(error).__name__}: {first}).") from error


def _starts_zipped(path: Path) -> bool:
    with open_regular(path) as descriptor:
        return os.pread(descriptor, len(_ZIP_MAGIC), 0) == _ZIP_MAGIC


def is_archive(source: Any) -> bool:
    """Whether a path or an open file is a zip archive. Raises CorruptError for one that cannot be."""
    try:
        return zipfile.is_zipfile(source)
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise CorruptError(f"is not a whole archive ({error}).") from error


def check_archive(source: Any) -> None:
    """Refuse what torch.save never writes: packed parts, which a few bytes blow up, and a huge pickle."""
    try:
        with zipfile.ZipFile(source) as archive:
            for part in archive.infolist():
                if part.compress_type != zipfile.ZIP_STORED:
                    raise CorruptError(
                        f"the part {part.filename!r} is compressed, which torch.save does not."
                    )
                if part.filename.endswith(".pkl") and part.file_size > MAX_PICKLE_BYTES:
                    raise CorruptError(
                        f"{part.filename!r} has {part.file_size} bytes, more than the limit of "
                        f"{MAX_PICKLE_BYTES} for what is no tensor."
                    )
    except (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError) as error:
        raise CorruptError(f"is not a whole archive ({error}).") from error


def _verify_archive(path: Path) -> None:
    """Read every part and compare its sum."""
    with located(path):
        try:
            with zipfile.ZipFile(path) as archive:
                bad = archive.testzip()
        except (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError) as error:
            raise CorruptError(f"is not a whole archive ({error}).") from error
        if bad is not None:
            raise CorruptError(f"the part {bad!r} does not match its sum.")


def tree_of(value: Any) -> Any:
    """Give what torch.load gave as a tree; raises CorruptError where it is too deep or too large."""

    def leaf(item: Any, _path: str) -> Any:
        if isinstance(item, Tensor):
            return _stored(item)
        plain = item is None or type(item) in {bool, int, float, str, bytes, complex}
        return item if plain else Unreadable(f"a {type(item).__module__}.{type(item).__qualname__}")

    return replace_leaves(value, leaf)


def _stored(tensor: Tensor) -> Stored | Unreadable:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        what = "quantized" if tensor.is_quantized else "without data" if tensor.is_meta else tensor.layout
        return Unreadable(f"a tensor that is {what}")
    plain = tensor.detach()
    if plain.numel() * plain.element_size() > plain.untyped_storage().nbytes():
        return Unreadable("a tensor that is larger than what is stored of it (expanded)")
    return Stored(plain.dtype, tuple(plain.shape), lambda: plain)


def replace_leaves(value: Any, leaf: Callable[[Any, str], Any]) -> Any:
    """Rebuild nested dicts, lists, tuples and sets with each leaf given to ``leaf``, with its path.

    Raises:
        CorruptError: more than `MAX_DEPTH` deep or `MAX_ITEMS` large.

    """
    left = [MAX_ITEMS]

    def walk(item: Any, path: str, depth: int) -> Any:
        left[0] -= 1
        if left[0] < 0 or depth > MAX_DEPTH:
            what = f"nested more than {MAX_DEPTH} deep" if left[0] >= 0 else f"more than {MAX_ITEMS} items"
            raise CorruptError(f"holds something {what}, at {path[:80]!r}.")
        if isinstance(item, dict):
            inside = {
                key: walk(part, f"{path}/{key}" if path else str(key), depth + 1)
                for key, part in item.items()
            }
            return type(item)(inside) if type(item) in {OrderedDict, Counter} else inside
        if type(item) in {list, tuple, torch.Size}:
            parts = [
                walk(part, f"{path}/{at}" if path else str(at), depth + 1) for at, part in enumerate(item)
            ]
            return parts if type(item) is list else tuple(parts)
        if type(item) is deque:
            return deque(walk(list(item), path, depth + 1), item.maxlen)
        if type(item) in {set, frozenset}:
            return item
        return leaf(item, path)

    return walk(value, "", 0)


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Give every leaf of a tree with its path."""
    if type(tree) in {list, tuple, deque}:
        tree = dict(enumerate(tree))
    if not isinstance(tree, dict):
        yield path, tree
        return
    for key, part in tree.items():
        yield from leaves(part, f"{path}/{key}" if path else str(key))
