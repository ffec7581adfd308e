"""Test that layouts are valid safetensors headers, and that no invalid header is accepted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load as load_tensors
from safetensors.torch import load_file

from elastic_resume.checkpoint.layout import (
    ALIGNMENT,
    ITEM_BYTES,
    MAX_HEADER_BYTES,
    Layout,
    TensorSpec,
    header_size,
)
from elastic_resume.errors import CheckpointError, CorruptError, TornError

# torch's names; it has no name for the others.
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "BOOL": "bool",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda n: n != "__metadata__")
specs = st.lists(
    st.builds(
        TensorSpec,
        names,
        st.sampled_from(sorted(ITEM_BYTES)),
        st.lists(st.integers(0, 5), max_size=4).map(tuple),
    ),
    unique_by=lambda spec: spec.name,
    max_size=12,
)


@given(specs)
def test_layout_parses_as_built(tensors: list[TensorSpec]) -> None:
    """Every tensor is aligned to its item size, without gaps."""
    built = Layout.build(tensors)
    parsed = Layout.parse(built.header, built.total_bytes)
    assert parsed == built
    assert hash(parsed) == hash(built)
    assert dict(parsed.extents) == dict(built.extents)
    assert len(built.header) % ALIGNMENT == 0
    assert {n: (e.dtype, e.shape) for n, e in built.extents.items()} == {
        t.name: (t.dtype, t.shape) for t in tensors
    }
    assert sum(t.nbytes for t in tensors) + len(built.header) == built.total_bytes
    for extent in built.extents.values():
        assert extent.start == extent.stop or extent.start % ITEM_BYTES[extent.dtype] == 0


@given(specs, st.binary(min_size=1, max_size=8), st.integers(0, 4095), st.integers(-5000, 5000))
def test_damaged_header_never_gives_extent_outside_file(
    tensors: list[TensorSpec], noise: bytes, at: int, more: int
) -> None:
    """Damage is refused with a CheckpointError, or harmless: extents tile the file without overlap."""
    built = Layout.build(tensors)
    header = bytearray(built.header)
    header[at : at + len(noise)] = noise[: len(header) - at]
    size = max(0, built.total_bytes + more)
    try:
        layout = Layout.parse(bytes(header[:size]), size)
    except CheckpointError:
        return
    end = len(layout.header)
    for extent in layout.extents.values():
        assert end == extent.start <= extent.stop
        end = extent.stop
    assert end == layout.total_bytes == size


def test_safetensors_opens_image_of_every_dtype(tmp_path: Path) -> None:
    """Values, shapes and dtypes are equal, including bfloat16 and 0-d tensors."""
    torch.manual_seed(1)
    tensors: dict[str, torch.Tensor] = {
        f"t.{name}": (torch.rand(3, 5) * 2).to(getattr(torch, dtype)) for name, dtype in DTYPES.items()
    }
    tensors |= {"scalar": torch.tensor(7), "empty": torch.empty(0, 4), "né e/ß\n": torch.ones(2)}
    codes = {getattr(torch, dtype): name for name, dtype in DTYPES.items()}
    layout = Layout.build(TensorSpec(n, codes[t.dtype], tuple(t.shape)) for n, t in tensors.items())
    image = bytearray(layout.total_bytes)
    image[: len(layout.header)] = layout.header
    for name, tensor in tensors.items():
        extent = layout.extents[name]
        image[extent.start : extent.stop] = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    path = tmp_path / "state.safetensors"
    path.write_bytes(image)
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert torch.equal(loaded[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    with safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "pt"


def test_safetensors_opens_image_without_tensors() -> None:
    """An image may be empty."""
    layout = Layout.build([])
    assert load_tensors(layout.header) == {}
    assert Layout.parse(layout.header, layout.total_bytes).extents == {}


def test_item_sizes_descend_and_ties_keep_their_order() -> None:
    """Then alignment needs no gap, which safetensors would refuse."""
    order = [TensorSpec(n, d, (3,)) for n, d in [("a", "U8"), ("z", "F32"), ("b", "F64"), ("y", "F32")]]
    assert list(Layout.build(order).extents) == ["b", "z", "y", "a"]


@pytest.mark.parametrize(
    "bad",
    [
        [TensorSpec("a", "F32", (1,)), TensorSpec("a", "F32", (1,))],
        [TensorSpec("__metadata__", "F32", (1,))],
        [TensorSpec("a", "F31", (1,))],
        [TensorSpec("a", "F32", (-1,))],
        [TensorSpec("a", "F32", (1 << 40, 1 << 40))],
    ],
)
def test_invalid_specs_are_refused(bad: list[TensorSpec]) -> None:
    """Duplicate names, unknown dtypes and impossible shapes are errors of the caller."""
    with pytest.raises(ValueError, match="tensor"):
        Layout.build(bad)


def entry(**changes: Any) -> dict[str, Any]:
    """A header entry of four float32, changed."""
    return {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | changes


def frame_header(table: Any) -> bytes:
    """A header as safetensors writes it, of anything."""
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("table", "data", "error", "text"),
    [
        ({"a": entry()}, 15, TornError, "end at byte"),
        ({"a": entry()}, 17, CorruptError, "only at"),
        ({"a": entry(data_offsets=[4, 20])}, 20, CorruptError, "gap"),
        ({"a": entry(), "b": entry(data_offsets=[8, 24])}, 24, CorruptError, "overlaps"),
        ({"a": entry(shape=[-4])}, 16, CorruptError, "impossible"),
        ({"a": entry(shape=[1 << 60, 1 << 60])}, 16, CorruptError, "impossible"),
        ({"a": entry(shape=4)}, 16, CorruptError, "impossible"),
        ({"a": entry(data_offsets=[16, 0])}, 16, CorruptError, "impossible"),
        ({"a": entry(dtype="F31")}, 16, CorruptError, "impossible"),
        ({"a": entry(extra=1)}, 16, CorruptError, "entry 'a'"),
        ([], 0, CorruptError, "not a JSON object"),
        (b'{"a":1,"a":1}', 0, CorruptError, "occurs twice"),
        (b"\xff\xfe", 0, CorruptError, "not the JSON"),
        (b"[" * 100_000, 0, CorruptError, "not the JSON"),
        # The bytes of b could not be viewed as its dtype.
        (
            {"a": entry(dtype="U8", shape=[1], data_offsets=[0, 1]), "b": entry(data_offsets=[1, 17])},
            17,
            CorruptError,
            "not aligned",
        ),
    ],
)
def test_invalid_header_is_refused(table: Any, data: int, error: type[CheckpointError], text: str) -> None:
    """The message names the tensor or the defect."""
    header = frame_header(table)
    with pytest.raises(error, match=text):
        Layout.parse(header, len(header) + data)


def test_empty_tensor_needs_no_alignment() -> None:
    """It has no bytes; safetensors writes such files."""
    byte = entry(dtype="U8", shape=[1], data_offsets=[0, 1])
    header = frame_header({"a": byte, "b": entry(shape=[0], data_offsets=[1, 1])})
    assert list(Layout.parse(header, len(header) + 1).extents) == ["a", "b"]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: header_size(b"", 0), TornError),
        (lambda: header_size(b"\0" * 7, 100), TornError),
        (lambda: header_size(b"\xff" * 8, 1 << 50), CorruptError),
        (lambda: header_size((MAX_HEADER_BYTES + 1).to_bytes(8, "little"), 1 << 50), CorruptError),
        (lambda: header_size((1000).to_bytes(8, "little"), 1000), TornError),
        (lambda: Layout.parse((1000).to_bytes(8, "little"), 2000), TornError),
    ],
)
def test_header_length_is_limited_before_reading(
    call: Callable[[], object], error: type[CheckpointError]
) -> None:
    """A flipped bit in the length does not make us allocate terabytes."""
    with pytest.raises(error):
        call()
