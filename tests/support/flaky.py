"""Find tests that fail by chance: ``python -m tests.support.flaky --runs 50 [PYTEST ARGUMENT ...]``.

Runs each test many times, three at a time, and prints how often each failed. Meanwhile `disturb` takes
processors and disk away from random processes of the tests. ``make flaky TESTS=… N=50`` calls it.

A disturbance may hit a process that its test stops or continues at the same moment. Such a failure is the
disturbance's own; ``--calm`` repeats the tests without any.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

PARALLEL = 3
SHORTEST_S, LONGEST_S = 0.05, 0.3  # of one disturbance
WRITE_BYTES = 4 << 20
HOG = "while True: pass"


# ---- the pytest plugin -----------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the number of runs."""
    parser.addoption("--flaky-runs", type=int, default=1)


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make each test run several times, each with a number of its own."""
    metafunc.fixturenames.append("flaky_run")
    metafunc.parametrize("flaky_run", range(metafunc.config.getoption("--flaky-runs")))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run all tests once, then all of them again: repetitions of one test meet different neighbours."""
    items.sort(key=lambda item: item.callspec.params["flaky_run"])  # type: ignore[attr-defined]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print each test that failed, how often, and the first line of each error."""
    runs: Counter[str] = Counter()
    errors: dict[str, list[str]] = defaultdict(list)
    for outcome, reports in terminalreporter.stats.items():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                name = _without_run(report.nodeid)
                runs[name] += report.when == "call"
                if outcome in {"failed", "error"}:
                    crash = getattr(report.longrepr, "reprcrash", None)
                    errors[name].append(str(getattr(crash, "message", report.longrepr)).partition("\n")[0])
    write = terminalreporter.write_line
    terminalreporter.section(f"{len(runs)} tests, {sum(runs.values())} runs, {len(errors)} tests failed")
    for name, lines in sorted(errors.items(), key=lambda pair: -len(pair[1])):
        write(f"{len(lines):3} of {runs[name]:3}  {name}")
        for line, count in Counter(lines).most_common():
            write(f"             {count} x {line[:160]}")


def _without_run(nodeid: str) -> str:
    """Return the name of a test without the number of its run, which is its last parameter."""
    name, _, parameters = nodeid.rpartition("[")
    others = parameters.rstrip("]").rpartition("-")[0]
    return f"{name}[{others}]" if others else name


# ---- the disturbance -------------------------------------------------------------------------------------


def disturb(tests: subprocess.Popen[bytes], numbers: random.Random, directory: Path) -> None:
    """Disturb the processes of ``tests`` until it ends, each time in one way and for at most `LONGEST_S`."""
    hogs = [subprocess.Popen([sys.executable, "-c", HOG]) for _ in range(os.cpu_count() or 1)]
    for hog in hogs:
        hog.send_signal(signal.SIGSTOP)
    ways = (
        lambda: _take_processors(hogs),
        lambda: _stop(_choose_process(tests.pid, numbers)),
        lambda: _make_idle(_choose_process(tests.pid, numbers)),
        lambda: _write(directory / "load"),
    )
    try:
        while tests.poll() is None:
            with contextlib.suppress(psutil.Error, OSError, IndexError), numbers.choice(ways)():
                time.sleep(numbers.uniform(SHORTEST_S, LONGEST_S))
            time.sleep(numbers.uniform(0, SHORTEST_S))
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def _choose_process(root: int, numbers: random.Random) -> psutil.Process:
    return numbers.choice(psutil.Process(root).children(recursive=True))


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


@contextlib.contextmanager
def _make_idle(process: psutil.Process) -> Iterator[None]:
    """Let a process run only while no other wants the processor."""
    os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(process.pid, os.SCHED_OTHER, os.sched_param(0))


@contextlib.contextmanager
def _write(path: Path) -> Iterator[None]:
    """Make the disk slow by waiting for writes."""
    with open(path, "wb") as file:
        for _ in range(8):
            file.write(bytes(WRITE_BYTES))
            os.fsync(file.fileno())
    yield


def main() -> int:
    """Run pytest beside the disturbance; return its exit code."""
    parser = argparse.ArgumentParser(prog="flaky", description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--calm", action="store_true", help="without disturbance")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    options, others = parser.parse_known_args()
    print(f"seed of the disturbance: {options.seed}", flush=True)
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-p", __spec__.name, "-p", "no:cacheprovider"]
    pytest_command += [
        "-rN",
        "-n",
        str(PARALLEL),
        "--dist",
        "worksteal",
        "--flaky-runs",
        str(options.runs),
        *others,
    ]
    tests = subprocess.Popen(pytest_command)
    try:
        if not options.calm:
            with tempfile.TemporaryDirectory() as directory:
                disturb(tests, random.Random(options.seed), Path(directory))
        return tests.wait()
    finally:
        tests.kill()


if __name__ == "__main__":
    sys.exit(main())
