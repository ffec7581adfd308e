"""Write, sync, rename and remove files so that they survive a power cut.

Every durable change in this package goes through a `Disk`. Tests pass their own: it records each operation,
and the test replays any prefix of the record as a crash. Three guarantees carry all protocols built on it:
file data is durable after `sync_file`, a name is durable after `sync_dir` of its directory, and `rename` is
atomic.

An OSError becomes a MachineError that names the path, the reason and what to do.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

from elastic_resume import constants, failpoints
from elastic_resume.errors import MachineError

_WRITE_CHUNK_BYTES = 16 << 20  # bytes of one write(2) and of one writeback request
DIRECT_IO_ALIGNMENT = 4096  # alignment of address, offset and length for O_DIRECT; no device needs more
_ADVICE_BY_ERRNO: dict[int | None, str] = {
    errno.ENOSPC: "free space there, or lower --keep",
    errno.EDQUOT: "the quota is used up: free space there, or lower --keep",
    errno.EFBIG: "the file size limit of this process or file system is too small (ulimit -f)",
    errno.EROFS: "the file system is read-only: choose another --ckpt-dir or remount it",
    errno.EACCES: "give this user write permission there, or choose another --ckpt-dir",
    errno.EPERM: "give this user write permission there, or choose another --ckpt-dir",
    errno.EIO: "the device fails: look at dmesg and choose another --ckpt-dir",
    errno.ENOTDIR: "a file is in the place of a directory: choose another --ckpt-dir",
    errno.EISDIR: "a directory is in the place of a file: move it away",
    errno.EMFILE: "too many open files in this process: raise ulimit -n",
    errno.ESTALE: "the network file system lost the directory: remount it",
}
rename_checks: dict[Path, Callable[[], None]] = {}
"""By directory: called before each rename below it, to end a process that does not own it any more."""
# Some network file systems cannot fsync a directory; their rename is as durable as they allow.
_ERRNOS_NO_DIRECTORY_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}


@contextlib.contextmanager
def translate_os_errors(operation: str, path: Path) -> Iterator[None]:
    """Turn an OSError into a MachineError that says what failed, where, why, and what to do."""
    try:
        failpoints.hit("disk.request")
        yield
    except OSError as error:
        advice = _ADVICE_BY_ERRNO.get(error.errno, "check the directory and the disk under it")
        reason = error.strerror or str(error)
        raise MachineError(f"cannot {operation} {path}: {reason}; {advice}.") from error


def temporary_name(base_name: str) -> str:
    """Return a unique name with this process's pid, which `Catalog.remove_unfinished` reads."""
    return f"{constants.TEMPORARY_PREFIX}{base_name}-{os.getpid()}-{secrets.token_hex(4)}"


class Disk:
    """Perform file operations; each method raises MachineError when the operating system refuses.

    Writes go past the page cache where the file system allows O_DIRECT. Elsewhere each 16 MiB chunk is handed
    to the kernel for writeback at once, so that the final fsync has little left to do. See
    docs/benchmarks.md.
    """

    def mkdir(self, path: Path) -> None:
        """Create one directory; it is durable once its parent is synced."""
        with translate_os_errors("make directory", path):
            path.mkdir()

    def make_dirs(self, path: Path) -> None:
        """Create a directory and its missing parents durably; an existing directory is synced too."""
        with translate_os_errors("make directory", path):
            is_missing = not path.exists()
        if is_missing:
            self.make_dirs(path.parent)
            try:
                self.mkdir(path)
            except MachineError:
                if not path.is_dir():  # another node may have just created it
                    raise
        if os.access(path.parent, os.R_OK):
            self.sync_dir(path.parent)

    def create(self, path: Path) -> int:
        """Create a new file for appending and return its descriptor."""
        with translate_os_errors("create", path):
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, descriptor: int, data: bytes | memoryview, path: Path) -> None:
        """Append ``data`` to ``descriptor``; ``path`` is used in error messages only."""
        view = memoryview(data).cast("B")
        with translate_os_errors("write", path):
            while view:
                written = _write_direct(descriptor, view)
                if not written:
                    written = os.write(descriptor, view[:_WRITE_CHUNK_BYTES])
                    _start_writeback(descriptor, written)
                view = view[written:]

    def sync_file(self, descriptor: int, path: Path) -> None:
        """Flush the file's data to the device."""
        with translate_os_errors("sync", path):
            os.fsync(descriptor)

    def close(self, descriptor: int, path: Path) -> None:
        """Close the descriptor; some network file systems report a full disk only here."""
        with translate_os_errors("close", path):
            os.close(descriptor)

    def sync_dir(self, path: Path) -> None:
        """Flush the names in directory ``path`` to the device."""
        with translate_os_errors("sync directory", path):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            except OSError as error:
                if error.errno not in _ERRNOS_NO_DIRECTORY_SYNC:
                    raise
            finally:
                os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename ``source`` to ``target`` atomically; an existing file is replaced."""
        with translate_os_errors("rename to", target):
            for directory, check in list(rename_checks.items()):
                if source.is_relative_to(directory) or target.is_relative_to(directory):
                    check()
            os.rename(source, target)  # noqa: PTH104  the crash test records this call

    def link(self, source: Path, target: Path) -> bool:
        """Give ``source`` a second name atomically; return False if something has that name."""
        with translate_os_errors("link to", target):
            try:
                os.link(source, target)
            except FileExistsError:
                return False
        return True

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        with translate_os_errors("remove", path):
            path.unlink()

    def rmdir(self, path: Path) -> None:
        """Remove an empty directory."""
        with translate_os_errors("remove", path):
            path.rmdir()

    def remove_tree(self, path: Path) -> None:
        """Remove a file, or a directory with its contents; links are removed, not followed.

        This is not atomic: first rename a checkpoint to a temporary name and sync, as `Catalog.prune` does.
        """
        with translate_os_errors("list", path):
            is_dir = path.is_dir() and not path.is_symlink()
            children = sorted(path.iterdir()) if is_dir else []
        for child in children:
            self.remove_tree(child)
        if is_dir:
            self.rmdir(path)
        else:
            self.unlink(path)

    def write_file(self, path: Path, data: bytes | memoryview) -> None:
        """Create a file with ``data`` and sync it; the caller syncs the directory."""
        descriptor = self.create(path)
        try:
            self.write(descriptor, data, path)
            self.sync_file(descriptor, path)
        finally:
            self.close(descriptor, path)

    def write_atomic(self, path: Path, data: bytes) -> None:
        """Create or replace a small file durably: after a crash it holds the old bytes or the new ones."""
        temporary = path.with_name(temporary_name(path.name))
        try:
            self.write_file(temporary, data)
            self.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(MachineError):
                self.unlink(temporary)
            raise
        self.sync_dir(path.parent)


DISK = Disk()


def memory_address(memory: memoryview | mmap.mmap) -> int:
    """Return the address of the first byte of writable memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _write_direct(descriptor: int, view: memoryview) -> int:
    """Write the aligned prefix of ``view`` with O_DIRECT; return its size, 0 where that is impossible.

    A checkpoint would evict everything else from the page cache. In a virtual machine it is also slow: the
    host must first provide memory for new cache pages. tmpfs and network file systems refuse with EINVAL.
    """
    size = min(len(view), _WRITE_CHUNK_BYTES) // DIRECT_IO_ALIGNMENT * DIRECT_IO_ALIGNMENT
    if size == 0 or view.readonly or os.lseek(descriptor, 0, os.SEEK_CUR) % DIRECT_IO_ALIGNMENT:
        return 0
    if memory_address(view) % DIRECT_IO_ALIGNMENT:
        return 0
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        return os.write(descriptor, view[:size])
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return 0
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


def _start_writeback(descriptor: int, written: int) -> None:
    """Ask the kernel to write out dirty pages whenever another chunk is complete."""
    end = os.lseek(descriptor, 0, os.SEEK_CUR)
    start = (end - written) // _WRITE_CHUNK_BYTES * _WRITE_CHUNK_BYTES
    if end - start >= _WRITE_CHUNK_BYTES:
        with contextlib.suppress(OSError):  # the call only advises the kernel
            os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_DONTNEED)
