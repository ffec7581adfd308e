"""Process 1 of a container: signals, orphans, the exit code. In a PID namespace of its own."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# The agent's part: orphans beside children of its own, and what it does when it is told to.
AGENT = """
import os, signal, subprocess, sys, time
from elastic_resume.agent import first

first.stand_if_first()
assert os.getpid() != 1 and os.getppid() == 1
orphan = "(setsid sleep 0.0$0 &) ; exit $0"
codes = [subprocess.run(["sh", "-c", orphan, str(number)]).returncode for number in range(5)]
assert codes == [0, 1, 2, 3, 4], codes
limit = time.monotonic() + 60
def parent(pid):
    try:
        return open(f"/proc/{pid}/stat").read().split()[3]
    except OSError:
        return "reaped meanwhile"
while any(parent(pid) == "1" for pid in os.listdir("/proc")
          if pid.isdigit() and int(pid) not in (1, os.getpid())) and time.monotonic() < limit:
    time.sleep(0.01)
assert time.monotonic() < limit, "an orphan is left"
heard = []
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT, signal.SIGRTMIN + 3):
    signal.signal(number, lambda number, frame: heard.append(number))
print("ready", flush=True)
while len(heard) < 5:
    time.sleep(0.01)
print(sorted(heard), flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)  # the kernel ends it with process 1
sys.exit(75)
"""


# Stands still where the command line is to be imported, which may take seconds.
SLOW = """
import sys
from importlib.abc import MetaPathFinder
from elastic_resume.__main__ import main

class Slow(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "elastic_resume.cli":
            print("ready", flush=True)
            sys.stdin.readline()

sys.meta_path.insert(0, Slow())
sys.exit(main())
"""


TERMINAL = """
import signal, sys
from elastic_resume.agent import first

signal.signal(signal.SIGINT, signal.default_int_handler)  # not so in a background
first.stand_if_first()
print("ready", flush=True)
print(sys.stdin.readline().strip(), flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def contained(code: str, *words: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A Python that is process 1, when it has said that it is ready; and its id as seen from here."""
    if os.getuid() != 0 and "CI" not in os.environ:
        pytest.skip("a PID namespace takes root")
    own = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", code, *words]
    root, pipe = Path(__file__).parents[1], subprocess.PIPE
    with subprocess.Popen(own, cwd=root, stdin=pipe, stdout=pipe) as outer:
        try:
            assert outer.stdout is not None
            assert outer.stdout.readline() == b"ready\n"
            (process_1,) = map(int, Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split())
            yield outer, process_1
        finally:
            outer.kill()


@pytest.mark.parametrize(("how", "code"), [("exits", 75), ("killed", 137)])
def test_process_1_passes_signals_on_reaps_orphans_and_ends_as_the_agent_does(how: str, code: int) -> None:
    """None of its own children is taken away from the agent, and what is left goes with process 1."""
    with contained(AGENT, how) as (outer, process_1):
        assert outer.stdout is not None
        sent = [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT, signal.SIGRTMIN + 3]
        for number in sent:
            os.kill(process_1, number)
        assert outer.stdout.readline().decode().strip() == str(sorted(map(int, sent)))
        assert outer.wait(60) == code


def test_a_signal_that_comes_before_the_agent_is_there_ends_it() -> None:
    """The kernel drops what process 1 neither handles nor blocks, and the pod would be killed, later."""
    with contained(SLOW, "run", "train.py") as (outer, process_1):
        assert outer.stdin is not None
        os.kill(process_1, signal.SIGTERM)
        outer.stdin.write(b"go on\n")
        outer.stdin.close()
        assert outer.wait(60) == 128 + signal.SIGTERM


def test_at_a_terminal_the_agent_reads_and_hears_ctrl_c() -> None:
    """Of the background it would be stopped for good."""
    if os.getuid() != 0 and "CI" not in os.environ:
        pytest.skip("a PID namespace takes root")
    ours, its = pty.openpty()
    apart = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", TERMINAL]
    words = ["setsid", "--ctty", "--wait", *apart]
    with subprocess.Popen(words, cwd=Path(__file__).parents[1], stdin=its, stdout=subprocess.PIPE) as outer:
        try:
            assert outer.stdout is not None
            assert outer.stdout.readline() == b"ready\n"
            os.write(ours, b"typed\n")
            assert outer.stdout.readline() == b"typed\n"
            os.write(ours, b"\x03")
            assert outer.wait(60) == 128 + signal.SIGINT
        finally:
            outer.kill()
            os.close(ours)
            os.close(its)
