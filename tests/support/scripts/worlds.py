"""Trains parts of one epoch in several ways, and prints which samples were read and counted.

tests/unit/data/test_batch_size.py starts it several times with other numbers of ranks. Each rank compares
DDP's gradient with that of one process on the whole global batch.
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import elastic_resume as er
from elastic_resume.data.global_batches import make_permutation
from elastic_resume.errors import WorldChangedError

SAMPLES, SEED, LR = 610, 5, 0.01
WAYS = ("global", "local", "sampler")


def samples() -> TensorDataset:
    """Make random samples that contain their index."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    return TensorDataset(inputs, torch.randn(SAMPLES, 1, generator=generator), torch.arange(SAMPLES))


def data_of(way: str, dataset: TensorDataset) -> tuple[DataLoader[tuple[Tensor, ...]], dict[str, Any]]:
    """Return the loader, and further arguments of resume()."""
    if way == "sampler":
        loader = DataLoader(dataset, batch_size=9, sampler=er.ElasticSampler(dataset, seed=SEED))
        return loader, {}
    micro = 8 if way == "global" else None
    batches = er.GlobalBatches(SAMPLES, 30, seed=SEED, micro_batch=micro)
    return DataLoader(dataset, batch_sampler=batches), {"on_world_change": f"keep_{way}_batch"}


def gradient(model: nn.Module) -> Tensor:
    """Return all gradients in one row."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def train(directory: Path, way: str, steps: int) -> dict[str, Any]:
    """Do so many steps, or all that are left of the epoch; give what became of each."""
    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    dataset = samples()
    loader, more = data_of(way, dataset)
    run = er.resume(model=model, optimizer=optimizer, data=loader, run_id=way, ckpt_dir=directory, **more)
    changes: list[Any] = []

    @run.on_world_change
    def scale(change: er.WorldChange) -> None:
        changes.append(
            [change.old_world_size, change.world_size, change.old_global_batch, change.global_batch]
        )
        for group in optimizer.param_groups:
            group["lr"] *= change.factor

    ddp: Any = run.ddp(model)
    order, done = make_permutation(SAMPLES, SEED, 0), []
    for _ in run.epochs(1):
        lines: list[tuple[list[int], float]] = []
        for inputs, targets, indices in run.micro_batches(loader):
            before = copy.deepcopy(model)
            lines.append((indices.tolist(), run.loss_weight))
            with contextlib.nullcontext() if run.last_micro_batch else ddp.no_sync():
                (nn.functional.mse_loss(ddp(inputs), targets) * run.loss_weight).backward()
            if not run.last_micro_batch:
                continue
            at = run.position.samples
            optimizer.step()
            run.step()
            whole = order[at : run.position.samples]
            before.zero_grad()
            nn.functional.mse_loss(before(dataset.tensors[0][whole]), dataset.tensors[1][whole]).backward()
            alone = gradient(before)
            done.append(
                {
                    "samples": len(whole),
                    "counted": [i for read, weight in lines if weight > 0 for i in read],
                    "sizes": [len(read) for read, _ in lines],
                    "error": float((gradient(model) - alone).norm() / alone.norm()),
                }
            )
            optimizer.zero_grad()
            lines = []
            if len(done) == steps:
                break
        if len(done) == steps:
            break
    run.close()
    return {"changes": changes, "lr": optimizer.param_groups[0]["lr"], "steps": done}


def refused(directory: Path) -> str:
    """What on_world_change="error" says."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    given: dict[str, Any] = {"model": model, "optimizer": optimizer, "data": data_of("global", samples())[0]}
    try:
        er.resume(**given, run_id="global", ckpt_dir=directory, on_world_change="error").close()
    except WorldChangedError as error:
        return str(error)
    return ""


def main() -> None:
    """Print it all as one line."""
    directory, steps = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    said = refused(directory) if "refuse" in sys.argv else ""
    print(json.dumps({"refused": said, **{way: train(directory, way, steps) for way in WAYS}}))


if __name__ == "__main__":
    main()
