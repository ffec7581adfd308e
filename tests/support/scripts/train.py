"""The small training script of the end-to-end tests, with dropout and a step log.

Each rank writes the samples that it reads before the all-reduce of the step. So when a rank has finished a
step, the step logs of all ranks have its line. At the end each rank writes a digest of its state.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import elastic_resume as er
from elastic_resume.agent.workers import run_main
from elastic_resume.state import state_dict

SAMPLES, GLOBAL_BATCH = 240, 24


def make_dataset() -> TensorDataset:
    """Make random pictures with labels and their index."""
    generator = torch.Generator().manual_seed(7)
    pictures = torch.randn(SAMPLES, 16, generator=generator)
    labels = torch.randint(0, 4, (SAMPLES,), generator=generator)
    return TensorDataset(pictures, labels, torch.arange(SAMPLES))


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-log", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--step-delay", type=float, default=0.05)
    parser.add_argument("--slow-until", type=Path, help="a step takes a second until this file exists")
    parser.add_argument("--slow-from", type=int, default=0, help="no earlier step than this one does")
    parser.add_argument("--loaders", type=int, default=0, help="processes of each rank that read samples")
    parser.add_argument("--fast-from", type=Path, help="steps have no delay once this file exists")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--raise-at", default="", help="GENERATION:STEP:RANK")
    parser.add_argument("--damage-at", default="", help="GENERATION:STEP:RANK: one weight becomes another")
    parser.add_argument("--notices", type=Path, help="each rank records here what `run.preemption` is")
    parser.add_argument(
        "--own-ddp", action="store_true", help="make DistributedDataParallel here, before er.resume"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", help="make the process group here, with this backend")
    return parser.parse_args()


def record_notice(run: er.Run, directory: Path) -> None:
    """Append the step and the notice, once there is one, to a file of this rank."""
    if (notice := run.preemption) is not None:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / f"g{run.generation}-r{run.rank}.jsonl").open("a") as file:
            file.write(json.dumps({"step": run.position.step, "preemption": asdict(notice)}) + "\n")


def main() -> None:
    """Train, and write the samples and the final state."""
    args = parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    if args.backend:
        dist.init_process_group(args.backend)
    model = nn.Sequential(
        nn.Linear(16, args.width),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.BatchNorm1d(args.width),
        nn.Linear(args.width, 4),
    ).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    batches = er.GlobalBatches(SAMPLES, GLOBAL_BATCH, seed=3)
    loader = DataLoader(make_dataset(), batch_sampler=batches, num_workers=args.loaders)
    ddp: nn.Module | None = DistributedDataParallel(model) if args.own_ddp else None
    run = er.resume(model=ddp or model, optimizer=optimizer, scheduler=scheduler, data=batches)
    ddp = ddp or run.ddp(model)
    args.step_log.mkdir(parents=True, exist_ok=True)
    step_log = open(args.step_log / f"g{run.generation}-r{run.rank}.jsonl", "a")  # noqa: SIM115
    for epoch in run.epochs(args.epochs):
        for pictures, labels, indices in loader:
            step = run.position.step + 1
            line = {"generation": run.generation, "step": step, "epoch": epoch, "indices": indices.tolist()}
            os.write(step_log.fileno(), (json.dumps(line) + "\n").encode())
            slow = args.slow_until and step >= args.slow_from and not args.slow_until.exists()
            fast = args.fast_from is not None and args.fast_from.exists()
            time.sleep(1.0 if slow else 0.0 if fast else args.step_delay)
            if args.raise_at == f"{run.generation}:{step}:{run.rank}":
                raise RuntimeError(f"told to fail at step {step}")
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(pictures.to(args.device)), labels.to(args.device))
            (loss * run.loss_weight).backward()
            optimizer.step()
            if args.damage_at == f"{run.generation}:{step}:{run.rank}":
                with torch.no_grad():
                    list(model.parameters())[-1][0] += 1e-3
            run.step()
            if args.notices:
                record_notice(run, args.notices)
        scheduler.step()
    flat = state_dict.flatten({"model": model, "optimizer": optimizer})
    end = {
        "rank": run.rank,
        "world_size": run.world_size,
        "generation": run.generation,
        "step": run.position.step,
        "digest": state_dict.combine_digests(state_dict.digest_leaves(flat.leaves)),
    }
    (args.step_log / f"end-{run.rank}.json").write_text(json.dumps(end))
    run.close()


if __name__ == "__main__":
    main()
    run_main.exit_without_freeing(0)  # freeing torch takes 0.4 s of processor time
