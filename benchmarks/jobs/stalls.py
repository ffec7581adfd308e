"""Measure what a snapshot at every step costs training, beside other ways to save; print one JSON object.

    stalls.py DIRECTORY MEGABYTES|small-sgd|small-adam ROUNDS STEPS

Blocks of STEPS steps without snapshots alternate with blocks of a snapshot at every step, ROUNDS times.
Between them come single calls of the other systems. The first step of a block is left out, because the copy
of the block before affects it. The stall is the time of ``run.step()`` beyond the same with
``snapshot_every="off"``, and the wait of the copy barrier before ``optimizer.step()``, which two hooks around
it measure.
"""

# ruff: noqa: D102  what a method does is its name

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save, save

import elastic_resume as er
from elastic_resume.training.run import Run
from jobs.trained import Copy, Training, large, settle, small, spread, timed

FIRST_STEPS = 8  # that may meet a slot, or the optimizer's state, for the first time
MANY = 10_000  # tensors, for which others take many seconds: one way to wait and one that does not are enough
STAGED_TWICE_BYTES = 1 << 30  # more of it is not also kept in dcp's own buffers: memory is for the slots


class Clock:
    """Times the steps of a training with one run that takes snapshots and one that takes none."""

    def __init__(self, training: Training, directory: Path) -> None:
        self.training = training
        self._before = self._behind = 0.0
        training.optimizer.register_step_pre_hook(self._note_before)
        self.on = self._run(directory, "on", 1)
        self.off = self._run(directory, "off", "off")
        training.optimizer.register_step_pre_hook(self._note_behind)

    def _run(self, directory: Path, name: str, every: int | str) -> Run:
        # The run without snapshots shall not take memory for them either.
        os.environ["ELASTIC_RESUME_SNAPSHOT_MEMORY"] = "auto" if every != "off" else "off"
        return er.resume(
            **self.training.tracked, ckpt_dir=directory, run_id=name, snapshot_every=every, save_every=10**9
        )

    def _note_before(self, *_: Any) -> None:
        self._before = time.perf_counter()

    def _note_behind(self, *_: Any) -> None:
        self._behind = time.perf_counter()

    def step(self, run: Run) -> dict[str, float]:
        """Return the seconds of a step including run.step(), of run.step() alone, and of the copy barrier."""
        began = time.perf_counter()
        self.training.step()
        settle()
        trained = time.perf_counter()
        run.step()
        ended = time.perf_counter()
        return {"whole": ended - began, "commit": ended - trained, "barrier": self._behind - self._before}

    def block(self, run: Run, steps: int) -> list[dict[str, float]]:
        return [self.step(run) for _ in range(steps + 1)][1:]


def others(training: Training, directory: Path) -> dict[str, Callable[[], Any]]:
    """Return the other systems' calls, each with a function that waits for its background work."""

    def place(name: str) -> Path:
        path = directory / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        return path

    ways: dict[str, Callable[[], Any]] = {
        "torch.save": lambda: torch.save(training.plain, place("state.pt")),
        "dcp.save": lambda: save(training.plain, checkpoint_id=place("dcp"), no_dist=True),
        "dcp.async_save": lambda: async_save(training.plain, checkpoint_id=place("async"), no_dist=True),
    }
    if len(training.tensors) > MANY:
        del ways["dcp.save"]
        return ways
    if training.bytes < STAGED_TWICE_BYTES:
        options = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        stager = DefaultStager(options)
        ways["dcp.async_save, buffers kept"] = lambda: async_save(
            training.plain, checkpoint_id=place("async"), async_stager=stager, no_dist=True
        )
    try:
        from torchsnapshot import Snapshot  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415
    except ImportError:
        return ways
    ways["torchsnapshot.async_take"] = lambda: Snapshot.async_take(str(place("ts")), training.tracked)
    return ways


def call(way: Callable[[], Any]) -> float:
    """Return the seconds until training may continue; then wait for the background work."""
    start = time.perf_counter()
    behind = way()
    seconds = time.perf_counter() - start
    for name in ("result", "wait"):
        if hasattr(behind, name):
            getattr(behind, name)()
            break
    return seconds


def first_steps(clock: Clock) -> dict[str, Any]:
    """Time the very first steps: without snapshot memory yet, without optimizer state yet."""
    steps, taken = [], None
    for number in range(FIRST_STEPS):
        steps.append(clock.step(clock.on))
        if taken is None and clock.on._generation.snapshot_scheduler.snapshotter.snapshot_id:  # noqa: SLF001  there is no public name
            taken = number + 1
    return {
        "commit_s": [s["commit"] for s in steps],
        "barrier_s": [s["barrier"] for s in steps],
        "taken_at": taken,
    }


def measure(training: Training, directory: Path, rounds: int, steps: int) -> dict[str, Any]:
    clock = Clock(training, directory)
    first = first_steps(clock)
    clock.block(clock.off, 1)
    copy = Copy(training.tensors)
    ways = others(training, directory)
    with_, without, copies = [], [], []
    calls: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        block = (clock.block(clock.on, steps), clock.block(clock.off, steps))
        copy()
        took = timed(copy)
        timings = {name: call(way) for name, way in ways.items()}
        if number:  # the first round imports, and touches memory for the first time
            with_ += block[0]
            without += block[1]
            copies.append(took)
            for name, seconds in timings.items():
                calls[name].append(seconds)
    bare = statistics.median(step["commit"] for step in without)
    taken = clock.on._generation.snapshot_scheduler.snapshotter  # noqa: SLF001
    return {
        "bytes": training.bytes,
        "tensors": len(training.tensors),
        "slots": clock.on._generation.snapshot_scheduler._slot_client.slot_count,  # noqa: SLF001
        "problem": taken.problem,
        "first": first,
        "stall_s": spread([step["commit"] - bare + step["barrier"] for step in with_]),
        "commit_s": spread([step["commit"] - bare for step in with_]),
        "barrier_s": spread([step["barrier"] for step in with_]),
        "off_s": spread([step["commit"] for step in without]),
        "step_with_s": spread([step["whole"] for step in with_]),
        "step_without_s": spread([step["whole"] for step in without]),
        "memcpy_s": spread(copies),
        "others_s": {name: spread(seconds) for name, seconds in calls.items()},
    }


def main() -> None:
    directory, what = Path(sys.argv[1]), sys.argv[2]
    warnings.simplefilter("ignore")
    training = small(what.partition("-")[2]) if what.startswith("small-") else large(int(what))
    print(json.dumps(measure(training, directory, int(sys.argv[3]), int(sys.argv[4]))), flush=True)
    os._exit(0)  # without a last checkpoint


if __name__ == "__main__":
    main()
