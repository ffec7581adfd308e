"""The catalog of one node: which checkpoints are there, which are valid, which may go.

Newest means greatest (generation, step), never the latest time or the greatest step alone: a stale
higher step of an abandoned lineage must not win.

Promise: `prune` never removes the newest valid checkpoint, nor the last two valid ones, nor anything it
does not recognise, nor what a link leads to; what it removes loses its final name durably before its first
byte goes. After a crash in any method every directory under a final name is as whole as before.

Does not know what other nodes hold (`scan_run` lists what is visible here, on shared file systems), nor
which copy a job resumes from.

Quarantine: what failed verification is moved aside, whole, for a human to look at.

Promise: nothing is overwritten, and nothing removed but by `discard`. After a crash the directory stands
under its old name or under ``quarantine/``, never in neither. The reason lies beside it as
``NAME.reason.json``.

Does not know why something was refused: the reason is given.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import psutil

from elastic_resume import constants
from elastic_resume.checkpoint.atomic_io import DISK, Disk, temporary_name, translate_os_errors
from elastic_resume.checkpoint.manifest import Manifest
from elastic_resume.checkpoint.reader import deep_check, parse_checkpoint_name, quick_check
from elastic_resume.errors import CheckpointError, CorruptError, TornError

_MAX_NAME_ATTEMPTS = 100_000


def quarantine(node_dir: Path, path: Path, reason: str, disk: Disk = DISK) -> Path:
    """Move ``path`` to ``node_dir/quarantine/`` under a name not yet used there; return the new path."""
    directory = node_dir / constants.QUARANTINE_DIR
    disk.make_dirs(directory)
    target = _find_unused_path(directory, path.name)
    disk.rename(path, target)
    disk.sync_dir(directory)  # first the new name, then the absence of the old one
    disk.sync_dir(path.parent)
    note = {"was": path.name, "reason": reason, "at": round(time.time(), 3)}
    disk.write_atomic(_reason_path(target), (json.dumps(note, indent=1) + "\n").encode())
    return target


def delete_quarantined(path: Path, disk: Disk = DISK) -> None:
    """Remove what was set aside, and is of no use to anybody any more. Raises MachineError."""
    unfinished = path.parent.parent / temporary_name(path.name)  # what a crash leaves of it is swept
    disk.rename(path, unfinished)
    disk.unlink(_reason_path(path))
    disk.sync_dir(path.parent)
    disk.sync_dir(unfinished.parent)
    disk.remove_tree(unfinished)


def list_quarantined(node_dir: Path) -> list[Path]:
    """What lies in quarantine, by name, without the notes."""
    directory = node_dir / constants.QUARANTINE_DIR
    with translate_os_errors("list", directory):
        inside = list(directory.iterdir()) if directory.is_dir() else []
    return sorted(
        path
        for path in inside
        if not path.name.endswith(".reason.json") and not path.name.startswith(constants.TEMPORARY_PREFIX)
    )


def read_quarantine_reason(path: Path) -> str:
    """Why ``path`` lies in quarantine, as far as its note can be read."""
    try:
        with open(_reason_path(path), "rb") as file:
            note = json.loads(file.read(64 * 1024))
        return str(note["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return "set aside earlier; its note cannot be read"


def _find_unused_path(directory: Path, name: str) -> Path:
    # Only the owner of the node's lock moves things here, so looking before the rename is enough.
    for number in range(_MAX_NAME_ATTEMPTS):
        target = directory / (f"{name}.{number}" if number else name)
        if not os.path.lexists(target) and not os.path.lexists(_reason_path(target)):
            return target
    raise ValueError(f"{directory}: {_MAX_NAME_ATTEMPTS} copies of {name} in quarantine; remove some.")


def _reason_path(quarantined_path: Path) -> Path:
    return quarantined_path.with_name(f"{quarantined_path.name}.reason.json")


MIN_KEEP = 2  # one copy may turn out bad when it is needed
MAX_ENTRIES = 1000  # newest first; a directory with more is not read to its end
MAX_NODES = 10_000
_WRITER_PID_PATTERN = re.compile(r"-(\d{1,10})-[0-9a-f]{8}\Z")


@dataclass(frozen=True)
class CatalogEntry:
    """One directory with a checkpoint's name: its manifest, or the problem that keeps it from loading."""

    path: Path
    generation: int
    step: int
    manifest: Manifest | None
    error: CheckpointError | None

    @property
    def version(self) -> tuple[int, int]:
        """(generation, step), from the directory's name."""
        return (self.generation, self.step)

    @property
    def is_link(self) -> bool:
        """Whether somebody has put a link here: read like any other, never moved or removed."""
        return os.path.islink(self.path)  # noqa: PTH114  this one does not raise

    @property
    def is_damaged(self) -> bool:
        """Whether its own bytes prove that nobody can load it: what belongs in quarantine."""
        return isinstance(self.error, (TornError, CorruptError)) and not self.is_link


class Catalog:
    """Checkpoints of one node. Reading is safe for anybody; what changes things is for the lock's owner."""

    def __init__(self, node_dir: Path, run_id: str | None, disk: Disk = DISK) -> None:
        """``run_id`` None: accept checkpoints of any run."""
        self._node_dir = node_dir
        self._run_id = run_id
        self._disk = disk

    def list_entries(self, read_data: bool = False, limit: int = MAX_ENTRIES) -> list[CatalogEntry]:
        """Everything with a checkpoint's name, newest first, each checked; ``deep`` reads all data."""
        found = [
            self._check_entry(path, order, read_data) for order, path in self._list_checkpoint_paths()[:limit]
        ]
        # Without what its owner has pruned while we looked.
        return [entry for entry in found if entry.error is None or not _is_missing(entry.path)]

    def list_valid(self, read_data: bool = False, limit: int = MAX_ENTRIES) -> list[CatalogEntry]:
        """The entries without a problem, newest first."""
        return [entry for entry in self.list_entries(read_data, limit) if entry.error is None]

    def prune(
        self,
        keep: int,
        *,
        min_generation: int = -1,
        trusted_versions: Collection[tuple[int, int]] | None = None,
    ) -> list[Path]:
        """Remove valid checkpoints beyond the newest ``keep`` (>= 2) valid ones; return the old paths.

        Args:
            keep: how many stay.
            above_generation: older generations neither count nor go: ``--resume never``
                sets an earlier lineage aside, it does not give it up.
            trusted: (generation, step) of those whose bytes are known to be good, since this process wrote
                or verified them. Only they count towards ``keep`` then: a quick check cannot tell a flipped
                bit, and newer copies with one must not push out the last good one.

        """
        if keep < MIN_KEEP:
            raise ValueError(f"keep={keep}: at least {MIN_KEEP} checkpoints must stay")
        removed = []
        kept = 0
        for entry in self.list_valid():
            if entry.generation <= min_generation or entry.is_link:
                continue
            if kept >= keep:
                self._delete(entry.path)
                removed.append(entry.path)
            elif trusted_versions is None or entry.version in trusted_versions:
                kept += 1
        return removed

    def quarantine(self, path: Path, reason: str) -> Path:
        """Move a bad checkpoint aside, never over another; return its new path."""
        return quarantine(self._node_dir, path, reason, self._disk)

    def list_quarantined(self) -> list[Path]:
        """What lies in quarantine."""
        return list_quarantined(self._node_dir)

    def remove_unfinished(self) -> list[Path]:
        """Remove what dead writers left unfinished; return it. Only for the owner of the node's lock."""
        swept = []
        for path in self._list_directory():
            if not path.name.startswith(constants.TEMPORARY_PREFIX) or _has_live_writer(path):
                continue
            if not _is_missing(path):  # its writer, our agent, may have finished it since it was listed
                self._disk.remove_tree(path)
                swept.append(path)
        return swept

    def _check_entry(self, path: Path, version: tuple[int, int], read_data: bool) -> CatalogEntry:
        check = deep_check if read_data else quick_check
        try:
            return CatalogEntry(path, *version, check(path, self._run_id), None)
        except CheckpointError as error:
            return CatalogEntry(path, *version, None, error)

    def _list_checkpoint_paths(self) -> list[tuple[tuple[int, int], Path]]:
        named = [
            (order, path)
            for path in self._list_directory()
            if (order := parse_checkpoint_name(path.name)) is not None and _may_be_checkpoint(path)
        ]
        return sorted(named, reverse=True)

    def _list_directory(self) -> list[Path]:
        with translate_os_errors("list", self._node_dir):
            try:
                return sorted(self._node_dir.iterdir())
            except FileNotFoundError:
                return []

    def _delete(self, path: Path) -> None:
        doomed = path.with_name(temporary_name(f"pruned-{path.name}"))
        self._disk.rename(path, doomed)
        self._disk.sync_dir(self._node_dir)  # else a crash could bring the name back without its files
        self._disk.remove_tree(doomed)


def scan_run(run_dir: Path, run_id: str | None, limit: int = 64) -> dict[str, list[CatalogEntry]]:
    """The newest ``limit`` entries of every node whose directory is visible here, quick-checked, by node."""
    found: dict[str, list[CatalogEntry]] = {}
    with translate_os_errors("list", run_dir):
        names = sorted(os.listdir(run_dir)) if run_dir.is_dir() else []  # noqa: PTH208  names only
    for name in names[:MAX_NODES]:
        node_dir = run_dir / name
        with translate_os_errors("look at", node_dir):
            is_node = re.fullmatch(constants.SAFE_NAME_PATTERN, name) is not None and node_dir.is_dir()
        if is_node:
            found[name] = Catalog(node_dir, run_id).list_entries(limit=limit)
    return found


def _may_be_checkpoint(path: Path) -> bool:
    """Whether ``path`` is a directory, or a link that leads to one or nowhere. What cannot be told may be."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        return os.path.islink(path)  # noqa: PTH114
    except OSError:
        return True


def _is_missing(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def _has_live_writer(path: Path) -> bool:
    """Whether the process that made ``path`` still runs; one that began later merely has its number."""
    match = _WRITER_PID_PATTERN.search(path.name)
    if match is None:
        return False
    with contextlib.suppress(psutil.Error, OSError):
        # 1 s: file times and process start times come from clocks of different grain.
        return psutil.Process(int(match[1])).create_time() <= path.lstat().st_mtime + 1.0
    return False
