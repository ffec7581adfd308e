"""How simulated nodes end: with whoever simulates them, or killed, and then gone for certain."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import select
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import psutil

from elastic_resume.errors import MachineError

KILLED_S = 30.0  # one that sleeps in the kernel for longer is left to it
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_births: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] | None = None
_lock = threading.Lock()
T = TypeVar("T")


class Agent(Protocol):
    """A process of a simulated node, with the words that `subprocess.Popen` has for its end."""

    @property
    def pid(self) -> int:
        """By which this machine knows it."""

    def poll(self) -> int | None:
        """Give the exit code, None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, at most so many seconds."""

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless it is known to have ended."""


def start_to_last(start: Callable[[], T]) -> T:
    """Start a process that is to end with this one, and not before.

    The kernel counts the thread that forks as the parent, so that is one which lasts as long as the process:
    threads that are waited for, as those of an executor, end before what runs at exit.

    Raises:
        MachineError: this process may have no more threads.

    """
    global _births  # noqa: PLW0603  one for the process
    with _lock:
        if _births is None:
            births: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
            thread = threading.Thread(target=_bear, args=(births,), name="elastic-resume-births", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise MachineError(f"no process can be started: {error}.") from error
            _births = births
    born: Future[T] = Future()
    _births.put((start, born))
    return born.result()


def _bear(births: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]]) -> None:
    while True:
        start, born = births.get()
        try:
            born.set_result(start())
        except BaseException as error:  # noqa: BLE001  it is raised where it was asked for
            born.set_exception(error)
        del start, born  # what a process stands on is kept by whoever has it, and not here until the next


def _forget_births() -> None:
    """A fork has none of this process's threads."""
    global _births, _lock
    _births, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_births)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends: see `start_to_last`. Between fork and exec."""
    _LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def kill(process: psutil.Process) -> None:
    """Send SIGKILL; one that is gone already will do."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


def wait_for(process: psutil.Process) -> None:
    """Wait until all threads of a killed process have ended; init may take note seconds later."""
    with contextlib.suppress(psutil.NoSuchProcess, OSError):
        if not process.is_running():
            return
        descriptor = os.pidfd_open(process.pid)
        try:
            waiting = select.poll()  # which takes descriptors of any number
            waiting.register(descriptor, select.POLLIN)
            waiting.poll(KILLED_S * 1000)
        finally:
            os.close(descriptor)
