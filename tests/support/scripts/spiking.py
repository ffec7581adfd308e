"""A training script of two epochs of ten steps, whose weights explode from step SPIKE on.

SAVES is ``STEP:NAME[:METRIC],…``: it names the checkpoint of that step. At KILL, ``GENERATION:STEP``, rank 1
kills itself. A step sleeps PAUSE seconds. With SHARDED each node's ranks hold the model together. At its end
each rank writes a digest of its state to end-RANK.json in the directory of its argument.
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

BATCH, SAMPLES, EPOCHS = 12, 120, 2
SPIKE = int(os.environ.get("SPIKE", "1000"))
PAUSE = float(os.environ.get("PAUSE", "0"))
KILL = os.environ.get("KILL", "")
SAVES = [each.split(":") for each in os.environ.get("SAVES", "").split(",") if each]


def save_milestones(run: er.Run) -> None:
    """Name the checkpoint of this step as planned."""
    for step, name, *metric in SAVES:
        if int(step) == run.position.step:
            run.save(milestone=name, metric=float(metric[0]) if metric else None)


def main() -> None:
    """Train."""
    out = Path(sys.argv[1])
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
    if "SHARDED" in os.environ:
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

        fully_shard(model, mesh=er.shard_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs, targets = torch.randn(SAMPLES, 8), torch.randint(2, (SAMPLES,))
    batches = er.GlobalBatches(SAMPLES, BATCH, shuffle=True)
    run = er.resume(model=model, optimizer=optimizer, data=batches)
    trained = run.replicate(model) if "SHARDED" in os.environ else run.ddp(model)
    for _ in run.epochs(EPOCHS):
        for batch in batches:
            loss = functional.cross_entropy(trained(inputs[batch]), targets[batch])
            optimizer.zero_grad()
            (loss * run.loss_weight).backward()
            for group in optimizer.param_groups:
                group["lr"] = 10.0 if run.position.step + 1 >= SPIKE else 0.01
            optimizer.step()
            run.step()
            save_milestones(run)
            time.sleep(PAUSE)
            if f"{run.generation}:{run.position.step}" == KILL:
                dist.barrier()  # every node has the snapshot of this step
                if run.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
    flat = state_dict.flatten({"model": model, "optimizer": optimizer})
    digest = state_dict.combine_digests(state_dict.digest_leaves(flat.leaves))
    (out / f"end-{run.rank}.json").write_text(json.dumps(digest))
    run.close()


if __name__ == "__main__":
    main()
