"""Snapshots: what lies in memory is the state at its step boundary, whatever training does meanwhile."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import elastic_resume as er
from elastic_resume import events, failpoints
from elastic_resume.capture import copy_engine, snapshotter
from elastic_resume.capture.copy_engine import copy_tensors
from elastic_resume.checkpoint.layout import Layout
from elastic_resume.errors import UsageError
from elastic_resume.snapshot import slots
from elastic_resume.state import state_dict
from elastic_resume.state.tensor_buffer import TensorBuffer
from elastic_resume.training.run import Run
from tests.support.rendezvous_nodes import count_open_descriptors, wait_until

pytestmark = pytest.mark.slow

Build = Callable[[], dict[str, Any]]
FP8 = torch.float8_e4m3fn


class Replacing(torch.optim.Optimizer):
    """An optimizer that puts new tensors in the place of its old ones."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Descend; the state is never changed in place."""
        del closure
        for group in self.param_groups:
            for p in group["params"]:
                old = self.state[p].get("mean", torch.zeros_like(p))
                self.state[p]["mean"] = old * 0.9 + p.grad
                p.sub_(self.state[p]["mean"], alpha=group["lr"])


class Odd(nn.Module):
    """Parameters and buffers of all kinds, some tied, one frozen."""

    count: Tensor
    ints: Tensor
    mask: Tensor
    tiny: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.column = nn.Parameter(torch.randn(4, 6).t())  # not contiguous
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.f16 = nn.Parameter(torch.randn(5).half())
        self.bf16 = nn.Parameter(torch.randn(5).bfloat16())
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("ints", torch.arange(7, dtype=torch.int8))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("tiny", torch.randn(4).to(FP8))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        """Change every buffer, and the frozen parameter, as MoCo's second encoder is changed."""
        self.count += 1
        self.ints += 1
        self.mask.logical_not_()
        self.tiny.copy_(torch.randn(4).to(FP8))
        self.frozen.data.add_(1)
        y: Tensor = self.norm(self.b(self.a(x))) * self.scalar
        return y.sum() + self.column.sum() + self.f16.float().sum() + self.bf16.float().sum()


def odd(make: Callable[[list[Tensor]], Any]) -> Build:
    """The odd model, with the optimizer that ``make`` gives."""

    def build() -> dict[str, Any]:
        model = Odd()
        return {"model": model, "optimizer": make([p for p in model.parameters() if p.requires_grad])}

    return build


def two() -> dict[str, Any]:
    """A model of two parts with an optimizer each, a scheduler, and an average of the weights."""
    g, d = nn.Linear(4, 4), nn.Linear(4, 4)
    opt_g, opt_d = torch.optim.Adam(g.parameters()), torch.optim.SGD(d.parameters(), lr=0.1, momentum=0.9)
    return {
        "model": {"g": g, "d": d},
        "optimizer": {"g": opt_g, "d": opt_d},
        "scheduler": torch.optim.lr_scheduler.StepLR(opt_g, 2),
        "ema": torch.optim.swa_utils.AveragedModel(g),
    }


KINDS: dict[str, Build] = {
    "sgd": odd(lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": odd(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "adamw": odd(torch.optim.AdamW),
    "amsgrad": odd(lambda p: torch.optim.Adam(p, amsgrad=True, foreach=False)),
    "adagrad": odd(torch.optim.Adagrad),
    "rmsprop": odd(lambda p: torch.optim.RMSprop(p, momentum=0.5)),
    "replacing": odd(Replacing),
    "two": two,
    "no optimizer": lambda: {"model": Odd()},
}


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    """Resume in this process; nothing goes to disk but the first step."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    runs: list[Run] = []

    def make(**more: Any) -> Run:
        torch.manual_seed(4)
        given = {
            "ckpt_dir": tmp_path,
            "run_id": "job",
            "node_name": "n",
            "save_every": 10**6,
            "snapshot_every": 1,
        }
        runs.append(er.resume(**{**given, **more}))
        return runs[-1]

    yield make
    for run in runs:
        run._release()


def expected(run: Run) -> tuple[dict[str, Tensor], Any]:
    """The state now: copies of its tensors, and all the rest."""
    flat = state_dict.flatten(run._tracked)
    return {leaf.name: leaf.tensor.clone() for leaf in flat.leaves}, flat.skeleton


def held(run: Run) -> tuple[dict[str, Tensor], Any, int]:
    """What memory holds: tensors, the rest, and the step."""
    memory = run._committer_connection.slot_client
    newest = memory.find_newest()
    assert newest is not None
    image = TensorBuffer(Layout.parse(newest.image, len(newest.image)), newest.image)
    tensors = {name: image.tensor(name).clone() for name in image.layout.extents}
    return tensors, newest.manifest.state, newest.manifest.step


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names of tensors that are not the same, bit for bit."""
    prints = [
        state_dict.digest_leaves(
            [state_dict.Leaf(name, tensor, state_dict.OTHER) for name, tensor in side.items()]
        )
        for side in (a, b)
    ]
    return sorted(
        name for name in prints[0].keys() | prints[1].keys() if prints[0].get(name) != prints[1].get(name)
    )


def step(objects: dict[str, Any]) -> None:
    """Forward, backward, and a step of all optimizers."""
    models, optimizers = objects["model"], objects.get("optimizer", [])
    parts = list(models.values()) if isinstance(models, dict) else [models]
    every = list(optimizers.values()) if isinstance(optimizers, dict) else [optimizers] if optimizers else []
    loss = sum(part(torch.randn(3, 4)).float().pow(2).sum() for part in parts)
    for part in parts:
        part.zero_grad()
    loss.backward()
    for part in parts:
        for p in part.parameters():
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)
    for optimizer in every:
        optimizer.step()
    if "ema" in objects:
        objects["ema"].update_parameters(parts[0])
    if "scheduler" in objects:
        objects["scheduler"].step()


@pytest.mark.parametrize("kind", KINDS)
def test_snapshot_equals_state_at_step_boundary(kind: str, begin: Callable[..., Run]) -> None:
    """Bit for bit, though the next forward pass runs, and changes buffers, before the copy is complete."""
    objects = KINDS[kind]()
    run = begin(**objects)
    for number in range(1, 7):
        step(objects)
        run.step()
        tensors, rest = expected(run)
        models = objects["model"]
        for part in models.values() if isinstance(models, dict) else [models]:
            part(torch.randn(3, 4))
        assert run._snapshot_scheduler.snapshotter.wait_until_complete(20)
        found, kept, at = held(run)
        assert at == number
        assert same(tensors, found) == []
        assert kept == rest


def test_copy_barrier_blocks_optimizer_step_until_copy_is_complete(
    begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow it is."""
    objects = KINDS["adamw"]()
    run = begin(**objects)
    step(objects)
    run.step()
    monkeypatch.setattr(failpoints, "_failpoints_by_name", failpoints._parse("snapshot.copying=delay:0.2"))
    step(objects)
    run.step()
    tensors, _ = expected(run)
    step(objects)
    found, _, at = held(run)
    assert at == 2
    assert same(tensors, found) == []


def test_verify_copies_names_tensor_changed_during_copy(begin: Callable[..., Run]) -> None:
    """With verify_copies on; by its tensor."""
    objects = KINDS["adamw"]()
    run = begin(**objects)
    run.verify_copies = True
    step(objects)
    run.step()
    step(objects)
    run.step()
    with torch.no_grad():
        objects["model"].a.weight.mul_(1.5)
    with pytest.raises(UsageError, match=r"model/a\.weight changed between run\.step\(\) and the next"):
        step(objects)


def replay(objects: dict[str, Any]) -> None:
    """Change parameters and optimizer state as a replayed CUDA graph of the step does: without any hook."""
    with torch.no_grad():
        for leaf in state_dict.flatten(objects).select_kinds(state_dict.REPLICATED):
            leaf.tensor.add_(1)


def failures(run: Run) -> list[str]:
    """What the event log says of snapshots that failed."""
    path = run._context.node_dir / "events.jsonl"
    return [str(event["reason"]) for event in events.read(path) if event["event"] == "snapshot-failed"]


SLOWLY = "snapshot.copying=delay:0.2"  # so that what training does meanwhile would be in the copy


def test_step_without_hooks_is_copied_synchronously(
    begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replayed CUDA graph runs none: training waits for the copy."""
    objects = KINDS["adamw"]()
    run = begin(**objects)
    replay(objects)
    monkeypatch.setattr(failpoints, "_failpoints_by_name", failpoints._parse(SLOWLY))
    for number in range(1, 4):
        run.step()
        tensors, _ = expected(run)
        replay(objects)
        assert run._snapshot_scheduler.snapshotter.wait_until_complete(20)
        found, _, at = held(run)
        assert at == number
        assert same(tensors, found) == []
    assert failures(run) == []


@pytest.mark.parametrize("when", ["before it is copied", "when it has been copied"])
def test_copy_during_graph_replay_is_discarded(
    when: str, begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Behind steps that had hooks nobody can know that the next one has none: it is seen at its end."""
    objects = KINDS["adamw"]()
    run = begin(**objects)
    step(objects)
    monkeypatch.setattr(failpoints, "_failpoints_by_name", failpoints._parse(SLOWLY))
    run.step()
    if when == "before it is copied":
        replay(objects)
    else:
        assert run._snapshot_scheduler.snapshotter.wait_until_complete(20)
        objects["model"].a.weight.data.add_(1)  # which counts no version
    monkeypatch.setattr(
        run._snapshot_scheduler.snapshotter, "start_snapshot", lambda *_, **__: False
    )  # else the next one counts
    run.step()
    run._snapshot_scheduler.snapshotter.wait_for_copy()
    assert run._committer_connection.slot_client.find_newest() is None
    (reason,) = failures(run)
    assert reason.startswith("model/")
    assert "Call optimizer.step() outside CUDA graphs" in reason
    assert reason in capsys.readouterr().err


def test_snapshot_stays_valid_if_optimizer_step_is_skipped(
    begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GradScaler does after an overflow, or a script that adds gradients up by itself."""
    objects = KINDS["two"]()
    run = begin(**objects)
    monkeypatch.setattr(failpoints, "_failpoints_by_name", failpoints._parse("snapshot.copying=delay:0.02"))
    for number in range(1, 9):
        if number % 3 == 0:
            step(objects)
        run.step()
        assert run._snapshot_scheduler.snapshotter.wait_until_complete(20)
        assert held(run)[2] == number
    assert failures(run) == []


@pytest.mark.parametrize("when", ["before it is copied", "when it has been copied", "never"])
def test_copy_is_discarded_if_one_of_two_optimizers_is_replayed(
    when: str, begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other's hook says nothing of it, nor does what the other changes."""
    objects = KINDS["two"]()
    run = begin(**objects)
    step(objects)
    monkeypatch.setattr(failpoints, "_failpoints_by_name", failpoints._parse(SLOWLY))
    run.step()
    weight, changed = objects["model"]["g"].weight, when != "never"
    if when == "before it is copied":
        with torch.no_grad():
            weight.add_(1)
    elif changed:
        assert run._snapshot_scheduler.snapshotter.wait_until_complete(20)
        weight.data.add_(1)  # which counts no version
    objects["model"]["d"](torch.ones(1, 4)).sum().backward()
    objects["optimizer"]["d"].step()
    monkeypatch.setattr(
        run._snapshot_scheduler.snapshotter, "start_snapshot", lambda *_, **__: False
    )  # else the next one counts
    run.step()
    run._snapshot_scheduler.snapshotter.wait_for_copy()
    assert (run._committer_connection.slot_client.find_newest() is None) == changed
    assert [reason.split("/")[0] for reason in failures(run)] == ["model.g"] * changed
    assert (
        not run._snapshot_scheduler.snapshotter._barrier.all_hooks_ran
    )  # so training waits for the next copy


def test_time_to_find_changes_counts_as_stall(
    begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else snapshots would come more often than they may cost."""
    objects = KINDS["adamw"]()
    run = begin(**objects)
    step(objects)
    run.step()
    snapshots, threads = run._snapshot_scheduler.snapshotter, []
    assert snapshots.wait_until_complete(20)
    before = snapshots.stall_s
    looked = snapshotter.TensorGroup.find_differing

    def slowly(*given: Any) -> list[str]:
        threads.append(threading.current_thread())
        time.sleep(0.2)
        return looked(*given)

    monkeypatch.setattr(snapshotter.TensorGroup, "find_differing", slowly)
    snapshots.end_step(2)
    snapshots.wait_for_copy()
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()  # forward and backward go on meanwhile
    assert snapshots.stall_s >= before + 0.2
    assert snapshots.wait_until_complete(20)


def test_optimizer_step_in_graph_capture_is_refused(
    begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a CUDA graph; before any replay."""
    objects = KINDS["adamw"]()
    begin(**objects)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    before = [parameter.clone() for parameter in objects["model"].parameters()]
    with pytest.raises(UsageError, match=r"Capture forward and backward only, and call optimizer\.step"):
        objects["optimizer"].step()
    assert all(map(torch.equal, before, objects["model"].parameters()))


class Cudart:
    """Stands for CUDA's runtime: knows which memory is registered, and refuses what it would."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.most = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        """Register, once."""
        assert flags == 0
        assert address not in self.registered
        self.registered[address] = size
        self.most = max(self.most, len(self.registered))
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        """Forget what is registered, and still mapped."""
        del self.registered[address]
        assert f"{address:x}-" in Path("/proc/self/maps").read_text()
        return 0


def test_replaced_slots_are_unpinned(begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process that uses CUDA; a closed run leaves none."""
    cuda = Cudart()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(
        copy_engine.CudaCopyStreams, "record_start_events", lambda *_: {torch.device("cpu"): None}
    )
    monkeypatch.setattr(copy_engine.CudaCopyStreams, "enqueue_copies", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    model, diary = nn.Linear(4, 4), Diary()
    objects = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    run = begin(**objects, diary=diary)
    for number in range(15):
        step(objects)
        diary.text = "x" * (70_000 << number // 3 * 2)
        run.step()
        assert run._snapshot_scheduler.snapshotter.wait_until_complete(20), number
    states = run._committer_connection.slot_client.control_block.read_slots()
    assert max(one.serial for one in states) > 9  # so there were others before
    assert 0 < cuda.most <= 2 * len(states)
    run.close()
    assert not cuda.registered


def test_new_tensors_make_new_layout_and_keep_newest_snapshot(begin: Callable[..., Run]) -> None:
    """A parameter that comes later, many times the size of all before."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    objects = {"model": model, "optimizer": optimizer}
    run = begin(**objects)
    for _ in range(3):
        step(objects)
        run.step()
    assert run._snapshot_scheduler.snapshotter.wait_until_complete(20)
    assert held(run)[2] == 3
    model.register_parameter("late", nn.Parameter(torch.randn(1_000_000)))
    optimizer.add_param_group({"params": [model.late]})
    for number in range(4, 8):
        step(objects)
        run.step()
        tensors, _ = expected(run)
        assert run._snapshot_scheduler.snapshotter.wait_until_complete(20)
        found, _, at = held(run)
        assert at == number
        assert same(tensors, found) == []
    states = run._committer_connection.slot_client.control_block.read_slots()
    assert len({one.capacity for one in states if one.complete}) >= 1


@pytest.mark.parametrize(
    ("slots_that_fit", "words"), [(3, "3 slots"), (2, "2 slots"), (1, "1 slot"), (0, "none")]
)
def test_less_memory_gives_fewer_snapshots_and_same_checkpoints(
    slots_that_fit: int,
    words: str,
    begin: Callable[..., Run],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each budget works, says which it is, and a save is a whole copy of its step."""
    model = nn.Linear(1000, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    objects = {"model": model, "optimizer": optimizer}
    monkeypatch.setenv(
        "ELASTIC_RESUME_SNAPSHOT_MEMORY", str(1_800_000 * slots_that_fit) if slots_that_fit else "off"
    )
    run = begin(**objects, save_every=3)
    for _ in range(6):
        model(torch.randn(2, 1000)).sum().backward()
        optimizer.step()
        run.step()
    tensors, _ = expected(run)
    path = run.save()
    assert path is not None
    assert path.name.endswith("0000000006")
    assert same(tensors, load_file(path / "state.safetensors")) == []
    assert words in capfd.readouterr().err


@pytest.mark.parametrize("source", [torch.ones(3).half(), torch.ones(1), torch.ones(2)])
def test_copy_refuses_tensor_with_changed_dtype_or_size(source: Tensor) -> None:
    """The copy itself would convert a dtype in silence, and stretch one element to all."""
    target = torch.zeros(3)
    with pytest.raises(ValueError, match="changed its dtype or size"):
        copy_tensors([target], [source])
    assert not target.any()


def test_single_slot_is_committed_when_save_is_due(
    begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies there, and nobody wants on disk, does not stand in the way."""
    model = nn.Linear(1000, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setenv("ELASTIC_RESUME_SNAPSHOT_MEMORY", "1800000")
    run = begin(model=model, optimizer=optimizer, save_every=3)
    for _ in range(3):
        model(torch.randn(2, 1000)).sum().backward()
        optimizer.step()
        run.step()
    assert run._committer_connection.slot_client.slot_count == 1
    limit = time.monotonic() + 20
    while not (run._context.node_dir / "g000001-s0000000003").is_dir() and time.monotonic() < limit:
        time.sleep(0.01)
    assert (run._context.node_dir / "g000001-s0000000003").is_dir()


class Diary:
    """State that grows, and is no tensor."""

    def __init__(self) -> None:
        self.text = ""

    def state_dict(self) -> dict[str, Any]:
        """Give all that was written."""
        return {"text": self.text}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self.text = state["text"]


def test_slots_replaced_by_larger_ones_free_their_memory(begin: Callable[..., Run]) -> None:
    """Nobody keeps them mapped."""

    def mapped() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("memfd:elastic_resume-slot")

    before = mapped()  # of runs of other tests
    model, diary = nn.Linear(4, 4), Diary()
    objects = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    run = begin(**objects, diary=diary)
    for number in range(15):
        step(objects)
        diary.text = "x" * (70_000 << number // 3 * 2)
        run.step()
        assert run._snapshot_scheduler.snapshotter.wait_until_complete(20), number
    states = run._committer_connection.slot_client.control_block.read_slots()
    assert max(one.serial for one in states) > 9  # so there were others before
    # The keeper's own, ours, and what is forgotten with the next.
    assert mapped() - before <= 2 * len(states) + 2


def test_closed_run_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook, say; with the slots their memory would stay."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    objects, found = KINDS["adamw"](), []
    for _ in range(3):
        run = er.resume(**objects, ckpt_dir=tmp_path, run_id="job", node_name="n")
        step(objects)
        run.step()
        run.close()
        del run
        gc.collect()
        found.append(count_open_descriptors())
    wait_until(
        lambda: count_open_descriptors() <= found[0],
        "the keeper's side of the last connection to be closed too",
    )


def test_failed_copy_costs_snapshot_but_not_training(
    begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot does not count, the one before does, and the next one is taken."""
    objects = KINDS["adamw"]()
    run = begin(**objects)
    step(objects)
    run.step()
    assert run._snapshot_scheduler.snapshotter.wait_until_complete(20)
    monkeypatch.setattr(failpoints, "_failpoints_by_name", failpoints._parse("snapshot.copying=raise"))
    step(objects)
    run.step()
    assert not run._snapshot_scheduler.snapshotter.wait_until_complete(5)
    assert held(run)[2] == 1
    monkeypatch.setattr(failpoints, "_failpoints_by_name", {})
    step(objects)
    run.step()
    assert run._snapshot_scheduler.snapshotter.wait_until_complete(20)
    assert held(run)[2] == 3


def test_last_step_of_epoch_is_snapshotted_before_and_after_epoch_end(begin: Callable[..., Run]) -> None:
    """Killed in between, the job runs what follows again; killed afterwards, it does not."""
    model = nn.Linear(4, 4)
    objects = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    batches = er.GlobalBatches(6, 3, seed=1)
    run = begin(**objects, data=batches)
    marks = []
    for epoch in run.epochs(2):
        for _ in batches:
            step(objects)
            run.step()
        assert run._snapshot_scheduler.snapshotter.wait_until_complete(20)
        newest = run._committer_connection.slot_client.find_newest()
        assert newest is not None
        assert (newest.manifest.position.epoch, newest.manifest.position.step_in_epoch) == (epoch, 2)
        marks.append(newest.snapshot_id)
    last = run._committer_connection.slot_client.find_newest()
    assert last is not None
    assert (last.manifest.position.epoch, last.manifest.position.step_in_epoch) == (2, 0)
    assert slots.decode_snapshot_id(last.snapshot_id) == slots.decode_snapshot_id(marks[-1])
    assert last.snapshot_id > marks[-1]


def _other_parameter(model: Odd, _: Any) -> None:
    model.a.bias = nn.Parameter(torch.randn(4))


def _other_buffer(model: Odd, _: Any) -> None:
    model.count = torch.tensor(-7)


def _other_state(model: Odd, optimizer: Any) -> None:
    optimizer.state[model.column]["exp_avg"] = torch.randn(6, 4)


REPLACED: dict[str, Callable[[Odd, Any], None]] = {
    "parameter": _other_parameter,
    "buffer": _other_buffer,
    "optimizer state": _other_state,
}


def replacing_at(at: int, change: Callable[[Odd, Any], None], begin: Callable[..., Run]) -> list[int]:
    """Train nine steps; give those whose snapshots do not count. What counts is compared."""
    objects = KINDS["adamw"]()
    run = begin(**objects)
    missing: list[int] = []
    last = expected(run)
    for number in range(1, 10):
        step(objects)
        if number == at:
            change(objects["model"], objects["optimizer"])
        run.step()
        now = expected(run)
        if run._snapshot_scheduler.snapshotter.wait_until_complete(20):
            last = now
        else:
            missing.append(number)
        found, kept, held_at = held(run)
        assert held_at == (number if last is now else number - 1)
        assert same(last[0], found) == []
        assert kept == last[1]
    return missing


@pytest.mark.parametrize("at", [2, 8])
@pytest.mark.parametrize("change", REPLACED.values(), ids=REPLACED)
def test_replaced_tensor_is_never_stored_with_old_value(
    at: int, change: Callable[[Odd, Any], None], begin: Callable[..., Run]
) -> None:
    """The snapshot of that very step has the tensor that stands there now."""
    assert replacing_at(at, change, begin) == []
