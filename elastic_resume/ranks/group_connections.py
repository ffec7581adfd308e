"""Free a thread that waits in a collective, from another thread of the same process.

gloo's ``abort()`` does nothing (pytorch#130345). Its collectives fail when a connection ends, so this module
shuts down the sockets that the process groups have opened. NCCL's groups are aborted.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch.distributed as dist

ABORT_TIMEOUT_S = 1.0


class GroupConnections:
    """The connections and process groups of one generation of this process."""

    def __init__(self) -> None:
        self.groups: list[dist.ProcessGroup] = []
        self.is_used = False
        """Whether a group was made, or was to be made."""
        self._sockets: set[tuple[int, int]] = set()
        self._before: set[tuple[int, int]] | None = None  # the sockets before those that are being opened
        self._is_cut = False

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Record the sockets that are opened in the block as those of process groups."""
        self.is_used, self._before = True, _list_sockets()
        try:
            yield
        finally:
            self._sockets |= _list_sockets() - self._before
            self._before = None
        if self._is_cut:  # after the last look of `cut`
            self.cut()

    def add(self, others: GroupConnections) -> None:
        """Take over the sockets of ``others``, which were recorded in the same generation."""
        self.is_used = True
        self._sockets |= others._sockets

    def cut(self) -> None:
        """Make all collectives of this generation fail, those of other threads too."""
        self._is_cut = True
        before = self._before
        for descriptor, inode in self._sockets | (set() if before is None else _list_sockets() - before):
            _shut_down(descriptor, inode)
        # Each in a thread: an abort may wait for another group's (pytorch#119797).
        threads = [threading.Thread(target=_abort, args=(group.abort,), daemon=True) for group in self.groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(ABORT_TIMEOUT_S)


def _list_sockets() -> set[tuple[int, int]]:
    """Return descriptor and inode of each socket of this process."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            status = os.fstat(int(path.name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(path.name), status.st_ino))
    return found


def _shut_down(descriptor: int, inode: int) -> None:
    """Shut down a connection over TCP, unless its descriptor has become another file."""
    with contextlib.suppress(OSError):
        copy = os.dup(descriptor)
        try:
            is_same = os.fstat(copy).st_ino == inode
        except OSError:
            is_same = False
        if not is_same:
            os.close(copy)
            return
        with socket.socket(fileno=copy) as connection:
            is_tcp = connection.family in {socket.AF_INET, socket.AF_INET6}
            # gloo ends the process if its listening socket is shut down.
            if is_tcp and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                connection.shutdown(socket.SHUT_RDWR)


def _abort(abort: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # it has failed already
        abort()
