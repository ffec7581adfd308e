"""List, verify, prune and quarantine the checkpoints of one node.

Checkpoints are ordered by (generation, step), never by time: a higher step of an abandoned generation is
older than a lower step of a newer one. A checkpoint that fails verification is not deleted. It moves, whole,
to ``quarantine/``, with the reason beside it as ``NAME.reason.json``.

Invariants:

- `Catalog.prune` keeps the newest two valid checkpoints, milestones, everything it does not recognise, and
  the target of a link.
- A checkpoint loses its final name durably before its first byte is removed.
- A crash during quarantine leaves the directory under its old name or under ``quarantine/``, never under
  neither.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import stat
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from elastic_resume import constants, milestone
from elastic_resume.checkpoint.atomic_io import DISK, Disk, temporary_name, translate_os_errors
from elastic_resume.checkpoint.manifest import Manifest
from elastic_resume.checkpoint.reader import deep_check, parse_checkpoint_name, quick_check
from elastic_resume.errors import CheckpointError, CorruptError, TornError, UsageError
from elastic_resume.milestone import Milestone

MIN_KEEP = 2  # the newest checkpoint may turn out bad when it is needed
MAX_ENTRIES = 1000  # the newest entries are listed; older ones are ignored
_MAX_MILESTONES_BYTES = 64 * 1024
_WRITER_PID_PATTERN = re.compile(r"-(\d{1,10})-[0-9a-f]{8}\Z")


def read_quarantine_reason(path: Path) -> str:
    """Return the reason recorded for quarantined ``path``."""
    try:
        with open(_reason_path(path), "rb") as file:
            record = json.loads(file.read(64 * 1024))
        return str(record["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return "unknown: the file with the reason cannot be read"


def read_milestones(path: Path) -> tuple[Milestone, ...]:
    """Return the milestones of the checkpoint in ``path``; `milestone.DAMAGED` if they cannot be read."""
    try:
        with open(path / constants.MILESTONES_FILE, "rb") as file:
            record = json.loads(file.read(_MAX_MILESTONES_BYTES))
        return tuple(_parse_milestone(name, metric) for name, metric in record["milestones"].items())
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return (Milestone(milestone.DAMAGED),)


def _parse_milestone(name: str, metric: object) -> Milestone:
    if not milestone.is_name(name) or not (metric is None or isinstance(metric, float)):
        raise ValueError(f"{name!r:.80} with {metric!r:.80} is no milestone")
    if metric is not None and not math.isfinite(metric):
        raise ValueError(f"the metric of {name} is not finite")
    return Milestone(name, metric)


def choose_milestones(entries: Iterable[CatalogEntry]) -> dict[Path, tuple[Milestone, ...]]:
    """Return the milestones of a node that count, by the directories of their checkpoints."""
    valid = [entry for entry in entries if entry.error is None]
    kept = milestone.choose_kept((entry.version, label) for entry in valid for label in entry.milestones)
    found = {
        entry.path: tuple(label for label in entry.milestones if (entry.version, label) in kept)
        for entry in valid
    }
    return {path: labels for path, labels in found.items() if labels}


def _reason_path(quarantined_path: Path) -> Path:
    return quarantined_path.with_name(f"{quarantined_path.name}.reason.json")


@dataclass(frozen=True)
class CatalogEntry:
    """A directory with a checkpoint's name: its manifest, or the error that keeps it from loading."""

    path: Path
    generation: int
    step: int
    manifest: Manifest | None
    error: CheckpointError | None
    milestones: tuple[Milestone, ...] = ()

    @property
    def version(self) -> tuple[int, int]:
        """(generation, step), from the directory's name."""
        return (self.generation, self.step)

    @property
    def is_link(self) -> bool:
        """Whether a user placed a link here; links are read, but never moved or removed."""
        return os.path.islink(self.path)  # noqa: PTH114  Path.is_symlink may raise

    @property
    def is_damaged(self) -> bool:
        """Whether its own bytes prove that no node can load it."""
        return isinstance(self.error, (TornError, CorruptError)) and not self.is_link


class Catalog:
    """Give access to one node's checkpoints. Any process may read; only the lock's owner may change."""

    def __init__(self, node_dir: Path, run_id: str | None, disk: Disk = DISK) -> None:
        """Open the catalog of ``node_dir``; with ``run_id`` None, checkpoints of any run are valid."""
        self._node_dir = node_dir
        self._run_id = run_id
        self._disk = disk

    def list_entries(self, read_data: bool = False, limit: int = MAX_ENTRIES) -> list[CatalogEntry]:
        """Check and return all checkpoints, newest first; ``read_data`` verifies every digest."""
        entries = [
            self._check_entry(path, version, read_data)
            for version, path in self._list_checkpoint_paths()[:limit]
        ]
        # The owner may have pruned some of them meanwhile.
        return [entry for entry in entries if not _is_missing(entry.path)]

    def list_valid(self, read_data: bool = False, limit: int = MAX_ENTRIES) -> list[CatalogEntry]:
        """Return the entries without an error, newest first."""
        return [entry for entry in self.list_entries(read_data, limit) if entry.error is None]

    def prune(
        self,
        keep: int,
        *,
        trusted_versions: Collection[tuple[int, int]] | None = None,
    ) -> list[Path]:
        """Remove valid checkpoints beyond the newest ``keep``; return their former paths. Milestones stay.

        Args:
            keep: number of checkpoints that stay, at least `MIN_KEEP`.
            trusted_versions: (generation, step) of checkpoints that this process wrote or verified. If given,
                only these count towards ``keep``: newer checkpoints with a flipped bit must not push out the
                last good one.

        """
        if keep < MIN_KEEP:
            raise ValueError(f"keep={keep}: at least {MIN_KEEP} checkpoints must stay")
        removed = []
        kept = 0
        entries = self.list_valid()
        milestones = choose_milestones(entries)
        for entry in entries:
            if entry.is_link or entry.path in milestones:
                continue
            if kept >= keep:
                self._delete(entry.path)
                removed.append(entry.path)
            elif trusted_versions is None or entry.version in trusted_versions:
                kept += 1
        return removed

    def add_milestone(self, path: Path, label: Milestone) -> None:
        """Name the checkpoint in ``path``, durably; an earlier metric of that name is replaced.

        Raises:
            UsageError: it has `milestone.MAX_NAMES` others.
            MachineError: the disk refuses.

        """
        others = [each for each in read_milestones(path) if each.name not in {label.name, milestone.DAMAGED}]
        if len(others) >= milestone.MAX_NAMES:
            raise UsageError(
                f"{path.name} is no milestone {label.name!r}: it has {len(others)} names, which is the limit."
            )
        record = {"milestones": {each.name: each.metric for each in [*others, label]}}
        self._disk.write_atomic(path / constants.MILESTONES_FILE, (json.dumps(record) + "\n").encode())

    def quarantine(self, path: Path, reason: str) -> Path:
        """Move ``path`` to ``quarantine/`` and record ``reason``; return the new path."""
        directory = self._node_dir / constants.QUARANTINE_DIR
        self._disk.make_dirs(directory)
        # Only the owner of the node's lock renames to here: no name is taken between check and rename.
        names = itertools.chain([path.name], (f"{path.name}.{number}" for number in itertools.count(1)))
        target = next(
            directory / name
            for name in names
            if not os.path.lexists(directory / name) and not os.path.lexists(_reason_path(directory / name))
        )
        self._disk.rename(path, target)
        self._disk.sync_dir(directory)  # the new name must be durable before the old one disappears
        self._disk.sync_dir(path.parent)
        record = {"was": path.name, "reason": reason, "at": round(time.time(), 3)}
        self._disk.write_atomic(_reason_path(target), (json.dumps(record, indent=1) + "\n").encode())
        return target

    def delete_quarantined(self, path: Path) -> None:
        """Remove a quarantined checkpoint and its reason."""
        unfinished = self._node_dir / temporary_name(path.name)  # removed by the next owner after a crash
        self._disk.rename(path, unfinished)
        self._disk.unlink(_reason_path(path))
        self._disk.sync_dir(path.parent)
        self._disk.sync_dir(self._node_dir)
        self._disk.remove_tree(unfinished)

    def list_quarantined(self) -> list[Path]:
        """Return the quarantined directories, sorted by name."""
        directory = self._node_dir / constants.QUARANTINE_DIR
        return [
            path
            for path in _list_directory(directory)
            if not path.name.endswith(".reason.json") and not path.name.startswith(constants.TEMPORARY_PREFIX)
        ]

    def remove_unfinished(self) -> list[Path]:
        """Remove and return what dead writers left; only the owner of the node's lock may call this."""
        removed = []
        for path in _list_directory(self._node_dir):
            if not path.name.startswith(constants.TEMPORARY_PREFIX) or _has_live_writer(path):
                continue
            if not _is_missing(path):  # its writer may have renamed it since it was listed
                self._disk.remove_tree(path)
                removed.append(path)
        return removed

    def _check_entry(self, path: Path, version: tuple[int, int], read_data: bool) -> CatalogEntry:
        check = deep_check if read_data else quick_check
        try:
            return CatalogEntry(path, *version, check(path, self._run_id), None, read_milestones(path))
        except CheckpointError as error:
            return CatalogEntry(path, *version, None, error)

    def _list_checkpoint_paths(self) -> list[tuple[tuple[int, int], Path]]:
        checkpoints = [
            (version, path)
            for path in _list_directory(self._node_dir)
            if (version := parse_checkpoint_name(path.name)) is not None and _may_be_checkpoint(path)
        ]
        return sorted(checkpoints, reverse=True)

    def _delete(self, path: Path) -> None:
        unnamed = path.with_name(temporary_name(f"pruned-{path.name}"))
        self._disk.rename(path, unnamed)
        self._disk.sync_dir(self._node_dir)  # otherwise a crash could bring the name back without its files
        self._disk.remove_tree(unnamed)


def _list_directory(directory: Path) -> list[Path]:
    with translate_os_errors("list", directory):
        try:
            return sorted(directory.iterdir())
        except FileNotFoundError:
            return []


def scan_run(run_dir: Path, run_id: str | None, limit: int = 64) -> dict[str, list[CatalogEntry]]:
    """Return the newest ``limit`` entries of each node whose directory is visible here."""
    entries: dict[str, list[CatalogEntry]] = {}
    for node_dir in _list_directory(run_dir):
        with translate_os_errors("read", node_dir):
            is_node = re.fullmatch(constants.SAFE_NAME_PATTERN, node_dir.name) and node_dir.is_dir()
        if is_node:
            entries[node_dir.name] = Catalog(node_dir, run_id).list_entries(limit=limit)
    return entries


def _may_be_checkpoint(path: Path) -> bool:
    """Whether ``path`` is a directory, a link to one, a dangling link, or unreadable."""
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
    """Whether the process that created ``path`` still runs, and is not a later one with the same pid."""
    match = _WRITER_PID_PATTERN.search(path.name)
    if match is None:
        return False
    with contextlib.suppress(psutil.Error, OSError):
        # 1 s, because file times and process start times have different resolutions.
        return psutil.Process(int(match[1])).create_time() <= path.lstat().st_mtime + 1.0
    return False
