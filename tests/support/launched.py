"""A function that `launch` finds by name, and its caller: ``python launched.py DIRECTORY [SETTINGS]``.

SETTINGS is a JSON object of keyword arguments. The caller prints the results as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import elastic_resume as er


class Limits:
    """An argument and a result of a class of the script's own."""

    def __init__(self, steps: int) -> None:
        self.steps = steps


def train(limits: Limits, directory: str) -> tuple[Limits, int, int]:
    """Train until the limit; return it, and the steps and ranks."""
    import torch  # noqa: PLC0415 - the caller needs none
    from torch import nn  # noqa: PLC0415

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = er.GlobalBatches(64, global_batch=8)
    run = er.resume(model=model, optimizer=optimizer, data=batches)
    ddp = run.ddp(model)
    Path(directory, f"pid-{run.rank}").write_text(str(os.getpid()))
    for _ in run.epochs(max(1, limits.steps // 8)):
        for indices in batches:
            loss = ddp(torch.ones(len(indices), 4)).mean() * run.loss_weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step()
            if limits.steps > 1000:
                time.sleep(0.01)
    run.close()
    return limits, run.position.step, run.world_size


if __name__ == "__main__":
    given = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    steps = given.pop("steps", 8)
    results = er.launch(train, (Limits(steps), sys.argv[1]), **given)
    assert all(type(result[0]) is Limits for result in results.values())
    print(json.dumps({rank: result[1:] for rank, result in results.items()}))
