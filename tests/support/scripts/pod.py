"""Trains a little in a pod, and prints a line for each step: who took it, in which world, at which number.

A step takes some time until there is a file ``CONTROL/go``. ``CONTROL/hog-NODE`` makes the worker of that
node take memory until it is killed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import elastic_resume as er

BATCH = 12


def main() -> None:
    """Train so many steps as the first argument says."""
    steps, control = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    node = os.environ["ELASTIC_RESUME_NODE_NAME"]
    model = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = er.GlobalBatches(steps * BATCH, BATCH, seed=3)
    run = er.resume(model=model, optimizer=optimizer, data=batches)
    ddp = run.ddp(model)
    for _ in run.epochs(1):
        for indices in batches:
            if not (control / "go").exists():
                time.sleep(0.2)
            optimizer.zero_grad()
            pictures = torch.randn(len(indices), 16)
            loss = ddp(pictures).square().mean() * run.loss_weight
            loss.backward()
            optimizer.step()
            run.step()
            line = {"step": run.position.step, "generation": run.generation, "world": run.world_size}
            os.write(1, f"STEP {json.dumps(line)}\n".encode())
            hog = control / f"hog-{node}"
            if hog.exists():
                hog.unlink()
                taken = []
                while True:
                    taken.append(bytearray(b"x" * (16 << 20)))
    run.close()


if __name__ == "__main__":
    main()
