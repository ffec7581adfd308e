"""Keep a committed checkpoint readable while it is uploaded, also if it is pruned meanwhile."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import xxhash

from elastic_resume import constants
from elastic_resume.archive.entries import choose_part_bytes
from elastic_resume.checkpoint import reader
from elastic_resume.checkpoint.catalog import read_milestones
from elastic_resume.checkpoint.manifest import MAX_MANIFEST_BYTES, Manifest
from elastic_resume.errors import CorruptError, UnreadableError
from elastic_resume.mechanisms.archive.judge import HeldCheckpoint
from elastic_resume.milestone import Milestone, is_name


class PinnedCheckpoint:
    """A checkpoint of this node's disk, by open descriptor; `close` it."""

    def __init__(self, path: Path, run_id: str) -> None:
        """Open it and read its manifest. Raises CheckpointError."""
        self.manifest = manifest = reader.quick_check(path, run_id)
        with reader.translate_read_errors(path):
            with reader.open_regular(path / constants.MANIFEST_FILE) as descriptor:
                content = memoryview(bytearray(min(os.fstat(descriptor).st_size, MAX_MANIFEST_BYTES)))
                reader.read_exact(descriptor, 0, content)
            self.manifest_bytes = bytes(content)
            if Manifest.parse(self.manifest_bytes) != manifest:
                raise UnreadableError("it was replaced while it was opened.")
            with reader.open_regular(path / constants.STATE_FILE) as descriptor:
                self._descriptor = os.dup(descriptor)
        self._path = path
        self._milestones: tuple[Milestone, ...] = ()
        self.read_milestones()
        self.part_bytes = choose_part_bytes(manifest.file_bytes, manifest.block_bytes)
        parts = -(-manifest.file_bytes // self.part_bytes)
        self.held = HeldCheckpoint(*manifest.version, manifest.content_digest, parts)

    def read_part(self, index: int) -> memoryview:
        """Read a part, and verify its blocks.

        Raises:
            CheckpointError: the disk does not hold what was committed.

        """
        manifest, start = self.manifest, index * self.part_bytes
        data = memoryview(bytearray(min(self.part_bytes, manifest.file_bytes - start)))
        with reader.translate_read_errors(self._path):
            reader.read_exact(self._descriptor, start, data)
            for offset in range(0, len(data), manifest.block_bytes):
                digest = xxhash.xxh3_128_hexdigest(data[offset : offset + manifest.block_bytes])
                if digest != manifest.blocks[(start + offset) // manifest.block_bytes]:
                    raise CorruptError(
                        f"{constants.STATE_FILE}: the block at {start + offset} does not match its digest."
                    )
        return data

    def read_milestones(self) -> tuple[Milestone, ...]:
        """Return its milestones; those that were read before, if it is pruned meanwhile."""
        found = tuple(label for label in read_milestones(self._path) if is_name(label.name))
        self._milestones = found or self._milestones
        return self._milestones

    def close(self) -> None:
        """Close the descriptor."""
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
