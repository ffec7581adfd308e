"""Read and verify one checkpoint: a directory ``gGENERATION-sSTEP`` with an image and a manifest.

Every function that returns image bytes has checked their digests first, except `map_unverified`. Errors are
CheckpointErrors that name the path. TornError and CorruptError mean that the checkpoint is proved bad. An
UnreadableError means that this machine could not read it now: no memory or descriptors, or a failing device
or network. Its bytes may be whole. `writer` creates checkpoints; `catalog` decides which to keep.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from elastic_resume import constants
from elastic_resume.checkpoint.atomic_io import DIRECT_IO_ALIGNMENT, memory_address
from elastic_resume.checkpoint.layout import Layout, header_size
from elastic_resume.checkpoint.manifest import MAX_MANIFEST_BYTES, Manifest
from elastic_resume.errors import (
    CheckpointError,
    CorruptError,
    ForeignError,
    MachineError,
    TornError,
    UnreadableError,
)
from elastic_resume.milestone import format_version, parse_version
from elastic_resume.units import format_bytes

_MAX_COUNT = 1 << 53  # limit of generation and step, as in the manifest
_READ_THREADS = 4  # keep several requests in flight while one thread computes a digest
_CACHED_FRACTION = 0.9
_MADV_POPULATE_READ = 22  # from linux/mman.h; Python's mmap lacks it
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """Open a regular file for reading.

    Raises:
        ForeignError: it is not a regular file.
        OSError: as `os.open`.

    """
    # Use O_NONBLOCK, because opening a named pipe would block for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ForeignError(f"{path.name} is not a regular file.")
        yield descriptor
    finally:
        os.close(descriptor)


def read_exact(descriptor: int, offset: int, into: memoryview) -> None:
    """Fill ``into`` from ``offset`` on; raise TornError if the file ends first."""
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], offset + done)
        if count == 0:
            raise TornError(f"{constants.STATE_FILE} ends at byte {offset + done}.")
        done += count


def _open_direct(path: Path) -> int:
    """Open a file with O_DIRECT; return -1 where the file system refuses, as tmpfs does."""
    try:
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return -1


def _read_direct(descriptor: int, offset: int, into: memoryview) -> int:
    """Read whole pages past the page cache; return the number of bytes, 0 where that is impossible.

    A cold read then need not allocate cache pages and copy out of them.
    """
    size = len(into) // DIRECT_IO_ALIGNMENT * DIRECT_IO_ALIGNMENT
    try:
        return os.preadv(descriptor, [into[:size]], offset)
    except OSError as error:
        if error.errno != errno.EINVAL:  # an offset or memory that is not aligned
            raise
        return 0


def _is_cached(descriptor: int, offset: int, size: int) -> bool:
    """Whether the page cache holds nearly all of these bytes.

    mincore on a mapping reads nothing. A read with RWF_NOWAIT would start a readahead, which slows direct
    reads.
    """
    pages = -(-size // mmap.PAGESIZE)
    resident = (ctypes.c_ubyte * max(1, pages))()
    try:
        with mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, offset=offset) as mapping:
            start = ctypes.c_void_p(memory_address(mapping))
            _libc.mincore(start, ctypes.c_size_t(size), resident)  # an error leaves zeros
    except (OSError, ValueError):
        return False
    return bytes(resident).count(1) >= _CACHED_FRACTION * pages


@contextlib.contextmanager
def translate_read_errors(path: Path) -> Iterator[None]:
    """Prefix a CheckpointError with the checkpoint's path; turn an OSError into a CheckpointError."""
    try:
        yield
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}") from error
    except (OSError, MemoryError) as error:
        raise _classify_read_error(path, error) from error


def _classify_read_error(path: Path, error: OSError | MemoryError) -> CheckpointError:
    """Distinguish a missing file, which proves a defect, from a file that cannot be read now."""
    file = path / constants.STATE_FILE
    if isinstance(error, OSError) and error.filename:
        file = Path(error.filename)
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        # Use os.path, because methods of Path may raise.
        for link in (path, file):
            if os.path.islink(link) and not os.path.exists(link):  # noqa: PTH110, PTH114
                return UnreadableError(f"{path}: {link.name} is a dangling link; is its file system mounted?")
        if not os.path.isdir(path):  # noqa: PTH112
            return ForeignError(f"{path}: is not a checkpoint directory.")
        return TornError(f"{path}: {file.name} is missing.")
    reason = error.strerror if isinstance(error, OSError) else "out of memory"
    return UnreadableError(f"{path}: {file.name} cannot be read now ({reason or error}).")


def checkpoint_name(generation: int, step: int) -> str:
    """Return the directory's name; names sort by version while generation < 10**6 and step < 10**10."""
    return format_version((generation, step))


def parse_checkpoint_name(name: str) -> tuple[int, int] | None:
    """Return (generation, step) of a checkpoint directory's name; None for any other name."""
    version = parse_version(name)
    if version is None or max(version) > _MAX_COUNT or format_version(version) != name:
        return None
    return version


def quick_check(path: Path, run_id: str | None) -> Manifest:
    """Return the manifest of the checkpoint at ``path`` without reading its data.

    The manifest must parse, agree with the directory's name and ``run_id`` (None: any run), and state the
    image's size.

    Raises:
        CheckpointError: what is wrong, where and why.

    """
    with translate_read_errors(path):
        with open_regular(path / constants.MANIFEST_FILE) as descriptor:
            size = os.fstat(descriptor).st_size
            if size > MAX_MANIFEST_BYTES:
                raise CorruptError(f"manifest: {size} bytes, more than the limit of {MAX_MANIFEST_BYTES}.")
            data = bytearray(size)
            read_exact(descriptor, 0, memoryview(data))
        manifest = Manifest.parse(bytes(data))
        if parse_checkpoint_name(path.name) != manifest.version:
            raise ForeignError(
                f"its manifest is that of {checkpoint_name(*manifest.version)}; "
                "it was copied or renamed by hand."
            )
        if run_id is not None and manifest.run_id != run_id:
            raise ForeignError(f"belongs to the run {manifest.run_id!r}, not to {run_id!r}.")
        with _open_image(path, manifest):
            return manifest


def _ignore_progress(_: int) -> None:
    pass


def deep_check(path: Path, run_id: str | None) -> Manifest:
    """Run `quick_check`, then read everything and verify every digest and the layout."""
    manifest = quick_check(path, run_id)
    map_image(path, manifest)
    return manifest


def read_image(
    path: Path,
    manifest: Manifest,
    into: memoryview | None = None,
    on_verified: Callable[[int], object] = _ignore_progress,
) -> memoryview:
    """Read the image into ``into`` (of exactly its size) or new memory, and verify every byte.

    ``on_verified`` gets the number of verified bytes from the image's start, after each block.

    Raises:
        CorruptError: naming the byte range; the content of ``into`` must not be used.

    """
    image = allocate_memory(manifest.file_bytes) if into is None else into.cast("B")
    if len(image) != manifest.file_bytes:
        raise ValueError(f"a buffer of {len(image)} bytes for an image of {manifest.file_bytes}")
    with (
        translate_read_errors(path),
        _open_image(path, manifest) as descriptor,
        contextlib.ExitStack() as cleanup,
    ):
        direct_descriptor = _open_direct(path / constants.STATE_FILE)
        if direct_descriptor >= 0:
            cleanup.callback(os.close, direct_descriptor)
        readers = cleanup.enter_context(ThreadPoolExecutor(_READ_THREADS, "elastic-resume-read"))

        def read(index: int) -> bool:
            start, block = index * manifest.block_bytes, _block_view(image, manifest, index)
            done = 0
            if direct_descriptor >= 0 and not _is_cached(descriptor, start, len(block)):
                done = _read_direct(direct_descriptor, start, block)
            read_exact(descriptor, start + done, block[done:])
            return _is_whole(manifest, index, image)

        # In order, so that the header is there when a damaged block is described. An error cancels the rest.
        for index, is_whole in enumerate(readers.map(read, range(len(manifest.blocks)))):
            if not is_whole:
                raise _describe_damage(manifest, index, image)
            on_verified(min((index + 1) * manifest.block_bytes, manifest.file_bytes))
        Layout.parse(image, manifest.file_bytes)
    return image


def map_image(
    path: Path, manifest: Manifest, on_verified: Callable[[int], object] = _ignore_progress
) -> memoryview:
    """Map the image privately and verify every byte, for tensors that are copied at once.

    A mapping avoids the first touch of new memory, the greatest cost of a load. Do not keep it: a page that
    memory pressure evicts is read again without verification. Use `read_image` for data that stays.
    """
    mapping = map_unverified(path, manifest)
    verify_mapping(path, manifest, mapping, on_verified)
    return memoryview(mapping)


def map_unverified(path: Path, manifest: Manifest) -> mmap.mmap:
    """Map the image privately without verification; `verify_mapping` is the second half of `map_image`."""
    with translate_read_errors(path), _open_image(path, manifest) as descriptor:
        if manifest.file_bytes == 0:
            raise TornError(f"{constants.STATE_FILE} is empty.")
        return mmap.mmap(descriptor, manifest.file_bytes, flags=mmap.MAP_PRIVATE)


def verify_mapping(
    path: Path,
    manifest: Manifest,
    mapping: mmap.mmap,
    on_verified: Callable[[int], object] = _ignore_progress,
) -> None:
    """Verify a mapped image block by block; ``on_verified`` as in `read_image`."""
    image = memoryview(mapping)
    with translate_read_errors(path), _open_image(path, manifest) as descriptor:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        for index in range(len(manifest.blocks)):
            _prefault(mapping, index * manifest.block_bytes, manifest.block_bytes)
            if not _is_whole(manifest, index, image):
                raise _describe_damage(manifest, index, image)
            on_verified(min((index + 1) * manifest.block_bytes, manifest.file_bytes))
        Layout.parse(image, manifest.file_bytes)


def allocate_memory(size: int) -> memoryview:
    """Return page-aligned zeroed private memory.

    It does not ask for huge pages: in a virtual machine their first touch is six times slower.

    Raises:
        MachineError: the system refuses it.

    """
    try:
        memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MachineError(
            f"this node has no memory for the state ({error.strerror}, {format_bytes(size)}): free some, or "
            "raise the limit of the address space (ulimit -v)."
        ) from error
    return memoryview(memory)[:size]


def _block_view(image: memoryview, manifest: Manifest, index: int) -> memoryview:
    start = index * manifest.block_bytes
    return image[start : start + manifest.block_bytes]


def _prefault(mapping: mmap.mmap, start: int, size: int) -> None:
    """Read these pages now, so that a failing device raises an error instead of SIGBUS."""
    start -= start % mmap.PAGESIZE
    try:
        mapping.madvise(_MADV_POPULATE_READ, start, min(size + mmap.PAGESIZE, len(mapping) - start))
    except OSError as error:
        if error.errno != errno.EINVAL:  # Linux before 5.14
            raise


def _is_whole(manifest: Manifest, index: int, image: memoryview) -> bool:
    return xxhash.xxh3_128_hexdigest(_block_view(image, manifest, index)) == manifest.blocks[index]


def _describe_damage(manifest: Manifest, index: int, image: memoryview) -> CorruptError:
    start = index * manifest.block_bytes
    stop = start + len(_block_view(image, manifest, index))
    return CorruptError(
        f"{constants.STATE_FILE} bytes {start} to {stop} do not match their digest"
        f"{_describe_tensors(image, start, stop)}."
    )


def _describe_tensors(image: memoryview, start: int, stop: int) -> str:
    """Name the tensors within these bytes, if the header can still be parsed."""
    try:
        extents = Layout.parse(image[: header_size(image[:8], len(image))], len(image)).extents
    except CheckpointError:
        return ""
    names = [name for name, extent in extents.items() if extent.start < stop and start < extent.stop]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f" (they hold {names[0]}{more})" if names else ""


@contextlib.contextmanager
def _open_image(path: Path, manifest: Manifest) -> Iterator[int]:
    with open_regular(path / constants.STATE_FILE) as descriptor:
        size = os.fstat(descriptor).st_size
        if size < manifest.file_bytes:
            raise TornError(f"{constants.STATE_FILE} has {size} bytes of {manifest.file_bytes}.")
        if size > manifest.file_bytes:
            raise CorruptError(f"{constants.STATE_FILE} has {size} bytes instead of {manifest.file_bytes}.")
        yield descriptor
