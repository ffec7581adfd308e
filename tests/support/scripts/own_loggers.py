"""Train with the script's own loggers, as docs/guides/curves.md shows; rank 0 is killed at some steps.

Arguments: the directory of the loggers, the number of steps, and the steps at which rank 0 is killed, once
each.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from mlflow import MlflowClient
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import elastic_resume as er


class OwnLoggers:
    """Writes each step to TensorBoard, to MLflow and to files."""

    def __init__(self, directory: Path, run: er.Run) -> None:
        self._run = run
        self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=run.position.step + 1)
        self._client = MlflowClient(f"file://{directory}/mlruns")
        found = self._client.search_runs(["0"], "tags.job = 'digits'")
        self._id = (found[0] if found else self._client.create_run("0", tags={"job": "digits"})).info.run_id
        history = self._client.get_metric_history(self._id, "loss") if found else []
        self._logged = max((metric.step for metric in history), default=0)
        self._path = directory / "loss.csv"
        lines = self._path.read_text().splitlines(keepends=True) if self._path.exists() else []
        kept = [
            line for line in lines if line.endswith("\n") and int(line.split(",")[0]) <= run.position.step
        ]
        self._path.write_text("".join(kept))
        self._new_path = directory / "not-recomputed.csv"

    def write(self, loss: float) -> None:
        """Write the loss of the step that is being computed."""
        step = self._run.position.step + 1
        self._writer.add_scalar("loss", loss, step)
        self._writer.flush()
        if step > self._logged:
            self._client.log_metric(self._id, "loss", loss, step=step)
        for path in (self._path, *([] if self._run.is_recomputed else [self._new_path])):
            with path.open("a") as file:
                file.write(f"{step},{loss!r}\n")


def main(directory: Path, steps: int, kills: list[int]) -> None:
    """Train on numbers that depend on the step alone."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = er.resume(model=model, optimizer=optimizer)
    ddp = run.ddp(model)
    loggers = OwnLoggers(directory, run) if dist.get_rank() == 0 else None
    while run.position.step < steps:
        step = run.position.step + 1
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        loss = ddp(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss.detach())
        if loggers:
            loggers.write(loss.item())
            killed = directory / f"killed-{step}"
            if step in kills and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        run.step()
    run.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), [int(word) for word in sys.argv[3:]])
