"""Train in a restartable function; report to the test in each call what this process holds.

``survivor.py SOCKET ddp|sharded``: SOCKET is a unix socket of the test. It gets two connections: one takes
the place of the socket to the supervisor, and one gets a line of JSON for each call, and for its second step.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import signal
import socket
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torch.optim import optimizer as torch_optimizer

import elastic_resume as er
from elastic_resume import constants

WIDTH = 512  # one set of gradient buckets that leaks each time would double the memory


def connect() -> socket.socket:
    """Connect to the test."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    return connection


faulthandler.enable()  # torch's threads may fail in C++
os.environ[constants.ENV_SUPERVISOR_FD] = str(connect().detach())
report = connect()
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
is_sharded = sys.argv[2] == "sharded"
if is_sharded:
    for part in (*(part for part in model if isinstance(part, nn.Linear)), model):
        fully_shard(part, mesh=er.shard_mesh())
compiled: Any = torch.compile(model, backend="eager")
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
batches = er.GlobalBatches(4800, 12)
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(torch.randn(4800, 16)), batch_sampler=batches
)
run = er.resume(model=model, optimizer=optimizer, scheduler=scheduler, data=batches, save_every=1000000)


def list_open() -> Counter[str]:
    """Count the open descriptors by kind."""
    kinds = Counter[str]()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another thread may close one that was just listed
            kinds[str(path.readlink()).split(":[")[0]] += 1
    return kinds


def count_hooks() -> int:
    """Count the hooks on modules, parameters and optimizers."""
    owners = [*model.modules(), *model.parameters(), optimizer]
    tables = [getattr(owner, name) for owner in owners for name in dir(owner) if name.endswith("_hooks")]
    tables += [torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks]
    return sum(len(table) for table in tables if isinstance(table, dict))


def measure() -> dict[str, Any]:
    """Return what this process holds."""
    gc.collect()
    memory = Path("/proc/self/smaps_rollup").read_text().splitlines()
    private = [line for line in memory if line.startswith("Private_")]
    return {
        "descriptors": list_open(),
        "counts": {
            "threads": len(list(Path("/proc/self/task").iterdir())),
            "mapped slots": Path("/proc/self/maps").read_text().count("memfd:"),
            "hooks": count_hooks(),
        },
        "memory": sum(int(line.split()[1]) << 10 for line in private),
        "objects": Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects()),
        "signals": [str(signal.getsignal(number)).split(" at ")[0] for number in signal.Signals],
        "compiled": {name: dict(counters[name]) for name in ("stats", "frames")},
    }


def send(message: dict[str, Any]) -> None:
    """Send a line in one call: a buffer whose flush is interrupted would send it twice."""
    report.sendall(json.dumps(message).encode() + b"\n")


@run.restartable
def train() -> None:
    """Train until the world changes."""
    send({"call": measure()})
    if is_sharded:
        run.replicate(model)
    trained = compiled if is_sharded else run.ddp(compiled)
    steps = 0
    for _ in run.epochs(1000000):
        for (inputs,) in loader:
            optimizer.zero_grad()
            (trained(inputs).pow(2).mean() * run.loss_weight).backward()
            optimizer.step()
            scheduler.step()
            run.step()
            steps += 1
            if steps == 2:
                send({"step": run.position.step})
                threading.Event().wait()  # until the world changes


train()
