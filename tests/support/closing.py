"""A context manager for classes that have `close`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

T = TypeVar("T", bound="ClosedAtExit")


class ClosedAtExit(ABC):
    """Closes itself at the end of a with statement."""

    def __enter__(self: T) -> T:  # noqa: PYI019  typing.Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """End what this object has started."""
