"""`assert_same_run`: the differences that it finds, and the errors that it reports."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from elastic_resume.checkpoint.manifest import Manifest, Position
from elastic_resume.errors import ConfigError
from elastic_resume.state import state_dict
from elastic_resume.testing import Fault, assert_same_run
from elastic_resume.testing.equivalence import (
    FOLLOWS_RANK0_HINT,
    SEED_HINT,
    RunResult,
    compare_lines,
    compare_state,
)
from tests.support import checkpoint_samples
from tests.support.paths import SCRIPTS
from tests.support.state_image import Box, copy_to_image

SCRIPT = SCRIPTS / "probe.py"
KILL = Fault("kill-worker", rank=0, step=9)


def make_result(
    directory: Path, *, step: int = 5, at: int = 5, follows: tuple[str, ...] = (), **tracked: Any
) -> RunResult:
    """Make the result of a run that ends with these objects."""
    own = {name: tracked.pop(name) for name in list(tracked) if name.startswith(state_dict.RESERVED_PREFIX)}
    flat = state_dict.flatten(state_dict.collect_objects(tracked) | own)
    image = copy_to_image(flat)
    position = Position(0, at, step, 8 * step)
    manifest = Manifest("job", "n0", 0, 1, 1, position, 1.0, "test", flat.structure, follows)
    directory.mkdir()
    return RunResult(checkpoint_samples.save_image(directory, manifest, image.memory), manifest, (), ())


def net(bump: float = 0.0) -> nn.Module:
    """Make a model; ``bump`` changes the first number of the bias."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        model[0].bias[0] += bump  # type: ignore[index,operator]
    return model


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault("kill-node", node=3, step=5), "no node 3"),
        (Fault("kill-worker", rank=6, step=5), "no rank 6"),
        (Fault("cut", node=1, step=5), "of their own"),
    ],
)
def test_impossible_fault_is_refused_before_start(fault: Fault, message: str) -> None:
    """It has no target among three loopback nodes and six workers."""
    with pytest.raises(ConfigError, match=message):
        assert_same_run("no-script.py", faults=[fault], workers_per_node=2)


def test_compare_state_of_equal_ends_finds_nothing(tmp_path: Path) -> None:
    """A nan equals itself; without data= the step within the epoch is ignored."""
    one = make_result(tmp_path / "one", model=net(), notes=Box([1, float("nan")]))
    other = make_result(tmp_path / "other", model=net(), notes=Box([1, float("nan")]), at=2)
    assert compare_state(one, other, []) == {}


def test_compare_state_lists_differences_in_order(tmp_path: Path) -> None:
    """The seed comes first, then position, tensors and values; internal entries are left out."""
    mine: dict[str, Any] = {
        name: Box(1) for name in ("data", "elastic_resume.seed", "elastic_resume.buckets")
    }
    theirs = {name: Box(2) for name in mine}
    follows = ("model/1.running_mean",)
    model = net(1.0)
    model.get_buffer("1.running_mean")[1] = 4
    notes = Box({"a": [1, 2], "gone": 3}), Box({"a": [1, 2.0], "new": torch.ones(2)})
    one = make_result(tmp_path / "one", model=net(), notes=notes[0], follows=follows, **mine)
    other = make_result(
        tmp_path / "other", model=model, notes=notes[1], follows=follows, step=6, at=2, **theirs
    )
    assert list(compare_state(one, other, []).values()) == [
        SEED_HINT,
        "position/step_in_epoch: 2, undisturbed 5",
        "position/step: 6, undisturbed 5",
        "position/samples: 48, undisturbed 40",
        "model/0.bias float32[2]: 1 of 2 numbers differ, by 1 at most",
        f"model/1.running_mean float32[2]: 1 of 2 numbers differ, by 4 at most{FOLLOWS_RANK0_HINT}",
        "notes/value/a/1: 2.0, undisturbed 2",
        "notes/value/gone: is there only undisturbed",
        "data/value: 2, undisturbed 1",
        "notes/value/new: is there only under faults",
    ]
    ignore = ["notes", "*running_*", "model/0.b?as", "position", "data"]
    assert list(compare_state(one, other, ignore).values()) == [SEED_HINT]


def test_compare_lines_allows_repeated_and_torn_lines_only() -> None:
    """An unknown line is reported first, then missing lines."""
    lines = [f"step {number}: {number * 0.5}" for number in range(1, 7)]
    assert compare_lines(lines, lines[::-1], max_missing=0) == []
    assert compare_lines(lines, [*lines[:3], "step 4: 2", *lines[4:]], max_missing=1) == []
    assert "did not print 'step 1: 0.5' (2 such" in compare_lines(lines, lines[2:], max_missing=1)[0]
    assert "printed 'step 4: 7', which" in compare_lines(lines, [*lines, "step 4: 7"], max_missing=9)[0]


@pytest.fixture
def clean_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a directory; afterwards no temporary file and no process of the run is left."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    yield tmp_path
    assert not list((tmp_path / "tmp").iterdir())
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            assert str(tmp_path) not in " ".join(process.cmdline())


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "kill", "messages"),
    [
        (
            "forgets-optimizer",
            True,
            ["it printed 'step ", "model/weight float32", "ignore=['model/weight'", "went on after"],
        ),
        ("seed", False, ["the seed that random numbers come from", "Two undisturbed runs differ"]),
    ],
)
def test_assert_same_run_finds_mistake(
    mistake: str, kill: bool, messages: list[str], clean_tmp: Path
) -> None:
    """An optimizer is not restored; the seed differs at each start."""
    with pytest.raises(AssertionError) as caught:
        assert_same_run(SCRIPT, mistake, "40", faults=[KILL] if kill else [], nodes=1, lines="^step")
    for text in messages:
        assert text in str(caught.value)
    assert clean_tmp.exists()


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "messages"),
    [
        (
            "raise ValueError('there is no data')",
            ["undisturbed: rank 0 ended with exit code 1", "line 1, in <module>"],
        ),
        ("print('trained')", ["never called er.resume()", "trained"]),
    ],
)
def test_script_that_cannot_be_compared_fails_with_output(
    script: str, messages: list[str], clean_tmp: Path
) -> None:
    """It fails undisturbed, or never calls er.resume()."""
    path = clean_tmp / "script.py"
    path.write_text(script)
    with pytest.raises(AssertionError) as caught:
        assert_same_run(path, faults=[KILL], nodes=1)
    for text in messages:
        assert text in str(caught.value)
