"""Refuse a second process of one rank: a process that a script starts inherits the rank's environment.

It would resume as a newer generation of the same rank, and its snapshots would replace the rank's.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time

from elastic_resume import constants
from elastic_resume.errors import UsageError

FIRST_BYTE = 1 << 20  # the agent's file is shorter; a lock needs no bytes there
TIMEOUT_S = 10.0  # children that a killed worker has left keep its lock until they are killed

_claims: dict[int, int] = {}  # process -> descriptor of the lock, open as long as the process


def claim_rank(timeout_s: float = TIMEOUT_S) -> None:
    """Lock the rank of this process in the agent's file; without an agent do nothing.

    The lock belongs to the open file (F_OFD_SETLK), so a forked child's own attempt fails.

    Raises:
        UsageError: another process of this rank holds it.

    """
    path, local_rank = (os.environ.get(n, "") for n in (constants.ENV_PARKED, constants.ENV_LOCAL_RANK))
    if os.getpid() in _claims or not (path and local_rank.isdigit()):
        return
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # the agent has ended, and this worker ends too; or the script has changed its user
        return
    lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, FIRST_BYTE + int(local_rank), 1, 0)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, lock)
            break
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            os.close(descriptor)
            raise UsageError(
                f"another process has called er.resume() as rank {os.environ.get('RANK', '?')}, and it runs. "
                "A process that a script starts is no rank: call er.resume() only under `if __name__ == "
                '"__main__":`, and start another training or an evaluation as a job of its own, by '
                "`elastic-resume run --rdzv-id NAME`."
            ) from None
    _claims[os.getpid()] = descriptor
