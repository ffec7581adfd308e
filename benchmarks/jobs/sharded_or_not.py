"""The worker of sharded.py: train one model, whole on each rank or sharded over the ranks of each node.

sharded_or_not.py ddp|sharded MEGABYTES EPOCHS
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import elastic_resume as er

BYTES_PER_PARAMETER = 12  # the parameter and both moments of Adam
LAYERS = 8
ROWS = 16
STEPS_PER_EPOCH = 12


class PeakMemory(threading.Thread):
    """Reads every 5 ms how much memory of its own the process has; the state's slots are shared memory."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_mb = 0.0
        self.start()

    def run(self) -> None:
        """Read until the process ends."""
        while True:
            self.peak_mb = max(self.peak_mb, self.read_mb())
            time.sleep(0.005)

    def read_mb(self) -> float:
        """Return the memory of its own that this process has now."""
        status = Path("/proc/self/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) * 1024 / 1e6


def main() -> None:
    mode, megabytes, epochs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    width = int((megabytes * 1e6 / BYTES_PER_PARAMETER / LAYERS) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    if mode == "sharded":
        for part in (*model, model):
            fully_shard(part, mesh=er.shard_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    memory = PeakMemory()
    before_mb = memory.read_mb()
    run = er.resume(model=model, optimizer=optimizer)
    print("added_mb", run.position.step, memory.peak_mb - before_mb, flush=True)
    trained: nn.Module = run.ddp(model) if mode == "ddp" else run.replicate(model)
    for epoch in run.epochs(epochs):
        while run.position.step < STEPS_PER_EPOCH * (epoch + 1):
            optimizer.zero_grad()
            (trained(torch.randn(ROWS, width)).pow(2).mean() * run.loss_weight).backward()
            optimizer.step()
            run.step()
    run.close()


if __name__ == "__main__":
    main()
