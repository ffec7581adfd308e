"""Training that begins from a file which somebody else saved: as scripts save them, as they go wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn.parallel import DataParallel

import elastic_resume as er
from elastic_resume.errors import MachineError, MismatchError, NoValidCheckpointError
from elastic_resume.policy import source
from elastic_resume.policy.source import Copy, Inventory, Rejected
from elastic_resume.store.catalog import Catalog
from elastic_resume.store.durable import Disk
from elastic_resume.worker import inventory
from elastic_resume.worker.contents import tree_of
from elastic_resume.worker.fitting import fit, read
from tests import ranks
from tests.test_contents import Bomb, dcp_save, same

STEPS = 4  # of an epoch


class Script:
    """What a training script builds; ``seed`` decides its first weights."""

    def __init__(self, seed: int, kind: Callable[..., torch.optim.Optimizer] = torch.optim.Adam) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))
        self.optimizer = kind(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.batches = er.GlobalBatches(4 * STEPS, 4)

    def train(self, steps: int) -> Script:
        """Run some optimizer steps, and the scheduler's after each epoch."""
        for step in range(1, steps + 1):
            self.optimizer.zero_grad()
            self.model(torch.rand(4, 3)).sum().backward()
            self.optimizer.step()
            if step % STEPS == 0:
                self.scheduler.step()
        return self

    @property
    def state(self) -> dict[str, Any]:
        """What is compared."""
        named = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {name: item.state_dict() for name, item in named.items()}  # type: ignore[attr-defined]


Begin = Callable[..., er.Run]


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Resume from a file, in this process, as a job of its own."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    made: list[er.Run] = []

    def build(script: Script, path: Path, job: str = "job", **more: Any) -> er.Run:
        for one in made:
            one._release()
        given = {"model": script.model, "optimizer": script.optimizer, "scheduler": script.scheduler}
        where = {"ckpt_dir": tmp_path / "ckpt", "run_id": job, "node_name": "n", "resume": path}
        made.append(er.resume(**{**given, "data": script.batches, **where, **more}))
        return made[-1]

    yield build
    for one in made:
        one._release()


def saved(script: Script, path: Path, **more: Any) -> Path:
    """As the ImageNet example does."""
    torch.save(
        {
            "state_dict": DataParallel(script.model).state_dict(),
            "optimizer": script.optimizer.state_dict(),
            "scheduler": script.scheduler.state_dict(),
            **more,
        },
        path,
    )
    return path


def test_training_goes_on_with_all_that_the_file_holds(
    begin: Begin, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights, optimizer, scheduler, and the epoch that the optimizer's own count proves."""
    theirs = Script(1).train(2 * STEPS)
    path = saved(theirs, tmp_path / "m.pt", epoch=2, arch="mlp", best_acc1=torch.tensor(0.5))
    mine = Script(2)
    run = begin(mine, path)
    assert same(mine.state, theirs.state)
    assert (run.position.epoch, run.position.step_in_epoch, run.position.step) == (2, 0, 2 * STEPS)
    assert run.position.samples == 2 * 4 * STEPS
    said = capsys.readouterr().err
    assert f"{path} (torch.save) gives model from 'state_dict', optimizer from 'optimizer'" in said
    assert "not used: 'arch', 'best_acc1'" in said
    assert "begins at epoch 2, step 8: the optimizer has counted 8 steps" in said


def test_a_restart_goes_on_from_the_jobs_own_copies(begin: Begin, tmp_path: Path) -> None:
    """Not from the file again, which would give up what was saved since."""
    first, path = Script(2), saved(Script(1).train(4), tmp_path / "m.pt")
    run = begin(first, path)
    assert run.position.step == 0
    kept = {entry.generation for entry in Catalog(tmp_path / "ckpt/job/n", "job").valid(deep=True)}
    first.train(1)
    run.step()
    run.save()
    second = Script(3)
    again = begin(second, path)
    assert again.position.step == 1
    assert again.generation > run.generation > max(kept)
    assert same(second.state, first.state)


def test_whoever_starts_the_job_again_does_not_begin_with_the_file_again(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A scheduler's requeue runs the same command, under another agent. That it goes on is said once."""
    path = saved(Script(1), tmp_path / "m.pt")
    first = Script(2)
    run = begin(first, path)
    first.train(1)
    run.step()
    run.save()
    monkeypatch.setattr(inventory, "supervisor", lambda: "another start")
    second = Script(3)
    assert begin(second, path).position.step == 1
    assert same(second.state, first.state)
    assert f"--resume {path} is not read: the job has copies of its own" in capsys.readouterr().err
    begin(Script(4), path)
    assert "is not read" not in capsys.readouterr().err


def test_moments_belong_to_the_parameters_that_the_file_names() -> None:
    """Torch notes the names beside the numbers, where an optimizer was made of named parameters."""
    a, b = (nn.Parameter(torch.full((2,), float(value))) for value in (1, 2))
    theirs = torch.optim.Adam([("b", b), ("a", a)])
    for value, parameter in enumerate((a, b), 1):
        parameter.grad = torch.full((2,), float(value))
    theirs.step()
    mine = torch.optim.Adam([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))])
    taken = fit("optimizer", mine, tree_of(theirs.state_dict()), [["model/a", "model/b"]])
    assert not taken.differences
    moments = read(taken.state)["state"]
    assert moments[0]["exp_avg"][0] < moments[1]["exp_avg"][0]
    assert "param_names" not in taken.state["param_groups"][0]


def test_what_the_file_lacks_starts_fresh_and_is_said(
    begin: Begin, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bare state_dict in each format, wrapped or not, ties stored once or twice."""
    theirs = Script(1).train(3)
    state = theirs.model.state_dict()
    wrapped = {f"module._orig_mod.{name}": value for name, value in state.items()}
    torch.save(wrapped, tmp_path / "bare.pt")
    safetensors.torch.save_file(dict(state), tmp_path / "m.safetensors")
    paths = [tmp_path / "bare.pt", tmp_path / "m.safetensors", dcp_save({"net": state}, tmp_path / "dcp")]
    for path in paths:
        mine = Script(2)
        run = begin(mine, path, job=path.stem)
        assert same(mine.model.state_dict(), state)
        assert not mine.optimizer.state
        assert run.position.step == 0
        said = capsys.readouterr().err
        assert "starts fresh: optimizer, scheduler; training begins at epoch 0, step 0: the file" in said


@pytest.mark.parametrize(
    "case",
    [
        ("Adam", 8, {"epoch": 1}, (2, 8), "optimizer has counted 8"),  # the last one done
        ("Adam", 8, {"epoch": 2}, (2, 8), "optimizer has counted 8"),  # the next one
        ("Adam", 8, {"epoch": 5}, (0, 0), "nothing else in the file says what its epoch 5 counts"),
        ("Adam", 8, {"global_step": 8}, (2, 8), "optimizer has counted 8"),
        ("Adam", 8, {"step": 7}, (0, 0), "what its step 7 counts"),
        ("Adam", 6, {"epoch": 1}, (1, 4), "of epoch 1 2 steps were done, and it starts over"),
        ("Adam", 4, {"epoch": 2, "accumulate": 2}, (2, 4), "optimizer has counted 4"),
        ("Adam", 4, {"epoch": 0, "accumulate": 2}, (0, 0), "what its epoch 0 counts"),
        ("SGD", 8, {"epoch": 1}, (2, 8), "scheduler has counted 2 epochs"),
        ("SGD", 8, {"epoch": torch.tensor(4)}, (0, 0), "what its epoch 4 counts"),
        ("SGD", 8, {"epoch": -1}, (0, 0), "tells no epoch"),
    ],
)
def test_numbers_count_only_where_two_agree(
    begin: Begin,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    case: tuple[str, int, dict[str, Any], tuple[int, int], str],
) -> None:
    """An epoch may be the last one done or the next: the optimizer's or the scheduler's count decides."""
    kind, steps, numbers, place, why = case
    optimizer = getattr(torch.optim, kind)
    path = saved(Script(1, optimizer).train(steps), tmp_path / "m.pt", **numbers)
    run = begin(Script(2, optimizer), path, accumulate=numbers.pop("accumulate", 1))
    assert (run.position.epoch, run.position.step) == place
    assert why in capsys.readouterr().err


def test_what_does_not_fit_is_listed_and_nothing_is_loaded(begin: Begin, tmp_path: Path) -> None:
    """Names, shapes and dtypes of all objects at once."""
    theirs = Script(1).train(1)
    state = theirs.model.state_dict()
    state["0.weight"] = torch.zeros(5, 3)
    state["2.weight"] = state["2.weight"].half()
    state["extra"] = torch.zeros(1)
    del state["1.bias"]
    optimizer = theirs.optimizer.state_dict()
    optimizer["state"][0]["exp_avg"] = torch.zeros(5, 3)
    scheduler = theirs.scheduler.state_dict() | {"T_max": 3}
    torch.save({"model": state, "optimizer": optimizer, "scheduler": scheduler}, tmp_path / "m.pt")
    mine = Script(2)
    before = mine.model.state_dict()["0.bias"].clone()
    with pytest.raises(MismatchError, match="nothing was loaded") as caught:
        begin(mine, tmp_path / "m.pt")
    for line in (
        "model/0.weight: float32[3, 3] in the model, float32[5, 3] in the file",
        "model/1.bias: float32[3] in the model, absent in the file",
        "model/2.weight: float32[3, 3] in the model, float16[3, 3] in the file",
        "model/extra: absent in the model, float32[1] in the file",
        "optimizer/state/0/exp_avg: [5, 3] in the file, its parameter [3, 3]",
        "scheduler/T_max: in the file, unknown to the object",
    ):
        assert line in str(caught.value)
    assert torch.equal(mine.model.state_dict()["0.bias"], before)
    assert not Catalog(tmp_path / "ckpt/job/n", "job").entries()


def test_a_file_without_the_model_or_that_cannot_be_read(begin: Begin, tmp_path: Path) -> None:
    """Never a silent fresh start."""
    for what, error, why in (
        (
            {"optimizer": Script(1).optimizer.state_dict()},
            MismatchError,
            "holds no state of model.*'optimizer'",
        ),
        ({"model": Bomb()}, NoValidCheckpointError, "nothing was run"),
    ):
        torch.save(what, tmp_path / "m.pt")
        with pytest.raises(error, match=why):
            begin(Script(2), tmp_path / "m.pt")
    (tmp_path / "m.pt").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(NoValidCheckpointError, match="its end is missing"):
        begin(Script(2), tmp_path / "m.pt")
    (tmp_path / "m.pt").write_bytes(b"text")
    with pytest.raises(NoValidCheckpointError, match="by its first bytes"):
        begin(Script(2), tmp_path / "m.pt")


def test_an_optimizer_of_another_kind_or_size() -> None:
    """Is told by its settings and by its groups; an older release's lack of a setting is none of that."""
    adam, sgd = Script(1).train(1).optimizer, Script(1, torch.optim.SGD).optimizer
    differing = fit("optimizer", adam, tree_of(sgd.state_dict())).differences
    assert "is it of the same kind?" in differing[0]
    assert fit("optimizer", adam, tree_of({"a": 1})).differences == (
        "optimizer: has no state and param_groups in the file",
    )
    short = adam.state_dict()
    short["param_groups"][0]["params"].pop()
    assert "groups of [5] parameters now, of [4] in the file" in fit("o", adam, tree_of(short)).differences[0]
    older = adam.state_dict()
    del older["param_groups"][0]["fused"]
    taken = fit("optimizer", adam, tree_of(older))
    assert not taken.differences
    assert same(read(taken.state), adam.state_dict())


def test_an_optimizer_whose_state_goes_by_names() -> None:
    """As torch.distributed.checkpoint's get_state_dict saves it; the live order decides."""
    optimizer = Script(1).train(1).optimizer
    state = optimizer.state_dict()
    names = ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight"]
    by_name = {
        "state": {f"module.{names[at]}": values for at, values in reversed(state["state"].items())},
        "param_groups": [
            {**state["param_groups"][0], "params": [f"module.{name}" for name in reversed(names)]}
        ],
    }
    order = [[f"model/{name}" for name in names]]
    taken = fit("optimizer", optimizer, tree_of(by_name), order)
    assert not taken.differences
    assert same(read(taken.state)["state"], state["state"])
    other = fit("optimizer", optimizer, tree_of(by_name), [[*order[0][1:], "model/head"]])
    assert "'module.0.weight' is none of the optimizer's parameters" in other.differences[0]


def test_averages_and_ties() -> None:
    """An averaged model takes bare names; of two tied names a file may hold one."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    average = torch.optim.swa_utils.AveragedModel(model)
    bare = {"n_averaged": torch.tensor(3), "1.weight": torch.ones(2, 2)}
    taken = fit("ema", average, tree_of(bare))
    assert not taken.differences
    average.load_state_dict(read(taken.state))
    assert average.get_parameter("module.0.weight").tolist() == [[1, 1], [1, 1]]


TWO_RANKS = """
import os
import torch
from torch import nn
import elastic_resume as er
torch.manual_seed(int(os.environ["RANK"]))
model, extra = nn.Linear(3, 2), nn.Linear(2, 2)
run = er.resume(model=model, extra=extra)
print(model.weight.sum().item(), extra.weight.sum().item(), run.generation)
run.close()
"""


@pytest.mark.cluster
def test_all_ranks_begin_alike_though_one_node_sees_the_file(tmp_path: Path) -> None:
    """What the file lacks is filled in once; the other node, with other first weights, gets it sent."""
    script = tmp_path / "train.py"
    script.write_text(TWO_RANKS)
    theirs = nn.Linear(3, 2)
    torch.save({"module.weight": theirs.weight, "module.bias": theirs.bias}, tmp_path / "m.pt")
    paths = [tmp_path / "elsewhere" / "m.pt", tmp_path / "m.pt"]
    env = [{"ELASTIC_RESUME_CKPT_DIR": str(tmp_path), "ELASTIC_RESUME_RESUME": str(path)} for path in paths]
    done = ranks.run(2, script, env=env)
    assert [one.returncode for one in done] == [0, 0], done[0].stderr + done[1].stderr
    assert done[0].stdout == done[1].stdout
    assert done[0].stdout.startswith(f"{theirs.weight.sum().item()} ")
    assert "starts fresh: extra" in done[1].stderr


def test_which_node_brings_the_file() -> None:
    """The first that sees it, above what is older; nobody where this start has copies of its own already."""

    def node(name: str, rank: int, **more: Any) -> Inventory:
        return Inventory(name, rank, **more)

    blind, sees = node("a", 0, generation=4), node("b", 1, generation=7, foreign="torch.save")
    assert source.bringer([sees, blind, node("c", 2, foreign="torch.save")]) == ("b", 7)
    assert source.bringer([blind]) is None
    ours = node("c", 2, given=Copy("", 3, 9, 0))
    assert source.bringer([sees, ours]) is None
    older, newer = Copy("a", 7, 5, 0), Copy("a", 8, 6, 0)
    began = node("b", 1, generation=8, floor=7, began=True, foreign="torch.save")
    assert source.bringer([node("a", 0, copies=(older,)), began]) == ("b", 7)
    assert source.bringer([node("a", 0, copies=(newer,)), began]) is None
    lost = node("a", 0, committed=8)
    with pytest.raises(NoValidCheckpointError, match="had checkpoints of this job"):
        source.bringer([lost, began])
    torn = Rejected("a", "g000008", "torn", (8, 6))
    with pytest.raises(NoValidCheckpointError, match="none can be loaded"):
        source.bringer([node("a", 0, rejected=(torn,)), began])


def test_a_disk_that_refuses_the_first_checkpoint(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends the job with its reason; the same start of the job, tried again, reads the file again."""
    path = saved(Script(1).train(4), tmp_path / "m.pt")
    with monkeypatch.context() as patched:
        patched.setattr(Disk, "rename", _refuse)
        with pytest.raises(MachineError, match="no room"):
            begin(Script(2), path)
    mine = Script(3)
    assert begin(mine, path).position.step == 0
    assert same(mine.state, Script(1).train(4).state)


def _refuse(_: Disk, source_path: Path, target: Path) -> None:
    if target.name.startswith("g0"):
        raise MachineError(f"{target}: no room")
    source_path.rename(target)
