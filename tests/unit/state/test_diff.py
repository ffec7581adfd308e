"""`elastic-resume diff` compares two checkpoints."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_resume import constants
from elastic_resume.cli import main
from elastic_resume.state.diff import Comparison, Difference, compare, find_differences
from tests.support import checkpoint_samples
from tests.support.state_image import save_checkpoint, train_small_model


class Kept:
    """A tracked object with any state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        """Return the state."""
        return self.state

    def load_state_dict(self, state: Any) -> None:
        """Load the state."""
        self.state = state


def saved(node_dir: Path, **states: Any) -> Path:
    """Commit a checkpoint of objects with these states."""
    return save_checkpoint(node_dir, 7, **{name: Kept(state) for name, state in states.items()})


def by_name(found: Comparison) -> dict[str, Difference]:
    """Return the differences by name."""
    return {difference.name: difference for difference in found.differences}


def test_compare_equal_states_finds_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also under another node's name, and for the directory of a run."""
    net, optimizer = train_small_model()
    ours = save_checkpoint(tmp_path / "job" / "n0", 7, model=net, optimizer=optimizer)
    other = save_checkpoint(tmp_path / "other" / "n1", 7, model=net, optimizer=optimizer)
    assert not compare(ours, other).differences
    assert main(["diff", str(tmp_path / "job"), str(other)]) == 0
    assert "the same: 25 tensors and " in capsys.readouterr().out


def test_compare_leaves_out_when_a_trainer_started(tmp_path: Path) -> None:
    """Two equal runs start at different times; any other value of that object counts."""
    starts = [{"nanoseconds": 1}, {"nanoseconds": 2}, {"nanoseconds": 2, "zone": 3}]
    one, equal, other = (
        saved(tmp_path / "job" / f"n{i}", trainer_start=start) for i, start in enumerate(starts)
    )
    assert not compare(one, equal).differences
    assert list(by_name(compare(one, other))) == ["trainer_start/zone"]


def test_compare_leaves_out_floats_of_plain_attributes(tmp_path: Path) -> None:
    """They may be durations, under any name; counts, and floats elsewhere, are compared."""
    states = [
        {"Speed.ema_dt": {"value": [0.1, {"b": 1.5}], "tensors": []}, "Speed.steps": {"value": 3}},
        {"Speed.ema_dt": {"value": [0.2, {"b": 2.5}], "tensors": []}, "Speed.steps": {"value": 3}},
        {"Speed.ema_dt": {"value": [0.2, {"b": 2.5}], "tensors": []}, "Speed.steps": {"value": 4}},
    ]
    one, equal, other = (
        saved(tmp_path / "job" / f"n{i}", trainer_attributes={"values": [state], "shared": {}})
        for i, state in enumerate(states)
    )
    assert not compare(one, equal).differences
    assert list(by_name(compare(one, other))) == ["trainer_attributes/values/0/Speed.steps/value"]


def test_compare_reports_every_kind_of_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By name, with its size if it has one."""
    a = {
        "w": torch.tensor([1.0, 2.0, 4.0]),
        "half": torch.tensor([1.0, 2.0]),
        "shape": torch.zeros(2),
        "gone": torch.zeros(1),
        "zero": torch.tensor([0.0]),
        "nan": torch.tensor([math.nan, 1.0]),
        "number": torch.tensor([1.0, math.nan]),
        "int": torch.tensor([1, 2]),
        "same": torch.tensor([math.nan, 0.0]),
        "z": torch.tensor([1 + 1j]),
        "e": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        "none": torch.zeros(0),
    }
    b = {
        **a,
        "w": torch.tensor([1.0, 2.5, 4.0]),
        "half": torch.tensor([1.0, 2.0]).half(),
        "shape": torch.zeros(3),
        "zero": torch.tensor([-0.0]),
        "nan": torch.tensor([math.nan, 1.0]),
        "number": torch.tensor([1.0, 3.0]),
        "int": torch.tensor([1, 5]),
        "z": torch.tensor([1 + 3j]),
        "e": torch.tensor([1.0, 4.0]).to(torch.float8_e4m3fn),
    }
    del b["gone"]
    plain = {"lr": 0.1, "betas": (0.9, 0.99), "nan": math.nan, "names": ["x"]}
    first = saved(tmp_path / "a", model=a, extra=plain)
    changed = {**plain, "lr": 0.2, "betas": (0.9, 0.95), "names": ["x", "y"]}
    second = saved(tmp_path / "b", model=b, extra=changed)
    found = by_name(compare(first, second))
    sizes = {
        name: (d.kind, d.differing_elements, d.total_elements, d.max_abs_difference, d.max_rel_difference)
        for name, d in found.items()
    }
    assert sizes == {
        "model/w": ("values", 1, 3, 0.5, pytest.approx(0.2)),
        "model/half": ("dtype", 0, 2, 0.0, 0.0),
        "model/shape": ("shape", 0, 0, 0.0, 0.0),
        "model/gone": ("only in A", 0, 0, 0.0, 0.0),
        "model/zero": ("values", 1, 1, 0.0, 0.0),
        "model/number": ("values", 1, 2, math.inf, math.inf),
        "model/int": ("values", 1, 2, 3.0, pytest.approx(0.6)),
        "model/z": ("values", 1, 2, 2.0, pytest.approx(2 / 3)),
        "model/e": ("values", 1, 2, 2.0, 0.5),
        "extra/lr": ("value", 0, 0, 0.0, 0.0),
        "extra/betas/1": ("value", 0, 0, 0.0, 0.0),
        "extra/names/1": ("only in B", 0, 0, 0.0, 0.0),
    }
    assert main(["diff", str(first), str(second)]) == 1
    output = capsys.readouterr().out
    assert "  model/w float32[3]: 1 of 3 differ, by 0.5 at most, relative 0.2\n" in output
    assert "  model/half: dtype float32[2] -> float16[2]; 0 of 2 differ" in output
    assert "  model/shape: shape float32[2] -> float32[3]\n" in output
    assert "  model/gone: only in A (float32[1])\n" in output
    assert "  extra/lr: 0.1 -> 0.2\n" in output
    assert output.endswith("12 differences: 12 tensors and 9 other values compared\n")


def test_long_texts_are_shown_from_where_they_differ() -> None:
    """An entry of a log differs in its last value."""
    one, other = (json.dumps({"loss": 1.9734480381011963, "grad_norm": 0.5, "tokens": n}) for n in (360, 40))
    (difference,) = find_differences("log", one, other)
    assert difference.value_a == """...rm": 0.5, "tokens": 360}'"""
    assert difference.value_b == """...rm": 0.5, "tokens": 40}'"""
    (difference,) = find_differences("log", one, one + "x" * 80)
    assert len(difference.value_b) == 60
    (difference,) = find_differences("log", one[:50], one[:49])
    assert difference.value_a == repr(one[:50])


def test_diff_of_two_steps_of_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The position is reported too. Without data= a resume begins to count the steps of an epoch anew."""
    net, optimizer = train_small_model()
    first = save_checkpoint(tmp_path / "job" / "n0", 7, model=net, optimizer=optimizer)
    net.get_parameter("0.bias").data += 1
    optimizer.param_groups[0]["lr"] = 0.5
    second = save_checkpoint(tmp_path / "job" / "n0", 8, model=net, optimizer=optimizer)
    assert set(by_name(compare(first, second))) == {
        "position/step",
        "position/samples",
        "model/0.bias",
        "optimizer/param_groups/0/lr",
    }
    assert main(["diff", str(first), str(second)]) == 1
    assert f"A: {first} (generation 1, step 7)\n" in capsys.readouterr().out
    many = {str(i): torch.zeros(1) for i in range(30)}
    none = saved(tmp_path / "a", x=many), saved(tmp_path / "b", x={"0": torch.zeros(1)})
    assert main(["diff", *map(str, none)]) == 1
    assert "and 9 more differences; --all lists them" in capsys.readouterr().out
    assert main(["diff", "--all", *map(str, none)]) == 1
    assert "more" not in capsys.readouterr().out


def test_diff_of_unreadable_checkpoint_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, as for ``diff`` itself and for a wrong flag."""
    net, optimizer = train_small_model()
    good = save_checkpoint(tmp_path / "job" / "n0", 7, model=net, optimizer=optimizer)
    bad = save_checkpoint(tmp_path / "job" / "n0", 8, model=net, optimizer=optimizer)
    checkpoint_samples.flip_bits(bad / constants.STATE_FILE, -5)
    for arguments, reason in (
        ([str(good), str(bad)], "do not match their digest"),
        ([str(good), str(tmp_path / "none")], "there is no such file or directory"),
        ([str(good), "--what"], "unknown flag --what|required"),
    ):
        assert main(["diff", *arguments]) == 2
        output = capsys.readouterr().err
        assert any(part in output for part in reason.split("|"))
        assert output.count("\n") == 1
