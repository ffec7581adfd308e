"""A state's digests: equal for equal states, and unequal in just the tensors that are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.policy import divergence
from elastic_resume.policy.divergence import are_groups, is_digest, judge, labels
from elastic_resume.store import prints
from elastic_resume.store.layout import Layout, TensorSpec
from elastic_resume.store.prints import StatePrints, prints_of

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


def taken(image: bytes, layout: Layout = LAYOUT) -> StatePrints:
    """The prints of an image that stays what it is."""
    found = prints_of(memoryview(image), layout, FOLLOWS)
    assert found is not None
    return found


def flipped(place: int) -> bytes:
    """The image with one bit changed."""
    return ZEROS[:place] + bytes([ZEROS[place] ^ 1]) + ZEROS[place + 1 :]


def test_prints_are_what_may_be_told() -> None:
    """In the form that others accept; without what need not be equal."""
    found = taken(ZEROS)
    assert is_digest(found.digest)
    assert are_groups(found.groups)
    assert len(found.groups) == len(found.names) == len(SPECS) - 1
    assert "bn.running_mean" not in found.names


@pytest.mark.parametrize("pieces", [1, 3, 1 << 20])
def test_every_byte_counts_and_is_found_in_its_tensor(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the pieces are in which it is read; but for what need not be equal."""
    monkeypatch.setattr(prints, "PIECE_BYTES", pieces)
    before = taken(ZEROS)
    for name, extent in LAYOUT.extents.items():
        for place in range(extent.start, extent.stop):
            after = taken(flipped(place))
            verdict = judge({"a": before.groups, "b": after.groups})
            if name in FOLLOWS:
                assert (verdict, after) == (None, before)
            else:
                assert verdict is not None
                assert labels(verdict, before.names) == [name]
                assert after.digest != before.digest


@given(st.integers(0, 40), st.integers(1, 9))
def test_neighbours_share_a_digest_where_tensors_are_many(count: int, most: int) -> None:
    """Then the group is named in which a tensor differs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(divergence, "MAX_GROUPS", most)
        layout = Layout.build([TensorSpec(f"t{number:02}", "U8", (2,)) for number in range(count)])
        image = layout.header + bytes(layout.total_bytes - len(layout.header))
        found = taken(image, layout)
        assert len(found.groups) <= most
        if count:
            other = taken(image[:-1] + b"x", layout)
            verdict = judge({"a": found.groups, "b": other.groups})
            assert verdict is not None
            assert verdict.differing == (len(found.groups) - 1,)
            assert labels(verdict, found.names)[0].endswith(f"t{count - 1:02}")


def test_the_same_bytes_of_another_shape_or_type_are_not_the_same() -> None:
    """Two scripts that differ may hold the same zeros."""
    kinds = [("F32", (6,)), ("F32", (2, 3)), ("F32", (3, 2)), ("I32", (6,))]
    found = set()
    for dtype, shape in kinds:
        layout = Layout.build([TensorSpec("t", dtype, shape)])
        found.add(taken(layout.header + bytes(24), layout).digest)
    assert len(found) == len(kinds)


def test_what_is_written_over_meanwhile_gives_no_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked before every piece."""
    monkeypatch.setattr(prints, "PIECE_BYTES", 16)
    looks = iter([True, True, True, False])
    assert prints_of(memoryview(ZEROS), LAYOUT, FOLLOWS, still=lambda: next(looks)) is None
    assert not list(looks)
