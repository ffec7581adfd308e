"""List, check and trace checkpoints: ``ls`` and ``verify``, and the table of checkpoints in a report.

`list_checkpoints` only reads. Each checkpoint gets an entry, and one that cannot be read has its reason.
It does not say which one a job would resume from: that takes all nodes (`policy.resume_plan`).

`build_saved_state_records` follows every snapshot and checkpoint through a run's events, by node, step
and tier. A snapshot is known only if a generation started from it. A checkpoint is known from its commit
until it was pruned, quarantined or lost with its disk. Entries found on disk override the events.
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

MEMORY, DISK = "memory", "disk"
COMMITTED, PRUNED, QUARANTINED, LOST = "committed", "pruned", "quarantined", "lost"
VALID, BAD, USED = "valid", "bad", "used"
_COLUMNS = ("node", "gen", "step", "world", "size", "age", "valid")


@dataclass(frozen=True)
class CheckpointEntry:
    """One checkpoint, or a directory that could not be read. ``state``: valid, bad or quarantined.

    ``run_id`` and ``node`` are directory names; ``written_at`` is in Unix seconds. None: unknown.
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
    """Yield every checkpoint, node by node, newest first, then the quarantined ones."""
    if found.level == "checkpoint":
        yield _inspect_checkpoint(found.path, deep)
    # Below CKPT_DIR, checkpoints of another run are bad, since a job that resumes there refuses them.
    # A directory that was copied elsewhere may be of any run.
    for node_dir in found.node_dirs:
        yield from _list_node(node_dir, deep)


def format_checkpoints(found: FoundPath, now: float) -> str:
    """Format the table of `list_checkpoints`, with ``now`` in Unix seconds."""
    entries = list(list_checkpoints(found))
    if not entries:
        return f"{found.path}: no checkpoints here\n" + _summarize_unfinished(found)
    runs = sorted({entry.run_id for entry in entries})
    lines = []
    for run in runs:
        rows = [_table_row(entry, now) for entry in entries if entry.run_id == run]
        lines += ["", f"run {run}"] if len(runs) > 1 or found.level == "root" else []
        lines += format_table(_COLUMNS, rows, right_aligned=(1, 2, 3, 4, 5), shrinkable=6)
        shown = "\n".join(lines)
        for entry in entries:
            if entry.run_id == run and entry.state == "bad" and entry.reason not in shown:
                lines += wrap_text(f"{entry.node}/{entry.path.name}: {entry.reason}")
    return (
        "\n".join(lines).lstrip("\n") + "\n" + _summarize_quarantined(entries) + _summarize_unfinished(found)
    )


def _summarize_quarantined(entries: Sequence[CheckpointEntry]) -> str:
    """Describe the quarantined checkpoints, which only a person removes, in one line."""
    quarantined = [entry for entry in entries if entry.state == "quarantined"]
    if not quarantined:
        return ""
    size = format_bytes(sum(entry.bytes or 0 for entry in quarantined))
    count = format_count(len(quarantined), "quarantined checkpoint")
    return f"{count}, {size}: kept for inspection; runs never remove them\n"


def _inspect_checkpoint(path: Path, deep: bool) -> CheckpointEntry:
    version = parse_checkpoint_name(path.name)
    try:
        manifest = (deep_check if deep else quick_check)(path, None)
        entry = CatalogEntry(path, *manifest.version, manifest, None)
    except CheckpointError as error:
        entry = CatalogEntry(path, *(version or (0, 0)), None, error)
    return _make_entry(entry, path.parent.parent.name, path.parent.name)


def _list_node(node_dir: NodeDir, deep: bool) -> Iterator[CheckpointEntry]:
    run_id = node_dir.run_id if node_dir.run_id is not None else node_dir.path.parent.name
    if node_dir.problem:
        yield CheckpointEntry(node_dir.path, run_id, node_dir.node, "bad", node_dir.problem)
        return
    catalog = Catalog(node_dir.path, node_dir.run_id)
    try:
        entries = catalog.list_entries()
    except (ElasticResumeError, OSError) as error:
        yield CheckpointEntry(
            node_dir.path, run_id, node_dir.node, "bad", _describe_problem(error, node_dir.path)
        )
        return
    for entry in entries:
        yield _make_entry(_check_deeply(entry, node_dir.run_id) if deep else entry, run_id, node_dir.node)
    try:
        quarantined = catalog.list_quarantined()
    except (ElasticResumeError, OSError) as error:
        yield CheckpointEntry(
            node_dir.path / constants.QUARANTINE_DIR,
            run_id,
            node_dir.node,
            "bad",
            _describe_problem(error, node_dir.path),
        )
        return
    for path in quarantined:
        name = path.name.partition(".")[0]  # a second one is NAME.1
        generation, step = parse_checkpoint_name(name) or (None, None)
        yield CheckpointEntry(
            path=path,
            run_id=run_id,
            node=node_dir.node,
            state="quarantined",
            reason=_describe_problem(read_quarantine_reason(path), node_dir.path / name),
            generation=generation,
            step=step,
            bytes=_directory_bytes(path),
            written_at=_modified_at(path),
        )


def _check_deeply(entry: CatalogEntry, run_id: str | None) -> CatalogEntry:
    if entry.error is not None:
        return entry
    try:
        return CatalogEntry(entry.path, *entry.version, deep_check(entry.path, run_id), None)
    except CheckpointError as error:
        return CatalogEntry(entry.path, *entry.version, None, error)


def _make_entry(entry: CatalogEntry, run_id: str, node: str) -> CheckpointEntry:
    manifest = entry.manifest
    if manifest is None:
        return CheckpointEntry(
            path=entry.path,
            run_id=run_id,
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
        run_id=run_id,
        node=node,
        state="valid",
        generation=entry.generation,
        step=entry.step,
        world_size=manifest.world_size,
        bytes=manifest.file_bytes,
        written_at=manifest.written_at,
    )


def _describe_problem(error: object, path: Path) -> str:
    """Return an error's text without the path, which stands beside it."""
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror or error}"
    return str(error).removeprefix(f"{path}: ").rstrip(".")


def _table_row(entry: CheckpointEntry, now: float) -> tuple[str, ...]:
    age_s = None if entry.written_at is None else max(0.0, now - entry.written_at)
    state = {"valid": "yes", "bad": f"NO: {entry.reason}", "quarantined": f"quarantined: {entry.reason}"}
    figures = (entry.generation, entry.step, entry.world_size)
    return (
        entry.node,
        *("-" if figure is None else str(figure) for figure in figures),
        format_bytes(entry.bytes),
        format_seconds(age_s),
        state[entry.state],
    )


def _directory_bytes(path: Path) -> int | None:
    """Return the bytes of the regular files directly inside ``path``."""
    try:
        with os.scandir(path) as entries:
            stats = [entry.stat(follow_symlinks=False) for entry in entries]
    except OSError:
        return None
    return sum(status.st_size for status in stats if stat.S_ISREG(status.st_mode))


def _modified_at(path: Path) -> float | None:
    try:
        return path.lstat().st_mtime
    except OSError:
        return None


def _summarize_unfinished(found: FoundPath) -> str:
    """Describe temporary directories in one line: commits in progress, or left by a crash."""
    count = 0
    for node_dir in found.node_dirs:
        try:
            names = os.listdir(node_dir.path)  # noqa: PTH208  names only
        except OSError:
            continue
        count += sum(name.startswith(constants.TEMPORARY_PREFIX) for name in names)
    if not count:
        return ""
    writes = format_count(count, "unfinished write")
    return f"{writes}: in progress, or left by a crash and removed at the next start\n"


@dataclass(frozen=True)
class SavedStateRecord:
    """One snapshot or checkpoint of one node.

    ``state``: committed (by the events), valid or bad (inspected on disk), pruned, quarantined, lost
    (with its disk), or used (a snapshot that a generation started from). ``verified``: a generation read
    its every byte. ``loaded_by`` are the generations that started from it. It existed from ``t`` to
    ``removed_t``.
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
    timeline: EventTimeline, history: RunHistory, entries: Sequence[CheckpointEntry] = ()
) -> tuple[SavedStateRecord, ...]:
    """Return all records by generation, step, node and tier; ``entries`` lie on disk now."""
    records: _Records = {}
    for item in timeline.select("commit", "prune", "quarantine"):
        if item.kind == "commit":
            _record_commit(records, item)
        else:
            _record_removal(records, item)
    _record_loads(records, timeline, history)
    _apply_disk_entries(records, entries, timeline.generation_offset)
    return tuple(
        sorted(
            records.values(), key=lambda record: (record.generation, record.step, record.node, record.tier)
        )
    )


_Records = dict[tuple[str, int, int, str], SavedStateRecord]


def _record_commit(records: _Records, event: ParsedEvent) -> None:
    if event.generation is None or event.step is None:
        return
    records[event.node, event.generation, event.step, DISK] = SavedStateRecord(
        event.node,
        event.generation,
        event.step,
        DISK,
        COMMITTED,
        verified=False,
        t=event.t,
        bytes=event.get_count("bytes"),
        commit_s=event.get_seconds("seconds"),
    )


def _record_removal(records: _Records, event: ParsedEvent) -> None:
    """Record a prune or a quarantine event."""
    version = parse_checkpoint_name(PurePath(event.get_text("path")).name.partition(".")[0])
    if version is None:
        return
    key = (event.node, *version, DISK)
    known = records.get(key, SavedStateRecord(event.node, *version, DISK, COMMITTED, verified=False))
    state = PRUNED if event.kind == "prune" else QUARANTINED
    records[key] = replace(known, state=state, removed_t=event.t, reason=event.get_text("reason"))


def _record_loads(records: _Records, timeline: EventTimeline, history: RunHistory) -> None:
    resumes = {event.generation: event for event in timeline.select("resume")}
    for row in history.generations:
        event = resumes.get(row.number)
        if event is None or not row.source_node or row.source_generation is None or row.start_step is None:
            continue
        tier = event.get_text("source_tier")
        if row.resume_kind != "checkpoint" or tier not in {MEMORY, DISK}:
            continue
        key = (row.source_node, row.source_generation, row.start_step, tier)
        record = SavedStateRecord(*key, USED if tier == MEMORY else COMMITTED, verified=True, t=event.t)
        known = records.get(key, record)
        records[key] = replace(known, verified=True, loaded_by=(*known.loaded_by, row.number))


def _apply_disk_entries(
    records: _Records, entries: Iterable[CheckpointEntry], generation_offset: int
) -> None:
    seen = set()
    inspected_nodes = set()
    for entry in entries:
        inspected_nodes.add(entry.node)
        if entry.generation is None or entry.step is None:
            continue
        key = (entry.node, entry.generation + generation_offset, entry.step, DISK)
        if key in seen and entry.state == QUARANTINED:  # a newer one has its name
            key = (*key[:3], f"{DISK}, {entry.path.name} quarantined")
        record = SavedStateRecord(
            *key[:3], DISK, COMMITTED, verified=False, t=entry.written_at, bytes=entry.bytes
        )
        known = records.get(key, record)
        records[key] = replace(
            known, state=entry.state, reason=entry.reason, bytes=known.bytes or entry.bytes
        )
        seen.add(key)
    for key, record in records.items():
        if (
            record.node in inspected_nodes
            and record.tier == DISK
            and record.state == COMMITTED
            and key not in seen
        ):
            records[key] = replace(record, state=LOST, reason="no longer on disk")
