"""A training script with the mistake that its first argument names, for test_equivalence.py."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch import nn

import elastic_resume as er
from elastic_resume.agent.workers import run_main


def main(mistake: str) -> None:
    """Train forty steps with Adam on random numbers."""
    torch.set_num_threads(1)
    torch.manual_seed(time.time_ns() if mistake == "seed" else 1)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    tracked: dict[str, Any] = {} if mistake == "optimizer" else {"optimizer": optimizer}
    run = er.resume(model=model, **tracked)
    for step in range(run.position.step, 40):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 3)).square().mean()
        loss.backward()
        optimizer.step()
        print(f"step {step + 1}: loss {loss.item()}")
        time.sleep(0.01)
        run.step()
    run.close()


if __name__ == "__main__":
    main(sys.argv[1])
    run_main.exit_without_freeing(0)  # freeing torch takes 0.4 s of processor time
