"""A training script that kills workers and nodes at planned moments, and records finished steps.

``--plan`` is a JSON list of ``{"step", "rank", "moment", "who"}``: at that moment of that step that rank
kills its worker (itself), its agent, or both (the node). An entry that was carried out leaves a file.
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

import elastic_resume as er
from elastic_resume import constants, failpoints
from elastic_resume.agent.workers import run_main
from elastic_resume.state import state_dict

MOMENTS = ("forward", "backward", "optimizer", "stepped", "copying", "copied", "marked", "told", "committing")


class PlannedKills:
    """Kills this rank's worker, agent or node as planned."""

    def __init__(self, plan: list[dict[str, Any]], rank: int, directory: Path) -> None:
        self._plan = [entry for entry in plan if entry["rank"] == rank]
        self._directory = directory
        self._is_agent_dead = False
        self.step = 0

    def reach(self, moment: str, step: int | None = None) -> None:
        """Kill if a kill is planned for ``moment`` of ``step``, by default of the running step.

        After the kill of the agent wait for the own end: the next kill would be a second failure at once.
        """
        while self._is_agent_dead:
            time.sleep(0.01)
        entry = self._due(moment, self.step if step is None else step)
        if entry is None:
            return
        (self._directory / f"done-{entry['step']}-{entry['rank']}").touch()
        if entry["who"] != "worker":
            os.kill(int(os.environ[constants.ENV_AGENT_PID]), signal.SIGKILL)
            self._is_agent_dead = True
        if entry["who"] != "agent":
            os.kill(os.getpid(), signal.SIGKILL)

    def _due(self, moment: str, step: int) -> dict[str, Any] | None:
        for entry in self._plan:
            done = self._directory / f"done-{entry['step']}-{entry['rank']}"
            if (entry["step"], entry["moment"]) == (step, moment) and not done.exists():
                return entry
        return None


def main() -> None:
    """Train until the last step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-log", type=Path, required=True)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = er.resume(model=model, optimizer=optimizer)
    kills = PlannedKills(json.loads(args.plan.read_text()), run.rank, args.step_log)
    # A copy is made while the next step begins.
    failpoints.hit = lambda name, *_: kills.reach(name.rpartition(".")[2], run.position.step)
    ddp = run.ddp(model)
    # The last gradient to be ready: the others are being reduced.
    next(model.parameters()).register_hook(lambda _: kills.reach("backward"))
    optimizer.register_step_post_hook(lambda *_: kills.reach("optimizer"))
    log = open(args.step_log / f"g{run.generation}-r{run.rank}.jsonl", "a")  # noqa: SIM115
    for _ in run.epochs(1):
        while run.position.step < args.steps:
            kills.step = run.position.step + 1
            kills.reach("forward")
            x = torch.randn(8, 16)
            loss: Tensor = ddp(x).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            kills.reach("stepped")
            run.step()
            line = {"step": run.position.step, "generation": run.generation}
            os.write(log.fileno(), (json.dumps(line) + "\n").encode())
            kills.reach("told")
    flat = state_dict.flatten({"model": model, "optimizer": optimizer})
    digest = state_dict.combine_digests(state_dict.digest_leaves(flat.leaves))
    (args.step_log / f"end-{run.rank}.json").write_text(json.dumps({"digest": digest}))
    run.close()


if __name__ == "__main__":
    main()
    run_main.exit_without_freeing(0)  # freeing torch takes 0.4 s of processor time
