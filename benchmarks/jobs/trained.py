"""The states that benchmarks/checkpoint.py saves and resumes: models of a given size, and a committer.

The large one is a stack of linear layers of 768 and 3072 with Adam: 12 bytes of state per parameter. A step
of it reads `TOKENS` rows, which is little: a larger batch gives a copy more time to overlap with. The small
one is 10,000 linear layers of 8 to 8, 20,000 tensors.
"""

# ruff: noqa: D102  what a method does is its name

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from elastic_resume import constants
from elastic_resume.state import state_dict

DEVICE = torch.device(os.environ.get("BENCH_DEVICE", "cpu"))  # of the large one
TOKENS = 128
WIDTHS = (768, 3072)
SMALL_WIDTH, SMALL_LAYERS = 8, 10_000
RUN, NODE = "bench", "node"
BLOCK_BYTES = 16 << 20
ROTATING_BYTES = 512 << 20  # of the memory into which a memcpy goes: far more than any cache


class Training:
    """A model, its optimizer, and a batch that never changes."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        self.model = model
        self.optimizer = optimizer
        self.batch = batch

    @property
    def tracked(self) -> dict[str, Any]:
        """Return the state as `er.resume` takes it."""
        return {"model": self.model, "optimizer": self.optimizer}

    @property
    def plain(self) -> dict[str, Any]:
        """Return the state as the other systems take it."""
        return {name: item.state_dict() for name, item in self.tracked.items()}

    @property
    def tensors(self) -> list[Tensor]:
        """List all tensors of the state."""
        return [leaf.tensor for leaf in state_dict.flatten(self.tracked).leaves]

    @property
    def bytes(self) -> int:
        """Return the size of the state in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def step(self) -> None:
        """Run forward, backward and the optimizer."""
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def fill(self) -> None:
        """Create the optimizer's state without a batch."""
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.01)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def prints(self) -> dict[str, str]:
        """Return the digests of all tensors."""
        return state_dict.digest_leaves(state_dict.flatten(self.tracked).leaves)


class Residual(nn.Module):
    """Many small layers, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SMALL_WIDTH, SMALL_WIDTH) for _ in range(SMALL_LAYERS))

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = rows + 1e-3 * layer(rows)
        return rows


def large(megabytes: int) -> Training:
    """Return a model and an optimizer of that many MB; the optimizer has no state yet."""
    torch.manual_seed(0)
    pairs = max(1, round(megabytes * 1e6 / (12 * 2 * WIDTHS[0] * WIDTHS[1])))
    shapes = (WIDTHS, WIDTHS[::-1])
    with DEVICE:
        model = nn.Sequential(*(nn.Linear(*shape) for _ in range(pairs) for shape in shapes))
        batch = torch.randn(TOKENS, WIDTHS[0])
    return Training(model, torch.optim.Adam(model.parameters(), lr=1e-5), batch)


def small(kind: str) -> Training:
    """Return 20,000 small tensors; ``kind`` of optimizer: sgd (with momentum) or adam."""
    torch.manual_seed(0)
    model = Residual()
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        if kind == "sgd"
        else torch.optim.Adam(model.parameters(), lr=1e-5)
    )
    return Training(model, optimizer, torch.randn(16, SMALL_WIDTH))


# ---- limits ----------------------------------------------------------------------------------------------


class Copy:
    """One memcpy of a state into touched memory, pinned if it is a GPU's state: the lower bound of a copy."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        room = min(ROTATING_BYTES, sum(tensor.nbytes for tensor in tensors))
        room = max(room, *(tensor.nbytes for tensor in tensors))
        memory = torch.zeros(room, dtype=torch.uint8, pin_memory=tensors[0].is_cuda)
        self._sources, self._targets = [tensor.detach().reshape(-1) for tensor in tensors], []
        at = 0
        for source in self._sources:
            at = -(-at // source.element_size()) * source.element_size()
            at = at if at + source.nbytes <= room else 0
            self._targets.append(memory[at : at + source.nbytes].view(source.dtype))
            at += source.nbytes

    def __call__(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self._targets, self._sources)


def aligned_memory(size: int) -> memoryview:
    """Return page-aligned memory that has been touched."""
    memory = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    memory[::4096] = bytes(len(range(0, size, 4096)))
    return memory


def write_raw(path: Path, memory: memoryview) -> None:
    """Write as fast as the disk allows: aligned writes past the page cache into a new file, and fsync."""
    path.unlink(missing_ok=True)
    size = len(memory) // 4096 * 4096
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o644)
    try:
        for at in range(0, size, BLOCK_BYTES):
            os.write(descriptor, memory[at : min(at + BLOCK_BYTES, size)])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_raw(path: Path, buffers: Sequence[memoryview]) -> None:
    """Read as fast as the disk allows: past the page cache, a request in flight for each of ``buffers``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    starts = range(0, path.stat().st_size, BLOCK_BYTES)

    def read(number: int) -> None:
        for start in starts[number :: len(buffers)]:
            os.preadv(descriptor, [buffers[number]], start)

    try:
        with ThreadPoolExecutor(len(buffers)) as readers:
            list(readers.map(read, range(len(buffers))))
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Fsync every file under ``path``, and the directory."""
    for file in [path, *path.rglob("*")] if path.is_dir() else [path, path.parent]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def forget(directory: Path) -> None:
    """Drop the files under ``path`` from the page cache."""
    for path in directory.rglob("*"):
        if path.is_file():
            sync(path)
            with open(path, "rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# ---- processes -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def start_committer(directory: Path, node: str = NODE) -> Iterator[dict[str, str]]:
    """Start a committer in a process of its own, and yield the environment of its workers."""
    command = [
        sys.executable,
        str(Path(__file__).with_name("run_committer.py")),
        str(directory / RUN / node),
        RUN,
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None  # noqa: S101  a pipe was asked for
            name = process.stdout.readline().strip()
            if not name:
                raise SystemExit("the committer did not start")
            # A worker under an agent takes its directory from the environment.
            yield {
                constants.ENV_AGENT_PID: str(process.pid),
                constants.ENV_COMMITTER: name,
                constants.ENV_CKPT_DIR: str(directory),
                constants.ENV_RUN_ID: RUN,
                constants.ENV_NODE_NAME: node,
                "ELASTIC_RESUME_SNAPSHOT_EVERY": "1",
                "ELASTIC_RESUME_SAVE_EVERY": "1000000",
            }
        finally:
            process.communicate("")


def settle() -> None:
    """Wait for what the device was asked to do."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def timed(action: Callable[[], Any]) -> float:
    """Return the seconds that a call takes, with the device's work."""
    settle()
    start = time.perf_counter()
    action()
    settle()
    return time.perf_counter() - start


def in_turns(actions: dict[str, Callable[[], Any]], repetitions: int) -> dict[str, list[float]]:
    """Time the calls one after the other, so that a slow moment of the machine affects all of them.

    The first round is not counted: it imports modules and touches memory for the first time.
    """
    times: dict[str, list[float]] = {name: [] for name in actions}
    for repetition, (name, action) in itertools.product(range(repetitions + 1), actions.items()):
        seconds = timed(action)
        if repetition:
            times[name].append(seconds)
    return times


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Return median, p95 by nearest rank (the maximum of fewer than 20), mean and maximum."""
    ordered = sorted(samples)
    return {
        "median": statistics.median(ordered),
        "p95": ordered[max(0, -(-95 * len(ordered) // 100) - 1)],
        "mean": statistics.fmean(ordered),
        "max": ordered[-1],
        "count": len(ordered),
    }
