"""Keep open the checkpoints of one node's disk that it can upload: the newest ones, and milestones.

`note_commit` and `note_milestone` are called in any thread, all else in that of the uploader.
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import replace
from pathlib import Path

from elastic_resume.archive.archive import Archive
from elastic_resume.archive.entries import merge_milestones
from elastic_resume.checkpoint.catalog import Catalog, choose_milestones
from elastic_resume.checkpoint.reader import parse_checkpoint_name
from elastic_resume.errors import ArchiveError, CheckpointError, MachineError
from elastic_resume.mechanisms.archive.judge import HeldCheckpoint
from elastic_resume.mechanisms.archive.pinned_checkpoint import PinnedCheckpoint
from elastic_resume.milestone import Version

MAX_KEPT = 2
"""So many of the newest checkpoints stay open beside what is uploaded."""
MAX_NAMED = 4
"""And so many of the oldest milestones that are not archived."""


class HeldCheckpoints:
    """The checkpoints of one node that are open, and which of them have milestones to archive."""

    def __init__(self, node_dir: Path, run_id: str) -> None:
        self._node_dir, self._run_id = node_dir, run_id
        self.has_committed = False
        """A checkpoint was committed in this start."""
        self.offered: tuple[HeldCheckpoint, ...] = ()
        """Those that are open, newest first; replaced by another tuple."""
        self.checked_turn = 0
        """Names were compared with the archive after this turn."""
        self._committed: deque[Path] = deque(maxlen=MAX_KEPT)  # to be opened
        self._has_new_names = True  # the disk may have some
        self._open: dict[Version, PinnedCheckpoint] = {}
        self._named: dict[Version, Path] = {}  # their milestones are not archived
        self._damaged: set[Version] = set()

    def start(self) -> None:
        """Begin with the newest checkpoint on the disk."""
        self._committed.extend(self.find_newest())

    def note_commit(self, path: Path) -> None:
        """Note a checkpoint that was committed."""
        self.has_committed = True
        self._committed.append(path)

    def note_milestone(self) -> None:
        """Note that a worker has named a checkpoint."""
        self._has_new_names = True

    def find_newest(self) -> list[Path]:
        """Return the newest checkpoint of the disk; none if there is none."""
        with contextlib.suppress(MachineError):
            return [entry.path for entry in Catalog(self._node_dir, self._run_id).list_valid()[:1]]
        return []

    def get(self, version: Version) -> PinnedCheckpoint | None:
        """Return a checkpoint that is open."""
        return self._open.get(version)

    def give_up(self, version: Version) -> None:
        """Close a damaged checkpoint, and offer it no more in this start."""
        self._open.pop(version).close()
        self._named.pop(version, None)
        self._damaged.add(version)

    def open_committed(self, uploaded: Version | None) -> None:
        """Open the checkpoints that were committed, and close those that are not needed any more."""
        while self._committed:
            path = self._committed.popleft()
            with contextlib.suppress(CheckpointError):  # pruned meanwhile
                opened = PinnedCheckpoint(path, self._run_id)
                if replaced := self._open.pop(opened.held.version, None):
                    replaced.close()
                self._open[opened.held.version] = opened
        named = sorted(self._named)[:MAX_NAMED]
        for version in named:
            if version not in self._open:
                try:
                    self._open[version] = PinnedCheckpoint(self._named[version], self._run_id)
                except CheckpointError:  # another one of that name is better now
                    del self._named[version]
        kept = {*sorted(self._open)[-MAX_KEPT:], *named, uploaded}
        for version in self._open.keys() - kept:
            self._open.pop(version).close()
        self.offered = tuple(
            replace(self._open[version].held, is_named=version in self._named)
            for version in sorted(self._open, reverse=True)
        )

    def find_new_names(self, archive: Archive, turn: int) -> bool:
        """Find milestones that are not archived, after each upload and each new name.

        Return whether the archive was asked. Raises ArchiveError; then the next call asks again.
        """
        if not (self._has_new_names or (self._named and self.checked_turn != turn)):
            return False
        self._has_new_names = False
        try:
            self._named = self.list_named(archive)
        except ArchiveError:
            self._has_new_names = True
            raise
        self.checked_turn = turn
        return True

    def list_named(self, archive: Archive) -> dict[Version, Path]:
        """Return the good checkpoints of this node's disk whose milestones are not archived."""
        with contextlib.suppress(MachineError):
            labels = choose_milestones(Catalog(self._node_dir, self._run_id).list_valid())
            archived = archive.list_milestones() if labels else {}
            versions = {path: parse_checkpoint_name(path.name) or (0, 0) for path in labels}
            return {
                versions[path]: path
                for path, own in labels.items()
                if versions[path] not in self._damaged
                and merge_milestones(archived.get(versions[path], ()), own) != archived.get(versions[path])
            }
        return {}
