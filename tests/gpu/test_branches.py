"""Test the code for CUDA tensors in one process; on a machine without a GPU with a fake one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_resume.capture.copy_engine import CopyJob
from elastic_resume.capture.snapshotter import Snapshotter
from elastic_resume.data import rng
from elastic_resume.errors import UsageError
from elastic_resume.ranks.collectives import Collectives
from elastic_resume.state import state_dict
from elastic_resume.training import ddp, rank0_buffers
from elastic_resume.training.run import Run
from tests.gpu.real_gpu import RealGpu
from tests.support import state_image
from tests.support.fake_gpu import FakeGpu
from tests.support.processes import wait_for
from tests.unit.capture.test_snapshotter import (
    assert_held,
    assert_same,
    expected,
    failures,
    held,
    is_complete,
)

pytestmark = pytest.mark.slow

Gpu = RealGpu | FakeGpu
Begin = Callable[..., Run]


def build(gpu: Gpu) -> dict[str, Any]:
    """Build a model on the GPU with a buffer on the CPU, an AdamW with steps on the CPU, and a scaler."""
    model = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Linear(64, 4))
    gpu.place(model)
    model.register_buffer("on_host", torch.zeros(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=2)
    return {"model": model, "optimizer": optimizer, "scaler": scaler}


def step(gpu: Gpu, objects: dict[str, Any], *, overflows: bool = False) -> None:
    """Run forward and backward, which change all buffers, and a step unless the gradients overflow."""
    model, scaler = objects["model"], objects["scaler"]
    model.on_host += 1
    loss = model(gpu.put(torch.randn(6, 4))).pow(2).sum() * (float("inf") if overflows else 1.0)
    model.zero_grad()
    scaler.scale(gpu.put(loss)).backward()
    scaler.step(objects["optimizer"])
    scaler.update()


def test_snapshot_equals_state_at_step_boundary(gpu: Gpu, begin: Begin) -> None:
    """Forward and backward run before the GPU copies, and optimizer.step() after it."""
    objects = build(gpu)
    run = begin(**objects)
    for number in range(1, 5):
        step(gpu, objects)
        with gpu.slow():
            run.step()
            state = expected(run)
            step(gpu, objects)
        assert is_complete(run)
        assert_held(run, number, state)
    assert failures(run) == []
    pinned = run._generation.snapshot_scheduler.snapshotter._cuda_streams._pinned_slots
    assert pinned
    assert all(pinned.values())
    run.close()
    assert not pinned


def test_resume_loads_state_onto_gpu(gpu: Gpu, begin: Begin) -> None:
    """The moments of an optimizer that has not stepped, and the scale, are made on the GPU."""
    first, second = build(gpu), build(gpu)
    run = begin(**first)
    step(gpu, first)
    wide = gpu.put(torch.ones(2, dtype=torch.float64))  # torch would load it in the parameter's dtype
    first["optimizer"].state[first["model"][0].weight]["wide"] = wide
    run.step()
    state = expected(run)
    run.close()
    resumed = begin(**second)
    assert_same(state[0], expected(resumed)[0])
    moments = second["optimizer"].state.values()
    on_gpu = [*second["model"].parameters(), *(tensor for each in moments for tensor in each.values())]
    assert {tensor.device for tensor in on_gpu} == {gpu.device, torch.device("cpu")}
    assert all(tensor.is_cuda for tensor in on_gpu if tensor.dim())
    step(gpu, first)
    step(gpu, second)  # so the state is where a step needs it


def test_step_that_a_scaler_skips_keeps_snapshot(gpu: Gpu, begin: Begin) -> None:
    """No hook runs after an overflow; the scale halves."""
    objects = build(gpu)
    run = begin(**objects)
    for number in range(1, 6):
        step(gpu, objects, overflows=number == 3)
        run.step()
        state = expected(run)
        assert is_complete(run)
        assert_held(run, number, state)
    assert failures(run) == []


def replace_by_transposed(weight: Tensor) -> None:
    """Give the parameter another storage, with other strides."""
    weight.data = weight.data.t()


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda weight: weight.data.add_(1),  # as the replay of a graph does
    "another storage": replace_by_transposed,
    "one element": lambda weight: weight.data.view(-1)[77].add_(1),
}


@pytest.mark.filterwarnings("ignore:grad and param do not obey")  # of another layout
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_change_during_copy_discards_snapshot(
    change: Callable[[Tensor], Any], gpu: Gpu, begin: Begin, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says so; later snapshots are complete before run.step() returns, in later generations too."""
    model = nn.Linear(64, 64)
    gpu.place(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = begin(model=model, optimizer=optimizer, save_every=1)

    def train() -> None:
        model(gpu.put(torch.randn(6, 64))).pow(2).sum().backward()
        optimizer.step()

    for number in range(1, 5):
        train()
        with gpu.slow() if number == 1 else contextlib.nullcontext():
            run.step()
            state = expected(run)
            before = model.weight.data
            change(model.weight)
            if number == 1:
                train()  # waits for the copy, then changes more
        assert is_complete(run) == (number > 1)
        if number > 1:
            assert_held(run, number, state)
        model.weight.data = before
    assert ["model/weight" in reason for reason in failures(run)] == [True]
    assert capsys.readouterr().err.count("since model/weight changed before optimizer.step() while it") == 1
    wait_for(
        (run._generation.context.node_dir / "g000001-s0000000002").is_dir, "the commit that step 1 has missed"
    )
    generation = run._generation
    later = Snapshotter(generation.tracked, generation.slot_client, generation.context, 2, ())
    assert later.start_snapshot(run.position)
    assert later._job is None or later._job.done.is_set()
    later.close()


def test_change_of_dtype_during_copy_ends_background_copies(gpu: Gpu, begin: Begin) -> None:
    """Else no snapshot of such a script would ever be complete."""
    model = nn.Linear(64, 64)
    gpu.place(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = begin(model=model, optimizer=optimizer)
    for number in range(1, 4):
        model(gpu.put(torch.randn(6, 64))).pow(2).sum().backward()
        optimizer.step()
        before = model.weight.data
        run._generation.snapshot_scheduler.snapshotter._copy_thread.submit(CopyJob(lambda _: time.sleep(0.2)))
        run.step()
        if number == 1:
            model.weight.data = gpu.put(before.half())
        assert is_complete(run) == (number > 1)
        model.weight.data = before


def test_optimizer_step_in_graph_is_refused(gpu: Gpu, begin: Begin) -> None:
    """A replay would run no hook."""
    objects = build(gpu)
    begin(**objects)
    step(gpu, objects)
    before = [parameter.clone() for parameter in objects["model"].parameters()]
    with pytest.raises(UsageError, match="Capture forward and backward only"), gpu.capture():
        objects["optimizer"].step()
    assert all(map(torch.equal, before, objects["model"].parameters()))


def is_complete_after_step(run: Run) -> None:
    """End a step and wait for its snapshot."""
    run.step()
    assert is_complete(run)


def test_slot_that_cannot_be_pinned_is_copied_slowly(
    gpu: Gpu, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of locked memory may be reached."""
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    objects = build(gpu)
    run = begin(**objects)
    step(gpu, objects)
    with pytest.warns(UserWarning, match="cannot be pinned: CUDA error 2; copies are slow"):
        is_complete_after_step(run)
    assert held(run)[2] == 1


def test_live_state_is_written_in_pieces(gpu: Gpu) -> None:
    """Without memory for a snapshot; the view of a transposed tensor is not contiguous."""
    tensors = {"whole": torch.randn(1500, 1000), "turned": torch.randn(30, 20), "one": torch.tensor(0.5)}
    images = []
    for put in (torch.clone, gpu.put):
        module = nn.Module()
        for name, tensor in tensors.items():
            placed = put(tensor)
            module.register_buffer(name, placed.t() if name == "turned" else placed)
        images.append(bytes(state_image.copy_to_image(state_dict.flatten({"model": module})).memory))
    assert images[0] == images[1]


def test_generators_of_gpus_are_seeded(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of GPUs that come into use later too."""
    rng.seed_all_generators(41)
    assert set(gpu.get_seeds()) == {41}
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(rng, "_has_accelerator", lambda: True)
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    rng.seed_all_generators(42)
    assert seeds == [42]


def test_gpu_of_model_is_found_and_given_to_ddp(
    gpu: Gpu, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDP then moves the inputs there."""
    objects, given = build(gpu), list[dict[str, Any]]()
    assert state_dict.find_gpus({**objects, "other": nn.Linear(1, 1)}) == {0}
    assert str(state_dict.find_gpu_uuid(objects)).startswith("GPU-")
    run = begin(**objects)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)

    def wrap(model: nn.Module, **kwargs: Any) -> nn.Module:
        given.append(kwargs)
        return model

    monkeypatch.setattr(ddp, "DistributedDataParallel", wrap)
    monkeypatch.setattr(run._generation.bucket_order, "prepare", lambda *_: None)
    monkeypatch.setattr(run._generation, "_observers", [])
    run.ddp(objects["model"])
    assert given == [{"init_sync": False, "device_ids": [0]}]


def test_buffers_on_gpu_travel_over_the_default_group(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own group is gloo, which would copy them over the host. One broadcast per device."""
    sent: list[tuple[str, int, Any]] = []

    def broadcast(tensor: Tensor, src: int, group: Any) -> None:
        sent.append((tensor.device.type, src, group))

    monkeypatch.setattr(dist, "broadcast", broadcast)
    ours: Any = object()
    collectives = Collectives(0, 2, None)
    collectives._group = ours
    there = [gpu.put(torch.ones(2)), gpu.put(torch.ones(3))]
    collectives.broadcast_tensors([there[0], torch.ones(1), there[1]], 0)
    assert [(src, group) for _, src, group in sent] == [(0, None), (0, ours)]
    module, named = nn.Module(), {}
    module.register_buffer("mean", there[0])
    context: Any = SimpleNamespace(collectives=collectives)
    monkeypatch.setattr(rank0_buffers, "find_first_difference", lambda _, describe: named.update(describe()))
    rank0_buffers.Rank0Buffers(context, {"model": module}).receive()
    assert named == {"model/mean": "cuda torch.float32 [2]"}
