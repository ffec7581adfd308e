"""The worker of the benchmarks with kills: train a small model without end and record the time of each stage.

    steps.py ours|in-process|stock|torchft DIRECTORY SLEEP_S WIDTH SAVE_EVERY SETUP_S

A step trains layers of WIDTH and sleeps for SLEEP_S. Before it builds its model, each process sleeps for
SETUP_S, as for imports and an index of the data. The sleeps stand for computing on cores that a node does not
share with the other nodes. Each process appends one JSON line per mark to a file of its own in
DIRECTORY/marks, with the time of CLOCK_MONOTONIC, which all nodes of this machine share: born, imported,
built (torch imports half of itself only for the first optimizer), resumed, wrapped, then a `step` after each
optimizer step.

`ours` saves as its flags say. `in-process` is the same script with `@run.restartable`: its survivors keep
their process, so each call of the function is recorded as a worker. A worker's `left` is the time when an
exception ended that call. `stock` is what a careful user of torchrun writes: at every SAVE_EVERY-th step
every node saves with an atomic rename. At a start rank 0 reads the newest copy of any node, as if on a shared
file system, and broadcasts it. (That favours torchrun: with local disks rank 0 may be the node that has just
come back.) Nothing is fsynced, so a power loss could destroy it.

`torchft` follows the example in torchft's README: its Manager, DistributedDataParallel and Optimizer, a
replica group of one worker per node, gloo, and its defaults. It saves nothing to disk: a worker that starts
receives the state from a live peer. Its survivors keep their process, so each quorum is recorded as a worker.
"""

# ruff: noqa: E402  what is heavy is imported when the birth has been noted

from __future__ import annotations

import os
import time
from pathlib import Path


def birth() -> float:
    """Return when the kernel started this process, to 10 ms, on the clock of time.monotonic()."""
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(started) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age_s


BORN = birth()

import ctypes
import importlib
import json
import secrets
import signal
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from elastic_resume import Run

for name in filter(None, os.environ.get("BENCH_IMPORTS", "").split(",")):
    importlib.import_module(name)

PR_SET_PDEATHSIG = 1


class StepLog:
    """The marks of this process."""

    def __init__(self, directory: Path, node: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{time.monotonic_ns():020d}-{node}-{os.getpid()}"
        self._file = open(path, "a")  # noqa: SIM115  for as long as this process lives

    def mark(self, mark: str, t: float | None = None, **fields: Any) -> None:
        """Append one line."""
        line = json.dumps({"mark": mark, "t": time.monotonic() if t is None else t, **fields})
        self._file.write(line + "\n")
        self._file.flush()


class Work:
    """One step's parameters, from the command line."""

    def __init__(self, words: list[str]) -> None:
        self.sleep_s, self.width, self.save_every = float(words[0]), int(words[1]), int(words[2])
        self.setup_s = float(words[3])


def make_parts(work: Work) -> tuple[nn.Module, torch.optim.Optimizer]:
    time.sleep(work.setup_s)
    width = work.width
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, work: Work) -> None:
    """Run forward, backward and the optimizer's step, made longer by a sleep."""
    time.sleep(work.sleep_s)
    optimizer.zero_grad()
    model(torch.randn(8, work.width)).square().mean().backward()
    optimizer.step()


def train_ours(step_log: StepLog, work: Work) -> None:
    from elastic_resume import resume  # noqa: PLC0415  the other system does without

    step_log.mark("imported")
    model, optimizer = make_parts(work)
    step_log.mark("built")
    run = resume(model=model, optimizer=optimizer)
    take_steps(run, model, optimizer, work, step_log)


def train_in_process(directory: Path, work: Work, node: str) -> None:
    from elastic_resume import resume  # noqa: PLC0415  the other system does without

    imported = time.monotonic()
    model, optimizer = make_parts(work)
    starts = [BORN, imported, time.monotonic()]
    run = resume(model=model, optimizer=optimizer)

    @run.restartable
    def train() -> None:
        now = time.monotonic()
        born, imported, built = starts or (now, now, now)
        starts.clear()  # a later call runs in a process that is ready
        step_log = StepLog(directory / "marks", node)
        ranks = {"rank": run.rank, "world_size": run.world_size}
        step_log.mark("born", born, pid=os.getpid(), node=node, **ranks)
        step_log.mark("imported", imported)
        step_log.mark("built", built)
        try:
            take_steps(run, model, optimizer, work, step_log)
        finally:
            step_log.mark("left")

    train()


def take_steps(
    run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, work: Work, step_log: StepLog
) -> None:
    step_log.mark("resumed", world=f"generation {run.generation}", step=run.position.step)
    wrapped = run.ddp(model)
    step_log.mark("wrapped")
    for _ in run.epochs(1):
        while True:
            one_step(wrapped, optimizer, work)
            run.step()
            step_log.mark("step", step=run.position.step)


def train_stock(step_log: StepLog, work: Work, states: Path, node: str) -> None:
    # torchrun's workers outlive a killed agent. Here they end with it even when the benchmark itself is
    # killed; when that lets a node die it kills them anyway.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    step_log.mark("imported")
    states.mkdir(parents=True, exist_ok=True)
    model, optimizer = make_parts(work)
    step_log.mark("built")
    dist.init_process_group("gloo")
    step, world = load(model, optimizer, states)
    step_log.mark("resumed", world=world, step=step)
    wrapped = DistributedDataParallel(model)
    step_log.mark("wrapped")
    while True:
        one_step(wrapped, optimizer, work)
        step += 1
        if step % work.save_every == 0:
            save(model, optimizer, step, states / f"{node}.pt")
        step_log.mark("step", step=step)


def train_torchft(directory: Path, work: Work, node: str) -> None:
    import torchft  # noqa: PLC0415  the other systems do without

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    model, optimizer = make_parts(work)

    def load_state(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    group = torchft.ProcessGroupGloo()
    manager = torchft.Manager(
        pg=group,
        load_state_dict=load_state,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=2,
        replica_id=node,
        hostname="127.0.0.1",
    )
    wrapped = torchft.DistributedDataParallel(manager, model)
    wrapped_optimizer = torchft.Optimizer(manager, optimizer)
    step_log, quorum = None, -1
    while True:
        before = manager.current_step()
        one_step(wrapped, wrapped_optimizer, work)
        step, now = manager.current_step(), manager._quorum_id  # noqa: SLF001  there is no public one
        if step == before or not manager.is_participating():
            continue  # the step was discarded, because a replica died or joined
        if now != quorum or step_log is None:
            quorum, step_log = now, StepLog(directory / "marks", node)
            ranks = {"rank": group.rank(), "world_size": group.size()}
            step_log.mark("born", pid=os.getpid(), node=node, **ranks)
            for mark in ("imported", "built", "wrapped"):
                step_log.mark(mark)
            step_log.mark("resumed", world=f"quorum {quorum}", step=step - 1)
        step_log.mark("step", step=step)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, states: Path) -> tuple[int, str]:
    """Load the newest copy on all ranks; return its step, and a name for the new world."""
    shared: list[Any] = [None]
    if dist.get_rank() == 0:
        copies = [torch.load(path, weights_only=True) for path in states.glob("*.pt")]
        shared[0] = (max(copies, key=lambda copy: int(copy["step"]), default=None), secrets.token_hex(4))
    dist.broadcast_object_list(shared)
    newest, world = shared[0]
    if newest is None:
        return 0, world
    model.load_state_dict(newest["model"])
    optimizer.load_state_dict(newest["optimizer"])
    return int(newest["step"]), world


def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, path: Path) -> None:
    temporary = path.with_suffix(f".{os.getpid()}")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, temporary)
    temporary.replace(path)


def main() -> None:
    system, directory, work = sys.argv[1], Path(sys.argv[2]), Work(sys.argv[3:])
    is_ours = system in ("ours", "in-process")
    node = os.environ["ELASTIC_RESUME_NODE_NAME" if is_ours else "BENCHMARK_NODE"]
    if system == "torchft":
        train_torchft(directory, work, node)
    if system == "in-process":  # it may start before it has a rank
        train_in_process(directory, work, node)
    step_log = StepLog(directory / "marks", node)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    step_log.mark("born", BORN, pid=os.getpid(), node=node, rank=rank, world_size=world_size)
    if system == "ours":
        train_ours(step_log, work)
    else:
        train_stock(step_log, work, directory / "states", node)


if __name__ == "__main__":
    main()
