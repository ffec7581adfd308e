"""Save and load of a training state: elastic_resume against torch.save and torch.distributed.checkpoint.

One run, one machine, one directory, the same model and Adam. Every save ends with the bytes on the device
(fsync of what was written). A save of ours starts from the image that workers keep in memory; the copy
into it, which is all that training waits for, is a row of its own. Ours digests while it writes.

A resume is a new process, so each load is timed in one, from the file to a model and an optimizer that can
take the next step: with the file in the page cache ("cached": a worker was restarted) and without ("cold":
the node was). Ours verifies every byte before any is loaded; the others verify nothing.
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

import psutil
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from elastic_resume.store import checkpoint
from elastic_resume.store.catalog import Catalog
from elastic_resume.store.layout import Layout
from elastic_resume.store.manifest import Manifest, Position
from elastic_resume.worker import state
from elastic_resume.worker.image import Image
from elastic_resume.worker.saver import capture

RUN, NODE = "bench", "node"


def training_state(megabytes: int) -> dict[str, Any]:
    """A stack of linear layers in float32 and Adam, whose two moments and steps are there."""
    torch.manual_seed(0)
    pairs = max(1, round(megabytes * 1e6 / (12 * 2 * 768 * 3072)))
    model = nn.Sequential(*(nn.Linear(*shape) for _ in range(pairs) for shape in ((768, 3072), (3072, 768))))
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}


def stepped(tracked: dict[str, Any]) -> dict[str, Any]:
    """The same after one step, so that the optimizer has its state."""
    for parameter in tracked["model"].parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    tracked["optimizer"].step()
    tracked["optimizer"].zero_grad()
    return tracked


def sync(path: Path) -> None:
    """Fsync every file under ``path``, and the directory."""
    for file in [path, *path.rglob("*")] if path.is_dir() else [path, path.parent]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Bench:
    """The ways to save."""

    def __init__(self, tracked: dict[str, Any], directory: Path) -> None:
        self.tracked = tracked
        self.directory = directory
        self.image: Image | None = None
        self.copy()
        self.step = 0

    @property
    def plain(self) -> dict[str, Any]:
        return {name: item.state_dict() for name, item in self.tracked.items()}

    def copy(self) -> None:
        self.flat = state.flatten(self.tracked)
        self.image = capture(self.flat, self.image)

    def save_ours(self) -> None:
        self.step += 1
        position = Position(0, self.step, self.step, self.step)
        manifest = Manifest(RUN, NODE, 0, 1, 1, position, time.time(), "benchmark", self.flat.skeleton)
        if self.image is not None:
            checkpoint.save_image(self.directory, manifest, self.image.memory)

    def write_raw(self) -> None:
        """What the disk takes at most: the same bytes in one file, past the page cache, and fsync."""
        if self.image is None:
            return
        path = self.directory / "raw"
        path.unlink(missing_ok=True)
        size = len(self.image.memory) // 4096 * 4096
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_DIRECT", 0), 0o644)
        try:
            for at in range(0, size, 16 << 20):
                os.write(descriptor, self.image.memory[at : min(at + (16 << 20), size)])
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def save_torch(self) -> None:
        torch.save(self.plain, self.directory / "state.pt")
        sync(self.directory / "state.pt")

    def save_dcp(self) -> None:
        dcp_save(self.plain, checkpoint_id=self.directory / "dcp", no_dist=True)
        sync(self.directory / "dcp")


def load_ours(tracked: dict[str, Any], directory: Path) -> None:
    newest = Catalog(directory, RUN).valid()[0]
    manifest = checkpoint.quick_check(newest.path, RUN)
    memory = checkpoint.map_image(newest.path, manifest)
    image = Image(Layout.parse(memory, len(memory)), memory)
    state.load(tracked, manifest.state, image.tensor)


def load_torch(tracked: dict[str, Any], directory: Path) -> None:
    loaded = torch.load(directory / "state.pt", weights_only=True)
    for name, item in tracked.items():
        item.load_state_dict(loaded[name])


def load_dcp(tracked: dict[str, Any], directory: Path) -> None:
    # DCP loads in place: the optimizer's state must be there first.
    plain = {name: item.state_dict() for name, item in stepped(tracked).items()}
    dcp_load(plain, checkpoint_id=directory / "dcp", no_dist=True)
    for name, item in tracked.items():
        item.load_state_dict(plain[name])


LOADS: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "ours": load_ours,
    "torch.load": load_torch,
    "dcp.load": load_dcp,
}


def prints(tracked: dict[str, Any]) -> dict[str, str]:
    return state.fingerprints(state.flatten(tracked).leaves)


def load_here(method: str, directory: Path, megabytes: int) -> int:
    """Time one load in this process, check what it gave, and print the seconds."""
    tracked = training_state(megabytes)
    with torch.no_grad():
        for parameter in tracked["model"].parameters():
            parameter.zero_()
    start = time.perf_counter()
    LOADS[method](tracked, directory)
    seconds = time.perf_counter() - start
    if prints(tracked) != json.loads((directory / "expected.json").read_text()):
        raise SystemExit(f"{method}: what was loaded is not what was saved")
    print(seconds)
    return 0


def load_elsewhere(method: str, directory: Path, megabytes: int) -> float:
    """`load_here` in a new process."""
    command = [sys.executable, __file__, "--load", method, "--dir", str(directory), "--mb", str(megabytes)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def forget(directory: Path, *, recall: bool) -> None:
    """Take the files out of the page cache; with ``recall`` read them all into it again."""
    for path in directory.rglob("*"):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                while recall and file.read(16 << 20):
                    pass


def back_memory(share: float = 0.6) -> None:
    """Touch free memory once and give it back.

    A virtual machine's host finds each page at its first touch, at 0.3 GB/s here, whoever touches it. Without
    this the figures tell which method was the first to get some page.
    """
    memory = checkpoint.fresh_memory(int(psutil.virtual_memory().available * share))
    for at in range(0, len(memory), 4096):
        memory[at] = 1


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


def measure(bench: Bench, repetitions: int, megabytes: int) -> dict[str, list[float]]:
    """Times in seconds; the methods take turns, so that a slow moment of the machine hits all alike."""
    saves = {
        "copy to image": bench.copy,
        "save (disk limit)": bench.write_raw,
        "save ours": bench.save_ours,
        "save torch.save": bench.save_torch,
        "save dcp.save": bench.save_dcp,
    }
    expected = prints(bench.tracked)
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
            forget(bench.directory, recall=kind == "cached")
            seconds = load_elsewhere(method, bench.directory, megabytes)
            times.setdefault(f"{kind} {method}", []).append(seconds)
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
        return load_here(options.load, options.dir, options.mb)
    back_memory()
    with clean_directory(options.dir) as directory:
        bench = Bench(stepped(training_state(options.mb)), directory)
        size = sum(leaf.tensor.nbytes for leaf in bench.flat.leaves)
        result = report(measure(bench, options.repetitions, options.mb), size)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    ratios = [result["rows"][name]["times_torch"] for name in ("save ours", "cold ours", "cached ours")]
    return int(options.check and min(ratios) < 3)


if __name__ == "__main__":
    sys.exit(main())
