"""A DDP script that is ported by one line (LINES=1) or by five, and writes a digest of its end.

KILL is ``STEP:RANK``: that rank kills itself in the first generation, when it has finished that step.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import elastic_resume as er

EPOCHS = 3
KILL = os.environ.get("KILL", "")


def main() -> None:
    """Train."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dataset = TensorDataset(torch.randn(60, 4), torch.randn(60, 2))
    bare = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))
    model = DistributedDataParallel(bare)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    is_one_line = os.environ["LINES"] == "1"
    kind: Any = DistributedSampler if is_one_line else er.ElasticSampler
    sampler = kind(dataset, seed=5)
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=3, sampler=sampler)
    if is_one_line:
        epochs: Any = er.epochs(EPOCHS, loader, **objects)
        run = epochs.run
    else:
        run = er.resume(data=loader, **objects)
        epochs = run.epochs(EPOCHS)
    for epoch in epochs:
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            if KILL and run.generation == 1 and run.position.step == int(KILL.split(":")[0]):
                dist.barrier()  # every node has the snapshot of this step
                if run.rank == int(KILL.split(":")[1]):
                    os.kill(os.getpid(), signal.SIGKILL)
            loss = mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            if not is_one_line:
                run.step()
    state = [bare.state_dict(), optimizer.state_dict(), scheduler.state_dict()]
    digest = hashlib.sha256(repr(state).encode())
    for tensor in bare.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    end = {"digest": digest.hexdigest(), "step": run.position.step}
    (Path(sys.argv[1]) / f"end-{run.rank}.json").write_text(json.dumps(end))


if __name__ == "__main__":
    main()
