"""Share each local rank's progress through a memory-mapped page in the node's directory.

A step costs a few stores and no system call. The page is in the kernel's page cache, so it survives a killed
worker, but not the node.
Generation is stored before step, and a new generation first stores step 0: a reader never sees (old
generation, new step).

The first part (`ProgressPage.newest_progress`) serves only to count the lost steps. No state is resumed from
it, so impossible numbers are passed over. The second part (`read_records`) is for the agent:
the process of each rank, the time of its last step, and how to request its stacks.

The page's blocks are allocated when it is opened, since a store into a hole on a full disk would raise
SIGBUS. A page that is truncated under a running worker still does; the agent reads with pread and is safe.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from elastic_resume import constants
from elastic_resume.checkpoint.atomic_io import translate_os_errors
from elastic_resume.shared_page import COUNTS, SharedPage

MAX_LOCAL_RANKS = 1024
# Makes a worker with a ``stack_output_fd`` write the stacks of its threads; not used by known schedulers,
# launchers or libraries.
STACKS_SIGNAL = signal.SIGRTMIN + 11
MAX_MEASUREMENTS = 4
_STEP_FIELDS = ("generation", "step", "world_size", "busy")
_DETAIL_FIELDS = (
    "rank", "agent_pid", "assigned_generation", "pid", "start_ticks", "first_step",
    "last_progress_ns", "busy_until_ns", "epoch_end_step",
    "stack_output_fd", "stack_request_fd",
    *(f"measurement_{word}" for word in range(MAX_MEASUREMENTS)),
)  # fmt: skip
_STEP_WORDS, _DETAIL_WORDS = len(_STEP_FIELDS), 16
_DETAIL_START = MAX_LOCAL_RANKS * _STEP_WORDS
_PAGE_BYTES = MAX_LOCAL_RANKS * (_STEP_WORDS + _DETAIL_WORDS) * 8
# Field -> index of local rank 0's word, and words between two ranks.
_WORDS = {name: (at, _STEP_WORDS) for at, name in enumerate(_STEP_FIELDS)} | {
    name: (_DETAIL_START + at, _DETAIL_WORDS) for at, name in enumerate(_DETAIL_FIELDS)
}
_MAX_COUNT = 1 << 53


@dataclass(frozen=True)
class WorkerProcess:
    """The process behind a record, and how to request its stacks.

    ``agent_pid`` and ``assigned_generation`` identify its agent and view, 0 without an agent. ``start_ticks``
    (field 22 of /proc/PID/stat) tells it from a later process with the same pid. Both descriptors are the
    worker's own: a byte written to ``stack_request_fd`` makes it write two lines of JSON to
    ``stack_output_fd``; see `STACKS_SIGNAL`.
    """

    rank: int
    agent_pid: int
    assigned_generation: int
    pid: int
    start_ticks: int
    stack_output_fd: int
    stack_request_fd: int


@dataclass(frozen=True)
class ProgressRecord:
    """The progress of one local rank.

    ``last_progress_ns`` is the time of the last step or of the end of a busy period; 0 before the first step
    and after the last. ``busy`` ends at ``busy_until_ns``, 0 for no limit. ``epoch_end_step`` is the last
    step of the last finished epoch. ``measurements`` has a number for each
    mechanism that measures steps (`mechanisms.registry`), 0 if unknown. Times are of CLOCK_MONOTONIC.
    """

    local_rank: int
    generation: int
    step: int
    world_size: int
    busy: bool
    worker: WorkerProcess
    first_step: int
    last_progress_ns: int
    busy_until_ns: int
    epoch_end_step: int
    measurements: tuple[int, ...] = ()


class ProgressPage:
    """The page of one node, opened by any of its processes."""

    def __init__(self, path: Path) -> None:
        """Open or create the page; raise MachineError if ``path`` is not a file, or the disk is full."""
        self._path = path
        with translate_os_errors("open", path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.ftruncate(descriptor, _PAGE_BYTES)
                if os.fstat(descriptor).st_blocks * 512 < _PAGE_BYTES:
                    os.posix_fallocate(descriptor, 0, _PAGE_BYTES)
                self._page = SharedPage(descriptor, _PAGE_BYTES, COUNTS)
            finally:
                os.close(descriptor)
        self._words = self._page.words

    def start_generation(
        self,
        local_rank: int,
        *,
        generation: int,
        step: int,
        world_size: int,
        worker: WorkerProcess | None = None,
    ) -> None:
        """Record that ``local_rank`` starts ``generation`` at ``step`` in process ``worker``."""
        # A record without a pid is invalid, so the pid is cleared first and stored last.
        self._store(local_rank, pid=0, last_progress_ns=0, busy_until_ns=0, epoch_end_step=0)
        self._store(local_rank, first_step=step, step=0, busy=0)
        for word in range(MAX_MEASUREMENTS):
            self.set_measurement(local_rank, word, 0)
        self._store(local_rank, world_size=world_size, generation=generation)
        self._store(local_rank, step=step)
        if worker is not None:
            details = {name: value for name, value in vars(worker).items() if name != "pid"}
            self._store(local_rank, **details, pid=worker.pid)

    def finish_step(self, local_rank: int, step: int) -> None:
        """Record that ``local_rank`` finished ``step``."""
        self._store(local_rank, step=step, last_progress_ns=time.monotonic_ns())

    def set_measurement(self, local_rank: int, word: int, value: int) -> None:
        """Record what a mechanism has measured of ``local_rank``; 0 if it is unknown."""
        self._store(local_rank, **{f"measurement_{word}": value})

    def end_epoch(self, local_rank: int, step: int) -> None:
        """Record that ``step`` ended an epoch."""
        self._store(local_rank, epoch_end_step=step)

    def set_idle(self, local_rank: int) -> None:
        """Record that ``local_rank`` need not finish a step until it finishes the next one."""
        self._store(local_rank, last_progress_ns=0)

    def set_busy(self, local_rank: int, busy: bool, limit_s: float = 0.0) -> None:
        """Record that ``local_rank`` starts or ends long work outside a step.

        ``limit_s``: it counts as busy for at most this long; 0: no limit.
        """
        at, stride = _WORDS["last_progress_ns"]
        if busy:
            until_ns = time.monotonic_ns() + int(limit_s * 1e9) if limit_s > 0 else 0
            self._store(local_rank, busy_until_ns=until_ns)
        elif self._words[at + local_rank * stride]:
            self._store(local_rank, last_progress_ns=time.monotonic_ns())
        self._store(local_rank, busy=int(busy))

    def newest_progress(self, known_generation: int) -> tuple[int, int, int]:
        """Return (generation, step, world size) of the most advanced local rank; zeros if there is none.

        ``known_generation`` is the node's own, which is durable before any of its steps.
        """
        words = list(self._words[:_DETAIL_START])
        progress = [
            (words[at], words[at + 1], words[at + 2])
            for at in range(0, _DETAIL_START, _STEP_WORDS)
            if words[at] <= known_generation and max(words[at + 1], words[at + 2]) <= _MAX_COUNT
        ]
        return max(progress, default=(0, 0, 0))

    def _store(self, local_rank: int, **values: int) -> None:
        """Store words of ``local_rank`` in the given order."""
        for name, value in values.items():
            at, stride = _WORDS[name]
            self._words[at + local_rank * stride] = value


def read_start_ticks(pid: int) -> int:
    """Return when a process started, in ticks since boot: proc(5)'s field 22, counted after the name.

    Raises:
        OSError: it has ended.

    """
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def read_records(path: Path, local_ranks: int) -> list[ProgressRecord]:
    """Read the records of the first ``local_ranks``, without invalid ones.

    Unlike a mapping, this survives a truncated page. The kernel may copy byte by byte, so a word may be torn:
    read twice before acting on one.
    """
    count = min(local_ranks, MAX_LOCAL_RANKS)
    with contextlib.suppress(OSError):  # no worker has created the file, or the disk fails
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            steps = os.pread(descriptor, count * _STEP_WORDS * 8, 0)
            details = os.pread(descriptor, count * _DETAIL_WORDS * 8, _DETAIL_START * 8)
        finally:
            os.close(descriptor)
        if len(steps) == count * _STEP_WORDS * 8 and len(details) == count * _DETAIL_WORDS * 8:
            pids = memoryview(details).cast("Q")[_DETAIL_FIELDS.index("pid") :: _DETAIL_WORDS].tolist()
            started = (local_rank for local_rank, pid in enumerate(pids) if pid)
            records = (_parse_record(local_rank, steps, details) for local_rank in started)
            return [record for record in records if record is not None]
    return []


def read_own_records(node_dir: Path, local_ranks: int) -> list[ProgressRecord]:
    """Read the records of the calling agent's workers."""
    records = read_records(node_dir / constants.PROGRESS_FILE, local_ranks)
    return [record for record in records if record.worker.agent_pid == os.getpid()]


def _parse_record(local_rank: int, step_words: bytes, detail_words: bytes) -> ProgressRecord | None:
    generation, step, world_size, busy = struct.unpack_from("=4Q", step_words, local_rank * _STEP_WORDS * 8)
    words = struct.unpack_from(f"={len(_DETAIL_FIELDS)}Q", detail_words, local_rank * _DETAIL_WORDS * 8)
    details = dict(zip(_DETAIL_FIELDS, words, strict=True))
    if not 0 < details["pid"] < 1 << 22 or max(generation, step, world_size, details["rank"]) > _MAX_COUNT:
        return None  # the rank has not started, or the record is damaged
    if max(details["stack_output_fd"], details["stack_request_fd"]) >= 1 << 30:
        return None
    worker = WorkerProcess(**{name: details.pop(name) for name in WorkerProcess.__dataclass_fields__})
    measurements = tuple(details.pop(f"measurement_{word}") for word in range(MAX_MEASUREMENTS))
    return ProgressRecord(
        local_rank, generation, step, world_size, bool(busy), worker, **details, measurements=measurements
    )
