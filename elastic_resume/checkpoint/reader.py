"""One checkpoint, a directory ``gGENERATION-sSTEP`` with image and manifest: its name, and reading it.

Promise: `read_image` and `blocks` hand out no byte whose digest they have not checked. Only what is read
can prove a checkpoint bad: an error of reading is an UnreadableError, never a CorruptError.

Does not know how one comes to be (`writing`), which is newest, which to keep (`catalog`), or what the tensors
mean.

Reading a checkpoint's files, and telling what an error of reading means.

Promise: what comes out is a CheckpointError that names the checkpoint's path. Torn and corrupt are what was
read to its end and found wanting; a file that this machine could not read, for want of memory or
descriptors or because a device or a network failed, is unreadable, and may be whole.

Does not know what the files hold.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from elastic_resume import constants
from elastic_resume.checkpoint import layout as layouts
from elastic_resume.checkpoint.layout import Layout
from elastic_resume.checkpoint.manifest import MAX_MANIFEST_BYTES, Manifest
from elastic_resume.errors import CheckpointError, CorruptError, ForeignError, TornError, UnreadableError

_DIRECT_IO_ALIGNMENT = 4096  # of address, offset and length for O_DIRECT: no device asks for more
_CACHED_FRACTION = 0.9
_MAX_BOUNCE_BUFFER_BYTES = 32 << 20
_thread_local = threading.local()
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """Open a file for reading. Raises ForeignError for what is none, OSError as `os.open`."""
    # O_NONBLOCK: a named pipe in the place of a file would else block the open for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ForeignError(f"{path.name} is not a regular file.")
        yield descriptor
    finally:
        os.close(descriptor)


def read_small_file(path: Path, limit: int) -> bytes:
    """Give the whole of a file of at most ``limit`` bytes."""
    with open_regular(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise CorruptError(f"{path.name} has {size} bytes, more than the limit of {limit}.")
        data = bytearray(size)
        read_exact(descriptor, 0, memoryview(data))
        return bytes(data)


def read_exact(descriptor: int, offset: int, into: memoryview) -> None:
    """Read ``into`` from ``offset`` on. Raises TornError when the file ends before."""
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], offset + done)
        if count == 0:
            raise TornError(f"{constants.STATE_FILE} ends at byte {offset + done}.")
        done += count


@contextlib.contextmanager
def open_direct(path: Path) -> Iterator[int]:
    """Open a file for reads past the page cache (O_DIRECT); -1 where the file system refuses, as tmpfs."""
    descriptor = -1
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
    try:
        yield descriptor
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def read_exact_large(descriptor: int, direct_descriptor: int, offset: int, into: memoryview) -> None:
    """As `fill`, at the speed of what holds the bytes: the page cache, or the device past it.

    608 MB from a device that gives 1.4 GB/s to O_DIRECT. Cold, two threads of these: 1.6, and 0.9 into
    shared memory, whose pages lie scattered: so it goes through a buffer of the thread. One thread through
    the cache 0.5, since that has to find pages first. Cached: 10.
    """
    done = 0
    end = len(into) // _DIRECT_IO_ALIGNMENT * _DIRECT_IO_ALIGNMENT
    fits = (
        direct_descriptor >= 0 and not offset % _DIRECT_IO_ALIGNMENT and 0 < end <= _MAX_BOUNCE_BUFFER_BYTES
    )
    if fits and not _is_cached(descriptor, offset, end):
        done = _read_direct(direct_descriptor, offset, into[:end])
    read_exact(descriptor, offset + done, into[done:])


def _read_direct(descriptor: int, offset: int, into: memoryview) -> int:
    """Read as much as can be had this way; give how much. The rest, and the file's end, is for `fill`."""
    room = getattr(_thread_local, "room", None)
    if room is None or len(room) < len(into):
        room = _thread_local.room = memoryview(
            mmap.mmap(-1, len(into), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        )
    done = 0
    while done < len(into):
        try:
            count = os.preadv(descriptor, [room[done : len(into)]], offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            break
        if count == 0 or count % _DIRECT_IO_ALIGNMENT:
            break
        done += count
    if done:
        ctypes.memmove(
            _address(into), _address(room), done
        )  # without the GIL, unlike an assignment of slices
    return done


def _is_cached(descriptor: int, offset: int, size: int) -> bool:
    """Whether the page cache holds nearly all of these bytes.

    Asked of a mapping, which reads nothing. A read that does not wait (RWF_NOWAIT) starts a readahead, and
    made what came past the cache a third slower.
    """
    pages = -(-size // mmap.PAGESIZE)
    resident = (ctypes.c_ubyte * max(1, pages))()
    try:
        with mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, offset=offset) as mapping:
            start = _address(memoryview(mapping))
            if _libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), resident) != 0:
                return False
    except (OSError, ValueError):
        return False
    return bytes(resident).count(1) >= _CACHED_FRACTION * pages  # Linux sets no other bit


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


@contextlib.contextmanager
def translate_read_errors(path: Path) -> Iterator[None]:
    """Put the checkpoint's path before the text of a CheckpointError; an error of reading becomes one.

    A copy that this machine cannot read is not the end: another node may hold the same one. Nor is it bad.
    """
    try:
        yield
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}") from error
    except (OSError, MemoryError) as error:
        raise _classify_read_error(path, error) from error


def _classify_read_error(path: Path, error: OSError | MemoryError) -> CheckpointError:
    """Tell what is not there, which is known, from what could not be read, of which nothing is."""
    file = path / constants.STATE_FILE
    if isinstance(error, OSError) and error.filename:
        file = Path(error.filename)
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        # os.path, not Path: its answers are never exceptions.
        for link in (path, file):
            if os.path.islink(link) and not os.path.exists(link):  # noqa: PTH110, PTH114
                return UnreadableError(f"{path}: {link.name} is a link that leads nowhere; is all mounted?")
        if not os.path.isdir(path):  # noqa: PTH112
            return ForeignError(f"{path}: is not a checkpoint directory.")
        return TornError(f"{path}: {file.name} is missing.")
    why = error.strerror if isinstance(error, OSError) else "out of memory"
    return UnreadableError(f"{path}: {file.name} cannot be read now ({why or error}).")


_NAME_PATTERN = re.compile(r"g(\d{6,16})-s(\d{10,16})")
_MAX_COUNT = 1 << 53  # as in the manifest: no checkpoint of ours has a greater generation or step
_READ_THREADS = 2  # one digests while the other waits for the device
_MADV_POPULATE_READ = 22  # MADV_POPULATE_READ of linux/mman.h, which Python's mmap does not name


def checkpoint_name(generation: int, step: int) -> str:
    """The directory's name; it sorts by age as long as generation < 10**6 and step < 10**10."""
    return f"g{generation:06d}-s{step:010d}"


def parse_checkpoint_name(name: str) -> tuple[int, int] | None:
    """(generation, step) of a checkpoint directory's name; None for any other name."""
    match = _NAME_PATTERN.fullmatch(name)
    if match is None or not name.isascii():
        return None
    generation, step = int(match[1]), int(match[2])
    if max(generation, step) > _MAX_COUNT or checkpoint_name(generation, step) != name:
        return None
    return generation, step


def quick_check(path: Path, run_id: str | None) -> Manifest:
    """Return the manifest of the checkpoint at ``path`` without reading its data.

    The manifest parses, agrees with the directory's name and with ``run_id`` (None: any run), and the
    image has the size it tells. Raises a CheckpointError that says what, where and why.
    """
    with translate_read_errors(path):
        manifest = Manifest.parse(read_small_file(path / constants.MANIFEST_FILE, MAX_MANIFEST_BYTES))
        if parse_checkpoint_name(path.name) != manifest.version:
            raise ForeignError(
                f"its manifest is that of {checkpoint_name(*manifest.version)}: it was copied or renamed by hand."
            )
        if run_id is not None and manifest.run_id != run_id:
            raise ForeignError(f"belongs to the run {manifest.run_id!r}, not to {run_id!r}.")
        with _open_image(path, manifest):
            return manifest


def deep_check(path: Path, run_id: str | None) -> Manifest:
    """Do `quick_check`, then read everything and verify every digest and the layout."""
    manifest = quick_check(path, run_id)
    buffer = allocate_memory(min(manifest.block_bytes, max(manifest.file_bytes, 1)))
    for _ in iter_blocks(path, manifest, buffer):
        pass
    with translate_read_errors(path), _open_image(path, manifest) as descriptor:
        _read_layout(descriptor, manifest.file_bytes)
    return manifest


def _ignore_progress(_: int) -> None:
    pass


def read_image(
    path: Path,
    manifest: Manifest,
    into: memoryview | None = None,
    on_verified: Callable[[int], object] = _ignore_progress,
) -> memoryview:
    """Read the whole image into ``into`` (of exactly its size) or into fresh memory; every byte is verified.

    Each block is digested while it is still in the processor's cache; then ``arrived`` hears how many bytes
    of the image's beginning may be used. Raises CorruptError naming the byte range and the tensors in it;
    ``into`` then holds bytes that must not be used.
    """
    image = allocate_memory(manifest.file_bytes) if into is None else into.cast("B")
    if len(image) != manifest.file_bytes:
        raise ValueError(f"a buffer of {len(image)} bytes for an image of {manifest.file_bytes}")
    with (
        translate_read_errors(path),
        _open_image(path, manifest) as descriptor,
        open_direct(path / constants.STATE_FILE) as past_cache,
        ThreadPoolExecutor(_READ_THREADS, "elastic-resume-read") as readers,
    ):

        def read(index: int) -> int:
            block = _block_view(image, manifest, index)
            read_exact_large(descriptor, past_cache, index * manifest.block_bytes, block)
            _verify_block(descriptor, manifest, index, block)
            return index * manifest.block_bytes + len(block)

        try:
            for end in readers.map(read, range(len(manifest.blocks))):
                on_verified(end)
        except BaseException:
            readers.shutdown(cancel_futures=True)
            raise
        Layout.parse(image, manifest.file_bytes)
    return image


def map_image(path: Path, manifest: Manifest) -> memoryview:
    """Map the image, every byte verified, without a copy: for tensors that are copied on at once.

    No memory is touched for the first time, which is what a load costs most: 3 to 8 GB/s against 0.4
    to 6.5 into fresh memory, by how much of it the host has to find first (640 MB in the page cache, VM).
    Writes to it stay private, and pruning the checkpoint does no harm. A page that memory pressure takes
    meanwhile is read again unverified: do not keep it; `read_image` is for what stays.
    """
    mapping = map_unverified(path, manifest)
    verify_mapping(path, manifest, mapping)
    return memoryview(mapping)


def map_unverified(path: Path, manifest: Manifest) -> mmap.mmap:
    """Map the image: the first half of `map_image`, for who looks at bytes after they have `arrived`."""
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
    """Read what is mapped and verify it block by block; ``arrived`` as in `read_image`."""
    image = memoryview(mapping)
    with translate_read_errors(path), _open_image(path, manifest) as descriptor:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        for index in range(len(manifest.blocks)):
            _prefault(mapping, index * manifest.block_bytes, manifest.block_bytes)
            block = _block_view(image, manifest, index)
            _verify_block(descriptor, manifest, index, block)
            on_verified(index * manifest.block_bytes + len(block))
        Layout.parse(image, manifest.file_bytes)


def iter_blocks(path: Path, manifest: Manifest, buffer: memoryview) -> Iterator[memoryview]:
    """Yield the image's blocks, verified, one at a time in ``buffer``: valid until the next is asked for."""
    room = buffer.cast("B")
    if len(room) < min(manifest.block_bytes, manifest.file_bytes):
        raise ValueError(f"a buffer of {len(room)} bytes for blocks of {manifest.block_bytes}")
    with translate_read_errors(path), _open_image(path, manifest) as descriptor:
        for index in range(len(manifest.blocks)):
            size = min(manifest.block_bytes, manifest.file_bytes - index * manifest.block_bytes)
            _read_block(descriptor, manifest, index, room[:size])
            yield room[:size]


def allocate_memory(size: int) -> memoryview:
    """Page-aligned zeroed memory of this process alone.

    No huge pages are asked for: in a virtual machine the first touch of 623 MB took 0.97 s with them and
    0.16 s without, since the guest has to get whole 2 MiB blocks back from its host.
    """
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memoryview(memory)[:size]


def _read_block(descriptor: int, manifest: Manifest, index: int, into: memoryview) -> None:
    read_exact(descriptor, index * manifest.block_bytes, into)
    _verify_block(descriptor, manifest, index, into)


def _block_view(image: memoryview, manifest: Manifest, index: int) -> memoryview:
    start = index * manifest.block_bytes
    return image[start : start + manifest.block_bytes]


def _prefault(mapping: mmap.mmap, start: int, size: int) -> None:
    """Have the kernel read these pages now: a device that fails is then an error here, and not a SIGBUS."""
    start -= start % mmap.PAGESIZE
    try:
        mapping.madvise(_MADV_POPULATE_READ, start, min(size + mmap.PAGESIZE, len(mapping) - start))
    except OSError as error:
        if error.errno != errno.EINVAL:  # Linux before 5.14
            raise


def _verify_block(descriptor: int, manifest: Manifest, index: int, block: memoryview) -> None:
    if xxhash.xxh3_128_hexdigest(block) != manifest.blocks[index]:
        start = index * manifest.block_bytes
        stop = start + len(block)
        raise CorruptError(
            f"{constants.STATE_FILE} bytes {start} to {stop} do not match their digest; "
            f"within them: {_describe_range(descriptor, manifest, start, stop)}."
        )


def _read_layout(descriptor: int, file_bytes: int) -> Layout:
    head = bytearray(min(8, file_bytes))
    read_exact(descriptor, 0, memoryview(head))
    head = bytearray(layouts.header_size(head, file_bytes))
    read_exact(descriptor, 0, memoryview(head))
    return Layout.parse(head, file_bytes)


def _describe_range(descriptor: int, manifest: Manifest, start: int, stop: int) -> str:
    try:
        layout = _read_layout(descriptor, manifest.file_bytes)
    except (CheckpointError, OSError):
        return "the header"
    names = ["the header"] * (start < len(layout.header)) + layout.tensors_in_range(start, stop)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


@contextlib.contextmanager
def _open_image(path: Path, manifest: Manifest) -> Iterator[int]:
    with open_regular(path / constants.STATE_FILE) as descriptor:
        size = os.fstat(descriptor).st_size
        if size < manifest.file_bytes:
            raise TornError(f"{constants.STATE_FILE} has {size} bytes of {manifest.file_bytes}.")
        if size > manifest.file_bytes:
            raise CorruptError(f"{constants.STATE_FILE} has {size} bytes instead of {manifest.file_bytes}.")
        yield descriptor
