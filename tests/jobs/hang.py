"""A training script of which one rank hangs in the way that is asked for; for tests/test_watch.py.

``hang.py HOW RANK``: in generation 1, after step 5, rank RANK does it, and nobody steps any more. Later
generations train to the end.
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

STEPS = 12
AT = 5
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
    """A native call through PyDLL keeps the GIL."""
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


def seem_hung(run: er.Run) -> None:
    """Evaluate for longer than a step may take, on one rank, and say so."""
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


def main(how: str, rank: int) -> None:
    """Train."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = er.resume(model=model, optimizer=optimizer, save_every=2)
    ddp = run.ddp(model)
    for _ in run.epochs(1):
        while run.position.step < STEPS:
            mine = run.generation == 1 and run.rank == rank
            if mine and how == "first_step" and run.position.step == 0:
                wait_for_file("first")
            if mine and how == "busy" and run.position.step == AT:
                seem_hung(run)
            if mine and how in HOW and run.position.step == AT:
                HOW[how]()
            if not (mine and how == "skip" and run.position.step == AT):
                dist.all_reduce(torch.ones(2))
            optimizer.zero_grad()
            ddp(torch.randn(4, 4)).square().mean().backward()
            optimizer.step()
            run.step()
        if how == "rests" and run.rank == rank:
            wait_for_file("rests")
    if how == "rests_after" and run.rank == rank:
        wait_for_file("rests")
    print(f"rank {run.rank} ended at step {run.position.step}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
