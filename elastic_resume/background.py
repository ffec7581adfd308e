"""Daemon threads that call one function again and again, take offers, or accept connections, until closed.

The agent's main thread is blocked in torchelastic, so the agent's periodic work runs in such threads:
looking for hangs, measuring memory, supervising the fork server. An exception in that work must neither end
it in silence nor end the job. So the thread logs the exception and calls the function again later.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import psutil

_LOGGER = logging.getLogger(__name__)
ACCEPT_RETRY_S = 0.1
NICENESS = 5
MAX_OFFERS = 8
T = TypeVar("T")
R = TypeVar("R")


class BackgroundThread:
    """Calls ``work`` in a daemon thread, from `start` to `close`."""

    def __init__(
        self,
        name: str,
        work: Callable[[], float | None],
        *,
        retry_s: float = 1.0,
        on_error: Callable[[Exception], None] | None = None,
    ) -> None:
        """Prepare the thread.

        Args:
            name: name of the thread, also for messages.
            work: does the work once. It returns the seconds until its next call, or None to end the thread.
            retry_s: seconds until the next call after one that raised.
            on_error: gets an exception of ``work``. By default it is logged.

        """
        self._name = name
        self._work = work
        self._retry_s = retry_s
        self._on_error = on_error or self._log_error
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_closing(self) -> bool:
        """Whether the thread is to end."""
        return self._closing.is_set()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def request_close(self) -> None:
        """Have the thread end after its present call."""
        self._closing.set()

    def close(self, timeout_s: float | None = None) -> None:
        """Have the thread end after its present call, and wait for that, at most ``timeout_s``."""
        self.request_close()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def join(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` until ``work`` has returned None; return whether it has."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        wait_s: float | None = 0.0
        while wait_s is not None and not self._closing.wait(wait_s):
            try:
                wait_s = self._work()
            except Exception as error:  # noqa: BLE001 - a defect in one task must not end the job
                self._on_error(error)
                wait_s = self._retry_s

    def _log_error(self, error: Exception) -> None:
        text = "thread %s failed and runs again in %g s; a defect of elastic_resume"
        _LOGGER.error(text, self._name, self._retry_s, exc_info=error)


class OfferQueue:
    """Hands offers to ``take``, which may be slow, in a thread of low priority from `start` to `close`.

    Whoever offers never waits for it. Of more than `MAX_OFFERS` that wait, the oldest are dropped.
    """

    def __init__(self, name: str, take: Callable[..., object]) -> None:
        """``name`` is the thread's."""
        self._take = take
        self._offers: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._thread = BackgroundThread(name, self._take_next)

    @property
    def is_closing(self) -> bool:
        """Whether ``take`` is to return soon."""
        return self._thread.is_closing

    def start(self) -> None:
        """Start taking."""
        self._thread.start()

    def put(self, *offer: Any) -> None:
        """Offer the arguments of ``take``. Any thread may call this."""
        while self._offers.qsize() >= MAX_OFFERS:
            with contextlib.suppress(queue.Empty):
                self._offers.get_nowait()
        self._offers.put(offer)

    def close(self, timeout_s: float | None = None) -> None:
        """Drop the offers that wait; wait for the one that is being taken, at most ``timeout_s``."""
        self._thread.request_close()
        self.put()
        self._thread.close(timeout_s)

    def _take_next(self) -> float:
        lower_priority()
        offer = self._offers.get()
        if not self.is_closing:
            self._take(*offer)
        return 0.0


def lower_priority() -> None:
    """Lower this thread's CPU and I/O priority."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError, psutil.Error):
        os.setpriority(os.PRIO_PROCESS, thread, NICENESS)  # on Linux this applies to the thread
        psutil.Process(thread).ionice(psutil.IOPRIO_CLASS_BE, 7)


def map_in_daemon_threads(function: Callable[[T], R], items: Iterable[T], threads: int) -> list[R]:
    """Return the results in order; raise the first exception.

    The interpreter joins the threads of a `ThreadPoolExecutor` at its exit, however long a request takes.
    """
    waiting: queue.SimpleQueue[tuple[int, T]] = queue.SimpleQueue()
    results: queue.SimpleQueue[tuple[int, R | None, BaseException | None]] = queue.SimpleQueue()
    count = 0
    for count, item in enumerate(items, 1):
        waiting.put((count - 1, item))

    has_failed = threading.Event()

    def work() -> None:
        with contextlib.suppress(queue.Empty):
            while not has_failed.is_set():
                index, item = waiting.get_nowait()
                try:
                    results.put((index, function(item), None))
                except BaseException as error:  # noqa: BLE001 - the caller raises it
                    has_failed.set()
                    results.put((index, None, error))

    for _ in range(min(threads, count)):
        threading.Thread(target=work, name="elastic-resume-map", daemon=True).start()
    found: dict[int, R] = {}
    for _ in range(count):
        index, result, error = results.get()
        if error is not None:
            raise error
        found[index] = cast("R", result)
    return [found[index] for index in range(count)]


def listen(host: str) -> socket.socket:
    """Listen on TCP at ``host``, an address or a name of this node, at a port that the system chooses."""
    try:
        is_ipv6 = ipaddress.ip_address(host).version == 6
    except ValueError:  # a name may lead to a loopback address here, and to another one elsewhere
        host, is_ipv6 = "", socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    return socket.create_server((host, 0), family=family, dualstack_ipv6=is_ipv6 and not host)


class AcceptThread:
    """Accepts connections and serves each in a daemon thread of its own, from `start` to `close`."""

    def __init__(self, name: str, listener: socket.socket, serve: Callable[[socket.socket], object]) -> None:
        """``serve`` gets each connection, which is closed afterwards. `close` closes ``listener``."""
        self._name = name
        self._listener = listener
        self._serve = serve
        # No descriptor or thread may be left for a moment; the thread tries again.
        self._thread = BackgroundThread(name, self._accept, retry_s=ACCEPT_RETRY_S, on_error=lambda _: None)

    @property
    def is_closing(self) -> bool:
        """Whether no more connections are accepted."""
        return self._thread.is_closing

    def start(self) -> None:
        """Start accepting."""
        self._thread.start()

    def close(self) -> None:
        """Accept no more connections. Those that were accepted live on."""
        self._thread.request_close()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._thread.close()
        self._listener.close()

    def _accept(self) -> float:
        connection, _ = self._listener.accept()
        name = f"{self._name}-connection"
        try:
            threading.Thread(target=self._run, args=(connection,), name=name, daemon=True).start()
        except RuntimeError:  # the process may start no more threads
            connection.close()
        return 0.0

    def _run(self, connection: socket.socket) -> None:
        with connection:
            self._serve(connection)
