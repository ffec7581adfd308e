"""The keeper: owns a node's slots and commits snapshots from them to disk, behind the back of training.

It lives in the node's agent; under plain torchrun or python in the worker that leads the node. Workers write
snapshots into its slots and say which ones they want on disk; one thread of low priority commits those,
digests on the way. A disk that fails costs checkpoints, never training: the failure is said at once and again
every minute, older copies stay whole, and the newest snapshot is tried again.

Promise: what it commits was whole, and was not written over while it was read. It never waits for a worker,
and none waits for it unless it asks to.

Does not know torch, nor how workers reach it (`handing`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from elastic_resume.checkpoint.atomic_io import DISK, Disk
from elastic_resume.checkpoint.reader import checkpoint_name
from elastic_resume.checkpoint.writer import CheckpointWriter, CommitResult, RetentionPolicy
from elastic_resume.errors import CorruptError, MachineError
from elastic_resume.snapshot import slots
from elastic_resume.snapshot.slot_pool import SlotPool
from elastic_resume.snapshot.slots import SlotState, decode_snapshot_id

POLL_S = 0.003  # while other local ranks still copy their shares of what is to be committed
COPY_TIMEOUT_S = 30.0  # after which it is given up: they are gone, or blocked
FIRST_RETRY_S = 5.0
MAX_RETRY_S = 60.0
LOG_REPEAT_S = 60.0
NICENESS = 5


@dataclass
class _CommitRequest:
    """Somebody waits until a snapshot not older than ``mark`` (0: whatever is newest) is on disk."""

    snapshot_id: int
    deadline: float
    path: Path | None = None
    error: str = ""
    finished: threading.Event = field(default_factory=threading.Event)


class CheckpointCommitter:
    """The keeper of one node, from `start` to `close`."""

    def __init__(
        self,
        node_dir: Path,
        run_id: str,
        slot_pool: SlotPool,
        *,
        log: Callable[[str], None],
        emit: Callable[..., Any],
        disk: Disk = DISK,
    ) -> None:
        """Keep for the node of that directory.

        Args:
            node_dir: where checkpoints go; claimed by this process.
            run_id: the job's.
            rack: the slots; closed with the keeper.
            say: gets lines for people.
            tell: gets events, by kind and fields.
            disk: what writes.

        """
        self.slot_pool = slot_pool
        # Has a snapshot (its mark) compared with other nodes' in the world of that generation.
        self.request_comparison: Callable[[int, int], object] = lambda *_: None
        self._writer = CheckpointWriter(node_dir, run_id, emit, disk)
        self._node_dir = node_dir
        self._log = log
        self._emit = emit
        self._last_commit: dict[int, Path] = {}  # the newest commit, by its mark
        self._requests: list[_CommitRequest] = []
        self._incomplete_request: tuple[int, float] | None = (
            None  # a mark that is not whole yet, and until when
        )
        self._last_error = ""
        self._needs_prune = False
        self._logged_at = self._retry_at = 0.0
        self._retry_s = FIRST_RETRY_S
        self._closing = False
        self._wakeup = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="elastic-resume-committer", daemon=True)

    def start(self) -> None:
        """Begin to commit.

        The next workers will want slots of the size that the newest copy has: a third of the time in which
        they read it from a cold disk would go into taking that memory.
        """
        file_bytes, manifest_bytes = self._writer.newest_size()
        # The manifest is longer than either part of a slot's metadata.
        expected = slots.required_slot_bytes(file_bytes, manifest_bytes, manifest_bytes) if file_bytes else 0
        if expected:
            self.slot_pool.reserve_in_background(expected, log=False)
        self._thread.start()

    @property
    def last_error(self) -> str:
        """Why the last commit failed; empty while all is well."""
        return self._last_error

    def start_generation(self, retention: RetentionPolicy) -> None:
        """Workers have resumed, on these terms."""
        self._writer.start_generation(retention)

    def request_commit(self, snapshot_id: int) -> None:
        """A worker wants that snapshot on disk; it may not be whole yet."""
        with self._wakeup:
            self._incomplete_request = (snapshot_id, _now() + COPY_TIMEOUT_S)
            self._wakeup.notify()

    def commit(self, snapshot_id: int = 0, timeout_s: float | None = None) -> Path | None:
        """Wait until a snapshot not older than ``mark`` (0: the newest there is) is on disk; give its path.

        None where there is none, or it does not come within ``timeout_s``.

        Raises:
            MachineError: the disk refuses.

        """
        wish = _CommitRequest(snapshot_id, _now() + COPY_TIMEOUT_S)
        with self._wakeup:
            if self._closing:
                return None
            self._requests.append(wish)
            self._wakeup.notify()
        limit = None if timeout_s is None else _now() + timeout_s
        while self._thread.is_alive() and (limit is None or _now() < limit):
            if wish.finished.wait(1.0 if limit is None else max(0.0, min(1.0, limit - _now()))):
                break
        if wish.error:
            raise MachineError(wish.error)
        return wish.path

    def distrust_after(self, generation: int, step: int) -> None:
        """Let no copy of that generation count that is of a later step, in memory or on disk.

        Workers that live may go on making some: `between` takes those away.

        Raises:
            MachineError: the disk refuses.

        """
        try:
            self._writer.distrust_after(generation, step)  # first: see `between`
        finally:
            self.slot_pool.distrust_after(generation, step)
            self._last_commit = {}  # the newest may have been one of those

    def commit_newest(self) -> None:
        """Workers are gone: have their newest snapshot committed that is not distrusted. Waits for nothing.

        One that becomes distrusted later than here is taken away by `distrust`, as there are no more to come.
        """
        for generation, step in self._writer.list_last_trusted():
            self.slot_pool.distrust_after(generation, step)
        with self._wakeup:
            self._requests.append(_CommitRequest(0, _now()))
            self._wakeup.notify()

    def close(self) -> None:
        """End the commit under way, and give all memory back."""
        with self._wakeup:
            self._closing = True
            self._wakeup.notify()
        if self._thread.is_alive():
            self._thread.join()
        self.slot_pool.close()

    # ---- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        lower_priority()
        while not self._closing:
            with self._wakeup:
                if not self._closing and not self._has_work():
                    self._wakeup.wait(self._wait_timeout_s())
            try:
                self._log_failure_again()
                self._process_next()
                if self._needs_prune:
                    self._needs_prune = False
                    self._writer.prune()
            except Exception as error:  # noqa: BLE001  a fault of ours must not end checkpoints in silence
                self._fail_all_requests(error)
        for wish in self._requests:
            wish.finished.set()

    def _fail_all_requests(self, error: Exception) -> None:
        """Say what went wrong; let go of what it went wrong with."""
        with contextlib.suppress(Exception):
            self._emit("committer-failed", error=repr(error)[:1000])
            self._log(f"checkpoints: a fault of elastic_resume itself: {error!r}. Training goes on.")
        for wish in self._requests:
            wish.error = repr(error)
            wish.finished.set()
        self._requests = []
        for state in self.slot_pool.control_block.read_slots():
            self._release_slot(state)

    def _has_work(self) -> bool:
        states = self.slot_pool.control_block.read_slots()
        return (
            bool(self._requests) or slots.next_to_commit(states) is not None or 0 < self._retry_at <= _now()
        )

    def _wait_timeout_s(self) -> float | None:
        if self._incomplete_request is not None:
            return POLL_S
        if not self._last_error:
            return None
        return max(0.01, min(self._retry_at - _now(), LOG_REPEAT_S)) if self._retry_at else LOG_REPEAT_S

    def _process_next(self) -> None:
        """Commit what somebody waits for, what is wanted, or what has failed before."""
        states = self.slot_pool.control_block.read_slots()
        newest = slots.newest_complete(states)
        wish = next((wish for wish in self._requests if _is_ready(wish, newest)), None)
        if self._incomplete_request is not None and (
            self._incomplete_request[1] < _now()
            or any(s.complete and s.target >= self._incomplete_request[0] for s in states)
        ):
            self._incomplete_request = None
        if wish is not None:
            self._complete_request(wish, newest)
        elif (state := slots.next_to_commit(states)) is not None or 0 < self._retry_at <= _now():
            self._retry_at = 0.0  # a failure sets it anew
            with contextlib.suppress(MachineError):
                self._commit(state or newest)
        elif self._requests:
            time.sleep(POLL_S)

    def _complete_request(self, request: _CommitRequest, state: SlotState | None) -> None:
        try:
            request.path = self._commit(state)
        except MachineError as error:
            request.error = str(error)
        self._requests.remove(request)
        request.finished.set()

    def _commit(self, state: SlotState | None) -> Path | None:
        """Commit a slot, unless its snapshot is on disk; None where nothing counts there (any more)."""
        if state is None or not state.complete:
            self._retry_at = 0.0
            return None
        order = decode_snapshot_id(state.target)
        if any(not path.is_dir() for path in self._last_commit.values()):
            self._last_commit = {}  # a resume has set it aside, and has got the same step from elsewhere
        if any(saved > state.target for saved in self._last_commit):
            self._release_slot(state)  # of the two of an epoch's last step, say, which have one name on disk
            return next(iter(self._last_commit.values()))
        if state.target not in self._last_commit:
            try:
                with self.slot_pool.pin(state) as slot:
                    put = self._write(slot, state.target) if slot is not None else None
            except MachineError as error:
                self._handle_failure(order[1], error)
                self._release_slot(state)
                raise
            except CorruptError as error:
                self._emit("snapshot-ignored", generation=order[0], step=order[1], reason=str(error))
                self._release_slot(state)
                return None
            if put is None:
                if not self._writer.is_trusted(order):
                    time.sleep(POLL_S)  # what was sent in place of a distrusted one: `enter` comes at once
                return None  # or written over meanwhile: there is a newer one
            self._last_commit, self._needs_prune = {state.target: put.path}, True
            if put.seconds:
                self.slot_pool.control_block.record_commit_cost(put.seconds, put.cpu_s)
            self._handle_success(order[1])
        self._release_slot(state)
        return self._last_commit.get(state.target)

    def _release_slot(self, state: SlotState) -> None:
        """Let the slot go: its snapshot is on disk, or given up."""
        record = self.slot_pool.control_block.slot_record(state.index)
        if record.get("target") == state.target:
            record.set("committed", state.target)

    def _write(self, slot: slots.Slot, snapshot_id: int) -> CommitResult | None:
        try:
            image = slot.image()
            manifest = slots.build_manifest(*slot.read_metadata(), len(image))
        except ValueError as error:
            raise CorruptError(f"snapshot: {error}") from error
        if slot.record.complete_snapshot_id() != snapshot_id:
            return None
        if manifest.version != decode_snapshot_id(snapshot_id):
            raise CorruptError(
                f"snapshot: its notes are of {manifest.version}, its mark of {decode_snapshot_id(snapshot_id)}"
            )
        if self._writer.has_trusted(manifest.version, manifest.position):  # that is where it came from
            return CommitResult(self._node_dir / checkpoint_name(*manifest.version), 0.0, 0.0)
        return self._writer.commit(
            manifest, [image], is_current=lambda: slot.record.complete_snapshot_id() == snapshot_id
        )

    def _handle_failure(self, step: int, error: MachineError) -> None:
        if not self._last_error:  # else it is said again in a minute
            self._log(
                f"step {step} was not saved: {error} Training goes on; older checkpoints are "
                f"untouched. It is tried again every {MAX_RETRY_S:.0f} s at least."
            )
            self._logged_at = _now()
        self._last_error = str(error)
        self._retry_at = _now() + self._retry_s
        self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)

    def _handle_success(self, step: int) -> None:
        if self._last_error:
            self._log(f"checkpoints are saved again, step {step} just now.")
        self._last_error, self._retry_at, self._retry_s = "", 0.0, FIRST_RETRY_S

    def _log_failure_again(self) -> None:
        if self._last_error and _now() - self._logged_at >= LOG_REPEAT_S:
            self._logged_at = _now()
            self._log(f"checkpoints are still not saved: {self._last_error}")


def _now() -> float:
    return time.monotonic()


def _is_ready(request: _CommitRequest, newest: SlotState | None) -> bool:
    """Whether what is wished for is there, or has been waited for in vain."""
    there = newest is not None and newest.target >= request.snapshot_id
    return not request.snapshot_id or there or _now() >= request.deadline


def lower_priority() -> None:
    """Let this thread's work wait for others', on processors and disks."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError, psutil.Error):
        os.setpriority(os.PRIO_PROCESS, thread, NICENESS)  # Linux counts threads as processes here
        psutil.Process(thread).ionice(psutil.IOPRIO_CLASS_BE, 7)
