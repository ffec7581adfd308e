"""The board: a memory-mapped page on which each local rank keeps the last step it finished.

A step costs a few stores and no system call. The page belongs to the kernel's page cache, so the words
outlive a killed worker; they do not outlive the node. Each word is one aligned 8-byte store: a reader sees
the old or the new value, never half of each. Step is stored after generation has been, and a
new generation begins by storing step 0 first: (old generation, new step) is never seen.

The first part tells how many steps were lost: nothing is resumed from it, so one that cannot be true is said
and cleared (`newest`, `clear`). The second is for the agent that looks for hangs (`read_lines`): whose line
it is, since when the rank does what it does, and how to ask its process where it stands.

The page's blocks are taken when it is opened, since a store into a hole of a full disk would be a SIGBUS.
One that somebody truncates under a running worker still is: that is the price of a step without a system
call. The agent does not pay it: it reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from elastic_resume.checkpoint.atomic_io import translate_os_errors
from elastic_resume.errors import NodeFileError

MAX_LOCAL_RANKS = 1024
# A worker that says so on its line writes the stacks of its threads when it gets this signal. One that no
# scheduler, launcher or library is known to use.
STACKS_SIGNAL = signal.SIGRTMIN + 11
_STEP_WORDS = 4  # generation, step, world size, busy
_DETAIL_WORDS = 16  # of the second part: see `_MORE`
_DETAIL_FIELDS = (
    "rank", "agent_pid", "round", "pid", "start_ticks", "first_step",
    "last_progress_ns", "collectives", "busy_until_ns", "epoch_end_step", "stack_output_fd", "stack_request_fd",
)  # fmt: skip
_FIELD_INDEX = {name: at for at, name in enumerate(_DETAIL_FIELDS)}
_LAST_PROGRESS_NS, _COLLECTIVES = _FIELD_INDEX["last_progress_ns"], _FIELD_INDEX["collectives"]
_DETAIL_START = MAX_LOCAL_RANKS * _STEP_WORDS
_PAGE_BYTES = MAX_LOCAL_RANKS * (_STEP_WORDS + _DETAIL_WORDS) * 8
_MAX_COUNT = 1 << 53


@dataclass(frozen=True)
class WorkerProcess:
    """Which process a line belongs to, and how to ask it.

    ``agent_pid`` and ``round`` say whose worker it is, 0 without an agent. ``start_ticks`` tells it from a
    later process of the same number (field 22 of /proc/PID/stat). The descriptors are the worker's own:
    who writes a byte to ``bell_fd`` gets a line of JSON in the file of ``stacks_fd``; see `STACKS_SIGNAL`.
    """

    rank: int
    agent_pid: int
    round: int
    pid: int
    start_ticks: int
    stack_output_fd: int
    stack_request_fd: int


@dataclass(frozen=True)
class ProgressRecord:
    """What the board says of one local rank.

    ``beat_ns`` is the time of the last step (or of the end of what kept it busy); 0 where there is nothing
    to judge by: before the first step, and after the last. ``collectives`` counts those of the default
    process group as the last step ended. ``busy_until_ns`` limits ``busy``; 0: no limit. ``epoch_end`` is the
    step with which an epoch ended last. Times are of CLOCK_MONOTONIC.
    """

    local_rank: int
    generation: int
    step: int
    world_size: int
    busy: bool
    worker: WorkerProcess
    first_step: int
    last_progress_ns: int
    collectives: int
    busy_until_ns: int
    epoch_end_step: int


class ProgressPage:
    """The page of one node, opened by any of its processes."""

    def __init__(self, path: Path) -> None:
        """Open or make the page at ``path``.

        Raises:
            MachineError: something else stands there, or there is no room for it.

        """
        self._path = path
        with translate_os_errors("open", path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
            try:
                os.ftruncate(descriptor, _PAGE_BYTES)
                if os.fstat(descriptor).st_blocks * 512 < _PAGE_BYTES:
                    os.posix_fallocate(descriptor, 0, _PAGE_BYTES)
                self._map = mmap.mmap(descriptor, _PAGE_BYTES)
            finally:
                os.close(descriptor)
        self._words = (ctypes.c_uint64 * (_PAGE_BYTES // 8)).from_buffer(self._map)

    def start_generation(
        self,
        local_rank: int,
        *,
        generation: int,
        step: int,
        world_size: int,
        worker: WorkerProcess | None = None,
    ) -> None:
        """Record that ``local_rank`` starts ``generation`` at ``step``, in the process ``worker``."""
        at = local_rank * _STEP_WORDS
        more = _detail_start(local_rank)
        self._words[more + _FIELD_INDEX["pid"]] = 0  # while it is half written it is nobody's line
        self._words[more + _LAST_PROGRESS_NS] = 0
        self._words[more + _FIELD_INDEX["busy_until_ns"]] = 0
        self._words[more + _FIELD_INDEX["epoch_end_step"]] = 0
        self._words[more + _COLLECTIVES] = 0
        self._words[more + _FIELD_INDEX["first_step"]] = step
        self._words[at + 1] = 0
        self._words[at + 3] = 0
        self._words[at + 2] = world_size
        self._words[at] = generation
        self._words[at + 1] = step
        if worker is not None:
            for name in (
                "rank",
                "agent_pid",
                "round",
                "start_ticks",
                "stack_output_fd",
                "stack_request_fd",
                "pid",
            ):
                self._words[more + _FIELD_INDEX[name]] = getattr(worker, name)

    def finish_step(self, local_rank: int, step: int, collectives: int = 0) -> None:
        """Record that ``local_rank`` has just finished ``step``."""
        words, more = self._words, _DETAIL_START + local_rank * _DETAIL_WORDS
        words[local_rank * _STEP_WORDS + 1] = step
        words[more + _COLLECTIVES] = collectives
        words[more + _LAST_PROGRESS_NS] = time.monotonic_ns()

    def end_epoch(self, local_rank: int, step: int) -> None:
        """Record that an epoch ended with ``step``."""
        self._words[_detail_start(local_rank) + _FIELD_INDEX["epoch_end_step"]] = step

    def set_idle(self, local_rank: int) -> None:
        """Record that no step is to be expected of ``local_rank``, until it finishes one."""
        self._words[_detail_start(local_rank) + _LAST_PROGRESS_NS] = 0

    def set_busy(self, local_rank: int, busy: bool, limit_s: float = 0.0) -> None:
        """Record that ``local_rank`` does something long that is not a step, or has ended that.

        ``limit_s``: after so many seconds it counts as busy no more; 0: there is no limit.
        """
        more = _detail_start(local_rank)
        if busy:
            until = time.monotonic_ns() + int(limit_s * 1e9) if limit_s > 0 else 0
            self._words[more + _FIELD_INDEX["busy_until_ns"]] = until
        elif self._words[more + _LAST_PROGRESS_NS]:
            self._words[more + _LAST_PROGRESS_NS] = time.monotonic_ns()
        self._words[local_rank * _STEP_WORDS + 3] = int(busy)

    def newest_progress(self, known_generation: int) -> tuple[int, int, int]:
        """(generation, step, world size) of the local rank that came furthest; zeros when none did.

        Args:
            known_generation: the node's own, which is durable before any of its steps.

        Raises:
            RecordError: the page holds what no worker has written.

        """
        words = self._words
        found = [
            (words[at], words[at + 1], words[at + 2])
            for at in range(0, MAX_LOCAL_RANKS * _STEP_WORDS, _STEP_WORDS)
        ]
        for rank, (generation, *counts) in enumerate(found):
            if generation > known_generation or max(counts) > _MAX_COUNT:
                raise NodeFileError(
                    f"{self._path}: is damaged: local rank {rank} would be in generation {generation}, with "
                    f"{counts[0]} steps in a world of {counts[1]}; the node knows {known_generation} "
                    "generations. How many steps are lost is not known."
                )
        return max(found)

    def clear(self) -> None:
        """Make the page one on which nobody has written. Only before the node's ranks `begin`."""
        self._map[:] = bytes(_PAGE_BYTES)


def read_records(path: Path, local_ranks: int) -> list[ProgressRecord]:
    """Read the lines of the first ``local_ranks``; without those that no living process may have written.

    For a process that must not die of a page that somebody truncates. The kernel may copy byte by byte, so
    a word that is being stored may be read as half of each: look twice before acting on one.
    """
    count = min(local_ranks, MAX_LOCAL_RANKS)
    with contextlib.suppress(OSError):  # no worker has opened it, or the disk is gone: nobody to look at
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            first = os.pread(descriptor, count * _STEP_WORDS * 8, 0)
            second = os.pread(descriptor, count * _DETAIL_WORDS * 8, _DETAIL_START * 8)
        finally:
            os.close(descriptor)
        if len(first) == count * _STEP_WORDS * 8 and len(second) == count * _DETAIL_WORDS * 8:
            lines = (_parse_record(rank, first, second) for rank in range(count))
            return [line for line in lines if line is not None]
    return []


def _detail_start(local_rank: int) -> int:
    return _DETAIL_START + local_rank * _DETAIL_WORDS


def _parse_record(local_rank: int, step_words: bytes, detail_words: bytes) -> ProgressRecord | None:
    generation, step, world_size, busy = struct.unpack_from("=4Q", step_words, local_rank * _STEP_WORDS * 8)
    words = struct.unpack_from(f"={len(_DETAIL_FIELDS)}Q", detail_words, local_rank * _DETAIL_WORDS * 8)
    more = dict(zip(_DETAIL_FIELDS, words, strict=True))
    # A process number that is none, or a count beyond all bounds, is damage and nobody's line.
    if not 0 < more["pid"] < 1 << 22 or max(generation, step, world_size, more["rank"]) > _MAX_COUNT:
        return None
    if max(more["stack_output_fd"], more["stack_request_fd"]) >= 1 << 30:
        return None
    worker = WorkerProcess(**{name: more.pop(name) for name in WorkerProcess.__dataclass_fields__})
    return ProgressRecord(local_rank, generation, step, world_size, bool(busy), worker, **more)
