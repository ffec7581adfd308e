"""Run actions when a rank has finished a step, and arm failpoints of running processes.

`TriggerWatcher` is a thread that reads the progress pages of all ranks hundreds of times a second and runs
the actions that `Cluster.at` has planned, milliseconds after the step. Each action runs once. An action that
fails, or whose step never comes, is an error of the test (`raise_error`, `require_all_done`).

`FailpointController` writes a directory that all processes of a job see. The list of armed failpoints is
replaced atomically. Files record which failpoint has fired and which process waits at one. A failpoint fires
once, in the first process that reaches it, unless it has ``once=""``.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_resume import constants, failpoints
from elastic_resume.failpoints import ARMED_FILE, DONE_SUFFIX, FIRED_SUFFIX, REACHED_SUFFIX
from elastic_resume.snapshot.progress_page import ProgressRecord

POLL_S = 0.002  # a step of a small model takes a few milliseconds


class TriggerError(AssertionError):
    """An action that was planned with `Cluster.at` failed, or its step never came."""


@dataclass(frozen=True)
class ScheduledAction:
    """One planned action. It gets the node and the progress of the rank; False means "not yet"."""

    description: str
    step: int
    rank: int | None
    node: int | None
    action: Callable[[int, ProgressRecord], object] = field(repr=False)

    def __str__(self) -> str:
        whose = "" if self.rank is None else f" of rank {self.rank}"
        on = "" if self.node is None else f" on n{self.node}"
        return f"{self.description} at step {self.step}{whose}{on}"

    def find_match(self, progress: Iterable[tuple[int, ProgressRecord]]) -> tuple[int, ProgressRecord] | None:
        """Return the newest progress record that fulfils the condition."""
        fitting = [
            (index, line)
            for index, line in progress
            if line.step >= self.step and self.rank in (None, line.worker.rank) and self.node in (None, index)
        ]
        return max(fitting, key=lambda one: (one[1].generation, one[1].step), default=None)


class TriggerWatcher:
    """Runs the planned actions of one cluster."""

    def __init__(self, read_progress: Callable[[], Iterable[tuple[int, ProgressRecord]]]) -> None:
        """Prepare the watcher; ``read_progress`` returns each rank's node and progress."""
        self._read_progress = read_progress
        self._pending: list[ScheduledAction] = []
        self._error: TriggerError | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def schedule(self, action: ScheduledAction) -> None:
        """Add an action and start the thread."""
        with self._changed:
            self._pending = sorted([*self._pending, action], key=lambda one: one.step)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="triggers", daemon=True)
                self._thread.start()
            self._changed.notify()

    def raise_error(self) -> None:
        """Raise the error of a failed action, once.

        Raises:
            TriggerError: an action failed.

        """
        error, self._error = self._error, None
        if error is not None:
            raise error

    def require_all_done(self) -> None:
        """Raise unless all planned actions have run.

        Raises:
            TriggerError: it names the actions that have not run.

        """
        left, self._pending = self._pending, []
        if left:
            names = ", ".join(map(str, left))
            raise TriggerError(
                f"{names}: never came. Plan it earlier, train longer, or wait for it (wait_exit)."
            )

    def close(self) -> None:
        """Discard the remaining actions and end the thread. A second call does nothing."""
        with self._changed:
            self._closed = True
            self._pending = []
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closed)
                if self._closed:
                    return
                pending = list(self._pending)
            self._run_due(pending)
            with self._changed:
                self._changed.wait_for(lambda: self._closed, POLL_S)

    def _run_due(self, pending: Iterable[ScheduledAction]) -> None:
        """Run all actions that are due; their errors are raised where the test waits."""
        lines = list(self._read_progress())
        for planned in pending:
            found = planned.find_match(lines)
            try:
                done = found is not None and planned.action(*found) is not False
            except Exception as error:  # noqa: BLE001
                self._error = TriggerError(f"{planned}: {error}")
                self._error.__cause__ = error
                done = True
            if done:
                with self._changed:
                    self._pending = [one for one in self._pending if one is not planned]


class FailpointController:
    """The failpoints of one job. It may be used by one thread at a time."""

    def __init__(self, directory: Path) -> None:
        """Create ``directory``; every process of the job must see it under this path."""
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._entries: dict[str, str] = {}
        self._count = 0

    @property
    def env(self) -> dict[str, str]:
        """Return the environment variables by which processes find the directory."""
        return {constants.ENV_FAULTS_DIR: str(self.directory)}

    def arm(self, failpoint: str, **conditions: object) -> str:
        """Arm ``NAME=ACTION`` with conditions (see `failpoints`) and return its id.

        Raises:
            ConfigError: the failpoint is malformed.

        """
        self._count += 1
        mark = f"f{self._count}"
        told = {"once": mark, **{key.rstrip("_"): value for key, value in conditions.items()}}
        entry = ";".join([failpoint, *(f"{k}={v}" for k, v in told.items() if v not in (None, ""))])
        failpoints.validate(entry)  # as each process does, too late to tell who wrote it
        self._entries[mark] = entry
        self._write()
        return mark

    def disarm(self, failpoint_id: str) -> None:
        """Disarm a failpoint. A process that has reached it already continues its action."""
        if self._entries.pop(failpoint_id, None) is not None:
            self._write()

    def read_fired(self, failpoint_id: str) -> dict[str, Any] | None:
        """Return who fired it first (t, pid, node, rank, local rank); None if nobody has."""
        try:
            told = json.loads((self.directory / (failpoint_id + FIRED_SUFFIX)).read_bytes())
        except (FileNotFoundError, ValueError):  # being written
            return None
        return told if isinstance(told, dict) else None

    def is_waiting(self, failpoint_id: str) -> bool:
        """Whether a process waits at a failpoint that was armed with ``wait``."""
        return (self.directory / (failpoint_id + REACHED_SUFFIX)).exists()

    def release(self, failpoint_id: str) -> None:
        """Let the waiting process continue."""
        (self.directory / (failpoint_id + DONE_SUFFIX)).touch()

    def _write(self) -> None:
        path = self.directory / ARMED_FILE
        new = path.with_suffix(".new")
        new.write_text("\n".join(self._entries.values()) + "\n")
        new.replace(path)
