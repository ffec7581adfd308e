"""A training script that is right, or wrong in the way of KIND, and kills workers as planned in KILLS.

KILLS is ``GENERATION:STEP:RANK,…``: that rank kills itself when it has finished that step. PAUSE is the
seconds that a step sleeps, EPOCHS the number of epochs of ten steps. Rank 0 writes to LOG, which it empties
first.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import elastic_resume as er
from elastic_resume.state import state_dict

KIND = os.environ.get("KIND", "right")
KILLS = [tuple(map(int, kill.split(":"))) for kill in os.environ.get("KILLS", "").split(",") if kill]
EPOCHS, PAUSE = int(os.environ.get("EPOCHS", "2")), float(os.environ.get("PAUSE", "0"))
BATCH, SAMPLES = 8, 80


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


def main() -> None:
    """Train."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 2))
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
        ddp, counter = run.ddp(model), 0
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
                if KIND == "raise" and run.plan.target is not None:
                    raise er.errors.UsageError("only while steps are computed again")
                counter = counter + 1 if KIND == "counter" else run.position.step + 1
                loss = functional.cross_entropy(ddp(inputs[batch]), targets[batch]) / counter
                optimizer.zero_grad()
                (loss * run.loss_weight).backward()
                optimizer.step()
                run.step()
                time.sleep(PAUSE)
                ranks = [rank for *moment, rank in KILLS if moment == [run.generation, run.position.step]]
                if ranks:
                    dist.barrier()  # every node has the snapshot of this step
                if run.rank in ranks:
                    os.kill(os.getpid(), signal.SIGKILL)
            scheduler.step()

    (run.restartable(train) if KIND == "restartable" else train)()
    flat = state_dict.flatten({"model": model, "optimizer": optimizer})
    digest = state_dict.combine_digests(state_dict.digest_leaves(flat.leaves))
    Path(sys.argv[1], f"end-{run.rank}.json").write_text(json.dumps(digest))
    run.close()


if __name__ == "__main__":
    main()
