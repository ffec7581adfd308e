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

from elastic_resume.agent.ahead import ahead

ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}


@contextlib.contextmanager
def heeded(
    stop_at_once: Callable[[], None], ending: Callable[[], None], heard: Callable[[int], object] = int
) -> Iterator[None]:
    """Call ``stop_at_once``, in a thread, when SIGINT has come twice. For the main thread.

    ``ending`` is called with each signal that asks for the end: workers may take their time from then on.
    ``heard`` gets its number.
    """
    bell, ringer = os.pipe()
    os.set_blocking(ringer, False)
    before = signal.set_wakeup_fd(ringer, warn_on_full_buffer=False)
    parts = (bell, stop_at_once, ending, heard)
    thread = threading.Thread(target=_listen, args=parts, name="impatience", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(ringer)
        thread.join()


def _listen(
    bell: int, stop_at_once: Callable[[], None], ending: Callable[[], None], heard: Callable[[int], object]
) -> None:
    interrupts = 0
    wanted = {int(number) for number in (*ENDING, *ahead())}
    while numbers := os.read(bell, 4096):
        for number in filter(wanted.__contains__, numbers):
            ending()
            heard(number)
        interrupts += numbers.count(signal.SIGINT)
        if interrupts > 1:
            stop_at_once()
    os.close(bell)
