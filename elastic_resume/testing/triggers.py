"""Schedule test actions, such as faults, for a step or condition, and arm failpoints in running processes.

`PlannedActions` runs the actions of `Cluster.at` while the test waits, milliseconds after a step. An action
that fails, or whose step never comes, is an error of the test.

`FailpointController` writes a directory that all processes of a job see. The list of armed failpoints is
replaced atomically. Files record which failpoint has fired and which process waits at one. A failpoint fires
once, in the first process that reaches it, unless it has ``once=""``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_resume import constants, failpoints
from elastic_resume.failpoints import ARMED_FILE, DONE_SUFFIX, FIRED_SUFFIX, REACHED_SUFFIX
from elastic_resume.slots.progress_page import ProgressRecord

RankProgress = tuple[int, ProgressRecord]
"""The index of a node, and the progress of one of its ranks."""


class TriggerError(AssertionError):
    """A scheduled action failed, or its step never came."""


@dataclass(frozen=True)
class StepCondition:
    """A rank has finished a step: this rank, or any; on this node, or on any."""

    step: int
    rank: int | None = None
    node: int | None = None

    def __call__(self, progress: Iterable[RankProgress]) -> RankProgress | None:
        """Return the newest progress record that fulfils the condition."""
        matches = [
            (index, record)
            for index, record in progress
            if record.step >= self.step
            and self.rank in (None, record.worker.rank)
            and self.node in (None, index)
        ]
        return max(matches, key=lambda match: (match[1].generation, match[1].step), default=None)

    def __str__(self) -> str:
        rank = "" if self.rank is None else f" of rank {self.rank}"
        node = "" if self.node is None else f" on n{self.node}"
        return f"step {self.step}{rank}{node}"


@dataclass(eq=False)
class ScheduledAction:
    """One action. It gets what its condition returned; if it returns False, it runs again."""

    description: str
    condition: StepCondition
    action: Callable[[RankProgress], object]


class PlannedActions:
    """The actions that a test has planned for one cluster."""

    def __init__(self) -> None:
        self._actions: list[ScheduledAction] = []

    def __len__(self) -> int:
        return len(self._actions)

    def schedule(
        self, description: str, condition: StepCondition, action: Callable[[RankProgress], object]
    ) -> None:
        """Plan an action."""
        self._actions.append(ScheduledAction(f"{description} at {condition}", condition, action))

    def run_due(self, progress: Iterable[RankProgress]) -> None:
        """Run each action that is due, and remove it.

        Raises:
            TriggerError: an action failed; those behind it run the next time.

        """
        records = list(progress) if self._actions else []
        for planned in list(self._actions):
            match = planned.condition(records)
            if match is None:
                continue
            try:
                is_done = planned.action(match) is not False
            except Exception as error:
                self._actions.remove(planned)
                raise TriggerError(f"{planned.description}: {error}") from error
            if is_done:
                self._actions.remove(planned)

    def require_all_done(self) -> None:
        """Raise unless all planned actions have run.

        Raises:
            TriggerError: it names the actions that have not run.

        """
        left, self._actions = ", ".join(planned.description for planned in self._actions), []
        if left:
            raise TriggerError(
                f"{left}: never came. Plan it earlier, train longer, or wait for it (wait_exit)."
            )


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
        failpoint_id = f"f{self._count}"
        settings = {"once": failpoint_id, **{key.rstrip("_"): value for key, value in conditions.items()}}
        entry = ";".join([failpoint, *(f"{k}={v}" for k, v in settings.items() if v not in (None, ""))])
        failpoints.validate(entry)  # each process validates it too, but cannot name the caller
        self._entries[failpoint_id] = entry
        self._write()
        return failpoint_id

    def disarm(self, failpoint_id: str) -> None:
        """Disarm a failpoint. A process that has reached it already continues its action."""
        if self._entries.pop(failpoint_id, None) is not None:
            self._write()

    def read_fired(self, failpoint_id: str) -> dict[str, Any] | None:
        """Return the process that fired it first (t, pid, node, rank, local); None if none has."""
        try:
            record = json.loads((self.directory / (failpoint_id + FIRED_SUFFIX)).read_bytes())
        except (FileNotFoundError, ValueError):  # being written
            return None
        return record if isinstance(record, dict) else None

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
