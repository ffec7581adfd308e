"""What is loaded into which object, and what is refused before anything was changed."""

from __future__ import annotations

import contextlib
import re
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

from elastic_resume.errors import MismatchError
from elastic_resume.state import load_objects, state_dict
from elastic_resume.state.state_dict import TrackedTensors
from tests.support.state_image import Box, copy_to_image


def load(saved: dict[str, Any], tracked: dict[str, Any], **more: Any) -> None:
    """Load the state of ``saved`` into ``tracked``."""
    flat = state_dict.flatten(saved)
    load_objects.load_into(
        tracked, flat.structure, more.pop("get_tensor", copy_to_image(flat).tensor), **more
    )


def make_optimizer(value: float) -> torch.optim.Adam:
    """Make an optimizer of a bfloat16 parameter, whose moments have more bits, and with other state."""
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    optimizer = torch.optim.Adam([parameter])
    moment = torch.full((2,), value)
    optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": moment, "count": 3}
    optimizer.state.update({"of all": {"moment": moment}, 7: {"moment": moment}})  # type: ignore[dict-item]
    return optimizer


def test_dtypes_of_optimizer_state_are_kept() -> None:
    """PyTorch casts them to the parameter's, which would round them."""
    optimizer = make_optimizer(0)
    load({"optimizer": make_optimizer(1 / 3)}, {"optimizer": optimizer})
    by_parameter = optimizer.state[optimizer.param_groups[0]["params"][0]]
    assert by_parameter["count"] == 3
    for state in (by_parameter["exp_avg"], *(optimizer.state[key]["moment"] for key in ("of all", 7))):  # type: ignore[index]
        assert state.dtype == torch.float32
        assert torch.equal(state, torch.full((2,), 1 / 3))


@pytest.mark.parametrize(
    ("here", "there"),
    [("new", ""), ("", "old"), ("new", "initial_lr"), ("initial_lr", "old"), ("new", "old")],
)
def test_setting_of_another_release_of_torch_is_no_mismatch(here: str, there: str) -> None:
    """A scheduler's is none either. Missing ones beside extra ones are those of another optimizer."""
    tracked, saved = ({"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())} for _ in range(2))
    for objects, key in ((tracked, here), (saved, there)):
        objects["optimizer"].param_groups[0].update({key: 1} if key else {})
    is_other = (here, there) == ("new", "old")
    with pytest.raises(MismatchError, match="has new now, old in") if is_other else contextlib.nullcontext():
        load(saved, tracked)


class WithExtraState(nn.Linear):
    """A module with state of any shape."""

    def __init__(self, extra: Tensor) -> None:
        super().__init__(1, 1)
        self.extra = extra

    def get_extra_state(self) -> Tensor:
        """Return it."""
        return self.extra

    def set_extra_state(self, state: Tensor) -> None:
        """Load it."""
        self.extra = state


def test_extra_state_is_compared_by_its_module_if_both_have_it() -> None:
    """Its shape may change."""
    model = WithExtraState(torch.zeros(2))
    load({"model": WithExtraState(torch.ones(3))}, {"model": model})
    assert model.extra.tolist() == [1.0] * 3
    for saved, live, text in (
        (nn.Linear(1, 1), model, "_extra_state: float32[3] in the model, absent"),
        (model, nn.Linear(1, 1), "_extra_state: absent in the model, float32[3]"),
    ):
        with pytest.raises(MismatchError, match=re.escape(text)):
            load({"model": saved}, {"model": live})


def test_tracked_tensors_and_modules_are_overwritten_and_other_objects_get_new_tensors() -> None:
    """Modules may be shared with an optimizer; others keep what `make_tensor` returns."""
    tensor, model, box = torch.zeros(2), nn.Linear(1, 1), Box()
    saved = {
        "own": TrackedTensors("own", [torch.ones(2)]),
        "model": nn.Linear(1, 1),
        "box": Box(torch.ones(1)),
    }
    made = torch.full((1,), 5.0)
    load(
        saved,
        {"own": TrackedTensors("own", [tensor]), "model": model, "box": box},
        make_tensor=lambda _: made,
    )
    assert (tensor.tolist(), box.value) == ([1.0] * 2, made)
    assert torch.equal(model.weight, saved["model"].weight)  # type: ignore[attr-defined]


def test_shapes_are_compared_before_any_value_arrives() -> None:
    """Nothing is changed if one object does not fit."""

    def fail(_: str) -> NoReturn:
        raise AssertionError("waited for a value")

    saved = {"model": nn.Linear(1, 1)}
    peek = copy_to_image(state_dict.flatten(saved)).tensor
    with pytest.raises(
        MismatchError, match=r"model/weight: float32\[2, 1\] in the model, float32\[1, 1\] in the"
    ):
        load(saved, {"model": nn.Linear(1, 2)}, get_tensor=fail, peek_tensor=peek)


def test_object_of_the_script_may_have_other_keys() -> None:
    """It reads what it knows."""

    class Renamed(Box):
        def state_dict(self) -> dict[str, Any]:
            return {"renamed": self.value}

    renamed = Renamed()
    load({"box": Box(7)}, {"box": renamed})
    assert renamed.value == 7


class Batches(Box):
    """An object that compares itself with a stored state."""

    def differences(self, stored: dict[str, Any]) -> list[str]:
        """Return the differences."""
        return [f"batches: {self.value} now, {stored['value']} in the checkpoint"]


@pytest.mark.parametrize(
    ("saved", "tracked", "texts"),
    [
        ({}, {"batches": Batches(1)}, ["batches: tracked now, not in the checkpoint"]),
        ({"batches": Batches(2)}, {"batches": Batches(1)}, ["batches: 1 now, 2 in the checkpoint"]),
        ({"scheduler": Box(1)}, {}, ["scheduler: in the checkpoint, not passed to resume()"]),
        ({f"b{i}": Box() for i in range(50)}, {}, ["b49: in the"]),
        ({f"b{i}": Box() for i in range(52)}, {}, ["b49: in the", "\n  and 2 more"]),
        (
            {"model": Box()},
            {"model": nn.Linear(1, 1)},
            ["model/weight: float32[1, 1] in the model, absent in"],
        ),
        (
            {"own": Box(1)},
            {"own": TrackedTensors("own", {"value": torch.ones(1)})},
            ["in the tracked tensors, not"],
        ),
    ],
)
def test_objects_that_do_not_fit_are_named(
    saved: dict[str, Any], tracked: dict[str, Any], texts: list[str]
) -> None:
    """At most fifty of them."""
    with pytest.raises(MismatchError, match="nothing was loaded") as raised:
        load(saved, tracked)
    assert all(text in str(raised.value) for text in texts)
    assert ("more" in str(raised.value)) == ("more" in texts[-1])


# ---- buffers whose shape the first batch decides -------------------------------------------------------


class LateBuffer(nn.Module):
    """A module whose buffer is ``first``, and may load it by code of its own."""

    def __init__(self, first: Tensor | None) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.register_buffer("late", first)


class LoadsItself(LateBuffer):
    """It takes the shape of the state."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        if prefix + "late" in state:
            self.late = torch.zeros_like(state[prefix + "late"])
        super()._load_from_state_dict(state, prefix, *args)


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        (LateBuffer, None),
        (LateBuffer, torch.zeros(0)),
        (LoadsItself, None),
        (LoadsItself, torch.zeros(0)),
        (LoadsItself, torch.zeros(3)),
    ],
)
@pytest.mark.parametrize("wrap", [lambda model: model, nn.Sequential, nn.DataParallel])
def test_buffer_takes_the_shape_of_the_checkpoint(kind: type[LateBuffer], first: Any, wrap: Any) -> None:
    """A placeholder holds nothing, and a module that loads its buffers itself knows which shapes fit."""
    saved, target = nn.Sequential(wrap(kind(torch.full((2,), 7.0)))), nn.Sequential(wrap(kind(first)))
    load({"model": saved}, {"model": target})
    assert target.state_dict()[next(k for k in target.state_dict() if k.endswith("late"))].tolist() == [7, 7]
    assert state_dict.flatten({"model": target}).structure == state_dict.flatten({"model": saved}).structure


@pytest.mark.parametrize(
    ("saved", "target", "told"),
    [
        (LateBuffer(torch.ones(2)), LateBuffer(torch.ones(3)), r"model/late: float32\[3\] in the model"),
        (LateBuffer(None), LateBuffer(torch.ones(3)), "model/late: .* absent in the checkpoint"),
        (nn.BatchNorm1d(2, affine=False), nn.BatchNorm1d(3, affine=False), "model/running_mean"),
    ],
)
def test_buffer_of_another_shape_is_refused(saved: nn.Module, target: nn.Module, told: str) -> None:
    """A model that has changed is no model that waits for its first batch."""
    with pytest.raises(MismatchError, match=told):
        load({"model": saved}, {"model": target})


def test_module_that_refuses_its_state_is_named() -> None:
    """Its own code decides, so its error says why."""
    target = LoadsItself(None)
    target.register_buffer("other", torch.zeros(1))
    saved = LoadsItself(torch.ones(2))
    saved.register_buffer("other", torch.zeros(3))
    with pytest.raises(MismatchError, match=r"(?s)LoadsItself refuses the checkpoint's state.*size mismatch"):
        load({"model": saved}, {"model": target})


# ---- optimizers that share their groups ----------------------------------------------------------------


class Sam(torch.optim.Optimizer):
    """Shares groups with its base, as SAM and Lookahead do; ``relinks`` as SAM's load_state_dict()."""

    def __init__(self, parameters: Any, relinks: bool) -> None:
        super().__init__(parameters, {"lr": 0.1, "momentum": 0.9})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups
        self.state = self.base.state
        self.relinks = relinks

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load, and share again."""
        super().load_state_dict(state)
        if self.relinks:
            self.base.param_groups = self.param_groups


@pytest.mark.parametrize("relinks", [False, True])
@pytest.mark.parametrize("names", [("sam", "base"), ("base", "sam"), ("sam",)])
def test_optimizers_share_their_groups_after_a_load(names: tuple[str, ...], relinks: bool) -> None:
    """A scheduler of either sets the learning rate of both."""

    def build(lr: float) -> tuple[Sam, dict[str, Any]]:
        model = nn.Linear(1, 1)
        sam = Sam(model.parameters(), relinks)
        model(torch.ones(1)).backward()
        sam.base.step()
        sam.param_groups[0]["lr"] = lr
        tracked = {"sam": sam, "base": sam.base}
        return sam, {"model": model, **{name: tracked[name] for name in names}}

    (_, saved), (sam, tracked) = build(0.5), build(0.2)
    groups, group = sam.param_groups, sam.param_groups[0]
    load(saved, tracked)
    assert sam.param_groups is sam.base.param_groups is groups
    assert sam.param_groups[0] is group
    assert group["lr"] == 0.5
    assert sam.state is sam.base.state
    assert group["params"][0] in sam.state
    assert torch.equal(
        sam.state[group["params"][0]]["momentum_buffer"],
        saved[names[0]].state[saved[names[0]].param_groups[0]["params"][0]]["momentum_buffer"],
    )


def test_groups_of_other_optimizers_are_left_to_torch() -> None:
    """Nothing is shared, so each load makes new groups."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    tracked, groups = {"model": model, "optimizer": optimizer}, optimizer.param_groups
    load(tracked, tracked)
    assert optimizer.param_groups is not groups
