"""What the kernel has for making one machine look like several: namespaces, and groups with limits.

The thread that calls is the one that is changed; `machines.py` has one for it. Nothing here outlives its
process but a control group. Does not know machines.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from elastic_resume.cluster.memory import Group
from elastic_resume.errors import MachineError

CLONE_NEWPID = 0x20000000  # linux/sched.h
_GROUP_PREFIX = "elastic-resume-machine-"
_LIBC = ctypes.CDLL(None, use_errno=True)


def join(space: int) -> None:
    """Enter the namespace of this descriptor; one for process ids holds for children only."""
    if _LIBC.setns(space, 0):
        raise _error("setns")


def join_path(path: str) -> None:
    """Enter the namespace at this path."""
    space = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        join(space)
    finally:
        os.close(space)


@contextlib.contextmanager
def children_in(space: int | None) -> Iterator[None]:
    """Have children of this thread begin in a namespace for process ids; None: in a new one."""
    if space is None:
        if _LIBC.unshare(CLONE_NEWPID):
            raise _error("unshare")
    else:
        join(space)
    try:
        yield
    finally:
        join_path("/proc/self/ns/pid")


def make_group(index: int, limit_bytes: int) -> Path:
    """Make a control group, below that of this process, whose processes may use so much memory together.

    Raises:
        MachineError: it cannot be made, and why.

    """
    own = Group.of_this_process()
    if own is None:
        raise MachineError("no memory limit can be set: this process sees no control group for memory.")
    group = own.directory / f"{_GROUP_PREFIX}{os.getpid()}-{index}"
    try:
        group.mkdir()
        (group / own.limit).write_text(str(limit_bytes))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        raise MachineError(f"no memory limit can be set in {own.directory}: {error.strerror}.") from error
    return group


def kills(group: Path) -> int:
    """How many processes of that group the kernel has killed for want of memory."""
    own = Group.of_this_process()
    return replace(own, directory=group).kills() if own else 0


def remove_groups_of_the_dead() -> None:
    """Remove what makers that were killed have left."""
    own = Group.of_this_process()
    for group in own.directory.glob(f"{_GROUP_PREFIX}*") if own else ():
        maker = group.name.removeprefix(_GROUP_PREFIX).split("-")[0]
        if not Path("/proc", maker).exists():
            with contextlib.suppress(OSError):  # not empty yet, or gone
                group.rmdir()


def _error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
