"""Define how points reach a tracker, and choose the exporter of a setting.

One process at a time writes. Whoever follows it knows at least what it has flushed, and sends the rest again;
the exporter sees to it that the tracker has each step once.
"""

from __future__ import annotations

import abc
import importlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from elastic_resume.errors import ConfigError

KINDS = {
    "csv": "csv_file",
    "jsonl": "csv_file",
}
"""Each kind of tracker, and the module of `exporters` that makes its exporter."""


class Point(NamedTuple):
    """The values of one finished step."""

    step: int
    time: float
    """Unix seconds."""
    values: dict[str, float]


class Exporter(abc.ABC):
    """Writes points to one tracker; used by one thread."""

    @abc.abstractmethod
    def open(self, last_written: int, is_abandoned_after: int | None = None) -> int:
        """Begin to write after an earlier writer; return the last step that the tracker has for certain.

        Points after it are sent again, and each step exists once all the same.

        Args:
            last_written: the last step that the earlier writer is known to have written; it may have written
                more. -1: none is known.
            is_abandoned_after: the job has gone back to this step, and later ones shall not stay.

        """

    @abc.abstractmethod
    def write(self, points: Sequence[Point]) -> None:
        """Write points in the order of their steps, which are greater than all before."""

    @abc.abstractmethod
    def flush(self) -> int:
        """Make durable what was written; return the last step that is so."""

    @abc.abstractmethod
    def close(self) -> None:
        """Write no more."""


def parse_exporter(setting: str, text: str) -> Callable[[str], Exporter]:
    """Return a function that makes the exporter of ``KIND:PLACE``; it takes the job's run id.

    Raises:
        ConfigError: the kind is unknown, or its place is missing.

    """
    kind, _, place = text.partition(":")
    if kind not in KINDS:
        raise ConfigError(f"{setting}: {text!r} names no tracker; the kinds are {', '.join(KINDS)}.")
    module = importlib.import_module(f"{__package__}.exporters.{KINDS[kind]}")
    make: Callable[[str], Exporter] = module.parse(setting, kind, place)
    return make
