"""Words of shared memory whose accesses other processes see in the order in which they were made.

x86 keeps that order by itself, but for a read that overtakes a store; Arm, POWER and RISC-V do not. `barrier`
restores it on Arm, and as far as it says on the others.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any, Union

ARCHITECTURE = os.uname().machine
_STRONGLY_ORDERED = {"x86_64", "i686", "i586", "i386"}


def barrier() -> None:
    """Order this thread's earlier accesses to memory before its later ones: a full barrier on Armv8.

    Release, then acquire, a lock (release store, then acquire load). Armv8 does not reorder these (Arm ARM,
    B2.3, barrier-ordered-before). Acquiring first would let earlier and later accesses overlap. It does not
    matter which lock, or how Python makes it (a POSIX semaphore; from 3.13 on compare-and-exchange).

    On POWER and RISC-V this is best effort. POWER releases a lock by lwsync, which orders stores among each
    other; that a later load cannot overtake an earlier store is not shown there, and for RISC-V nothing is.
    """
    lock = threading.Lock()  # of this call: of one that threads share another could let go
    lock.acquire()
    lock.release()
    lock.acquire()


class BarrierWords:
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


SharedWords = Union["ctypes.Array[ctypes.c_uint64]", BarrierWords]


def with_barriers(words: ctypes.Array[ctypes.c_uint64]) -> SharedWords:
    """Give ``words`` as they may be used on this machine."""
    return words if ARCHITECTURE in _STRONGLY_ORDERED else BarrierWords(words)
