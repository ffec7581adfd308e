"""What training changes and `er.resume` was not given: refused or warned about, and what is right."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

import elastic_resume as er
from elastic_resume.errors import UsageError
from elastic_resume.state import state_dict
from elastic_resume.training import untracked
from elastic_resume.training.changed_modules import ChangedModules
from tests.support.state_image import Box


def adam(*parts: nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer with a group for each part."""
    return torch.optim.Adam([{"params": list(part.parameters())} for part in parts])


class Trainer:
    """An object of the script that saves its modules as copies."""

    def __init__(self, *modules: nn.Module) -> None:
        self.modules = {"list": list(modules)}

    def state_dict(self) -> dict[str, Any]:
        """Return copies."""
        return {
            str(i): {k: v.clone() for k, v in module.state_dict().items()}
            for i, module in enumerate(self.modules["list"])
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load them."""
        for i, module in enumerate(self.modules["list"]):
            module.load_state_dict(state[str(i)])


class Masters(torch.optim.SGD):
    """Trains float32 copies of a model's weights, and saves them itself, or not."""

    def __init__(self, model: nn.Module, *, saves: bool, clones: bool = False) -> None:
        self.copies = [nn.Parameter(p.detach().clone().float()) for p in model.parameters()]
        super().__init__(self.copies)
        self.saves, self.clones = saves, clones

    def state_dict(self) -> dict[str, Any]:
        """Return the copies too."""
        copies = [p.detach().clone() if self.clones else p.detach() for p in self.copies]
        return {**super().state_dict(), **({"fp32": [copies]} if self.saves else {})}


MODEL, LOSS, FROZEN = nn.Linear(3, 2), nn.Linear(2, 1), nn.Linear(2, 1).requires_grad_(False)
FLAT = nn.Parameter(torch.zeros(8))
VIEWS = nn.ParameterList([nn.Parameter(FLAT.data[:6].view(2, 3)), nn.Parameter(FLAT.data[6:])])
HALF = nn.Linear(3, 2).bfloat16()

RIGHT: dict[str, Callable[[], dict[str, Any]]] = {
    "all tracked": lambda: {"model": MODEL, "optimizer": adam(MODEL, LOSS), "loss": LOSS},
    "as tensors": lambda: {
        "model": MODEL,
        "optimizer": adam(MODEL, LOSS),
        "track": {"loss": list(LOSS.parameters())},
    },
    "within ema": lambda: {"ema": nn.ModuleList([MODEL, LOSS]), "optimizer": adam(LOSS)},
    "wrapped": lambda: {"model": nn.DataParallel(MODEL), "optimizer": adam(MODEL)},
    "frozen": lambda: {"model": MODEL, "optimizer": adam(MODEL, FROZEN)},
    "saved as copies": lambda: {"model": MODEL, "optimizer": adam(LOSS), "trainer": Trainer(LOSS)},
    "masters saved": lambda: {"model": HALF, "optimizer": Masters(HALF, saves=True)},
    "masters saved as copies": lambda: {"model": HALF, "optimizer": Masters(HALF, saves=True, clones=True)},
    "flat parameter": lambda: {"model": VIEWS, "optimizer": torch.optim.SGD([FLAT])},
    "no optimizer": lambda: {"model": MODEL},
}
WRONG: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "loss": (
        lambda: {"model": MODEL, "optimizer": adam(MODEL, LOSS)},
        r"optimizer: .*shape \[1, 2\] .*group 1",
    ),
    "one of two": (
        lambda: {"model": MODEL, "optimizer": {"a": adam(MODEL), "b": adam(LOSS)}},
        r"optimizer\.b: .*, and 1 more",
    ),
    "masters": (lambda: {"model": HALF, "optimizer": Masters(HALF, saves=False)}, r"shape \[2, 3\]"),
}


@pytest.mark.parametrize("case", RIGHT)
def test_parameters_that_some_object_holds_are_accepted(case: str) -> None:
    """However it holds them."""
    untracked.require_tracked_parameters(state_dict.collect_objects(RIGHT[case]()))


@pytest.mark.parametrize("case", WRONG)
def test_trained_parameter_that_no_object_holds_is_refused(case: str) -> None:
    """Its moments would be restored, and its value would not."""
    build, told = WRONG[case]
    with pytest.raises(UsageError, match=told):
        untracked.require_tracked_parameters(state_dict.collect_objects(build()))


def test_variable_with_the_parameter_is_named() -> None:
    """The error is what has to be written."""
    criterion = nn.Linear(2, 1)
    tracked = state_dict.collect_objects({"model": MODEL, "optimizer": adam(MODEL, criterion)})
    with pytest.raises(UsageError, match=r'track=\{"criterion": criterion\}'):
        untracked.require_tracked_parameters(tracked)


def test_parameter_without_requires_grad_but_with_a_gradient_is_trained() -> None:
    """Mixed precision by hand sets the gradient of its copy."""
    master = torch.zeros(2)
    master.grad = torch.ones(2)
    with pytest.raises(UsageError, match="master"):
        untracked.require_tracked_parameters({"optimizer": torch.optim.SGD([master])})


# ---- modules that training changes ----------------------------------------------------------------------


class Centered(nn.Module):
    """A loss with a buffer that each call replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.center: Tensor
        self.register_buffer("center", torch.zeros(2))

    def update(self) -> None:
        """Move the center."""
        self.center = self.center * 0.9 + 1


def test_module_that_the_first_steps_change_is_named() -> None:
    """A teacher that follows the model, and a loss with a center; no other."""
    model = nn.Linear(2, 2)
    lazy = nn.LazyLinear(2)
    teacher, frozen, loss, tracked = copy.deepcopy(model), copy.deepcopy(model), Centered(), Centered()
    whole, average = nn.Sequential(model, nn.ReLU()), AveragedModel(model)
    check = ChangedModules({"model": model, "loss": tracked}, untracked.list_checked_objects())
    with torch.no_grad():
        for old, new in zip(teacher.parameters(), model.parameters(), strict=True):
            new.add_(1)
            old.data.mul_(0.9).add_(0.1 * new)
    for each in (loss, tracked):
        each.update()
    average.update_parameters(whole[0])
    texts = [text for text in check.describe() if "(teacher)" in text or "(loss)" in text]
    assert len(texts) == 2
    assert "linear.Linear (teacher) holds 'weight', which the first steps have changed" in "".join(texts)
    assert "Centered (loss) holds 'center', which" in "".join(texts)
    named = "".join(check.describe())
    assert not any(f"({name})" in named for name in ("frozen", "tracked", "whole", "average", "model"))
    del frozen, lazy


# ---- objects ------------------------------------------------------------------------------------------


class ModelEma:
    """An average that keeps its tensors in a list."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = [p.detach().clone() for p in model.parameters()]

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors."""
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take others."""
        self.shadow = state["shadow"]


class OwnScheduler(Box):
    """A schedule that is none of torch's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(1)
        self.optimizer = optimizer

    def step(self) -> None:
        """Count."""
        self.value += 1


class Holder(Box):
    """An object of the script with another inside."""


Objects = dict[str, Any]
S = torch.optim.lr_scheduler
NO_WARNING = ""
CASES: dict[str, tuple[Callable[[Objects], Objects], str]] = {
    "scheduler": (lambda o: {"x": S.StepLR(o["optimizer"], 1)}, "StepLR works on 'optimizer'"),
    "plateau": (lambda o: {"x": S.ReduceLROnPlateau(o["optimizer"])}, "ReduceLROnPlateau works on"),
    "of its own kind": (lambda o: {"x": OwnScheduler(o["optimizer"])}, "OwnScheduler works on"),
    "sequence": (
        lambda o: {"x": S.SequentialLR(o["optimizer"], [S.ConstantLR(o["optimizer"])] * 2, [1])},
        "SequentialLR works on",
    ),
    "tracked": (lambda o: {"scheduler": S.StepLR(o["optimizer"], 1)}, NO_WARNING),
    "tracked sequence": (
        lambda o: {"scheduler": S.ChainedScheduler([S.StepLR(o["optimizer"], 1)])},
        NO_WARNING,
    ),
    "held by a tracked object": (lambda o: {"loop": Holder([S.StepLR(o["optimizer"], 1)])}, NO_WARNING),
    "of another optimizer": (lambda _: {"x": S.StepLR(adam(LOSS), 1)}, NO_WARNING),
    "average": (lambda o: {"x": AveragedModel(o["model"])}, "AveragedModel averages the weights of 'model'"),
    "average of its own kind": (lambda o: {"x": ModelEma(o["model"])}, "ModelEma averages the weights of"),
    "tracked average": (lambda o: {"ema": AveragedModel(o["model"])}, NO_WARNING),
    "average of another model": (lambda _: {"x": AveragedModel(nn.Linear(5, 5))}, NO_WARNING),
    "copy of the model": (lambda o: {"x": copy.deepcopy(o["model"])}, NO_WARNING),
    "sampler": (lambda _: {"x": er.ElasticSampler([1, 2])}, "ElasticSampler: one was made, and er.resume"),
    "batches": (lambda _: {"x": er.GlobalBatches(4, 2)}, "GlobalBatches: one was made, and er.resume"),
    "sampler beside data": (lambda _: {"x": er.ElasticSampler([1, 2]), "data": Box(1)}, NO_WARNING),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_object_that_was_not_given_is_named(case: str) -> None:
    """What is called x is not given."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    objects: Objects = {"model": model, "optimizer": adam(model)}
    make, told = CASES[case]
    made = make(objects)
    tracked = objects | {name: item for name, item in made.items() if name != "x"}
    checked = untracked.list_checked_objects()
    found = untracked.find_untracked(tracked, checked, has_data="data" in tracked)
    assert len(found) == bool(told), found
    assert told in "".join(found)


def test_loader_and_gradients_keep_nothing_alive() -> None:
    """The search holds no object afterwards."""
    model = nn.Linear(3, 2)
    average = AveragedModel(model)
    loader: DataLoader[Tensor] = DataLoader(torch.zeros(2), batch_sampler=er.GlobalBatches(2, 1))  # type: ignore[arg-type]
    assert untracked.find_untracked(
        {"model": model, "data": loader}, untracked.list_checked_objects(), has_data=True
    )
    del average
    gc.collect()
    found = untracked.find_untracked(
        {"model": model, "data": loader}, untracked.list_checked_objects(), has_data=True
    )
    assert not [text for text in found if "averages" in text]
