"""Lock a directory for one process, also where the locks of a file system exclude nobody.

flock(2) is the lock where it works. Some mounts answer it with an error, or grant it to everybody: Lustre
without ``flock`` or with ``localflock``, NFS with ``local_lock``, CIFS with ``nobrl``. There the owner keeps
filelock's `SoftFileLease`: a file that it touches every `HEARTBEAT_S`. Another process takes it over at once
if the owner's process has ended on this machine (its number, boot id and start time are in the file), else
when nobody has touched it for `LEASE_S` on the other's own clock.

An owner that was suspended for longer may wake up later. So each rename below the directory reads the file
first, and a process that has lost the lease ends itself.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_resume import constants
from elastic_resume.checkpoint import atomic_io

if TYPE_CHECKING:
    import filelock

logger = logging.getLogger(__name__)

POLL_S = 0.05
HEARTBEAT_S = 2.0
LEASE_S = 30.0  # some network file systems block for many seconds
_ERRNOS_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP}
# Options of Lustre, NFS and CIFS by which a lock is known to one machine only.
_LOCAL_LOCK_PATTERN = re.compile(r"(?:^|,)(localflock|local_lock=(?:all|flock)|nobrl)(?:,|$)")
_locks: dict[Path, DirLock] = {}  # directories that this process owns


class DirLock:
    """The ownership of a directory, until `release` or the end of this process."""

    def __init__(self, directory: Path, descriptor: int, lease: filelock.SoftFileLease | None) -> None:
        """Use `acquire`."""
        self._directory = directory
        self._descriptor = descriptor
        self._lease = lease
        self._pid = os.getpid()
        _locks[directory.resolve()] = self

    def release(self) -> None:
        """Give up ownership; does nothing on a second call or in a fork."""
        if _locks.pop(self._directory.resolve(), None) is not self or self._pid != os.getpid():
            return
        if self._lease is not None:
            atomic_io.rename_checks.pop(self._directory, None)
            self._lease.release()
        with contextlib.suppress(OSError):  # where locks fail, so does this
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # a fork may still have the file open
        os.close(self._descriptor)

    def close_in_fork(self) -> None:
        """Close what a fork has inherited: a child must not hold the lock of a dead owner."""
        os.close(self._descriptor)


def is_owned(directory: Path) -> bool:
    """Return whether this process owns the directory."""
    return directory.resolve() in _locks


def acquire(directory: Path, timeout_s: float) -> DirLock | None:
    """Lock a directory; return None if another process still owns it after ``timeout_s``.

    Where file locks do not work, it may wait for the lease of an owner that seems to be dead.

    Raises:
        MachineError: the lock's file cannot be created or locked.

    """
    path, deadline = directory / constants.LOCK_FILE, time.monotonic() + timeout_s
    lease = None
    with atomic_io.translate_os_errors("lock", path), contextlib.ExitStack() as cleanup:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        cleanup.callback(os.close, descriptor)
        while (problem := find_problem(descriptor, path)) is None:
            if time.monotonic() >= deadline:
                return None
            time.sleep(POLL_S)
        if problem:
            lease = _acquire_lease(directory, problem, deadline)
            if lease is None:
                return None
        cleanup.pop_all()
    return DirLock(directory, descriptor, lease)


def find_problem(descriptor: int, path: Path) -> str | None:
    """Lock an open file, and return why that excludes nobody: an empty text if it does exclude others.

    None: another one holds the lock. A flock belongs to the open file, so a second one tells as much as a
    second process.
    """
    try:
        if not _try_flock(descriptor):
            return None
        with open(path, "r+b") as second:  # NFS locks only what is open for writing
            if _try_flock(second.fileno()):
                return "flock(2) grants a lock twice"
    except OSError as error:
        if error.errno not in _ERRNOS_NO_LOCKS:
            raise
        return f"flock(2) fails ({error.strerror})"
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", errors="replace") as mounts:
        option = find_local_lock_option(mounts, os.fstat(descriptor).st_dev)
        return f"the mount option {option} makes a lock count on one machine only" if option else ""
    return ""


def _try_flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def find_local_lock_option(mounts: Iterable[str], device: int) -> str:
    """Return the option by which a device's mount keeps locks to one machine, from lines of mountinfo."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts:
        found = _LOCAL_LOCK_PATTERN.search(line.split()[-1])
        if found and line.split(" ", 3)[2] == number:
            return found[1]
    return ""


def _acquire_lease(directory: Path, problem: str, deadline: float) -> filelock.SoftFileLease | None:
    """Take the lease; return None if its owner renews it, which is certain by ``deadline`` or soon after."""
    from filelock import SoftFileLease, Timeout  # noqa: PLC0415  few file systems need it

    path = directory / constants.OWNER_LEASE_FILE
    first = _read_mtime(path)
    is_reported = False

    def is_refused() -> bool:
        nonlocal is_reported
        if time.monotonic() < deadline:
            return False
        if _read_mtime(path) != first:
            return True
        if not is_reported:
            logger.info(f"{directory}: waiting up to {LEASE_S:.0f} s, since its last owner may be alive")
        is_reported = True
        return False

    lease = SoftFileLease(
        path,
        lease_duration=LEASE_S,
        heartbeat_interval=HEARTBEAT_S,
        thread_local=False,
        on_compromise=lambda lost: _end_process(directory, lost.reason),
    )
    wait_s = max(deadline - time.monotonic(), LEASE_S + HEARTBEAT_S)
    try:
        lease.acquire(timeout=wait_s, poll_interval=POLL_S, cancel_check=is_refused)
    except Timeout:
        return None
    mark = f"token={lease.token}".encode()

    def check() -> None:
        with contextlib.suppress(OSError):  # the rename will fail too, or the heartbeat
            if mark not in path.read_bytes():
                _end_process(directory, "owner-changed")

    atomic_io.rename_checks[directory] = check
    logger.info(
        f"{directory}: {problem}, so this process owns it by the file {path.name}, touched every "
        f"{HEARTBEAT_S:.0f} s. After a crash of this machine, another one may wait {LEASE_S:.0f} s for it."
    )
    return lease


def _read_mtime(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _end_process(directory: Path, reason: str) -> None:
    logger.critical(
        f"{directory} may belong to another process now ({constants.OWNER_LEASE_FILE}: {reason}), since this "
        f"one was suspended or its file system blocked for {LEASE_S:.0f} s. This process ends."
    )
    os._exit(constants.EXIT_MACHINE_ERROR)


def _forget_locks_of_parent() -> None:
    for lock in _locks.values():
        lock.close_in_fork()
    _locks.clear()


os.register_at_fork(after_in_child=_forget_locks_of_parent)
