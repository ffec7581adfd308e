"""Live objects are flattened to named tensors and loaded again."""

from __future__ import annotations

import copy
import datetime as dt
import re
from collections import OrderedDict, deque
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from elastic_resume.errors import ConfigError, MismatchError, UntrackableError
from elastic_resume.state import load_objects, state_dict
from elastic_resume.state.state_dict import TensorBuffer
from tests.support.state_image import Box, copy_to_image


def carry(source: dict[str, Any], target: dict[str, Any]) -> TensorBuffer:
    """Save ``source`` into an image and load that into ``target``."""
    flat = state_dict.flatten(state_dict.collect_objects(source))
    image = copy_to_image(flat)
    load_objects.load_into(state_dict.collect_objects(target), flat.structure, image.tensor)
    return image


def trained(seed: int = 0) -> dict[str, Any]:
    """Return a small model, optimizer and scheduler after some steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def test_name_of_a_shard_is_refused_for_a_tensor() -> None:
    """A checkpoint would hold two tensors of one name. Other names may contain the sign."""
    for name, is_refused in (("w@1of2", True), ("w@1of2.b", False), ("w@b", False)):
        tracked = state_dict.collect_objects({"average": {name: torch.ones(2)}})
        if is_refused:
            with pytest.raises(UntrackableError, match=f"average/{name}: rename it"):
                state_dict.flatten(tracked)
        else:
            assert state_dict.flatten(tracked).leaves[0].name == f"average/{name}"


def test_model_optimizer_and_scheduler_are_restored_bit_for_bit() -> None:
    """After loading, one more step gives the same weights."""
    first, second = trained(0), trained(1)
    carry(first, second)
    for objects in (first, second):
        torch.manual_seed(9)
        objects["optimizer"].zero_grad()
        objects["model"](torch.randn(5, 4)).sum().backward()
        objects["optimizer"].step()
        objects["scheduler"].step()
    for a, b in zip(first["model"].state_dict().values(), second["model"].state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert first["scheduler"].state_dict() == second["scheduler"].state_dict()


def test_loaded_tensors_do_not_share_image_memory() -> None:
    """Shared memory would change with the next image, and could not be freed."""
    first, second = trained(0), trained(1)
    image = carry(first, second)
    before = copy.deepcopy(second["optimizer"].state_dict()["state"][0]["exp_avg"])
    image.memory[len(image.layout.header) :] = bytes(len(image.memory) - len(image.layout.header))
    assert torch.equal(second["optimizer"].state_dict()["state"][0]["exp_avg"], before)
    assert first["model"][0].weight.abs().sum() == second["model"][0].weight.abs().sum() != 0


def test_names_contain_no_wrapper_and_load_both_ways() -> None:
    """torchtitan#961: checkpoints full of module. and _orig_mod."""
    bare = nn.Sequential(nn.Linear(3, 3))
    wrapped = nn.DataParallel(compiled(nn.Sequential(nn.Linear(3, 3))))
    names = {leaf.name for leaf in state_dict.flatten(state_dict.collect_objects({"model": wrapped})).leaves}
    assert names == {"model/0.weight", "model/0.bias"}
    carry({"model": bare}, {"model": wrapped})
    inner = state_dict.unwrap(wrapped)
    assert torch.equal(linear(inner, "0").weight, linear(bare, "0").weight)


def test_names_contain_no_inner_compile_wrapper() -> None:
    """torch.compile on a part puts _orig_mod in the middle of a name."""
    model = nn.Sequential(nn.Linear(2, 2), compiled(nn.Linear(2, 2)))
    names = {leaf.name for leaf in state_dict.flatten({"model": model}).leaves}
    assert names == {"model/0.weight", "model/0.bias", "model/1.weight", "model/1.bias"}
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    carry({"model": model}, {"model": plain})
    assert torch.equal(linear(plain, "1").weight, model.state_dict()["1._orig_mod.weight"])


def test_module_named_module_keeps_its_name() -> None:
    """AveragedModel holds its model under module.; only the prefix of DDP and DataParallel is removed."""
    average = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
    names = {leaf.name for leaf in state_dict.flatten({"ema": average}).leaves}
    assert names == {"ema/module.weight", "ema/module.bias", "ema/n_averaged"}


def test_tied_weights_are_stored_once() -> None:
    """Both names are restored."""
    model, other = (
        nn.Sequential(OrderedDict[str, nn.Module](a=nn.Linear(3, 3), b=nn.Linear(3, 3))) for _ in range(2)
    )
    for one in (model, other):
        linear(one, "b").weight = linear(one, "a").weight
    flat = state_dict.flatten({"model": model})
    assert [leaf.name for leaf in flat.leaves if "weight" in leaf.name] == ["model/a.weight"]
    carry({"model": model}, {"model": other})
    assert torch.equal(linear(other, "b").weight, linear(model, "a").weight)


def test_parameters_and_optimizer_state_are_replicated_but_not_buffers() -> None:
    """Only what data-parallel training keeps equal must be equal."""
    kinds = {
        leaf.name: leaf.kind for leaf in state_dict.flatten(state_dict.collect_objects(trained())).leaves
    }
    assert kinds["model/0.weight"] == kinds["optimizer/state/0/exp_avg"] == state_dict.REPLICATED
    assert kinds["model/1.running_mean"] == state_dict.BUFFER


def compiled(model: nn.Module) -> nn.Module:
    """Wrap as torch.compile does."""
    return cast("nn.Module", torch.compile(model, backend="eager"))


def linear(model: nn.Module, name: str) -> nn.Linear:
    """Give a layer, typed."""
    layer = model.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    return layer


DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
    *(torch.int8, torch.int64, torch.uint8, torch.uint64, torch.bool),
]


PLAIN_VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3) | st.binary()
)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Draw a tensor of any dtype and shape, whole or a strided part of another."""
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    made = torch.arange(4 ** len(shape)).reshape([4] * len(shape)).to(draw(st.sampled_from(DTYPES)))
    made = made[tuple(slice(0, size) for size in shape)]
    return made.t() if made.dim() == 2 and draw(st.booleans()) else made


def nested(leaf: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw containers of any nesting around ``leaf``."""
    return st.recursive(
        leaf,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=5))
            | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
            | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict)
        ),
        max_leaves=8,
    )


def alike(one: Any, other: Any) -> bool:
    """Return whether two nested states have the same types and values, tensors bit for bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        prints = [
            state_dict.digest_leaves([state_dict.Leaf("", part, state_dict.OTHER)]) for part in (one, other)
        ]
        return prints[0] == prints[1]
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


@settings(max_examples=100, deadline=None)
@given(nested(tensors() | PLAIN_VALUES))
@example({"1": torch.ones(1), 1: torch.zeros(1)})
@example(torch.zeros(2, dtype=torch.int8).expand(3, 2))
def test_tensors_in_any_container_are_restored(value: Any) -> None:
    """Types, order, dtypes, shapes and bits; keys 1 and "1" stay apart."""
    target = Box()
    carry({"box": Box(value)}, {"box": target})
    assert alike(target.value, value)


class Odd:
    """A value that cannot be stored."""


UNFIT = {
    "tests.unit.state.test_state_dict.Odd": Odd(),
    "layout torch.sparse_coo": torch.eye(2).to_sparse(),
    "builtin_function_or_method": print,
    "meta device": torch.empty(2, device="meta"),
    "lazy": nn.LazyLinear(2).weight,
    "datetime.date": dt.date(2020, 1, 1),
}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([list, tuple, dict, OrderedDict, deque]), max_size=5),
    st.sampled_from(list(UNFIT)),
)
def test_unsupported_value_is_refused_with_path_and_type(around: list[Any], told: str) -> None:
    """The error ends with the exact place."""
    value: Any = UNFIT[told]
    for kind in around:
        value = kind({"inner": value}) if kind in {dict, OrderedDict} else kind([0, value])
    steps = ["inner" if kind in {dict, OrderedDict} else "1" for kind in reversed(around)]
    with pytest.raises(UntrackableError) as caught:
        state_dict.flatten({"box": Box(value)})
    path, _, reason = str(caught.value).partition(": ")
    assert re.findall(r"\w+", path) == ["box", "value", *steps]
    assert told in reason


def test_numpy_arrays_and_scalars_keep_their_type() -> None:
    """RNG states of numpy hold them."""
    target = Box()
    carry({"box": Box({"a": np.arange(4, dtype=np.uint32), "s": np.float64(2.5)})}, {"box": target})
    assert isinstance(target.value["a"], np.ndarray)
    assert target.value["a"].tolist() == [0, 1, 2, 3]
    assert isinstance(target.value["s"], np.float64)


def test_optimizer_or_scheduler_of_other_type_is_refused() -> None:
    """Torch would load the state, and fail at the first step or train differently."""
    model = nn.Linear(2, 2)
    adam, sgd = torch.optim.Adam(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.optim.lr_scheduler.StepLR(adam, 3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 3)
    with pytest.raises(MismatchError, match=r"optimizer/param_groups/0: has .*momentum.* now, .*betas"):
        carry({"optimizer": adam}, {"optimizer": sgd})
    with pytest.raises(MismatchError, match=r"scheduler: has T_max.* now, gamma.*CosineAnnealingLR"):
        carry({"scheduler": step}, {"scheduler": cosine})
    carry({"optimizer": adam, "scheduler": step}, {"optimizer": adam, "scheduler": step})


def test_expanded_buffer_is_refused() -> None:
    """At the first save, not at the first resume."""
    model = nn.Linear(2, 2)
    model.register_buffer("grid", torch.zeros(1, 4).expand(3, 4))
    with pytest.raises(UntrackableError, match=r"model/grid: .*clone\(\)"):
        state_dict.flatten({"model": model})


def test_recursive_state_is_refused() -> None:
    """A cycle is an error, not a crash."""
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UntrackableError, match="box"):
        state_dict.flatten({"box": Box(loop)})


def test_load_lists_every_mismatch_and_changes_nothing() -> None:
    """The model has other shapes than the checkpoint."""
    big, small = (
        nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)),
        nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)),
    )
    flat = state_dict.flatten({"model": big})
    image = copy_to_image(flat)
    before = copy.deepcopy(small.state_dict())
    with pytest.raises(MismatchError) as caught:
        load_objects.load_into({"model": small}, flat.structure, image.tensor)
    for line in (
        "model/0.weight: float32[6, 4] in the model, float32[8, 4] in the checkpoint",
        "model/0.bias: float32[6] in the model, float32[8] in the checkpoint",
        "model/1.weight: float32[2, 6] in the model, float32[2, 8] in the checkpoint",
    ):
        assert line in str(caught.value)
    assert all(torch.equal(before[key], value) for key, value in small.state_dict().items())


def test_load_lists_missing_and_extra_objects() -> None:
    """Both directions."""
    flat = state_dict.flatten(state_dict.collect_objects({"model": nn.Linear(1, 1), "ema": Box(1)}))
    with pytest.raises(MismatchError, match=r"teacher: tracked now[\s\S]*ema: in the checkpoint"):
        load_objects.load_into(
            state_dict.collect_objects({"model": nn.Linear(1, 1), "teacher": Box(1)}),
            flat.structure,
            copy_to_image(flat).tensor,
        )


def test_nested_dicts_name_their_objects() -> None:
    """A GAN's two models; duplicate names and objects without state are refused."""
    tracked = state_dict.collect_objects(
        {"model": {"g": nn.Linear(1, 1), "d": nn.Linear(1, 1)}, "scaler": None}
    )
    assert list(tracked) == ["model.g", "model.d"]
    with pytest.raises(ConfigError, match="two objects"):
        state_dict.collect_objects({"model": {"g": Box()}, "model.g": Box()})
    with pytest.raises(UntrackableError, match=r"rate: float has no state_dict"):
        state_dict.collect_objects({"rate": 0.5})


def test_digests_differ_for_values_shapes_and_dtypes() -> None:
    """Equal bytes with another shape have another digest."""

    def prints(tensor: Tensor) -> str:
        return state_dict.combine_digests(
            state_dict.digest_leaves([state_dict.Leaf("t", tensor, state_dict.REPLICATED)])
        )

    kept = {
        prints(t)
        for t in (torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), torch.ones(4))
    }
    assert len(kept) == 4
    assert prints(torch.arange(6).view(2, 3).t()) == prints(torch.arange(6).view(2, 3).t().contiguous())
