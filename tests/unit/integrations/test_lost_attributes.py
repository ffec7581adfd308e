"""A callback that counts or averages in plain attributes is found, and each attribute is named once."""

from __future__ import annotations

import datetime as dt
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from elastic_resume.integrations.lost_attributes import CHECKED_STEPS, LostAttributes


def make_callback() -> Any:
    """Return an object with attributes of each kind."""
    return SimpleNamespace(
        seen=0,
        best=1.0,
        phase="warm",
        average={"weight": torch.zeros(2)},
        shadow=nn.Linear(2, 2),
        window=deque([1.0], maxlen=4),
        losses=[],
        total=torch.zeros(()),
        constant=3,
        logger=object(),
        _private=0,
    )


def change(callback: Any) -> None:
    """Do what a step of it may do."""
    callback.seen += 1
    callback.best -= 0.5
    callback.phase = "hot"
    callback.average["weight"].mul_(0.9)
    with torch.no_grad():
        callback.shadow.weight.add_(1)
    callback.window.append(2.0)
    callback.losses.append(0.1)
    callback.total += 1
    callback._private += 1
    callback.logger = object()


def test_each_changed_attribute_is_named_once() -> None:
    """After a few steps, and later only what has changed since."""
    callback, quiet = make_callback(), make_callback()
    changed = LostAttributes([callback, quiet], tracked={id(callback.total)})
    found = []
    for _ in range(CHECKED_STEPS + 2):
        change(callback)
        found += changed.after_step()
    names = ["seen", "best", "phase", "average", "shadow", "window", "losses"]
    assert found == [(callback, names)]
    change(callback)
    callback.constant = 4
    callback.late = 1
    assert changed.find() == [(callback, ["constant", "late"])]
    assert changed.find() == []


def test_what_belongs_to_a_process_or_step_is_not_named(tmp_path: Path) -> None:
    """Times, what was measured, files, and tensors of a step's graph. A list that grows is named."""
    item: Any = SimpleNamespace(
        began=0.0,
        started=0.0,
        elapsed=0.0,
        today=None,
        file=None,
        loss=torch.zeros(()),
        parts={"loss": None},
        losses=[],
        best=0.0,
    )
    changed = LostAttributes([item], tracked=())
    weight = torch.ones((), requires_grad=True)
    item.began, item.started = time.time(), time.perf_counter()
    item.elapsed, item.best = 0.01, 0.01
    item.today = dt.datetime.now(tz=dt.timezone.utc)
    item.loss = item.parts["loss"] = weight * 2
    item.losses.append(item.loss)
    with (tmp_path / "log").open("w") as item.file:
        assert changed.find() == [(item, ["losses", "best"])]


def test_tensor_of_inference_mode_ends_no_training() -> None:
    """Lightning validates in that mode, where torch counts no changes."""
    module = SimpleNamespace(last=None)
    lost = LostAttributes([module], ())
    with torch.inference_mode():
        module.last = torch.ones(3)
    assert [names for _, names in lost.find()] == [["last"]]
