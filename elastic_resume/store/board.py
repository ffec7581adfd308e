"""The board: a memory-mapped page on which each local rank keeps the last step it finished.

A step costs two stores and no system call. The page belongs to the kernel's page cache, so the words
outlive a killed worker; they do not outlive the node. Each word is one aligned 8-byte store: a reader sees
the old or the new value, never half of each. Step is stored after generation has been, and a
new generation begins by storing step 0 first: (old generation, new step) is never seen.

The page only tells how many steps were lost: nothing is resumed from it, so one that cannot be true is said
and cleared (`newest`, `clear`). Its blocks are taken when it is opened, since a store into a hole of a full
disk would be a SIGBUS. One that somebody truncates under a running worker still is: that is the price of
a step without a system call.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

from elastic_resume.errors import RecordError
from elastic_resume.store.durable import machine

MAX_LOCAL_RANKS = 1024
_WORDS = 4  # generation, step, world size, busy
_BYTES = MAX_LOCAL_RANKS * _WORDS * 8
_MAX_COUNT = 1 << 53


class Board:
    """The page of one node, opened by any of its processes."""

    def __init__(self, path: Path) -> None:
        """Open or make the page at ``path``.

        Raises:
            MachineError: something else stands there, or there is no room for it.

        """
        self._path = path
        with machine("open", path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
            try:
                os.ftruncate(descriptor, _BYTES)
                if os.fstat(descriptor).st_blocks * 512 < _BYTES:
                    os.posix_fallocate(descriptor, 0, _BYTES)
                self._map = mmap.mmap(descriptor, _BYTES)
            finally:
                os.close(descriptor)
        self._words = (ctypes.c_uint64 * (MAX_LOCAL_RANKS * _WORDS)).from_buffer(self._map)

    def begin(self, local_rank: int, *, generation: int, step: int, world_size: int) -> None:
        """Record that ``local_rank`` starts ``generation`` at ``step``."""
        at = local_rank * _WORDS
        self._words[at + 1] = 0
        self._words[at + 3] = 0
        self._words[at + 2] = world_size
        self._words[at] = generation
        self._words[at + 1] = step

    def finish_step(self, local_rank: int, step: int) -> None:
        """Record that ``local_rank`` finished ``step``."""
        self._words[local_rank * _WORDS + 1] = step

    def set_busy(self, local_rank: int, busy: bool) -> None:
        """Record that ``local_rank`` does something long that is not a step."""
        self._words[local_rank * _WORDS + 3] = int(busy)

    def newest(self, known_generation: int) -> tuple[int, int, int]:
        """(generation, step, world size) of the local rank that came furthest; zeros when none did.

        Args:
            known_generation: the node's own, which is durable before any of its steps.

        Raises:
            RecordError: the page holds what no worker has written.

        """
        words = self._words
        found = [
            (words[at], words[at + 1], words[at + 2]) for at in range(0, MAX_LOCAL_RANKS * _WORDS, _WORDS)
        ]
        for rank, (generation, *counts) in enumerate(found):
            if generation > known_generation or max(counts) > _MAX_COUNT:
                raise RecordError(
                    f"{self._path}: is damaged: local rank {rank} would be in generation {generation}, with "
                    f"{counts[0]} steps in a world of {counts[1]}; the node knows {known_generation} "
                    "generations. How many steps are lost is not known."
                )
        return max(found)

    def clear(self) -> None:
        """Make the page one on which nobody has written. Only before the node's ranks `begin`."""
        self._map[:] = bytes(_BYTES)
