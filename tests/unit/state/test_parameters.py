"""Parameters that a script gives to an optimizer, freezes or unfreezes while it trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elastic_resume.errors import MismatchError
from elastic_resume.state import load_objects, state_dict
from elastic_resume.state.parameters import FrozenParameters, ParameterOrder
from tests.support.state_image import copy_to_image

ORDER, FROZEN = "elastic_resume.parameters", "elastic_resume.frozen"


def build(*groups: str, named: bool = False) -> dict[str, Any]:
    """Build a model, and an optimizer with a group for each of its parts that is named."""
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("body", "neck", "head")})
    optimizer: torch.optim.Optimizer = torch.optim.Adam(
        [{"params": parameters_of(model, name, named=named), "lr": 0.1} for name in groups]
    )
    tracked = {"model": model, "optimizer": optimizer}
    return {**tracked, FROZEN: FrozenParameters(tracked), ORDER: ParameterOrder(tracked)}


def parameters_of(model: nn.ModuleDict, name: str, *, named: bool = False) -> Any:
    """Return the parameters of a part, with their names or without."""
    return list(model[name].named_parameters(name)) if named else list(model[name].parameters())


def add_group(tracked: dict[str, Any], name: str, *, named: bool = False) -> None:
    """Add a part to the optimizer, as a script does while it trains, and take a step."""
    parameters = parameters_of(tracked["model"], name, named=named)
    tracked["optimizer"].add_param_group({"params": parameters, "lr": 0.01})
    for parameter in tracked["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    tracked["optimizer"].step()


def load(saved: dict[str, Any], tracked: dict[str, Any]) -> None:
    """Load the state of ``saved`` into ``tracked``."""
    flat = state_dict.flatten(saved)
    load_objects.load_into(tracked, flat.structure, copy_to_image(flat).tensor)


def digest(tracked: dict[str, Any]) -> Any:
    """Return what a checkpoint of ``tracked`` would hold."""
    flat = state_dict.flatten(tracked)
    return state_dict.digest_leaves(flat.leaves), flat.structure


@pytest.mark.parametrize("named", [False, True])
def test_groups_added_while_training_are_restored(named: bool) -> None:
    """Also for a script that builds one of them itself, and after another restart."""
    saved = build("head", named=named)
    add_group(saved, "body", named=named)
    add_group(saved, "neck", named=named)
    for built in (("head",), ("head", "body")):
        tracked = build(*built, named=named)
        load(saved, tracked)
        assert digest(tracked) == digest(saved)
        again = build("head", named=named)
        load(tracked, again)
        assert digest(again) == digest(saved)
        load(saved, again)  # after an attempt that had added them
        assert digest(again) == digest(saved)


def test_attempt_with_an_older_state_removes_added_groups() -> None:
    """The newest state had one group more, and could not be loaded whole."""
    newest, older, tracked = build("head"), build("head"), build("head")
    add_group(newest, "body")
    load(newest, tracked)
    load(older, tracked)
    assert digest(tracked) == digest(older)


@pytest.mark.parametrize(("then", "now"), [(("head", "body"), ("head",)), (("head",), ("head", "body"))])
def test_script_that_builds_other_groups_is_refused(then: tuple[str, ...], now: tuple[str, ...]) -> None:
    """A changed script is no group that was added."""
    with pytest.raises(MismatchError, match="optimizer: groups of"):
        load(build(*then), build(*now))


def test_added_group_of_parameters_without_a_name_is_refused() -> None:
    """Nobody could say which parameters they are."""
    saved = build("head")
    saved["optimizer"].add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(MismatchError, match=r"groups of \[2\] parameters now, \[2, 1\]"):
        load(saved, build("head"))


def test_flags_of_parameters_are_restored() -> None:
    """Both ways, and a checkpoint that does not know them changes none."""
    saved, tracked = build("head"), build("head")
    saved["model"]["body"].requires_grad_(False)
    tracked["model"]["neck"].requires_grad_(False)
    tracked[FROZEN] = FrozenParameters({"model": tracked["model"]})
    flat = state_dict.flatten(saved)
    old = {key: value for key, value in flat.structure.items() if key != FROZEN}
    load_objects.load_into(tracked, old, copy_to_image(flat).tensor)
    assert {n for n, p in tracked["model"].named_parameters() if not p.requires_grad} == {
        "neck.weight",
        "neck.bias",
    }
    load(saved, tracked)
    assert {n for n, p in tracked["model"].named_parameters() if not p.requires_grad} == {
        "body.weight",
        "body.bias",
    }
    assert tracked[FROZEN].find_unfrozen(tracked["model"]) == ["model/neck.weight", "model/neck.bias"]


def test_ddp_sees_all_parameters_that_are_trained_at_some_time() -> None:
    """A GAN freezes its discriminator for half of each step, so a step boundary may have it frozen."""
    tracked = build("head")
    model, frozen = tracked["model"], tracked[FROZEN]
    model["body"].requires_grad_(False)
    for keys, thawed in ((None, True), (["body.weight", "body.bias"], True), (["head.weight"], False)):
        with frozen.thawed("model", keys):
            assert all(p.requires_grad for p in model["body"].parameters()) is thawed
        assert not model["body"].weight.requires_grad
    assert model["head"].weight.requires_grad
