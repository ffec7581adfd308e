"""A training script with random augmentation that writes down the very tensors that reach the model.

Loaders with 0 and 2 workers read the same batches side by side, so that one start compares them all.
Each rank appends a line per step: for each loader the index and a digest of every sample.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import elastic_resume as er
from elastic_resume.state import state_dict

SAMPLES = 60
GLOBAL_BATCH = 7
STEPS = -(-SAMPLES // GLOBAL_BATCH)
LOADERS = ("0", "2")


class Noisy(Dataset[tuple[int, Tensor]]):
    """Sample i is a vector of i, with noise from three generators; some samples draw more than others."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        noise = torch.rand(1 + index % 3)[0]
        more = random.gauss(0.0, 1.0) + float(np.random.normal(size=1 + index % 2)[0])  # noqa: NPY002
        return index, torch.full((4,), float(index)) / SAMPLES + noise + more


def loaders(batches: er.GlobalBatches) -> list[DataLoader[tuple[int, Tensor]]]:
    """Return a loader for each of LOADERS."""
    wrapped = er.seeded(Noisy())
    return [
        DataLoader(wrapped, batch_sampler=batches),
        DataLoader(wrapped, num_workers=2, prefetch_factor=1, batch_sampler=batches, persistent_workers=True),
    ]


def seen(batch: tuple[Tensor, Tensor]) -> list[list[int | str]]:
    """Return index and digest of each sample of a batch."""
    return [
        [int(index), hashlib.sha256(row.numpy().tobytes()).hexdigest()[:16]]
        for index, row in zip(*batch, strict=True)
    ]


def main() -> None:
    """Train; kill this process after step ``--kill-in`` has begun."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kill-in", type=int, default=0)
    parser.add_argument("--save-at", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batches = er.GlobalBatches(SAMPLES, GLOBAL_BATCH, seed=3)
    sources = loaders(batches)
    options = {"ckpt_dir": args.directory, "run_id": "job", "save_every": 1000}
    run = er.resume(model=model, optimizer=optimizer, data=batches, **options)
    ddp = run.ddp(model)
    began = run.position.step
    step_log = (args.directory / f"seen-{run.world_size}-{run.rank}-from-{began}.jsonl").open("a")
    for epoch in run.epochs(2):
        for together in zip(*sources, strict=True):
            line = {
                "epoch": epoch,
                "step": run.position.step,
                "loaders": [seen(batch) for batch in together],
            }
            print(json.dumps(line), file=step_log, flush=True)
            if args.kill_in and run.position.step + 1 == args.kill_in:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            (ddp(together[0][1]).square().mean() * run.loss_weight).backward()
            optimizer.step()
            run.step()
            if args.save_at and run.position.step == args.save_at:
                run.save()
            if run.position.step % 3 == 0:
                torch.rand(5)  # an evaluation, say, that a run which resumes behind it does not make
        torch.rand(3)
    flat = state_dict.flatten({"model": model, "optimizer": optimizer})
    digest = state_dict.combine_digests(state_dict.digest_leaves(flat.leaves))
    print(json.dumps({"began": began, "digest": digest}))
    run.close()


if __name__ == "__main__":
    main()
