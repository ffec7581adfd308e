"""A node's checkpoints as their writer sees them: put one there, say what became of it, take old ones away.

Promise: a copy that cannot be written leaves nothing behind and older ones whole; it is told as an event.
Only copies whose every byte this node has written or verified push others out.

Does not know where the bytes come from.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_resume import failpoints
from elastic_resume.errors import CheckpointError, ElasticResumeError, MachineError
from elastic_resume.store import committed, slots
from elastic_resume.store.catalog import MIN_KEEP, Catalog
from elastic_resume.store.checkpoint import name_of, quick_check
from elastic_resume.store.durable import DISK, Disk
from elastic_resume.store.manifest import Manifest, Position
from elastic_resume.store.writing import Writer


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

    def expected_bytes(self) -> int:
        """Bytes of a slot that would hold the newest copy; 0 where there is none that can be read."""
        for entry in self._catalog.valid(limit=1):
            if entry.manifest is not None:
                notes = len(entry.manifest.to_bytes())  # more than either part of a slot's
                return slots.room_for(entry.manifest.file_bytes, notes, notes)
        return 0

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
        committed.note(self._node_dir, manifest.generation)
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
