"""Exported files are readable without this package."""

from __future__ import annotations

from collections import Counter, deque
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import elastic_resume as er
from elastic_resume import constants
from elastic_resume.checkpoint import reader
from elastic_resume.checkpoint.stored import CheckpointInDirectory
from elastic_resume.cli import main
from elastic_resume.errors import CorruptError, UsageError
from elastic_resume.state.export import export
from tests.support import checkpoint_samples, launch_ranks
from tests.support.state_image import are_equal, save_checkpoint


class Net(nn.Module):
    """A model with tied weights, a buffer, half precision and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.norm = nn.BatchNorm1d(4)
        self.narrow = nn.Linear(4, 3, bias=False).to(torch.bfloat16)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight
        self.none = nn.Parameter(torch.zeros(0, 3))


@pytest.fixture
def net() -> Net:
    """A model with random weights."""
    torch.manual_seed(3)
    return Net()


@pytest.fixture
def saved(tmp_path: Path, net: Net) -> Path:
    """A checkpoint of a model and its optimizer after one step."""
    optimizer = torch.optim.Adam(net.parameters())
    net.embed.weight.grad = torch.ones_like(net.embed.weight)
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return save_checkpoint(
        tmp_path / "ckpt" / "job" / "n0", 7, model=net, optimizer=optimizer, scheduler=scheduler
    )


def out(saved: Path, target: Path, **how: Any) -> None:
    """Export with the checkpoint's own manifest."""
    export(CheckpointInDirectory(saved), reader.quick_check(saved, None), target, **how)


def test_safetensors_package_opens_export(saved: Path, net: Net, tmp_path: Path) -> None:
    """Names are those of state_dict; tied weights are stored under both names."""
    out(saved, tmp_path / "m.safetensors")
    loaded = safetensors.torch.load_file(tmp_path / "m.safetensors")
    assert are_equal(loaded, net.state_dict())


def test_model_loads_export(saved: Path, net: Net, tmp_path: Path) -> None:
    """torch.load in its safe mode. Tied weights share memory."""
    out(saved, tmp_path / "m.pt", file_format="torch")
    loaded = torch.load(tmp_path / "m.pt", weights_only=True)
    assert loaded["embed.weight"].data_ptr() == loaded["head.weight"].data_ptr()
    fresh = Net()
    fresh.load_state_dict(loaded)
    assert are_equal(fresh.state_dict(), net.state_dict())


def test_export_of_optimizer_tensors(saved: Path, tmp_path: Path) -> None:
    """Nested state is named by its path."""
    out(saved, tmp_path / "o.safetensors", name="optimizer")
    loaded = safetensors.torch.load_file(tmp_path / "o.safetensors")
    assert set(loaded) == {"state/1/step", "state/1/exp_avg", "state/1/exp_avg_sq"}


def test_export_of_complex_tensors(tmp_path: Path) -> None:
    """A torch file keeps them complex; safetensors has complex64 only."""
    module = nn.Module()
    module.register_buffer("small", torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64))
    saved = save_checkpoint(tmp_path / "n0", 1, model=module)
    out(saved, tmp_path / "m.pt", file_format="torch")
    assert are_equal(torch.load(tmp_path / "m.pt", weights_only=True), module.state_dict())
    out(saved, tmp_path / "m.safetensors")
    module.register_buffer("large", torch.tensor([1j], dtype=torch.complex128))
    with pytest.raises(UsageError, match="large: safetensors has no complex128; use --format torch"):
        out(save_checkpoint(tmp_path / "n0", 2, model=module), tmp_path / "n.safetensors")


@pytest.mark.parametrize(
    ("name", "why"), [("ema", "is not in this checkpoint"), ("scheduler", "holds no tensor")]
)
def test_export_refuses_unknown_object(saved: Path, tmp_path: Path, name: str, why: str) -> None:
    """The error lists the objects that can be exported."""
    with pytest.raises(UsageError, match=f"{why}; objects with tensors: model, optimizer"):
        out(saved, tmp_path / "m.pt", name=name)
    assert not (tmp_path / "m.pt").exists()


def test_export_replaces_file_only_with_force(saved: Path, tmp_path: Path) -> None:
    """Without force the file stays."""
    target = tmp_path / "m.pt"
    target.write_text("mine")
    with pytest.raises(UsageError, match="--force"):
        out(saved, target)
    assert target.read_text() == "mine"
    out(saved, target, force=True)
    assert safetensors.torch.load_file(target)
    with pytest.raises(UsageError, match="is a directory"):
        out(saved, tmp_path, force=True)


def test_export_refuses_corrupt_checkpoint(saved: Path, tmp_path: Path) -> None:
    """The digest is checked before a byte is written."""
    checkpoint_samples.flip_bits(saved / constants.STATE_FILE, -5)
    with pytest.raises(CorruptError, match="digest"):
        out(saved, tmp_path / "m.safetensors")
    assert not (tmp_path / "m.safetensors").exists()


# In a process of its own, which writes no bytecode: a cut .pyc file would stay and break all later imports.
FAILS = """
import contextlib, io, resource, sys
from elastic_resume.cli import main
sys.dont_write_bytecode = True
with contextlib.redirect_stderr(io.StringIO()) as errors:  # stderr is a file too
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    for target in sys.argv[2:]:
        assert main(["export", sys.argv[1], target, "--force", "--format", target.rpartition("/")[2]]) == 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(errors.getvalue(), file=sys.stderr)
"""


def test_failed_export_leaves_no_file(saved: Path, tmp_path: Path) -> None:
    """The old file stays, and no temporary file. The kernel refuses files of more than 1 kB."""
    targets = [tmp_path / "out" / name for name in ("safetensors", "torch", "dcp")]
    targets[0].parent.mkdir()
    for target in targets:
        target.write_text("old")
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    (end,) = launch_ranks.run_ranks(1, script, str(saved), *map(str, targets))
    assert end.returncode == 0, end.stderr
    assert end.stderr.count("elastic-resume: error: cannot write") == len(targets), end.stderr
    assert sorted(targets[0].parent.iterdir()) == sorted(targets)
    assert {target.read_text() for target in targets} == {"old"}


def test_export_uses_newest_valid_checkpoint_of_run(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command reports its choice and the invalid checkpoints."""
    newer = save_checkpoint(saved.parent.parent / "n1", 9, model=Net())
    checkpoint_samples.flip_bits(newer / constants.STATE_FILE, -5)
    torn = save_checkpoint(saved.parent, 8, model=Net())
    (torn / constants.STATE_FILE).write_bytes(b"")
    assert main(["export", str(saved.parent.parent), str(tmp_path / "m.pth")]) == 0
    told = capsys.readouterr()
    assert f"model of {saved} (generation 1, step 7," in told.out
    assert "not used:" in told.err
    assert "digest" in told.err
    assert torch.load(tmp_path / "m.pth", weights_only=True)


def test_export_without_checkpoint_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit code 1."""
    assert main(["export", str(tmp_path), str(tmp_path / "m.pt")]) == 1
    assert "holds no valid checkpoint" in capsys.readouterr().err


def test_dcp_loads_export(saved: Path, net: Net, tmp_path: Path) -> None:
    """An existing directory is never replaced."""
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load  # noqa: PLC0415  a second

    fresh = Net()
    out(saved, tmp_path / "dcp", file_format="dcp")
    state = {"model": fresh.state_dict()}
    with pytest.warns(UserWarning, match="single process"):
        dcp_load(state, checkpoint_id=tmp_path / "dcp")
    fresh.load_state_dict(state["model"])
    assert are_equal(fresh.state_dict(), net.state_dict())
    with pytest.raises(UsageError, match="is a directory"):
        out(saved, tmp_path / "dcp", file_format="dcp", force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "dcp"]


class Recent:
    """An object with tensors in a deque and a Counter."""

    def __init__(self) -> None:
        self.kept: Any = {"recent": deque([torch.ones(2)], 3), "counts": Counter({"a": 2})}

    def state_dict(self) -> Any:
        """Return the state."""
        return self.kept

    def load_state_dict(self, state: Any) -> None:
        """Load the state."""
        self.kept = state


def test_export_of_all_container_types(tmp_path: Path) -> None:
    """er.load returns a deque and a Counter; a file has the tensors."""
    saved = save_checkpoint(tmp_path / "n0", 1, own=Recent())
    loaded = er.load(saved, "own")
    assert (type(loaded["recent"]), loaded["recent"].maxlen, type(loaded["counts"])) == (deque, 3, Counter)
    assert loaded["recent"][0].tolist() == [1, 1]
    out(saved, tmp_path / "own.safetensors", name="own")
    assert list(safetensors.torch.load_file(tmp_path / "own.safetensors")) == ["recent/0"]
