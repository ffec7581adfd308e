"""Put parts, entries and names of milestones in the archive, as one node of the job."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic_resume import constants
from elastic_resume.archive.archive import MAX_EVENTS_BYTES, Archive
from elastic_resume.archive.entries import Attempt, is_outdated, make_attempt_id
from elastic_resume.archive.store import MIN_BYTES_PER_S
from elastic_resume.errors import (
    ArchiveError,
    ArchiveErrorKind,
    CheckpointError,
    SecondWriterError,
    UnreadableError,
)
from elastic_resume.mechanisms.archive.judge import ArchivedVersion, LogStart
from elastic_resume.mechanisms.archive.pinned_checkpoint import PinnedCheckpoint
from elastic_resume.milestone import Version
from elastic_resume.units import format_count

logger = logging.getLogger(__name__)


class ArchiveWriter:
    """Writes for one node, in one thread; others read its attributes."""

    def __init__(self, archive: Archive, keep: int | None, emit: Callable[..., Any]) -> None:
        """``keep``: so many entries stay; None: all. ``emit`` takes the kind and the fields of an event."""
        self.archive = archive
        self._keep, self._emit = keep, emit
        self.nonce = secrets.token_hex(8)
        self.job_nonce = ""
        """`ArchiveVerdict.writer`; empty before the first verdict."""
        self.first_number = 0
        """`ArchiveVerdict.first_number`."""
        self.log_start: LogStart | None = None
        self.archived: ArchivedVersion | None = None
        """The newest that this node has archived."""
        self.refusal = ""
        """Why this job may archive no more."""
        self.bytes_per_s = 0.0
        """How fast this node has put parts; 0 if it has put none."""
        self.put_s = 0.0
        """How long the part that is being put may take; 0: none is."""
        self._put_bytes, self._put_s = 0, 0.0
        self._former: list[str] = []  # attempts that were there when this node began the present one

    def begin(self, checkpoint: PinnedCheckpoint) -> Attempt | None:
        """Begin an attempt; None if the checkpoint is archived already."""
        first_number, writer = self.first_number, self.job_nonce or self.nonce
        if not first_number:  # no node of this job has begun one
            if self.log_start is None or self.log_start.writer != writer:
                self.log_start = LogStart(writer, self.archive.find_next_number())
            first_number = self.log_start.number
        manifest = checkpoint.manifest
        attempt = self.archive.begin(manifest.version, self._make_nonce(), first_number, manifest)
        if attempt is not None:
            listed = self.archive.list_attempts()
            self._former = [former for former in listed if is_outdated(attempt.id, former)]
        return attempt

    def add_milestones(self, checkpoint: PinnedCheckpoint) -> None:
        """Put the milestones of a checkpoint that is archived. Raises ArchiveError, CheckpointError."""
        version = checkpoint.manifest.version
        try:
            self.archive.add_milestones(version, self._make_nonce(), checkpoint.read_milestones())
        except UnreadableError as error:  # the store cannot be reached; others: the entry is damaged
            raise ArchiveError(str(error)) from error
        self._note_archived(version)

    def put_part(self, attempt: str, checkpoint: PinnedCheckpoint, part: int) -> None:
        """Put a part of an attempt, after its bytes were verified. Raises ArchiveError, CheckpointError."""
        data = checkpoint.read_part(part)
        self.put_s = self.find_put_s(len(data))
        began = time.monotonic()
        try:
            self._put_with_room(lambda: self.archive.put_part(attempt, part, data))
        finally:
            self.put_s = 0.0
        self._put_bytes, self._put_s = self._put_bytes + len(data), self._put_s + time.monotonic() - began
        self.bytes_per_s = self._put_bytes / self._put_s if self._put_s else 0.0

    def find_put_s(self, nbytes: int) -> float:
        """Return how long a put may take: twice as long as measured, or what a store's request may take."""
        return 2 * nbytes / self.bytes_per_s if self.bytes_per_s else nbytes / MIN_BYTES_PER_S

    def commit(self, attempt: Attempt, checkpoint: PinnedCheckpoint, began_at: float) -> list[str]:
        """Put the entry; return the attempts that `delete_old` may delete. ``began_at``: of the upload."""
        archive, manifest = self.archive, checkpoint.manifest
        missing = set(range(checkpoint.held.parts)) - archive.list_parts(attempt.id)
        if missing:
            archive.check_number(attempt)  # of a late attempt the winner has swept them
            raise ArchiveError(
                f"{archive.description}: {format_count(len(missing), 'part')} of step {attempt.version[1]} "
                "that other nodes have put are not there: give all nodes the same --archive, and a directory "
                "that all of them see."
            )
        candidates = archive.list_attempts()
        labels = checkpoint.read_milestones()
        manifest_bytes, part_bytes = checkpoint.manifest_bytes, checkpoint.part_bytes
        self._put_with_room(lambda: archive.commit(attempt, manifest_bytes, part_bytes, labels))
        self._note_archived(attempt.version)
        self._emit(
            "archived",
            step=manifest.step,
            checkpoint_generation=manifest.generation,
            number=attempt.number,
            bytes=manifest.file_bytes,
            seconds=round(time.monotonic() - began_at, 3),
            archive=archive.description,
        )
        logger.info(
            "step %d is archived in %s (entry %d).", manifest.step, archive.description, attempt.number
        )
        return [candidate for candidate in candidates if candidate != attempt.id]

    def _put_with_room(self, put: Callable[[], None]) -> None:
        """Put something. If the archive is full, delete what is not needed first, and put it again."""
        try:
            put()
        except ArchiveError as error:
            if error.kind != ArchiveErrorKind.QUOTA or not self._make_room():
                raise
            put()

    def _make_room(self) -> bool:
        """Delete parts of former attempts, and what `--archive-keep` allows; return whether there was any."""
        former, self._former = self._former, []
        removed = self.archive.sweep(former)
        return bool(removed) | bool(self._keep is not None and self.archive.prune(self._keep))

    def delete_old(self, candidates: list[str], step: int) -> None:
        """Delete what is not needed any more; an error is logged only."""
        try:
            self.archive.sweep(candidates)
            if self._keep is not None:
                self.archive.prune(self._keep)
        except (ArchiveError, CheckpointError) as error:
            logger.warning("step %d is archived, but older data were not deleted: %s", step, error)

    def may_follow(self, version: Version, attempt: str, error: SecondWriterError) -> bool:
        """Return whether a next attempt may follow the one whose number is taken; else archive no more.

        ``attempt`` is empty if the error has come before it was begun. If the winner's entry cannot be read,
        the next attempt finds whether another job archives.
        """
        own = attempt or make_attempt_id(version, self._make_nonce())
        if not error.attempt or is_outdated(own, error.attempt):
            return True
        self.refusal = str(error)[:500]
        self._emit("archive-refused", error=self.refusal)
        logger.error("%s", error)
        return False

    def put_events(self, node_dir: Path) -> None:
        """Put a node's events beside the checkpoints, for ``report``; an error is not worth a line."""
        path = node_dir / constants.EVENTS_FILE
        with contextlib.suppress(OSError, ArchiveError), open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_EVENTS_BYTES))
            self.archive.put_events(node_dir.name, file.read(MAX_EVENTS_BYTES))

    def _note_archived(self, version: Version) -> None:
        if self.archived is None or version > self.archived.version:
            self.archived = ArchivedVersion(*version)

    def _make_nonce(self) -> str:
        return (self.job_nonce or self.nonce) + secrets.token_hex(8)
