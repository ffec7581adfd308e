"""The fence as another process sees it: one word, whole at any moment, gone with its owner."""

from __future__ import annotations

import math
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_resume.agent.workers.lease_page import LeasePage


@pytest.fixture
def fence() -> Iterator[LeasePage]:
    """A fence, closed at the end."""
    fence = LeasePage()
    yield fence
    fence.close()


def seen(fence: LeasePage) -> float:
    """The word, as a process reads it that knows no more than the name."""
    code = "import sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read(8))"
    return float(struct.unpack("d", subprocess.check_output([sys.executable, "-c", code, fence.path]))[0])


def test_no_worker_may_run_at_first(fence: LeasePage) -> None:
    """A lease has to be given."""
    assert seen(fence) == -math.inf


@pytest.mark.parametrize("until", [math.inf, -math.inf, 12345.678, 0.0])
def test_another_process_sees_what_was_set(until: float, fence: LeasePage) -> None:
    """By the name alone: torchelastic hands no descriptor on."""
    fence.set(1.0)
    fence.set(until)
    assert seen(fence) == until


def test_a_word_is_never_seen_half_written(fence: LeasePage) -> None:
    """Bytes of one time with bytes of another would be a third, and a worker might die or live of it."""
    times = [struct.unpack("d", bytes([byte] * 8))[0] for byte in (0x11, 0x22)]
    code = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    word = memoryview(mmap.mmap(file.fileno(), mmap.PAGESIZE, prot=mmap.PROT_READ)).cast("d")
print("ready", flush=True)
print(*{word[0] for _ in range(1_000_000)})
"""
    fence.set(times[0])
    with subprocess.Popen([sys.executable, "-c", code, fence.path], stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        while reader.poll() is None:
            for _ in range(500):
                fence.set(times[1])
                fence.set(times[0])
        assert {float(text) for text in reader.stdout.read().split()} <= set(times)
    assert reader.returncode == 0


def test_a_closed_fence_lets_no_worker_run(fence: LeasePage) -> None:
    """Stubs that have it mapped see that; others cannot open it any more."""
    fence.set(math.inf)
    with open(fence.path, "rb") as file:
        fence.close()
        assert struct.unpack("d", file.read(8)) == (-math.inf,)
    assert not Path(fence.path).exists()
    with pytest.raises(ValueError, match="released"):
        fence.set(math.inf)
    fence.close()


def test_the_fence_is_not_inherited(fence: LeasePage) -> None:
    """It ends with its owner, so a program that the agent starts must not keep it."""
    assert str(Path(fence.path).readlink()).startswith("/memfd:elastic_resume-lease")
    listed = subprocess.check_output(["ls", "-l", "/proc/self/fd"], close_fds=False, text=True)
    assert "->" in listed
    assert "memfd" not in listed


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a namespace of clocks")
def test_leases_count_in_the_clock_that_goes_on_through_a_suspend() -> None:
    """In a namespace whose CLOCK_BOOTTIME is a day ahead, as after a suspend, a guard and a node go by it."""
    tests = [
        "tests/integration/test_launcher_shim.py::test_a_lease_that_runs_out_ends_all_but_the_stub",
        "tests/unit/rendezvous/net/test_server.py::test_fence_is_a_time_of_the_clock_that_goes_on_through_a_suspend",
    ]
    command = [
        "unshare",
        "--fork",
        "--time",
        "--boottime",
        "86400",
        sys.executable,
        "-m",
        "pytest",
        "-q",
        *tests,
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 passed" in result.stdout
