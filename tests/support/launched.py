"""A function that `launch` finds by name, and its caller: ``python launched.py DIRECTORY [SETTINGS]``.

SETTINGS is a JSON object of keyword arguments. The caller prints the results as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import elastic_resume as er


class Limits:
    """An argument and a result of a class of the script's own."""

    def __init__(self, steps: int) -> None:
        self.steps = steps


def train(limits: Limits, directory: str) -> tuple[Limits, int, int]:
    """Train until the limit; return it, and the steps and ranks."""
    run, loop = make_loop()
    for step in loop(max(1, limits.steps // 8)):
        if step == 3:  # so that there is something to save
            Path(directory, f"pid-{run.rank}").write_text(str(os.getpid()))
        if limits.steps > 1000:
            time.sleep(0.01)
    run.close()
    return limits, run.position.step, run.world_size


def make_loop() -> tuple[er.Run, Callable[[int], Iterator[int]]]:
    """Return a run, and a function that trains some epochs and yields after each step."""
    import torch  # noqa: PLC0415 - the caller needs none

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = er.GlobalBatches(64, global_batch=8)
    run = er.resume(model=model, optimizer=optimizer, data=batches)

    def loop(epochs: int) -> Iterator[int]:
        ddp = run.ddp(model)
        for _ in run.epochs(epochs):
            for indices in batches:
                loss = ddp(torch.ones(len(indices), 4)).mean() * run.loss_weight
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.step()
                yield run.position.step

    return run, loop


def train_in_process() -> list[int]:
    """Train in a restartable function, in which rank 1 kills itself once; return its calls and steps."""
    run, loop = make_loop()
    calls = 0

    @run.restartable
    def train() -> int:
        nonlocal calls
        calls += 1
        for step in loop(2):
            if step == 5 and run.rank == 1 and not Path("killed").exists():
                Path("killed").touch()
                die()
        return run.position.step

    step = train()
    run.close()
    return [calls, step]


def die() -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    given = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    steps = given.pop("steps", 8)
    results = er.launch(train, (Limits(steps), sys.argv[1]), **given)
    assert all(type(result[0]) is Limits for result in results.values())
    print(json.dumps({rank: result[1:] for rank, result in results.items()}))
