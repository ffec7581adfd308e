"""Trains a model that is sharded over the ranks of each node, records losses, and kills as planned.

``--plan`` is a JSON list of ``[step, rank, who]``: after that step the rank kills itself ("worker") or its
"node", once. Each rank appends its losses to a file of its own, and writes its final state to another.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import elastic_resume as er
from elastic_resume import constants
from elastic_resume.agent.workers import run_main
from elastic_resume.state import state_dict

parser = argparse.ArgumentParser()
parser.add_argument("--losses", type=Path, required=True)
parser.add_argument("--plan", type=json.loads, default=[])
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--late", action="store_true", help="rank 1 is late at the end")
parser.add_argument("--save-alone", type=int, help="after this step rank 0 saves alone, once")
parser.add_argument("--await-commit", type=int, help="after this step wait for a checkpoint")
parser.add_argument("--await-node", type=int, help="after this step wait for the third node")
parser.add_argument("--step-delay", type=float, default=0.0, help="seconds after each step")
parser.add_argument("--ddp", action="store_true", help="every rank holds the whole model")
parser.add_argument("--restartable", action="store_true", help="survivors keep their process")
args = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(int(os.environ["GROUP_RANK"]))  # each node another model: a cold start makes them equal
model: Any = nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 32), nn.Tanh(), nn.Linear(32, 1))
for part in () if args.ddp else (model[0], model[2], model):
    fully_shard(part, mesh=er.shard_mesh())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
generator = torch.Generator().manual_seed(0)
inputs = torch.randn(144, 16, generator=generator)
batches = er.GlobalBatches(144, 12, seed=0)
loader: Any = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_sampler=batches
)
run = er.resume(model=model, optimizer=optimizer, scheduler=scheduler, data=batches)


def has_recorded(rank: int, step: int) -> bool:
    """Return whether a rank has written its loss of a step."""
    path = args.losses / f"rank{rank}.jsonl"
    return path.exists() and f'"step": {step},' in path.read_text()


def kill_as_planned(step: int) -> None:
    """Kill this worker, or its node, once all ranks have recorded the step: the kill may end them too."""
    for at, rank, who in args.plan:
        done = args.losses / f"done-{at}"
        if (at, rank) == (step, run.rank) and not done.exists():
            while not all(has_recorded(each, step) for each in range(run.world_size)):
                time.sleep(0.01)
            done.touch()
            if who == "node":
                os.kill(int(os.environ[constants.ENV_AGENT_PID]), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def train() -> None:
    """Train to the end."""
    wrapped = run.ddp(model) if args.ddp else run.replicate(model)
    for _ in run.epochs(args.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = (wrapped(x) - y).square().mean() * run.loss_weight
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            run.step()
            step = run.position.step
            entry = {"step": step, "generation": run.generation, "world": run.world_size, "loss": loss.item()}
            with (args.losses / f"rank{run.rank}.jsonl").open("a") as file:
                file.write(json.dumps({**entry, "pid": os.getpid()}) + "\n")
            kill_as_planned(step)
            if (step, run.rank, run.generation) == (args.save_alone, 0, 1):
                run.save()
            time.sleep(args.step_delay)
            while step == args.await_node and run.world_size < 6:
                time.sleep(0.01)
            while step == args.await_commit and not list(
                Path(os.environ[constants.ENV_CKPT_DIR]).glob("*/*/g*-s*")
            ):
                time.sleep(0.01)
        if args.late and run.rank == 1:
            time.sleep(8.0)  # as a rank that evaluates
    run.assert_ranks_equal()


(run.restartable(train) if args.restartable else train)()
flat = state_dict.flatten({"model": model, "optimizer": optimizer, "scheduler": scheduler})
end = {
    "digests": state_dict.digest_leaves(flat.leaves),
    "whole": {
        name: (value if args.ddp else value.full_tensor()).tolist()
        for name, value in model.state_dict().items()
    },
}
(args.losses / f"end{run.rank}.json").write_text(json.dumps(end))
run.close()
run_main.exit_without_freeing(0)  # freeing torch takes 0.4 s of processor time
