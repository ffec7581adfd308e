"""A script with an unusual behaviour, named by its first argument, for integration tests."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import Any

import torch
from torch import nn

import elastic_resume as er
from elastic_resume.slots import committer


class Odd:
    """An object whose state cannot be stored."""

    def state_dict(self) -> dict[str, Any]:
        """Return a function."""
        return {"callback": print}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Never called."""


def fill_disk(run: er.Run) -> None:
    """Save every second step; from step 3 to 7 no file may grow as large as the state (EFBIG, for ENOSPC)."""
    if run.position.step in {3, 7}:
        limit = 64 << 10 if run.position.step == 3 else resource.RLIM_INFINITY
        sys.dont_write_bytecode = True  # a cut .pyc file would break all later imports
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    if run.position.step % 2 == 0:
        run.save()


def main(behaviour: str, steps: int) -> None:
    """Train ``steps`` steps on random numbers."""
    rank = int(os.environ.get("RANK", "0"))
    torch.manual_seed({"other-seeds": rank, "seed": time.time_ns()}.get(behaviour, 0))
    width = 9 if behaviour == "wider" else 5
    model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
    if behaviour == "full-disk":
        model.register_buffer("ballast", torch.zeros(1 << 18))
        committer.FIRST_RETRY_S = 3600.0  # only the script's own saves are tried
    optimizer = torch.optim.Adam(model.parameters())
    odd = Odd() if behaviour == "odd" and rank == 1 else None
    every = int(os.environ.get("EVERY", "2"))
    tracked = None if behaviour == "forgets-optimizer" else optimizer
    run = er.resume(model=model, optimizer=tracked, track={"odd": odd}, save_every=every)
    seen: list[int] = []
    run.on_resume(lambda now: seen.append(now.position.step))
    ddp = run.ddp(model)
    for _ in run.epochs(run.position.epoch + 1):
        while run.position.step < steps:
            if behaviour == "diverge" and rank == 1:
                with torch.no_grad():
                    model[0].weight.add_(1.0)  # type: ignore[operator]
            optimizer.zero_grad()
            loss = ddp(torch.randn(4, 3)).square().mean()
            loss.backward()
            optimizer.step()
            if behaviour in {"forgets-optimizer", "seed"}:
                print(f"step {run.position.step + 1}: loss {loss.item()}")
                time.sleep(0.01)
            run.step()
            if behaviour == "full-disk":
                fill_disk(run)
            if behaviour == "die" and run.position.step == steps - 2:
                run.save()  # waits for the disk, so that this step is saved when the next one dies
            if behaviour == "die" and run.position.step == steps - 1:
                os._exit(9)
    mean = model.get_buffer("1.running_mean")
    result = {
        "step": run.position.step,
        "generation": run.generation,
        "hooks": seen,
        "weight": model.get_parameter("0.weight").double().sum().item(),
        "mean": mean.double().sum().item(),
    }
    print(json.dumps(result))
    run.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
