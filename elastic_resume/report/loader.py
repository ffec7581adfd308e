"""From the paths that a person typed to the events that lie there: every log, each event once.

A run's nodes may have left their logs in several places: directories of a shared disk, copies of disks of
their own, lines that other nodes kept of them (`contract.PEERS_FILE`). Identical lines are one event. Copies
may lie under any name: what a run and its nodes are called is told by their logs.

Promise: only reads, of hangs nothing that is a link or waits; what cannot be read is a problem with its
reason, and the rest is told all the same.
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

MAX_STACK_FILES = 50  # files of hangs that are read, the newest
MAX_STACKS_BYTES = 256 * 1024
_LOG_FILES = (constants.EVENTS_FILE, constants.PEER_EVENTS_FILE)


@dataclass
class _LogNames:
    """What logs call the runs they are of, and the nodes, by the directories of their logs."""

    runs: dict[str, Path] = field(default_factory=dict)  # each with a log of it
    nodes: dict[Path, str] = field(default_factory=dict)

    def learn(self, event: Event, log: Path) -> None:
        """Take the names from one event."""
        run = event.get("run_id")
        if event["event"] == "agent-start" and isinstance(run, str):
            self.runs.setdefault(run, log)
        node = event.get("node")
        if log.name == constants.EVENTS_FILE and isinstance(node, str) and node:
            self.nodes.setdefault(log.parent.resolve(), node)

    def run_id(self) -> str | None:
        """The run's name; None where no log tells it. Raises UsageError where they are of several."""
        if len(self.runs) > 1:
            which = "; ".join(f"{run!r} ({log})" for run, log in list(self.runs.items())[:20])
            raise UsageError(f"events of {len(self.runs)} runs: {which}. Give those of one run.")
        return next(iter(self.runs), None)

    def rename_found(self, found: FoundPath) -> FoundPath:
        """The same places under their own names."""
        run = self.run_id()
        named = [
            replace(
                place,
                run_id=place.run_id if run is None else run,
                node=self.nodes.get(place.path.resolve(), place.node),
            )
            for place in found.node_dirs
        ]
        return replace(found, node_dirs=tuple(named))


@dataclass
class LoadedRun:
    """What was found. ``stacks``: what nodes wrote of hangs, by NODE/FILE."""

    events: list[Event] = field(default_factory=list)
    checkpoints: list[CheckpointEntry] = field(default_factory=list)
    stacks: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def load_run(paths: Sequence[Path]) -> LoadedRun:
    """Read what lies at ``paths``: directories of a run, of its nodes, or roots with one run in them.

    Raises:
        UsageError: there are no events, or they are of several runs.

    """
    found = LoadedRun()
    directories = [directory for path in paths for directory in _run_directories(path)]
    logs = list(dict.fromkeys(log for directory in directories for log in _find_logs(directory)))
    names = _LogNames()
    found.events = _merge_events(logs, found.problems, names)
    names.run_id()
    for directory in dict.fromkeys(directories):
        _load_stacks(directory, found, names)
        try:
            items = list(checkpoints.list_checkpoints(names.rename_found(find_node_dirs(directory))))
        except (ElasticResumeError, OSError) as error:
            found.problems.append(str(error))
            continue
        found.checkpoints += items
        unread = [item for item in items if item.generation is None and item.state == "bad"]
        found.problems += [f"{item.path}: left out: {item.reason}" for item in unread]
    return found


def _run_directories(path: Path) -> list[Path]:
    """The directories of a run, given one, a node's, or a root with one run in it."""
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
    """The event files of a run or of a node, own logs first."""
    here = [directory / name for name in (*_LOG_FILES, constants.FAULTS_FILE) if (directory / name).is_file()]
    beside = directory.parent / constants.FAULTS_FILE
    of_node = any((directory / name).is_file() for name in _LOG_FILES)
    return [*here, *_node_logs(directory), *([beside] if of_node and beside.is_file() else [])]


def _node_logs(directory: Path) -> Iterator[Path]:
    for name in _LOG_FILES:
        yield from sorted(path for path in directory.glob(f"*/{name}") if path.is_file())


def _merge_events(logs: Iterable[Path], problems: list[str], names: _LogNames) -> list[Event]:
    """Each event once: first those of nodes' own logs, then those that only other nodes have."""
    own: list[Event] = []
    others: list[Event] = []
    seen: set[str] = set()
    for log in sorted(logs, key=lambda path: path.name == constants.PEER_EVENTS_FILE):
        second_hand = log.name == constants.PEER_EVENTS_FILE
        try:
            for event in events.read(log):
                line = repr(event)  # of the same line, the same
                if line not in seen:
                    seen.add(line)
                    names.learn(event, log)
                    (others if second_hand else own).append(event)
        except (OSError, RecursionError) as error:
            problems.append(f"{log}: left out: {error}")
    return own + others


def _load_stacks(directory: Path, found: LoadedRun, names: _LogNames) -> None:
    here = (directory / constants.HANGS_DIR).is_dir()
    pattern = f"{constants.HANGS_DIR}/*.txt" if here else f"*/{constants.HANGS_DIR}/*.txt"
    try:
        files = sorted(directory.glob(pattern), key=lambda path: path.lstat().st_mtime)[-MAX_STACK_FILES:]
    except OSError as error:
        found.problems.append(f"{directory}: {error}")
        return
    for path in files:
        try:
            told = _read_stack_file(path)
        except OSError as error:
            found.problems.append(f"{path}: left out: {error.strerror or error}")
            continue
        home = path.parent.parent
        node = names.nodes.get(home.resolve(), home.name)
        found.stacks[f"{node}/{path.name}"] = told.decode(errors="replace")


def _read_stack_file(path: Path) -> bytes:
    """What a file of a hang holds. A link may point at any file of the reader's, and pages are shared."""
    if path.parent.is_symlink() or not stat.S_ISREG(path.lstat().st_mode):
        raise OSError("not a plain file")
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        return file.read(MAX_STACKS_BYTES)
