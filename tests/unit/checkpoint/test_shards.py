"""Test how tensors are divided into shards, and their names."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.checkpoint import json_codec
from elastic_resume.checkpoint.json_codec import TensorRef
from elastic_resume.checkpoint.shards import Shards, shard_index, tensor_name


@given(st.integers(0, 40), st.integers(1, 9), st.integers(0, 2))
def test_shards_are_those_of_torch_chunk(size: int, count: int, dim: int) -> None:
    """torch.chunk leaves out empty shards at the end."""
    shape = [2, 3, 4]
    shape[dim] = size
    shards = Shards(dim, size, count)
    found = [shards.shape(index, (2, 3, 4)) for index in range(count)]
    expected = [tuple(part.shape) for part in torch.empty(shape).chunk(count, dim)] if size else []
    assert [each for each in found if each[dim]] == [each for each in expected if each[dim]]
    assert sum(each[dim] for each in found) == size
    assert shards.extent(0)[0] == 0
    assert shards.extent(count - 1)[1] == size


def test_names_tell_the_shard() -> None:
    """A tensor in one piece has a name, and no index; other names may hold an @."""
    assert Shards(0, 4, 2).names("model/w") == ["model/w@0of2", "model/w@1of2"]
    assert [shard_index(name) for name in ("model/w@1of2", "model/w@0of1", "model/w", "a@b")] == [1] + [
        None
    ] * 3
    assert [tensor_name(name) for name in ("w@11of12", "w@0of1", "a@b")] == ["w", "w", "a@b"]


def test_a_reference_keeps_its_shards() -> None:
    """Whatever the numbers; impossible ones are damage."""
    ref = TensorRef("model/w", "tensor", Shards(1, 10, 4))
    assert json_codec.decode(json_codec.encode({"w": ref})) == {"w": ref}
    assert ref.stored_names == [f"model/w@{index}of4" for index in range(4)]
