"""Archive small checkpoints for tests."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

import xxhash

from elastic_resume.archive.archive import Archive
from elastic_resume.archive.entries import Attempt
from elastic_resume.checkpoint.manifest import Manifest
from elastic_resume.milestone import Milestone
from tests.support.checkpoint_samples import SMALL_BLOCK, make_image, make_manifest

PART_BYTES = 2 * SMALL_BLOCK


def make_whole_manifest(image: memoryview, generation: int = 1, step: int = 1) -> Manifest:
    """Return the manifest of an image, with the digests of its blocks."""
    blocks = [
        xxhash.xxh3_128_hexdigest(image[start : start + SMALL_BLOCK])
        for start in range(0, len(image), SMALL_BLOCK)
    ]
    return replace(
        make_manifest(generation, step),
        file_bytes=len(image),
        block_bytes=SMALL_BLOCK,
        blocks=tuple(blocks),
    )


def put_parts(archive: Archive, attempt: Attempt, image: memoryview) -> None:
    """Store all parts of an image."""
    for index, start in enumerate(range(0, len(image), PART_BYTES)):
        archive.put_part(attempt.id, index, image[start : start + PART_BYTES])


def begin(archive: Archive, step: int = 1, generation: int = 1) -> Attempt:
    """Begin an attempt to archive a step."""
    attempt = archive.begin((generation, step), secrets.token_hex(8))
    assert attempt is not None
    return attempt


class ArchivingJob:
    """A job that has begun to archive. Its writer is random, as that of the next start of the same job."""

    def __init__(self, archive: Archive) -> None:
        self.archive, self._writer = archive, secrets.token_hex(8)
        self._first_number = archive.find_next_number()

    def begin(
        self, step: int, generation: int = 1, seed: int | None = None, node: str = "node-a"
    ) -> Attempt | None:
        """Begin to archive a step; None if it is archived already. The bytes follow from ``seed``."""
        manifest = make_whole_manifest(make_image(step if seed is None else seed), generation, step)
        nonce = self._writer + secrets.token_hex(8)
        own = replace(manifest, node=node)
        return self.archive.begin((generation, step), nonce, self._first_number, own)

    def archive_step(
        self, step: int, generation: int = 1, seed: int | None = None, node: str = "node-a"
    ) -> bool:
        """Archive a step; return False if it is archived already."""
        attempt, image = self.begin(step, generation, seed, node), make_image(step if seed is None else seed)
        if attempt is not None:
            put_parts(self.archive, attempt, image)
            commit(self.archive, attempt, image)
        return attempt is not None


def commit(
    archive: Archive,
    attempt: Attempt,
    image: memoryview | None = None,
    milestones: Sequence[Milestone] = (),
) -> None:
    """Commit an attempt whose parts are stored."""
    image = make_image(attempt.version[1]) if image is None else image
    manifest = make_whole_manifest(image, *attempt.version)
    archive.commit(attempt, manifest.to_bytes(), PART_BYTES, milestones)


def archive_step(
    archive: Archive,
    step: int,
    generation: int = 1,
    milestones: Sequence[Milestone] = (),
) -> memoryview:
    """Archive a step whose bytes follow from its number; return its image."""
    image = make_image(step)
    attempt = begin(archive, step, generation)
    put_parts(archive, attempt, image)
    commit(archive, attempt, image, milestones)
    return image
