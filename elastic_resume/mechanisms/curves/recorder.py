"""Record in rank 0's worker what the script logs, and tell the agents where it is to be found.

The values of a step are kept until the step's end and then written as one line, which outlives the worker at
once (`journal`). What is logged for that step later gets a line of its own. A state counts as resumable only
with its step's line (`notes`), so no line is missing: a worker that dies before it has written one computes
the step again.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from elastic_resume.errors import UsageError
from elastic_resume.mechanisms.curves import journal, notes
from elastic_resume.mechanisms.mechanism import StepObserver, WorkerContext

if TYPE_CHECKING:
    from elastic_resume.checkpoint.manifest import Position

logger = logging.getLogger(__name__)

MAX_KEY_CHARS = 200
MAX_KEYS = 1000
"""Of one step; MLflow takes as many in one request."""


def observe(context: WorkerContext) -> StepObserver:
    """Return the recorder of rank 0 if this job records, and for other ranks what knows recomputed steps."""
    first = notes.find_recorder(context.notes)
    recomputed = notes.find_recomputed(context.notes, context.plan)
    if context.local_rank == 0:
        notes.write_recomputed(context.node_dir, recomputed, context.plan)
    if first is None:
        if context.rank == 0 and notes.has_recorder(context.notes):
            _warn_of_no_recorder(context)
        return RecomputedSteps(recomputed)
    if context.local_rank == 0:
        _begin_file(context)
        notes.send_to_agent(context.node_dir, notes.name_copier(context.notes, context.node_dir, first))
    if context.rank != 0:
        return RecomputedSteps(recomputed)
    return Recorder(context, recomputed)


def _warn_of_no_recorder(context: WorkerContext) -> None:
    """Say that other nodes would have recorded, and rank 0's does not."""
    reason = f"node {context.node_dir.name}, which has rank 0, has no --log-metrics, and others have it"
    logger.warning("values that run.log() gets are not recorded: %s. Give all nodes the same flags.", reason)
    context.emit("curves-lost", error=reason)


def _begin_file(context: WorkerContext) -> None:
    """Write the first line of the generation's file, the same on all nodes."""
    plan, position = context.plan, context.read_position()
    path = journal.record_path(context.node_dir, context.generation)
    line = journal.format_begin(
        journal.Moment(position.step, position.epoch), plan.source_generation, goes_back=plan.goes_back
    )
    try:
        path.parent.mkdir(exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        os.write(descriptor, line)
        os.close(descriptor)
    except FileExistsError:  # the agent has copied it already
        pass
    except OSError as error:
        logger.warning("values that run.log() gets cannot be recorded in %s: %s", path, error.strerror)


class RecomputedSteps(StepObserver):
    """Knows which steps were finished before, in a generation that goes on from an earlier one."""

    def __init__(self, last_step: int) -> None:
        self._last_step = last_step

    def was_finished_before(self, step: int) -> bool:
        """See StepObserver."""
        return step <= self._last_step


class Recorder(RecomputedSteps):
    """The values of one generation, in rank 0's worker."""

    def __init__(self, context: WorkerContext, recomputed: int) -> None:
        super().__init__(recomputed)
        self._emit = context.emit
        self._read_position = context.read_position
        self._values: dict[str, float] = {}
        self._has_dropped = False
        self._path = journal.record_path(context.node_dir, context.generation)
        self._wake = notes.connect_to_agent(context.node_dir)
        self._descriptor = -1
        self._open()

    def log(self, values: Mapping[str, Any], *, of_last_step: bool = False, may_drop: bool = False) -> None:
        """Keep values of the step that is being computed, or add to the last step, which has its line.

        Raises:
            UsageError: a key or a value is of another kind, or there are too many; not if ``may_drop``.

        """
        own = {} if of_last_step else self._values
        for key, value in values.items():
            try:
                if key not in own:
                    _require_key(key)
                    if len(own) >= MAX_KEYS:
                        raise UsageError(f"run.log: a step has more than {MAX_KEYS} keys; {key!r} is one.")  # noqa: TRY301
                own[key] = value if type(value) is float else _to_number(key, value)
            except UsageError as error:
                if not may_drop:
                    raise
                self._warn_of_dropped(error)
        if of_last_step:  # trackers get a step when the next one has ended
            self._write(self._read_position().step, own)

    def _warn_of_dropped(self, error: UsageError) -> None:
        if not self._has_dropped:
            self._has_dropped = True
            logger.warning(
                "--log-metrics leaves out a value that a library logs, and others like it: %s",
                error,
            )

    def end_step(self, step: int) -> None:
        """Write the line of a step."""
        self._write(step, self._take_values())

    def close_step(self, position: Position) -> None:
        """Write what was logged after the last step: it belongs to that one."""
        self._write(position.step, self._take_values(), position.epoch)

    def close(self) -> None:
        """Write no more. What was logged in an unfinished step is dropped, and computed again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._wake is not None:
            self._wake.close()
            self._wake = None

    def _open(self) -> None:
        try:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            self._give_up(error)

    def _take_values(self) -> dict[str, float]:
        values, self._values = self._values, {}
        return values

    def _write(self, step: int, values: dict[str, float], epoch: int | None = None) -> None:
        if self._descriptor < 0:
            return
        epoch = self._read_position().epoch if epoch is None else epoch
        line = journal.format_line([step, epoch, round(time.time(), 3), values])
        try:
            if os.write(self._descriptor, line) != len(line):
                raise OSError(0, "the disk is full")  # noqa: TRY301
        except OSError as error:
            self._give_up(error)
            return
        if self._wake is not None:
            notes.wake(self._wake)

    def _give_up(self, error: OSError) -> None:
        """Stop recording in this generation, because a line that is missing would look like none."""
        self.close()
        logger.warning(
            "values that run.log() gets are not recorded until the next restart: %s: %s",
            self._path,
            error.strerror,
        )
        self._emit("curves-lost", error=str(error.strerror))


def _require_key(key: Any) -> None:
    """Refuse what no tracker could write, or what would damage the file of another step."""
    if not isinstance(key, str) or not key or "\0" in key:
        raise UsageError(f"run.log: {key!r} is no key; write a text that is not empty.")
    if len(key) > MAX_KEY_CHARS:
        raise UsageError(f"run.log: the key {key[:50]!r}… has more than {MAX_KEY_CHARS} characters.")
    try:
        key.encode()
    except UnicodeEncodeError:
        raise UsageError(f"run.log: the key {key!r} has half a character, which no file can hold.") from None


def _to_number(key: Any, value: Any) -> float:
    """Return a number as a float; a tensor waits for its device."""
    if getattr(value, "numel", None) is not None and value.numel() == 1:
        value = value.item()
    try:
        number = float(value) if not isinstance(value, (str, bytes)) else None
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None:
        raise UsageError(
            f"run.log: the value of {key!r} is of the type {type(value).__name__}; write a number, or a "
            "tensor with one element."
        )
    return number if not math.isnan(number) else math.nan
