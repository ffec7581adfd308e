"""From a path that a person typed to the nodes whose directories lie there.

A path may be a checkpoint, a node's directory, a run's (nodes in it) or the root of all checkpoints (runs in
it); which one is told by what is inside, so copies that were moved elsewhere are found too.

Promise: only looks; an entry that cannot be read is a `Place` with a problem, never an exception.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from elastic_resume import constants
from elastic_resume.checkpoint.reader import parse_name
from elastic_resume.errors import UsageError

_MARKS = (constants.EVENTS_FILE, constants.GENERATION_FILE, constants.LOCK_FILE, constants.BOARD_FILE)
_MAX_CHILDREN = 10_000


@dataclass(frozen=True)
class Place:
    """One node's directory. ``run`` is None where no directory above it was asked for by its run's name."""

    path: Path
    run: str | None
    node: str
    problem: str = ""


@dataclass(frozen=True)
class Found:
    """What lies at a path: one checkpoint, or nodes. ``level`` is checkpoint, node, run or root."""

    path: Path
    level: str
    places: tuple[Place, ...]

    @property
    def runs(self) -> tuple[str, ...]:
        """Names of the runs seen, sorted."""
        return tuple(sorted({place.run for place in self.places if place.run is not None}))


def find(typed: Path) -> Found:
    """Look what ``typed`` is.

    Raises:
        UsageError: there is no such directory, or it cannot be read.

    """
    path = _resolved(typed)
    names = _names(path)
    if isinstance(names, OSError):
        reason = "is not a directory" if path.exists() else names.strerror or str(names)
        raise UsageError(
            f"{typed}: {reason}. Give a checkpoint, or the directory of a node, a run, or all runs."
        )
    if parse_name(path.name) is not None or constants.MANIFEST_FILE in names:
        return Found(path, "checkpoint", ())
    if _is_node(path, names):
        return Found(path, "node", (Place(path, None, path.name),))
    children = _children(path, names)
    nodes = tuple(place for child in children if (place := _as_node(child, path.name)) is not None)
    if any(not node.problem for node in nodes):
        return Found(path, "run", nodes)
    deeper: list[Place] = []
    for child in children:
        inside = _names(child)
        if isinstance(inside, OSError):
            deeper.append(Place(child, None, child.name, _why(inside)))
            continue
        candidates = _children(child, inside)
        deeper += [place for one in candidates if (place := _as_node(one, child.name)) is not None]
    return Found(path, "root", tuple(deeper))


def _resolved(typed: Path) -> Path:
    try:
        return typed.expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, no home, an embedded null
        raise UsageError(f"{typed}: {error}.") from error


def _as_node(path: Path, run: str) -> Place | None:
    """``path`` as a node of ``run``; None when it is a directory of something else."""
    names = _names(path)
    if isinstance(names, OSError):
        return Place(path, run, path.name, _why(names))
    return Place(path, run, path.name) if _is_node(path, names) else None


def _is_node(path: Path, names: list[str]) -> bool:
    if any(parse_name(name) is not None for name in names):
        return True
    if constants.QUARANTINE_DIR in names:
        inside = _names(path / constants.QUARANTINE_DIR)
        if not isinstance(inside, OSError) and any(name.endswith(".reason.json") for name in inside):
            return True
    return any(name in names and not (path / name).is_dir() for name in _MARKS if _may_look(path / name))


def _may_look(path: Path) -> bool:
    try:
        path.lstat()
    except OSError:
        return False
    return True


def _children(path: Path, names: list[str]) -> list[Path]:
    """The directories in ``path`` whose names could be a run's or a node's."""
    found = []
    for name in names[:_MAX_CHILDREN]:
        child = path / name
        try:
            if re.fullmatch(constants.SAFE_NAME_PATTERN, name) and child.is_dir():
                found.append(child)
        except OSError:  # the directory may be listed but not entered
            continue
    return found


def _names(path: Path) -> list[str] | OSError:
    try:
        return sorted(os.listdir(path))  # noqa: PTH208  names only
    except OSError as error:
        return error


def _why(error: OSError) -> str:
    return f"cannot be read: {error.strerror or error}"
