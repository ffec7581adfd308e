"""Words of shared memory whose accesses other processes see in the order in which they were made.

x86 keeps that order by itself, but for a read that overtakes a store; Arm, POWER and RISC-V do not.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any, Union

MACHINE = os.uname().machine
_KEEP_ORDER = {"x86_64", "i686", "i586", "i386"}


def barrier() -> None:
    """Have all that this thread has read and stored come before all that it will.

    Python has no name for that. To let go of a lock is a store-release, to take it again a load-acquire, of
    whichever lock (a POSIX semaphore; from Python 3.13 on compare-and-exchange). Armv8 keeps what comes
    before a store-release before it, a load-acquire behind it in that order, and behind that what comes next
    (Arm ARM, B2.3, barrier-ordered-before). To take it first would not do: what is stored before and
    afterwards could then meet while it is held. POWER lets go of a lock by lwsync, which orders stores among
    each other.
    """
    lock = threading.Lock()  # of this call: of one that threads share another could let go
    lock.acquire()
    lock.release()
    lock.acquire()


class Ordered:
    """Words with a barrier on either side of each access. 2 us each."""

    def __init__(self, words: ctypes.Array[ctypes.c_uint64]) -> None:
        self._words = words

    def __getitem__(self, at: Any) -> Any:
        barrier()
        found = self._words[at]
        barrier()
        return found

    def __setitem__(self, at: int, value: int) -> None:
        barrier()
        self._words[at] = value
        barrier()


Words = Union["ctypes.Array[ctypes.c_uint64]", Ordered]


def ordered(words: ctypes.Array[ctypes.c_uint64]) -> Words:
    """Give ``words`` as they may be used on this machine."""
    return words if MACHINE in _KEEP_ORDER else Ordered(words)
