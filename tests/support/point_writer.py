"""Write points through an exporter until killed, as an agent does; `killed_writers` runs this as a program.

It imports the tracker's library once, and forks a writer for each line on standard input, which has the
arguments of `write_points` as JSON. Writers print what they do next, and the step; then the program prints
how one ended.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import sys
import traceback
from pathlib import Path

from elastic_resume.mechanisms.curves.exporter import Point, parse_exporter

WIDER_FROM = 60
"""From this step on there is one more key."""


def make_point(step: int) -> Point:
    """Return the undisturbed run's point of a step."""
    values = {"loss": 1 / (step + 3), "lr": 1e-3 * step, "train/acc": math.nan if step % 7 == 0 else step / 7}
    if step % 11 == 0:
        values["norm"] = -math.inf if step % 2 else math.inf
    if step >= WIDER_FROM:
        values["val_loss"] = step**0.5
    return Point(step, 1.7e9 + step / 3, values)


def _report(verb: str, number: int) -> None:
    """Write a line to standard output with one system call, which no kill cuts in two."""
    os.write(1, f"{verb} {number}\n".encode())


def write_points(text: str, known_file: Path, then: str, numbers: tuple[int, int, int]) -> None:
    """Write the points that are missing, up to ``last_step``.

    The caller of an exporter knows only what `flush` returned. Here ``known_file`` has that number, and may
    be behind. ``then`` is what follows: ``close`` the exporter, or ``wait`` for the kill. ``numbers`` are
    the last step, the points of one call of `write`, and the steps between two calls of `flush`.
    """
    last_step, batch, flush_every = numbers
    known = json.loads(known_file.read_text()) if known_file.exists() else -1
    exporter = parse_exporter("--log-metrics", text)("job-1")
    step = exporter.open(known) + 1
    _report("open", step)
    while step <= last_step:
        points = [make_point(number) for number in range(step, min(step + batch, last_step + 1))]
        _report("write", step)
        exporter.write(points)
        step += len(points)
        if step // flush_every != (step - len(points)) // flush_every:
            _report("flush", step)
            durable = exporter.flush()
            known_file.with_suffix(".new").write_text(json.dumps(durable))
            known_file.with_suffix(".new").rename(known_file)
    _report(then, step)
    if then == "wait":
        signal.pause()
    exporter.close()


def serve() -> None:
    """Fork a writer for each line, and wait for it."""
    for line in sys.stdin:
        text, known_file, then, numbers = json.loads(line)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.setsid()  # the writer is killed with the processes that it starts
                _report("begin", os.getpid())
                write_points(text, Path(known_file), then, numbers)
                status = 0
            except BaseException:  # noqa: BLE001 - the child must not return into the loop
                traceback.print_exc()
            os._exit(status)
        _report("end", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


if __name__ == "__main__":
    for module in sys.argv[1:]:
        importlib.import_module(module)
    serve()
