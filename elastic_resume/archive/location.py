"""Find what an address that a person typed names: an archive, one run of it, or one checkpoint.

::

    ADDRESS                 all runs
    ADDRESS/RUN_ID          one run
    ADDRESS/RUN_ID/gX-sY    one checkpoint; also by its step, or by a milestone
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from elastic_resume import constants, milestone
from elastic_resume.archive.address import Address
from elastic_resume.archive.archive import Archive, open_store
from elastic_resume.archive.entries import ArchivedCheckpoint, BadEntry, choose_milestones
from elastic_resume.checkpoint.catalog import MAX_ENTRIES
from elastic_resume.checkpoint.manifest import Manifest
from elastic_resume.checkpoint.reader import checkpoint_name
from elastic_resume.errors import ArchiveError, ArchiveErrorKind, NoValidCheckpointError, UsageError
from elastic_resume.milestone import Milestone

_MAX_RUNS = 1000
_MAX_NAMED = 8  # in one error
_UNKNOWN = (1 << 54, 0)  # of an entry that cannot be read: it may be the newest


@dataclass(frozen=True)
class CheckpointInArchive:
    """A `StoredCheckpoint` in an archive."""

    place: Address
    archive: Archive
    entry: ArchivedCheckpoint | BadEntry
    milestones: tuple[Milestone, ...] = ()
    """Those that count among all that were listed."""
    left_by: int | None = None
    """The generation that began when the job went back behind it, so that no job resumes it by itself."""

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
            ways = next((e.manifest.ways_back for e in entries if isinstance(e, ArchivedCheckpoint)), ())
            for entry in entries:
                version = entry.version or _UNKNOWN
                way = milestone.find_way_behind(version, ways) if entry.version else None
                left_by = way.new_generation if way else None
                labels = milestones.get(version, ())
                place = self._place(archive, entry)
                found.append(CheckpointInArchive(place, archive, entry, labels, left_by))
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
    """Return what is at ``address``. Its last component may be what `--resume-from` takes.

    Raises:
        UsageError: no run of elastic_resume is there.
        NoValidCheckpointError: a run is there, and no such checkpoint of it.
        ArchiveError: it cannot be listed.

    """
    names = _list_prefixes(address)
    if "log" in names and _is_name(address.name):
        archive = Archive(open_store(address.parent), address.name)
        if archive.list_numbers():
            return FoundArchive(address, "run", (archive,))
    store = open_store(address)
    archives = [Archive(store, name) for name in filter(_is_name, names[:_MAX_RUNS])]
    archives = [archive for archive in archives if archive.list_numbers()]
    if archives:
        return FoundArchive(address, "root", tuple(archives))
    run = address.parent
    if _is_name(run.name) and "log" in _list_prefixes(run):
        archive = Archive(open_store(run.parent), run.name)
        if archive.list_numbers():
            return _find_checkpoint(FoundArchive(run, "run", (archive,)), address.name)
    raise _make_missing_error(address)


def _is_name(text: str) -> bool:
    return re.fullmatch(constants.SAFE_NAME_PATTERN, text) is not None


def _list_prefixes(address: Address) -> list[str]:
    """Return the names of directories at ``address``; an absent directory has none."""
    try:
        return [stored.name for stored in open_store(address).list("") if stored.is_prefix]
    except ArchiveError as error:
        if address.scheme != "file" or error.kind != ArchiveErrorKind.MISSING_BUCKET:
            raise
        return []


def _find_checkpoint(run: FoundArchive, request: str) -> FoundArchive:
    """Return the checkpoint that ``request`` names, as `policy.going_back` chooses it."""
    place, (archive,) = run.path, run.archives
    version = milestone.parse_version(request)
    if version is not None and archive.find_numbers(lambda header: header.version == version):
        return FoundArchive(place / checkpoint_name(*version), "checkpoint", (archive,), version)
    stored = run.list_checkpoints()
    counting = ((each.entry.version, each.milestones) for each in reversed(stored) if each.left_by is None)
    version = milestone.choose_requested(
        request, ((version, version, labels) for version, labels in counting if version is not None)
    )
    if version is None:
        raise NoValidCheckpointError(
            f"{place}: no checkpoint {request!r} in this run. There is: {_list_names(stored)}."
        )
    return FoundArchive(place / checkpoint_name(*version), "checkpoint", (archive,), version)


def _list_names(stored: Iterable[CheckpointInArchive]) -> str:
    shown = []
    for each in stored:
        if each.entry.version is not None:
            left = () if each.left_by is None else (f"left by g{each.left_by}",)
            words = ", ".join([*(label.name for label in each.milestones), *left])
            name = milestone.format_short_version(each.entry.version)
            shown.append(f"{name} ({words})" if words else name)
    return _join(shown)


def _join(names: Iterable[str]) -> str:
    different = list(dict.fromkeys(names))
    more = f" and {len(different) - _MAX_NAMED} more" if len(different) > _MAX_NAMED else ""
    return ", ".join(different[:_MAX_NAMED]) + more


def _make_missing_error(address: Address) -> UsageError:
    """Say what is at the next place above that has something."""
    above = address
    while above.path not in {"", "/"}:
        above = above.parent
        if names := _list_prefixes(above):
            return UsageError(f"{address}: no archived checkpoints here. {above} has: {_join(names)}.")
    return UsageError(
        f"{address}: no archived checkpoints here. Give the address of --archive, one with /RUN_ID, or one "
        "with a checkpoint behind that: its step, milestone or name, as g3-s300."
    )
