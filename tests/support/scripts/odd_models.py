"""Models and loops that a replay of gradients must leave alone; for tests/integration/test_training.py.

Run twice by each rank: the second time it resumes. Prints what came of it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor, nn

import elastic_resume as er


class Doubled:
    """Doubles the result of a module's forward, like some libraries' wrappers."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, *args: Any) -> Tensor:
        """Return the doubled result."""
        result: Tensor = 2 * self.inner(*args)
        return result


class Words(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 3, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return embeddings."""
        found: Tensor = self.embedding(x.argmax(1))
        return found


def add_one(parameter: Tensor) -> None:
    """Change the parameter, like an optimizer that steps in the backward pass."""
    parameter.data.add_(1.0)


def main(what: str) -> None:
    """Train three steps, save, and print the weights before and after DDP was built."""
    torch.manual_seed(0)
    model: nn.Module = (
        Words() if what == "sparse" else nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))
    )
    if what == "patched":
        model.__dict__["forward"] = Doubled(model.forward)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = er.resume(model=model, optimizer=optimizer, save_every=1000)
    if what == "stepper":
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(add_one)
    before = sum(float(p.double().sum()) for p in model.parameters())
    given = torch.compile(model, backend="eager") if what == "compiled" else model
    if what == "own-ddp":
        given = nn.parallel.DistributedDataParallel(model)
    assert isinstance(given, nn.Module)
    ddp = run.ddp(given)
    after = sum(float(p.double().sum()) for p in model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        ddp(torch.rand(2, 3)).square().sum().backward()
        optimizer.step()
        run.step()
    run.save()
    with torch.no_grad():
        shown = model(torch.ones(1, 3)).sum().item()
    still = isinstance(model.__dict__.get("forward"), Doubled)
    print(
        json.dumps({"same": before == after, "patched": still, "shown": shown, "generation": run.generation})
    )
    run.close()


if __name__ == "__main__":
    main(sys.argv[1])
