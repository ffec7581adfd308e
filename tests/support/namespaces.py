"""Enter kernel namespaces and limit memory, to make one machine look like several.

Each function changes the calling thread; `machines.py` has one thread for that. Only a control group outlives
a maker that is killed; the next maker removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from elastic_resume.errors import MachineError
from elastic_resume.machine import MemoryCgroup
from tests.support.mounts import enter_namespace, last_error
from tests.support.processes import wait_for

CLONE_NEWPID = 0x20000000  # linux/sched.h
_GROUP_PREFIX = "elastic-resume-machine-"
_LIBC = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def children_in_pid_namespace(descriptor: int | None) -> Iterator[None]:
    """Start children of this thread in a pid namespace; None: in a new one."""
    if descriptor is None:
        if _LIBC.unshare(CLONE_NEWPID):
            raise last_error("unshare")
    else:
        enter_namespace(f"/proc/self/fd/{descriptor}")
    try:
        yield
    finally:
        enter_namespace("/proc/self/ns/pid")


class MemoryLimit:
    """Limit the memory of the processes in a control group below that of this process."""

    def __init__(self, limit_bytes: int) -> None:
        """Create the group; with 0 bytes, none.

        Raises:
            MachineError: it cannot be created.

        """
        self.group_path = ""
        """Where it is; empty where there is none."""
        if not limit_bytes:
            return
        own = MemoryCgroup.find_own()
        if own is None:
            raise MachineError("no memory limit can be set: this process sees no control group for memory.")
        directory = own.directory / f"{_GROUP_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        self.group_path = str(directory)
        try:
            directory.mkdir()
            (directory / own.limit_file).write_text(str(limit_bytes))
        except OSError as error:
            self.close()
            raise MachineError(f"no memory limit can be set in {own.directory}: {error.strerror}.") from error

    def close(self) -> None:
        """Remove the group after the exit of its processes; a second call does nothing."""
        if self.group_path:
            wait_for(lambda: _remove_group(Path(self.group_path)), f"the end of {self.group_path}")


def _remove_group(directory: Path) -> bool:
    """Remove a control group unless a process is in it; return whether it is gone."""
    with contextlib.suppress(OSError):
        directory.rmdir()
    return not directory.exists()


def remove_stale_groups() -> None:
    """Remove groups whose maker was killed."""
    own = MemoryCgroup.find_own()
    for group in own.directory.glob(f"{_GROUP_PREFIX}*") if own else ():
        maker = group.name.removeprefix(_GROUP_PREFIX).split("-")[0]
        if not Path("/proc", maker).exists():
            _remove_group(group)
