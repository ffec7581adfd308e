"""Train a compiled model; write what torch has compiled, loaded and imported after the first step.

``compiled.py DIRECTORY LAYERS``: a rank writes ``gGENERATION-rRANK.json`` there after its first step, and
ends when the file ``end`` exists. With 0 layers the model is a product of matrices, for which Inductor needs
no C++ compiler.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader, TensorDataset

import elastic_resume as er
from elastic_resume.agent.workers import run_main

STEPS = 2000
WIDTH = 64


def make_model(layers: int) -> nn.Module:
    """Build the model."""
    if not layers:
        return nn.Linear(WIDTH, 1, bias=False)
    parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(layers)]
    return nn.Sequential(*parts, nn.Linear(WIDTH, 1))


def read_cpu_s() -> tuple[float, float]:
    """Return the processor seconds of this process, and of its ended children, such as the C++ compiler."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own, children = (usage.ru_utime + usage.ru_stime for usage in usages)
    return own, children


def main() -> None:
    """Train until the data or the test ends it."""
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = make_model(int(sys.argv[2]))
    compiled: Any = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    batches = er.GlobalBatches(STEPS * 8, 8)
    loader = DataLoader(TensorDataset(torch.randn(STEPS * 8, WIDTH)), batch_sampler=batches)
    run = er.resume(model=model, optimizer=optimizer, data=batches)
    ddp = run.ddp(compiled)
    is_first = True
    for _ in run.epochs(1):
        for (inputs,) in loader:
            start_s, (own_s, children_s) = time.perf_counter(), read_cpu_s()
            optimizer.zero_grad()
            (ddp(inputs).pow(2).mean() * run.loss_weight).backward()
            optimizer.step()
            if is_first:
                measured: dict[str, Any] = {
                    name: dict(counters[name]) for name in ("inductor", "aot_autograd")
                }
                measured["seconds"] = time.perf_counter() - start_s
                measured["own_cpu_s"], measured["children_cpu_s"] = (
                    now_s - before_s
                    for now_s, before_s in zip(read_cpu_s(), (own_s, children_s), strict=True)
                )
                measured["imported"] = "elastic_resume.mechanisms.compile_cache.sharing" in sys.modules
                path = directory / f"g{run.generation}-r{run.rank}.json"
                path.with_suffix(".tmp").write_text(json.dumps(measured))
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
