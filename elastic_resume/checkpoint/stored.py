"""Define a stored checkpoint: what commands and ``er.load`` need of one, wherever it is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from elastic_resume.checkpoint import reader
from elastic_resume.checkpoint.manifest import Manifest
from elastic_resume.errors import CheckpointError


class Place(Protocol):
    """A path, or an address in an archive, whose text a person can type."""

    @property
    def name(self) -> str:
        """The last component."""


class StoredCheckpoint(Protocol):
    """One checkpoint. Its methods raise CheckpointErrors, and return verified bytes only.

    ``on_verified`` gets the number of verified bytes from the image's start, after each block.
    """

    @property
    def place(self) -> Place:
        """Where it is."""

    def read_manifest(self) -> Manifest:
        """Return the manifest."""

    def view_image(self, manifest: Manifest, on_verified: Callable[[int], object]) -> memoryview:
        """Return the image, of which a part may be read again without verification; see `map_image`."""

    def read_image(self, manifest: Manifest, on_verified: Callable[[int], object]) -> memoryview:
        """Return the image in memory."""

    def verify_image(self, manifest: Manifest, on_verified: Callable[[int], object]) -> None:
        """Verify every byte of the image, without memory for all of it."""


@dataclass(frozen=True)
class CheckpointInDirectory:
    """A checkpoint in a directory; ``error`` says why it cannot be read, if that is known."""

    place: Path
    error: CheckpointError | None = None

    def read_manifest(self) -> Manifest:
        """See base class."""
        if self.error is not None:
            raise self.error
        return reader.quick_check(self.place, None)

    def view_image(self, manifest: Manifest, on_verified: Callable[[int], object]) -> memoryview:
        """See base class."""
        return reader.map_image(self.place, manifest, on_verified)

    def read_image(self, manifest: Manifest, on_verified: Callable[[int], object]) -> memoryview:
        """See base class."""
        return reader.read_image(self.place, manifest, on_verified=on_verified)

    def verify_image(self, manifest: Manifest, on_verified: Callable[[int], object]) -> None:
        """See base class."""
        reader.map_image(self.place, manifest, on_verified)
