"""A training script of which rank 1 hangs in the ways that are asked for; for tests/integration/test_hang_detector.py.

``hang.py HOW HOW …``: in generation 1 it does the first of them, before step 6, and nobody steps any more; in
generation 2 the second, before step 12; and so on. What comes after them trains to the end.
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

RANK = 1
STEPS = 6
PAUSE_S = 600


class Stuck(Dataset[Tensor]):
    """Data that never comes."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(PAUSE_S)
        return torch.tensor(index)


def stop() -> None:
    """As an operator would, or a debugger."""
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_gil() -> None:
    """A native call through PyDLL keeps the GIL, and again when a question for stacks has ended it."""
    while True:
        ctypes.PyDLL(None).sleep(PAUSE_S)


def hold_gil_in_a_thread() -> None:
    """The main thread waits for the GIL, and is not the one that has it."""
    threading.Thread(target=hold_gil, daemon=True).start()
    time.sleep(0.1)


def wait_for_data() -> None:
    """The worker of a DataLoader does not answer."""
    for _ in DataLoader(Stuck(), num_workers=1):
        pass


def skip() -> None:
    """All others call all_reduce here."""
    dist.barrier()


def sleep_in_kernel() -> None:
    """A parent waits for the child of its vfork in state D, and this child ends with the test."""
    libc = ctypes.PyDLL(None)
    if libc.vfork() == 0:
        libc.pause()


def lock() -> None:
    """Plain Python that waits for what nobody does."""
    threading.Event().wait()


def take_time(run: er.Run) -> None:
    """Be slow where a rank may be: in its first step, and where it says that it is busy."""
    if run.position.step == 0:
        wait_for_file("first")
    if run.position.step == STEPS:
        with run.busy("evaluation"), run.busy("nested"):
            wait_for_file("busy")


def wait_for_file(name: str) -> None:
    """Wait until the test makes a file, and say that we do."""
    Path(f"{name}-waits").touch()
    while not Path(name).exists():
        time.sleep(0.02)


HOW = {
    one.__name__: one
    for one in (stop, hold_gil, hold_gil_in_a_thread, wait_for_data, skip, sleep_in_kernel, lock)
}


def main(plan: list[str]) -> None:
    """Train."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = er.resume(model=model, optimizer=optimizer, save_every=1)
    ddp = run.ddp(model)
    how = plan[run.generation - 1] if run.generation <= len(plan) else ""
    end = STEPS * (len(plan) + 1)
    for _ in run.epochs(1):
        while run.position.step < end:
            mine = run.rank == RANK and run.position.step == STEPS * run.generation - 1
            if how == "patience" and run.rank == RANK:
                take_time(run)
            elif mine and how in HOW:
                run.save()
                HOW[how]()
            if not (mine and how == "skip"):
                dist.all_reduce(torch.ones(2))
            optimizer.zero_grad()
            ddp(torch.randn(4, 4)).square().mean().backward()
            optimizer.step()
            run.step()
            if how == "slow":
                time.sleep(0.1)  # the test does something in mid-run
    if how == "patience" and run.rank == RANK:
        wait_for_file("after")
    print(f"rank {run.rank} ended at step {run.position.step}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
