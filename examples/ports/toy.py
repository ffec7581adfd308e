"""A toy model, saved and loaded by elastic_resume: `demo_checkpoint` of PyTorch's DDP tutorial, ported.

python toy.py
torchrun --nproc-per-node 2 toy.py
elastic-resume run --nproc-per-node 2 toy.py

Without elastic_resume it was toy_before.py.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

import elastic_resume as er


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.net2(self.relu(self.net1(x)))
        return outputs


def demo_checkpoint(steps: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    print(f"Running the checkpoint example on rank {rank}.", flush=True)

    torch.manual_seed(0)
    model = ToyModel()
    ddp_model = DDP(model)
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.001)

    for step in er.steps(steps, model=ddp_model, optimizer=optimizer):
        optimizer.zero_grad()
        outputs = ddp_model(torch.randn(20, 10))
        labels = torch.randn(20, 5)
        loss = loss_fn(outputs, labels)
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step + 1}: loss {loss.item():.6f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    demo_checkpoint(parser.parse_args().steps)
