"""Reading a checkpoint's files, and telling what an error of reading means.

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
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

from elastic_resume import contract
from elastic_resume.errors import CheckpointError, CorruptError, ForeignError, TornError, UnreadableError

_ALIGNMENT = 4096  # of address, offset and length for O_DIRECT: no device asks for more
_CACHED_SHARE = 0.9
_MAX_ROOM_BYTES = 32 << 20
_threads = threading.local()
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


def read_small(path: Path, limit: int) -> bytes:
    """Give the whole of a file of at most ``limit`` bytes."""
    with open_regular(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise CorruptError(f"{path.name} has {size} bytes, more than the limit of {limit}.")
        data = bytearray(size)
        fill(descriptor, 0, memoryview(data))
        return bytes(data)


def fill(descriptor: int, offset: int, into: memoryview) -> None:
    """Read ``into`` from ``offset`` on. Raises TornError when the file ends before."""
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], offset + done)
        if count == 0:
            raise TornError(f"{contract.STATE_FILE} ends at byte {offset + done}.")
        done += count


@contextlib.contextmanager
def open_past_cache(path: Path) -> Iterator[int]:
    """Open a file for reads past the page cache (O_DIRECT); -1 where the file system refuses, as tmpfs."""
    descriptor = -1
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
    try:
        yield descriptor
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def fill_large(descriptor: int, past_cache: int, offset: int, into: memoryview) -> None:
    """As `fill`, at the speed of what holds the bytes: the page cache, or the device past it.

    608 MB from a device that gives 1.4 GB/s to O_DIRECT. Cold, two threads of these: 1.6, and 0.9 into
    shared memory, whose pages lie scattered: so it goes through a buffer of the thread. One thread through
    the cache 0.5, since that has to find pages first. Cached: 10.
    """
    done = 0
    end = len(into) // _ALIGNMENT * _ALIGNMENT
    fits = past_cache >= 0 and not offset % _ALIGNMENT and 0 < end <= _MAX_ROOM_BYTES
    if fits and not _is_cached(descriptor, offset, end):
        done = _fill_past_cache(past_cache, offset, into[:end])
    fill(descriptor, offset + done, into[done:])


def _fill_past_cache(descriptor: int, offset: int, into: memoryview) -> int:
    """Read as much as can be had this way; give how much. The rest, and the file's end, is for `fill`."""
    room = getattr(_threads, "room", None)
    if room is None or len(room) < len(into):
        room = _threads.room = memoryview(
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
        if count == 0 or count % _ALIGNMENT:
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
    return bytes(resident).count(1) >= _CACHED_SHARE * pages  # Linux sets no other bit


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


@contextlib.contextmanager
def located(path: Path) -> Iterator[None]:
    """Put the checkpoint's path before the text of a CheckpointError; an error of reading becomes one.

    A copy that this machine cannot read is not the end: another node may hold the same one. Nor is it bad.
    """
    try:
        yield
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}") from error
    except (OSError, MemoryError) as error:
        raise _unread(path, error) from error


def _unread(path: Path, error: OSError | MemoryError) -> CheckpointError:
    """Tell what is not there, which is known, from what could not be read, of which nothing is."""
    file = path / contract.STATE_FILE
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
