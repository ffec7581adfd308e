"""A snapshot equals the state at its step boundary, whatever training changes while it is copied."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import elastic_resume as er
from elastic_resume import events, failpoints
from elastic_resume.capture import copy_engine, snapshot_plan
from elastic_resume.capture.copy_barrier import CopyBarrier
from elastic_resume.capture.copy_engine import copy_tensors, get_format
from elastic_resume.checkpoint.layout import Layout
from elastic_resume.slots import slot_memory
from elastic_resume.state import state_dict
from elastic_resume.state.state_dict import TensorBuffer
from elastic_resume.training.run import Run
from tests.support.processes import wait_for
from tests.support.rendezvous_nodes import count_open_descriptors
from tests.support.snapshot_samples import read_newest

pytestmark = pytest.mark.slow

Build = Callable[[], dict[str, Any]]
FP8 = torch.float8_e4m3fn


class Replacing(torch.optim.Optimizer):
    """An optimizer that replaces its state tensors instead of changing them in place."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step of momentum SGD."""
        del closure
        for group in self.param_groups:
            for p in group["params"]:
                old = self.state[p].get("mean", torch.zeros_like(p))
                self.state[p]["mean"] = old * 0.9 + p.grad
                p.sub_(self.state[p]["mean"], alpha=group["lr"])


class Odd(nn.Module):
    """A model with parameters and buffers of all dtypes, some tied, one frozen."""

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
        """Change every buffer and the frozen parameter, as MoCo changes its second encoder."""
        self.count += 1
        self.ints += 1
        self.mask.logical_not_()
        self.tiny.copy_(torch.randn(4).to(FP8))
        self.frozen.data.add_(1)
        y: Tensor = self.norm(self.b(self.a(x))) * self.scalar
        return y.sum() + self.column.sum() + self.f16.float().sum() + self.bf16.float().sum()


def odd(make: Callable[[list[Tensor]], Any]) -> Build:
    """Return a function that builds the odd model with the optimizer of ``make``."""

    def build() -> dict[str, Any]:
        model = Odd()
        return {"model": model, "optimizer": make([p for p in model.parameters() if p.requires_grad])}

    return build


def two() -> dict[str, Any]:
    """Build two models with an optimizer each, a scheduler and an average of the weights."""
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
    "replacing": odd(Replacing),
    "two": two,
    "no optimizer": lambda: {"model": Odd()},
}


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    """Resume in this process; only the first step is committed. Small tensors count as large ones."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(snapshot_plan, "MIN_BACKGROUND_BYTES", 1)
    runs: list[Run] = []

    def make(**more: Any) -> Run:
        torch.manual_seed(4)
        given = {"ckpt_dir": tmp_path, "run_id": "job", "node_name": "n"}
        runs.append(er.resume(**{**given, "save_every": 10**6, "snapshot_every": 1, **more}))
        return runs[-1]

    yield make
    for run in runs:
        run._release()


@pytest.fixture
def inject(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that sets the failpoints of this process."""
    return lambda text: monkeypatch.setattr(failpoints, "_failpoints_by_name", failpoints._parse(text))


def expected(run: Run) -> tuple[dict[str, Tensor], Any]:
    """Return copies of all tensors of the state now, and the rest."""
    flat = state_dict.flatten(run._generation.tracked)
    return {leaf.name: leaf.tensor.clone() for leaf in flat.leaves}, flat.structure


def held(run: Run) -> tuple[dict[str, Tensor], Any, int]:
    """Return the tensors, the rest and the step of the newest snapshot."""
    newest = read_newest(run._generation.slot_client)
    assert newest is not None
    image = TensorBuffer(Layout.parse(newest.image, len(newest.image)), newest.image)
    tensors = {name: image.tensor(name).clone() for name in image.layout.extents}
    return tensors, newest.manifest.state, newest.manifest.step


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Check that two sets of tensors are bit-identical."""
    first, second = (
        state_dict.digest_leaves(state_dict.Leaf(name, t, state_dict.OTHER) for name, t in side.items())
        for side in (a, b)
    )
    assert first == second


def assert_held(run: Run, step: int, state: tuple[dict[str, Tensor], Any]) -> None:
    """Check that the newest snapshot is of ``step``, and bit-identical to ``state``."""
    tensors, rest, held_step = held(run)
    assert held_step == step
    assert_same(state[0], tensors)
    assert rest == state[1]


def is_complete(run: Run, timeout_s: float = 20) -> bool:
    """Wait for the newest snapshot; return whether it is valid."""
    return run._generation.snapshot_scheduler.snapshotter.wait_until_complete(timeout_s)


def linear(inputs: int = 4, outputs: int = 4) -> dict[str, Any]:
    """Build a linear layer with SGD."""
    model = nn.Linear(inputs, outputs)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}


def step(objects: dict[str, Any]) -> None:
    """Run forward, backward and a step of all optimizers."""
    models, optimizers = objects["model"], objects.get("optimizer", {})
    parts = list(models.values()) if isinstance(models, dict) else [models]
    every = list(optimizers.values()) if isinstance(optimizers, dict) else [optimizers]
    loss = sum(part(torch.randn(3, getattr(part, "in_features", 4))).float().pow(2).sum() for part in parts)
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
    """The next forward pass changes buffers before the copy is complete."""
    objects = KINDS[kind]()
    run = begin(**objects)
    for number in range(1, 7):
        step(objects)
        run.step()
        state = expected(run)
        models = objects["model"]
        for part in models.values() if isinstance(models, dict) else [models]:
            part(torch.randn(3, 4))
        assert is_complete(run)
        assert_held(run, number, state)


def test_copy_barrier_blocks_optimizer_step_until_copy_is_complete(
    begin: Callable[..., Run], inject: Callable[[str], None]
) -> None:
    """The copy is delayed by a failpoint."""
    objects = KINDS["adamw"]()
    run = begin(**objects)
    step(objects)
    run.step()
    inject(SLOWLY)
    step(objects)
    run.step()
    state = expected(run)
    step(objects)
    assert_held(run, 2, state)


def failures(run: Run) -> list[str]:
    """Return the reasons of failed snapshots from the event log."""
    path = run._generation.context.node_dir / "events.jsonl"
    return [str(event["reason"]) for event in events.read(path) if event["event"] == "snapshot-failed"]


SLOWLY = "snapshot.copying=delay:0.2"  # so that what training does meanwhile would be in the copy


def test_snapshot_stays_valid_if_optimizer_step_is_skipped(
    begin: Callable[..., Run], inject: Callable[[str], None]
) -> None:
    """A GradScaler after an overflow, or gradient accumulation by the script."""
    objects = KINDS["two"]()
    run = begin(**objects)
    inject("snapshot.copying=delay:0.02")
    for number in range(1, 9):
        if number % 3 == 0:
            step(objects)
        run.step()
        assert is_complete(run)
        assert held(run)[2] == number
    assert failures(run) == []


def swap_and_take_back(weight: Tensor) -> Callable[[], Any]:
    """Change the weight as an evaluation of averaged weights does; return what takes the change back."""
    kept = weight.detach().clone()
    weight.data.copy_(torch.zeros_like(weight))
    return partial(weight.data.copy_, kept)


def change_once(change: Callable[[Tensor], Any]) -> Callable[[Tensor], Callable[[], Any]]:
    """Return a change that stays."""

    def apply(weight: Tensor) -> Callable[[], Any]:
        change(weight.data)
        return lambda: None

    return apply


CHANGES: dict[str, Callable[[Tensor], Callable[[], Any]]] = {
    "swapped and taken back": swap_and_take_back,
    "normalised": change_once(lambda data: data.div_(data.norm())),
    "clamped, one element": change_once(lambda data: data.view(-1)[777:778].clamp_(7, 8)),
    "by numpy": change_once(lambda data: data.numpy().__setitem__((3, 4), 5.0)),
    "permuted": change_once(lambda data: data.copy_(data.flip(0))),
    "through its address": change_once(lambda data: state_dict.view_bytes(data).__setitem__(9, 77)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_tensor_that_changes_after_the_boundary_is_stored_as_it_was(
    change: Callable[[Tensor], Callable[[], Any]], begin: Callable[..., Run], inject: Callable[[str], None]
) -> None:
    """No hook and no version counter sees these changes."""
    model = nn.Linear(300, 300)
    objects = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}
    run = begin(**objects)
    inject("snapshot.copying=delay:0.05")
    for number in range(1, 4):
        step(objects)
        run.step()
        state = expected(run)
        take_back = change(model.weight)
        assert is_complete(run)
        assert_held(run, number, state)
        take_back()
    assert failures(run) == []


class StepLog:
    """Tracked state that grows and is no tensor."""

    def __init__(self) -> None:
        self.text = ""

    def state_dict(self) -> dict[str, Any]:
        """Return the text."""
        return {"text": self.text}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the text."""
        self.text = state["text"]


def replace_slots(begin: Callable[..., Run]) -> tuple[Run, int]:
    """Train with a state that outgrows its slots several times; return the run and its number of slots."""
    objects, step_log = linear(), StepLog()
    run = begin(**objects, track={"step_log": step_log})
    for number in range(15):
        step(objects)
        step_log.text = "x" * (70_000 << number // 3 * 2)
        run.step()
        assert is_complete(run), number
    states = run._generation.slot_client.control_block.read_slots()
    assert max(state.serial for state in states) > 9  # so there were others before
    return run, len(states)


class Cudart:
    """A stand-in for CUDA's runtime that records registered memory."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.most = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        """Register memory once."""
        assert flags == 0
        assert address not in self.registered
        self.registered[address] = size
        self.most = max(self.most, len(self.registered))
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        """Unregister memory that is registered and still mapped."""
        del self.registered[address]
        assert f"{address:x}-" in Path("/proc/self/maps").read_text()
        return 0


def test_replaced_slots_are_unpinned(begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed run leaves no slot pinned."""
    cuda = Cudart()
    if torch.cuda.is_available():
        torch.cuda.init()  # else torch seeds generators that are not there
    streams = copy_engine.CudaCopyStreams
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(streams, "record_start_events", lambda *_: {torch.device("cpu"): None})
    monkeypatch.setattr(streams, "enqueue_copies", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    run, slot_count = replace_slots(begin)
    assert 0 < cuda.most <= 2 * slot_count
    run.close()
    assert not cuda.registered


class Waiting:
    """What holds a copy barrier that calls it, as a snapshotter does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.barrier = CopyBarrier([optimizer], self.wait)

    def wait(self) -> None:
        """Wait for nothing."""


def test_closed_barrier_is_in_no_cycle() -> None:
    """A snapshotter holds memory files: a process that survives hundreds of failures would have as many."""
    gc.disable()
    try:
        waiting = Waiting(linear()["optimizer"])
        waiting.barrier.close()
        found = weakref.ref(waiting)
        del waiting
        assert found() is None
    finally:
        gc.enable()


def test_slots_replaced_by_larger_ones_free_their_memory(begin: Callable[..., Run]) -> None:
    """No process keeps the old slots mapped."""

    def count_mapped() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("memfd:elastic_resume-slot")

    before = count_mapped()  # of runs of other tests
    run, slot_count = replace_slots(begin)
    assert run._open is not None
    # The committer's own mappings, ours, and those that are dropped with the next slot.
    assert count_mapped() - before <= 2 * slot_count + 2


def test_new_tensors_make_new_layout_and_keep_newest_snapshot(begin: Callable[..., Run]) -> None:
    """A parameter is added that is many times larger than all others."""
    objects = linear()
    run = begin(**objects)
    for number in range(1, 8):
        if number == 4:
            assert held(run)[2] == 3
            objects["model"].register_parameter("late", nn.Parameter(torch.randn(1_000_000)))
            objects["optimizer"].add_param_group({"params": [objects["model"].late]})
        step(objects)
        run.step()
        state = expected(run)
        assert is_complete(run)
        assert_held(run, number, state)


@pytest.mark.parametrize(
    ("slots_that_fit", "text"), [(3, "3 slots"), (2, "2 slots"), (1, "1 slot"), (0, "none")]
)
def test_less_memory_gives_fewer_snapshots_and_same_checkpoints(
    slots_that_fit: int,
    text: str,
    begin: Callable[..., Run],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each budget is logged, and a checkpoint holds its whole step, also one that becomes due."""
    objects = linear(1000, 300)
    budget = str(3_000_000 * slots_that_fit) if slots_that_fit else "off"
    monkeypatch.setenv("ELASTIC_RESUME_SNAPSHOT_MEMORY", budget)
    monkeypatch.setenv("ELASTIC_RESUME_LOG_LEVEL", "DEBUG")  # the count is a warning below two only
    run = begin(**objects, save_every=3)
    for _ in range(3):
        step(objects)
        run.step()
    assert run._generation.slot_client.slot_count == slots_that_fit
    wait_for((run._generation.context.node_dir / "g000001-s0000000003").is_dir, "the commit of step 3")
    step(objects)
    run.step()
    tensors, _ = expected(run)
    path = run.save()
    assert path is not None
    assert path.name.endswith("0000000004")
    assert_same(tensors, load_file(path / "state.safetensors"))
    assert text in capfd.readouterr().err


@pytest.mark.parametrize("with_formats", [False, True])
@pytest.mark.parametrize("source", [torch.ones(3).half(), torch.ones(1), torch.ones(2), torch.ones(1, 3)])
def test_copy_refuses_tensor_with_changed_dtype_or_shape(source: Tensor, with_formats: bool) -> None:
    """Torch would convert the dtype, or broadcast one element, without an error."""
    target = torch.zeros(3)
    with pytest.raises(ValueError, match="changed its dtype or shape"):
        copy_tensors([target], [source], formats=[get_format(target)] * with_formats)
    assert not target.any()


def test_closed_run_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leaked descriptor would keep the slots' memory, for example in a notebook."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    objects, counts = KINDS["adamw"](), []
    for _ in range(3):
        run = er.resume(**objects, ckpt_dir=tmp_path, run_id="job", node_name="n")
        step(objects)
        run.step()
        run.close()
        del run
        gc.collect()
        counts.append(count_open_descriptors())
    wait_for(
        lambda: count_open_descriptors() <= counts[0], "the committer to close its side of the connection"
    )


def test_failed_copy_costs_snapshot_but_not_training(
    begin: Callable[..., Run], inject: Callable[[str], None]
) -> None:
    """The slot is invalid, the previous snapshot stays valid, and the next one is taken."""
    objects = KINDS["adamw"]()
    run = begin(**objects)
    for failpoint, held_step in (("", 1), ("snapshot.copying=raise", 1), ("", 3)):
        inject(failpoint)
        step(objects)
        run.step()
        assert is_complete(run) != bool(failpoint)
        assert held(run)[2] == held_step


def test_last_step_of_epoch_is_snapshotted_before_and_after_epoch_end(begin: Callable[..., Run]) -> None:
    """A job killed in between repeats what follows the step; a job killed afterwards does not."""
    objects, batches = linear(), er.GlobalBatches(6, 3, seed=1)
    run = begin(**objects, data=batches)

    def find_newest() -> tuple[int, int, int]:
        newest = read_newest(run._generation.slot_client)
        assert newest is not None
        position = newest.manifest.position
        return position.epoch, position.step_in_epoch, newest.snapshot_id

    snapshot_id = 0
    for epoch in run.epochs(2):
        for _ in batches:
            step(objects)
            run.step()
        assert is_complete(run)
        *position, snapshot_id = find_newest()
        assert position == [epoch, 2]
    *position, last_id = find_newest()
    assert position == [2, 0]
    assert slot_memory.decode_snapshot_id(last_id) == slot_memory.decode_snapshot_id(snapshot_id)
    assert last_id > snapshot_id


REPLACEMENTS: dict[str, Callable[[Odd, Any], None]] = {
    "parameter": lambda model, _: setattr(model.a, "bias", nn.Parameter(torch.randn(4))),
    "buffer": lambda model, _: setattr(model, "count", torch.tensor(-7)),
    "optimizer state": lambda model, optimizer: optimizer.state[model.column].update(
        exp_avg=torch.randn(6, 4)
    ),
}


@pytest.mark.parametrize("replace", REPLACEMENTS.values(), ids=REPLACEMENTS)
def test_replaced_tensor_is_never_stored_with_old_value(
    replace: Callable[[Odd, Any], None], begin: Callable[..., Run]
) -> None:
    """The snapshot of the step of the replacement has the new tensor."""
    objects = KINDS["adamw"]()
    run = begin(**objects)
    for number in range(1, 8):
        step(objects)
        if number in {2, 6}:
            replace(objects["model"], objects["optimizer"])
        run.step()
        state = expected(run)
        assert is_complete(run)
        assert_held(run, number, state)


def test_snapshot_stays_announced_until_it_has_a_slot(
    begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local rank that ends the step meanwhile must take its part; without snapshots for their own sake."""
    objects = linear()
    run = begin(**objects, snapshot_every="off", save_every=1)
    scheduler, announced = run._generation.snapshot_scheduler, list[int]()
    scheduler.is_sharded = True
    control = run._generation.slot_client.control_block

    def note(name: str, *_: Any) -> None:
        if name == "snapshot.started":
            announced.append(control.get("next_snapshot_step"))

    monkeypatch.setattr(failpoints, "hit", note)
    for _ in range(2):
        step(objects)
        run.step()
    assert announced == [2]
    assert control.get("next_snapshot_step") > 2


def test_save_that_a_local_rank_missed_is_not_taken_for_the_one_before(
    begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end state is then saved again. With a sharded model no rank can save it alone."""
    objects = linear()
    run = begin(**objects)
    scheduler = run._generation.snapshot_scheduler
    scheduler.is_sharded = True
    for is_missed in (False, True):
        step(objects)
        run.step()
        if is_missed:
            monkeypatch.setattr(scheduler, "_ensure_snapshot", lambda *_, **__: False)
        assert (run.save() is None) == is_missed
        assert scheduler.has_committed(run.position) != is_missed


@pytest.mark.parametrize("has_committed", [False, True])
def test_first_step_is_committed_unless_the_committer_has_committed_before(
    begin: Callable[..., Run], *, has_committed: bool
) -> None:
    """A first commit shows that the state can be stored. After a restart it would delay the first steps."""
    objects = linear()
    run = begin(**objects, save_every="auto")
    if has_committed:  # for an earlier process
        run._generation.slot_client.control_block.set("commit_us", 100_000)
    step(objects)
    run.step()
    slots = run._generation.slot_client.control_block.read_slots()
    assert any(slot.commit_requested for slot in slots) != has_committed
