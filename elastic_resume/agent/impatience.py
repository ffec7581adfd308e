"""Notices that somebody asks for the end a second time, and does not want to wait for the grace.

torchelastic takes the signals, and waits for workers that it has asked to end. The interpreter writes each
signal's number into a pipe, whoever handles it: a thread reads them there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1}


@contextlib.contextmanager
def heeded(stop_at_once: Callable[[], None], ending: Callable[[], None]) -> Iterator[None]:
    """Call ``stop_at_once``, in a thread, when SIGINT has come twice. For the main thread.

    ``ending`` is called with each signal that asks for the end: workers may take their time from then on.
    """
    bell, ringer = os.pipe()
    os.set_blocking(ringer, False)
    before = signal.set_wakeup_fd(ringer, warn_on_full_buffer=False)
    thread = threading.Thread(
        target=_listen, args=(bell, stop_at_once, ending), name="impatience", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(ringer)
        thread.join()


def _listen(bell: int, stop_at_once: Callable[[], None], ending: Callable[[], None]) -> None:
    interrupts = 0
    while numbers := os.read(bell, 4096):
        if ENDING.intersection(numbers):
            ending()
        interrupts += numbers.count(signal.SIGINT)
        if interrupts > 1:
            stop_at_once()
    os.close(bell)
