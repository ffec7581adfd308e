"""The lease page as another process sees it."""

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
def lease_page() -> Iterator[LeasePage]:
    """Create a lease page, closed at the end."""
    lease_page = LeasePage()
    yield lease_page
    lease_page.close()


def read_lease(lease_page: LeasePage) -> float:
    """Return the first word, as another process reads it by the name of the page."""
    code = "import sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read(8))"
    return float(
        struct.unpack("d", subprocess.check_output([sys.executable, "-c", code, lease_page.path]))[0]
    )


def test_new_page_grants_no_lease(lease_page: LeasePage) -> None:
    """No worker may run."""
    assert read_lease(lease_page) == -math.inf


@pytest.mark.parametrize("until", [math.inf, -math.inf, 12345.678, 0.0])
def test_other_process_reads_value_by_name(until: float, lease_page: LeasePage) -> None:
    """No descriptor is needed, since torchelastic passes none on."""
    lease_page.set(1.0)
    lease_page.set(until)
    assert read_lease(lease_page) == until


def test_value_is_never_read_half_written(lease_page: LeasePage) -> None:
    """A mix of the bytes of two times would be a third time."""
    times = [struct.unpack("d", bytes([byte] * 8))[0] for byte in (0x11, 0x22)]
    code = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    word = memoryview(mmap.mmap(file.fileno(), mmap.PAGESIZE, prot=mmap.PROT_READ)).cast("d")
print("ready", flush=True)
print(*{word[0] for _ in range(1_000_000)})
"""
    lease_page.set(times[0])
    with subprocess.Popen([sys.executable, "-c", code, lease_page.path], stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        while reader.poll() is None:
            for _ in range(500):
                lease_page.set(times[1])
                lease_page.set(times[0])
        assert {float(text) for text in reader.stdout.read().split()} <= set(times)
    assert reader.returncode == 0


def count_mappings(inode: str) -> int:
    """Count the mappings of a lease page in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("elastic_resume-lease" in line and inode in line for line in lines)


def test_closed_page_revokes_lease(lease_page: LeasePage) -> None:
    """Processes that have opened it see that; others cannot open it any more."""
    lease_page.set(math.inf)
    with open(lease_page.path, "rb") as file:
        inode = f" {os.fstat(file.fileno()).st_ino} "
        assert count_mappings(inode) == 1
        lease_page.close()
        assert count_mappings(inode) == 0
        assert struct.unpack("d", file.read(8)) == (-math.inf,)
    assert not Path(lease_page.path).exists()
    with pytest.raises(ValueError, match="released"):
        lease_page.set(math.inf)
    lease_page.close()


def test_page_is_not_inherited(lease_page: LeasePage) -> None:
    """Programs that the agent starts must not keep it after the agent."""
    assert str(Path(lease_page.path).readlink()).startswith("/memfd:elastic_resume-lease")
    listed = subprocess.check_output(["ls", "-l", "/proc/self/fd"], close_fds=False, text=True)
    assert "->" in listed
    assert "memfd:elastic_resume-lease" not in listed  # an earlier test of this process may have left others


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a namespace of clocks")
def test_leases_include_time_in_suspend() -> None:
    """The clock of the namespace is a day ahead, as after a suspend; supervisor and node agree on it."""
    tests = ["tests/integration/test_launcher_shim.py", "tests/unit/rendezvous/net/test_server.py"]
    selection = "test_expired_lease_ends_all_but_the_shim or clock_boottime"
    clock = ["--time", "--boottime", "86400"]
    command = ["unshare", "--fork", *clock, sys.executable, "-m", "pytest", "-q", "-k"]
    result = subprocess.run([*command, selection, *tests], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 passed" in result.stdout
