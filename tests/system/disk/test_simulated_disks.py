"""Test that a full, broken, slow or powerless simulated disk behaves like a real one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elastic_resume import events
from elastic_resume.errors import MachineError, UsageError
from elastic_resume.events import EventLog
from tests.support import disks
from tests.support.disks import MB, FileSystem, SimulatedDisk
from tests.support.machines import Machines

pytestmark = pytest.mark.slow

KINDS: tuple[FileSystem, ...] = ("ext4", "xfs")


@pytest.fixture(params=KINDS)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SimulatedDisk]:
    """Yield a disk of each kind, and check that no test leaves a file open on its device."""
    with SimulatedDisk(tmp_path, disks.MIN_BYTES[request.param], request.param) as made:
        yield made
        device = os.fstat(made._device_fd).st_rdev
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor that lists them
            assert os.fstat(int(entry.name)).st_dev != device


def test_machine_sees_disk_at_same_path_after_mend(tmp_path: Path) -> None:
    """An observer outside sees the same files; the host's mounts never change."""
    before = Path("/proc/self/mountinfo").read_text()
    with SimulatedDisk(tmp_path) as disk, Machines(["n0"]) as machines:
        machines.boot()
        disk.mount_in_namespace(machines.init_pid(0), "/scratch/disk")
        for text in ("one", "two"):
            machines.run(0, ["sh", "-c", f"echo {text} > /scratch/disk/file && sync"]).wait()
            assert (disk.path / "file").read_text() == f"{text}\n"
            disk.fail()
            disk.mend()
        with pytest.raises(UsageError, match="host's mounts"):
            disk.mount_in_namespace(os.getpid(), "/mnt")
        assert Path("/proc/self/mountinfo").read_text() == before


MAKER = """
import sys, time
from pathlib import Path
from tests.support.disks import SimulatedDisk
disk = SimulatedDisk(sys.argv[1])
(disk.path / "file").write_bytes(bytes(20 << 20))
disk.limit_rate(1000)
print("made", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, None], ids=["SIGKILL", "SIGTERM", "close"])
def test_disk_disappears_with_its_maker(tmp_path: Path, how: signal.Signals | None) -> None:
    """No process, device, mount or file is left, even with much unwritten data on a slow disk.

    The drive exits after its file system, which exits when no device and no mount refer to it.
    """
    if how is None:
        disk = SimulatedDisk(tmp_path)
        (disk.path / "file").write_bytes(bytes(MB))
        drives = list_drives(os.getpid())
        disk.close()
        disk.close()
        with pytest.raises(UsageError, match="closed"):
            disk.fill()
    else:
        command = [sys.executable, "-c", MAKER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as maker:
            assert maker.stdout is not None
            assert maker.stdout.readline() == b"made\n"
            drives = list_drives(maker.pid)
            maker.send_signal(how)
    assert len(drives) == 1
    psutil.wait_procs(drives, timeout=60)
    assert not drives[0].is_running()
    assert list(tmp_path.iterdir()) == []


def list_drives(maker: int) -> list[psutil.Process]:
    """Return the drive processes that are children of ``maker``."""
    found = psutil.Process(maker).children()
    return [child for child in found if any(word.endswith("fuse_disk.py") for word in child.cmdline())]


def test_unavailable_disk_reports_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing tool, a missing directory, a size too small for the file system."""
    assert disks.unavailable_reason("ext4") == ""
    assert disks.unavailable_reason("xfs") == ""
    with pytest.raises(UsageError, match="16777216 at least"):
        SimulatedDisk(tmp_path, 1000)
    with pytest.raises(MachineError, match="No such file"):
        SimulatedDisk(tmp_path / "missing")
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    assert "apt-get install xfsprogs" in disks.unavailable_reason("xfs")


def test_event_log_writes_refused_events_later(disk: SimulatedDisk) -> None:
    """Each once and in order."""
    with contextlib.closing(EventLog(disk.path / "events.jsonl")) as log:
        disk.fill()
        for number in range(200):  # the first ones find room in a block that is theirs already
            log.emit("commit-failed", step=number, error="no space left" * 10)
        assert log.unwritten_count > 0
        disk.free()
        log.emit("commit", step=200)
        assert log.unwritten_count == 0
    assert [event["step"] for event in events.read(disk.path / "events.jsonl")] == list(range(201))
