"""The worker of the benchmarks with kills: train a small model without end and record the time of each stage.

    steps.py ours|in-process|stock|dcp|torchft DIRECTORY MODEL SLEEP_S SAVE_EVERY SETUP_S

MODEL is the width of three layers, or `gpt` (gpt.py), or `gpt-compiled`. A step trains it and sleeps for
SLEEP_S. Before it builds its model, each process sleeps for SETUP_S, as for imports and an index of the data.
The sleeps stand for computing on cores that a node does not share with the other nodes. Each process appends
one JSON line per mark to a file of its own in DIRECTORY/marks, with the time of CLOCK_MONOTONIC, which all
nodes of this machine share: born, imported, built (torch imports half of itself only for the first
optimizer), resumed, wrapped, then a `step` after each optimizer step.

`ours` saves as its flags say. `in-process` is the same script with `@run.restartable`: its survivors keep
their process, so each call of the function is recorded as a worker. A worker's `left` is the time when an
exception ended that call. `stock` is what a careful user of torchrun writes: at every SAVE_EVERY-th step
every node saves with an atomic rename. At a start rank 0 reads the newest copy of any node, as if on a shared
file system, and broadcasts it. (That favours torchrun: with local disks rank 0 may be the node that has just
come back.) Nothing is fsynced, so a power loss could destroy it. `dcp` is the same with dcp.async_save into a
directory that all nodes share; a start reads its newest directory that is complete.

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
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path[0] = str(Path(__file__).parents[1])  # Python put the directory of this file there
from jobs import gpt

if TYPE_CHECKING:
    from elastic_resume import Run

for name in filter(None, os.environ.get("BENCH_IMPORTS", "").split(",")):
    importlib.import_module(name)

PR_SET_PDEATHSIG = 1
DEVICE = torch.device(os.environ.get("BENCH_DEVICE", "cpu"))


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
        self.model, self.sleep_s, self.save_every = words[0], float(words[1]), int(words[2])
        self.setup_s = float(words[3])


def make_parts(work: Work) -> tuple[nn.Module, torch.optim.Optimizer]:
    time.sleep(work.setup_s)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with DEVICE:
        model = gpt.GPT() if work.model.startswith("gpt") else make_layers(int(work.model))
    if work.model == "gpt-compiled":
        model.compile()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def make_layers(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
    )


def loss_of(model: nn.Module, work: Work) -> Tensor:
    if work.model.startswith("gpt"):
        loss: Tensor = model(torch.randint(gpt.VOCABULARY, (1, gpt.TOKENS + 1), device=DEVICE))
        return loss
    output: Tensor = model(torch.randn(8, int(work.model), device=DEVICE))
    return output.square().mean()


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, work: Work) -> None:
    """Run forward, backward and the optimizer's step, made longer by a sleep."""
    time.sleep(work.sleep_s)
    optimizer.zero_grad()
    loss_of(model, work).backward()
    optimizer.step()


def share_device() -> None:
    """Let the ranks talk through gloo: they share the device, which NCCL refuses."""
    if DEVICE.type == "cuda":
        dist.init_process_group("gloo")


def train_ours(step_log: StepLog, work: Work) -> None:
    from elastic_resume import resume  # noqa: PLC0415  the other system does without

    step_log.mark("imported")
    model, optimizer = make_parts(work)
    step_log.mark("built")
    share_device()
    run = resume(model=model, optimizer=optimizer)
    take_steps(run, model, optimizer, work, step_log)


def train_in_process(directory: Path, work: Work, node: str) -> None:
    from elastic_resume import resume  # noqa: PLC0415  the other system does without

    imported = time.monotonic()
    model, optimizer = make_parts(work)
    starts = [BORN, imported, time.monotonic()]
    share_device()
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


def train_stock(step_log: StepLog, work: Work, system: str, states: Path, node: str) -> None:
    # torchrun's workers outlive a killed agent. Here they end with it even when the benchmark itself is
    # killed; when that lets a node die it kills them anyway.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    step_log.mark("imported")
    model, optimizer = make_parts(work)
    step_log.mark("built")
    dist.init_process_group("gloo")
    world: list[Any] = [secrets.token_hex(4)]
    dist.broadcast_object_list(world)
    store = DcpStore(states) if system == "dcp" else FileStore(states, node)
    step = store.load(model, optimizer)
    step_log.mark("resumed", world=world[0], step=step)
    wrapped = DistributedDataParallel(model)
    step_log.mark("wrapped")
    while True:
        one_step(wrapped, optimizer, work)
        step += 1
        if step % work.save_every == 0:
            store.save(model, optimizer, step)
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


class FileStore:
    """A file of torch.save for each node, in a directory that rank 0 sees whole."""

    def __init__(self, states: Path, node: str) -> None:
        states.mkdir(parents=True, exist_ok=True)
        self._states, self._path = states, states / f"{node}.pt"

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Load the newest copy on all ranks; return its step."""
        shared: list[Any] = [None]
        if dist.get_rank() == 0:
            copies = [torch.load(path, weights_only=True) for path in self._states.glob("*.pt")]
            shared[0] = max(copies, key=lambda copy: int(copy["step"]), default=None)
        dist.broadcast_object_list(shared)
        if (newest := shared[0]) is None:
            return 0
        model.load_state_dict(newest["model"])
        optimizer.load_state_dict(newest["optimizer"])
        return int(newest["step"])

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Save with an atomic rename."""
        temporary = self._path.with_suffix(f".{os.getpid()}")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, temporary)
        temporary.replace(self._path)


class DcpStore:
    """A directory of dcp.async_save for each step, shared by all nodes. One is whole before the next."""

    def __init__(self, states: Path) -> None:
        from torch.distributed import checkpoint  # noqa: PLC0415  the other systems do without
        from torch.distributed.checkpoint import state_dict  # noqa: PLC0415

        states.mkdir(parents=True, exist_ok=True)
        self._states, self._dcp, self._dicts = states, checkpoint, state_dict
        self._saving: Any = None
        self._group = dist.new_group()  # a save in the background needs one that training does not use

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Load the newest complete directory on all ranks; return its step."""
        steps = [int(path.parent.name) for path in self._states.glob("*/.metadata")]
        newest: list[Any] = [max(steps, default=0)]
        dist.broadcast_object_list(newest)
        if newest[0]:
            state = self._state(model, optimizer)
            self._dcp.state_dict_loader.load(state, checkpoint_id=self._states / str(newest[0]))
            self._dicts.set_state_dict(
                model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
        return int(newest[0])

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Begin to save; the last one's end is awaited."""
        if self._saving is not None:
            self._saving.result()
        saver = self._dcp.state_dict_saver
        self._saving = saver.async_save(
            self._state(model, optimizer),
            checkpoint_id=self._states / str(step),
            process_group=self._group,
        )

    def _state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), self._dicts.get_state_dict(model, optimizer), strict=True))


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
        train_stock(step_log, work, system, directory / "states", node)


if __name__ == "__main__":
    main()
