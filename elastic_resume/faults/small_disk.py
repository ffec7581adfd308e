"""A small disk for one simulated node: a file system in memory, of a stated size, that can be filled.

It is mounted in no namespace of the host: it lives by a descriptor of this process, and goes with it. Other
processes of root reach it by that descriptor's path in /proc. Takes root.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from pathlib import Path

from elastic_resume.errors import MachineError, UsageError

DISK_BYTES = 256 << 20
_PLACE = "/tmp"  # noqa: S108  where it is mounted for a moment, in a namespace that nobody else sees
_MOUNT = f'mount -t tmpfs -o "size=$1" tmpfs {_PLACE} && echo && cat'
_BALLAST = ".ballast"
_LEAST_FILL_BYTES = 1 << 12


class SmallDisk:
    """One disk. `close` takes it away."""

    def __init__(self, size_bytes: int = DISK_BYTES) -> None:
        """Make it, empty.

        Raises:
            MachineError: it cannot be mounted, and why.

        """
        self.size_bytes = size_bytes
        command = ["unshare", "--mount", "sh", "-c", _MOUNT, "sh", str(size_bytes)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as holder:
            if holder.stdout is None or holder.stderr is None:
                raise RuntimeError("pipes were asked for")
            if not holder.stdout.readline():
                why = holder.stderr.read().decode(errors="replace").strip()
                raise MachineError(f"a disk of a simulated node cannot be mounted: {why}.")
            self._root = os.open(
                f"/proc/{holder.pid}/root{_PLACE}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            )

    @property
    def path(self) -> Path:
        """Its root, for every process of root on this machine.

        Raises:
            UsageError: it is closed.

        """
        if self._root < 0:
            raise UsageError("this simulated disk is closed.")
        return Path(f"/proc/{os.getpid()}/fd/{self._root}")

    def fill(self) -> None:
        """Fill it to the last block: a write fails with ENOSPC, until `free`."""
        ballast = os.open(self.path / _BALLAST, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            piece = self.size_bytes
            while piece >= _LEAST_FILL_BYTES:
                try:
                    os.posix_fallocate(ballast, os.fstat(ballast).st_size, piece)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    piece //= 2
        finally:
            os.close(ballast)

    def free(self) -> None:
        """Undo `fill`."""
        with contextlib.suppress(FileNotFoundError):
            (self.path / _BALLAST).unlink()

    def close(self) -> None:
        """Take it away. A second call does nothing."""
        if self._root >= 0:
            os.close(self._root)
            self._root = -1
