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


class DrainRequest:
    """Whether this process has been asked to end."""

    current: ClassVar[DrainRequest | None] = None

    def __init__(self) -> None:
        DrainRequest.current = self
        self.requested = False
        self._pid = os.getpid()
        self._handler_installed = (
            constants.ENV_AGENT_PID in os.environ
            and threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        )
        if self._handler_installed:
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number: int, frame: object) -> None:
        del number, frame
        if os.getpid() != self._pid:  # a forked child, asked before `_give_back` ran in it
            self.terminate_process()
        self.requested = True

    def terminate_process(self) -> None:
        """End as the signal would have ended it. Does not return where it was taken."""
        self.restore_handler()
        os.kill(os.getpid(), signal.SIGTERM)

    @classmethod
    def terminate_instead_of_raising(cls, error_type: type[BaseException]) -> None:
        """End in silence where others of this drain, who were a moment faster, are why a collective fails."""
        if cls.current is not None and cls.current.requested and issubclass(error_type, RuntimeError):
            cls.current.terminate_process()

    def restore_handler(self) -> None:
        """Take the signal no longer."""
        if not self._handler_installed:
            return
        self._handler_installed = False
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _restore_handler_in_child() -> None:
    """Let SIGTERM do in a forked child what it did before a drain took it."""
    taker = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    if isinstance(taker, DrainRequest):
        taker.restore_handler()
    DrainRequest.current = None


os.register_at_fork(after_in_child=_restore_handler_in_child)
