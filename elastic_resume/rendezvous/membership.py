"""The rendezvous as the supervisor of one node sees it: join, train, be told to restart, finish, leave.

The calls come from torchelastic's thread and block; what happens meanwhile comes from the shell's thread. The
lease is written where the stubs of this node read it (`Fence`): they kill their workers when it ends, even
while this whole process is stopped.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

from elastic_resume.errors import GaveUpError, RendezvousLostError
from elastic_resume.rendezvous.messages import Join
from elastic_resume.rendezvous.shell import Shell
from elastic_resume.rendezvous.steps import (
    BeginWorld,
    Effect,
    EndJob,
    GiveUp,
    JoinRequested,
    Leave,
    Log,
    RestartWorkers,
    StopWorkers,
    WorkersFinished,
)

Tell = Callable[[str, str], None]


class Fence:
    """A word in a file that stubs map: until when, in seconds of CLOCK_MONOTONIC, workers may run.

    0 means that nothing limits them. One aligned 8-byte store: a reader sees the old or the new value.
    """

    BYTES = 4096

    def __init__(self, path: Path) -> None:
        """Make the file, with no limit in it."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(descriptor, self.BYTES)
            self._map = mmap.mmap(descriptor, self.BYTES)
        finally:
            os.close(descriptor)
        self._word = ctypes.c_double.from_buffer(self._map)

    def set(self, until: float) -> None:
        """Let workers run until then."""
        self._word.value = until if until > 0 else 0.0


class Membership:
    """This node's part in the job."""

    def __init__(self, fence: Fence, tell: Tell) -> None:
        """``tell`` takes (kind, text) of what people and the event log should know; it must not block."""
        self._fence = fence
        self._tell = tell
        self._shell: Shell | None = None
        self._changed = threading.Condition()
        self._world: BeginWorld | None = None
        self._over: Effect | None = None
        self._restart = ""

    def start(self, shell: Shell) -> None:
        """Take part through ``shell``, whose effects go to `carry_out`."""
        self._shell = shell
        shell.start()

    @property
    def restart_wanted(self) -> str:
        """Why workers are to be stopped and `join` called again; empty while they may run. Costs nothing."""
        return self._restart

    def join(self, join: Join) -> BeginWorld:
        """Wait for the next world with this node in it. Its workers are stopped.

        Raises:
            RendezvousLostError: no world could be formed within the join timeout.
            GaveUpError: the job is over.

        """
        with self._changed:
            self._world, self._restart = None, ""
        self._submit(JoinRequested(join))
        with self._changed:
            while self._world is None and self._over is None:
                self._changed.wait(1.0)  # a timeout, so that signals are taken
            if self._world is not None:
                return self._world
            if isinstance(self._over, EndJob):
                raise GaveUpError(f"the job is over: {self._over.reason}.")
            raise RendezvousLostError(f"{getattr(self._over, 'reason', 'no world')}.")

    def finish(self) -> bool:
        """Say that this node's workers are done; wait until those of all nodes are.

        Returns whether they are: not, when the world broke before (others go on without this node).
        """
        self._submit(WorkersFinished())
        with self._changed:
            while self._over is None and not self._restart:
                self._changed.wait(1.0)
            return isinstance(self._over, EndJob)

    def leave(self, reason: str) -> None:
        """Say goodbye, and end."""
        if self._shell is not None:
            if self._over is None:
                self._submit(Leave(reason))
            self._shell.stop()
            self._shell = None

    def carry_out(self, effect: Effect) -> None:
        """Take what the core decided. Called in the shell's thread."""
        with self._changed:
            if isinstance(effect, BeginWorld):
                self._world = effect
            elif isinstance(effect, (RestartWorkers, StopWorkers)):
                self._restart = effect.reason or "the world is over"
            elif isinstance(effect, (EndJob, GiveUp)):
                self._over = effect
            self._changed.notify_all()
        if isinstance(effect, Log):
            self._tell(effect.kind, effect.text)
        elif isinstance(effect, (RestartWorkers, StopWorkers)):
            self._tell("restart", effect.reason)

    def fence_at(self, until: float) -> None:
        """Renew the lease. Called in the shell's thread after every event."""
        self._fence.set(until)

    def _submit(self, event: JoinRequested | WorkersFinished | Leave) -> None:
        if self._shell is None:
            raise RuntimeError("the membership has not started, or has ended")
        self._shell.submit(event)
