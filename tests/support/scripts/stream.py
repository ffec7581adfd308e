"""Trains on a stream of shards, and writes which samples each rank has read in which step.

``stream.py FOLDER WORKERS [HOLD]``: with HOLD, a world of fewer than four ranks takes as many steps and one
batch more, and then waits for the change of the world. FOLDER is ``-`` if only the printed lines matter.
WORKERS is the number of workers of each loader: "0,2" means 2 if the number of ranks is odd.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import elastic_resume as er
from elastic_resume.agent.workers import run_main

SIZES = [3 + 7 * number % 13 for number in range(36)]
EPOCHS, WHOLE_WORLD = 2, 4


def read(shard: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the samples of a shard: its number and theirs, and a random input."""
    for number in range(SIZES[shard]):
        yield torch.tensor([shard, number]), torch.rand(4) + random.random()


def main() -> None:
    """Train two epochs."""
    folder, hold = Path(sys.argv[1]), int(([*sys.argv, "0"])[3])
    workers = int((sys.argv[2].split(",") * 2)[int(os.environ["WORLD_SIZE"]) % 2])
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    stream = er.ShardedStream(range(len(SIZES)), read, batch_size=3, seed=5, num_workers=workers)
    run = er.resume(model=model, optimizer=optimizer, data=stream)
    ddp = run.ddp(model)
    steps = 0
    for epoch in run.epochs(EPOCHS):
        for names, inputs in stream:
            if hold and steps == hold and run.world_size < WHOLE_WORLD:
                (folder / f"held-{run.generation}-{run.rank}-{run.world_size}").touch()
                time.sleep(600)  # the batch was taken, and its step is not counted
            optimizer.zero_grad()
            loss = ddp(inputs).square().mean() * run.loss_weight
            loss.backward()
            optimizer.step()
            samples = names.tolist() if run.loss_weight else []
            entry = {"step": run.position.step + 1, "epoch": epoch, "samples": samples}
            print(f"step {entry['step']} rank {run.rank}: {samples} {loss.item()!r}", flush=True)
            if hold:
                with open(folder / f"g{run.generation}-r{run.rank}.jsonl", "a") as step_log:
                    step_log.write(json.dumps(entry) + "\n")
            run.step()
            steps += 1
    run.close()


if __name__ == "__main__":
    main()
    run_main.exit_without_freeing(0)  # freeing torch takes 0.4 s of processor time
