"""Change parameters between `run.step()` and `optimizer.step()`, as right scripts do, in the way of CHANGE.

The layers are so wide that a background copy of them takes longer than the time until the change.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import elastic_resume as er

CHANGE = os.environ["CHANGE"]
WIDTH, STEPS = 700, 8


class Normalised(nn.Linear):
    """A layer that normalises its weight in forward(), as EDM2's."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, and apply."""
        with torch.no_grad():
            self.weight.copy_(functional.normalize(self.weight))
        return super().forward(x)


def change(model: nn.Module) -> None:
    """Change what the last step has left, before the next forward pass."""
    if CHANGE == "swap":  # averaged weights for an evaluation
        kept = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
        time.sleep(0.02)
        for parameter, before in zip(model.parameters(), kept, strict=True):
            parameter.data.copy_(before)
    elif CHANGE == "clamp":
        for parameter in model.parameters():
            parameter.data.clamp_(-0.03, 0.03)
    elif CHANGE == "numpy":
        for parameter in model.parameters():
            parameter.detach().numpy()[...] *= 0.999


torch.manual_seed(0)
dist.init_process_group("gloo")
layer = Normalised if CHANGE == "forward" else nn.Linear
model = nn.Sequential(layer(8, WIDTH), *[layer(WIDTH, WIDTH) for _ in range(6)], layer(WIDTH, 2))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-3)
batches = er.GlobalBatches(8 * STEPS, 8, seed=1)
inputs, targets = torch.randn(8 * STEPS, 8), torch.randn(8 * STEPS, 2)
run = er.resume(model=ddp, optimizer=optimizer, data=batches)
for _ in run.epochs(1):
    for batch in batches:
        change(model)
        loss = run.loss_weight * (ddp(inputs[batch]) - targets[batch]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step()
run.close()
dist.destroy_process_group()
