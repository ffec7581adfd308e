"""Find, list and check checkpoints: ``ls`` and ``verify``.

`find_node_dirs` finds the node directories below a path that a person typed: a checkpoint, a node's
directory, a run's directory (it holds nodes) or CKPT_DIR (it holds runs). The contents decide which, so
directories that were moved elsewhere are found too. A directory that cannot be read becomes a `FoundNodeDir`
with a problem, not an exception.

`list_checkpoints` gives each checkpoint an entry; one that cannot be read has its reason. It does not say
which one a job would resume from: that takes all nodes (`policy.resume_plan`). This module only reads.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from elastic_resume import constants
from elastic_resume.archive.address import Address
from elastic_resume.archive.entries import BadEntry
from elastic_resume.archive.location import CheckpointInArchive, FoundArchive, find_archive
from elastic_resume.checkpoint.catalog import (
    Catalog,
    CatalogEntry,
    choose_milestones,
    read_quarantine_reason,
)
from elastic_resume.checkpoint.reader import map_image, parse_checkpoint_name, quick_check
from elastic_resume.console import show_progress
from elastic_resume.errors import CheckpointError, ElasticResumeError, UsageError
from elastic_resume.milestone import Milestone
from elastic_resume.report.formatting import (
    format_bytes,
    format_count,
    format_seconds,
    format_table,
    wrap_text,
)

VALID, BAD, QUARANTINED = "valid", "bad", "quarantined"
_COLUMNS = ("node", "gen", "step", "world", "size", "age", "milestones", "valid")
_NODE_DIR_FILES = (
    constants.EVENTS_FILE,
    constants.GENERATION_FILE,
    constants.LOCK_FILE,
    constants.PROGRESS_FILE,
)
_MAX_CHILDREN = 10_000


@dataclass(frozen=True)
class FoundNodeDir:
    """One node's directory.

    ``run_id`` is the name of the run's directory above it; None if the node's own directory was given.
    """

    path: Path
    run_id: str | None
    node: str
    problem: str = ""


@dataclass(frozen=True)
class FoundPath:
    """What lies at a path: one checkpoint, or nodes. ``level`` is checkpoint, node, run or root."""

    path: Path
    level: str
    node_dirs: tuple[FoundNodeDir, ...]

    @property
    def run_ids(self) -> tuple[str, ...]:
        """The names of the runs, sorted."""
        return tuple(sorted({node_dir.run_id for node_dir in self.node_dirs if node_dir.run_id is not None}))


def find_checkpoints(place: Path | Address) -> FoundPath | FoundArchive:
    """Find the node directories at or below a path, or the runs at an address of an archive.

    Raises:
        UsageError: there is no such directory, it cannot be read, or no run is at the address.
        ArchiveError: the archive cannot be reached.
    """
    return find_archive(place) if isinstance(place, Address) else find_node_dirs(place)


def find_node_dirs(path_argument: Path) -> FoundPath:
    """Find the node directories at or below a path.

    Raises:
        UsageError: there is no such directory, or it cannot be read.
    """
    path = _resolve(path_argument)
    names = list_directory(path, path_argument)
    if parse_checkpoint_name(path.name) is not None or constants.MANIFEST_FILE in names:
        return FoundPath(path, "checkpoint", ())
    if _is_node_dir(path, names):
        return FoundPath(path, "node", (FoundNodeDir(path, None, path.name),))
    children = _list_children(path, names)
    nodes = _find_nodes(children, path.name)
    if any(not node.problem for node in nodes):
        return FoundPath(path, "run", nodes)
    node_dirs: list[FoundNodeDir] = []
    for child in children:
        inside = _list_names(child)
        if isinstance(inside, OSError):
            node_dirs.append(FoundNodeDir(child, None, child.name, _describe_problem(inside, child)))
        else:
            node_dirs += _find_nodes(_list_children(child, inside), child.name)
    return FoundPath(path, "root", tuple(node_dirs))


def list_directory(path: Path, path_argument: Path) -> list[str]:
    """Return the sorted names in ``path``.

    Raises:
        UsageError: there is no such directory, or it cannot be read. The text names ``path_argument``.
    """
    names = _list_names(path)
    if isinstance(names, PermissionError):
        raise UsageError(
            f"{path_argument}: cannot be read: {names.strerror}. Run this command as the user of the job."
        )
    if isinstance(names, OSError):
        reason = "is not a directory" if isinstance(names, NotADirectoryError) else names.strerror or names
        raise UsageError(
            f"{path_argument}: {reason}. Give a checkpoint, or the directory of a node, a run, or all runs."
        )
    return names


def _resolve(typed: Path) -> Path:
    try:
        return typed.expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, no home, an embedded null
        raise UsageError(f"{typed}: {error}.") from error


def _find_nodes(paths: Iterable[Path], run: str) -> tuple[FoundNodeDir, ...]:
    """Return the node directories of ``run`` among ``paths``."""
    nodes = []
    for path in paths:
        names = _list_names(path)
        if isinstance(names, OSError):
            nodes.append(FoundNodeDir(path, run, path.name, _describe_problem(names, path)))
        elif _is_node_dir(path, names):
            nodes.append(FoundNodeDir(path, run, path.name))
    return tuple(nodes)


def _is_node_dir(path: Path, names: list[str]) -> bool:
    if any(parse_checkpoint_name(name) is not None for name in names):
        return True
    if constants.QUARANTINE_DIR in names:
        inside = _list_names(path / constants.QUARANTINE_DIR)
        if not isinstance(inside, OSError) and any(name.endswith(".reason.json") for name in inside):
            return True
    # os.path.isfile is False for a file that may not be looked at; Path.is_file would raise
    return any(name in names and os.path.isfile(path / name) for name in _NODE_DIR_FILES)  # noqa: PTH113


def _list_children(path: Path, names: list[str]) -> list[Path]:
    """Return the directories in ``path`` whose names could be a run's or a node's."""
    found = []
    for name in names[:_MAX_CHILDREN]:
        child = path / name
        try:
            if re.fullmatch(constants.SAFE_NAME_PATTERN, name) and child.is_dir():
                found.append(child)
        except OSError:  # the directory may be listed but not entered
            continue
    return found


def _list_names(path: Path) -> list[str] | OSError:
    try:
        return sorted(os.listdir(path))  # noqa: PTH208  names only
    except OSError as error:
        return error


# ---- the list ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointEntry:
    """One checkpoint, or a directory that could not be read. ``state``: valid, bad or quarantined.

    ``run_id`` and ``node`` are directory names; ``written_at`` is in Unix seconds. None: unknown.
    """

    path: Path | Address
    run_id: str
    node: str
    state: str
    reason: str = ""
    generation: int | None = None
    step: int | None = None
    world_size: int | None = None
    bytes: int | None = None
    written_at: float | None = None
    milestones: tuple[Milestone, ...] = ()
    left_by: int | None = None  # the generation that went back behind it with `--resume-from`

    @property
    def is_archived(self) -> bool:
        """Whether it is in an archive, and not on its node's disk."""
        return isinstance(self.path, Address)


def list_checkpoints(found: FoundPath | FoundArchive, *, deep: bool = False) -> Iterator[CheckpointEntry]:
    """Yield every checkpoint, node by node, newest first, then the quarantined ones."""
    if isinstance(found, FoundArchive):
        for stored in found.list_checkpoints():
            yield _check_archived(stored, deep)
        return
    if found.level == "checkpoint":
        path = found.path
        entry = CatalogEntry(path, *(parse_checkpoint_name(path.name) or (0, 0)), None, None)
        yield _make_entry(_check(entry, None, deep=deep), path.parent.parent.name, path.parent.name)
    # Below CKPT_DIR, checkpoints of another run are bad, since a job that resumes there refuses them.
    # A directory that was copied elsewhere may be of any run.
    for node_dir in found.node_dirs:
        yield from _list_node(node_dir, deep)


def format_checkpoints(found: FoundPath | FoundArchive, now: float) -> str:
    """Format the table of `list_checkpoints`, with ``now`` in Unix seconds."""
    entries = list(list_checkpoints(found))
    if not entries:
        return f"{found.path}: no checkpoints here\n"
    runs = sorted({entry.run_id for entry in entries})
    lines = []
    for run in runs:
        rows = [_table_row(entry, now) for entry in entries if entry.run_id == run]
        lines += ["", f"run {run}"] if len(runs) > 1 or found.level == "root" else []
        columns = _COLUMNS if any(row[6] for row in rows) else (*_COLUMNS[:6], _COLUMNS[7])
        rows = rows if columns is _COLUMNS else [(*row[:6], row[7]) for row in rows]
        lines += format_table(columns, rows, right_aligned=(1, 2, 3, 4, 5), shrinkable=len(columns) - 1)
        shown = "\n".join(lines)
        for entry in entries:
            if entry.run_id == run and entry.state != VALID and entry.reason not in shown:
                lines += wrap_text(f"{entry.node}/{entry.path.name}: {entry.reason}")
    return "\n".join(lines).lstrip("\n") + "\n" + _summarize_quarantined(entries)


def _summarize_quarantined(entries: Sequence[CheckpointEntry]) -> str:
    """Describe the quarantined checkpoints, which only a person removes, in one line."""
    quarantined = [entry for entry in entries if entry.state == QUARANTINED]
    if not quarantined:
        return ""
    size = format_bytes(sum(entry.bytes or 0 for entry in quarantined))
    count = format_count(len(quarantined), "quarantined checkpoint")
    return f"{count}, {size}: kept for inspection; runs never remove them\n"


def _list_node(node_dir: FoundNodeDir, deep: bool) -> Iterator[CheckpointEntry]:
    run_id = node_dir.run_id if node_dir.run_id is not None else node_dir.path.parent.name
    if node_dir.problem:
        yield CheckpointEntry(node_dir.path, run_id, node_dir.node, BAD, node_dir.problem)
        return
    catalog = Catalog(node_dir.path, node_dir.run_id)
    reading = node_dir.path
    try:
        entries = catalog.list_entries()
        milestones = choose_milestones(entries)
        for entry in entries:
            checked = _check(entry, node_dir.run_id, deep=True) if deep and entry.error is None else entry
            found = _make_entry(checked, run_id, node_dir.node)
            yield replace(found, milestones=milestones.get(entry.path, ()))
        reading = node_dir.path / constants.QUARANTINE_DIR
        quarantined = catalog.list_quarantined()
    except (ElasticResumeError, OSError) as error:
        reason = _describe_problem(error, node_dir.path)
        yield CheckpointEntry(reading, run_id, node_dir.node, BAD, reason)
        return
    for path in quarantined:
        name = path.name.partition(".")[0]  # a second one is NAME.1
        generation, step = parse_checkpoint_name(name) or (None, None)
        yield CheckpointEntry(
            path=path,
            run_id=run_id,
            node=node_dir.node,
            state=QUARANTINED,
            reason=_describe_problem(read_quarantine_reason(path), node_dir.path / name),
            generation=generation,
            step=step,
            bytes=_directory_bytes(path),
            written_at=modified_at(path),
        )


def _check(entry: CatalogEntry, run_id: str | None, *, deep: bool) -> CatalogEntry:
    try:
        manifest = quick_check(entry.path, run_id)
        if deep:
            with show_progress(f"reading {entry.path.name}", manifest.file_bytes) as set_done:
                map_image(entry.path, manifest, set_done)
        return CatalogEntry(entry.path, *manifest.version, manifest, None)
    except CheckpointError as error:
        return replace(entry, manifest=None, error=error)


def _check_archived(stored: CheckpointInArchive, deep: bool) -> CheckpointEntry:
    run_id, place = stored.archive.run_id, stored.place
    try:
        manifest = stored.read_manifest()
        error: CheckpointError | None = None
        if deep:
            with show_progress(f"reading {place.name}", manifest.file_bytes) as set_done:
                stored.verify_image(manifest, set_done)
    except CheckpointError as caught:
        error = caught
        if isinstance(stored.entry, BadEntry):
            return CheckpointEntry(place, run_id, "-", BAD, str(error).rstrip("."))
    return CheckpointEntry(
        path=place,
        run_id=run_id,
        node=manifest.node,
        state=VALID if error is None else BAD,
        reason="" if error is None else str(error).rstrip("."),
        generation=manifest.generation,
        step=manifest.step,
        world_size=manifest.world_size,
        bytes=manifest.file_bytes,
        written_at=manifest.written_at,
        milestones=stored.milestones,
        left_by=stored.left_by,
    )


def _make_entry(entry: CatalogEntry, run_id: str, node: str) -> CheckpointEntry:
    manifest = entry.manifest
    return CheckpointEntry(
        path=entry.path,
        run_id=run_id,
        node=node,
        state=BAD if manifest is None else VALID,
        reason=_describe_problem(entry.error, entry.path) if manifest is None else "",
        generation=entry.generation,
        step=entry.step,
        world_size=manifest.world_size if manifest else None,
        bytes=manifest.file_bytes if manifest else _directory_bytes(entry.path),
        written_at=manifest.written_at if manifest else modified_at(entry.path),
    )


def _describe_problem(error: object, path: Path) -> str:
    """Return an error's text without the path, which stands beside it."""
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror or error}"
    return str(error).removeprefix(f"{path}: ").rstrip(".")


def _table_row(entry: CheckpointEntry, now: float) -> tuple[str, ...]:
    age_s = None if entry.written_at is None else max(0.0, now - entry.written_at)
    valid = "yes" if entry.left_by is None else f"left by g{entry.left_by}"
    state = {VALID: valid, BAD: f"NO: {entry.reason}", QUARANTINED: f"quarantined: {entry.reason}"}
    figures = (entry.generation, entry.step, entry.world_size)
    return (
        entry.node,
        *("-" if figure is None else str(figure) for figure in figures),
        format_bytes(entry.bytes),
        format_seconds(age_s),
        ", ".join(map(_format_milestone, entry.milestones)),
        state[entry.state],
    )


def _format_milestone(milestone: Milestone) -> str:
    return milestone.name if milestone.metric is None else f"{milestone.name} {milestone.metric:.6g}"


def _directory_bytes(path: Path) -> int | None:
    """Return the bytes of the regular files directly inside ``path``."""
    try:
        with os.scandir(path) as entries:
            stats = [entry.stat(follow_symlinks=False) for entry in entries]
    except OSError:
        return None
    return sum(status.st_size for status in stats if stat.S_ISREG(status.st_mode))


def modified_at(path: Path) -> float | None:
    """Return the time of the last change in Unix seconds; None if the file is gone."""
    try:
        return path.lstat().st_mtime
    except OSError:
        return None
