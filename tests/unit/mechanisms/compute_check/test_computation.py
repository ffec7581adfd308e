"""Test that models of many kinds are computed beside the training, and that it leaves no trace."""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import pickle
import random
import weakref
from collections import UserDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from elastic_resume.mechanisms.compute_check.computation import compute
from elastic_resume.mechanisms.compute_check.device import find_obstacle
from elastic_resume.mechanisms.compute_check.recorder import CallRecorder
from elastic_resume.mechanisms.compute_check.request import NotCheckable, Request
from elastic_resume.training.wrong_gradients import flip_gradients

pytestmark = [
    pytest.mark.usefixtures("process_group"),
    pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated"),
]


class Plain(nn.Module):
    """Dropout and BatchNorm; it counts its calls, and keeps tensors and a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.calls, self.seen = 0, torch.zeros(1)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        """Draw from all generators."""
        self.calls += 1
        self.seen += 1
        noise = torch.randn(x.shape, generator=self.generator) * random.random() * np.random.rand()  # noqa: NPY002
        self.kept = nn.functional.dropout(self.norm(self.first(x + noise.to(x.dtype))), 0.5, self.training)
        return self.last(self.kept) * self.frozen  # type: ignore[no-any-return]


@dataclass
class Output:
    """What a library's model may return."""

    loss: Tensor
    name: str = "output"


class Library(Plain):
    """It takes keywords, and returns a dataclass within a dict."""

    def forward(self, *, batch: dict[str, Any], scale: float, mask: None) -> Any:  # type: ignore[override]
        """Return the loss."""
        assert mask is None
        return {"out": Output(super().forward(batch["x"][0]).square().mean() * scale)}


class Augmenter:
    """A helper of the script that is no module."""

    def __init__(self) -> None:
        self.numbers, self.calls = random.Random(4), 0
        self.sums, self.names = torch.zeros(2), {"a"}

    def draw(self) -> float:
        """Draw a number, and change all of it."""
        self.calls += 1
        self.sums += 1
        self.names.add(str(self.calls))
        return self.numbers.random()


class Keeper(nn.Module):
    """It keeps generators, containers, objects and a parameter where no part of torch looks for them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.augmenter = nn.Linear(4, 4), nn.Linear(4, 2), Augmenter()
        self.numbers, self.old_numbers = np.random.default_rng(3), np.random.RandomState(5)
        self.plain, self.generators = random.Random(6), {"a": [torch.Generator().manual_seed(7)]}
        self.history, self.counts, self.newest = list[float](), {"calls": 0}, deque[int](maxlen=2)
        self.bins, self.caches = np.zeros(3), (torch.zeros(2), [torch.zeros(1)])
        self.hidden = {"bias": [self.last.bias]}
        hidden: Any = self.last.bias
        closed: Any = np.random.default_rng(8)
        self.draw: Callable[[], float] = lambda: closed.random() * self.old_numbers.rand()
        self.bound, self.part = closed.normal, functools.partial(hidden.mul, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        """Draw from all, and change all."""
        noise = self.numbers.random() + self.plain.random() + self.augmenter.draw() + self.draw()
        noise += self.bound() + float(torch.rand(1, generator=self.generators["a"][0]))
        with torch.random.fork_rng():
            torch.manual_seed(4)
            x = x + noise * torch.rand(4)
        self.history.append(noise)
        self.newest.append(len(self.history))
        self.counts["calls"] += 1
        self.counts[f"call {len(self.history)}"] = 1
        self.bins[len(self.history) % 3] += 1
        self.caches[0].add_(1)
        self.caches[1][0] += 1
        return self.last(self.first(x)) + self.hidden["bias"][0] + self.part()  # type: ignore[no-any-return]


class Checkpointed(Plain):
    """It computes its first layers again in the backward pass."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        """Checkpoint all of it."""
        return checkpoint(super().forward, x, use_reentrant=self.use_reentrant)  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """An LSTM keeps its parameters in a list too."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(4, 5, num_layers=2, dropout=0.5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Ignore the state."""
        return self.last(self.lstm(x)[0])  # type: ignore[no-any-return]


class Tied(nn.Module):
    """Two names of one parameter, and a weight that is normalised in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        """Change the weight, as some layers do."""
        self.first.weight.data /= self.first.weight.data.norm() * 1.01
        return self.last(self.first(x).relu_())  # type: ignore[no-any-return]


def normed() -> nn.Module:
    """Return layers whose weights hooks and parametrizations compute."""
    old = torch.nn.utils.weight_norm(nn.Linear(4, 4))
    new = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    return nn.Sequential(old, new, torch.nn.utils.spectral_norm(nn.Linear(4, 4)))


X = torch.linspace(-1, 1, 32).view(8, 4)
Call = Callable[[nn.Module], Any]
KINDS: dict[str, tuple[Callable[[], nn.Module], Call]] = {
    "plain": (Plain, lambda ddp: ddp(X)),
    "library": (Library, lambda ddp: ddp(batch={"x": [X, "text"], 3: (1, True)}, scale=0.5, mask=None)),
    "checkpointed": (lambda: Checkpointed(False), lambda ddp: ddp(X)),
    "reentrant": (lambda: Checkpointed(True), lambda ddp: ddp(X.clone().requires_grad_())),
    "keeper": (Keeper, lambda ddp: ddp(X)),
    "recurrent": (Recurrent, lambda ddp: ddp(X)),
    "tied": (Tied, lambda ddp: ddp(X)),
    "normed": (normed, lambda ddp: ddp(X)),
    "half": (Plain, lambda ddp: torch.autocast("cpu", torch.bfloat16)(ddp)(X)),
    "evaluated": (lambda: Plain().eval(), lambda ddp: ddp(X)),
}


def list_trace(module: nn.Module) -> list[Any]:
    """Return all that training may depend on, or that the script may look at."""
    found: list[Any] = [torch.get_rng_state(), random.getstate(), str(np.random.get_state())]  # noqa: NPY002
    found += [torch.are_deterministic_algorithms_enabled(), torch.is_autocast_enabled("cpu")]
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        found += [name, id(tensor), tensor.detach().clone(), tensor._version]
        found += [id(tensor.grad), None if tensor.grad is None else tensor.grad.clone()]
    for path, part in module.named_modules():
        found += [path, sorted(vars(part)), part.training, *map(len, (part._forward_hooks, part._buffers))]
        for value in vars(part).values():
            if isinstance(value, torch.Generator):
                found.append(value.get_state())
            elif isinstance(part, Keeper) and not isinstance(value, nn.Parameter):
                found.append(describe(value))
            elif isinstance(value, Tensor):
                found += [id(value), value.detach().clone()]
            elif isinstance(value, int):
                found.append(value)
    return found


def describe(value: Any) -> str:
    """Return the values of all that a `Keeper` has in an attribute."""
    if isinstance(value, (dict, Augmenter)):
        own = value if isinstance(value, dict) else vars(value)
        return " ".join(f"{key}={describe(each)}" for key, each in own.items())
    if isinstance(value, (list, tuple, deque)):
        return f"{id(value)} " + " ".join(map(describe, value))
    if isinstance(value, (torch.Generator, random.Random, np.random.RandomState)):
        return str(value.get_state() if not isinstance(value, random.Random) else value.getstate())
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if callable(value) and getattr(value, "__closure__", None):
        return " ".join(describe(cell.cell_contents) for cell in value.__closure__)
    return str(sorted(value) if isinstance(value, set) else value)


def is_equal(one: Any, other: Any) -> bool:
    """Compare bits of tensors."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


@pytest.fixture(autouse=True)
def _same_numbers() -> Iterator[None]:
    torch.manual_seed(1)
    yield
    assert not torch.are_deterministic_algorithms_enabled()


def record(kind: str) -> tuple[DistributedDataParallel, Request, list[Tensor], list[str]]:
    """Train a step of a model, and record its call; the list gets the calls of the script's hooks."""
    make, call = KINDS[kind]
    ddp, called = DistributedDataParallel(make()), list[str]()
    ddp.module.register_forward_hook(lambda *_: called.append("module"))
    [*ddp.module.children()][-1].register_full_backward_hook(lambda *_: called.append("part"))
    trained = next(parameter for parameter in ddp.module.parameters() if parameter.requires_grad)
    trained.register_post_accumulate_grad_hook(lambda *_: called.append("parameter"))
    recorder = CallRecorder(ddp, int)
    recorder.attach()
    output = call(ddp)
    if isinstance(output, dict):
        output = output["out"].loss
    output.float().square().mean().backward()
    recorder.detach()
    recorded = recorder.take()
    assert recorded is not None
    request, tensors = recorded
    return ddp, Request.from_bytes(request.to_bytes()), tensors, called


@pytest.mark.parametrize("kind", KINDS)
def test_computation_is_repeatable_complete_and_leaves_no_trace(kind: str) -> None:
    """Each trainable parameter has a gradient; nothing has changed, and no hook of the script has run."""
    ddp, request, tensors, called = record(kind)
    module = ddp.module
    before, kept, num_called = list_trace(module), [tensor.clone() for tensor in tensors], len(called)
    assert {"module", "part", "parameter"} == set(called)
    digests = [compute(module, request, tensors, is_strict=True) for _ in range(2)]
    assert digests[0] == digests[1]
    trainable = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert trainable == {name for name in digests[0] if not name.startswith("output ")}
    assert all(map(is_equal, before, list_trace(module)))
    assert len(called) == num_called
    assert all(map(torch.equal, kept, tensors))


@pytest.mark.parametrize("kind", KINDS)
def test_one_wrong_bit_in_the_backward_pass_changes_gradients(kind: str) -> None:
    """The fault that a job's rank gets, in the first layer."""
    ddp, request, tensors, _ = record(kind)
    right = compute(ddp.module, request, tensors, is_strict=True)
    flip_gradients(ddp)
    wrong = compute(ddp.module, request, tensors, is_strict=True)
    differ = {name for name in right if right[name] != wrong[name]}
    assert differ
    assert not any(name.startswith("output ") for name in differ)


def test_dropout_follows_the_seed_and_the_modes() -> None:
    """Another seed gives other gradients; without dropout's mode it gives others than with it."""
    ddp, request, tensors, _ = record("plain")
    other = Request(**{**vars(request), "seed": 5})
    evaluated = Request(**{**vars(request), "modes": "0" * len(request.modes)})
    found = [compute(ddp.module, each, tensors, is_strict=True) for each in (request, other, evaluated)]
    assert len({digests["first.weight"] for digests in found}) == 3


def test_error_of_a_model_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches the caller."""
    ddp, request, tensors, _ = record("plain")
    before = list_trace(ddp.module)
    monkeypatch.setattr(np.random, "rand", lambda: torch.ones(3) @ torch.ones(4))
    with pytest.raises(RuntimeError, match="size"):
        compute(ddp.module, request, tensors, is_strict=True)
    assert all(map(is_equal, before, list_trace(ddp.module)))


def test_call_without_gradients_is_not_recorded_and_the_newest_is() -> None:
    """An evaluation may follow, and several batches be accumulated."""
    ddp = DistributedDataParallel(Plain())
    recorder = CallRecorder(ddp, int)
    recorder.attach()
    with ddp.no_sync():
        ddp(X).sum().backward()
    ddp(2 * X).sum().backward()
    with torch.no_grad():
        ddp(3 * X)
    recorded = recorder.take()
    assert recorded is not None
    assert torch.equal(recorded[1][0], 2 * X)
    assert recorder.take() is None


def test_copies_of_a_recorded_model_record_nothing() -> None:
    """A script may copy or pickle its model at any time."""
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    recorder = CallRecorder(ddp, int)
    recorder.attach()
    for made in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):  # noqa: S301 - our own
        made(X).sum().backward()
        assert recorder.take() is None


class Strange(nn.Module):
    """A model whose batch is an object of the script."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, batch: Any) -> Tensor:
        """Take anything."""
        return self.layer(batch if isinstance(batch, Tensor) else X)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (Output(X), "argument \\[0\\] is a Output: it can be a tensor"),
        ([[{"a": object()}]], "argument \\[0\\]\\[0\\]\\[0\\]\\['a'\\] is a object"),
        (X.to_sparse(), "argument tensor 0 is a Tensor of layout torch.sparse_coo"),
        ("x" * (5 << 20), "its arguments have 0 tensors and 52"),
    ],
)
def test_batch_that_cannot_be_described_is_refused(batch: Any, reason: str) -> None:
    """Nothing is pickled, and nothing is sent that has no limit."""
    ddp = DistributedDataParallel(Strange())
    recorder = CallRecorder(ddp, int)
    recorder.attach()
    if isinstance(batch, Tensor):
        ddp.module.layer.register_forward_pre_hook(lambda *_: (X,))
    ddp(batch)
    with pytest.raises(NotCheckable, match=reason):
        recorded = recorder.take()
        assert recorded is not None
        recorded[0].to_bytes()


@pytest.mark.parametrize(
    "make",
    [
        lambda: iter([1, 2]),
        itertools.count,
        lambda: {"a": (n for n in "ab")},
        lambda: argparse.Namespace(batches=iter([1, 2])),
    ],
)
def test_part_with_an_iterator_is_refused_before_a_check(make: Callable[[], Any]) -> None:
    """The item that a check takes would be lost."""
    ddp = DistributedDataParallel(Plain())
    find_obstacle(ddp)
    ddp.module.batches = make()
    with pytest.raises(NotCheckable, match="a part of it keeps the iterator"):
        find_obstacle(ddp)


@dataclass(slots=True)
class Slotted:
    """It has no dict of attributes."""

    calls: int = 0


class Teaching(Plain):
    """It keeps modules that are no parts of it, and objects that keep no attributes of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.teachers = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))]
        object.__setattr__(self, "other", Plain())
        self.owner = weakref.proxy(self)  # as Lightning's modules have their trainer
        self.slotted, self.settings = Slotted(), argparse.Namespace(calls=0)
        self.data, self.stats = UserDict({"calls": 0}), [torch.zeros(4), torch.ones(4)]
        calls = 0

        def count() -> int:
            nonlocal calls
            calls += 1
            return calls

        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        """Change all of it."""
        self.slotted.calls += 1
        self.settings.calls += 1
        self.data["calls"] += 1
        self.count()
        x = nn.functional.batch_norm(self.teachers[0](x), self.stats[0], self.stats[1], training=True)
        other: Any = self.other
        return super().forward(x) + other(x).sum()  # type: ignore[no-any-return]

    def read(self) -> list[Any]:
        """Return all that a check may change."""
        other: Any = self.other
        hidden = [*self.teachers[0].parameters(), *other.parameters()]
        tensors = [*hidden, *self.teachers[0].buffers(), *other.buffers(), *self.stats]
        counts = (self.slotted.calls, self.settings.calls, self.data["calls"], other.calls)
        closure: Any = self.count.__closure__
        grads = [each.grad for each in hidden]
        return [counts, closure[0].cell_contents, [each.tolist() for each in tensors], grads]


def test_modules_that_are_no_parts_and_objects_without_a_dict_are_restored() -> None:
    """A mean teacher's averages, its gradients, and counters that no part of torch knows."""
    module = Teaching()
    ddp = DistributedDataParallel(module)
    recorder = CallRecorder(ddp, int)
    recorder.attach()
    ddp(X)
    recorder.detach()
    recorded = recorder.take()
    assert recorded is not None
    find_obstacle(ddp)
    before = module.read()
    digests = [compute(module, *recorded, is_strict=True) for _ in range(2)]
    assert digests[0] == digests[1]
    assert module.read() == before
    ddp(X).sum().backward()
    assert all(parameter.grad is not None for parameter in module.teachers[0].parameters())


def test_parameter_of_a_closure_gets_no_gradient_and_trains_on() -> None:
    """DDP's hooks of it neither run in a check nor are lost."""
    ddp, request, tensors, _ = record("keeper")
    ddp.zero_grad()
    compute(ddp.module, request, tensors, is_strict=True)
    assert all(parameter.grad is None for parameter in ddp.parameters())
    ddp(X).sum().backward()
    assert all(parameter.grad is not None for parameter in ddp.parameters())


def test_forward_pass_with_a_collective_is_refused() -> None:
    """One rank may fail before it, and the others would wait."""
    counts = iter([1, 2])
    ddp = DistributedDataParallel(Plain())
    recorder = CallRecorder(ddp, lambda: next(counts))
    recorder.attach()
    ddp(X)
    with pytest.raises(NotCheckable, match="its forward pass has a collective"):
        recorder.take()
