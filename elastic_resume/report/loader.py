"""Load the events, checkpoints and hang reports of one run from the paths that a person typed.

The logs of a run's nodes may lie in several places: a shared disk, copies of the nodes' own disks, and
lines that a leader kept of other nodes (`constants.PEER_EVENTS_FILE`). Identical lines are one event.
Directories may have any name, since the logs hold the names of the run and its nodes. This module only
reads, and follows no link to a hang report. A file that cannot be read becomes a problem with its reason;
the rest is loaded.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from elastic_resume import constants, events
from elastic_resume.errors import ElasticResumeError, UsageError
from elastic_resume.events import Event
from elastic_resume.report import checkpoints
from elastic_resume.report.checkpoints import CheckpointEntry
from elastic_resume.report.paths import FoundPath, find_node_dirs

MAX_STACK_FILES = 50  # the newest hang reports are read
MAX_STACKS_BYTES = 256 * 1024
_LOG_FILES = (constants.EVENTS_FILE, constants.PEER_EVENTS_FILE)


@dataclass
class _LogNames:
    """The names of runs and nodes as the logs give them."""

    runs: dict[str, Path] = field(default_factory=dict)  # each with one of its logs
    nodes: dict[Path, str] = field(default_factory=dict)

    def learn(self, event: Event, log: Path) -> None:
        """Take the names from one event of a log."""
        run = event.get("run_id")
        if event["event"] == "agent-start" and isinstance(run, str):
            self.runs.setdefault(run, log)
        node = event.get("node")
        if log.name == constants.EVENTS_FILE and isinstance(node, str) and node:
            self.nodes.setdefault(log.parent.resolve(), node)

    def run_id(self) -> str | None:
        """Return the run's name; None if no log gives it.

        Raises:
            UsageError: the logs are of several runs.
        """
        if len(self.runs) > 1:
            named_runs = "; ".join(f"{run!r} ({log})" for run, log in list(self.runs.items())[:20])
            raise UsageError(f"events of {len(self.runs)} runs: {named_runs}. Give those of one run.")
        return next(iter(self.runs), None)

    def rename_found(self, found: FoundPath) -> FoundPath:
        """Return the same node directories with the names in their logs."""
        run_id = self.run_id()
        node_dirs = [
            replace(
                node_dir,
                run_id=node_dir.run_id if run_id is None else run_id,
                node=self.nodes.get(node_dir.path.resolve(), node_dir.node),
            )
            for node_dir in found.node_dirs
        ]
        return replace(found, node_dirs=tuple(node_dirs))


@dataclass
class LoadedRun:
    """What was loaded. ``stacks`` are hang reports by NODE/FILE."""

    events: list[Event] = field(default_factory=list)
    checkpoints: list[CheckpointEntry] = field(default_factory=list)
    stacks: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def load_run(paths: Sequence[Path]) -> LoadedRun:
    """Load the run at ``paths``: directories of a run or of its nodes, or a CKPT_DIR with one run.

    Raises:
        UsageError: there are no events, or they are of several runs.
    """
    loaded = LoadedRun()
    directories = [directory for path in paths for directory in _run_directories(path)]
    logs = list(dict.fromkeys(log for directory in directories for log in _find_logs(directory)))
    names = _LogNames()
    loaded.events = _merge_events(logs, loaded.problems, names)
    names.run_id()
    for directory in dict.fromkeys(directories):
        _load_stacks(directory, loaded, names)
        try:
            entries = list(checkpoints.list_checkpoints(names.rename_found(find_node_dirs(directory))))
        except (ElasticResumeError, OSError) as error:
            loaded.problems.append(str(error))
            continue
        loaded.checkpoints += entries
        unread = [entry for entry in entries if entry.generation is None and entry.state == "bad"]
        loaded.problems += [f"{entry.path}: left out: {entry.reason}" for entry in unread]
    return loaded


def _run_directories(path: Path) -> list[Path]:
    """Return the directories of the one run at ``path``."""
    try:
        if any((path / name).is_file() for name in _LOG_FILES):
            return [path]
        if any(True for _ in _node_logs(path)):
            return [path]
        runs = sorted(
            child for child in path.iterdir() if child.is_dir() and any(True for _ in _node_logs(child))
        )
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}.") from error
    if len(runs) > 1:
        names = ", ".join(run.name for run in runs[:20])
        raise UsageError(f"{path}: holds {len(runs)} runs; give one of them: {names}.")
    if not runs:
        raise UsageError(f"{path}: no events of a run here; give CKPT_DIR/RUN_ID.")
    return runs


def _find_logs(directory: Path) -> list[Path]:
    """Return the event files of a run or of a node, a node's own log first."""
    own_logs = [
        directory / name for name in (*_LOG_FILES, constants.FAULTS_FILE) if (directory / name).is_file()
    ]
    shared_faults = directory.parent / constants.FAULTS_FILE
    of_node = any((directory / name).is_file() for name in _LOG_FILES)
    return [
        *own_logs,
        *_node_logs(directory),
        *([shared_faults] if of_node and shared_faults.is_file() else []),
    ]


def _node_logs(directory: Path) -> Iterator[Path]:
    for name in _LOG_FILES:
        yield from sorted(path for path in directory.glob(f"*/{name}") if path.is_file())


def _merge_events(logs: Iterable[Path], problems: list[str], names: _LogNames) -> list[Event]:
    """Read each event once: first from nodes' own logs, then from other nodes' copies of them."""
    own: list[Event] = []
    others: list[Event] = []
    seen: set[str] = set()
    for log in sorted(logs, key=lambda path: path.name == constants.PEER_EVENTS_FILE):
        is_forwarded = log.name == constants.PEER_EVENTS_FILE
        try:
            for event in events.read(log):
                line = repr(event)
                if line not in seen:
                    seen.add(line)
                    names.learn(event, log)
                    (others if is_forwarded else own).append(event)
        except (OSError, RecursionError) as error:
            problems.append(f"{log}: left out: {error}")
    return own + others


def _load_stacks(directory: Path, loaded: LoadedRun, names: _LogNames) -> None:
    is_node_dir = (directory / constants.HANGS_DIR).is_dir()
    pattern = f"{constants.HANGS_DIR}/*.txt" if is_node_dir else f"*/{constants.HANGS_DIR}/*.txt"
    try:
        files = sorted(directory.glob(pattern), key=lambda path: path.lstat().st_mtime)[-MAX_STACK_FILES:]
    except OSError as error:
        loaded.problems.append(f"{directory}: {error}")
        return
    for path in files:
        try:
            text = _read_stack_file(path)
        except OSError as error:
            loaded.problems.append(f"{path}: left out: {error.strerror or error}")
            continue
        node_dir = path.parent.parent
        node = names.nodes.get(node_dir.resolve(), node_dir.name)
        loaded.stacks[f"{node}/{path.name}"] = text.decode(errors="replace")


def _read_stack_file(path: Path) -> bytes:
    """Read a hang report, unless it is a link: pages are shared, and a link may point at any file."""
    if path.parent.is_symlink() or not stat.S_ISREG(path.lstat().st_mode):
        raise OSError("not a regular file")
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        return file.read(MAX_STACKS_BYTES)
