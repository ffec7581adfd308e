"""Load the events, checkpoints and stacks of one run from the paths that a person typed.

The logs of a run's nodes may lie in several places: a shared disk, and copies of the nodes' own disks.
Identical lines are one event. Directories may have any name, since the logs hold the names of the run and its
nodes. This module only reads, and follows no link to a file of stacks. A file that cannot be read becomes a
problem with its reason; the rest is loaded.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from elastic_resume import constants, events
from elastic_resume.errors import UsageError
from elastic_resume.events import Event
from elastic_resume.mechanisms.mechanism import Chart
from elastic_resume.mechanisms.registry import CHART_LOADERS
from elastic_resume.report import checkpoints
from elastic_resume.report.checkpoints import CheckpointEntry, FoundNodeDir, FoundPath

MAX_STACK_FILES = 50  # the newest are read
MAX_STACKS_BYTES = 256 * 1024


@dataclass
class LoadedRun:
    """What was loaded. ``stacks`` are texts by NODE/FILE, ``charts`` those of mechanisms."""

    events: list[Event] = field(default_factory=list)
    checkpoints: list[CheckpointEntry] = field(default_factory=list)
    stacks: dict[str, str] = field(default_factory=dict)
    charts: list[Chart] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def load_run(paths: Sequence[Path]) -> LoadedRun:
    """Load the run at ``paths``: directories of a run or of its nodes, or a CKPT_DIR with one run.

    Raises:
        UsageError: there are no events, or they are of several runs.
    """
    loaded = LoadedRun()
    found = {node_dir.path: node_dir for path in paths for node_dir in _find_node_dirs(path)}
    run_id, node_names = _load_events(
        dict.fromkeys(log for path in found for log in _find_logs(path)), loaded
    )
    node_dirs = tuple(
        replace(
            node_dir,
            run_id=node_dir.run_id if run_id is None else run_id,
            node=node_names.get(node_dir.path, node_dir.node),
        )
        for node_dir in found.values()
    )
    _load_stacks(node_dirs, loaded)
    loaded.charts = [chart for load in CHART_LOADERS for chart in load([each.path for each in node_dirs])]
    loaded.checkpoints = list(checkpoints.list_checkpoints(FoundPath(Path(), "run", node_dirs)))
    unread = [entry for entry in loaded.checkpoints if entry.generation is None and entry.state == "bad"]
    loaded.problems += [f"{entry.path}: left out: {entry.reason}" for entry in unread]
    return loaded


def _find_node_dirs(path: Path) -> tuple[FoundNodeDir, ...]:
    """Return the node directories of the one run at ``path``."""
    node_dirs = checkpoints.find_node_dirs(path).node_dirs
    changed: dict[str, float] = {}  # the time of the last event, by run
    for node_dir in node_dirs:
        run = node_dir.path.parent.name
        times = [checkpoints.modified_at(log) or 0.0 for log in _find_logs(node_dir.path)]
        if times:
            changed[run] = max([*times, changed.get(run, 0.0)])
    runs = sorted(changed, key=lambda run: (-changed[run], run))
    if len(runs) > 1:
        names = ", ".join(runs[:20])
        raise UsageError(f"{path}: holds {len(runs)} runs; give one of them, newest first: {names}.")
    if not runs:
        unread = [f"{node_dir.path}: {node_dir.problem}" for node_dir in node_dirs if node_dir.problem]
        if unread:
            raise UsageError(f"{unread[0]}. Run this command as the user of the job.")
        raise UsageError(f"{path}: no events of a run here; give CKPT_DIR/RUN_ID.")
    return node_dirs


def _find_logs(node_dir: Path) -> list[Path]:
    """Return the event file of a node, and the one beside its directory."""
    paths = [node_dir / constants.EVENTS_FILE, node_dir.parent / constants.FAULTS_FILE]
    return [path for path in paths if os.path.isfile(path)]  # noqa: PTH113 - Path.is_file may raise


def _load_events(logs: Iterable[Path], loaded: LoadedRun) -> tuple[str | None, dict[Path, str]]:
    """Load each event once.

    Return the names of the run and of its nodes by directory, as the logs give them.
    """
    runs: dict[str, Path] = {}
    nodes: dict[Path, str] = {}
    seen: set[str] = set()
    for log in logs:
        try:
            for event in events.read(log):
                line = repr(event)
                if line in seen:
                    continue
                seen.add(line)
                loaded.events.append(event)
                run, node = event.get("run_id"), event.get("node")
                if event["event"] == "agent-start" and isinstance(run, str):
                    runs.setdefault(run, log)
                if log.name == constants.EVENTS_FILE and isinstance(node, str) and node:
                    nodes.setdefault(log.parent, node)
        except (OSError, RecursionError) as error:
            loaded.problems.append(f"{log}: left out: {error}")
    if len(runs) > 1:
        named_runs = "; ".join(f"{run!r} ({log})" for run, log in list(runs.items())[:20])
        raise UsageError(f"events of {len(runs)} runs: {named_runs}. Give those of one run.")
    return next(iter(runs), None), nodes


def _load_stacks(node_dirs: Iterable[FoundNodeDir], loaded: LoadedRun) -> None:
    files = [
        (path, node_dir.node)
        for node_dir in node_dirs
        for path in node_dir.path.glob(f"{constants.STACKS_DIR}/*.txt")
    ]
    files.sort(key=lambda item: checkpoints.modified_at(item[0]) or 0.0)
    for path, node in files[-MAX_STACK_FILES:]:
        try:
            text = _read_stack_file(path)
        except OSError as error:
            loaded.problems.append(f"{path}: left out: {error.strerror or error}")
            continue
        loaded.stacks[f"{node}/{path.name}"] = text.decode(errors="replace")


def _read_stack_file(path: Path) -> bytes:
    """Read a file of stacks, unless it is a link: pages are shared, and a link may point at any file."""
    if path.parent.is_symlink() or not stat.S_ISREG(path.lstat().st_mode):
        raise OSError("not a regular file")
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        return file.read(MAX_STACKS_BYTES)
