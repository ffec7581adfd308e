"""Trains for long, and records at each step what its rank knows of a preemption.

``noticed.py DIRECTORY [OPTION ...]``. Each rank appends a line to
``g<generation>-r<rank>.jsonl`` after each step, and its hook a line to ``hook-g<generation>-r<rank>.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import elastic_resume as er

EPOCHS, BATCH = 10_000, 4
KINDS = ("step", "epochs", "restartable", "sharded")

parser = argparse.ArgumentParser()
parser.add_argument("directory", type=Path)
parser.add_argument("--kind", choices=KINDS, default="step")
parser.add_argument("--step-s", type=float, default=0.05)
parser.add_argument("--samples", type=int, default=48)
parser.add_argument("--only-rank", type=int, help="only this rank asks")
parser.add_argument("--hook-s", type=float, default=0.0)
parser.add_argument("--unused", action="store_true", help="no rank asks")
args = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(1)
model: Any = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
if args.kind == "sharded":
    fully_shard(model, mesh=er.shard_mesh())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
inputs = torch.randn(args.samples, 16)
dataset = TensorDataset(inputs, inputs[:, :4])
batches = er.GlobalBatches(args.samples, BATCH, seed=0)


def append(name: str, run: er.Run, line: dict[str, Any]) -> None:
    """Append a line to a file of this rank."""
    with (args.directory / f"{name}g{run.generation}-r{run.rank}.jsonl").open("a") as file:
        file.write(json.dumps({"step": run.position.step, "pid": os.getpid(), **line}) + "\n")


def note(run: er.Run) -> None:
    """Record what this rank knows after a step."""
    asks = not args.unused and args.only_rank in {None, run.rank}
    preemption = run.preemption if asks else None
    append("", run, {"preemption": asdict(preemption) if preemption else None})
    time.sleep(args.step_s)


def add_hook(run: er.Run) -> None:
    """Record when the hook runs."""
    if args.unused or args.only_rank not in {None, run.rank}:
        return

    @run.on_preemption
    def keep(preemption: er.Preemption) -> None:
        time.sleep(args.hook_s)
        path = run.save()
        append("hook-", run, {"preemption": asdict(preemption), "saved": path is not None})


def take_step(wrapped: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """Train on a batch."""
    optimizer.zero_grad()
    nn.functional.mse_loss(wrapped(x), y).backward()
    optimizer.step()


def train_with_counted_steps() -> None:
    """Train in a loop over `er.epochs`."""
    loader = DataLoader(dataset, 2, sampler=DistributedSampler(dataset))
    epochs = er.epochs(EPOCHS, loader, model=model, optimizer=optimizer)
    wrapped = epochs.run.ddp(model)
    add_hook(epochs.run)
    for _ in epochs:
        for x, y in loader:
            take_step(wrapped, x, y)
            note(epochs.run)


def train(run: er.Run) -> None:
    """Train with `run.step`."""
    loader: Any = DataLoader(dataset, batch_sampler=batches)
    wrapped = run.replicate(model) if args.kind == "sharded" else run.ddp(model)
    for _ in run.epochs(EPOCHS):
        for x, y in loader:
            take_step(wrapped, x, y)
            run.step()
            note(run)


if args.kind == "epochs":
    torch.distributed.init_process_group()
    train_with_counted_steps()
else:
    run = er.resume(model=model, optimizer=optimizer, data=batches)
    add_hook(run)
    (run.restartable(train) if args.kind == "restartable" else train)(run)
