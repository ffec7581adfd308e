"""Keep the archive in a directory that all nodes see, such as one of a network file system."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from elastic_resume.archive import store_errors
from elastic_resume.archive.store import StoredName
from elastic_resume.checkpoint.atomic_io import DISK, Disk, temporary_name
from elastic_resume.checkpoint.reader import open_regular
from elastic_resume.errors import ArchiveError, ArchiveErrorKind, ForeignError, MachineError

_DEFAULT_KIND_AND_REMEDY = (ArchiveErrorKind.UNAVAILABLE, "check that the file system is mounted and well")
_KIND_AND_REMEDY: dict[int | None, tuple[ArchiveErrorKind, str]] = {
    errno.EACCES: (ArchiveErrorKind.FORBIDDEN, "give this user write permission there"),
    errno.EPERM: (ArchiveErrorKind.FORBIDDEN, "give this user write permission there"),
    errno.EROFS: (
        ArchiveErrorKind.FORBIDDEN,
        "the file system is read-only: remount it, or choose another --archive",
    ),
    errno.ENOSPC: (ArchiveErrorKind.QUOTA, store_errors.FREE_SPACE),
    errno.EDQUOT: (ArchiveErrorKind.QUOTA, f"the quota is used up: {store_errors.FREE_SPACE}"),
    errno.ENOENT: (
        ArchiveErrorKind.MISSING_BUCKET,
        "mount the file system, or create the directory with mkdir",
    ),
    errno.ENOTDIR: (
        ArchiveErrorKind.UNAVAILABLE,
        "a file is in the place of a directory: choose another --archive",
    ),
}
_ERRNOS_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}


class DirectoryStore:
    """A `Store` in a directory; a name with slashes is a path below it."""

    def __init__(self, root: Path, disk: Disk = DISK) -> None:
        """``root`` must exist when it is used: a file system that is not mounted is no empty archive."""
        self._root = root
        self._disk = disk
        self.description = f"file://{root}"

    def put(self, name: str, data: bytes | memoryview) -> None:
        """See `Store`."""
        path = self._root / name
        self._check_root()
        with self._translate_errors(f"write {name}"):
            temporary = self._write_temporary(path, data)
            try:
                self._disk.rename(temporary, path)
            except BaseException:
                with contextlib.suppress(MachineError):
                    self._disk.unlink(temporary)
                raise
            self._disk.sync_dir(path.parent)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """See `Store`. A hard link is created only where nothing is."""
        path = self._root / name
        self._check_root()
        with self._translate_errors(f"write {name}"):
            temporary = self._write_temporary(path, data)
            try:
                is_new = self._disk.link(temporary, path)
            except MachineError as error:
                if isinstance(error.__cause__, OSError) and error.__cause__.errno in _ERRNOS_NO_LINKS:
                    raise ArchiveError(self.description, kind=ArchiveErrorKind.UNSUPPORTED) from error
                raise
            finally:
                self._disk.unlink(temporary)
            self._disk.sync_dir(path.parent)
            return is_new

    def get_range(self, name: str, start: int, size: int) -> memoryview | None:
        """See `Store`."""
        path = self._root / name
        with self._translate_errors(f"read {name}"):
            try:
                with open_regular(path) as descriptor:
                    size = max(0, min(size, os.fstat(descriptor).st_size - start))
                    into = memoryview(bytearray(size))
                    done = 0
                    while done < size and (count := os.preadv(descriptor, [into[done:]], start + done)):
                        done += count
                    return into[:done]
            except (FileNotFoundError, NotADirectoryError):
                self._check_root()
                return None

    def head(self, name: str) -> int | None:
        """See `Store`."""
        path = self._root / name
        with self._translate_errors(f"read {name}"):
            try:
                return path.stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                self._check_root()
                return None

    def list(self, prefix: str) -> list[StoredName]:
        """See `Store`."""
        path = self._root / prefix
        with self._translate_errors(f"list {prefix}".rstrip()):
            try:
                with os.scandir(path) as entries:
                    return sorted((StoredName(e.name, e.is_dir()) for e in entries), key=lambda e: e.name)
            except (FileNotFoundError, NotADirectoryError):
                self._check_root()
                return []

    def delete(self, name: str) -> None:
        """See `Store`. A directory that it leaves empty goes too, as a prefix does in an object store."""
        path = self._root / name
        with self._translate_errors(f"remove {name}"):
            try:
                path.unlink()
            except FileNotFoundError:
                self._check_root()
            with contextlib.suppress(OSError):  # it is not empty
                path.parent.rmdir()

    def _check_root(self) -> None:
        """Raise ArchiveError if the directory is absent, as for a bucket."""
        with self._translate_errors("use it"), os.scandir(self._root):
            pass

    def _write_temporary(self, path: Path, data: bytes | memoryview) -> Path:
        self._disk.make_dirs(path.parent)
        temporary = path.with_name(temporary_name(path.name))
        try:
            self._disk.write_file(temporary, data)
        except BaseException:
            with contextlib.suppress(MachineError):
                self._disk.unlink(temporary)
            raise
        return temporary

    @contextlib.contextmanager
    def _translate_errors(self, operation: str) -> Iterator[None]:
        try:
            yield
        except (OSError, MachineError, ForeignError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            number = cause.errno if isinstance(cause, OSError) else None
            kind, remedy = _KIND_AND_REMEDY.get(number, _DEFAULT_KIND_AND_REMEDY)
            reason = os.strerror(number) if number else str(error)
            text = f"{self.description}: cannot {operation}: {reason}; {remedy}."
            raise ArchiveError(text, kind=kind) from error
