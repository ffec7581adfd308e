"""Make the agent's temporary directory, and remove those that killed agents have left.

A directory's name identifies its owner: the boot, the namespace of process IDs, the process and its start
time. So a directory of another machine or container in the same place is never taken for an abandoned one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from elastic_resume.errors import MachineError
from elastic_resume.events import BOOT_ID_FILE
from elastic_resume.slots.progress_page import read_start_ticks

PREFIX = "elastic_resume_"


@contextlib.contextmanager
def make_temporary_dir() -> Iterator[str]:
    """Yield the path of a new directory that is removed at the end. First remove abandoned ones.

    Raises:
        MachineError: no directory for temporary files can be written.

    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise MachineError(f"{error.strerror}. Set TMPDIR to a directory that can be written.") from None
    prefix = PREFIX
    with contextlib.suppress(OSError):  # this /proc does not tell
        prefix += f"{BOOT_ID_FILE.read_text().strip()}_{Path('/proc/self/ns/pid').stat().st_ino}_"
        _remove_abandoned(Path(tempfile.gettempdir()), prefix)
        prefix += f"{os.getpid()}_{read_start_ticks(os.getpid())}_"
    with tempfile.TemporaryDirectory(prefix=prefix) as directory:
        yield directory


def _remove_abandoned(parent: Path, prefix: str) -> None:
    for path in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError, ValueError):
            pid, start_ticks, _ = path.name.removeprefix(prefix).split("_", 2)
            status = path.lstat()
            is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if is_own and not _is_running(int(pid), int(start_ticks)):
                shutil.rmtree(path, ignore_errors=True)  # another agent may remove it too


def _is_running(pid: int, start_ticks: int) -> bool:
    """Return whether the process that started then still exists."""
    try:
        return read_start_ticks(pid) == start_ticks
    except FileNotFoundError:
        return False
