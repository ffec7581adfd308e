"""A state's digest: equal for equal states, and unequal where any byte that counts differs."""

from __future__ import annotations

import pytest

from elastic_resume.checkpoint.layout import Layout, TensorSpec
from elastic_resume.policy.divergence import is_digest
from elastic_resume.snapshot import digests
from elastic_resume.snapshot.digests import digest_image

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


def taken(image: bytes, layout: Layout = LAYOUT) -> str | None:
    """The digest of an image that stays what it is."""
    return digest_image(memoryview(image), layout, FOLLOWS)


def flipped(place: int) -> bytes:
    """The image with one bit changed."""
    return ZEROS[:place] + bytes([ZEROS[place] ^ 1]) + ZEROS[place + 1 :]


@pytest.mark.parametrize("pieces", [1, 3, 1 << 20])
def test_every_byte_counts_but_of_what_need_not_be_equal(
    pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However large the pieces are in which it is read."""
    before = taken(ZEROS)
    monkeypatch.setattr(digests, "CHUNK_BYTES", pieces)
    assert is_digest(before)
    assert taken(ZEROS) == before
    for name, extent in LAYOUT.extents.items():
        for place in range(extent.start, extent.stop):
            assert (taken(flipped(place)) == before) == (name in FOLLOWS)


def test_the_same_bytes_of_another_shape_or_type_are_not_the_same() -> None:
    """Two scripts that differ may hold the same zeros."""
    kinds = [("F32", (6,)), ("F32", (2, 3)), ("F32", (3, 2)), ("I32", (6,))]
    found = set()
    for dtype, shape in kinds:
        layout = Layout.build([TensorSpec("t", dtype, shape)])
        found.add(taken(layout.header + bytes(24), layout))
    assert len(found) == len(kinds)


def test_what_is_written_over_meanwhile_gives_no_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked before every piece."""
    monkeypatch.setattr(digests, "CHUNK_BYTES", 16)
    looks = iter([True, True, True, False])
    assert digest_image(memoryview(ZEROS), LAYOUT, FOLLOWS, is_current=lambda: next(looks)) is None
    assert not list(looks)
