"""Simulate disks: a real file system of the kernel on a drive that can be made to fail.

The kernel's block layer and file system decide what a full, slow or broken disk does to a program, and what
survives a power loss. So they are real here: ext4 or xfs on a loop device. Only the drive below them is a
process of ours (`fuse_disk.py`), which serves the device's backing file by FUSE. It can return errors, be
slow, and lose its write cache. This needs root, loop and fuse.

Nothing is mounted or named on the host: mounts are detached, and the image is a file without a name.
Everything is held by descriptors of the process that made it, so the kernel removes it when that process
exits. Synced data is there after `SimulatedDisk.mend`; other data may be. A file system that met an error may
have turned read-only (ext4) or shut down (xfs). `mend` mounts it again, but files that were open keep
failing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from elastic_resume.errors import MachineError, UsageError
from tests.support import mounts

FileSystem = Literal["ext4", "xfs"]
MB = 1 << 20
MIN_BYTES = {"ext4": 16 * MB, "xfs": 300 * MB}  # mkfs.xfs refuses less; images are sparse
_MKFS: Mapping[str, list[str]] = {
    "ext4": ["mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=1,nodiscard"],
    "xfs": ["mkfs.xfs", "-q", "-f", "-K"],
}
_PACKAGES: Mapping[str, str] = {"ext4": "e2fsprogs", "xfs": "xfsprogs"}
# As Debian mounts them; and no work in the background.
_MOUNT_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "ext4": {"errors": "remount-ro", "noinit_itable": ""},
    "xfs": {"nouuid": ""},  # its former mount may still be in use
}
_DRIVE_PROGRAM = Path(__file__).with_name("fuse_disk.py")
_MOUNT_PROGRAM = Path(mounts.__file__)
_FILLER_FILE = ".ballast"
_MIN_FILL_BYTES = 1 << 16
_SHUTDOWN, _NO_LOG_FLUSH = 0x8004587D, 2  # FS_IOC_SHUTDOWN of ext4 and xfs


def unavailable_reason(kind: FileSystem = "ext4") -> str:
    """Return why this process cannot make a disk of this kind; empty if it can."""
    tool = _MKFS[kind][0]
    if _find_tool(tool) is None:
        return f"no {tool} on this machine: apt-get install {_PACKAGES[kind]}"
    return _probe_error(kind)


@functools.cache
def _probe_error(kind: FileSystem) -> str:
    try:
        SimulatedDisk(tempfile.gettempdir(), MIN_BYTES[kind], kind).close()
    except MachineError as error:
        return str(error).rstrip(".")
    return ""


class SimulatedDisk(contextlib.AbstractContextManager["SimulatedDisk"]):
    """One disk with a file system; use it as a context manager or call `close`."""

    def __init__(self, directory: Path | str, size_bytes: int = 64 * MB, kind: FileSystem = "ext4") -> None:
        """Make an empty disk.

        Args:
            directory: holds the disk's bytes, in a file without a name that grows as needed.
            size_bytes: of the device; the file system takes a few percent (ext4) or 64 MB (xfs).
            kind: the file system.

        Raises:
            MachineError: root (CAP_SYS_ADMIN), loop or fuse is missing.

        """
        if size_bytes < MIN_BYTES[kind]:
            raise UsageError(f"a disk of {size_bytes} bytes: {kind} takes {MIN_BYTES[kind]} at least.")
        self.kind: FileSystem = kind
        self.size_bytes = size_bytes
        self._directory = Path(directory)
        self._mount_points: list[_MountPoint] = []
        self._drive: subprocess.Popen[bytes] | None = None
        self._drive_connection, line = socket.socketpair()
        self._lock = threading.Lock()  # one command at a time
        self._is_broken = False
        self._is_full = False  # also of a broken disk, which is filled when mended
        # Descriptors: the drive's file system, with the disk as its root; the device; the mount.
        self._fuse_fd = self._device_fd = self._mount_fd = -1
        with line, self._machine_error("made"):
            try:
                self._start_drive(line)
                self._mount_device()
            except BaseException:
                self.close()
                raise

    @property
    def path(self) -> Path:
        """The root of the file system for root processes that see this pid; it never changes.

        Do not resolve it, because a detached mount resolves to "/"; `mount_in_namespace` gives it a plain
        path.
        """
        self._require_open()
        return Path(f"/proc/{os.getpid()}/fd/{self._mount_fd}")

    def mount_in_namespace(self, pid: int, target: str) -> None:
        """Mount the disk at ``target`` in the mount namespace of ``pid``, and again after each `mend`.

        Raises:
            UsageError: that namespace is the host's.
            MachineError: the kernel refuses.

        """
        self._require_open()
        mount_point = _MountPoint(pid, _mount_namespace(pid), target)
        if mount_point.namespace == _mount_namespace(os.getpid()):
            raise UsageError(f"process {pid} has the host's mounts; it needs its own mount namespace.")
        with self._machine_error("mounted"):
            self._attach(mount_point)
        self._mount_points.append(mount_point)

    # ---- faults --------------------------------------------------------------------------------------

    def fill(self) -> None:
        """Fill the disk; a broken disk is filled when mended."""
        self._require_open()
        self._is_full = True
        if self._is_broken:
            return
        with self._machine_error("filled"), open(self.path / _FILLER_FILE, "ab") as filler:
            piece = self.size_bytes
            while piece >= _MIN_FILL_BYTES:
                stat = os.fstatvfs(filler.fileno())
                size = min(piece, stat.f_bavail * stat.f_frsize)
                try:
                    if size:
                        os.posix_fallocate(filler.fileno(), os.fstat(filler.fileno()).st_size, size)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                piece //= 2

    def free(self) -> None:
        """Undo `fill`."""
        self._require_open()
        self._is_full = False
        if not self._is_broken:
            with self._machine_error("freed"):
                (self.path / _FILLER_FILE).unlink(missing_ok=True)

    def fail(self) -> None:
        """Fail reads and writes with EIO from now on, and drop the page cache."""
        self._drop_page_cache()
        self._is_broken = True
        self._send_command("fail")

    def turn_read_only(self) -> None:
        """Turn the file system read-only (EROFS) as after an error; ext4 only."""
        if self.kind != "ext4":
            raise UsageError(f"{self.kind} shuts down after an error: use `fail`.")
        self._is_broken = True
        with self._machine_error("turned read-only"):
            name = f"loop{os.minor(os.fstat(self._device_fd).st_rdev)}"
            Path("/sys/fs/ext4", name, "trigger_fs_error").write_text("a simulated error")

    def limit_rate(self, bytes_per_s: float) -> None:
        """Limit reads and writes to this rate."""
        if bytes_per_s <= 0:
            raise UsageError(f"{bytes_per_s} bytes a second: the limit must be above 0.")
        self._send_command("pace", str(bytes_per_s))

    def remove_rate_limit(self) -> None:
        """Undo `limit_rate`."""
        self._send_command("pace", "0")

    def lose_power(self, seed: int = 0) -> int:
        """Cut the power: every operation fails until `mend`.

        Synced data stays. ``seed`` decides which unflushed sectors of 4 KiB are lost, from none to all.
        Return their number.
        """
        self._is_broken = True
        lost = self._send_command("off", str(seed))
        self._shut_down_file_system()
        return lost

    def mend(self) -> None:
        """Repair a broken disk and mount its file system again with the durable data.

        Files open on the former mount keep failing. `fill` and `limit_rate` stay in effect.
        """
        self._require_open()
        if not self._is_broken:
            return
        self._send_command("swap")
        self._shut_down_file_system()
        with self._machine_error("mounted again"):
            os.close(self._device_fd)
            self._device_fd = -1
            self._mount_device()
            self._mount_points = [point for point in self._mount_points if point.exists()]
            for mount_point in self._mount_points:
                self._attach(mount_point)
        self._is_broken = False
        self.fill() if self._is_full else self.free()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the disk; a second call does nothing."""
        if self._mount_fd >= 0:
            self._shut_down_file_system()
        for descriptor in (self._mount_fd, self._device_fd, self._fuse_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self._fuse_fd = self._device_fd = self._mount_fd = -1
        self._drive_connection.close()
        if self._drive is not None:
            self._drive.kill()
            self._drive.wait()

    # ---- inside --------------------------------------------------------------------------------------

    def _start_drive(self, connection: socket.socket) -> None:
        """Start the drive process with an empty file system."""
        fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        with open(fuse, "rb", buffering=0), tempfile.TemporaryFile(dir=self._directory) as image:
            image.truncate(self.size_bytes)
            _make_file_system(self.kind, image.fileno())
            options = {"fd": str(fuse), "rootmode": "100600", "user_id": "0", "group_id": "0"}
            # Before the drive starts: it exits when it has nothing to serve.
            self._fuse_fd = mounts.make_detached_mount("fuse", options)
            handed = (fuse, image.fileno(), connection.fileno())
            self._drive = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_DRIVE_PROGRAM), *map(str, handed)],
                pass_fds=handed,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )

    def _mount_device(self) -> None:
        """Make a loop device of the drive and mount it in the place of the former mount."""
        file = os.open(f"/proc/self/fd/{self._fuse_fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._device_fd = mounts.make_loop_device(file)
        finally:
            os.close(file)
        mount = self._make_mount()
        if self._mount_fd < 0:
            self._mount_fd = mount
        else:
            os.dup2(mount, self._mount_fd, inheritable=False)
            os.close(mount)

    def _make_mount(self) -> int:
        source = f"/proc/self/fd/{self._device_fd}"
        return mounts.make_detached_mount(self.kind, {"source": source, **_MOUNT_OPTIONS[self.kind]})

    def _attach(self, mount_point: _MountPoint) -> None:
        mount = self._make_mount()  # of the same device: the same file system once more
        try:
            command = [sys.executable, "-I", "-S", str(_MOUNT_PROGRAM), f"/proc/{mount_point.pid}/ns/mnt"]
            done = subprocess.run(
                [*command, mount_point.target, str(mount)],
                pass_fds=[mount],
                capture_output=True,
                text=True,
                check=False,
            )
        finally:
            os.close(mount)
        if done.returncode:
            raise OSError(0, f"{mount_point.target} of process {mount_point.pid}: {done.stderr.strip()}")

    def _drop_page_cache(self) -> None:
        """Drop clean pages, so that reads reach the disk."""
        with self._machine_error("read"):
            for folder, _, names in os.walk(self.path):
                for name in names:
                    with contextlib.suppress(OSError), open(Path(folder, name), "rb", buffering=0) as file:
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _shut_down_file_system(self) -> None:
        """Stop all writes of the file system, including its log."""
        with contextlib.suppress(OSError):  # after an error xfs may have shut down already
            root = os.open(f"/proc/self/fd/{self._mount_fd}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.ioctl(root, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
            finally:
                os.close(root)

    def _send_command(self, *words: str) -> int:
        """Send the drive a command and return its answer."""
        self._require_open()
        try:
            with self._lock:
                self._drive_connection.sendall(" ".join(words).encode())
                answer = self._drive_connection.recv(64)
        except OSError:
            answer = b""
        if not answer:
            raise MachineError(f"the simulated disk in {self._directory}: its drive process has ended.")
        return int(answer)

    def _require_open(self) -> None:
        if self._mount_fd < 0:
            raise UsageError("this simulated disk is closed.")

    @contextlib.contextmanager
    def _machine_error(self, action: str) -> Iterator[None]:
        """Turn an OSError into a MachineError that names the disk and the requirements."""
        try:
            yield
        except OSError as error:
            raise MachineError(
                f"the simulated disk in {self._directory} cannot be {action}: {error.strerror}. "
                "It takes root with CAP_SYS_ADMIN, and a kernel with loop, fuse and its file system."
            ) from error


@dataclass(frozen=True)
class _MountPoint:
    """A place where the disk is mounted: a process's mount namespace and a path."""

    pid: int
    namespace: tuple[int, int]
    target: str

    def exists(self) -> bool:
        try:
            return _mount_namespace(self.pid) == self.namespace
        except OSError:
            return False


def _mount_namespace(pid: int) -> tuple[int, int]:
    found = Path(f"/proc/{pid}/ns/mnt").stat()
    return found.st_dev, found.st_ino


def _make_file_system(kind: FileSystem, image: int) -> None:
    tool, *flags = _MKFS[kind]
    found = _find_tool(tool)
    if found is None:
        raise OSError(errno.ENOENT, f"no {tool}: apt-get install {_PACKAGES[kind]}")
    done = subprocess.run(
        [found, *flags, f"/proc/self/fd/{image}"],
        pass_fds=[image],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise OSError(0, f"{tool}: {done.stderr.strip()}")


def _find_tool(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))
