"""Keep the archive in any other store that fsspec knows, such as ``sftp://`` or ``hf://``.

fsspec has no common way to create an object only if it does not exist, no common limits of time, and no
common errors. `DirectoryStore` and `obstore_store` are better where they fit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import fsspec

from elastic_resume.archive import store_errors
from elastic_resume.archive.address import Address
from elastic_resume.archive.store import StoredName
from elastic_resume.errors import ArchiveError, ArchiveErrorKind, ConfigError


class FsspecStore:
    """A `Store` in a file system of fsspec."""

    def __init__(self, address: Address) -> None:
        """Open the file system; raise ConfigError if fsspec or a package that it needs is missing."""
        self.description = str(address)
        try:
            self._files: Any
            self._files, self._root = fsspec.core.url_to_fs(str(address), use_listings_cache=False)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"{self.description}: {str(error)[:200]}.") from error

    def put(self, name: str, data: bytes | memoryview) -> None:
        """See `Store`."""
        path = self._path(name)
        with self._translate_errors(f"write {name}"):
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(path, bytes(data))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """See `Store`."""
        del name, data
        raise ArchiveError(self.description, kind=ArchiveErrorKind.UNSUPPORTED)

    def get_range(self, name: str, start: int, size: int) -> memoryview | None:
        """See `Store`."""
        length = self.head(name)
        if length is None:
            return None
        with self._translate_errors(f"read {name}"):
            end = min(start + size, length)
            data = self._files.cat_file(self._path(name), start=start, end=end) if start < end else b""
            return memoryview(data)

    def head(self, name: str) -> int | None:
        """See `Store`."""
        with self._translate_errors(f"read {name}"):
            try:
                return int(self._files.info(self._path(name))["size"])
            except (FileNotFoundError, NotADirectoryError):
                return None

    def list(self, prefix: str) -> list[StoredName]:
        """See `Store`."""
        with self._translate_errors(f"list {prefix}".rstrip()):
            try:
                found = self._files.ls(self._path(prefix), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
        names = [
            StoredName(entry["name"].rstrip("/").rpartition("/")[2], entry["type"] == "directory")
            for entry in found
        ]
        return sorted(names, key=lambda stored: stored.name)

    def delete(self, name: str) -> None:
        """See `Store`. A directory that it leaves empty goes too, where the file system has any."""
        path = self._path(name)
        with self._translate_errors(f"delete {name}"), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(path)
        with contextlib.suppress(Exception):  # it is not empty, or there are no directories
            self._files.rmdir(path.rpartition("/")[0])

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    @contextlib.contextmanager
    def _translate_errors(self, operation: str) -> Iterator[None]:
        try:
            yield
        except PermissionError as error:
            raise store_errors.make_error(ArchiveErrorKind.FORBIDDEN, self.description, operation) from error
        except TimeoutError as error:
            raise store_errors.make_error(ArchiveErrorKind.SLOW, self.description, operation) from error
        except Exception as error:  # each file system has errors of its own
            kind = store_errors.classify(f"{type(error).__name__}: {error}")
            raise store_errors.make_error(kind, self.description, operation) from error
