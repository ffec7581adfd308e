"""Commit a node's snapshots from memory to disk in a thread.

The committer owns the slots. It runs in the node's agent, or under plain torchrun or python in the local
leader's worker. Workers write snapshots into slots and mark the ones to commit; one low-priority thread
commits them. A failing disk costs checkpoints, but never stops training: the failure is logged at once and
then every minute, older checkpoints stay whole, and the newest snapshot is tried again.

Invariants: each committed snapshot was complete and was not overwritten while it was read. The committer
never waits for a worker. A worker waits for it only in `CheckpointCommitter.commit`. Workers reach it through
`ipc`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_resume.background import lower_priority
from elastic_resume.checkpoint.atomic_io import DISK, Disk
from elastic_resume.checkpoint.manifest import BLOCK_BYTES
from elastic_resume.checkpoint.reader import checkpoint_name
from elastic_resume.checkpoint.writer import CheckpointWriter, CommitResult, RetentionPolicy
from elastic_resume.console import ByteProgress
from elastic_resume.errors import CorruptError, MachineError
from elastic_resume.slots import slot_memory
from elastic_resume.slots.slot_memory import Slot, SlotState, decode_snapshot_id
from elastic_resume.slots.slot_pool import SlotPool

logger = logging.getLogger(__name__)

POLL_S = 0.003  # poll interval while local ranks copy their shares of a requested snapshot
COPY_TIMEOUT_S = 30.0  # ranks that copy for longer count as dead or blocked
FIRST_RETRY_S = 5.0
MAX_RETRY_S = 60.0
LOG_REPEAT_S = 60.0


@dataclass
class _CommitRequest:
    """A caller that waits until a snapshot at least as new as ``snapshot_id`` (0: the newest) is on disk."""

    snapshot_id: int
    deadline: float
    is_waited_for: bool = False  # only then its progress is shown
    path: Path | None = None
    error: str = ""
    finished: threading.Event = field(default_factory=threading.Event)


class CheckpointCommitter:
    """Commits the snapshots of one node, from `start` to `close`."""

    def __init__(
        self,
        node_dir: Path,
        run_id: str,
        slot_pool: SlotPool,
        *,
        emit: Callable[..., Any],
        disk: Disk = DISK,
    ) -> None:
        """Use ``node_dir``, which this process has claimed, and ``slot_pool``, which `close` closes.

        ``emit`` gets events, by kind and fields.
        """
        self.slot_pool = slot_pool
        # Called with the id of a snapshot that mechanisms of the agent read, and its view's generation; and
        # with the directory of a checkpoint that is on disk now. None may wait: see `OfferQueue`.
        self.snapshot_listeners: list[Callable[[int, int], object]] = []
        self.checkpoint_listeners: list[Callable[[Path], object]] = []
        self._writer = CheckpointWriter(node_dir, run_id, emit, disk)
        self._node_dir = node_dir
        self._emit = emit
        self._last_commit: tuple[int, Path | None] = (0, None)  # (snapshot id, path)
        self._requests: list[_CommitRequest] = []
        # The newest request of `request_commit`, until it is fulfilled.
        self._incomplete_request: _CommitRequest | None = None
        self.last_commit_s = 0.0  # duration of the last commit
        self.last_error = ""  # why the last commit failed; empty if it succeeded
        self._needs_prune = False
        self._logged_at = self._retry_at = 0.0
        self._retry_s = FIRST_RETRY_S
        self._closing = False
        self._wakeup = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="elastic-resume-committer", daemon=True)

    def start(self) -> None:
        """Start the thread, and reserve slots of the newest checkpoint's size before workers request them."""
        file_bytes, manifest_bytes = self._writer.newest_size()
        if file_bytes:  # the manifest is longer than either part of a slot's metadata
            slot_bytes = slot_memory.required_slot_bytes(file_bytes, manifest_bytes, manifest_bytes)
            self.slot_pool.reserve_in_background(slot_bytes, log=False)
        self._thread.start()

    def start_generation(self, retention: RetentionPolicy) -> None:
        """Apply the retention policy of workers that have resumed."""
        self._writer.start_generation(retention)

    def newest_checkpoint_step(self) -> int | None:
        """Return the step of this run's newest valid checkpoint on the disk; None if there is none."""
        return self._writer.newest_checkpoint_step()

    def request_commit(self, snapshot_id: int) -> None:
        """Have a snapshot committed once it is complete; do not wait."""
        with self._wakeup:
            self._incomplete_request = _CommitRequest(snapshot_id, time.monotonic() + COPY_TIMEOUT_S)
            self._wakeup.notify()

    def commit(self, snapshot_id: int = 0, timeout_s: float | None = None) -> Path | None:
        """Wait until a snapshot at least as new as ``snapshot_id`` is on disk; return its path.

        With id 0, take the newest. Return None if there is no such snapshot, or after ``timeout_s``. Raise
        MachineError if the disk refuses.
        """
        request = _CommitRequest(snapshot_id, time.monotonic() + COPY_TIMEOUT_S, is_waited_for=True)
        with self._wakeup:
            if self._closing:
                return None
            self._requests.append(request)
            self._wakeup.notify()
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while self._thread.is_alive() and (remaining_s := deadline - time.monotonic()) > 0:
            if request.finished.wait(min(1.0, remaining_s)):
                break
        if request.error:
            raise MachineError(request.error)
        return request.path

    def offer_snapshot(self, snapshot_id: int, generation: int) -> None:
        """Offer a snapshot to the listeners."""
        for offer in self.snapshot_listeners:
            offer(snapshot_id, generation)

    def commit_newest(self) -> None:
        """Have the newest snapshot committed after the workers exited; do not wait."""
        with self._wakeup:
            self._requests.append(_CommitRequest(0, time.monotonic()))
            self._wakeup.notify()

    def close(self) -> None:
        """Finish the current commit, stop the thread and free the slots."""
        with self._wakeup:
            self._closing = True
            self._wakeup.notify()
        if self._thread.is_alive():
            self._thread.join()
        self.slot_pool.close()

    # ---- in the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        lower_priority()
        while not self._closing:
            with self._wakeup:
                if not self._closing and not self._has_work():
                    self._wakeup.wait(self._wait_timeout_s())
            try:
                self._process_next()
                if self._needs_prune:
                    self._needs_prune = False
                    self._writer.prune()
            except Exception as error:  # noqa: BLE001  a bug must not stop checkpoints silently
                self._fail_all_requests(error)
        for request in self._requests:
            request.finished.set()

    def _fail_all_requests(self, error: Exception) -> None:
        """Report an internal error, and drop every request that may have caused it."""
        with contextlib.suppress(Exception):
            self._emit("committer-failed", error=repr(error)[:1000])
            logger.error(f"checkpoints: internal error of elastic_resume: {error!r}. Training continues.")
        for request in self._requests:
            request.error = repr(error)
            request.finished.set()
        self._requests = []
        for state in self.slot_pool.control_block.read_slots():
            self._release_slot(state)

    def _has_work(self) -> bool:
        states = self.slot_pool.control_block.read_slots()
        newest = slot_memory.newest_complete(states)
        is_ready = any(_is_ready(request, newest) for request in self._requests)
        return is_ready or slot_memory.next_to_commit(states) is not None

    def _is_retry_due(self) -> bool:
        return 0 < self._retry_at <= time.monotonic()

    def _wait_timeout_s(self) -> float | None:
        if self._requests or self._incomplete_request is not None:
            return POLL_S
        return max(0.01, self._retry_at - time.monotonic()) if self._retry_at else None

    def _process_next(self) -> None:
        """Commit for a waiting caller, else the newest marked snapshot, else one that failed before."""
        states = self.slot_pool.control_block.read_slots()
        newest = slot_memory.newest_complete(states)
        request = next((request for request in self._requests if _is_ready(request, newest)), None)
        if self._incomplete_request is not None and _is_ready(self._incomplete_request, newest):
            self._incomplete_request = None
        if request is not None:
            self._complete_request(request, newest)
        elif (state := slot_memory.next_to_commit(states)) is not None or self._is_retry_due():
            self._retry_at = 0.0  # `_handle_failure` sets it again
            with contextlib.suppress(MachineError):  # the error is already logged
                self._commit(state or newest)

    def _complete_request(self, request: _CommitRequest, state: SlotState | None) -> None:
        try:
            request.path = self._commit(state, show_progress=request.is_waited_for)
        except MachineError as error:
            request.error = str(error)
        self._requests.remove(request)
        request.finished.set()

    def _commit(self, state: SlotState | None, *, show_progress: bool = False) -> Path | None:
        """Commit a complete slot unless its snapshot is on disk; return None if it is overwritten."""
        if state is None:
            self._retry_at = 0.0
            return None
        generation, step = decode_snapshot_id(state.snapshot_id)
        committed_id, path = self._last_commit
        if path is not None and not path.is_dir():
            committed_id = 0  # a resume quarantined it and received the same step from another node
        # False for example for the first of the two snapshots of an epoch's last step.
        if committed_id < state.snapshot_id:
            try:
                with self.slot_pool.pin(state) as slot:
                    result = self._write(slot, state.snapshot_id, show_progress) if slot is not None else None
            except MachineError as error:
                self._handle_failure(step, error)
                self._release_slot(state)
                raise
            except CorruptError as error:
                self._emit("snapshot-ignored", generation=generation, step=step, reason=str(error))
                self._release_slot(state)
                return None
            if result is None:
                return None  # a newer snapshot has overwritten it
            path, self._needs_prune = result.path, True
            self._last_commit = (state.snapshot_id, path)
            if result.seconds:
                self.last_commit_s = result.seconds
                self.slot_pool.control_block.set("commit_us", int(result.seconds * 1e6))
                self.slot_pool.control_block.set("commit_cpu_us", int(result.cpu_s * 1e6))
            self._handle_success(step)
            self._release_slot(state)  # first: the checkpoint counts, whatever the listeners do
            for offer in self.checkpoint_listeners:
                offer(path)
            return path
        self._release_slot(state)
        return path

    def _release_slot(self, state: SlotState) -> None:
        """Allow the slot to be overwritten: its snapshot is on disk or was given up."""
        record = self.slot_pool.control_block.slot_record(state.index)
        if record.announced_id() == state.snapshot_id:
            record.set("committed", state.snapshot_id)

    def _write(self, slot: Slot, snapshot_id: int, show_progress: bool) -> CommitResult | None:
        def is_current() -> bool:
            return slot.record.complete_snapshot_id() == snapshot_id

        try:
            manifest, image = slot.read_snapshot(snapshot_id)
        except CorruptError:
            if is_current():
                raise
            return None  # a newer snapshot has overwritten it
        if self._writer.has_trusted(manifest.version, manifest.position):  # loaded from this disk
            return CommitResult(self._node_dir / checkpoint_name(*manifest.version), 0.0, 0.0)
        if not show_progress:
            return self._writer.commit(manifest, [image], is_current=is_current)
        what = f"writing the checkpoint of step {manifest.step}"
        with ByteProgress(what, manifest.file_bytes) as progress:
            blocks = progress.track(_split(image))
            return self._writer.commit(manifest, blocks, is_current=is_current)

    def _handle_failure(self, step: int, error: MachineError) -> None:
        now = time.monotonic()
        if not self.last_error:
            logger.warning(
                f"step {step} was not saved: {error} Training continues; older checkpoints are intact. "
                f"elastic_resume tries again at least every {MAX_RETRY_S:.0f} s."
            )
            self._logged_at = now
        elif now - self._logged_at >= LOG_REPEAT_S:
            logger.warning(f"checkpoints are still not saved: {error}")
            self._logged_at = now
        self.last_error = str(error)
        self._retry_at = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)

    def _handle_success(self, step: int) -> None:
        if self.last_error:
            logger.warning(f"checkpoints are saved again, most recently step {step}.")
        self.last_error, self._retry_at, self._retry_s = "", 0.0, FIRST_RETRY_S


def _split(image: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(image), BLOCK_BYTES):
        yield image[start : start + BLOCK_BYTES]


def _is_ready(request: _CommitRequest, newest: SlotState | None) -> bool:
    """Whether the requested snapshot is complete or its deadline has passed."""
    is_complete = newest is not None and newest.snapshot_id >= request.snapshot_id
    return not request.snapshot_id or is_complete or time.monotonic() >= request.deadline
