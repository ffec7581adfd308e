"""Measure what the own time of a rank costs per step, beside another checkout such as the commit before.

    git worktree add ../before COMMIT
    python benchmarks/own_time.py ../before

Processes of both checkouts alternate. Each trains a small model with buffers in DDP on the CPU, in a group of
one, and prints the minimum of many steps: other processes only add time. The target is 20 us per step.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TARGET_US = 20.0
ROUNDS, STEPS = 15, 2000
HERE = Path(__file__).absolute().parent.parent


def train() -> None:
    """Print the time of the fastest step in microseconds."""
    torch = importlib.import_module("torch")
    er = importlib.import_module("elastic_resume")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, fastest_s = torch.ones(4, 4), 1.0
    with tempfile.TemporaryDirectory() as directory:
        run = er.resume(
            model=model, optimizer=optimizer, ckpt_dir=directory, snapshot_every="off", save_every=10**9
        )
        ddp = run.ddp(model)
        for _ in range(STEPS):
            began = time.perf_counter()
            ddp(inputs).sum().backward()
            run.step()
            fastest_s = min(fastest_s, time.perf_counter() - began)
        print(f"fastest {fastest_s * 1e6}", flush=True)
        run.close()


def measure(checkout: Path) -> float:
    """Return the fastest step of a process that imports that checkout."""
    env = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, str(Path(__file__).absolute()), "--train"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return float(next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("fastest")))


def main() -> None:
    """Print the fastest step of each checkout, and the difference."""
    if sys.argv[1:] == ["--train"]:
        train()
        return
    before, with_it = 1e9, 1e9
    for _ in range(ROUNDS):
        before = min(before, measure(Path(sys.argv[1]).absolute()))
        with_it = min(with_it, measure(HERE))
    cost_us = with_it - before
    print(f"a step: {before:.1f} us before, {with_it:.1f} us with own times")
    print(f"cost: {cost_us:.1f} us; target: at most {TARGET_US:.0f} us")


if __name__ == "__main__":
    main()
