"""Write checkpoints so that each exists whole or not at all, and keep the configured number of them.

The commit protocol; the rename is the commit:

    write data under a temporary name -> fsync data -> write and fsync manifest -> fsync temporary directory
      -> rename to the final name -> fsync node directory

Invariants, after a crash or an error at any point: a directory with a final name is whole, and older
checkpoints are untouched. All effects go through `Disk`, so tests can simulate a crash between any two
operations. An older checkpoint is pruned only when enough newer ones exist that this node wrote or verified.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import xxhash

from elastic_resume import constants, failpoints
from elastic_resume.checkpoint import node_dir
from elastic_resume.checkpoint.atomic_io import DISK, Disk, temporary_name, translate_os_errors
from elastic_resume.checkpoint.catalog import MIN_KEEP, Catalog
from elastic_resume.checkpoint.manifest import BLOCK_BYTES, Manifest, Position
from elastic_resume.checkpoint.reader import checkpoint_name, deep_check, quick_check
from elastic_resume.errors import (
    CheckpointError,
    ElasticResumeError,
    ForeignError,
    MachineError,
    NewerFormatError,
)


class CheckpointTransaction:
    """Write one checkpoint; as a context manager, remove everything that was not committed.

    If the disk refuses, a MachineError is raised, nothing stays behind, and older checkpoints are whole.
    """

    def __init__(
        self, node_dir: Path, generation: int, step: int, disk: Disk = DISK, *, block_bytes: int = BLOCK_BYTES
    ) -> None:
        """Create a temporary directory in ``node_dir``."""
        self._disk = disk
        self._node_dir = node_dir
        self._catalog = Catalog(node_dir, None, disk)
        self._version = (generation, step)
        self._final_path = node_dir / checkpoint_name(generation, step)
        self._temporary_path = node_dir / temporary_name(self._final_path.name)
        self._block_bytes = block_bytes
        self._block_digests: list[str] = []
        self._digest = xxhash.xxh3_128()
        self._bytes_written = 0
        self._descriptor = -1
        self._superseded: Path | None = None  # deleted once this checkpoint is durable
        try:
            self._hit_failpoint("commit.before-data")
            disk.mkdir(self._temporary_path)
            self._descriptor = disk.create(self._temporary_path / constants.STATE_FILE)
        except BaseException:
            self.abort()
            raise

    def __enter__(self) -> CheckpointTransaction:  # noqa: PYI034  typing.Self needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def write(self, data: memoryview | bytes) -> None:
        """Append bytes of the image."""
        view = memoryview(data).cast("B")
        while view:
            room = self._block_bytes - self._bytes_written % self._block_bytes
            piece, view = view[:room], view[room:]
            self._digest.update(piece)
            self._disk.write(self._descriptor, piece, self._temporary_path / constants.STATE_FILE)
            self._bytes_written += len(piece)
            if len(piece) == room:
                self._finish_block()

    def commit(self, manifest: Manifest) -> Path:
        """Make the checkpoint exist and return its directory.

        Block digests and sizes are added to ``manifest``. An existing whole checkpoint with equal content
        stays. Another one under this name is quarantined if it is damaged, unreadable or different, and
        deleted if it is the same step earlier in its epoch. This one gets its milestones.

        Raises:
            MachineError: the disk refuses, or the name is taken by another run or a newer format.

        """
        if manifest.version != self._version:
            raise ValueError(f"manifest of {manifest.version} for a checkpoint of {self._version}")
        if self._bytes_written % self._block_bytes:
            self._finish_block()
        manifest = replace(
            manifest,
            file_bytes=self._bytes_written,
            block_bytes=self._block_bytes,
            blocks=tuple(self._block_digests),
        )
        self._finish_data()
        self._write_manifest(manifest)
        if self._is_already_committed(manifest):
            self.abort()
        else:
            self._publish()
        return self._final_path

    def abort(self) -> None:
        """Remove uncommitted data; never raises, so that the first error is the one reported."""
        with contextlib.suppress(MachineError):
            self._close_data()
        with contextlib.suppress(MachineError):
            if self._temporary_path.exists():
                self._disk.remove_tree(self._temporary_path)

    def _finish_data(self) -> None:
        self._hit_failpoint("commit.after-data")
        self._disk.sync_file(self._descriptor, self._temporary_path / constants.STATE_FILE)
        self._close_data()

    def _write_manifest(self, manifest: Manifest) -> None:
        self._hit_failpoint("commit.before-manifest")
        self._disk.write_file(self._temporary_path / constants.MANIFEST_FILE, manifest.to_bytes())
        self._disk.sync_dir(self._temporary_path)

    def _publish(self) -> None:
        self._hit_failpoint("commit.before-rename")
        self._disk.rename(self._temporary_path, self._final_path)
        self._hit_failpoint("commit.after-rename")
        self._disk.sync_dir(self._node_dir)
        if self._superseded is not None:
            with contextlib.suppress(MachineError):  # the superseded checkpoint then stays in quarantine
                self._catalog.delete_quarantined(self._superseded)

    def _is_already_committed(self, manifest: Manifest) -> bool:
        """Whether the final name holds this content; anything else there is quarantined."""
        if not os.path.lexists(self._final_path):
            return False
        try:
            present = deep_check(self._final_path, manifest.run_id)
        except (ForeignError, NewerFormatError) as error:
            raise MachineError(f"cannot commit: the name is taken. {error} Move it elsewhere.") from error
        except CheckpointError as error:
            self._keep_milestones()
            self._catalog.quarantine(self._final_path, str(error))
            return False
        if present.content_digest == manifest.content_digest and present.position == manifest.position:
            self._disk.sync_dir(self._node_dir)  # its writer may have died before this sync
            return True
        # The last step of an epoch has two positions, before and after the script's end-of-epoch code.
        is_later = manifest.epoch_position > present.epoch_position
        self._keep_milestones()
        quarantined = self._catalog.quarantine(self._final_path, "written again with other content")
        self._superseded = quarantined if is_later else None
        return False

    def _keep_milestones(self) -> None:
        """Give this checkpoint the milestones of the one that it replaces, which is of the same step."""
        with contextlib.suppress(OSError):
            names = (self._final_path / constants.MILESTONES_FILE).read_bytes()
            self._disk.write_file(self._temporary_path / constants.MILESTONES_FILE, names)
            self._disk.sync_dir(self._temporary_path)

    def _finish_block(self) -> None:
        self._block_digests.append(self._digest.hexdigest())
        self._digest.reset()

    def _close_data(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            self._disk.close(descriptor, self._temporary_path / constants.STATE_FILE)

    def _hit_failpoint(self, failpoint: str) -> None:
        with translate_os_errors("commit", self._final_path):
            failpoints.hit(failpoint)


@dataclass(frozen=True)
class RetentionPolicy:
    """Rules that the workers of a generation agreed on when they resumed.

    ``trusted_version``: (generation, step) of the checkpoint they read and verified. ``keep``: number of
    checkpoints that stay on disk.
    """

    trusted_version: tuple[int, int] | None = None
    keep: int = MIN_KEEP


@dataclass(frozen=True)
class CommitResult:
    """Path of a committed checkpoint, and the wall-clock and CPU seconds it took."""

    path: Path
    seconds: float
    cpu_s: float


class CheckpointWriter:
    """Commit and prune the checkpoints of a node whose directory this process or its agent owns.

    The agent's committer has one, and a local leader that writes without a slot another. Each counts only
    what it trusts itself: a checkpoint goes when one of them trusts enough newer ones.
    """

    def __init__(self, node_dir: Path, run_id: str, emit: Callable[..., Any], disk: Disk = DISK) -> None:
        """``emit`` gets each event's kind and fields."""
        self._node_dir = node_dir
        self._emit = emit
        self._disk = disk
        self._catalog = Catalog(node_dir, run_id, disk)
        self._retention = RetentionPolicy()
        self._trusted_versions: set[tuple[int, int]] = set()

    def start_generation(self, retention: RetentionPolicy) -> None:
        """Apply the retention policy of workers that have resumed."""
        self._retention = retention
        if retention.trusted_version is not None:
            self._trusted_versions.add(retention.trusted_version)

    def newest_size(self) -> tuple[int, int]:
        """Return the bytes of the newest readable checkpoint's image and manifest; zeros if there is none."""
        for entry in self._catalog.list_valid(limit=1):
            if entry.manifest is not None:
                return entry.manifest.file_bytes, len(entry.manifest.to_bytes())
        return 0, 0

    def newest_checkpoint_step(self) -> int | None:
        """Return the step of this run's newest valid checkpoint on the disk; None if there is none."""
        return next((entry.step for entry in self._catalog.list_valid()), None)

    def has_trusted(self, version: tuple[int, int], position: Position) -> bool:
        """Whether a trusted checkpoint of ``version`` with this position is on disk.

        The last step of an epoch has two positions: before and after the script's end-of-epoch code.
        """
        if version not in self._trusted_versions:
            return False
        try:
            return quick_check(self._node_dir / checkpoint_name(*version), None).position == position
        except CheckpointError:
            return False

    def commit(
        self, manifest: Manifest, image: Iterable[memoryview], is_current: Callable[[], bool] = lambda: True
    ) -> CommitResult | None:
        """Commit an image; return None if ``is_current`` is false after writing.

        Raises:
            MachineError: the disk refuses; a ``commit-failed`` event was emitted.

        """
        version = {"generation": manifest.generation, "step": manifest.step}
        start, cpu_start = time.monotonic(), time.thread_time()
        try:
            with CheckpointTransaction(
                self._node_dir, manifest.generation, manifest.step, self._disk
            ) as writer:
                for piece in image:
                    writer.write(piece)
                failpoints.hit("committer.written")
                if not is_current():
                    return None
                path = writer.commit(manifest)
        except MachineError as error:
            self._emit("commit-failed", **version, error=str(error))
            raise
        result = CommitResult(path, time.monotonic() - start, time.thread_time() - cpu_start)
        self._trusted_versions.add(manifest.version)
        node_dir.record_committed_generation(self._node_dir, manifest.generation)
        size, seconds = manifest.file_bytes, round(result.seconds, 4)
        self._emit("commit", **version, bytes=size, seconds=seconds, path=str(path))
        return result

    def prune(self) -> None:
        """Remove checkpoints beyond the retention policy; separate from `commit`, whose caller may wait."""
        try:
            for path in self._catalog.prune(
                self._retention.keep,
                trusted_versions=self._trusted_versions,
            ):
                self._emit("prune", path=str(path))
        except ElasticResumeError as error:
            self._emit("prune-failed", error=str(error))
