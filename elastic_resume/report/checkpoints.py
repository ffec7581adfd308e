"""What lies on disk: `ls` and `verify`.

Promise: only reads. Whatever a directory holds, each checkpoint in it gets a line, and what cannot be read
is told with its reason. Does not know which copy a job would resume from: that takes all nodes
(`policy/source.py`).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from elastic_resume import contract
from elastic_resume.errors import CheckpointError, ElasticResumeError
from elastic_resume.report.places import Found, Place
from elastic_resume.report.text import amount, seconds, size, table, wrap
from elastic_resume.store import quarantine
from elastic_resume.store.catalog import Catalog, Entry
from elastic_resume.store.checkpoint import deep_check, parse_name, quick_check

_HEAD = ("node", "gen", "step", "world", "size", "age", "valid")


@dataclass(frozen=True)
class Item:
    """One checkpoint, or one thing that keeps from seeing it. ``state``: valid, bad or quarantined.

    ``run`` and ``node`` are directories' names, ``written_at`` is in Unix seconds. None: not known.
    """

    path: Path
    run: str
    node: str
    state: str
    reason: str = ""
    generation: int | None = None
    step: int | None = None
    world_size: int | None = None
    bytes: int | None = None
    written_at: float | None = None


def items(found: Found, *, deep: bool = False) -> Iterator[Item]:
    """Every checkpoint at the place that was found, node by node, newest first, then what is quarantined."""
    if found.level == "checkpoint":
        yield _alone(found.path, deep)
    # Only a root or a run's own directory says of which run its checkpoints must be: a job that resumes
    # there refuses others. What was copied elsewhere may be of any run.
    for place in found.places:
        yield from _of_node(place, deep)


def ls(found: Found, now: float) -> str:
    """The table of `items`, with ``now`` in Unix seconds."""
    listed = list(items(found))
    if not listed:
        return f"{found.path}: no checkpoints here\n" + _unfinished(found)
    runs = sorted({item.run for item in listed})
    lines = []
    for run in runs:
        rows = [_row(item, now) for item in listed if item.run == run]
        lines += ["", f"run {run}"] if len(runs) > 1 or found.level == "root" else []
        lines += table(_HEAD, rows, right=(1, 2, 3, 4, 5), elastic=6)
        shown = "\n".join(lines)
        for item in listed:
            if item.run == run and item.state == "bad" and item.reason not in shown:
                lines += wrap(f"{item.node}/{item.path.name}: {item.reason}")
    return "\n".join(lines).lstrip("\n") + "\n" + _unfinished(found)


def _alone(path: Path, deep: bool) -> Item:
    name = parse_name(path.name)
    try:
        manifest = (deep_check if deep else quick_check)(path, None)
        entry = Entry(path, *manifest.order, manifest, None)
    except CheckpointError as error:
        entry = Entry(path, *(name or (0, 0)), None, error)
    return _item(entry, path.parent.parent.name, path.parent.name)


def _of_node(place: Place, deep: bool) -> Iterator[Item]:
    run = place.run if place.run is not None else place.path.parent.name
    if place.problem:
        yield Item(place.path, run, place.node, "bad", place.problem)
        return
    catalog = Catalog(place.path, place.run)
    try:
        # One at a time, so that a deep check shows each result when it is there.
        entries = catalog.entries()
    except (ElasticResumeError, OSError) as error:
        yield Item(place.path, run, place.node, "bad", _reason(error, place.path))
        return
    for entry in entries:
        yield _item(_deepened(entry, place.run) if deep else entry, run, place.node)
    try:
        aside = catalog.quarantined()
    except OSError as error:
        yield Item(place.path / contract.QUARANTINE_DIR, run, place.node, "bad", _reason(error, place.path))
        return
    for path in aside:
        name = path.name.partition(".")[0]  # a second one of the same name is NAME.1
        generation, step = parse_name(name) or (None, None)
        yield Item(
            path=path,
            run=run,
            node=place.node,
            state="quarantined",
            reason=_reason(quarantine.reason_of(path), place.path / name),
            generation=generation,
            step=step,
            bytes=_bytes(path),
            written_at=_changed(path),
        )


def _deepened(entry: Entry, run: str | None) -> Entry:
    if entry.problem is not None:
        return entry
    try:
        return Entry(entry.path, *entry.order, deep_check(entry.path, run), None)
    except CheckpointError as error:
        return Entry(entry.path, *entry.order, None, error)


def _item(entry: Entry, run: str, node: str) -> Item:
    manifest = entry.manifest
    if manifest is None:
        return Item(
            path=entry.path,
            run=run,
            node=node,
            state="bad",
            reason=_reason(entry.problem, entry.path),
            generation=entry.generation,
            step=entry.step,
            bytes=_bytes(entry.path),
            written_at=_changed(entry.path),
        )
    return Item(
        path=entry.path,
        run=run,
        node=node,
        state="valid",
        generation=entry.generation,
        step=entry.step,
        world_size=manifest.world_size,
        bytes=manifest.file_bytes,
        written_at=manifest.written_at,
    )


def _reason(error: object, path: Path) -> str:
    """An error's text without the path that stands beside it anyway."""
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror or error}"
    return str(error).removeprefix(f"{path}: ").rstrip(".")


def _row(item: Item, now: float) -> tuple[str, ...]:
    age = None if item.written_at is None else max(0.0, now - item.written_at)
    state = {"valid": "yes", "bad": f"NO: {item.reason}", "quarantined": f"quarantined: {item.reason}"}
    figures = (item.generation, item.step, item.world_size)
    return (
        item.node,
        *("-" if figure is None else str(figure) for figure in figures),
        size(item.bytes),
        seconds(age),
        state[item.state],
    )


def _bytes(path: Path) -> int | None:
    """Bytes of the regular files right inside ``path``."""
    try:
        with os.scandir(path) as entries:
            stats = [entry.stat(follow_symlinks=False) for entry in entries]
    except OSError:
        return None
    return sum(one.st_size for one in stats if stat.S_ISREG(one.st_mode))


def _changed(path: Path) -> float | None:
    try:
        return path.lstat().st_mtime
    except OSError:
        return None


def _unfinished(found: Found) -> str:
    """One line on what is being written, or was left by a crash."""
    count = 0
    for place in found.places:
        try:
            names = os.listdir(place.path)  # noqa: PTH208  names only
        except OSError:
            continue
        count += sum(name.startswith(contract.TEMPORARY_PREFIX) for name in names)
    if not count:
        return ""
    return (
        f"{amount(count, 'unfinished write')}: in progress, or left by a crash and swept at the next start\n"
    )
