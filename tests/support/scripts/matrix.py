"""Trains optimizers in several ways within one job, for tests/integration/test_optimizer_matrix.py.

A cell is an optimizer and a way to train, with its own model, DDP, scheduler, average and scaler. Each
step of the job takes one step of every cell. Each rank records the samples it reads and every cell's loss,
and the final state of every cell. ``--kill STEP:RANK:MOMENT:WHO`` kills that rank's worker or node at that
moment.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import elastic_resume as er
from elastic_resume import constants
from elastic_resume.state import state_dict

SAMPLES, BATCH, EPOCHS = 72, 12, 2
STEPS = EPOCHS * SAMPLES // BATCH
WIDTH = 40


class Factored(torch.optim.Optimizer):
    """An optimizer like Adafactor: second moments by row and column, new tensors at each step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    def step(self, closure: Any = None) -> Any:
        """Divide each gradient by the root of its row's and column's moments."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                square = parameter.grad.square() + 1e-8
                rows, columns = square.mean(-1, keepdim=True), square.mean(0, keepdim=True)
                own = self.state[parameter]
                own["steps"] = own.get("steps", 0) + 1
                own["rows"] = 0.9 * own.get("rows", rows) + 0.1 * rows
                own["columns"] = 0.9 * own.get("columns", columns) + 0.1 * columns
                scale = (own["rows"] * own["columns"] / own["rows"].mean()).sqrt()
                parameter.data.sub_(group["lr"] * parameter.grad / scale)
        return loss


def halved(step: int) -> float:
    """Return a decaying factor."""
    return float(0.95**step)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "factored": Factored,
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.05, max_iter=2, history_size=4),
}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1),
    "adamw": lambda optimizer: schedulers.SequentialLR(
        optimizer,
        [schedulers.LinearLR(optimizer, 0.1, total_iters=3), schedulers.CosineAnnealingLR(optimizer, STEPS)],
        [3],
    ),
    "factored": lambda optimizer: schedulers.LambdaLR(optimizer, halved),
    "lbfgs": lambda optimizer: schedulers.ReduceLROnPlateau(optimizer, patience=0, factor=0.7),
}
WAYS = ("plain", "dropout", "batchnorm", "average", "scaler", "accumulated")
REFUSED = {("lbfgs", "scaler")}  # torch's GradScaler allows no closure, and LBFGS needs one
# Half of the pairs: what an optimizer stores does not depend on the way to train.
CELLS = [(how, way) for i, how in enumerate(OPTIMIZERS) for j, way in enumerate(WAYS) if (i + j) % 2 == 0]
assert not REFUSED & set(CELLS)


class Net(nn.Module):
    """Two layers, and the cell's layer between them."""

    def __init__(self, way: str) -> None:
        super().__init__()
        between = {"dropout": nn.Dropout(0.2), "batchnorm": nn.BatchNorm1d(WIDTH)}
        self.first = nn.Linear(16, WIDTH)
        self.between = between.get(way, nn.Identity())
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Score four classes."""
        scores: Tensor = self.last(torch.relu(self.between(self.first(x))))
        return scores


class Shadow:
    """A hand-made average of raw tensors, with a counter."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors = [parameter.detach().clone() for parameter in model.parameters()]
        self.updates = torch.zeros((), dtype=torch.int64)

    def update_parameters(self, model: nn.Module) -> None:
        """Average each tensor with the new weights; the decay warms up."""
        self.updates += 1
        decay = min(0.9, int(self.updates) / 10)
        for number, parameter in enumerate(model.parameters()):
            self.tensors[number] = decay * self.tensors[number] + (1 - decay) * parameter.detach()


class Cell:
    """One optimizer and one way to train."""

    def __init__(self, how: str, way: str) -> None:
        self.name, self.way = f"{how}-{way}", way
        self.model = Net(way)
        self.optimizer = OPTIMIZERS[how](self.model.parameters())
        self.scheduler = SCHEDULERS[how](self.optimizer)
        self.scaler = None
        if way == "scaler":
            self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        self.average: AveragedModel | Shadow | None = None
        if way == "average":
            own = how in {"adamw", "factored"}
            mean = get_ema_multi_avg_fn(0.9)
            self.average = Shadow(self.model) if own else AveragedModel(self.model, multi_avg_fn=mean)
        self.ddp: nn.Module = self.model

    @property
    def ema(self) -> Any:
        """The tracked form of the average."""
        if isinstance(self.average, Shadow):
            return {"shadow": self.average.tensors, "updates": self.average.updates}
        return self.average

    def train(self, inputs: Tensor, labels: Tensor, weight: float) -> str:
        """Take one step; return this rank's losses, exactly."""
        seen: list[float] = []

        def evaluate() -> Tensor:
            self.optimizer.zero_grad()
            loss = self._backward(inputs, labels, weight)
            seen.append(loss.item())
            # LBFGS decides by the loss, so the loss must be equal on all ranks.
            dist.all_reduce(loss)
            return loss / dist.get_world_size()

        if self.scaler is None:
            mean: Any = self.optimizer.step(evaluate)  # type: ignore[arg-type]  # torch's stub wants a float
        else:
            mean = evaluate()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        on_plateau = isinstance(self.scheduler, schedulers.ReduceLROnPlateau)
        self.scheduler.step(*([float(mean)] if on_plateau else []))
        if self.average is not None:
            self.average.update_parameters(self.model)
        return " ".join(value.hex() for value in seen)

    def _backward(self, inputs: Tensor, labels: Tensor, weight: float) -> Tensor:
        parts = 2 if self.way == "accumulated" else 1
        total = torch.zeros(())
        for number, (x, y) in enumerate(zip(inputs.chunk(parts), labels.chunk(parts), strict=True)):
            wait: Any = contextlib.nullcontext()
            if number + 1 < parts:
                wait = cast("DistributedDataParallel", self.ddp).no_sync()
            with wait:
                loss = nn.functional.cross_entropy(self.ddp(x), y) * weight / parts
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            total += loss.detach()
        return total

    def holds(self) -> dict[str, str]:
        """Return a digest of each part of the cell's state."""
        parts = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "ema": self.ema,
        }
        digests = {}
        for part, item in parts.items():
            flat = state_dict.flatten(state_dict.collect_objects({part: item}))
            leaves = state_dict.digest_leaves(flat.leaves)
            digests[part] = state_dict.combine_digests({**leaves, "": flat.skeleton})
        return digests


class Kill:
    """Kills a worker or a node once, at a given moment of a given step."""

    def __init__(self, option: str, directory: Path, rank: int) -> None:
        step, victim, self._moment, self._target = (option or "0:0:-:-").split(":")
        self._step = int(step) if rank == int(victim) else 0
        self._done = directory / "killed"

    def comes(self, moment: str, step: int) -> None:
        """Kill if ``moment`` of ``step`` is the given one."""
        if (step, moment) != (self._step, self._moment) or self._done.exists():
            return
        self._done.touch()
        if self._target == "node":
            os.kill(int(os.environ[constants.ENV_AGENT_PID]), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def tracked(cells: list[Cell]) -> dict[str, Any]:
    """Return the arguments of resume()."""
    return {
        "model": {cell.name: cell.model for cell in cells},
        "optimizer": {cell.name: cell.optimizer for cell in cells},
        "scheduler": {cell.name: cell.scheduler for cell in cells},
        "scaler": {cell.name: cell.scaler for cell in cells},
        "ema": {cell.name: cell.ema for cell in cells},
    }


def main() -> None:
    """Train all cells, and record samples, losses and final states."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-log", type=Path, required=True)
    parser.add_argument("--kill", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1 + int(os.environ["RANK"]))  # the job takes rank 0's weights
    cells = [Cell(how, way) for how, way in CELLS]
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, 16, generator=generator)
    labels = torch.randint(0, 4, (SAMPLES,), generator=generator)
    batches = er.GlobalBatches(SAMPLES, BATCH, seed=3)
    loader = DataLoader(TensorDataset(inputs, labels, torch.arange(SAMPLES)), batch_sampler=batches)
    run = er.resume(**tracked(cells), data=batches, seed=5)
    for cell in cells:
        cell.ddp = run.ddp(cell.model)
    kill = Kill(args.kill, args.step_log, run.rank)
    step_log = open(args.step_log / f"g{run.generation}-r{run.rank}.jsonl", "a")  # noqa: SIM115
    for _ in run.epochs(EPOCHS):
        for x, y, numbers in loader:
            step = run.position.step + 1
            losses = {}
            for number, cell in enumerate(cells):
                losses[cell.name] = cell.train(x, y, run.loss_weight)
                if number == len(cells) // 2:
                    kill.comes("amid", step)
            kill.comes("stepped", step)
            line = {"step": step, "indices": numbers.tolist(), "losses": losses}
            os.write(step_log.fileno(), (json.dumps(line) + "\n").encode())
            run.step()
            kill.comes("told", step)
    end = {"step": run.position.step, "holds": {cell.name: cell.holds() for cell in cells}}
    (args.step_log / f"end-{run.rank}.json").write_text(json.dumps(end))
    run.close()


if __name__ == "__main__":
    main()
