"""What objects hold as plain attributes: found, compared, set again."""

from __future__ import annotations

import random
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elastic_resume.integrations import plain_attributes
from elastic_resume.integrations.plain_attributes import NotPlainError, Preserved, assign, read


class Meter:
    """A script's own class."""

    def __init__(self) -> None:
        self.total, self.by_name = 0, {"a": [1.0]}


VALUES: list[Any] = [
    *(3, 0.1, "text", None, True, b"bytes", float("nan"), 1 + 2j),
    *([1, [2.0]], (1, "a"), {"a": {1: 2}}, {1, 2}, frozenset({3}), deque([1, 2], 4)),
    *(Counter("aab"), OrderedDict(b=1, a=2), defaultdict(list, a=[1.0])),
    *(torch.arange(3.0), [torch.ones(2, dtype=torch.bfloat16)], np.float32(0.1), np.arange(4)),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_value_is_set_again_exactly(value: Any) -> None:
    """Into an attribute that has nothing, or another value of its kind."""
    form = read(value).with_copies()
    for start in (None, type(value)() if isinstance(value, (list, dict, deque)) else None):
        holder = SimpleNamespace(value=start)
        assign(holder, "value", form)
        pair = [dict(v) if isinstance(v, defaultdict) else v for v in (holder.value, value)]
        assert repr(pair[0]) == repr(pair[1])
        expected = dict if isinstance(value, defaultdict) and start is None else type(value)
        assert type(holder.value) is expected


def test_containers_and_tensors_are_changed_in_place() -> None:
    """Another reference to them stays valid, and a defaultdict keeps its factory."""
    metrics: dict[str, Any] = {"train": defaultdict(list, loss=[1.0]), "eval": defaultdict(list)}
    shadow = {"w": torch.ones(2)}
    holder = SimpleNamespace(metrics=metrics, shadow=shadow)
    forms = {name: read(value).with_copies() for name, value in vars(holder).items()}
    inner, tensor = metrics["train"], shadow["w"]
    inner["loss"].append(2.0)
    inner["new"].append(3.0)
    tensor += 1
    for name, form in forms.items():
        assign(holder, name, form)
    assert metrics == {"train": {"loss": [1.0]}, "eval": {}}
    assert metrics["train"] is inner
    assert inner["more"] == []
    assert shadow["w"] is tensor
    assert tensor.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (torch.zeros(2), lambda t: t.add_(0)),
        ([torch.zeros(2)], lambda values: values.__setitem__(0, torch.zeros(2))),
        (nn.Linear(2, 2), lambda module: nn.init.ones_(module.weight)),
        ({"a": [1]}, lambda values: values["a"].append(2)),
        (np.zeros(2), lambda array: array.__setitem__(0, 1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_change_is_noticed(value: Any, change: Any) -> None:
    """Of a tensor by its version, so that no tensor is read."""
    check_change(value, change)


def test_change_of_optimizer_is_noticed() -> None:
    """A case of its own: the first optimizer of a process imports torch._dynamo, which takes seconds."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    check_change(optimizer, lambda o: o.param_groups[0].update(lr=1.0))


def check_change(value: Any, change: Any) -> None:
    """Check that a value is the same until it changes."""
    before = read(value)
    assert read(value).is_same(before)
    change(value)
    assert not read(value).is_same(before)


class Raising:
    """An object that no question can be asked."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def state_dict(self) -> Any:
        """Fail."""
        raise ValueError

    load_state_dict = state_dict


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # a prototype
    NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


@pytest.mark.parametrize(
    "value",
    [
        Raising(),
        [Raising()],
        NESTED,
        {"a": NESTED},
        object(),
        [object()],
        iter([]),
        torch.ones(1, device="meta"),
        list(range(200_000)),
        {1: [[]] * 20_000},
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_values_are_not_plain(value: Any) -> None:
    """They could not be set again, or take too long to read at every step."""
    with pytest.raises(NotPlainError):
        read(value)


def test_script_objects_are_searched_and_those_of_packages_are_not() -> None:
    """Also in lists and dicts, each once; a library's object has attributes of its own concern."""
    meter = Meter()
    holder = SimpleNamespace(
        one=meter, again=meter, many={"x": Meter(), "y": 1}, module=nn.Linear(1, 1), logger=pytest
    )
    vars(meter)["back"] = meter
    found = [path for path, _, _ in plain_attributes.list_attributes({"H": (holder, frozenset({"logger"}))})]
    assert found == [
        *("H.one.total", "H.one.by_name", "H.many", "H.many['x'].total", "H.many['x'].by_name", "H.module"),
    ]


def test_preserved_attributes_are_as_before() -> None:
    """What the block changes, adds and reads."""
    holder = SimpleNamespace(
        count=1, metrics=defaultdict(list), meter=Meter(), tensor=torch.ones(1), other=object()
    )
    with Preserved({"H": (holder, frozenset({"other"}))}):
        holder.count += 1
        holder.metrics["a"].append(1.0)
        holder.meter.by_name["a"].append(2.0)
        holder.tensor.zero_()
        holder.new = 5
    assert (holder.count, dict(holder.metrics), holder.meter.by_name) == (1, {}, {"a": [1.0]})
    assert holder.tensor.tolist() == [1.0]
    assert not hasattr(holder, "new")


class Metric(nn.Module):
    """Counts as those of torchmetrics do: its state_dict() is empty."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.total, self.updates = torch.zeros(()), 0
        self.register_buffer("seen", torch.zeros(1), persistent=False)

    def update(self) -> None:
        """Count, in place and not."""
        self.total = self.total + 1
        self.updates += 1
        self.seen += 1

    def read(self) -> list[float]:
        """Return all counts."""
        return [float(self.total), self.updates, float(self.seen)]


class Stateful:
    """An object whose state_dict() lacks what it counts."""

    calls = 0

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ignore it."""


def test_counts_that_a_state_dict_lacks_are_preserved() -> None:
    """Of metrics in an attribute, a ModuleDict or a dict, and of objects."""
    inner = nn.ModuleDict({"a": Metric()})
    holder = SimpleNamespace(metric=Metric(), inner=inner, many={"b": Metric()}, stateful=Stateful())
    holder.stateful.calls = 1
    metrics: list[Any] = [holder.metric, inner["a"], holder.many["b"]]
    for metric in metrics:
        metric.update()
    with Preserved({"H": (holder, frozenset())}):
        holder.stateful.calls += 1
        for metric in metrics:
            metric.update()
    assert [metric.read() for metric in metrics] == [[1, 1, 1]] * 3
    assert holder.stateful.calls == 1


@pytest.mark.parametrize(
    "make",
    [np.random.default_rng, random.Random, torch.Generator, np.random.RandomState],
    ids=["numpy", "python", "torch", "legacy"],
)
def test_random_generator_goes_on_where_it_was(make: Any) -> None:
    """It is the same object, which others may hold."""
    holder = SimpleNamespace(rng=make())
    before = read(holder.rng).with_copies()

    def draw(generator: Any) -> float:
        if isinstance(generator, torch.Generator):
            return torch.rand(1, generator=generator).item()
        return float(generator.random())

    drawn, kept = [draw(holder.rng) for _ in range(3)], holder.rng
    assert not read(holder.rng).is_same(before)
    assign(holder, "rng", before)
    assert [draw(holder.rng) for _ in range(3)] == drawn
    assert holder.rng is kept
