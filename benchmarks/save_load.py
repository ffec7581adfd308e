"""Save and load of a training state: elastic_resume against torch.save and torch.distributed.checkpoint.

One run, one machine, one directory, the same tensors. Every save ends with the bytes on the device (fsync
of what was written); every load ends with all tensors in memory. Ours digests while it writes and verifies
while it reads; the others do not. A save of ours starts from the image that workers keep in memory; the
copy of the tensors into it is a row of its own.

A resume is a new process, so each load is timed in one, into memory it has not touched before: with the
file in the page cache ("cached": a worker was restarted) and without ("cold": the node was). "ours" are
tensors on the verified mapping of the file, which touches no new memory; "ours, copied" are read into memory.
"""

# ruff: noqa: D102  the rows of the table say what each method is

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from elastic_resume.store import checkpoint
from elastic_resume.store.catalog import Catalog
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
        self.step = 0

    def copy(self) -> None:
        for name, tensor in self.tensors.items():
            self.slots[name].copy_(tensor)

    def save_ours(self) -> None:
        self.step += 1
        position = Position(0, self.step, self.step, self.step)
        manifest = Manifest(RUN, NODE, 0, 1, 1, position, time.time(), "benchmark", {})
        checkpoint.save_image(self.directory, manifest, self.image)

    def save_torch(self) -> None:
        torch.save(self.tensors, self.directory / "state.pt")
        sync(self.directory / "state.pt")

    def save_dcp(self) -> None:
        dcp_save(dict(self.tensors), checkpoint_id=self.directory / "dcp", no_dist=True)
        sync(self.directory / "dcp")


def load_ours(directory: Path) -> Tensors:
    newest = Catalog(directory, RUN).valid()[0]
    image = checkpoint.map_image(newest.path, checkpoint.quick_check(newest.path, RUN))
    return views(Layout.parse(image, len(image)), image)


def load_ours_copied(directory: Path) -> Tensors:
    newest = Catalog(directory, RUN).valid()[0]
    image = checkpoint.read_image(newest.path, checkpoint.quick_check(newest.path, RUN))
    return views(Layout.parse(image, len(image)), image)


def load_torch(directory: Path) -> Tensors:
    loaded: Tensors = torch.load(directory / "state.pt", weights_only=True)
    return loaded


def load_dcp(directory: Path) -> Tensors:
    shapes = json.loads((directory / "expected.json").read_text())
    state: dict[str, Any] = {name: torch.empty(shape) for name, (shape, _) in shapes.items()}
    dcp_load(state, checkpoint_id=directory / "dcp", no_dist=True)
    return state


LOADS: dict[str, Callable[[Path], Tensors]] = {
    "ours": load_ours,
    "ours, copied": load_ours_copied,
    "torch.load": load_torch,
    "dcp.load": load_dcp,
}


def digest(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(tensor.reshape(-1).view(torch.uint8).numpy().data)


def load_here(method: str, directory: Path) -> int:
    """Time one load in this process, check what it gave, and print the seconds."""
    start = time.perf_counter()
    loaded = LOADS[method](directory)
    seconds = time.perf_counter() - start
    for name, (_, expected) in json.loads((directory / "expected.json").read_text()).items():
        if digest(loaded[name]) != expected:
            raise SystemExit(f"{method}: {name} was not loaded as it was saved")
    print(seconds)
    return 0


def load_elsewhere(method: str, directory: Path) -> float:
    """`load_here` in a new process."""
    command = [sys.executable, __file__, "--load", method, "--dir", str(directory)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def forget(directory: Path) -> None:
    """Take the files out of the page cache."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


@contextlib.contextmanager
def clean_directory(parent: Path) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="save-load-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def timed(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure(bench: Bench, repetitions: int) -> dict[str, list[float]]:
    """Times in seconds; the methods take turns, so that a slow moment of the machine hits all alike."""
    saves = {
        "copy to image": bench.copy,
        "save ours": bench.save_ours,
        "save torch.save": bench.save_torch,
        "save dcp.save": bench.save_dcp,
    }
    expected = {name: (list(t.shape), digest(t)) for name, t in bench.tensors.items()}
    times: dict[str, list[float]] = {}
    for repetition in range(repetitions + 1):
        for path in bench.directory.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        os.sync()
        (bench.directory / "expected.json").write_text(json.dumps(expected))
        for name, save in saves.items():
            seconds = timed(save)
            if repetition:  # the first round imports, and touches memory for the first time
                times.setdefault(name, []).append(seconds)
    for _ in range(repetitions):
        for kind, method in itertools.product(("cold", "cached"), LOADS):
            if kind == "cold":
                forget(bench.directory)
            times.setdefault(f"{kind} {method}", []).append(load_elsewhere(method, bench.directory))
    return times


def report(times: dict[str, list[float]], size: int) -> dict[str, Any]:
    """Print the table; return what it says."""
    median = {name: statistics.median(samples) for name, samples in times.items()}
    baseline = {
        "save": median["save torch.save"],
        "cold": median["cold torch.load"],
        "cached": median["cached torch.load"],
    }
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
    parser.add_argument("--load", choices=LOADS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    if options.load:
        return load_here(options.load, options.dir)
    with clean_directory(options.dir) as directory:
        bench = Bench(training_state(options.mb), directory)
        result = report(measure(bench, options.repetitions), bench.layout.total_bytes)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    ratios = [result["rows"][name]["times_torch"] for name in ("save ours", "cold ours", "cached ours")]
    return int(options.check and min(ratios) < 3)


if __name__ == "__main__":
    sys.exit(main())
