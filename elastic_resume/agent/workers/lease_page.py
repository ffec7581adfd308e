"""Share with the worker supervisors, in memory, until when the workers of this node may run.

The agent owns the page; the worker supervisors map it and poll it. A lease that is not renewed expires by
itself, even if the agent is stopped, blocked or killed. A renewal is one store (`shared_page`), so it never
delays the thread that does it.

Words of the page, native doubles::

    0  end of the lease, in seconds of CLOCK_BOOTTIME, which continues while this machine is suspended, like
       the clocks of the other nodes. Infinity: no lease is needed. Minus infinity or NaN: no worker may run.
    1  the generation whose workers get no grace: a supervisor stores that of its failed worker, the agent
       that of the running workers when a person presses Ctrl-C twice.

Invariant: no message has to arrive for a worker to die, and no worker runs after `LeasePage.close`.
"""

from __future__ import annotations

import math
import mmap
import os

from elastic_resume import linux
from elastic_resume.shared_page import SECONDS, SharedPage


class LeasePage:
    """The agent's side of the lease page. At first no worker may run."""

    def __init__(self) -> None:
        self._descriptor = linux.create_anonymous_file("elastic_resume-lease")
        os.ftruncate(self._descriptor, mmap.PAGESIZE)
        self._page = SharedPage(self._descriptor, mmap.PAGESIZE, SECONDS)
        self.path = linux.name_descriptor(self._descriptor)
        self.set(-math.inf)

    def set(self, until: float) -> None:
        """Set the end of the lease. Any thread may call this.

        Raises:
            ValueError: the page is closed.

        """
        self._page.words[0] = until

    def revoke_grace(self, generation: int) -> None:
        """Have workers of that generation killed without grace when torchelastic stops them."""
        self._page.words[1] = generation

    def close(self) -> None:
        """Revoke the lease and release the memory. Further calls do nothing."""
        if self._descriptor < 0:
            return
        self.set(-math.inf)
        self._page.close()
        os.close(self._descriptor)
        self._descriptor = -1
