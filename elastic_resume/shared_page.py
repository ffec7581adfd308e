"""Map words that processes share: each has one writing process, and a reader sees the old or the new value.

A word is one aligned store of eight bytes, without lock or system call. Stores become visible in program
order. x86 guarantees that; elsewhere each access has a barrier before and after it. Where a load must follow
the process's own store, `barrier` stands between.

The launcher shim imports this module without the package, so it imports little.
"""

import _thread
import mmap
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

COUNTS, SECONDS = "Q", "d"  # formats of words: unsigned integers, floating-point numbers
MACHINE = os.uname().machine
STRONGLY_ORDERED = {"x86_64", "i686", "i586", "i386"}
CLOSED = memoryview(b"")
CLOSED.release()  # each access raises ValueError


class SharedPage:
    """Words of a file, mapped by one process."""

    def __init__(self, descriptor: int, size: int, kind: str, *, is_writable: bool = True) -> None:
        """Map ``size`` bytes as words of ``kind``; the caller keeps ``descriptor``."""
        self._map = mmap.mmap(descriptor, size, prot=mmap.PROT_READ | (is_writable and mmap.PROT_WRITE))
        # A memoryview of native words stores all eight bytes at once; slices and struct need not.
        words = memoryview(self._map).cast(kind)  # type: ignore[call-overload]
        self.words: Any = words if MACHINE in STRONGLY_ORDERED else BarrierWords(words)

    def close(self) -> None:
        """Unmap the page, or leave that to those who still hold its words. Others get a ValueError."""
        self.words = CLOSED
        try:  # noqa: SIM105 - importing contextlib would delay the start of the launcher shim
            self._map.close()
        except BufferError:
            pass


class BarrierWords:
    """Shared words with a barrier before and after each access; 2 us each."""

    def __init__(self, words: "memoryview[Any]") -> None:
        self._words = words

    def __getitem__(self, index: "Any") -> "Any":
        barrier()
        value = self._words[index]
        if isinstance(value, memoryview):
            value = value.tolist()
        barrier()
        return value

    def __setitem__(self, index: int, value: float) -> None:
        barrier()
        self._words[index] = value
        barrier()


def barrier() -> None:
    """Order this thread's earlier memory accesses before its later ones: a full barrier on Armv8.

    It releases, then acquires, a lock: a release store and an acquire load, which Armv8 does not reorder (Arm
    ARM, B2.3, barrier-ordered-before). It does not matter which lock, or how Python implements it. On POWER
    and RISC-V nothing guarantees that a later load does not overtake an earlier store.
    """
    lock = _thread.allocate_lock()  # not shared: another thread could release it
    lock.acquire()
    lock.release()
    lock.acquire()
