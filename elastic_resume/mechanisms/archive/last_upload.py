"""Upload the job's last checkpoints without the other nodes, and end when the node must.

The uploader's thread does `upload`. The agent's main thread stands in `wait`, which returns at the end of
``--grace`` whatever request is under way: that thread is a daemon and ends with the process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic_resume import grace
from elastic_resume.archive.entries import Attempt
from elastic_resume.console import ByteProgress
from elastic_resume.errors import ArchiveError, CheckpointError, SecondWriterError
from elastic_resume.mechanisms.archive.failures import can_pass, find_pause_s
from elastic_resume.mechanisms.archive.pinned_checkpoint import PinnedCheckpoint
from elastic_resume.mechanisms.archive.writer import ArchiveWriter
from elastic_resume.milestone import Version

logger = logging.getLogger(__name__)

POLL_S = 0.05
END_MARGIN_S = 0.5
"""Of the grace, for what the agent does after it."""
LIMIT_S = 3600.0
OTHERS_LIMIT_S = 3.0
"""A node that archives no last checkpoint waits so long for its own request under way."""
STALL_S = 60.0
"""Give up when nothing was put for so long, and for the time that a part may take."""
MAX_PAUSE_S = 15.0
MAX_LASTING_FAILURES = 2
"""So often it is tried if waiting does not mend what is wrong."""


class LastUpload:
    """The end of one node's uploads."""

    def __init__(self, emit: Callable[..., Any], node_dir: Path) -> None:
        """``emit`` takes the kind and the fields of an event."""
        self._emit, self._node_dir = emit, node_dir
        self._stopping_at: float | None = None  # written once, before `_woken` is set
        self._woken = threading.Event()  # a signal to stop
        self._requested, self._done = threading.Event(), threading.Event()
        self._lock = threading.Lock()  # guards the rest
        self._under_way: PinnedCheckpoint | None = None
        self._missing: list[tuple[str, str]] = []  # what is not archived, and why
        self._give_up_at = 0.0  # unless something is put
        self._is_over = False
        self._refusal = ""  # of the archive, for all further checkpoints; only the uploader's thread

    # ---- any thread -----------------------------------------------------------------------------------

    def begin_stop(self) -> None:
        """Note that this node has to end soon."""
        if self._stopping_at is None:
            self._stopping_at = time.monotonic()
        self._woken.set()

    @property
    def is_requested(self) -> bool:
        """Whether the job is over, so that the thread does the last uploads and then `finish`."""
        return self._requested.is_set()

    def find_left_s(self) -> float | None:
        """Return how long this node may take after a signal to stop; None without one."""
        left_s = grace.find_left_s(self._stopping_at)
        return None if left_s is None else left_s - END_MARGIN_S

    # ---- the main thread ------------------------------------------------------------------------------

    def wait(
        self, *, is_first: bool, find_archived: Callable[[], Version | None], put_s: float = 0.0
    ) -> None:
        """Have the thread do the last uploads, and wait for them, but no longer than this node may take.

        What is missing then is logged. ``is_first``: the last uploads are up to this node. ``put_s``: a part
        under way may take so long. ``find_archived`` returns the newest checkpoint that is archived.
        """
        self._requested.set()
        began, limit_s = time.monotonic(), LIMIT_S if is_first else OTHERS_LIMIT_S
        with self._lock:
            self._give_up_at = began + STALL_S + put_s
        while not self._done.wait(POLL_S) and time.monotonic() - began < limit_s:
            left_s = self.find_left_s()
            if (left_s is not None and left_s <= 0) or time.monotonic() >= self._give_up_at:
                break
        with self._lock:
            self._is_over = True
            if self._under_way is not None:
                name = _describe(self._under_way)
                self._missing.append((name, "Its upload took too long, and this node must end."))
        if self._missing:
            self._log_missing(find_archived())
        elif is_first and not self._done.is_set():
            logger.warning("the last checkpoint may be missing in the archive, which did not answer in time.")

    # ---- the uploader's thread ------------------------------------------------------------------------

    def finish(self) -> None:
        """Let `wait` return."""
        self._done.set()

    def upload(self, checkpoint: PinnedCheckpoint, writer: ArchiveWriter) -> bool:
        """Upload a checkpoint alone; return whether it is archived. The log says it, and `wait` why not."""
        with self._lock:
            if self._is_over:
                return False
            self._under_way = checkpoint
        problem = self._refusal or self._try(checkpoint, writer)
        with self._lock:
            self._under_way = None
        if problem:
            self.note_missing(checkpoint, problem)
        return not problem

    def note_missing(self, checkpoint: PinnedCheckpoint, problem: str) -> None:
        """Note that a checkpoint is not archived."""
        with self._lock:
            if not self._is_over:  # else `wait` has returned, or has noted it
                self._missing.append((_describe(checkpoint), problem))

    def _try(self, checkpoint: PinnedCheckpoint, writer: ArchiveWriter) -> str:
        """Try until it is archived, or there is a reason to give up, which is returned."""
        manifest, done, failures, began = checkpoint.manifest, 0, 0, time.monotonic()
        part_bytes = min(checkpoint.part_bytes, manifest.file_bytes)
        self._note_progress(writer.find_put_s(part_bytes))
        attempt: Attempt | None = None
        logger.info("archiving step %d before this node ends.", manifest.step)

        def read_done() -> int:
            return done

        while True:
            try:
                attempt = attempt or writer.begin(checkpoint)
                if attempt is None:
                    writer.add_milestones(checkpoint)
                    logger.info("step %d is archived already.", manifest.step)
                    return ""
                with ByteProgress(f"archiving step {manifest.step}", manifest.file_bytes, read_done):
                    for part in range(done // checkpoint.part_bytes, checkpoint.held.parts):
                        writer.put_part(attempt.id, checkpoint, part)
                        done, failures = done + checkpoint.part_bytes, 0
                        self._note_progress(writer.find_put_s(part_bytes))
                    writer.delete_old(writer.commit(attempt, checkpoint, began), manifest.step)
                return ""
            except SecondWriterError as error:
                if not writer.may_follow(manifest.version, attempt.id if attempt else "", error):
                    self._refusal = "Another job archives under this run id."
                    return self._refusal
                attempt, done = None, 0
            except (ArchiveError, CheckpointError) as error:
                failures += 1
                pause_s = find_pause_s(failures, MAX_PAUSE_S)
                if self._gives_up(error, failures, pause_s):
                    self._refusal = str(error) if isinstance(error, ArchiveError) else ""
                    return str(error)
                if failures == 1:
                    logger.warning("%s This node tries again for a time before it ends.", error)
                self._woken.clear()
                self._woken.wait(pause_s)

    def _note_progress(self, needed_s: float) -> None:
        with self._lock:
            self._give_up_at = time.monotonic() + STALL_S + needed_s

    def _gives_up(self, error: Exception, failures: int, pause_s: float) -> bool:
        if self._is_over or (failures >= MAX_LASTING_FAILURES and not can_pass(error)):
            return True
        left_s = self.find_left_s()
        is_late = time.monotonic() + pause_s >= self._give_up_at
        return is_late or (left_s is not None and left_s <= pause_s)

    def _log_missing(self, archived: Version | None) -> None:
        names, reasons = zip(*self._missing, strict=True)
        *first, last = names
        steps = f"steps {', '.join(first)} and {last}" if first else f"step {last}"
        why = " ".join(dict.fromkeys(reasons))
        newest = "" if archived is None else f"; the newest archived is step {archived[1]}"
        them = "They are" if first else "It is"
        logger.warning(
            f"not archived: {steps}{newest}. {why} {them} in {self._node_dir}: start the same command again "
            f"to archive {'them' if first else 'it'}."
        )
        self._emit("archive-failed", error=f"not archived: {steps}: {why}"[:1000], error_kind="not-archived")


def _describe(checkpoint: PinnedCheckpoint) -> str:
    names = ", ".join(sorted(label.name for label in checkpoint.read_milestones()))
    return f"{checkpoint.manifest.step} ({names})" if names else str(checkpoint.manifest.step)
