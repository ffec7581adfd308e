"""Measure what a snapshot at every step costs a training of many small tensors; print one JSON object.

    small_tensors.py DIRECTORY ROUNDS STEPS

Blocks of STEPS steps without snapshots alternate with blocks of a snapshot at every step, ROUNDS times, and
with plain copies of all tensors into touched memory. The first step of a block is left out, because the copy
of the block before affects it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

from jobs.stalls import FIRST_STEPS, Clock
from jobs.trained import Copy, Training, small, spread, timed


def measure(training: Training, directory: Path, rounds: int, steps: int) -> dict[str, Any]:
    """Return the seconds of steps, of copies, and of the parts of a snapshot."""
    clock = Clock(training, directory)
    clock.block(clock.on, FIRST_STEPS)
    clock.block(clock.off, 1)
    copy = Copy(training.tensors)
    copy()
    taken = clock.on._generation.snapshot_scheduler.snapshotter  # noqa: SLF001  there is no public name
    with_, without, copies, thread = [], [], [], []
    for _ in range(rounds):
        with_ += clock.block(clock.on, steps)
        thread.append(taken.cpu_s)
        without += clock.block(clock.off, steps)
        copies += [timed(copy) for _ in range(steps)]
    bare = statistics.median(step["commit"] for step in without)
    return {
        "bytes": training.bytes,
        "tensors": len(training.tensors),
        "problem": taken.problem,
        "stall_s": spread([step["commit"] - bare + step["barrier"] for step in with_]),
        "thread_s": spread(thread),
        "step_with_s": spread([step["whole"] for step in with_]),
        "step_without_s": spread([step["whole"] for step in without]),
        "copy_s": spread(copies),
    }


def main() -> None:
    """Print the figures, and exit without a last checkpoint."""
    warnings.simplefilter("ignore")
    print(json.dumps(measure(small("adam"), Path(sys.argv[1]), *map(int, sys.argv[2:4]))), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
