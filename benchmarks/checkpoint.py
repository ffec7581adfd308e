"""Compare snapshots, checkpoints and resumes with torch.save, dcp.save and dcp.async_save in one run.

The state is a model and Adam (jobs/trained.py), in each of the --sizes. The systems take turns, so that a
slow moment of the machine affects all of them. Ratios are therefore more reliable than seconds.

    stalls     how long training waits for a snapshot at every step (jobs/stalls.py), while a real step of
               that state runs, and for 20,000 small tensors. For the others: how long one call blocks
               training; the work left to a thread is awaited before the next call is timed
    commits    from memory to disk, digests and fsync included (jobs/commits.py). The limit: aligned writes of
               16 MiB past the page cache (O_DIRECT), and fsync, of the same bytes to the same file system
    small-tensors  what a snapshot at every step adds to a step of 80,000 small tensors, beside one plain copy
               of all of them (jobs/small_tensors.py)
    resumes    into a new process's model and optimizer (jobs/resumes.py), digests verified; the others verify
               nothing. From the node's memory, its disk with a cold page cache, and to a fresh node

Medians decide whether a target is met. torchsnapshot gets a row if it is installed (pip install torchsnapshot
importlib_metadata nest_asyncio aiofiles aiohttp). NVRx (nvidia-resiliency-ext 0.4.1) needs CUDA to save, so
it has no row.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from recovery import machine

HERE = Path(__file__).parent
SMALL = ("small-sgd", "small-adam")
SECTIONS = ("stalls", "commits", "resumes")
BLOCK_SECONDS = 10.0  # about how long a block of steps takes, at about a millisecond for each MB
STALL_MS = {"large": 2.0, "small": 5.0}
EXTRA_MB = 64.0
STATES_HELD = 6  # state and gradients, slots, and what others stage
Row = dict[str, Any]


def job(name: str, directory: Path, *arguments: object) -> Row:
    """Run a module of jobs/ in a process of its own, so that each measurement starts with clean memory."""
    directory.mkdir()
    command = ["unshare", "--net"] if "own-network" in arguments else []
    try:
        done = subprocess.run(
            [*command, sys.executable, "-m", f"jobs.{name}", str(directory), *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(
                f"jobs.{name} {' '.join(map(str, arguments))} has failed:\n{done.stderr[-4000:]}"
            )
        found: Row = json.loads(done.stdout.splitlines()[-1])
        return found
    finally:
        shutil.rmtree(directory)


def back_memory(state_bytes: int) -> None:
    """Touch free memory once and give it back.

    A virtual machine's host allocates each page at its first touch, at 0.3 GB/s here. Without this, the first
    system to touch a page would pay for it.
    """
    size = min(STATES_HELD * state_bytes, psutil.virtual_memory().available // 2)
    script = (
        "import mmap,sys; m = mmap.mmap(-1, int(sys.argv[1]))\nfor at in range(0, len(m), 4096): m[at] = 1"
    )
    subprocess.run([sys.executable, "-c", script, str(size)], check=True)


def own_network() -> list[str]:
    """Return the command prefix for a network namespace with a slow loopback, if one is available."""
    return ["own-network"] if os.geteuid() == 0 and all(map(shutil.which, ("unshare", "ip", "tc"))) else []


# ---- tables ----------------------------------------------------------------------------------------------


def verdict(value: float, target: float, *, at_most: bool) -> str:
    met = value <= target if at_most else value >= target
    return f"{'met' if met else 'MISSED'} ({'<=' if at_most else '>='} {target:g})"


def of_stalls(title: str, found: Row, target_ms: float) -> Iterator[str]:
    """Yield the table's lines for one training."""
    step, memcpy_s = found["step_without_s"], found["memcpy_s"]["median"]
    stall, first = found["stall_s"], found["first"]
    more_s = found["step_with_s"]["mean"] - step["mean"]
    yield f"\n{title}: {found['bytes'] / 1e6:.0f} MB in {found['tensors']} tensors, {found['slots']} slots"
    times = f"{step['median'] * 1e3:.0f} ms, one memcpy of the state {memcpy_s * 1e3:.1f} ms"
    yield f"  a step without snapshots takes {times}"
    yield f"  {'stall in the training thread, ms':42}{'median':>9}{'p95':>9}{'max':>9}{'x ours':>9}"
    rows = {
        "ours, at every step": stall,
        "  of it run.step() beyond snapshots off": found["commit_s"],
        "  of it the copy barrier": found["barrier_s"],
        **found["others_s"],
    }
    for name, row in rows.items():
        figures = "".join(f"{row[key] * 1e3:9.2f}" for key in ("median", "p95", "max"))
        ratio = f"{row['median'] / stall['median']:9.0f}" if name in found["others_s"] else ""
        yield f"  {name:42}{figures}{ratio}"
    first_ms = ", ".join(
        f"{(a + b) * 1e3:.1f}" for a, b in zip(first["commit_s"], first["barrier_s"][1:], strict=False)
    )
    yield f"  the first steps, commit and barrier: {first_ms} ms; snapshots from step {first['taken_at']} on"
    yield f"  target: median stall, ms: {verdict(stall['median'] * 1e3, target_ms, at_most=True)}"
    added = f"{more_s * 1e3:+.1f} ms of {step['mean'] * 1e3:.0f}"
    yield (
        f"  target: mean step over no snapshot ({added}), in memcpys, {more_s / memcpy_s:.2f}: "
        f"{verdict(more_s / memcpy_s, 1.0, at_most=True)}"
    )


def of_small_tensors(found: Row) -> Iterator[str]:
    """Yield what a snapshot adds to a step of many small tensors."""
    yield f"\n{found['tensors']} small tensors, {found['bytes'] / 1e6:.1f} MB"
    step, copy = found["step_without_s"]["median"], found["copy_s"]["median"]
    more = found["step_with_s"]["median"] - step
    yield f"  a step without snapshots takes {step * 1e3:.0f} ms, a copy of all tensors {copy * 1e3:.1f} ms"
    for name, seconds in (("snapshots add to a step", more), ("the stall", found["stall_s"]["median"])):
        yield f"  {name:42}{seconds * 1e3:9.1f} ms{seconds / copy:9.2f} copies"
    yield f"  target: added to a step, in copies: {verdict(more / copy, 1.0, at_most=True)}"


def medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(samples) for name, samples in seconds.items()}


def share_of(seconds: dict[str, list[float]], name: str, limit: str) -> float:
    """Return the speed of ``name`` relative to ``limit``: the median over rounds that measured both."""
    return statistics.median(b / a for a, b in zip(seconds[name], seconds[limit], strict=True))


def line_of(name: str, seconds: float, size: int) -> str:
    return f"  {name:42}{seconds:9.3f}{size / 1e9 / seconds:9.2f}"


def of_commits(found: Row) -> Iterator[str]:
    seconds, size = found["seconds"], found["bytes"]
    yield f"\n{'to disk, durably':44}{'seconds':>9}{'GB/s':>9}"
    for name, took in medians(seconds).items():
        yield line_of(name, took, size)
    share, ratio = share_of(seconds, "ours", "limit"), share_of(seconds, "ours", "torch.save")
    yield f"  target: of the limit, {share:.2f}: {verdict(share, 0.85, at_most=False)}"
    yield f"  target: x torch.save, {ratio:.1f}: {verdict(ratio, 5, at_most=False)}"


def of_resumes(found: Row) -> Iterator[str]:
    seconds, size = found["seconds"], found["bytes"]
    peak = {name: row["extra_bytes"] / 1e6 for name, row in found["peak"].items()}
    yield f"\n{'resume':44}{'seconds':>9}{'GB/s':>9}{'MB more':>10}{'of files':>10}"
    for name, took in medians(seconds).items():
        part = found["object_bytes"] if name.endswith("broadcast_object_list") else size
        files = f"{found['peak'][name]['file_bytes'] / 1e6:10.0f}" if name in peak else ""
        more = f"{peak[name]:10.0f}" if name in peak else ""
        yield line_of(name, took, part) + more + files
    speed = size / 1e9 / statistics.median(seconds["memory ours"])
    cold = share_of(seconds, "disk ours", "disk limit")
    fresh = share_of(seconds, "fresh ours", "fresh broadcast")
    yield f"  target: from memory, GB/s, {speed:.2f}: {verdict(speed, 3, at_most=False)}"
    yield f"  target: from cold disk, of the limit, {cold:.2f}: {verdict(cold, 0.8, at_most=False)}"
    yield f"  target: to a fresh node, of the broadcast, {fresh:.2f}: {verdict(fresh, 0.6, at_most=False)}"
    ready = share_of(seconds, "prepared ours", "prepared broadcast")
    yield f"  the same with memory touched before, {ready:.2f}: {verdict(ready, 0.6, at_most=False)}"
    if "10 Gbit/s ours" in seconds:
        linked = share_of(seconds, "10 Gbit/s ours", "10 Gbit/s broadcast")
        yield f"  the same over a link of 10 Gbit/s, {linked:.2f}: {verdict(linked, 0.6, at_most=False)}"
    most = max(more for name, more in peak.items() if name.endswith("ours"))
    yield f"  target: extra memory, MB, {most:.0f}: {verdict(most, EXTRA_MB, at_most=True)}"


# ---- the run ---------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace, base: Path) -> Row:
    """Measure everything requested and print each table as soon as it is complete."""
    result: Row = {}

    def report(key: str, found: Row, lines: Iterator[str]) -> None:
        result[key] = found
        print("\n".join(lines), flush=True)

    for size in options.sizes:
        if "stalls" in options.only:
            steps = max(3, min(20, round(BLOCK_SECONDS / (0.001 * size))))
            found = job("stalls", base / "stalls", size, options.repetitions, steps)
            report(f"stalls {size}", found, of_stalls(f"{size} MB", found, STALL_MS["large"]))
        if "commits" in options.only:
            found = job("commits", base / "commits", size, options.repetitions)
            report(f"commits {size}", found, of_commits(found))
        if "resumes" in options.only:
            found = job("resumes", base / "resumes", size, options.repetitions, *own_network())
            report(f"resumes {size}", found, of_resumes(found))
    for kind in SMALL if "small" in options.only else ():
        found = job("stalls", base / "stalls", kind, min(2, options.repetitions), 5)
        report(f"stalls {kind}", found, of_stalls(kind, found, STALL_MS["small"]))
    if "small-tensors" in options.only:
        found = job("small_tensors", base / "small", options.repetitions, 3)
        report("small-tensors", found, of_small_tensors(found))
    return result


def words(known: tuple[str, ...]) -> Any:
    """Parse a comma-separated list."""

    def parse(text: str) -> list[str]:
        if not set(text.split(",")) <= set(known):
            raise argparse.ArgumentTypeError(f"{text!r}: choose among {','.join(known)}")
        return text.split(",")

    return parse


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes",
        type=lambda text: [int(size) for size in text.split(",")],
        default=[100, 600, 3000],
        help="of the state, in MB (default 100,600,3000); 3000 needs 16 GB of memory and of the disk",
    )
    known = (*SECTIONS, "small", "small-tensors")
    parser.add_argument("--only", type=words(known), default=list(known), help=",".join(known))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where to write: the disk that is measured (default: here)")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        parent = options.dir or Path()
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="checkpoint-", dir=parent)))
        back_memory(max(options.sizes) * 10**6)
        result = measure(options, base.absolute())
    facts = machine()
    print(f"\n{facts['cores']} cores, torch {facts['torch']}, medians of {options.repetitions}")
    if options.json:
        options.json.write_text(json.dumps({"machine": facts, "rows": result}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
