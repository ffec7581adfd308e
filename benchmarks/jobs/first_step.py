"""The script of start.py: train a small DDP model on gloo, and print when its first step ended.

    first_step.py resume|plain STEPS

`resume` uses elastic_resume, `plain` is what a user of torchrun writes. Each process prints
``first MONOTONIC_S WORLD_SIZE`` after its first step, and ends after STEPS steps of 20 ms.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch import nn

way, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
model = nn.Linear(64, 64)
optimizer = torch.optim.Adam(model.parameters())
run = None
if way == "resume":
    import elastic_resume as er

    run = er.resume(model=model, optimizer=optimizer)
    ddp = run.ddp(model)
else:
    ddp = nn.parallel.DistributedDataParallel(model)
for step in range(steps):
    optimizer.zero_grad()
    ddp(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    if run is not None:
        run.step()
    if step == 0:
        print(f"first {time.monotonic()} {dist.get_world_size()}", flush=True)
    time.sleep(0.02)
