"""A wall clock that jumps by hours costs a job nothing: whatever lasts is measured by another clock."""

from __future__ import annotations

import ctypes
import datetime as dt
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from elastic_resume.errors import MachineError, UsageError
from elastic_resume.faults import clocks
from elastic_resume.report import story
from elastic_resume.testing import Cluster
from tests.test_end_to_end import SCRIPT, check_end

HOUR_S = 3600
EPOCHS = 8  # of ten steps


def in_child(ahead_s: int) -> list[float]:
    """What a process whose clock is set so reads, beside what this one does then."""
    ours, its = os.pipe()
    go, gone = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(go, 1)
        if os.fork() == 0:  # inherited
            said = [time.time(), dt.datetime.now(dt.timezone.utc).timestamp(), time.monotonic()]
            os.write(its, repr(said).encode())
        os._exit(0)
    for seconds in (12345, ahead_s):
        clocks.set_ahead(pid, seconds)
    now = [time.time(), time.time(), time.monotonic()]
    os.write(gone, b"x")
    os.waitpid(pid, 0)
    read = [float(word) for word in os.read(ours, 1000).decode().strip("[]").split(",")]
    for descriptor in (ours, its, go, gone):
        os.close(descriptor)
    return [theirs - mine for theirs, mine in zip(read, now, strict=True)]


@pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S, 0, 10**9])
def test_a_process_reads_another_time_of_day_and_no_other_monotonic_clock(ahead_s: int) -> None:
    """And so does what it forks; the process that set the clock keeps its own."""
    before = time.time() - time.monotonic()
    wall, also_wall, monotonic = in_child(ahead_s)
    assert wall == pytest.approx(ahead_s, abs=60)
    assert also_wall == pytest.approx(ahead_s, abs=60)
    assert monotonic == pytest.approx(0, abs=60)
    assert time.time() - time.monotonic() == pytest.approx(before, abs=60)


READER = """
import time
print(flush=True)
while True:
    time.time()
"""
ATTACH, STEP, PEEK, DETACH = 16, 9, 3, 17  # sys/ptrace.h
RIP_AT = 128  # sys/user.h: of the program counter


def stop_within(pid: int, place: range) -> None:
    """Have a child stopped, by SIGSTOP, where it comes to this."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.restype = ctypes.c_long

    def trace(request: int, at: int = 0, word: int = 0) -> int:
        ctypes.set_errno(0)
        found = int(libc.ptrace(request, pid, ctypes.c_void_p(at), ctypes.c_void_p(word)))
        assert ctypes.get_errno() == 0
        return found

    trace(ATTACH)
    os.waitpid(pid, 0)
    while trace(PEEK, RIP_AT) not in place:
        trace(STEP)
        os.waitpid(pid, 0)
    trace(DETACH, word=signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)  # until then it runs, and nothing says that it is to stop


def test_no_code_is_replaced_under_a_thread_that_is_within_it() -> None:
    """It would go on in the midst of an instruction. If it was stopped there it is left so."""
    start, end = clocks._vdso(os.getpid()) or (0, 0)
    (entry, *_) = clocks._code(end - start)[1]
    with subprocess.Popen([sys.executable, "-S", "-c", READER], stdout=subprocess.PIPE) as reader:
        try:
            assert reader.stdout is not None
            reader.stdout.readline()
            start, _ = clocks._vdso(reader.pid) or (0, 0)
            stop_within(reader.pid, range(start + entry + 1, start + entry + 8))
            with pytest.raises(MachineError, match="stands where it is read"):
                clocks.set_ahead(reader.pid, 1)
            assert psutil.Process(reader.pid).status() == psutil.STATUS_STOPPED
            reader.send_signal(signal.SIGCONT)
            clocks.set_ahead(reader.pid, 1)
            assert psutil.Process(reader.pid).status() != psutil.STATUS_STOPPED
            assert reader.poll() is None
        finally:
            reader.kill()


def test_who_was_just_told_to_stop_stays_stopped() -> None:
    """Its threads may not have come to stand yet."""
    with subprocess.Popen([sys.executable, "-S", "-c", READER], stdout=subprocess.PIPE) as reader:
        try:
            assert reader.stdout is not None
            reader.stdout.readline()
            for _ in range(20):
                reader.send_signal(signal.SIGSTOP)
                with clocks._standing(reader.pid, []):
                    pass
                assert psutil.Process(reader.pid).status() == psutil.STATUS_STOPPED
                reader.send_signal(signal.SIGCONT)
        finally:
            reader.kill()


def test_a_clock_that_cannot_be_set_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process, a thread of the kernel, no such time, another machine."""
    with pytest.raises(ProcessLookupError):
        clocks.set_ahead(2**22 + 1, 1)
    with pytest.raises(UsageError, match="at most"):
        clocks.set_ahead(os.getpid(), 2**40)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(MachineError, match="x86-64, and this is Linux on aarch64"):
        clocks.set_ahead(os.getpid(), 1)


@pytest.mark.cluster
def test_a_node_whose_clock_jumps_loses_no_step(tmp_path: Path) -> None:
    """An hour back and two ahead: nobody is taken for dead, saves go on, the newest copy is still that."""
    flags = ["--save-every", "0.3s", "--snapshot-every", "1"]
    with Cluster(tmp_path, nodes=3, flags=flags) as cluster:
        kept, over = tmp_path / "diary", tmp_path / "over"
        words = ["--step-delay", "0.03", "--slow-from", str(10 * EPOCHS - 20), "--slow-until", str(over)]
        began = time.clock_gettime(time.CLOCK_BOOTTIME)
        cluster.start(SCRIPT, "--diary", str(kept), "--epochs", str(EPOCHS), *words)
        cluster.wait(commit=5, node=1)
        for seconds in (-HOUR_S, 2 * HOUR_S):
            cluster.jump_clock(1, seconds)
            step = max(event["step"] for event in cluster.events("commit"))
            cluster.wait(commit=step + 10, node=1)  # a cadence of seconds is not stuck
        assert {event["generation"] for event in cluster.events("step")} == {1}
        true_s, told_s = time.time(), cluster.events_of(1)[-1]["t"]
        assert told_s - true_s == pytest.approx(HOUR_S, abs=60)  # else nothing was tested
        cluster.jump_clock(1, -3 * HOUR_S)
        cluster.kill_worker(0)
        over.touch()
        cluster.wait(generation=2)
        assert cluster.wait_exit() == [0, 0, 0], cluster.output(1)
        assert cluster.lost_steps == 0
        check_end(kept, world_size=3, epochs=EPOCHS)
        lasted_s = time.clock_gettime(time.CLOCK_BOOTTIME) - began
        told = story.tell(cluster.events())
        assert "n1" in {clock.node for clock in told.clocks}
        # The job's part, no more: an hour that a clock jumped is in none of them.
        assert (told.until or 0) - (told.began or 0) <= lasted_s
        assert 0 < told.goodput.total_s <= lasted_s
        (recovered_s,) = (one.seconds for one in cluster.recoveries)
        assert recovered_s is not None
        assert recovered_s <= lasted_s
