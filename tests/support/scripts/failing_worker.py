"""A worker that costs nothing and fails as it is told: ``failing_worker.py DIRECTORY FAILURE NODE``.

It keeps the events that a real one keeps (`worker-start`, `step`), and a file of the step that the job has
come to. A generation's workers wait for each other in every step, as a collective would have them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from elastic_resume import constants, events
from elastic_resume.training import worker_exit

GENERATION = int(os.environ["ELASTIC_RESUME_GENERATION"])
NODE, RANK, WORLD = (
    os.environ["ELASTIC_RESUME_NODE_NAME"],
    int(os.environ["RANK"]),
    int(os.environ["WORLD_SIZE"]),
)
PAUSE_S = 0.02
NCCL_ERROR = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.26.2\nncclUnhandledCudaError: Call to CUDA function failed."
    "\nLast error:\nCuda failure 'uncorrectable ECC error encountered'"
)
POISON = 6  # the step that cannot be finished


def log_of(**fixed: Any) -> events.EventLog:
    """The node's log, with the agent's memory beside it."""
    path = Path(os.environ[constants.ENV_EVENTS_PATH])
    return events.EventLog(path, memory_path=os.environ[constants.ENV_EVIDENCE], node=NODE, **fixed)


def meet(directory: Path, step: int) -> None:
    """Wait until all workers of this generation are at that step; break off when one is known to be dead."""
    (directory / f"at-{GENERATION}-{step}-{RANK}").touch()
    while not all((directory / f"at-{GENERATION}-{step}-{rank}").exists() for rank in range(WORLD)):
        if (directory / "stop").exists():
            return
        if (directory / f"dead-{GENERATION}").exists():
            raise RuntimeError("[/pytorch/pair.cc:547] Connection closed by peer [127.0.0.1]:4711")
        time.sleep(PAUSE_S)


def let_go_on(directory: Path) -> None:
    """This worker has told of its error: let the agent go on whose worker has died."""
    with contextlib.suppress(FileNotFoundError):
        agent = (directory / f"dead-{GENERATION}").read_text()
        os.kill(int(agent or os.getpid()), signal.SIGCONT)


def fail(what: str, directory: Path, step: int) -> None:
    """Do what this worker is there for."""
    if what == "killed":
        # The agent reports this death when another worker has reported its error.
        agent = os.environ[constants.ENV_AGENT_PID]
        os.kill(int(agent), signal.SIGSTOP)
        write_whole(directory / f"dead-{GENERATION}", agent)
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "raises":
        raise ValueError(f"sample {os.getpid()} is bad")
    if what == "poison" and step == POISON - 1:
        raise ValueError(f"sample {os.getpid()} is bad")
    if what == "broken-gpu" and (directory / "break").exists():
        raise RuntimeError(NCCL_ERROR)
    if what == "stuck":
        log_of().emit("worker-exit", rank=RANK, signal="SIGKILL", exit_code=None, stopped=True, stuck=True)
        sys.exit(1)


def write_whole(path: Path, text: str) -> None:
    """Write a file that others read whole or not at all."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


def main(directory: Path, what: str, node: str) -> None:
    """Step until `stop` is there; on that node fail first."""
    newest = directory / "newest"
    step = int(newest.read_text()) if newest.exists() else 0
    log = log_of(rank=RANK)
    worker_exit.install_hook(log)
    worker_exit.set_generation(generation=GENERATION, read_step=lambda: step)
    report = sys.excepthook
    sys.excepthook = lambda *error: (report(*error), let_go_on(directory))  # type: ignore[func-returns-value]
    log.emit("worker-start", generation=GENERATION, step=step, world_size=WORLD, local_rank=0)
    meet(directory, step)
    first = step
    while not (directory / "stop").exists():
        if node == NODE and (step > first + 2 or not what.startswith("late-")):
            fail(what.removeprefix("late-"), directory, step)
        step += 1
        meet(directory, step)
        if RANK == 0:
            write_whole(newest, str(step))  # it may be killed here
        log.emit("step", generation=GENERATION, step=step, epoch=0)
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
