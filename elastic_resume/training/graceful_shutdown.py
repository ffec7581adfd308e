"""Lets a rank that its agent asks to end do so at a step boundary, with its state on disk.

Only under our agent, where SIGTERM means a drain: a restart kills at once. Under torchrun the signal comes
with every restart, when no further step may ever end. A handler of the script's own is left in place.

Processes that the script forks get back what SIGTERM did before: they have no step to end at, and
``Process.terminate()`` has to end them.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import ClassVar

from elastic_resume import constants


class Drain:
    """Whether this process has been asked to end."""

    newest: ClassVar[Drain | None] = None

    def __init__(self) -> None:
        Drain.newest = self
        self.wanted = False
        self._pid = os.getpid()
        self._takes_part = (
            constants.ENV_AGENT_PID in os.environ
            and threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        )
        if self._takes_part:
            signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: object) -> None:
        del number, frame
        if os.getpid() != self._pid:  # a forked child, asked before `_give_back` ran in it
            self.end()
        self.wanted = True

    def end(self) -> None:
        """End as the signal would have ended it. Does not return where it was taken."""
        self.close()
        os.kill(os.getpid(), signal.SIGTERM)

    @classmethod
    def end_instead_of(cls, error: type[BaseException]) -> None:
        """End in silence where others of this drain, who were a moment faster, are why a collective fails."""
        if cls.newest is not None and cls.newest.wanted and issubclass(error, RuntimeError):
            cls.newest.end()

    def close(self) -> None:
        """Take the signal no longer."""
        if not self._takes_part:
            return
        self._takes_part = False
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _give_back() -> None:
    """Let SIGTERM do in a forked child what it did before a drain took it."""
    taker = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    if isinstance(taker, Drain):
        taker.close()
    Drain.newest = None


os.register_at_fork(after_in_child=_give_back)
