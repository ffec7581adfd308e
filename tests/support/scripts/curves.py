"""A small training that logs its loss, for tests of the trackers: each rank reads other samples."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic_resume as er
from elastic_resume.agent.workers import run_main

SAMPLES, BATCH = 240, 12


def main() -> None:
    """Train; log each step's loss and learning rate, and an evaluation at the end of each epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--step-delay", type=float, default=0.02)
    parser.add_argument("--log-every", type=int, default=1)
    parser.add_argument("--hold", type=Path, help="stay in the last epoch until this file exists")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(7)
    inputs, labels = torch.randn(SAMPLES, 8, generator=generator), torch.arange(SAMPLES) % 4
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    batches = er.GlobalBatches(SAMPLES, BATCH, seed=3)
    loader = DataLoader(TensorDataset(inputs, labels), batch_sampler=batches)
    run = er.resume(model=model, optimizer=optimizer, scheduler=scheduler, data=batches)
    ddp = run.ddp(model)
    for epoch in run.epochs(args.epochs):
        for pictures, targets in loader:
            time.sleep(args.step_delay)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(pictures), targets)
            (loss * run.loss_weight).backward()
            optimizer.step()
            scheduler.step()
            if (run.position.step + 1) % args.log_every == 0:
                run.log(loss=loss.detach(), lr=scheduler.get_last_lr()[0])
                run.log({"train/recomputed": run.is_recomputed})
            run.step()
        while args.hold and epoch == args.epochs - 1 and not args.hold.exists():
            time.sleep(0.01)
        with torch.no_grad():
            model.eval()
            run.log({"eval/loss": nn.functional.cross_entropy(model(inputs), labels)})
            model.train()
    run.close()


if __name__ == "__main__":
    main()
    run_main.exit_without_freeing(0)
