"""The disk: the only module that makes, syncs, renames or removes files of checkpoints.

Everything that must survive a power cut goes through one `Disk`, which others get as an argument, so a
test can record every operation, cut the record anywhere and look at what is left. Nothing is promised by
a single method; the protocols of `checkpoint` and `catalog` are made of them: data is safe after
`sync_file`, a name is safe after `sync_dir` of the directory that holds it, and `rename` is atomic.

An OSError of the machine becomes MachineError: path, reason, and what to do.

Does not know what it writes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from elastic_resume import constants, failpoints
from elastic_resume.errors import MachineError

_WRITE_CHUNK_BYTES = 16 << 20  # one write(2); also how much becomes dirty before the disk is told to start
_DIRECT_IO_ALIGNMENT = 4096  # of address, offset and length for O_DIRECT: no device asks for more
_ADVICE_BY_ERRNO = {
    errno.ENOSPC: "free space there, or lower --keep",
    errno.EDQUOT: "the quota is used up: free space there, or lower --keep",
    errno.EFBIG: "the file size limit of this process or file system is too small (ulimit -f)",
    errno.EROFS: "the file system is read-only: choose another --ckpt-dir or remount it",
    errno.EACCES: "give this user write permission there, or choose another --ckpt-dir",
    errno.EPERM: "give this user write permission there, or choose another --ckpt-dir",
    errno.EIO: "the device fails: look at dmesg and choose another --ckpt-dir",
    errno.ENOTDIR: "a file stands where a directory is needed: choose another --ckpt-dir",
    errno.EISDIR: "a directory stands where a file is needed: move it away",
    errno.EMFILE: "too many open files in this process: raise ulimit -n",
    errno.ESTALE: "the network file system lost the directory: remount it",
}
# Some network file systems have no fsync of a directory; their rename is then as durable as it gets.
_ERRNOS_NO_DIRECTORY_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}
_ERRNOS_NO_EXCHANGE = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}  # NFS, 9p and others
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h


@contextlib.contextmanager
def translate_os_errors(operation: str, path: Path) -> Iterator[None]:
    """Turn an OSError inside into MachineError saying what failed, where, why, and what to do."""
    try:
        failpoints.hit("disk.request")
        yield
    except OSError as error:
        advice = _ADVICE_BY_ERRNO.get(error.errno or 0, "check the directory and the disk under it")
        reason = error.strerror or str(error)
        raise MachineError(f"cannot {operation} {path}: {reason}; {advice}.") from error


def temporary_name(base_name: str) -> str:
    """A name nobody else uses, from which a later owner can tell who was writing (see `Catalog.sweep`)."""
    return f"{constants.TEMPORARY_PREFIX}{base_name}-{os.getpid()}-{secrets.token_hex(4)}"


class Disk:
    """Operations on files. Every method raises MachineError when the machine refuses.

    On speed: plain writes of 16 MiB, each followed by POSIX_FADV_DONTNEED, which makes Linux start writing
    the dirty pages at once instead of at fsync. 604 MB with fsync, ext4 on NVMe: 3.9 GB/s, against 2.4
    without the advice, 4.3 with O_DIRECT (which tmpfs and some network file systems refuse, and which
    needs aligned buffers and tails). torch.save, taking turns with ours: 1.1 to 1.6, and 0.4 while the page
    cache grows into memory that the host of a virtual machine must find first; ours then has 0.5 and only
    O_DIRECT keeps 3.2. Kept buffered all the same: a restarted worker finds the file in the page cache.
    """

    def mkdir(self, path: Path) -> None:
        """Make one new directory; it survives a crash once its parent is synced."""
        with translate_os_errors("make directory", path):
            path.mkdir()

    def make_dirs(self, path: Path) -> None:
        """Make a directory and what is missing above it, durably. One that exists is synced all the same."""
        missing = []
        top = path
        with translate_os_errors("make directory", path):  # one above may not be entered
            while not top.exists() and top != top.parent:
                missing.append(top)
                top = top.parent
        for directory in reversed(missing):
            try:
                self.mkdir(directory)
            except MachineError:
                if not directory.is_dir():  # else another node was faster
                    raise
        for directory in [*reversed(missing), path]:
            if directory.parent != directory and os.access(directory.parent, os.R_OK):
                self.sync_dir(directory.parent)

    def create(self, path: Path) -> int:
        """Make a new file for appending and return its descriptor."""
        with translate_os_errors("create", path):
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, descriptor: int, data: bytes | memoryview, path: Path) -> None:
        """Append ``data``; ``path`` is for messages."""
        view = memoryview(data).cast("B")
        with translate_os_errors("write", path):
            while view:
                written = _write_direct(descriptor, view)
                if not written:
                    written = os.write(descriptor, view[:_WRITE_CHUNK_BYTES])
                    _start_writeback(descriptor, written)
                view = view[written:]

    def sync_file(self, descriptor: int, path: Path) -> None:
        """Return when what was written is on the device."""
        with translate_os_errors("sync", path):
            os.fsync(descriptor)

    def close(self, descriptor: int, path: Path) -> None:
        """Release the descriptor. Some network file systems tell of a full disk only here."""
        with translate_os_errors("close", path):
            os.close(descriptor)

    def sync_dir(self, path: Path) -> None:
        """Return when the names in ``path`` are on the device."""
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
        """Give ``source`` the name ``target``, atomically; a file there is replaced."""
        with translate_os_errors("rename to", target):
            os.rename(source, target)  # noqa: PTH104  one spelling for what the crash test records

    def exchange(self, source: Path, target: Path) -> None:
        """Let two names that exist change places, atomically: how a directory is replaced.

        Raises:
            MachineError: also where the kernel or the file system cannot.

        """
        with translate_os_errors("exchange names with", target):
            number = _exchange(os.fsencode(source), os.fsencode(target))
            if number in _ERRNOS_NO_EXCHANGE:
                raise MachineError(_exchange_unsupported_message(target))
            if number:
                raise OSError(number, os.strerror(number))

    def require_exchange(self, target: Path) -> None:
        """Try `exchange` on two empty directories beside ``target``: before much is written, not behind it.

        Raises:
            MachineError: the kernel or the file system cannot.

        """
        with contextlib.ExitStack() as made:
            pair = [target.with_name(temporary_name("try")) for _ in range(2)]
            for path in pair:
                self.mkdir(path)
                made.callback(self.rmdir, path)
            number = _exchange(*map(os.fsencode, pair))
        if number in _ERRNOS_NO_EXCHANGE:
            raise MachineError(_exchange_unsupported_message(target))

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        with translate_os_errors("remove", path):
            path.unlink()

    def rmdir(self, path: Path) -> None:
        """Remove an empty directory."""
        with translate_os_errors("remove", path):
            path.rmdir()

    def remove_tree(self, path: Path) -> None:
        """Remove a file, or a directory and all in it; links are removed, not followed.

        Not atomic: give a directory a temporary name, durably, before (see `Catalog.prune`).
        """
        with translate_os_errors("list", path):
            is_dir = path.is_dir() and not path.is_symlink()
            inside = sorted(path.iterdir()) if is_dir else []
        for child in inside:
            self.remove_tree(child)
        if is_dir:
            self.rmdir(path)
        else:
            self.unlink(path)

    def write_file(self, path: Path, data: bytes | memoryview) -> None:
        """Make a new file with ``data`` and sync it; its name is safe once the directory is synced."""
        descriptor = self.create(path)
        try:
            self.write(descriptor, data, path)
            self.sync_file(descriptor, path)
        finally:
            self.close(descriptor, path)

    def write_atomic(self, path: Path, data: bytes) -> None:
        """Make or replace a small file durably: after a crash it holds the old bytes or the new ones."""
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


def _exchange_unsupported_message(target: Path) -> str:
    return (
        f"cannot replace {target}: its file system cannot exchange two names in one step; remove it first, "
        "or give another name."
    )


def _exchange(source: bytes, target: bytes) -> int:
    """Call renameat2(2); give the error's number, 0 when it went well."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        failed = libc.renameat2(_AT_FDCWD, source, _AT_FDCWD, target, _RENAME_EXCHANGE)
    except AttributeError:  # glibc before 2.28
        return errno.ENOSYS
    return ctypes.get_errno() if failed else 0


def _write_direct(descriptor: int, view: memoryview) -> int:
    """Write the aligned beginning of ``view`` past the page cache; give how much, 0 when that cannot be.

    A checkpoint of the state's size would push everything else out of the page cache, and pages that the
    cache has to find first are slow: a guest whose host had not backed them yet wrote 0.5 GB/s through the
    cache and 3.2 GB/s past it; with warm pages 2.4 to 3.9 against 3.1 to 4.3. Network file systems and
    tmpfs refuse (EINVAL): they are written through the cache.
    """
    size = min(len(view), _WRITE_CHUNK_BYTES) // _DIRECT_IO_ALIGNMENT * _DIRECT_IO_ALIGNMENT
    if size == 0 or view.readonly or os.lseek(descriptor, 0, os.SEEK_CUR) % _DIRECT_IO_ALIGNMENT:
        return 0
    if ctypes.addressof(ctypes.c_char.from_buffer(view)) % _DIRECT_IO_ALIGNMENT:
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
    """Have the kernel write out what is dirty, each time another `_WRITE_BYTES` are complete."""
    end = os.lseek(descriptor, 0, os.SEEK_CUR)
    start = (end - written) // _WRITE_CHUNK_BYTES * _WRITE_CHUNK_BYTES
    if end - start >= _WRITE_CHUNK_BYTES and hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # advice only
            os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_DONTNEED)
