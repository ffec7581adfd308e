"""Test the process group that er.resume() makes, and that values which a rank broadcasts are verified."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from elastic_resume.errors import CorruptError
from elastic_resume.ranks import collectives
from elastic_resume.ranks.collectives import Collectives
from elastic_resume.restore.streaming import LocalWatermark, StreamingBuffer, broadcast_buffer


def test_broadcast_block_with_wrong_digest_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes come from a peer's memory, over a network."""
    wire = [xxhash.xxh3_128_digest(b"sent"), b"sEnt"]
    receiver, buffer = Collectives(1, 2, None), StreamingBuffer(memoryview(bytearray(4)), LocalWatermark())

    def receive(tensor: Tensor, _: int) -> None:
        tensor.copy_(torch.frombuffer(bytearray(wire.pop(0)), dtype=torch.uint8))

    monkeypatch.setattr(receiver, "broadcast", receive)
    with pytest.raises(CorruptError, match="bytes 0 to 4 arrived damaged"):
        broadcast_buffer(receiver, buffer, 0)


@pytest.mark.parametrize(
    ("gpus", "has_nccl", "options", "environ", "expected"),
    [
        (0, True, {}, {}, ("gloo", {}, [])),
        (4, False, {}, {}, ("gloo", {}, [2])),
        (4, True, {}, {}, ("cpu:gloo,cuda:nccl", {}, [2])),  # torch before 2.15
        (4, True, {"lazy_init": False}, {}, ("cpu:gloo,cuda:nccl", {"device_id": 2}, [2])),
        (1, True, {"lazy_init": False}, {}, ("cpu:gloo,cuda:nccl", {"device_id": 0}, [0])),
        (4, True, {"lazy_init": False}, {"TORCH_DIST_USE_NCCL2": "0"}, ("cpu:gloo,cuda:nccl", {}, [2])),
    ],
)
def test_process_group_is_bound_to_gpu_without_connecting(
    gpus: int,
    has_nccl: bool,
    options: dict[str, bool],
    environ: dict[str, str],
    expected: tuple[str, dict[str, int], list[int]],
    *,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks whose tensors are on CPUs may share a GPU, which NCCL refuses when it connects."""
    made: list[tuple[str, dict[str, Any]]] = []
    chosen: list[int] = []
    for name, text in {"LOCAL_RANK": "2", **environ}.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: has_nccl)
    nccl = SimpleNamespace(Options=lambda: SimpleNamespace(**options))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **given: made.append((backend, given)))
    collectives._create_default_group(())
    ((backend, given),) = made
    bound = {key: value.index for key, value in given.items() if key == "device_id"}
    assert (backend, bound, chosen) == expected
    assert not bound or given["pg_options"].lazy_init


def test_group_after_one_that_could_not_be_made_has_a_first_ones_name() -> None:
    """The count is not public. With another name this rank would never meet the others."""
    world = dist.distributed_c10d._world
    world.group_count = 1  # as after an error within init_process_group
    collectives._destroy_process_groups([], destroy_default=True)
    assert world.group_count == 0
