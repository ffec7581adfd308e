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
from elastic_resume.checkpoint.atomic_io import DISK, Disk, machine, temporary_name
from elastic_resume.checkpoint.catalog import MIN_KEEP, Catalog, discard, quarantine
from elastic_resume.checkpoint.manifest import BLOCK_BYTES, Manifest, Position
from elastic_resume.checkpoint.reader import deep_check, name_of, quick_check
from elastic_resume.errors import (
    CheckpointError,
    ElasticResumeError,
    ForeignError,
    MachineError,
    NewerFormatError,
)


class Writer:
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
        self._order = (generation, step)
        self._final = node_dir / name_of(generation, step)
        self._temporary = node_dir / temporary_name(self._final.name)
        self._block_bytes = block_bytes
        self._blocks: list[str] = []
        self._digest = xxhash.xxh3_128()
        self._bytes = 0
        self._descriptor = -1
        self._superseded: Path | None = None  # by this one, once it is durable
        self._open = True
        try:
            self._hit("commit.before-data")
            disk.mkdir(self._temporary)
            self._descriptor = disk.create(self._temporary / constants.STATE_FILE)
        except BaseException:
            self.abort()
            raise

    def __enter__(self) -> Writer:  # noqa: PYI034  typing.Self needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def write(self, block: memoryview | bytes) -> None:
        """Append bytes of the image, any number of them."""
        view = memoryview(block).cast("B")
        while view:
            room = self._block_bytes - self._bytes % self._block_bytes
            piece, view = view[:room], view[room:]
            self._digest.update(piece)
            self._disk.write(self._descriptor, piece, self._temporary / constants.STATE_FILE)
            self._bytes += len(piece)
            if len(piece) == room:
                self._end_block()

    def commit(self, manifest: Manifest) -> Path:
        """Make the checkpoint exist and return its directory.

        ``manifest`` gets its blocks and sizes from here. When a whole copy with the same content is there
        already, that one stays. What is damaged or cannot be read, or has other content, makes room by
        going to quarantine (and away, where it is whole and not as far in its epoch as this one); what is
        not this job's does not, and the commit fails with a MachineError.
        """
        if manifest.order != self._order:
            raise ValueError(f"manifest of {manifest.order} for a checkpoint of {self._order}")
        if self._bytes % self._block_bytes:
            self._end_block()
        manifest = replace(
            manifest, file_bytes=self._bytes, block_bytes=self._block_bytes, blocks=tuple(self._blocks)
        )
        self._finish_data()
        self._put_manifest(manifest)
        if self._is_there_already(manifest):
            self.abort()
        else:
            self._publish()
        return self._final

    def abort(self) -> None:
        """Remove what was written, unless it was committed. Never raises: the first error is the story."""
        if not self._open:
            return
        self._open = False
        with contextlib.suppress(MachineError):
            self._close_data()
        with contextlib.suppress(MachineError):
            if self._temporary.exists():
                self._disk.remove_tree(self._temporary)

    def _finish_data(self) -> None:
        self._hit("commit.after-data")
        self._disk.sync_file(self._descriptor, self._temporary / constants.STATE_FILE)
        self._close_data()

    def _put_manifest(self, manifest: Manifest) -> None:
        self._hit("commit.before-manifest")
        self._disk.write_file(self._temporary / constants.MANIFEST_FILE, manifest.to_bytes())
        self._disk.sync_dir(self._temporary)

    def _publish(self) -> None:
        self._hit("commit.before-rename")
        self._disk.rename(self._temporary, self._final)
        self._open = False
        self._hit("commit.after-rename")
        self._disk.sync_dir(self._node_dir)
        if self._superseded is not None:
            with contextlib.suppress(MachineError):  # then it stays for a person to look at: no harm
                discard(self._superseded, self._disk)

    def _is_there_already(self, manifest: Manifest) -> bool:
        """Whether the final name holds this very content; what else stands there goes to quarantine."""
        if not os.path.lexists(self._final):
            return False
        try:
            present = deep_check(self._final, manifest.run_id)
        except (ForeignError, NewerFormatError) as error:
            raise MachineError(f"cannot commit: the name is taken. {error} Move it elsewhere.") from error
        except CheckpointError as error:
            quarantine(self._node_dir, self._final, str(error), self._disk)
            return False
        if present.content == manifest.content and present.position == manifest.position:
            self._disk.sync_dir(self._node_dir)  # whoever renamed it may have died before this
            return True
        # The last step of an epoch has two positions: when it has ended, and after what the script does then.
        is_later = manifest.place > present.place
        reason = "written again at the end of its epoch" if is_later else "written again with other content"
        aside = quarantine(self._node_dir, self._final, reason, self._disk)
        self._superseded = aside if is_later else None
        return False

    def _end_block(self) -> None:
        self._blocks.append(self._digest.hexdigest())
        self._digest.reset()

    def _close_data(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            self._disk.close(descriptor, self._temporary / constants.STATE_FILE)

    def _hit(self, point: str) -> None:
        with machine("commit", self._final):
            failpoints.hit(point)


@dataclass(frozen=True)
class Terms:
    """What the workers of a generation agreed on when they resumed.

    ``floor``: generations up to it were set aside; ``trusted``: (generation, step) of the copy that they
    read and verified, so that it counts as good; ``keep``: how many copies stay on disk.
    """

    floor: int = -1
    trusted: tuple[int, int] | None = None
    keep: int = MIN_KEEP


@dataclass(frozen=True)
class Put:
    """A commit: where it lies, and the seconds that it took, of the clock and of processors."""

    path: Path
    seconds: float
    cpu_s: float


class Shelf:
    """The checkpoints of the node whose directory this process (or its agent) owns."""

    def __init__(self, node_dir: Path, run_id: str, tell: Callable[..., Any], disk: Disk = DISK) -> None:
        """``tell`` gets events, by kind and fields."""
        self._node_dir = node_dir
        self._tell = tell
        self._disk = disk
        self._catalog = Catalog(node_dir, run_id, disk)
        self._terms = Terms()
        self._trusted: set[tuple[int, int]] = set()
        self._distrusted: dict[int, int] = {}  # generation -> the last step that is trusted
        self._publishing = threading.Lock()

    def enter(self, terms: Terms) -> None:
        """Workers have resumed, on these terms: from a copy that all have found equal."""
        self._terms = terms
        self._distrusted.clear()  # what was is set aside; the majority's copy may be of the same step
        if terms.trusted is not None:
            self._trusted.add(terms.trusted)

    def newest_bytes(self) -> tuple[int, int]:
        """Return the bytes of the newest readable checkpoint's file and of its manifest; zeros if there is none."""
        for entry in self._catalog.valid(limit=1):
            if entry.manifest is not None:
                return entry.manifest.file_bytes, len(entry.manifest.to_bytes())
        return 0, 0

    def holds(self, order: tuple[int, int], position: Position) -> bool:
        """Whether a copy of that (generation, step) is there that is known to be good, and stands there.

        The last step of an epoch has two positions: before what the script does after it, and when that is
        done.
        """
        if order not in self._trusted:
            return False
        try:
            return quick_check(self._node_dir / name_of(*order), None).position == position
        except CheckpointError:
            return False

    def believes(self, order: tuple[int, int]) -> bool:
        """Whether nobody has found copies of that (generation, step) wrong."""
        return order[1] <= self._distrusted.get(order[0], order[1])

    def distrusted(self) -> list[tuple[int, int]]:
        """(generation, last step that is trusted) of generations of which later copies are not believed."""
        return list(self._distrusted.items())

    def distrust(self, generation: int, step: int) -> None:
        """Set aside this node's copies of that generation and of later steps; take no more of them.

        Raises:
            MachineError: the disk refuses.

        """
        with self._publishing:
            self._distrusted[generation] = min(step, self._distrusted.get(generation, step))
            for entry in self._catalog.entries():
                if not self.believes(entry.order) and not entry.is_link:
                    self._trusted.discard(entry.order)
                    kept = self._catalog.quarantine(entry.path, "unlike those of most nodes")
                    self._tell("quarantine", path=str(kept), reason="unlike those of most nodes")

    def put(
        self, manifest: Manifest, image: Iterable[memoryview], still: Callable[[], bool] = lambda: True
    ) -> Put | None:
        """Commit an image. None where nobody believes it, or ``still``, asked when all is written, says no.

        Raises:
            MachineError: the disk refuses, which has been told.

        """
        where = {"generation": manifest.generation, "step": manifest.step}
        if not self.believes(manifest.order):
            return None
        began, used = time.monotonic(), time.thread_time()
        try:
            with Writer(self._node_dir, manifest.generation, manifest.step, self._disk) as writer:
                for piece in image:
                    writer.write(piece)
                failpoints.hit("keeper.written")
                with self._publishing:
                    if not still() or not self.believes(manifest.order):
                        return None
                    path = writer.commit(manifest)
        except MachineError as error:
            self._tell("commit-failed", **where, error=str(error))
            raise
        done = Put(path, time.monotonic() - began, time.thread_time() - used)
        self._trusted.add(manifest.order)
        node_dir.record_committed_generation(self._node_dir, manifest.generation)
        size, seconds = manifest.file_bytes, round(done.seconds, 4)
        self._tell("commit", **where, bytes=size, seconds=seconds, path=str(path))
        return done

    def prune(self) -> None:
        """Take away what the newest copies make superfluous. Apart from `put`: whoever waits has waited."""
        terms = self._terms
        try:
            for path in self._catalog.prune(terms.keep, above_generation=terms.floor, trusted=self._trusted):
                self._tell("prune", path=str(path))
        except ElasticResumeError as error:
            self._tell("prune-failed", error=str(error))
