"""Test that a full, broken, slow or powerless simulated disk behaves like a real one."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
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


def write(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Write a file, durably unless ``sync`` is false."""
    with path.open("wb", buffering=0) as file:
        file.write(data)
        if sync:
            os.fsync(file.fileno())


def sync_dir(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def error_name(act: Callable[[], object]) -> str:
    """Return the name of the raised error number, empty if there is none."""
    try:
        act()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return ""


def page_aligned(data: bytes) -> memoryview:
    """Return the bytes in page-aligned memory, as O_DIRECT requires."""
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memoryview(memory)


def test_full_disk_raises_enospc_until_freed(disk: SimulatedDisk) -> None:
    """Data that was there stays."""
    write(disk.path / "before", b"kept")
    disk.fill()
    assert error_name(lambda: write(disk.path / "more", bytes(100_000))) == "ENOSPC"
    assert (disk.path / "before").read_bytes() == b"kept"
    disk.free()
    write(disk.path / "more", bytes(100_000))


def test_broken_disk_raises_eio_and_keeps_its_data(disk: SimulatedDisk) -> None:
    """After `mend`, files that were open keep their error, as with a real disk."""
    write(disk.path / "kept", b"k" * MB)
    sync_dir(disk.path)
    descriptor = os.open(disk.path / "kept", os.O_RDWR)
    disk.fail()
    assert error_name((disk.path / "kept").read_bytes) == "EIO"
    assert error_name(lambda: write(disk.path / "new", b"n" * MB)) in {"EIO", "EROFS"}
    disk.mend()
    assert (disk.path / "kept").read_bytes() == b"k" * MB
    assert error_name(lambda: write(disk.path / "new", b"n" * MB)) == ""
    with open(descriptor, "r+b", buffering=0) as file:
        assert error_name(lambda: file.write(b"old") and file.truncate(0)) in {"EIO", "EROFS"}
    assert (disk.path / "kept").read_bytes() == b"k" * MB


def test_full_and_broken_are_independent(disk: SimulatedDisk) -> None:
    """`mend` does not disturb a disk that works."""
    disk.fail()
    disk.fill()
    disk.mend()
    assert error_name(lambda: write(disk.path / "more", bytes(100_000))) == "ENOSPC"
    disk.fail()
    disk.free()
    assert error_name(lambda: write(disk.path / "more", bytes(100_000))) != ""
    disk.mend()
    with (disk.path / "more").open("wb", buffering=0) as held:
        disk.mend()
        assert held.write(bytes(100_000)) == 100_000


def test_ext4_turns_read_only_after_error(tmp_path: Path) -> None:
    """Writing raises EROFS and reading works; xfs never does this."""
    with SimulatedDisk(tmp_path) as disk:
        write(disk.path / "kept", b"kept")
        sync_dir(disk.path)
        disk.turn_read_only()
        assert error_name(lambda: write(disk.path / "new", b"new")) == "EROFS"
        assert (disk.path / "kept").read_bytes() == b"kept"
        disk.mend()
        write(disk.path / "new", b"new")
    with (
        SimulatedDisk(tmp_path, disks.MIN_BYTES["xfs"], "xfs") as disk,
        pytest.raises(UsageError, match="shuts down"),
    ):
        disk.turn_read_only()


def test_rate_limit_slows_disk(disk: SimulatedDisk) -> None:
    """The test asserts an order, not a time: many writes to another disk finish first."""
    with SimulatedDisk(Path("/tmp")) as other:  # noqa: S108  the file has no name
        disk.limit_rate(20_000)
        code = "import os,sys; f=os.open(sys.argv[1],65); os.write(f,bytes(1<<20)); os.fsync(f)"
        slow = subprocess.Popen([sys.executable, "-I", "-S", "-c", code, str(disk.path / "slow")])
        for number in range(20):
            write(other.path / f"fast-{number}", bytes(10_000))
        assert slow.poll() is None
        disk.remove_rate_limit()
        assert slow.wait(30) == 0


def test_power_loss_keeps_synced_data_only(disk: SimulatedDisk) -> None:
    """Both file and name."""
    write(disk.path / "durable", b"d" * MB)
    sync_dir(disk.path)
    write(disk.path / "volatile", b"v" * MB, sync=False)
    disk.lose_power()
    assert error_name(lambda: write(disk.path / "later", b"l")) != ""
    disk.mend()
    assert (disk.path / "durable").read_bytes() == b"d" * MB
    assert not (disk.path / "volatile").exists() or (disk.path / "volatile").read_bytes() != b"v" * MB


def test_power_loss_tears_unflushed_write(tmp_path: Path) -> None:
    """The seed decides which unflushed sectors survive."""
    old, new = b"o" * MB, b"n" * MB
    left = []
    for seed in range(6):
        with SimulatedDisk(tmp_path) as disk:
            write(disk.path / "file", old)
            descriptor = os.open(disk.path / "file", os.O_WRONLY | os.O_DIRECT)
            with page_aligned(new) as block:
                os.write(descriptor, block)
            os.close(descriptor)
            disk.lose_power(seed)
            disk.mend()
            found = (disk.path / "file").read_bytes()
        left.append(found.count(b"n"))
        assert found.count(b"n") + found.count(b"o") == MB
    assert any(0 < count < MB for count in left), left
    assert 0 in left or MB in left, left


def test_machine_sees_disk_at_same_path_after_mend(tmp_path: Path) -> None:
    """An observer outside sees the same files; the host's mounts never change."""
    before = Path("/proc/self/mountinfo").read_text()
    with SimulatedDisk(tmp_path) as disk, Machines(["n0"]) as machines:
        (first,) = machines.boot()
        disk.mount_in_namespace(first.pid, "/scratch/disk")
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
