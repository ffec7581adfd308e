"""What training scripts share: arguments, the log of one process, kills at places, and pauses.

``--kill PLACE@STEP:RANK[:node]`` kills that rank, or its node, when it first comes to that place at that
step. ``--pause STEP`` waits there until the log's directory has a file ``go-STEP``; a rank that is asked to
end meanwhile makes a file ``asked``.

KILLS is ``GENERATION:STEP:RANK,…``: that rank kills itself when it has finished that step.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from elastic_resume import constants
from elastic_resume.state import state_dict

RANK = os.environ.get("RANK", "0")


def parse_arguments(cases: Iterable[str]) -> argparse.Namespace:
    """Parse the arguments, and seed this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", default="rich", choices=cases)
    parser.add_argument("--restartable", action="store_true")
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--kill", action="append", default=[])
    parser.add_argument("--pause", type=int, action="append", default=[])
    torch.set_num_threads(1)
    torch.manual_seed(1 + int(RANK))  # the job takes rank 0's weights
    return parser.parse_args()


class JobLog:
    """The log of one process."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.directory: Path = args.records
        self._kills, self._pauses = args.kill, args.pause

    def write(self, **entry: Any) -> None:
        """Write one line; a kill does not lose it. A process that outlives a change has a file for each."""
        generation = os.environ.get(constants.ENV_GENERATION, "0")
        with (self.directory / f"{RANK}-{os.getpid()}-{generation}.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def write_end(self, **end: Any) -> None:
        """Write the final state of this rank."""
        (self.directory / f"end-{RANK}.json").write_text(json.dumps(end))

    def kill_at(self, place: str, step: int) -> None:
        """Kill this process or its node, once, if this is the place."""
        for kill in self._kills:
            where, rank, *node = kill.split(":")
            mark = self.directory / f"killed-{where}"
            if (where, rank) != (f"{place}@{step}", RANK) or mark.exists():
                continue
            mark.touch()
            if node:
                os.kill(int(os.environ[constants.ENV_AGENT_PID]), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    def pause_at(self, step: int, is_asked_to_end: Callable[[], bool]) -> None:
        """Wait until the test lets this process go on, if this is the step."""
        if step not in self._pauses:
            return
        (self.directory / f"reached-{step}-{os.getpid()}").touch()
        while not (self.directory / f"go-{step}").exists():
            time.sleep(0.02)
            if is_asked_to_end():
                (self.directory / "asked").touch()


class Points(Dataset[Any]):
    """Noisy points of a few classes."""

    def __init__(self, length: int, seed: int, width: int = 16, classes: int = 4) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, classes, (length,), generator=generator)
        self.inputs = torch.randn(length, width, generator=generator)
        self.inputs[:, :classes] += nn.functional.one_hot(self.labels, classes)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.labels[index]


def kill_as_planned(run: Any, step: int) -> None:
    """Kill this process if KILLS has it after this step."""
    plan = [tuple(map(int, kill.split(":"))) for kill in os.environ.get("KILLS", "").split(",") if kill]
    ranks = [rank for *moment, rank in plan if moment == [run.generation, step]]
    if ranks:
        dist.barrier()  # every node has the snapshot of this step
    if run.rank in ranks:
        os.kill(os.getpid(), signal.SIGKILL)


def write_end(directory: Path, run: Any, **objects: Any) -> None:
    """Write a digest of objects as the end of this rank."""
    (directory / f"end-{run.rank}.json").write_text(json.dumps(digest(objects)))


def digest(item: Any) -> str:
    """Return a digest of all that a checkpoint would hold of it."""
    flat = state_dict.flatten(state_dict.collect_objects({"it": item}))
    return state_dict.combine_digests({**state_dict.digest_leaves(flat.leaves), "": flat.structure})
