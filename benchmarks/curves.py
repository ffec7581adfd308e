"""Measure what run.log and the end of a step cost rank 0 with --log-metrics, in processor time.

    python benchmarks/curves.py

The recorder writes its lines to a real file, and wakes an agent that reads its socket in a thread. Blocks of
steps with values, without values, and of the observer of other ranks alternate; shown are the medians of the
blocks. The target is 20 us for a call.
"""

from __future__ import annotations

import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from elastic_resume.checkpoint.manifest import Position
from elastic_resume.mechanisms.curves import journal, notes
from elastic_resume.mechanisms.curves.journal import Moment
from elastic_resume.mechanisms.curves.recorder import RecomputedSteps, Recorder
from elastic_resume.mechanisms.mechanism import WorkerContext

BLOCKS, STEPS = 40, 1000


def make_context(node_dir: Path) -> WorkerContext:
    """Return the context of rank 0 of a job that begins; the recorder uses a few of its fields."""
    nothing = cast("Any", None)
    position = Position(0, 0, 0, 0)
    return WorkerContext(
        *(
            0,
            0,
            1,
            1,
            0,
            node_dir,
            {},
            {},
            print,
            nothing,
            nothing,
            nothing,
            nothing,
            lambda: position,
            nothing,
        )
    )


def measure(step: Callable[[int], None]) -> float:
    """Return the processor time of a step of a block, in microseconds."""
    start = time.thread_time()
    for number in range(1, STEPS + 1):
        step(number)
    return (time.thread_time() - start) * 1e6 / STEPS


def main() -> None:
    """Print the costs."""
    with (
        tempfile.TemporaryDirectory() as directory,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent,
    ):
        node_dir = Path(directory, "run", "n0")
        agent.bind(notes.agent_address(node_dir))
        threading.Thread(target=lambda: [agent.recv(64) for _ in iter(int, 1)], daemon=True).start()
        path = journal.record_path(node_dir, 1)
        path.parent.mkdir(parents=True)
        path.write_bytes(journal.format_begin(Moment(0, 0), 0, goes_back=False))
        recorder, other = Recorder(make_context(node_dir), 0), RecomputedSteps(0)
        values = {"loss": 0.25, "lr": 1e-3}

        def log_and_end(number: int) -> None:
            recorder.log(values)
            recorder.end_step(number)

        def log_elsewhere(number: int) -> None:
            other.log(values)
            other.end_step(number)

        kinds = {
            "a call with two values": lambda _: recorder.log(values),
            "the call and the end of the step": log_and_end,
            "the end of a step without values": recorder.end_step,
            "both on another rank, or without the setting": log_elsewhere,
        }
        found: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(BLOCKS):
            for name, step in kinds.items():
                found[name].append(measure(step))
        for name, times in found.items():
            print(f"{statistics.median(times):6.2f} us  {name}")
        recorder.close()


if __name__ == "__main__":
    main()
