"""What ``er.load`` gives of a checkpoint, and of the directories in which checkpoints lie."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elastic_resume as er
from elastic_resume import constants
from elastic_resume.checkpoint.reader import quick_check
from elastic_resume.errors import CorruptError, ForeignError, NoValidCheckpointError, UsageError
from tests.support import checkpoint_samples
from tests.unit.state.test_export import equal, save


def model() -> nn.Sequential:
    """Two layers, a buffer, tied weights and a complex number."""
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    net[2].weight = net[0].weight
    net.register_buffer("z", torch.tensor([1 + 2j]))
    return net


def trained() -> tuple[nn.Sequential, torch.optim.Adam]:
    """A model and its optimizer after a step."""
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return net, optimizer


def same(one: Any, other: Any) -> bool:
    """Whether two nested states are alike, bit for bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_a_checkpoint_gives_each_objects_state(tmp_path: Path) -> None:
    """Names, types, bits and ties; it stays when the file goes, and an optimizer takes what comes out."""
    net, optimizer = trained()
    path = save(tmp_path / "ckpt" / "job" / "n0", 7, model=net, optimizer=optimizer)
    loaded, steps, everything = er.load(path), er.load(path, "optimizer"), er.load(path, None)
    with pytest.raises(UsageError, match="holds no object 'ema'. It holds 'model', 'optimizer';"):
        er.load(path, "ema")
    os.truncate(path / constants.STATE_FILE, 0)
    assert equal(loaded, net.state_dict())
    assert loaded["0.weight"].data_ptr() == loaded["2.weight"].data_ptr()
    again = torch.optim.Adam(model().parameters())
    again.load_state_dict(steps)
    assert same(again.state_dict(), optimizer.state_dict())
    assert same(everything, {"model": dict(net.state_dict()), "optimizer": optimizer.state_dict()})


def test_a_directory_of_checkpoints_gives_the_newest_valid_one(tmp_path: Path) -> None:
    """Of a node or of a whole run; what is damaged is passed over, and an error where nothing else is."""
    old = save(tmp_path / "job" / "n0", 3, model=model())
    newer = model()
    nn.init.zeros_(newer.get_parameter("0.weight"))
    new = save(tmp_path / "job" / "n1", 4, model=newer)
    assert equal(er.load(tmp_path / "job"), newer.state_dict())
    assert equal(er.load(tmp_path), newer.state_dict())
    assert equal(er.load(new / constants.MANIFEST_FILE), newer.state_dict())
    checkpoint_samples.flip_bits(new / constants.STATE_FILE, -5)
    assert equal(er.load(tmp_path / "job"), model().state_dict())
    assert equal(er.load(old.parent), model().state_dict())
    checkpoint_samples.flip_bits(old / constants.STATE_FILE, -5)
    with pytest.raises(NoValidCheckpointError, match=r"digest.*; .*digest"):
        er.load(tmp_path / "job")
    save(tmp_path / "other" / "n0", 3, model=model())
    with pytest.raises(UsageError, match="holds 2 runs; give one of them: job, other"):
        er.load(tmp_path)


def test_what_is_no_checkpoint_of_ours_is_refused(tmp_path: Path) -> None:
    """A file of another format says what reads it."""
    torch.save({}, tmp_path / "m.pt")
    (tmp_path / "empty").mkdir()
    for name, why in (
        ("m.pt", "Read a file of torch.save"),
        ("none", "there is no such file or directory"),
        ("empty", "holds no checkp"),
    ):
        with pytest.raises(ForeignError, match=why):
            er.load(tmp_path / name)


def test_a_manifest_that_names_a_tensor_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """Though all digests are right."""
    path = save(tmp_path / "n0", 3, model=model())
    manifest = quick_check(path, None)
    state = {"model": {"w": {"$": "tensor", "name": "model/w", "kind": "tensor"}}}
    (path / constants.MANIFEST_FILE).write_bytes(replace(manifest, state=state).to_bytes())
    with pytest.raises(CorruptError, match="refers to the tensor 'model/w'"):
        er.load(path)
