"""StateTracker.read_state equals state_dict.flatten after any change of the tracked objects."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from elastic_resume.capture.state_cache import StateTracker, StateView
from elastic_resume.data import rng
from elastic_resume.errors import UntrackableError
from elastic_resume.slots import slot_memory
from elastic_resume.state import state_dict
from elastic_resume.state.bucket_order import BucketOrder
from elastic_resume.state.parameters import ParameterOrder
from tests.support.state_image import Box

pytestmark = pytest.mark.slow


class Parts(nn.Module):
    """Linear, BatchNorm, an embedding, a non-persistent buffer, and a missing bias."""

    scale: Tensor
    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.spare = nn.Parameter(torch.randn(3))  # never gets a gradient
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Score five classes."""
        scores: Tensor = self.head(self.norm(self.embed(x))) * self.scale
        return scores


class Counting(nn.Linear):
    """A layer with extra state."""

    calls = 0

    def get_extra_state(self) -> dict[str, Any]:
        """Return the count."""
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        """Load the count."""
        self.calls = state["calls"]


class Sums(torch.optim.Optimizer):
    """An optimizer that keeps Python numbers for each parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Count the step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                own = self.state[parameter]
                own["seen"] = own.get("seen", 0) + 1
                own["last"] = parameter.detach().clone()


class Assigning(torch.optim.Optimizer):
    """An optimizer that replaces its state tensors and parameter data."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Take a step of momentum SGD."""
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                own = self.state[parameter]
                own["mean"] = own.get("mean", torch.zeros_like(parameter)) * 0.9 + parameter.grad
                parameter.data = parameter.data - 0.1 * own["mean"]


def names(view: StateView) -> list[str]:
    """Return the names of the cached tensors."""
    return [leaf.name for leaf in view.cached.leaves]


def described(leaves: Any) -> dict[str, Any]:
    """Return kind, dtype and shape of the tensors by name."""
    return {leaf.name: (leaf.kind, leaf.tensor.dtype, tuple(leaf.tensor.shape)) for leaf in leaves}


def check(tracker: StateTracker, tracked: dict[str, Any]) -> StateView:
    """Read the state and compare it with flatten, bit for bit."""
    view, flat = tracker.read_state(), state_dict.flatten(tracked)
    merged = slot_memory.merge_state(view.cached.static_structure, view.dynamic_structure)
    assert merged == flat.structure
    assert repr(merged) == repr(flat.structure)  # the order of names as well
    assert described(view.leaves) == described(flat.leaves)
    assert len(view.leaves) == len(flat.leaves)
    fixed, order = set(names(view)), [leaf.name for leaf in flat.leaves]
    assert names(view) == [name for name in order if name in fixed]
    assert [leaf.name for leaf in view.uncached_leaves] == [name for name in order if name not in fixed]
    assert state_dict.digest_leaves(view.leaves) == state_dict.digest_leaves(flat.leaves)
    assert len(view.cached.may_overlap) == len(view.cached.leaves)
    return view


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take one training step."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.randint(0, 5, (6,))).square().mean()
        loss.backward()
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


# One of each way to keep state; tests/integration/test_state_kinds.py has all of torch's optimizers.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "tensor-lr": lambda p: torch.optim.Adam(p, torch.tensor(0.01)),
    "numpy-lr": lambda p: torch.optim.SGD(p, np.float64(0.01), momentum=0.9),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=2),
    "asgd": torch.optim.ASGD,
    "python-numbers": Sums,
    "assigning": Assigning,
}

# These replace the tensors of their state at each step, so nothing stays cached.
REPLACING = [OPTIMIZERS[name] for name in ("asgd", "assigning")]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_read_state_equals_flatten_after_each_optimizer_step(
    make: Callable[[Any], torch.optim.Optimizer],
) -> None:
    """Before the first step, when state appears, and afterwards."""
    torch.manual_seed(0)
    model = Parts()
    optimizer = make(model.parameters())
    tracked: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "seed": rng.RandomNumbers("derived", 3),
    }
    if not isinstance(optimizer, torch.optim.LBFGS):
        tracked["scheduler"] = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 20, cycle_momentum=False)
    tracked |= {
        "scaler": torch.amp.GradScaler("cpu"),
        "ema": AveragedModel(model, use_buffers=True),
        "odd": Box({"list": [1, (2.0, None)], 3: np.arange(3), "t": torch.ones(2)}),
        "order": ParameterOrder({"model": model, "optimizer": optimizer}),
    }
    tracker = StateTracker(tracked)
    views = [check(tracker, tracked)]
    for step in range(6):
        train(model, optimizer)
        if "scheduler" in tracked:
            tracked["scheduler"].step()
        tracked["ema"].update_parameters(model)
        tracked["odd"].value["t"] = torch.full((2,), float(step))
        views.append(check(tracker, tracked))
    assert names(views[-1]) == names(views[-2])
    if make not in REPLACING:
        assert views[-1].cached is views[-2].cached
        assert views[0].cached.version <= views[-1].cached.version <= 4


def test_read_state_equals_flatten_with_many_named_groups() -> None:
    """Groups keep their parameters' names, and learning rates change one by one."""
    model = Parts()
    groups = [{"params": [item], "lr": 0.1 / (i + 1)} for i, item in enumerate(model.named_parameters())]
    optimizer = torch.optim.Adam(groups)
    tracked = {"model": model, "optimizer": optimizer}
    tracker = StateTracker(tracked)
    first = check(tracker, tracked)
    optimizer.param_groups[1]["lr"] = 7.0
    second = check(tracker, tracked)
    assert second.cached is first.cached
    assert second.dynamic_structure["optimizer"]["param_groups"][1]["lr"] == 7.0
    optimizer.param_groups[1]["extra"] = [1]
    check(tracker, tracked)
    optimizer.param_groups[1]["extra"].append(2)
    check(tracker, tracked)
    optimizer.param_groups[0]["param_names"] = ["renamed"]
    assert check(tracker, tracked).cached is not first.cached
    added = nn.Parameter(torch.randn(2))
    optimizer.add_param_group({"params": [("added", added)]})
    check(tracker, tracked)


def _hook(model: Parts) -> None:
    def drop(_module: nn.Module, states: dict[str, Any], prefix: str, _metadata: Any) -> None:
        del states[prefix + "weight"]

    model.norm.register_state_dict_post_hook(drop)


def _not_persistent(model: Parts) -> None:
    model._non_persistent_buffers_set.discard("cache")
    model._non_persistent_buffers_set.add("scale")


def _set(model: Parts) -> None:
    with torch.no_grad():
        model.head.weight.set_(torch.randn(7, 4))  # type: ignore[call-overload]


CHANGES: dict[str, Callable[[Parts], Any]] = {
    "another parameter": lambda m: setattr(m.head, "weight", nn.Parameter(torch.randn(5, 4))),
    "another shape": lambda m: setattr(m.head, "weight", nn.Parameter(torch.randn(6, 4))),
    "one more parameter": lambda m: setattr(m, "more", nn.Parameter(torch.randn(2))),
    "one less": lambda m: delattr(m, "spare"),
    "one that was None": lambda m: setattr(m.head, "bias", nn.Parameter(torch.randn(5))),
    "one that becomes None": lambda m: setattr(m, "spare", None),
    "another module": lambda m: setattr(m, "head", nn.Linear(4, 5)),
    "one more module": lambda m: m.add_module("more", nn.Linear(1, 1)),
    "one more buffer": lambda m: m.register_buffer("more", torch.ones(2)),
    "other buffers are persistent": _not_persistent,
    "data elsewhere": lambda m: setattr(m.head.weight, "data", torch.randn(5, 4)),
    "data of another stride": lambda m: setattr(m.head.weight, "data", torch.randn(4, 5).t()),
    "data of another dtype": lambda m: setattr(m.head.weight, "data", torch.randn(5, 4).half()),
    "data of another shape": lambda m: setattr(m.head.weight, "data", torch.randn(2, 4)),
    "data cut in place": lambda m: setattr(m.head.weight, "data", m.head.weight.data[:2]),
    "data of one element": lambda m: setattr(m.head.weight, "data", m.head.weight.data[:1]),
    "the whole model in half": lambda m: m.half(),
    "set_": _set,
    "a hook": _hook,
    "a parametrization": lambda m: torch.nn.utils.parametrizations.weight_norm(m.head),
    "tied weights": lambda m: setattr(m.head, "weight", m.embed.weight),
    "tied memory": lambda m: setattr(m.head.weight, "data", m.embed.weight.data),
    "a complex one": lambda m: setattr(m, "phase", nn.Parameter(torch.randn(3, dtype=torch.complex64))),
    "a wrapper inside": lambda m: setattr(m, "head", nn.DataParallel(m.head)),
    "extra state": lambda m: setattr(m, "head", Counting(4, 5)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_model_invalidates_cache(change: Callable[[Parts], Any]) -> None:
    """Further reads keep the new cache."""
    model = Parts()
    tracked = {"model": model, "optimizer": torch.optim.Adam(model.parameters())}
    tracker = StateTracker(tracked)
    before = check(tracker, tracked)
    change(model)
    after = check(tracker, tracked)
    assert after.cached is not before.cached
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert check(tracker, tracked).cached is after.cached


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.register_buffer("cache", torch.ones(9), persistent=False),
        lambda m: m.register_buffer("more", torch.ones(2), persistent=False),
        lambda m: m.head.weight.add_(1),
        lambda m: m.to(torch.float32),
        nn.Module.zero_grad,
    ],
)
def test_changed_values_keep_cache(change: Callable[[Parts], Any]) -> None:
    """Changed values and non-persistent state keep the cached part."""
    model = Parts()
    tracked = {"model": model, "alias": Box(model.embed.weight)}
    tracker = StateTracker(tracked)
    before = check(tracker, tracked)
    with torch.no_grad():
        change(model)
    assert check(tracker, tracked).cached is before.cached
    assert check(tracker, tracked).cached is before.cached


def test_tied_memory_is_stored_once_until_address_or_stride_changes() -> None:
    """Two parameters over the same memory."""
    one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    model, first, second = nn.Sequential(one, other), one.weight, other.weight
    tracker = StateTracker({"model": model})
    for data, is_tied in (
        (first.data, True),
        (first.data.t(), False),
        (first.data, True),
        (first.data.clone(), False),
        (first.data, True),
    ):
        second.data = data
        assert ("model/1.weight" not in names(check(tracker, {"model": model}))) == is_tied


OPTIMIZER_CHANGES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "state is loaded": lambda o: o.load_state_dict(copy.deepcopy(o.state_dict())),
    "state is gone": lambda o: o.state.clear(),
    "state of one is gone": lambda o: o.state.pop(next(iter(o.state))),
    "one more entry": lambda o: next(iter(o.state.values())).update(more=torch.ones(2)),
    "one entry less": lambda o: next(iter(o.state.values())).pop("exp_avg"),
    "None in an entry": lambda o: next(iter(o.state.values())).update(exp_avg=None),
    "a number in an entry": lambda o: next(iter(o.state.values())).update(exp_avg=3),
    "a shared key": lambda o: vars(o)["state"].update(shared={"x": torch.ones(1)}),
    "another order": lambda o: o.param_groups[0]["params"].reverse(),
    "a parameter less": lambda o: o.state.pop(o.param_groups[0]["params"].pop()),
    "one more group": lambda o: o.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    "one more word": lambda o: o.param_groups[0].update(word="w"),
    "a hook": lambda o: o.register_state_dict_post_hook(lambda _o, states: {**states, "more": 1}),
}


@pytest.mark.parametrize("change", OPTIMIZER_CHANGES.values(), ids=OPTIMIZER_CHANGES)
def test_changed_optimizer_invalidates_cache(change: Callable[[torch.optim.Optimizer], Any]) -> None:
    """The tracked order of parameters is read again as well."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    tracked: dict[str, Any] = {"model": model, "optimizer": optimizer}
    tracked["order"] = ParameterOrder(tracked)
    tracker = StateTracker(tracked)
    before = check(tracker, tracked)
    change(optimizer)
    after = check(tracker, tracked)
    assert after.cached is not before.cached
    assert check(tracker, tracked).cached is after.cached


def test_buffer_assigned_at_each_step_is_read_each_time() -> None:
    """The current tensor is read, whatever its shape and ties."""
    model = Parts()
    tracked = {"model": model}
    tracker = StateTracker(tracked)
    check(tracker, tracked)
    for step in range(4):
        model.scale = torch.tensor(float(step))
        check(tracker, tracked)
    model.scale = torch.ones(2)
    check(tracker, tracked)
    model.scale = model.norm.bias
    check(tracker, tracked)
    check(tracker, tracked)


def test_uncached_state_may_share_memory_with_cached_state() -> None:
    """The first object in the order names the shared tensor, cached or not."""
    model = nn.Linear(3, 3)
    before, after = Box(), Box()
    tracked = {"before": before, "model": model, "after": after}
    tracker = StateTracker(tracked)
    check(tracker, tracked)
    after.value = [model.weight, model.bias]
    assert not check(tracker, tracked).uncached_leaves
    after.value = [model.weight.data.clone()]
    assert check(tracker, tracked).uncached_leaves
    before.value = {"w": model.weight}
    assert "model/weight" not in {leaf.name for leaf in check(tracker, tracked).leaves}
    before.value = None
    assert "model/weight" in {leaf.name for leaf in check(tracker, tracked).leaves}
    after.value = model.bias
    check(tracker, tracked)


def test_bucket_order_invalidates_cache_when_it_becomes_known() -> None:
    """The bucket order is not read again before."""
    model, order = nn.Linear(2, 2), BucketOrder()
    tracked = {"order": order, "model": model}
    tracker = StateTracker(tracked)
    before = check(tracker, tracked)
    order._record("model", dict(model.named_parameters()))
    model(torch.ones(1, 2)).sum().backward()
    assert check(tracker, tracked).cached is before.cached
    order.end_step()
    after = check(tracker, tracked)
    assert slot_memory.merge_state(after.cached.static_structure, after.dynamic_structure)["order"]["orders"][
        "model"
    ]
    order.load_state_dict({"orders": {}, "single": [], "steps": 0})
    check(tracker, tracked)


def test_replaced_complex_tensors_are_read() -> None:
    """Complex tensors are stored as views; conjugated or moved ones are read again."""
    model = nn.Module()
    model.w = nn.Parameter(torch.randn(3, dtype=torch.complex64))
    alias = Box(model.w.data)
    tracked = {"model": model, "alias": alias}
    tracker = StateTracker(tracked)
    before = check(tracker, tracked)
    model.w.data.mul_(2)
    assert check(tracker, tracked).cached is before.cached
    model.w.data = torch.randn(3, dtype=torch.complex64)
    check(tracker, tracked)
    model.square = nn.Parameter(torch.randn(2, 2, dtype=torch.complex64))
    check(tracker, tracked)
    model.square.data = model.square.data.t()
    check(tracker, tracked)
    model.w.data = model.w.data.conj()
    check(tracker, tracked)
    model.w.data.mul_(1j)
    check(tracker, tracked)
    model.w.data = model.w.data.resolve_conj()
    model.view = nn.Parameter(model.w.data.conj().imag)
    check(tracker, tracked)
    model.view.data.add_(1)
    check(tracker, tracked)


def overlapping(tracked: dict[str, Any], tracker: StateTracker | None = None) -> set[str]:
    """Return the names of tensors that may be copied behind the copy barrier."""
    cached = check(tracker or StateTracker(tracked), tracked).cached
    pairs = zip(cached.leaves, cached.may_overlap, strict=True)
    return {leaf.name for leaf, may_overlap in pairs if may_overlap}


def test_overlap_rule_allows_only_tensors_that_optimizers_change() -> None:
    """Not buffers, frozen parameters, parameters of an untracked optimizer, or of LBFGS."""
    model = Parts()
    model.spare.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    average = AveragedModel(nn.Linear(2, 2))
    tracked = {"model": model, "optimizer": optimizer, "ema": average, "other": nn.Linear(2, 2)}
    weights = {"embed.weight", "norm.weight", "norm.bias", "head.weight"}
    in_model = {f"model/{name}" for name in weights}
    everywhere = names(check(StateTracker(tracked), tracked))
    in_optimizer = {name for name in everywhere if name.startswith("optimizer/")}
    assert len(in_optimizer) == 12
    assert overlapping(tracked) == in_model | in_optimizer | {"ema/module.weight", "ema/module.bias"}
    several = {**tracked, "ema": Box(), "ema.x": average}
    in_average = {"ema.x/module.weight", "ema.x/module.bias"}
    assert overlapping(several) == in_model | in_optimizer | in_average
    head = torch.optim.LBFGS(model.head.parameters())
    assert overlapping({**tracked, "lbfgs": head}) == in_model - {"model/head.weight"} | in_optimizer
    assert overlapping({"model": model, "ema": average}) == set()
    model.embed.max_norm = 1.0
    assert "model/embed.weight" not in overlapping(tracked)


def test_parameter_frozen_once_never_overlaps_again() -> None:
    """A GAN freezes its networks in turn; the cache must not change at each step."""
    model = Parts()
    tracked = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    tracker = StateTracker(tracked)
    assert "model/head.weight" in overlapping(tracked, tracker)
    model.head.requires_grad_(False)
    assert "model/head.weight" not in overlapping(tracked, tracker)
    before = check(tracker, tracked).cached
    for wanted in (True, False, True):
        model.head.requires_grad_(wanted)
        assert check(tracker, tracked).cached is before


@pytest.mark.parametrize(
    "spoil",
    [
        lambda t: setattr(t["box"], "value", object()),
        lambda t: setattr(t["box"], "value", torch.eye(2).to_sparse()),
        lambda t: setattr(t["model"], "scale", torch.eye(2).to_sparse()),
        lambda t: setattr(t["model"], "scale", torch.ones(2, device="meta")),
        lambda t: setattr(t["model"], "head", nn.LazyLinear(3)),
        lambda t: t["optimizer"].param_groups[0].update(odd=object()),
        lambda t: t["optimizer"].param_groups[0].update(odd=[{"deep": object()}]),
        lambda t: next(iter(t["optimizer"].state.values())).update(exp_avg=object()),
        lambda t: next(iter(t["optimizer"].state.values())).update(exp_avg=torch.eye(2).to_sparse()),
    ],
)
def test_read_state_raises_same_error_as_flatten(spoil: Callable[[dict[str, Any]], Any]) -> None:
    """At every read until the value is gone."""
    model = Parts()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    tracked = {"model": model, "optimizer": optimizer, "box": Box()}
    tracker = StateTracker(tracked)
    tracker.read_state()
    spoil(tracked)
    with pytest.raises(UntrackableError) as expected:
        state_dict.flatten(tracked)
    for _ in range(2):
        with pytest.raises(UntrackableError) as caught:
            tracker.read_state()
        assert str(caught.value) == str(expected.value)


def on(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], Any]:
    """Apply a change to one of the tracked objects."""
    return lambda tracked: change(tracked[name])


STEPS: dict[str, Callable[[dict[str, Any]], Any]] = {
    **{f"model: {name}": on("model", change) for name, change in CHANGES.items()},
    **{f"optimizer: {name}": on("optimizer", change) for name, change in OPTIMIZER_CHANGES.items()},
    "train": lambda t: train(t["model"], t["optimizer"]),
    "share": lambda t: setattr(t["box"], "value", list(t["model"].parameters())),
    "share no more": lambda t: setattr(t["box"], "value", None),
    "share state": lambda t: setattr(
        t["first"], "value", list(itertools.chain(*(s.values() for s in t["optimizer"].state.values())))
    ),
}


# Errors of a change that is impossible after those before it: a missing entry, a shape that does not fit.
IMPOSSIBLE = (RuntimeError, KeyError, StopIteration, AttributeError, TypeError, ValueError, IndexError)


def apply(step: str, tracked: dict[str, Any], tracker: StateTracker) -> bool:
    """Make a change. Return whether the state can still be flattened.

    If it cannot, the tracker must fail as well.
    """
    with contextlib.suppress(*IMPOSSIBLE):
        STEPS[step](tracked)
    try:
        state_dict.flatten(tracked)
    except Exception as error:  # noqa: BLE001 - any error must also come from the tracker
        with pytest.raises(type(error)):
            tracker.read_state()
        return False
    return True


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=6), st.booleans())
@example(["model: a hook", "model: a hook"], True)  # torch itself raises
def test_read_state_equals_flatten_after_any_sequence_of_changes(steps: list[str], trained: bool) -> None:
    """One change may make another impossible."""
    torch.manual_seed(0)
    model = Parts()
    optimizer = torch.optim.Adam(model.parameters())
    tracked: dict[str, Any] = {"first": Box(), "model": model, "optimizer": optimizer, "box": Box()}
    if trained:
        train(model, optimizer)
    tracker = StateTracker(tracked)
    check(tracker, tracked)
    for step in steps:
        if not apply(step, tracked, tracker):
            return
        check(tracker, tracked)
        check(tracker, tracked)
