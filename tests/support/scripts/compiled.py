"""Train a compiled model; write what torch has compiled, loaded and imported after the first step.

``compiled.py DIRECTORY``: a rank writes ``gGENERATION-rRANK.json`` there after its first step, and ends when
the file ``end`` exists.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic_resume as er
from elastic_resume.agent.workers import run_main

STEPS = 2000


def measure() -> dict[str, Any]:
    """Return the counters of torch's compiler."""
    from torch._dynamo.utils import counters  # noqa: PLC0415 - importing it here is what a test looks for

    return {name: dict(counters[name]) for name in ("inductor", "aot_autograd", "stats")}


def main() -> None:
    """Train until the test ends it, or the file ``end`` exists."""
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    parts = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16)) for _ in range(2)]
    model = nn.Sequential(*parts, nn.Linear(16, 1))
    compiled: Any = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = er.GlobalBatches(STEPS * 8, 8)
    loader = DataLoader(TensorDataset(torch.randn(STEPS * 8, 16)), batch_sampler=batches)
    run = er.resume(model=model, optimizer=optimizer, data=batches)
    ddp = run.ddp(compiled)
    is_first = True
    for _ in run.epochs(1):
        for (inputs,) in loader:
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            optimizer.zero_grad()
            (ddp(inputs).pow(2).mean() * run.loss_weight).backward()
            optimizer.step()
            if is_first:
                seconds = {"seconds": time.perf_counter() - start_s}
                seconds["own_cpu_s"] = time.process_time() - start_cpu_s
                path = directory / f"g{run.generation}-r{run.rank}.json"
                path.with_suffix(".tmp").write_text(json.dumps({**measure(), **seconds}))
                path.with_suffix(".tmp").rename(path)
                is_first = False
            run.step()
            time.sleep(0.02)
            if (directory / "end").exists():
                break
    run.close()


if __name__ == "__main__":
    main()
    run_main.exit_without_freeing(0)
