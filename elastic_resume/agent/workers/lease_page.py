"""The fence: a page of memory that says until when this node's workers may run.

The agent owns its first word and moves it, the guards look at it. It lies in memory that both have mapped,
so it counts on although the agent is stopped, wedged or killed: what is not renewed runs out by itself. A
renewal is one store of eight aligned bytes, which no look finds half done; it takes no lock, no system call
and no disk, so it may stand before anything else that a thread does about an event.

The second word is the number of the newest round that is known to be over: a worker of it failed, which its
guard notes, or nodes have come or gone (`end_round`). Workers of that round that are told to end are killed
at once: there is nothing that they could still do.

Promise: no word has ever to arrive for a worker to die, and after `Fence.close` none may run.

Knows neither who renews it nor why, nor how a guard kills.
"""

from __future__ import annotations

import math
import mmap
import os

MFD_NOEXEC_SEAL = 0x0008  # of linux/memfd.h; Python has no name for it


class LeasePage:
    """Until when workers may run, in seconds of CLOCK_BOOTTIME; at first they may not.

    That clock goes on while the machine is suspended, as a lease does for the other nodes. Infinite: no lease
    is needed. Minus infinite: no worker may run. NaN is no time and counts as the latter.
    """

    def __init__(self) -> None:
        self._descriptor = create_anonymous_file("elastic_resume-fence")
        os.ftruncate(self._descriptor, mmap.PAGESIZE)
        self._mapping = mmap.mmap(self._descriptor, mmap.PAGESIZE)
        self._words = memoryview(self._mapping).cast("d")
        # A name for guards, to which torchelastic hands no descriptor on. It ends with us, or with `close`.
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.set(-math.inf)

    def set(self, until: float) -> None:
        """Let workers run until then: renew their lease, or end them at once. From any thread.

        Raises:
            ValueError: the fence is closed, and workers stay dead.

        """
        # A view of native doubles stores all eight bytes as one. Slices and struct's other formats need not.
        self._words[0] = until

    def end_round(self, round_number: int) -> None:
        """Let workers of that round be killed at once where torchelastic asks them to end."""
        self._words[1] = round_number

    def close(self) -> None:
        """Let no worker run any more, and give the memory back. May be called again."""
        if self._descriptor < 0:
            return
        self.set(-math.inf)
        self._words.release()
        self._mapping.close()
        os.close(self._descriptor)
        self._descriptor = -1


def create_anonymous_file(name: str) -> int:
    """Make a file without a name, in memory. Hardened kernels refuse an executable one (memfd_noexec=2)."""
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | MFD_NOEXEC_SEAL)
    except OSError:  # older than Linux 6.3, which does not know the flag
        return os.memfd_create(name, os.MFD_CLOEXEC)
