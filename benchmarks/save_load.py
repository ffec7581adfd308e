"""Save and load of a training state: elastic_resume against torch.save and torch.distributed.checkpoint.

One run, one machine, one directory, the same tensors. Every save ends with the bytes on the device (fsync
of what was written); every load ends with tensors in memory. Ours digests while it writes and verifies
while it reads; the others do not. Loads find the file in the page cache, as after a restart of the worker.

A save of ours starts from the image that is in memory already (that is how workers keep it); the time to
copy the tensors into it is a row of its own. ``ours, new`` loads into fresh memory, ``ours, reused`` into
memory that was touched before; torch.load and dcp.load are given the same two chances where they have them.
"""

# ruff: noqa: D102  the rows of the table say what each method is

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from elastic_resume.store import checkpoint
from elastic_resume.store.layout import Layout, TensorSpec
from elastic_resume.store.manifest import Manifest, Position

Tensors = dict[str, torch.Tensor]
RUN, NODE = "bench", "node"


def training_state(megabytes: int) -> Tensors:
    """A small transformer's parameters in float32, and Adam's two moments and step for each."""
    torch.manual_seed(0)
    block = {
        "attention": (2304, 768),
        "project": (768, 768),
        "up": (3072, 768),
        "down": (768, 3072),
        "norm": (768,),
    }
    tensors: Tensors = {}
    size, layer = 0, 0
    while size < megabytes * 1_000_000:
        for name, shape in block.items():
            key = f"layers.{layer}.{name}"
            weight = torch.randn(shape)
            tensors[f"model.{key}"] = weight
            tensors[f"optimizer.{key}.exp_avg"] = weight * 0.01
            tensors[f"optimizer.{key}.exp_avg_sq"] = weight.square()
            tensors[f"optimizer.{key}.step"] = torch.tensor(100.0)
            size += 12 * weight.numel()
        layer += 1
    return tensors


def layout_of(tensors: Tensors) -> Layout:
    return Layout.build(TensorSpec(name, "F32", tuple(t.shape)) for name, t in tensors.items())


def views(layout: Layout, image: memoryview) -> Tensors:
    """The tensors of an image, without a copy."""
    whole = torch.frombuffer(image, dtype=torch.uint8)
    return {
        name: whole[e.start : e.stop].view(torch.float32).view(e.shape) for name, e in layout.extents.items()
    }


def sync(path: Path) -> None:
    """Fsync every file under ``path``, and the directory."""
    for file in [path, *path.rglob("*")] if path.is_dir() else [path, path.parent]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Bench:
    """The methods to compare. Each returns what it loaded, so that it can be checked."""

    def __init__(self, tensors: Tensors, directory: Path) -> None:
        self.tensors = tensors
        self.directory = directory
        self.layout = layout_of(tensors)
        self.image = checkpoint.fresh_memory(self.layout.total_bytes)
        self.image[: len(self.layout.header)] = self.layout.header
        self.slots = views(self.layout, self.image)
        self.into = checkpoint.fresh_memory(self.layout.total_bytes)
        self.step = 0

    def copy(self) -> None:
        for name, tensor in self.tensors.items():
            self.slots[name].copy_(tensor)

    def save_ours(self) -> None:
        self.step += 1
        position = Position(0, self.step, self.step, self.step)
        manifest = Manifest(RUN, NODE, 0, 1, 1, position, time.time(), "benchmark", {})
        self.path = checkpoint.save_image(self.directory, manifest, self.image)

    def load_ours(self, into: memoryview | None = None) -> Tensors:
        image = checkpoint.read_image(self.path, checkpoint.quick_check(self.path, RUN), into)
        return views(self.layout, image)

    def save_torch(self) -> None:
        torch.save(self.tensors, self.directory / "state.pt")
        sync(self.directory / "state.pt")

    def load_torch(self) -> Tensors:
        loaded: Tensors = torch.load(self.directory / "state.pt", weights_only=True)
        return loaded

    def save_dcp(self) -> None:
        dcp_save(dict(self.tensors), checkpoint_id=self.directory / "dcp", no_dist=True)
        sync(self.directory / "dcp")

    def load_dcp(self, into: Tensors | None = None) -> Tensors:
        state: dict[str, Any] = into or {name: torch.empty_like(t) for name, t in self.tensors.items()}
        dcp_load(state, checkpoint_id=self.directory / "dcp", no_dist=True)
        return state

    def check(self, loaded: Tensors) -> None:
        for name, tensor in self.tensors.items():
            if not torch.equal(loaded[name], tensor):
                raise SystemExit(f"{name} was not loaded as it was saved")


@contextlib.contextmanager
def clean_directory(parent: Path) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="save-load-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def timed(action: Callable[[], Any], after: Callable[[Any], None] | None = None) -> float:
    start = time.perf_counter()
    result = action()
    seconds = time.perf_counter() - start
    if after:
        after(result)
    return seconds


def measure(bench: Bench, repetitions: int) -> dict[str, list[float]]:
    """Times in seconds; the methods take turns, so that a slow moment of the machine hits all alike."""
    into_dcp = {name: torch.zeros_like(t) for name, t in bench.tensors.items()}
    rows: dict[str, tuple[Callable[[], Any], bool]] = {
        "copy to image": (bench.copy, False),
        "save ours": (bench.save_ours, False),
        "save torch.save": (bench.save_torch, False),
        "save dcp.save": (bench.save_dcp, False),
        "load ours, new": (bench.load_ours, True),
        "load torch.load": (bench.load_torch, True),
        "load dcp.load, new": (bench.load_dcp, True),
        "load ours, reused": (lambda: bench.load_ours(bench.into), True),
        "load dcp.load, reused": (lambda: bench.load_dcp(into_dcp), True),
    }
    times: dict[str, list[float]] = {name: [] for name in rows}
    for repetition in range(repetitions + 1):
        for path in bench.directory.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        os.sync()
        for name, (action, loads) in rows.items():
            seconds = timed(action, bench.check if loads else None)
            if repetition:  # the first round touches memory and imports for the first time
                times[name].append(seconds)
    return times


def report(times: dict[str, list[float]], size: int) -> dict[str, Any]:
    """Print the table; return what it says."""
    median = {name: statistics.median(samples) for name, samples in times.items()}
    baseline = {"save": median["save torch.save"], "load": median["load torch.load"]}
    print(f"{size / 1e6:.0f} MB, median of {len(times['save ours'])}\n")
    print(f"{'':24}{'seconds':>9}{'min':>9}{'max':>9}{'GB/s':>8}{'x torch':>9}")
    result: dict[str, Any] = {"bytes": size, "torch": torch.__version__, "rows": {}}
    for name, seconds in median.items():
        ratio = baseline.get(name.split()[0], 0) / seconds
        row = {"seconds": seconds, "gb_per_s": size / 1e9 / seconds, "times": times[name]}
        result["rows"][name] = row | ({"times_torch": ratio} if ratio else {})
        low, high = min(times[name]), max(times[name])
        print(f"{name:24}{seconds:9.3f}{low:9.3f}{high:9.3f}{size / 1e9 / seconds:8.2f}", end="")
        print(f"{ratio:9.1f}" if ratio else "")
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=600, help="size of the state")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path(), help="where to write: the disk that is measured")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--check", action="store_true", help="exit 1 below 3 times torch.save or torch.load")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    with clean_directory(options.dir) as directory:
        bench = Bench(training_state(options.mb), directory)
        result = report(measure(bench, options.repetitions), bench.layout.total_bytes)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    ratios = [result["rows"][name]["times_torch"] for name in ("save ours", "load ours, new")]
    return int(options.check and min(ratios) < 3)


if __name__ == "__main__":
    sys.exit(main())
