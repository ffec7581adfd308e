"""Training script whose rank 1 hangs as its arguments say; for tests/integration/test_hang_detector.py.

``hang.py HOW HOW ...``: in generation 1 rank 1 does the first of them before step 6, in generation 2 the
second before step 12, and so on. Later generations train to the end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import elastic_resume as er
from elastic_resume import constants
from elastic_resume.agent.workers import run_main

RANK = 1
STEPS = 6
PAUSE_S = 600


class Stuck(Dataset[Tensor]):
    """A dataset whose items take forever."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(PAUSE_S)
        return torch.tensor(index)


def stop() -> None:
    """Stop this process, as an operator or a debugger would."""
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(PAUSE_S)  # the request for stacks continues the process; it must not run to later hangs


def hold_gil() -> None:
    """Hold the GIL in a native call through PyDLL, again and again, since a signal interrupts it."""
    while True:
        ctypes.PyDLL(None).sleep(PAUSE_S)


def hold_gil_in_a_thread() -> None:
    """Hold the GIL in another thread than the main thread."""
    threading.Thread(target=hold_gil, daemon=True).start()
    time.sleep(0.1)


def wait_for_data() -> None:
    """Wait for a DataLoader worker that never delivers."""
    for _ in DataLoader(Stuck(), num_workers=1):
        pass


def skip() -> None:
    """Call another collective than the other ranks, which call all_reduce."""
    dist.barrier()


def sleep_in_kernel() -> None:
    """Wait in state D for the child of a vfork, which ends with the test."""
    libc = ctypes.PyDLL(None)
    if libc.vfork() == 0:
        libc.pause()


def lock() -> None:
    """Wait in plain Python for an event that is never set."""
    threading.Event().wait()


def take_time(run: er.Run) -> None:
    """Be slow in the first step and while busy, which is no hang."""
    if run.position.step == 0:
        wait_for_file("first")
    if run.position.step == STEPS:
        with run.busy("evaluation"), run.busy("nested"):
            wait_for_file("busy")


def wait_for_file(name: str) -> None:
    """Create NAME-waits, and wait until the test creates NAME."""
    Path(f"{name}-waits").touch()
    while not Path(name).exists():
        time.sleep(0.02)


HOW = {
    function.__name__: function
    for function in (stop, hold_gil, hold_gil_in_a_thread, wait_for_data, skip, sleep_in_kernel, lock)
}


def main(plan: list[str]) -> None:
    """Train, and hang in generation N as the Nth word of ``plan`` says."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    generation = int(os.environ[constants.ENV_GENERATION])
    how = plan[generation - 1] if generation <= len(plan) else ""
    if how == "hold_gil_in_a_thread":
        os.environ["TORCH_FR_BUFFER_SIZE"] = "0"  # read when the first process group is made
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = er.resume(model=model, optimizer=optimizer, save_every=1)
    ddp = run.ddp(model)
    end = STEPS * (len(plan) + 1)
    for _ in run.epochs(1):
        while run.position.step < end:
            hangs_now = run.rank == RANK and run.position.step == STEPS * run.generation - 1
            if how == "patience" and run.rank == RANK:
                take_time(run)
            elif hangs_now and how in HOW:
                run.save()
                HOW[how]()
            if not (hangs_now and how == "skip"):
                dist.all_reduce(torch.ones(2))
            optimizer.zero_grad()
            ddp(torch.randn(4, 4)).square().mean().backward()
            optimizer.step()
            run.step()
            if how == "slow":
                time.sleep(0.1)  # gives the test time to act
    if how == "patience" and run.rank == RANK:
        with run.busy("export"):
            wait_for_file("after")
    print(f"rank {run.rank} ended at step {run.position.step}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
    run_main.exit_without_freeing(0)  # freeing torch takes 0.4 s of processor time
