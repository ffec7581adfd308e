"""Find flaky tests: ``python -m tests.support.flaky --runs 50 [PYTEST ARGUMENT ...]``.

Runs each test many times under a random load, three at a time. The load keeps processors busy, and stops
random processes of the tests. ``make flaky TESTS=… N=50`` calls it.

A failure may come from the load itself: it may continue a process that a test has just stopped.
``--undisturbed`` runs without load.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil

PARALLEL = 3
SHORTEST_S, LONGEST_S = 0.05, 0.3  # of one disturbance
HOG = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"  # ends with us


def disturb(tests: subprocess.Popen[bytes], rng: random.Random) -> None:
    """Disturb the processes of ``tests`` in random ways until it ends."""
    hogs: list[subprocess.Popen[bytes]] = []
    disturbances = [
        lambda: _take_processors(hogs),
        lambda: _stop(_choose_process(tests.pid, rng)),
    ]
    try:
        for _ in range(os.cpu_count() or 1):
            hogs.append(subprocess.Popen([sys.executable, "-c", HOG]))
            hogs[-1].send_signal(signal.SIGSTOP)
        while tests.poll() is None:
            with contextlib.suppress(psutil.Error, OSError, IndexError), rng.choice(disturbances)():
                time.sleep(rng.uniform(SHORTEST_S, LONGEST_S))
            time.sleep(rng.uniform(0, SHORTEST_S))
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def _choose_process(root: int, rng: random.Random) -> psutil.Process:
    return rng.choice(psutil.Process(root).children(recursive=True))


@contextlib.contextmanager
def _take_processors(hogs: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Keep all processors busy."""
    for hog in hogs:
        hog.send_signal(signal.SIGCONT)
    yield
    for hog in hogs:
        hog.send_signal(signal.SIGSTOP)


@contextlib.contextmanager
def _stop(process: psutil.Process) -> Iterator[None]:
    """Stop a process, unless its test has stopped it."""
    if process.status() == psutil.STATUS_STOPPED:
        yield
        return
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def main() -> int:
    """Run pytest beside the disturbance; return its exit code."""
    parser = argparse.ArgumentParser(prog="flaky", description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--undisturbed", action="store_true", help="without load")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    options, others = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # continues what it has stopped
    print(f"seed of the load: {options.seed}", flush=True)
    flags = f"-q -rf --tb=line -n {PARALLEL} --dist worksteal -p no:cacheprovider".split()
    # All tests once, then all again: repetitions meet different neighbours.
    flags += ["--count", str(options.runs), "--repeat-scope", "session"]
    tests = subprocess.Popen([sys.executable, "-m", "pytest", *flags, *others])
    try:
        if not options.undisturbed:
            disturb(tests, random.Random(options.seed))
        return tests.wait()
    finally:
        tests.send_signal(signal.SIGINT)
        try:
            tests.wait(60)  # pytest stops its nodes
        except subprocess.TimeoutExpired:
            tests.kill()


if __name__ == "__main__":
    sys.exit(main())
