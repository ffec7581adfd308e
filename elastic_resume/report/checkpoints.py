"""What lies on disk: `ls` and `verify`.

Promise: only reads. Whatever a directory holds, each checkpoint in it gets a line, and what cannot be read
is told with its reason. Does not know which copy a job would resume from: that takes all nodes
(`policy/source.py`).

The ledger of checkpoints: every copy that the run's events tell of, by node, step and tier.

A copy in memory is known only where a generation began with it; one on disk from its commit to the moment
when it was pruned, set aside, or lost with its node's disk. What lies on disk now, where somebody has looked
(`checkpoints.Item`), wins over what events say. Pure.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from elastic_resume import constants
from elastic_resume.checkpoint.catalog import Catalog, CatalogEntry, read_quarantine_reason
from elastic_resume.checkpoint.reader import deep_check, parse_checkpoint_name, quick_check
from elastic_resume.errors import CheckpointError, ElasticResumeError
from elastic_resume.report.event_log import EventTimeline, ParsedEvent
from elastic_resume.report.formatting import (
    format_bytes,
    format_count,
    format_seconds,
    format_table,
    wrap_text,
)
from elastic_resume.report.incidents import RunHistory
from elastic_resume.report.paths import FoundPath, NodeDir

_COLUMNS = ("node", "gen", "step", "world", "size", "age", "valid")


@dataclass(frozen=True)
class CheckpointEntry:
    """One checkpoint, or one thing that keeps from seeing it. ``state``: valid, bad or quarantined.

    ``run`` and ``node`` are directories' names, ``written_at`` is in Unix seconds. None: not known.
    """

    path: Path
    run_id: str
    node: str
    state: str
    reason: str = ""
    generation: int | None = None
    step: int | None = None
    world_size: int | None = None
    bytes: int | None = None
    written_at: float | None = None


def list_checkpoints(found: FoundPath, *, deep: bool = False) -> Iterator[CheckpointEntry]:
    """Every checkpoint at the place that was found, node by node, newest first, then what is quarantined."""
    if found.level == "checkpoint":
        yield _inspect_checkpoint(found.path, deep)
    # Only a root or a run's own directory says of which run its checkpoints must be: a job that resumes
    # there refuses others. What was copied elsewhere may be of any run.
    for place in found.node_dirs:
        yield from _list_node(place, deep)


def format_checkpoints(found: FoundPath, now: float) -> str:
    """The table of `items`, with ``now`` in Unix seconds."""
    listed = list(list_checkpoints(found))
    if not listed:
        return f"{found.path}: no checkpoints here\n" + _summarize_unfinished(found)
    runs = sorted({item.run_id for item in listed})
    lines = []
    for run in runs:
        rows = [_table_row(item, now) for item in listed if item.run_id == run]
        lines += ["", f"run {run}"] if len(runs) > 1 or found.level == "root" else []
        lines += format_table(_COLUMNS, rows, right_aligned=(1, 2, 3, 4, 5), shrinkable=6)
        shown = "\n".join(lines)
        for item in listed:
            if item.run_id == run and item.state == "bad" and item.reason not in shown:
                lines += wrap_text(f"{item.node}/{item.path.name}: {item.reason}")
    return (
        "\n".join(lines).lstrip("\n") + "\n" + _summarize_quarantined(listed) + _summarize_unfinished(found)
    )


def _summarize_quarantined(listed: Sequence[CheckpointEntry]) -> str:
    """One line on what only a person may remove."""
    aside = [item for item in listed if item.state == "quarantined"]
    if not aside:
        return ""
    room = format_bytes(sum(item.bytes or 0 for item in aside))
    which = format_count(len(aside), "quarantined copy", "quarantined copies")
    return f"{which}, {room}: kept for you to look at, and never removed by a run\n"


def _inspect_checkpoint(path: Path, deep: bool) -> CheckpointEntry:
    name = parse_checkpoint_name(path.name)
    try:
        manifest = (deep_check if deep else quick_check)(path, None)
        entry = CatalogEntry(path, *manifest.version, manifest, None)
    except CheckpointError as error:
        entry = CatalogEntry(path, *(name or (0, 0)), None, error)
    return _make_entry(entry, path.parent.parent.name, path.parent.name)


def _list_node(place: NodeDir, deep: bool) -> Iterator[CheckpointEntry]:
    run = place.run_id if place.run_id is not None else place.path.parent.name
    if place.problem:
        yield CheckpointEntry(place.path, run, place.node, "bad", place.problem)
        return
    catalog = Catalog(place.path, place.run_id)
    try:
        # One at a time, so that a deep check shows each result when it is there.
        entries = catalog.list_entries()
    except (ElasticResumeError, OSError) as error:
        yield CheckpointEntry(place.path, run, place.node, "bad", _describe_problem(error, place.path))
        return
    for entry in entries:
        yield _make_entry(_check_deeply(entry, place.run_id) if deep else entry, run, place.node)
    try:
        aside = catalog.list_quarantined()
    except (ElasticResumeError, OSError) as error:
        yield CheckpointEntry(
            place.path / constants.QUARANTINE_DIR,
            run,
            place.node,
            "bad",
            _describe_problem(error, place.path),
        )
        return
    for path in aside:
        name = path.name.partition(".")[0]  # a second one of the same name is NAME.1
        generation, step = parse_checkpoint_name(name) or (None, None)
        yield CheckpointEntry(
            path=path,
            run_id=run,
            node=place.node,
            state="quarantined",
            reason=_describe_problem(read_quarantine_reason(path), place.path / name),
            generation=generation,
            step=step,
            bytes=_directory_bytes(path),
            written_at=_modified_at(path),
        )


def _check_deeply(entry: CatalogEntry, run: str | None) -> CatalogEntry:
    if entry.error is not None:
        return entry
    try:
        return CatalogEntry(entry.path, *entry.version, deep_check(entry.path, run), None)
    except CheckpointError as error:
        return CatalogEntry(entry.path, *entry.version, None, error)


def _make_entry(entry: CatalogEntry, run: str, node: str) -> CheckpointEntry:
    manifest = entry.manifest
    if manifest is None:
        return CheckpointEntry(
            path=entry.path,
            run_id=run,
            node=node,
            state="bad",
            reason=_describe_problem(entry.error, entry.path),
            generation=entry.generation,
            step=entry.step,
            bytes=_directory_bytes(entry.path),
            written_at=_modified_at(entry.path),
        )
    return CheckpointEntry(
        path=entry.path,
        run_id=run,
        node=node,
        state="valid",
        generation=entry.generation,
        step=entry.step,
        world_size=manifest.world_size,
        bytes=manifest.file_bytes,
        written_at=manifest.written_at,
    )


def _describe_problem(error: object, path: Path) -> str:
    """An error's text without the path that stands beside it anyway."""
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror or error}"
    return str(error).removeprefix(f"{path}: ").rstrip(".")


def _table_row(item: CheckpointEntry, now: float) -> tuple[str, ...]:
    age = None if item.written_at is None else max(0.0, now - item.written_at)
    state = {"valid": "yes", "bad": f"NO: {item.reason}", "quarantined": f"quarantined: {item.reason}"}
    figures = (item.generation, item.step, item.world_size)
    return (
        item.node,
        *("-" if figure is None else str(figure) for figure in figures),
        format_bytes(item.bytes),
        format_seconds(age),
        state[item.state],
    )


def _directory_bytes(path: Path) -> int | None:
    """Bytes of the regular files right inside ``path``."""
    try:
        with os.scandir(path) as entries:
            stats = [entry.stat(follow_symlinks=False) for entry in entries]
    except OSError:
        return None
    return sum(one.st_size for one in stats if stat.S_ISREG(one.st_mode))


def _modified_at(path: Path) -> float | None:
    try:
        return path.lstat().st_mtime
    except OSError:
        return None


def _summarize_unfinished(found: FoundPath) -> str:
    """One line on what is being written, or was left by a crash."""
    count = 0
    for place in found.node_dirs:
        try:
            names = os.listdir(place.path)  # noqa: PTH208  names only
        except OSError:
            continue
        count += sum(name.startswith(constants.TEMPORARY_PREFIX) for name in names)
    if not count:
        return ""
    return f"{format_count(count, 'unfinished write')}: in progress, or left by a crash and swept at the next start\n"


MEMORY, DISK = "memory", "disk"
COMMITTED, PRUNED, QUARANTINED, LOST, VALID, BAD, USED = (
    "committed",
    "pruned",
    "quarantined",
    "lost",
    "valid",
    "bad",
    "used",
)


@dataclass(frozen=True)
class SavedStateRecord:
    """One copy of the state.

    ``state``: committed (as events tell; nobody has looked), valid or bad (somebody has), pruned,
    quarantined, lost (with its node's disk), or used (a snapshot in memory that a generation began with).
    ``verified``: a generation read its every byte, or has made it from verified ones. ``loaded_by`` are the
    generations that began with it. ``t``: when it was there; ``gone``: when not any more.
    """

    node: str
    generation: int
    step: int
    tier: str
    state: str
    verified: bool
    loaded_by: tuple[int, ...] = ()
    t: float | None = None
    removed_t: float | None = None
    bytes: int | None = None
    commit_s: float | None = None
    reason: str = ""


def build_saved_state_records(
    timeline: EventTimeline, report: RunHistory, entries: Sequence[CheckpointEntry] = ()
) -> tuple[SavedStateRecord, ...]:
    """All copies, by generation, step, node and tier. ``items``: what lies on disk now."""
    copies: dict[tuple[str, int, int, str], SavedStateRecord] = {}
    for one in timeline.select("commit", "prune", "quarantine"):
        if one.kind == "commit":
            _record_commit(copies, one)
        else:
            _record_removal(copies, one)
    _record_loads(copies, timeline, report)
    offset = timeline.generation_offset
    _apply_disk_entries(
        copies,
        [one if one.generation is None else replace(one, generation=one.generation + offset) for one in entries],
    )
    return tuple(sorted(copies.values(), key=lambda copy: (copy.generation, copy.step, copy.node, copy.tier)))


def _record_commit(copies: dict[tuple[str, int, int, str], SavedStateRecord], one: ParsedEvent) -> None:
    if one.generation is None or one.step is None:
        return
    copies[one.node, one.generation, one.step, DISK] = SavedStateRecord(
        one.node,
        one.generation,
        one.step,
        DISK,
        COMMITTED,
        verified=False,
        t=one.t,
        bytes=one.get_count("bytes"),
        commit_s=one.get_seconds("seconds"),
    )


def _record_removal(copies: dict[tuple[str, int, int, str], SavedStateRecord], one: ParsedEvent) -> None:
    """Pruned, or set aside; a second one of the same name in quarantine is NAME.1."""
    order = parse_checkpoint_name(PurePath(one.get_text("path")).name.partition(".")[0])
    if order is None:
        return
    key = (one.node, *order, DISK)
    known = copies.get(key, SavedStateRecord(one.node, *order, DISK, COMMITTED, verified=False))
    state = PRUNED if one.kind == "prune" else QUARANTINED
    copies[key] = replace(known, state=state, removed_t=one.t, reason=one.get_text("reason"))


def _record_loads(
    copies: dict[tuple[str, int, int, str], SavedStateRecord], timeline: EventTimeline, report: RunHistory
) -> None:
    resumes = {one.generation: one for one in timeline.select("resume")}
    for row in report.generations:
        one = resumes.get(row.number)
        if one is None or not row.source_node or row.source_generation is None or row.start_step is None:
            continue
        tier = one.get_text("source_tier")
        if row.resume_kind != "checkpoint" or tier not in {MEMORY, DISK}:
            continue
        key = (row.source_node, row.source_generation, row.start_step, tier)
        made = SavedStateRecord(*key, USED if tier == MEMORY else COMMITTED, verified=True, t=one.t)
        known = copies.get(key, made)
        copies[key] = replace(known, verified=True, loaded_by=(*known.loaded_by, row.number))


def _apply_disk_entries(
    copies: dict[tuple[str, int, int, str], SavedStateRecord], entries: Iterable[CheckpointEntry]
) -> None:
    seen = set()
    looked = set()
    for item in entries:
        looked.add(item.node)
        if item.generation is None or item.step is None:
            continue
        key = (item.node, item.generation, item.step, DISK)
        if key in seen and item.state == QUARANTINED:  # what has taken its place is there
            key = (*key[:3], f"{DISK}, {item.path.name} set aside")
        made = SavedStateRecord(
            *key[:3], DISK, COMMITTED, verified=False, t=item.written_at, bytes=item.bytes
        )
        known = copies.get(key, made)
        copies[key] = replace(known, state=item.state, reason=item.reason, bytes=known.bytes or item.bytes)
        seen.add(key)
    for key, copy in copies.items():
        if copy.node in looked and copy.tier == DISK and copy.state == COMMITTED and key not in seen:
            copies[key] = replace(copy, state=LOST, reason="it is not on the disk any more")
