"""Measure what a compute check costs, in steps: processor time on the CPU.

    python benchmarks/compute_check.py

Steps of models in DDP, in a group of one, alternate with checks of them as one rank of three makes them. The
other ranks' answers and the network are left out: a check sends a batch, the model's buffers and some hundred
bytes. Shown is the median of the ratios of a check to the step before it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from elastic_resume.checkpoint.manifest import Position
from elastic_resume.mechanisms.compute_check.check import ComputeCheck
from elastic_resume.mechanisms.mechanism import WorkerContext
from elastic_resume.policy.resume_plan import ResumePlan
from elastic_resume.training.heartbeat import count_collectives

RANKS, CHECKS = 3, 12
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "ten layers of 256, BatchNorm, dropout": (
        lambda: nn.Sequential(
            *(
                nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.1))
                for _ in range(10)
            )
        ),
        torch.randn(256, 256),
    ),
    "four transformer layers of 128": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(128, 8, 512, batch_first=True), 4, enable_nested_tensor=False
        ),
        torch.randn(8, 64, 128),
    ),
    "convolutions of 32 channels": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.BatchNorm2d(32)
        ),
        torch.randn(16, 3, 32, 32),
    ),
}


def make_context() -> WorkerContext:
    """Return the context of a rank whose peers answer as it does."""
    return WorkerContext(
        rank=0,
        local_rank=0,
        world_size=RANKS,
        generation=1,
        step=0,
        node_dir=Path("n0"),
        settings={},
        tracked={},
        emit=lambda *_, **__: None,
        record=lambda _: None,
        count_collectives=count_collectives,
        gather=lambda value: [value] * RANKS,
        broadcast_tensors=lambda *_: None,
        read_position=lambda: Position(0, 0, 0, 0),
        plan=ResumePlan("cold", generation=1),
    )


def measure(make: Callable[[], nn.Module], inputs: Tensor) -> list[float]:
    """Return the processor time of each check as a share of that of the step before it."""
    model = DistributedDataParallel(make())
    optimizer = torch.optim.AdamW(model.parameters())
    check = ComputeCheck(make_context(), 2)
    check.watch(model)
    ratios: list[Any] = []
    for step in range(1, 2 * CHECKS + 3):
        began = time.process_time()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        step_s, began = time.process_time() - began, time.process_time()
        check.end_step(step)
        if step % 2 == 0:
            ratios.append((time.process_time() - began) / step_s)
    check.close()
    return ratios[1:]  # the first computes twice


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    for name, model in MODELS.items():
        ratios = measure(*model)
        print(f"{name}: {statistics.median(ratios):.2f} steps ({min(ratios):.2f} to {max(ratios):.2f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
