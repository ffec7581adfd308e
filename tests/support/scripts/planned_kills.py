"""A training script that kills workers and nodes at planned moments, and records finished steps.

``--plan`` is a JSON list of ``{"step", "rank", "moment", "who"}``: at that moment of that step that rank
kills its worker (itself), its agent, or both (the node). An entry that was carried out leaves a file. The
other ranks sleep at the moment ``survivors`` of that step, so that the end of the world finds them there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import elastic_resume as er
from elastic_resume import constants, failpoints
from elastic_resume.agent.workers import run_main
from tests.support.scripts.job_log import write_end

# Between two lines all ranks wait for each other.
MOMENTS = (
    ("loading", "evaluation", "forward"),
    ("backward",),
    ("optimizer", "stepped"),
    ("step", "told", "copying", "copied", "confirmed"),
)
SURVIVOR_MOMENTS = (*MOMENTS[:-1], ("told",))


class PlannedKills:
    """Kills this rank's worker, agent or node as planned."""

    def __init__(self, plan: list[dict[str, Any]], directory: Path) -> None:
        self._plan = plan
        self._directory = directory
        self._is_agent_dead = False
        self.rank = -1
        self.step = 0

    def reach(self, moment: str, step: int | None = None) -> None:
        """Kill, or wait for the end of the world, if that is planned for ``moment`` of ``step``.

        ``step`` is by default the running one. After the kill of the agent wait for the own end: the next
        kill would be a second failure at once.
        """
        while self._is_agent_dead:
            time.sleep(0.01)
        for entry in self._plan:
            done = self._directory / f"done-{entry['step']}-{entry['rank']}"
            if entry["step"] != (self.step if step is None else step) or done.exists():
                continue
            if entry["rank"] == self.rank and entry["moment"] == moment:
                done.touch()
                self._kill(entry["who"])
            elif entry["rank"] != self.rank and entry["survivors"] == moment:
                time.sleep(60)

    def _kill(self, who: str) -> None:
        if who != "worker":
            os.kill(int(os.environ[constants.ENV_AGENT_PID]), signal.SIGKILL)
            self._is_agent_dead = True
        if who != "agent":
            os.kill(os.getpid(), signal.SIGKILL)


class Inputs(Dataset[Tensor]):
    """Inputs that a loader's worker makes."""

    def __len__(self) -> int:
        """Return more than any test reads."""
        return 1 << 20

    def __getitem__(self, index: int) -> Tensor:
        """Return the input of one sample."""
        return torch.randn(16, generator=torch.Generator().manual_seed(index))


def main() -> None:
    """Train until the last step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-log", type=Path, required=True)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--restartable", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = er.GlobalBatches(args.steps * 24, 24, shuffle=True)
    # Its workers are forked, and live as long as this process.
    loader = DataLoader(Inputs(), batch_sampler=batches, num_workers=1, persistent_workers=True)
    run = er.resume(model=model, optimizer=optimizer, data=batches)
    kills = PlannedKills(json.loads(args.plan.read_text()), args.step_log)
    # A copy is made while the next step begins.
    failpoints.hit = lambda name, *_: kills.reach(name.rpartition(".")[2], run.position.step)
    # The last gradient to be ready: the others are being reduced.
    next(model.parameters()).register_hook(lambda _: kills.reach("backward"))
    optimizer.register_step_post_hook(lambda *_: kills.reach("optimizer"))

    def train() -> None:
        kills.rank = run.rank
        ddp = run.ddp(model)
        log = open(args.step_log / f"g{run.generation}-r{run.rank}-{os.getpid()}.jsonl", "a")  # noqa: SIM115
        for _ in run.epochs(1):
            iterator = iter(loader)
            while True:
                kills.step = run.position.step + 1
                kills.reach("loading")
                x = next(iterator, None)
                if x is None:
                    break
                with torch.no_grad():
                    model.eval()
                    model(x)
                    kills.reach("evaluation")
                    model.train()
                kills.reach("forward")
                loss: Tensor = ddp(x).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                kills.reach("stepped")
                run.step()
                line = {"step": run.position.step, "generation": run.generation}
                os.write(log.fileno(), (json.dumps(line) + "\n").encode())
                kills.reach("told")

    (run.restartable(train) if args.restartable else train)()
    write_end(args.step_log, run, model=model, optimizer=optimizer)
    run.close()


if __name__ == "__main__":
    main()
    run_main.exit_without_freeing(0)  # freeing torch takes 0.4 s of processor time
