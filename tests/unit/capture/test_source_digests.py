"""A digest of a source equals that of its copy, and of nothing else, for all layouts and dtypes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from elastic_resume.capture.source_digests import SourceDigests, sum_words
from elastic_resume.state.state_dict import REPLICATED, Leaf

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


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_only_an_exact_copy_has_the_digest_of_its_source(make: Callable[[], Tensor]) -> None:
    """Each bit of the last element counts, and the order of the elements."""
    torch.manual_seed(1)
    source = make()
    digests = SourceDigests([Leaf("t", source, REPLICATED)])
    assert digests.find_torn({"t": copy_of(source)}) == []
    for bit in (1, 128):
        flipped = copy_of(source)
        flipped.view(-1).view(torch.uint8)[-1] ^= bit
        assert digests.find_torn({"t": flipped}) == ["t"]
    if source.numel() > 1:
        assert digests.find_torn({"t": copy_of(source).view(-1).roll(1).view(source.shape)}) == ["t"]


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_sums_of_a_device_tensor_find_each_change(make: Callable[[], Tensor]) -> None:
    """The same function runs on devices; rows, columns and the rest behind the last whole row are summed."""
    torch.manual_seed(1)
    flat = copy_of(make()).view(-1)
    sums = sum_words(flat)
    assert torch.equal(sums, sum_words(flat.clone()))
    for at in {0, flat.numel() // 2, flat.numel() - 1}:
        changed = flat.clone()
        changed[at : at + 1].view(torch.uint8)[-1] ^= 64
        assert not torch.equal(sums, sum_words(changed))
    if flat.numel() > 1:
        assert not torch.equal(sums, sum_words(flat.roll(1)))
