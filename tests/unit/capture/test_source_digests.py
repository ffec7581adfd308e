"""A digest of a source equals that of its copy, and of nothing else, for all layouts and dtypes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from elastic_resume.capture import source_digests
from elastic_resume.capture.copy_engine import make_tensor_views
from elastic_resume.capture.source_digests import SourceDigests
from elastic_resume.checkpoint.layout import Layout, TensorSpec
from elastic_resume.state.state_dict import REPLICATED, Leaf, make_spec

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(70, 33),
    "scalar": lambda: torch.tensor(3.5),
    "transposed": lambda: torch.randn(20, 30).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "with gaps": lambda: torch.randn(8, 9)[:, ::2],
    "behind an odd offset": lambda: torch.randn(101)[1:],
    "bfloat16": lambda: torch.randn(5000).bfloat16(),
    "float8": lambda: torch.randn(4096).to(torch.float8_e4m3fn),
    "bool": lambda: torch.rand(1500) > 0.5,
    "complex64": lambda: torch.randn(2000, dtype=torch.complex64),
    "complex128": lambda: torch.randn(1030, dtype=torch.complex128),
    "float64": lambda: torch.randn(3, 1024, dtype=torch.float64),
}


def copy_of(tensor: Tensor) -> Tensor:
    """Return a contiguous copy, as a slot holds it."""
    return tensor.clone(memory_format=torch.contiguous_format)


@pytest.mark.parametrize("piece_bytes", [8192, source_digests.PIECE_BYTES])
@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_only_an_exact_copy_has_the_digest_of_its_source(
    make: Callable[[], Tensor], piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each bit counts, the order of the elements, and no later change of the source."""
    monkeypatch.setattr(source_digests, "PIECE_BYTES", piece_bytes)
    torch.manual_seed(1)
    source = make()
    boundary = copy_of(source)
    digests = SourceDigests([Leaf("t", source, REPLICATED)])
    assert digests.find_torn({"t": boundary}) == []
    for at in {0, source.numel() // 2, source.numel() - 1}:
        for bit in (1, 128):
            flipped = copy_of(source)
            flipped.view(-1)[at : at + 1].view(torch.uint8)[-1] ^= bit
            assert digests.find_torn({"t": flipped}) == ["t"]
    if source.numel() > 1:
        assert digests.find_torn({"t": boundary.view(-1).roll(1).view(source.shape)}) == ["t"]
    if source.dim() == 2:
        source.data = source.data.t().contiguous().t()  # the same values in another order
        assert digests.find_torn({"t": boundary}) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_copy_may_lie_anywhere_in_a_slot(dtype: torch.dtype) -> None:
    """Tensors of another dtype before it leave it behind an offset that is no multiple of 8 bytes."""
    sources = {"b": torch.ones(6004 // dtype.itemsize).to(dtype), "c": torch.arange(3000).to(dtype)}
    specs = [make_spec(name, source) for name, source in sources.items()]
    layout = Layout.build([TensorSpec("a", "F32", (3,)), *specs])
    views = make_tensor_views(memoryview(bytearray(layout.total_bytes)), layout)
    for name, source in sources.items():
        views[name].copy_(source)
        assert SourceDigests([Leaf(name, source, REPLICATED)]).find_torn(views) == []


def test_digest_does_not_depend_on_the_default_device() -> None:
    """A script may set it before the first snapshot."""
    source_digests._weights.cache_clear()
    with torch.device("meta"):
        digests = SourceDigests([Leaf("t", torch.ones(3000, device="cpu"), REPLICATED)])
    assert digests.find_torn({"t": torch.ones(3000)}) == []


def test_permuted_rows_and_columns_are_another_tensor() -> None:
    """The sums of all rows, and of all columns, are those of before."""
    source = torch.eye(1024, dtype=torch.int64)
    digests = SourceDigests([Leaf("t", source, REPLICATED)])
    assert digests.find_torn({"t": source.flip(0)}) == ["t"]
    assert digests.find_torn({"t": source.flip(1)}) == ["t"]
    assert digests.find_torn({"t": source.flip(0, 1).clone()}) == []  # the same
