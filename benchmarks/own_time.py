"""Measure what the own time of a rank costs per step on the CPU.

    python benchmarks/own_time.py

Steps of a small model in DDP, in a group of one, with and without it. Blocks of both alternate on the same
model. Shown are the minimum and the first decile of many steps, because other processes only add time. The
target is 20 us per step.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic_resume.mechanisms.slow_ranks.own_time import STEPS_PER_SAMPLE, OwnTime
from elastic_resume.training.heartbeat import count_collectives

TARGET_US = 20.0
BLOCKS, PAIRS, WARM_UP_PAIRS = 60, 30, 6


def block(model: nn.Module, end_step: Callable[[int], None]) -> list[float]:
    """Return the mean time of each pair of steps in microseconds: one of the two is measured."""
    inputs, found = torch.ones(4, 4), []
    for _ in range(PAIRS):
        began = time.perf_counter()
        for _ in range(STEPS_PER_SAMPLE):
            model(inputs).sum().backward()
            end_step(0)
        found.append((time.perf_counter() - began) * 1e6 / STEPS_PER_SAMPLE)
    return found[WARM_UP_PAIRS:]


def measure(layer: nn.Module) -> str:
    """Return the times without and with own times, and their difference."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), layer))
    without: list[float] = []
    with_it: list[float] = []
    for _ in range(BLOCKS):
        without += block(model, lambda _: None)
        own_time = OwnTime(lambda _: None, count_collectives)
        own_time.watch(model)
        with_it += block(model, own_time.end_step)
        own_time.close()
    here, there = (sorted(times) for times in (without, with_it))
    decile = len(here) // 10
    text = f"{here[0]:.0f} us without, {there[0]:.0f} us with: {there[0] - here[0]:.1f} us"
    return f"{text}; first decile {there[decile] - here[decile]:.1f} us"


def main() -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    print(f"target: at most {TARGET_US:.0f} us per step")
    print(f"a model without buffers: {measure(nn.LayerNorm(4))}")
    print(f"a model with buffers, which DDP broadcasts: {measure(nn.BatchNorm1d(4))}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
