"""Find what an address that a person typed names: an archive, one run of it, or one checkpoint.

::

    ADDRESS                 all runs
    ADDRESS/RUN_ID          one run
    ADDRESS/RUN_ID/gX-sY    one checkpoint
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from elastic_resume import constants
from elastic_resume.archive.address import Address
from elastic_resume.archive.archive import Archive, open_store
from elastic_resume.archive.entries import ArchivedCheckpoint, BadEntry, choose_milestones
from elastic_resume.checkpoint.catalog import MAX_ENTRIES
from elastic_resume.checkpoint.manifest import Manifest
from elastic_resume.checkpoint.reader import checkpoint_name, parse_checkpoint_name
from elastic_resume.errors import UsageError
from elastic_resume.milestone import Milestone

_MAX_RUNS = 1000
_UNKNOWN = (1 << 54, 0)  # of an entry that cannot be read: it may be the newest


@dataclass(frozen=True)
class CheckpointInArchive:
    """A `StoredCheckpoint` in an archive."""

    place: Address
    archive: Archive
    entry: ArchivedCheckpoint | BadEntry
    milestones: tuple[Milestone, ...] = ()
    """Those that count among all that were listed."""

    def read_manifest(self) -> Manifest:
        """See `StoredCheckpoint`."""
        return self._archived.manifest

    def view_image(self, manifest: Manifest, on_verified: Callable[[int], object]) -> memoryview:
        """See `StoredCheckpoint`."""
        return self.read_image(manifest, on_verified)

    def read_image(self, manifest: Manifest, on_verified: Callable[[int], object]) -> memoryview:
        """See `StoredCheckpoint`."""
        del manifest  # it is that of the entry
        return self.archive.read_image(self._archived, on_verified=on_verified)

    def verify_image(self, manifest: Manifest, on_verified: Callable[[int], object]) -> None:
        """See `StoredCheckpoint`."""
        del manifest
        self.archive.verify_image(self._archived, on_verified)

    @property
    def _archived(self) -> ArchivedCheckpoint:
        if isinstance(self.entry, BadEntry):
            raise self.entry.error
        return self.entry


@dataclass(frozen=True)
class FoundArchive:
    """The runs at an address. ``level`` is root, run, or checkpoint, which has a ``version``."""

    path: Address
    level: str
    archives: tuple[Archive, ...]
    version: tuple[int, int] | None = None

    @property
    def run_ids(self) -> tuple[str, ...]:
        """The names of the runs."""
        return tuple(archive.run_id for archive in self.archives)

    def list_checkpoints(self, limit: int = MAX_ENTRIES) -> list[CheckpointInArchive]:
        """Return the newest ``limit`` checkpoints of each run, newest first; raise ArchiveError."""
        found = []
        for archive in self.archives:
            entries = archive.list_checkpoints(limit) if self.version is None else self._read_version(archive)
            entries = sorted(entries, key=lambda entry: entry.version or _UNKNOWN, reverse=True)
            headers = [entry.header for entry in entries if isinstance(entry, ArchivedCheckpoint)]
            milestones = choose_milestones(headers)
            found += [
                CheckpointInArchive(
                    self._place(archive, entry), archive, entry, milestones.get(entry.version or (0, 0), ())
                )
                for entry in entries
            ]
        return found

    def _read_version(self, archive: Archive) -> list[ArchivedCheckpoint | BadEntry]:
        return archive.read_checkpoints(archive.find_numbers(lambda header: header.version == self.version))

    def _place(self, archive: Archive, entry: ArchivedCheckpoint | BadEntry) -> Address:
        if self.level == "checkpoint":
            return self.path
        run = self.path / archive.run_id if self.level == "root" else self.path
        if isinstance(entry, BadEntry):
            return run / "log" / f"{entry.number:08d}"
        return run / checkpoint_name(*entry.version)


def find_archive(address: Address) -> FoundArchive:
    """Return what is at ``address``.

    Raises:
        UsageError: no run of elastic_resume is there.
        ArchiveError: it cannot be listed.

    """
    version = parse_checkpoint_name(address.name)
    run = address if version is None else address.parent
    if re.fullmatch(constants.SAFE_NAME_PATTERN, run.name):
        archive = Archive(open_store(run.parent), run.name)
        if archive.list_numbers():
            return FoundArchive(address, "run" if version is None else "checkpoint", (archive,), version)
    if version is None:
        store = open_store(address)
        names = [stored.name for stored in store.list("") if stored.is_prefix]
        safe_names = [name for name in names if re.fullmatch(constants.SAFE_NAME_PATTERN, name)]
        archives = [Archive(store, name) for name in safe_names[:_MAX_RUNS]]
        archives = [archive for archive in archives if archive.list_numbers()]
        if archives:
            return FoundArchive(address, "root", tuple(archives))
    raise UsageError(
        f"{address}: no archived checkpoints here. Give the address of --archive, one with /RUN_ID, or one "
        "with a checkpoint's name behind that, as ls shows it."
    )
