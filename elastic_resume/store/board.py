"""The board: a memory-mapped page on which each local rank keeps the last step it finished.

A step costs two stores and no system call. The page belongs to the kernel's page cache, so the words
outlive a killed worker; they do not outlive the node. Each word is one aligned 8-byte store: a reader sees
the old or the new value, never half of each. Step is stored after generation has been, and a
new generation begins by storing step 0 first: (old generation, new step) is never seen.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

MAX_LOCAL_RANKS = 1024
_WORDS = 4  # generation, step, world size, busy
_BYTES = MAX_LOCAL_RANKS * _WORDS * 8


class Board:
    """The page of one node, opened by any of its processes."""

    def __init__(self, path: Path) -> None:
        """Open or make the page at ``path`` (sparse: a node with 8 ranks uses one block)."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(descriptor, _BYTES)
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

    def newest(self) -> tuple[int, int, int]:
        """(generation, step, world size) of the local rank that came furthest; zeros when none did."""
        words = self._words
        return max(
            (words[at], words[at + 1], words[at + 2]) for at in range(0, MAX_LOCAL_RANKS * _WORDS, _WORDS)
        )
