"""Writing one checkpoint, and the commit.

As bbolt does it: write the data under a temporary name, fsync; write the manifest with the digest of every
block, fsync; fsync the temporary directory; rename; fsync the parent. The rename is the commit.

Promise: after a crash at any point, a directory under its final name is whole, and the older ones are
untouched.

A node's checkpoints as their writer sees them: put one there, say what became of it, take old ones away.

Promise: a copy that cannot be written leaves nothing behind and older ones whole; it is told as an event.
Only copies whose every byte this node has written or verified push others out.

Does not know where the bytes come from.
"""

from __future__ import annotations

import contextlib
import os
import threading
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
from elastic_resume.checkpoint.catalog import MIN_KEEP, Catalog, delete_quarantined, quarantine
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
    """Writes one checkpoint. As a context manager it aborts what was not committed.

    Raises MachineError when the disk refuses; nothing is left behind then, and older copies are whole.
    """

    def __init__(
        self,
        node_dir: Path,
        generation: int,
        step: int,
        disk: Disk = DISK,
        *,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        """Open a temporary directory under ``node_dir``."""
        self._disk = disk
        self._node_dir = node_dir
        self._version = (generation, step)
        self._final_path = node_dir / checkpoint_name(generation, step)
        self._temporary_path = node_dir / temporary_name(self._final_path.name)
        self._block_bytes = block_bytes
        self._block_digests: list[str] = []
        self._digest = xxhash.xxh3_128()
        self._bytes_written = 0
        self._descriptor = -1
        self._superseded: Path | None = None  # by this one, once it is durable
        self._is_open = True
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
        """Append bytes of the image, any number of them."""
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

        ``manifest`` gets its blocks and sizes from here. When a whole copy with the same content is there
        already, that one stays. What is damaged or cannot be read, or has other content, makes room by
        going to quarantine (and away, where it is whole and not as far in its epoch as this one); what is
        not this job's does not, and the commit fails with a MachineError.
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
        """Remove what was written, unless it was committed. Never raises: the first error is the story."""
        if not self._is_open:
            return
        self._is_open = False
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
        self._is_open = False
        self._hit_failpoint("commit.after-rename")
        self._disk.sync_dir(self._node_dir)
        if self._superseded is not None:
            with contextlib.suppress(MachineError):  # then it stays for a person to look at: no harm
                delete_quarantined(self._superseded, self._disk)

    def _is_already_committed(self, manifest: Manifest) -> bool:
        """Whether the final name holds this very content; what else stands there goes to quarantine."""
        if not os.path.lexists(self._final_path):
            return False
        try:
            present = deep_check(self._final_path, manifest.run_id)
        except (ForeignError, NewerFormatError) as error:
            raise MachineError(f"cannot commit: the name is taken. {error} Move it elsewhere.") from error
        except CheckpointError as error:
            quarantine(self._node_dir, self._final_path, str(error), self._disk)
            return False
        if present.content_digest == manifest.content_digest and present.position == manifest.position:
            self._disk.sync_dir(self._node_dir)  # whoever renamed it may have died before this
            return True
        # The last step of an epoch has two positions: when it has ended, and after what the script does then.
        is_later = manifest.epoch_position > present.epoch_position
        reason = "written again at the end of its epoch" if is_later else "written again with other content"
        aside = quarantine(self._node_dir, self._final_path, reason, self._disk)
        self._superseded = aside if is_later else None
        return False

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
    """What the workers of a generation agreed on when they resumed.

    ``floor``: generations up to it were set aside; ``trusted``: (generation, step) of the copy that they
    read and verified, so that it counts as good; ``keep``: how many copies stay on disk.
    """

    min_generation: int = -1
    trusted_version: tuple[int, int] | None = None
    keep: int = MIN_KEEP


@dataclass(frozen=True)
class CommitResult:
    """A commit: where it lies, and the seconds that it took, of the clock and of processors."""

    path: Path
    seconds: float
    cpu_s: float


class CheckpointWriter:
    """The checkpoints of the node whose directory this process (or its agent) owns."""

    def __init__(self, node_dir: Path, run_id: str, emit: Callable[..., Any], disk: Disk = DISK) -> None:
        """``tell`` gets events, by kind and fields."""
        self._node_dir = node_dir
        self._emit = emit
        self._disk = disk
        self._catalog = Catalog(node_dir, run_id, disk)
        self._retention = RetentionPolicy()
        self._trusted_versions: set[tuple[int, int]] = set()
        self._last_trusted_steps: dict[int, int] = {}  # generation -> the last step that is trusted
        self._commit_lock = threading.Lock()

    def start_generation(self, retention: RetentionPolicy) -> None:
        """Workers have resumed, on these terms: from a copy that all have found equal."""
        self._retention = retention
        self._last_trusted_steps.clear()  # what was is set aside; the majority's copy may be of the same step
        if retention.trusted_version is not None:
            self._trusted_versions.add(retention.trusted_version)

    def newest_size(self) -> tuple[int, int]:
        """Return the bytes of the newest readable checkpoint's file and of its manifest; zeros if there is none."""
        for entry in self._catalog.list_valid(limit=1):
            if entry.manifest is not None:
                return entry.manifest.file_bytes, len(entry.manifest.to_bytes())
        return 0, 0

    def has_trusted(self, version: tuple[int, int], position: Position) -> bool:
        """Whether a copy of that (generation, step) is there that is known to be good, and stands there.

        The last step of an epoch has two positions: before what the script does after it, and when that is
        done.
        """
        if version not in self._trusted_versions:
            return False
        try:
            return quick_check(self._node_dir / checkpoint_name(*version), None).position == position
        except CheckpointError:
            return False

    def is_trusted(self, version: tuple[int, int]) -> bool:
        """Whether nobody has found copies of that (generation, step) wrong."""
        return version[1] <= self._last_trusted_steps.get(version[0], version[1])

    def list_last_trusted(self) -> list[tuple[int, int]]:
        """(generation, last step that is trusted) of generations of which later copies are not believed."""
        return list(self._last_trusted_steps.items())

    def distrust_after(self, generation: int, step: int) -> None:
        """Set aside this node's copies of that generation and of later steps; take no more of them.

        Raises:
            MachineError: the disk refuses.

        """
        with self._commit_lock:
            self._last_trusted_steps[generation] = min(step, self._last_trusted_steps.get(generation, step))
            for entry in self._catalog.list_entries():
                if not self.is_trusted(entry.version) and not entry.is_link:
                    self._trusted_versions.discard(entry.version)
                    kept = self._catalog.quarantine(entry.path, "unlike those of most nodes")
                    self._emit("quarantine", path=str(kept), reason="unlike those of most nodes")

    def commit(
        self, manifest: Manifest, image: Iterable[memoryview], is_current: Callable[[], bool] = lambda: True
    ) -> CommitResult | None:
        """Commit an image. None where nobody believes it, or ``still``, asked when all is written, says no.

        Raises:
            MachineError: the disk refuses, which has been told.

        """
        where = {"generation": manifest.generation, "step": manifest.step}
        if not self.is_trusted(manifest.version):
            return None
        began, used = time.monotonic(), time.thread_time()
        try:
            with CheckpointTransaction(
                self._node_dir, manifest.generation, manifest.step, self._disk
            ) as writer:
                for piece in image:
                    writer.write(piece)
                failpoints.hit("committer.written")
                with self._commit_lock:
                    if not is_current() or not self.is_trusted(manifest.version):
                        return None
                    path = writer.commit(manifest)
        except MachineError as error:
            self._emit("commit-failed", **where, error=str(error))
            raise
        done = CommitResult(path, time.monotonic() - began, time.thread_time() - used)
        self._trusted_versions.add(manifest.version)
        node_dir.record_committed_generation(self._node_dir, manifest.generation)
        size, seconds = manifest.file_bytes, round(done.seconds, 4)
        self._emit("commit", **where, bytes=size, seconds=seconds, path=str(path))
        return done

    def prune(self) -> None:
        """Take away what the newest copies make superfluous. Apart from `put`: whoever waits has waited."""
        terms = self._retention
        try:
            for path in self._catalog.prune(
                terms.keep, min_generation=terms.min_generation, trusted_versions=self._trusted_versions
            ):
                self._emit("prune", path=str(path))
        except ElasticResumeError as error:
            self._emit("prune-failed", error=str(error))
