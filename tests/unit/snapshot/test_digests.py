"""Test that digests are equal for equal states, and differ if any compared byte differs."""

from __future__ import annotations

import pytest

from elastic_resume.checkpoint.layout import Layout, TensorSpec
from elastic_resume.policy.divergence import is_digest
from elastic_resume.snapshot import committer
from elastic_resume.snapshot.committer import digest_image

SPECS = (
    TensorSpec("fc.weight", "F32", (5, 7)),
    TensorSpec("bn.running_mean", "F32", (7,)),
    TensorSpec("nothing", "F32", (0, 3)),
    TensorSpec("fc.bias", "BF16", (5,)),
    TensorSpec("step", "I64", ()),
    TensorSpec("mask", "BOOL", (3,)),
)
LAYOUT = Layout.build(SPECS)
FOLLOWS = ("bn.running_mean", "scheduler")
ZEROS = LAYOUT.header + bytes(LAYOUT.total_bytes - len(LAYOUT.header))


def digest_of(image: bytes, layout: Layout = LAYOUT) -> str | None:
    """Return the digest of an image that does not change."""
    return digest_image(memoryview(image), layout, FOLLOWS)


def flipped(place: int) -> bytes:
    """Return the image with one flipped bit."""
    return ZEROS[:place] + bytes([ZEROS[place] ^ 1]) + ZEROS[place + 1 :]


@pytest.mark.parametrize("pieces", [1, 3, 1 << 20])
def test_digest_covers_every_byte_of_included_tensors(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result does not depend on the chunk size."""
    before = digest_of(ZEROS)
    monkeypatch.setattr(committer, "DIGEST_CHUNK_BYTES", pieces)
    assert is_digest(before)
    assert digest_of(ZEROS) == before
    for name, extent in LAYOUT.extents.items():
        for place in range(extent.start, extent.stop):
            assert (digest_of(flipped(place)) == before) == (name in FOLLOWS)


def test_digest_differs_for_other_shape_or_dtype() -> None:
    """Two different scripts may hold the same zeros."""
    kinds = [("F32", (6,)), ("F32", (2, 3)), ("F32", (3, 2)), ("I32", (6,))]
    found = set()
    for dtype, shape in kinds:
        layout = Layout.build([TensorSpec("t", dtype, shape)])
        found.add(digest_of(layout.header + bytes(24), layout))
    assert len(found) == len(kinds)


def test_overwritten_snapshot_has_no_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """`is_current` is checked before every chunk."""
    monkeypatch.setattr(committer, "DIGEST_CHUNK_BYTES", 16)
    looks = iter([True, True, True, False])
    assert digest_image(memoryview(ZEROS), LAYOUT, FOLLOWS, is_current=lambda: next(looks)) is None
    assert not list(looks)
