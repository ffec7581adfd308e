"""Define what writes logged values to a tracker, and which trackers there are.

One agent writes at a time. If it dies, another one opens the tracker again and is given the points that may
be missing. Each kind is a module of `exporters`, and needs its library only when it is used.
"""

from __future__ import annotations

import functools
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from elastic_resume import constants
from elastic_resume.errors import ConfigError
from elastic_resume.mechanisms.mechanism import lazily

FORMS = "csv:FILE, jsonl:FILE, tensorboard:DIR, wandb, wandb:PROJECT, mlflow or mlflow:URI"
_FILES = "curves.exporters."


class Point(NamedTuple):
    """The values that one step has logged."""

    step: int
    time: float
    """When the step logged first, in seconds since the epoch."""
    values: dict[str, float]


class Exporter(ABC):
    """Writes the points of one job to one tracker, so that the tracker has each step once.

    The methods are called by one thread. They may raise any error of the tracker's library or of the system.
    After an error the caller closes the exporter, opens it again, and sends again what `open` asks for.
    """

    @abstractmethod
    def open(self, last_written: int, go_back_to: int | None = None) -> int:
        """Begin to write after an earlier writer, and return the last step that the tracker surely has.

        Points after the returned step are sent again; the exporter makes sure that each step exists once.

        Args:
            last_written: the earlier writer is known to have written all steps up to it, and may have written
                more; -1: none is known.
            go_back_to: the job went back to this step on purpose. The tracker then loses what it has after
                it, as far as the tracker can; -1: all that it has is another job's.

        """

    @abstractmethod
    def write(self, points: Sequence[Point]) -> None:
        """Write points, in the order of their steps; each step is greater than all before."""

    @abstractmethod
    def flush(self) -> int:
        """Make durable what was written; return the last step that is so, or -1."""

    @abstractmethod
    def close(self) -> None:
        """Flush, and end what `open` began. It may be called after an error, and again."""


class _Kind(NamedTuple):
    make: Callable[..., Exporter]
    """It takes the target, and the job's run id."""
    module: str = ""
    """What must be installed; its name is that of the extra too."""
    target: str = ""
    """What follows the colon."""
    needs_target: bool = False
    is_path: bool = False


_KINDS = {
    "csv": _Kind(lazily(_FILES + "csv_file", "CsvFile"), "", "FILE", needs_target=True, is_path=True),
    "jsonl": _Kind(lazily(_FILES + "csv_file", "JsonLinesFile"), "", "FILE", needs_target=True, is_path=True),
    "tensorboard": _Kind(
        lazily(_FILES + "tensorboard_dir", "TensorBoardDirectory"),
        "tensorboard",
        "DIR",
        needs_target=True,
        is_path=True,
    ),
    "wandb": _Kind(lazily(_FILES + "wandb_run", "WandbRun"), "wandb", "PROJECT"),
    "mlflow": _Kind(lazily(_FILES + "mlflow_run", "MlflowRun"), "mlflow", "URI"),
}


def parse_exporter(setting: str, text: str) -> Callable[[str], Exporter]:
    """Parse a tracker into a function that takes the job's run id and returns an unopened exporter.

    Raises:
        ConfigError: the kind is unknown, its file or directory is missing, or its library is not installed.

    """
    name, colon, target = text.strip().partition(":")
    kind = _KINDS.get(name)
    if kind is None:
        raise ConfigError(f"{setting} is {name[:100]!r}, which is no tracker: write {FORMS}.")
    if (colon or kind.needs_target) and not target:
        raise ConfigError(f"{setting} is {text[:100]!r}: write {name}:{kind.target}.")
    if kind.module and importlib.util.find_spec(kind.module) is None:
        raise ConfigError(
            f"{setting} {name} needs {kind.module}, which is not installed: "
            f"{constants.EXTRA_INSTALL.format(kind.module)}."
        )
    where: Any = _parse_path(setting, target) if kind.is_path else target
    return functools.partial(kind.make, where)


def _parse_path(setting: str, text: str) -> Path:
    try:
        return Path(text).expanduser().absolute()
    except (OSError, RuntimeError, ValueError) as error:  # an unknown user's home, or a NUL byte
        raise ConfigError(f"{setting} has {text[:200]!r}, which cannot be a path here: {error}.") from error
