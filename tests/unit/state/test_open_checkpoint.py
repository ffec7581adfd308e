"""``er.load`` reads checkpoints and directories of checkpoints."""

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
from tests.support.state_image import are_equal, make_small_model, save_checkpoint, train_small_model


def same(one: Any, other: Any) -> bool:
    """Return whether two nested states are equal, bit for bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_load_returns_state_of_each_object(tmp_path: Path) -> None:
    """Names, dtypes, bits and ties; it survives the file, and an optimizer loads it."""
    net, optimizer = train_small_model()
    path = save_checkpoint(tmp_path / "ckpt" / "job" / "n0", 7, model=net, optimizer=optimizer)
    loaded, steps, everything = er.load(path), er.load(path, "optimizer"), er.load(path, None)
    with pytest.raises(UsageError, match=r"holds no object 'ema'\. It holds 'model', 'optimizer';"):
        er.load(path, "ema")
    os.truncate(path / constants.STATE_FILE, 0)
    assert are_equal(loaded, net.state_dict())
    assert loaded["0.weight"].data_ptr() == loaded["2.weight"].data_ptr()
    again = torch.optim.Adam(make_small_model().parameters())
    again.load_state_dict(steps)
    assert same(again.state_dict(), optimizer.state_dict())
    assert same(everything, {"model": dict(net.state_dict()), "optimizer": optimizer.state_dict()})


def test_load_of_directory_returns_newest_valid_checkpoint(tmp_path: Path) -> None:
    """Of a node or a run; damaged checkpoints are skipped, and an error if there is no other."""
    old = save_checkpoint(tmp_path / "job" / "n0", 3, model=make_small_model())
    newer = make_small_model()
    nn.init.zeros_(newer.get_parameter("0.weight"))
    new = save_checkpoint(tmp_path / "job" / "n1", 4, model=newer)
    assert are_equal(er.load(tmp_path / "job"), newer.state_dict())
    assert are_equal(er.load(new / constants.MANIFEST_FILE), newer.state_dict())
    checkpoint_samples.flip_bits(new / constants.STATE_FILE, -5)
    assert are_equal(er.load(tmp_path / "job"), make_small_model().state_dict())
    assert are_equal(er.load(old.parent), make_small_model().state_dict())
    checkpoint_samples.flip_bits(old / constants.STATE_FILE, -5)
    with pytest.raises(NoValidCheckpointError, match=r"digest.*; .*digest"):
        er.load(tmp_path / "job")
    with pytest.raises(ForeignError, match="Give the directory of one run"):
        er.load(tmp_path)


def test_load_refuses_foreign_path(tmp_path: Path) -> None:
    """The error for a file of torch.save names its reader."""
    torch.save({}, tmp_path / "m.pt")
    (tmp_path / "empty").mkdir()
    for name, why in (
        ("m.pt", "Read a file of torch.save"),
        ("none", "there is no such file or directory"),
        ("empty", "holds no checkp"),
    ):
        with pytest.raises(ForeignError, match=why):
            er.load(tmp_path / name)


def test_load_refuses_manifest_with_missing_tensor(tmp_path: Path) -> None:
    """Although all digests are correct."""
    path = save_checkpoint(tmp_path / "n0", 3, model=make_small_model())
    manifest = quick_check(path, None)
    state = {"model": {"w": {"$": "tensor", "name": "model/w", "kind": "tensor"}}}
    (path / constants.MANIFEST_FILE).write_bytes(replace(manifest, state=state).to_bytes())
    with pytest.raises(CorruptError, match="refers to the tensor 'model/w'"):
        er.load(path)
