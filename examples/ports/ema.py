"""A trainer that keeps an average of the weights, both saved by elastic_resume.

python ema.py
torchrun --nproc-per-node 2 ema.py
elastic-resume run --nproc-per-node 2 ema.py

Each continues where the others stopped. Without elastic_resume it was ema_before.py.
"""

from __future__ import annotations

import argparse
import copy
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import elastic_resume as er


class ModelEMA:
    """The exponential moving average of a model, which starts slowly."""

    def __init__(self, model: nn.Module, decay: float = 0.99) -> None:
        self.module = copy.deepcopy(model).eval().requires_grad_(requires_grad=False)
        self.decay = decay
        self.updates = 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for mean, now in zip(self.module.parameters(), unwrap(model).parameters(), strict=True):
            mean.lerp_(now, 1 - decay)

    def state_dict(self) -> dict[str, Any]:
        return {"module": self.module.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["module"])
        self.updates = state["updates"]


def unwrap(model: nn.Module) -> nn.Module:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    assert isinstance(inner, nn.Module)
    return inner


def dataset(count: int, seed: int) -> TensorDataset:
    points = torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) * 6 - 3
    return TensorDataset(points, torch.sin(points).sum(1, keepdim=True))


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, 64),
        nn.LayerNorm(64),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 1),
    )


@torch.no_grad()
def error(model: nn.Module, data: TensorDataset) -> Tensor:
    points, values = data.tensors
    return mse_loss(model(points), values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    epochs, batch_size = vars(parser.parse_args()).values()
    torch.manual_seed(0)
    torch.set_num_threads(1)

    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)

    train, test = dataset(1000, 1), dataset(200, 2)
    sampler: DistributedSampler[Any] = DistributedSampler(train, world_size, rank)
    loader = DataLoader(train, batch_size=batch_size, sampler=sampler)
    model = network()
    ema = ModelEMA(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if distributed:
        model = DistributedDataParallel(model)

    for epoch in er.epochs(epochs, loader, model=model, ema=ema, optimizer=optimizer):
        sampler.set_epoch(epoch)
        for points, values in loader:
            loss = mse_loss(model(points), values)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(model)
        if rank == 0:
            print(f"epoch {epoch + 1}: error of the average {error(ema.module, test):.5f}", flush=True)
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
