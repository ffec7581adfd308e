"""A training script that is right, or wrong in the way of KIND, and kills workers as KILLS says (job_log.py).

PAUSE is the seconds that a step sleeps, EPOCHS the number of epochs of ten steps. Rank 0 writes to LOG, which
it empties first. From step SPIKE on the weights explode. SAVES is ``STEP:NAME[:METRIC],…``: it names the
checkpoint of that step. With SHARDED each node's ranks hold the model together. At its end each rank writes a
digest of its state to end-RANK.json in the directory of its argument.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import elastic_resume as er
from tests.support.scripts.job_log import kill_as_planned, write_end

KIND = os.environ.get("KIND", "right")
SPIKE, IS_SHARDED = int(os.environ.get("SPIKE", "1000")), "SHARDED" in os.environ
SAVES = [each.split(":") for each in os.environ.get("SAVES", "").split(",") if each]
EPOCHS, PAUSE = int(os.environ.get("EPOCHS", "2")), float(os.environ.get("PAUSE", "0"))
BATCH, SAMPLES = 12, 120


class Centred(nn.Module):
    """Subtracts the mean of the first batch, whose shape it does not know before."""

    mean: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Subtract it."""
        if self.mean is None:
            self.mean = inputs.mean(0)
        return inputs - self.mean


def save_milestones(run: er.Run) -> None:
    """Name the checkpoint of this step as planned."""
    for step, name, *metric in SAVES:
        if int(step) == run.position.step:
            run.save(milestone=name, metric=float(metric[0]) if metric else None)


def main() -> None:
    """Train."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(16) if IS_SHARDED else nn.BatchNorm1d(16)
    model = nn.Sequential(nn.Linear(8, 16), norm, nn.Dropout(0.1), nn.Linear(16, 2))
    if IS_SHARDED:
        fully_shard(model, mesh=er.shard_mesh())
    trained: nn.Module = model
    if KIND == "unfreezing":  # the body is trained from the second epoch on
        model.insert(0, Centred())
        trained = model[-1]
        model[1].requires_grad_(False)
        model[2].requires_grad_(False)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    inputs, targets = torch.randn(SAMPLES, 8), torch.randint(2, (SAMPLES,))
    batches = er.GlobalBatches(SAMPLES, BATCH, shuffle=True)
    run = er.resume(model=model, optimizer=optimizer, scheduler=scheduler, data=batches)

    log = open(os.environ["LOG"], "w") if "LOG" in os.environ and not run.rank else None  # noqa: SIM115

    def train() -> None:
        ddp, counter = run.replicate(model) if IS_SHARDED else run.ddp(model), 0
        for epoch in run.epochs(EPOCHS):
            if KIND == "unfreezing" and epoch == 1 and len(optimizer.param_groups) == 1:
                model.requires_grad_(True)
                optimizer.add_param_group({"params": model[:-1].parameters(), "lr": 0.01})
                ddp = run.ddp(model)
            for index, batch in enumerate(batches):
                if log is not None:
                    print(epoch, index, file=log, flush=True)
                if KIND == "index":
                    optimizer.param_groups[0]["lr"] = 0.05 / (1 + index)
                if run.position.step + 1 >= SPIKE:
                    optimizer.param_groups[0]["lr"] = 10.0
                if KIND == "raise" and run.plan.target is not None:
                    raise er.errors.UsageError("only while steps are computed again")
                counter = counter + 1 if KIND == "counter" else run.position.step + 1
                loss = functional.cross_entropy(ddp(inputs[batch]), targets[batch]) / counter
                optimizer.zero_grad()
                (loss * run.loss_weight).backward()
                optimizer.step()
                run.step()
                save_milestones(run)
                time.sleep(PAUSE)
                kill_as_planned(run, run.position.step)
            scheduler.step()

    (run.restartable(train) if KIND == "restartable" else train)()
    write_end(Path(sys.argv[1]), run, model=model, optimizer=optimizer)
    run.close()


if __name__ == "__main__":
    main()
