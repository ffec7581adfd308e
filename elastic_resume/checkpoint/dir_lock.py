"""Lock a directory for one process, also where the locks of a file system exclude nobody.

flock(2) is the lock where it works. Some mounts answer it with an error, or grant it to everybody: Lustre
without ``flock`` or with ``localflock``, NFS with ``local_lock``, CIFS with ``nobrl``. There the owner keeps
an `OwnerLease`: a file that it touches every `HEARTBEAT_S`. Another process takes it over at once if the
owner's process has ended on this machine (its number, boot id and start time are in the file), else when
nobody has touched it for `LEASE_S` on the other's own clock.

An owner that was suspended for longer may wake up later. So each rename below the directory reads the file
first, and a process that has lost the lease ends itself.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Iterable
from pathlib import Path

from elastic_resume import constants
from elastic_resume.background import BackgroundThread
from elastic_resume.checkpoint import atomic_io

logger = logging.getLogger(__name__)

POLL_S = 0.05
HEARTBEAT_S = 2.0
SETTLE_S = 1.0  # others that found the same dead owner have renamed their files by then
MAX_LEASE_BYTES = 4096
LEASE_S = 30.0  # some network file systems block for many seconds
_ERRNOS_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP}
# Options of Lustre, OCFS2, NFS and CIFS by which a lock is known to one machine only.
_LOCAL_LOCK_PATTERN = re.compile(r"(?:^|,)(localflocks?|local_lock=(?:all|flock)|nobrl)(?:,|$)")
_locks: dict[Path, DirLock] = {}  # directories that this process owns


class DirLock:
    """The ownership of a directory, until `release` or the end of this process."""

    def __init__(self, directory: Path, descriptor: int, lease: OwnerLease | None) -> None:
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


class OwnerLease:
    """The ownership of a directory by a file with this process's token: it needs no lock and no special call.

    A process that finds no owner, or a dead one, renames its file over the other and reads it again after
    `SETTLE_S`: of several, the last one owns the directory. Whoever reads another's token has lost it.
    """

    def __init__(self, directory: Path) -> None:
        """Use `try_acquire`."""
        self._directory = directory
        self._path = directory / constants.OWNER_LEASE_FILE
        self._token = secrets.token_hex(16)
        self._seen: tuple[tuple[bytes, int], float] | None = None
        self.is_owner_alive = False
        """Whether its owner is known to live: its process is here, or has renewed the file meanwhile."""
        self._thread = BackgroundThread("elastic-resume-owner-lease", self._renew)

    def try_acquire(self) -> bool:
        """Take the lease unless another process may own it; it lasts until `release`."""
        owner = self._read()
        if owner is not None and not self._is_dead(owner):
            return False
        pid = os.getpid()
        record = {"token": self._token, "pid": pid, "start": _read_start(pid), "machine": _describe_machine()}
        temporary = self._path.with_name(atomic_io.temporary_name(self._path.name))
        temporary.write_text(json.dumps(record))
        if self._read() != owner:
            temporary.unlink()
            return False
        temporary.replace(self._path)
        time.sleep(SETTLE_S)
        if not self._is_ours():
            return False
        atomic_io.rename_checks[self._directory] = self.check
        self._thread.start()
        return True

    def check(self) -> None:
        """End this process if another one owns the directory.

        Raises:
            OSError: that cannot be read now, so nothing may be written.

        """
        if not self._is_ours():
            logger.critical(
                f"{self._directory} belongs to another process now, or its {self._path.name} was removed. "
                f"Was this process suspended, or its file system blocked, for {LEASE_S:.0f} s? It ends."
            )
            os._exit(constants.EXIT_MACHINE_ERROR)

    def release(self) -> None:
        """Give the directory up."""
        self._thread.close()
        atomic_io.rename_checks.pop(self._directory, None)
        with contextlib.suppress(OSError):
            if self._is_ours():
                self._path.unlink()

    def _renew(self) -> float:
        with contextlib.suppress(OSError):  # then renames fail too, and the next time `check` finds the owner
            self.check()
            os.utime(self._path)
        return HEARTBEAT_S

    def _is_ours(self) -> bool:
        owner = self._read()
        return owner is not None and self._token.encode() in owner[0]

    def _read(self) -> tuple[bytes, int] | None:
        """Return content and time of the file; None if there is none. Opening it reads both anew on NFS."""
        try:
            with open(self._path, "rb") as file:
                return file.read(MAX_LEASE_BYTES), os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return None

    def _is_dead(self, owner: tuple[bytes, int]) -> bool:
        """Return whether the owner has ended for certain, or has been silent for `LEASE_S`."""
        with contextlib.suppress(ValueError, KeyError, TypeError):
            record = json.loads(owner[0])
            if record["machine"] == _describe_machine() != "":
                self.is_owner_alive = not _has_ended(int(record["pid"]), record["start"])
                return not self.is_owner_alive
        if self._seen is None or self._seen[0] != owner:
            self.is_owner_alive = self._seen is not None
            self._seen = owner, time.monotonic()
        return time.monotonic() - self._seen[1] >= LEASE_S


def _describe_machine() -> str:
    """Return what processes that see each other's numbers have in common; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115  it is no path
    except OSError:
        return ""


def _read_start(pid: int) -> str:
    """Return when a process of this machine started, in ticks since boot; empty if that cannot be seen."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _has_ended(pid: int, start: str) -> bool:
    """Return whether a process of this machine has ended for certain; another may have its number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's, which /proc may hide
        return False
    found = _read_start(pid)
    return bool(found and start) and found != start


def _acquire_lease(directory: Path, problem: str, deadline: float) -> OwnerLease | None:
    """Take the lease; return None if its owner is alive, which may take longer than until ``deadline``."""
    lease, is_reported = OwnerLease(directory), False
    while not lease.try_acquire():
        if time.monotonic() >= deadline and lease.is_owner_alive:
            return None
        if time.monotonic() >= deadline and not is_reported:
            logger.info(f"{directory}: waiting up to {LEASE_S:.0f} s, since its last owner may be alive")
            is_reported = True
        time.sleep(POLL_S)
    logger.info(
        f"{directory}: {problem}, so this process owns it by the file {constants.OWNER_LEASE_FILE}, which it "
        f"renews. After a crash of this machine, another one may wait {LEASE_S:.0f} s for it."
    )
    return lease


def _forget_locks_of_parent() -> None:
    for lock in _locks.values():
        lock.close_in_fork()
    _locks.clear()


os.register_at_fork(after_in_child=_forget_locks_of_parent)
