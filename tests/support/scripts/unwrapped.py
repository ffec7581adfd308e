"""Train on each rank's own samples, with a model that is not, in part, or otherwise averaged over the ranks.

The first argument is ``none`` (no DDP), ``outside`` (a head outside of the module in DDP) or ``by-hand``.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

import elastic_resume as er


def main(case: str) -> None:
    """Train six steps; the learning rate of the first is zero."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    body, head = nn.Linear(3, 5), nn.Linear(5, 2)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.0)
    shadow = {"average": torch.zeros(())}
    run = er.resume(model={"body": body, "head": head}, optimizer=optimizer, ema=shadow, rng="off")
    wrapped = run.ddp(body) if case == "outside" else body
    shadow["average"].fill_(run.rank)  # a rank may keep an average alone
    generator = torch.Generator().manual_seed(run.rank)
    for _ in range(6):
        optimizer.zero_grad()
        head(wrapped(torch.randn(4, 3, generator=generator))).square().sum().backward()
        if case == "by-hand":
            for parameter in [*body.parameters(), *head.parameters()]:
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.01
        run.step()
    run.close()


if __name__ == "__main__":
    main(sys.argv[1])
