"""End a worker at a step boundary with its state on disk, when its agent drains the node.

The handler is installed only under our agent, where SIGTERM means a drain. Under torchrun every restart sends
SIGTERM, and no step may ever finish again. A handler of the script's own is left in place. Processes that the
script forks get the default action back: they reach no step boundary, and ``Process.terminate()`` must end
them.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import ClassVar

from elastic_resume import constants


class DrainRequest:
    """Records whether the agent has requested the end of this process."""

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
        if os.getpid() != self._pid:  # a forked child, before `_restore_handler_in_child` has run
            self.terminate_process()
        self.requested = True

    def terminate_process(self) -> None:
        """End this process as an unhandled SIGTERM would."""
        self.restore_handler()
        os.kill(os.getpid(), signal.SIGTERM)

    @classmethod
    def terminate_instead_of_raising(cls, error_type: type[BaseException]) -> None:
        """End this process silently if a peer of the same drain ended first and broke a collective."""
        if cls.current is not None and cls.current.requested and issubclass(error_type, RuntimeError):
            cls.current.terminate_process()

    def restore_handler(self) -> None:
        """Restore the default action of SIGTERM, if this object has replaced it."""
        if not self._handler_installed:
            return
        self._handler_installed = False
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _restore_handler_in_child() -> None:
    owner = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    if isinstance(owner, DrainRequest):
        owner.restore_handler()
    DrainRequest.current = None


os.register_at_fork(after_in_child=_restore_handler_in_child)
