"""How simulated nodes end: with whoever simulates them, or killed, and then gone for certain."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal

import psutil

KILLED_S = 30.0  # one that sleeps in the kernel for longer is left to it
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends. Between fork and exec."""
    _LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def kill(process: psutil.Process) -> None:
    """Send SIGKILL; one that is gone already will do."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


def wait_for(process: psutil.Process) -> None:
    """Wait until all threads of a killed process have ended; init may take note seconds later."""
    with contextlib.suppress(psutil.NoSuchProcess, OSError):
        if not process.is_running():
            return
        descriptor = os.pidfd_open(process.pid)
        try:
            waiting = select.poll()  # which takes descriptors of any number
            waiting.register(descriptor, select.POLLIN)
            waiting.poll(KILLED_S * 1000)
        finally:
            os.close(descriptor)
