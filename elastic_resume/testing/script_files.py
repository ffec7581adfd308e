"""Find files that a script writes, and that it has emptied after a restart."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path

SEARCH_INTERVAL_S = 0.2
WRITABLE = os.O_WRONLY | os.O_RDWR


class ScriptFiles:
    """The files that some processes were seen to hold open for writing, and how long they were.

    A file that is open between two looks only is not seen.
    """

    def __init__(self, ignored: Path) -> None:
        """Ignore what lies below the directory ``ignored``."""
        self._ignored = ignored
        self._sizes: dict[Path, int] = {}
        self._next_search_s = 0.0
        self.emptied: dict[Path, int] = {}
        """Files that became shorter, and their former size in bytes."""

    def look(self, pids: Iterable[int]) -> None:
        """Look at the known files, and for new ones of these processes."""
        for path, before in self._sizes.items():
            with contextlib.suppress(OSError):
                self._sizes[path] = size = path.stat().st_size
                if size < before:
                    self.emptied[path] = max(before, self.emptied.get(path, 0))
        if time.monotonic() < self._next_search_s:
            return
        self._next_search_s = time.monotonic() + SEARCH_INTERVAL_S
        for pid in pids:
            with contextlib.suppress(OSError):  # it has ended
                for descriptor in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208  names only
                    self._add(pid, descriptor)

    def _add(self, pid: int, descriptor: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            path = Path(f"/proc/{pid}/fd/{descriptor}").readlink()
            if path in self._sizes or not path.is_absolute() or path.is_relative_to(self._ignored):
                return
            info = Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text()
            flags = int(info.split("flags:")[1].split()[0], 8)
            found = path.stat()
            if flags & WRITABLE and stat.S_ISREG(found.st_mode):
                self._sizes[path] = found.st_size
