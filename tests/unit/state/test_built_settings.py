"""Settings that a script builds and a resume does not use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from elastic_resume.checkpoint import json_codec
from elastic_resume.state.built_settings import BuiltSettings
from elastic_resume.training.announce import log_unused_settings

Make = Callable[[torch.optim.Optimizer, int], Any]


class Table:
    """A schedule of the script's own, with a table of values."""

    def __init__(self, length: int) -> None:
        self.table, self.count = list(range(length)), 0

    def state_dict(self) -> dict[str, Any]:
        """Return all of it."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take all of it."""
        vars(self).update(state)


SCHEDULERS: dict[str, Make] = {
    "cosine": lr_scheduler.CosineAnnealingLR,
    "one cycle": lambda optimizer, total: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total),
    "warmup": lambda optimizer, _: lr_scheduler.LambdaLR(optimizer, lambda n: n / 10),
    "sequence": lambda optimizer, total: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, total)],
        [2],
    ),
    "table": lambda _, total: Table(total),
}


def build(make: Make, lr: float = 0.1, total: int = 20, decay: float = 0.0) -> dict[str, Any]:
    """Build an optimizer and a schedule from arguments of a script."""
    model = nn.Linear(1, 1)
    groups: list[dict[str, Any]] = [
        {"params": [model.weight], "weight_decay": decay},
        {"params": [model.bias]},
    ]
    optimizer = torch.optim.SGD(groups, lr=lr, weight_decay=0.0)
    return {"optimizer": optimizer, "scheduler": make(optimizer, total)}


def resume(saved: dict[str, Any], record: BuiltSettings, tracked: dict[str, Any]) -> BuiltSettings:
    """Restore ``tracked`` as `er.resume` does; return its record."""
    own = BuiltSettings(tracked)
    for name, item in tracked.items():
        item.load_state_dict(saved[name].state_dict())
    own.load_state_dict(json_codec.decode(json_codec.encode(record.state_dict())))
    return own


def train(tracked: dict[str, Any], steps: int = 3) -> None:
    """Let the schedule change the values."""
    for _ in range(steps):
        tracked["optimizer"].step()
        if hasattr(tracked["scheduler"], "step"):
            tracked["scheduler"].step()


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_same_arguments_are_not_reported_whatever_the_schedule_has_changed(kind: str) -> None:
    """Also after the third start."""
    saved = build(SCHEDULERS[kind])
    record = BuiltSettings(saved)
    assert record.take_unused() == []
    for _ in range(2):
        train(saved)
        tracked = build(SCHEDULERS[kind])
        own = resume(saved, record, tracked)
        assert own.take_unused() == []
        saved, record = tracked, own


@pytest.mark.parametrize(
    ("kind", "changed", "reported"),
    [
        ("cosine", {"lr": 0.2}, ["optimizer/lr 0.2 (first start: 0.1)"]),
        ("warmup", {"lr": 0.2}, ["optimizer/lr 0.2 (first start: 0.1)"]),
        ("cosine", {"decay": 0.5}, ["optimizer/weight_decay [0.5, 0.0] (first start: 0)"]),
        ("cosine", {"total": 40}, ["scheduler/T_max 40 (first start: 20)"]),
        ("one cycle", {"total": 40}, ["scheduler/total_steps 40 (first start: 20)"]),
        ("sequence", {"total": 40}, ["scheduler/_schedulers/1/T_max 40 (first start: 20)"]),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_changed_argument_is_named(kind: str, changed: dict[str, Any], reported: list[str]) -> None:
    """At each start with it, and once in each."""
    saved = build(SCHEDULERS[kind])
    record = BuiltSettings(saved)
    for _ in range(2):
        train(saved)
        tracked = build(SCHEDULERS[kind], **changed)
        own = resume(saved, record, tracked)
        unused = own.take_unused()
        assert reported[0] in unused
        assert own.take_unused() == []
        saved, record = tracked, own


def test_setting_that_the_script_sets_after_the_restore_is_not_reported() -> None:
    """From then on the job counts as built with it."""
    saved = build(SCHEDULERS["cosine"])
    record = BuiltSettings(saved)
    train(saved)
    tracked = build(SCHEDULERS["cosine"], lr=0.2)
    own = resume(saved, record, tracked)
    for group in tracked["optimizer"].param_groups:
        group["lr"] *= 2
    assert own.take_unused() == []
    again = build(SCHEDULERS["cosine"], lr=0.2)
    assert resume(tracked, own, again).take_unused() == []
    assert resume(tracked, own, build(SCHEDULERS["cosine"], lr=0.3)).take_unused() == [
        "optimizer/lr 0.3 (first start: 0.2)"
    ]


def test_schedule_that_follows_from_the_ranks_is_explained(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A node that is lost makes len(loader) longer, and nobody has changed anything."""
    caplog.set_level("INFO")
    saved = build(SCHEDULERS["cosine"])
    record = BuiltSettings(saved)
    assert record.note_ranks(3) == 3
    for ranks, is_explained in ((2, True), (3, False)):
        train(saved)
        own = resume(saved, record, build(SCHEDULERS["cosine"], total=30))
        log_unused_settings(own, rank=0, ranks=ranks)
        assert ("The job had 3 ranks then and has 2 now" in caplog.text) == is_explained
        assert "not scheduler/T_max 30 (first start: 20)" in caplog.text
        caplog.clear()
