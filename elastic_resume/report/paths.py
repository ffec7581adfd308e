"""Find the node directories below a path that a person typed.

The path may be a checkpoint, a node's directory, a run's directory (it holds nodes) or CKPT_DIR (it holds
runs). The contents decide which, so directories that were moved elsewhere are found too. This module only
reads. A directory that cannot be read becomes a `NodeDir` with a problem, not an exception.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from elastic_resume import constants
from elastic_resume.checkpoint.reader import parse_checkpoint_name
from elastic_resume.errors import UsageError

_NODE_DIR_FILES = (
    constants.EVENTS_FILE,
    constants.GENERATION_FILE,
    constants.LOCK_FILE,
    constants.PROGRESS_FILE,
)
_MAX_CHILDREN = 10_000


@dataclass(frozen=True)
class NodeDir:
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
    node_dirs: tuple[NodeDir, ...]

    @property
    def run_ids(self) -> tuple[str, ...]:
        """The names of the runs, sorted."""
        return tuple(sorted({node_dir.run_id for node_dir in self.node_dirs if node_dir.run_id is not None}))


def find_node_dirs(path_argument: Path) -> FoundPath:
    """Find the node directories at or below a path.

    Raises:
        UsageError: there is no such directory, or it cannot be read.
    """
    path = _resolve(path_argument)
    names = _list_names(path)
    if isinstance(names, OSError):
        reason = "is not a directory" if path.exists() else names.strerror or str(names)
        raise UsageError(
            f"{path_argument}: {reason}. Give a checkpoint, or the directory of a node, a run, or all runs."
        )
    if parse_checkpoint_name(path.name) is not None or constants.MANIFEST_FILE in names:
        return FoundPath(path, "checkpoint", ())
    if _is_node_dir(path, names):
        return FoundPath(path, "node", (NodeDir(path, None, path.name),))
    children = _list_children(path, names)
    nodes = tuple(node_dir for child in children if (node_dir := _as_node_dir(child, path.name)) is not None)
    if any(not node.problem for node in nodes):
        return FoundPath(path, "run", nodes)
    node_dirs: list[NodeDir] = []
    for child in children:
        names_inside = _list_names(child)
        if isinstance(names_inside, OSError):
            node_dirs.append(NodeDir(child, None, child.name, _describe_error(names_inside)))
            continue
        candidates = _list_children(child, names_inside)
        node_dirs += [
            node_dir
            for grandchild in candidates
            if (node_dir := _as_node_dir(grandchild, child.name)) is not None
        ]
    return FoundPath(path, "root", tuple(node_dirs))


def _resolve(typed: Path) -> Path:
    try:
        return typed.expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, no home, an embedded null
        raise UsageError(f"{typed}: {error}.") from error


def _as_node_dir(path: Path, run: str) -> NodeDir | None:
    """Return ``path`` as a node directory of ``run``; None if it is none."""
    names = _list_names(path)
    if isinstance(names, OSError):
        return NodeDir(path, run, path.name, _describe_error(names))
    return NodeDir(path, run, path.name) if _is_node_dir(path, names) else None


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


def _describe_error(error: OSError) -> str:
    return f"cannot be read: {error.strerror or error}"
