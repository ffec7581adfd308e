"""Define what the archive needs of a store: six verbs on named objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

MIN_BYTES_PER_S = 500_000
"""A request of an object store may take as long as its bytes need at this speed, beside a fixed time."""


@dataclass(frozen=True)
class StoredName:
    """The last component of a name in a store; ``is_prefix``: other names are below it."""

    name: str
    is_prefix: bool


class Store(Protocol):
    """Objects with names such as ``a/b``, of bytes that are replaced as a whole.

    A reader sees an object as it was before a put or after it. Every method raises ArchiveError if the store
    cannot be reached, or refuses.
    """

    description: str
    """The address for messages. It contains no secret."""

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Store ``data`` durably, and replace what has this name."""

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Store ``data`` durably if nothing has this name; return False if something has.

        Raises:
            ArchiveError: of the kind "unsupported" if the store cannot do so atomically.

        """

    def get_range(self, name: str, start: int, size: int) -> memoryview | None:
        """Return ``size`` bytes from ``start`` on, fewer where the object ends; None if it does not exist."""

    def head(self, name: str) -> int | None:
        """Return the object's size; None if it does not exist."""

    def list(self, prefix: str) -> list[StoredName]:
        """Return what is directly below ``prefix``, sorted by name; [] if there is nothing."""

    def delete(self, name: str) -> None:
        """Delete the object if it exists."""
