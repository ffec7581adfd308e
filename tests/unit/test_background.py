"""Background threads: repetition, errors, accepted connections, and end."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading

import pytest

from elastic_resume.background import MAX_OFFERS, BackgroundThread, OfferQueue, map_in_daemon_threads
from tests.support.processes import wait_for


def test_thread_calls_work_until_closed() -> None:
    """`close` waits for the thread."""
    calls: list[int] = []

    def work() -> float:
        calls.append(threading.get_ident())
        return 0.001

    thread = BackgroundThread("test", work)
    thread.start()
    wait_for(lambda: len(calls) >= 3, "three calls")
    thread.close()
    assert thread.is_closing
    assert not set(calls) & {other.ident for other in threading.enumerate()}


def test_thread_ends_when_work_returns_none() -> None:
    """`close` may be called afterwards."""
    before = threading.active_count()
    thread = BackgroundThread("test", lambda: None)
    thread.start()
    wait_for(lambda: threading.active_count() == before, "the end of the thread")
    thread.close()


def test_thread_runs_again_after_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """The error is logged with the name of the thread, or passed to ``on_error``."""
    errors: list[Exception] = []
    results = [True, False]

    def work() -> None:
        if results.pop():
            return
        raise ValueError("defect")

    for on_error in (None, errors.append):
        results[:] = [True, False]
        thread = BackgroundThread("memory-pressure", work, retry_s=0.0, on_error=on_error)
        with caplog.at_level(logging.ERROR):
            thread.start()
            wait_for(lambda: not results, "a second call")
            thread.close()
    assert [str(error) for error in errors] == ["defect"]
    (record,) = caplog.records
    assert "thread memory-pressure failed" in record.getMessage()


def test_unstarted_thread_can_be_closed() -> None:
    """Nothing is waited for."""
    BackgroundThread("test", lambda: None).close()


# In a process of its own: other threads of this one need descriptors too.
ACCEPTS = """
import resource, socket, threading
from elastic_resume import background

listener = socket.create_server(("127.0.0.1", 0))
address = listener.getsockname()
thread = background.AcceptThread("test-accept", listener, lambda connection: connection.sendall(b"served"))
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
with socket.create_connection(address) as client:
    resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 1, limits[1]))
    thread.start()
    client.settimeout(2 * background.ACCEPT_RETRY_S)
    try:
        raise SystemExit(f"received {client.recv(100)}")
    except TimeoutError:
        pass
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    client.settimeout(None)
    assert (client.recv(100), client.recv(100)) == (b"served", b"")
thread.close()
assert not any(other.name == "test-accept" for other in threading.enumerate())
assert listener.fileno() == -1
try:
    socket.create_connection(address)
except ConnectionRefusedError:
    print("refused")
"""


def test_accept_thread_serves_again_after_it_had_no_descriptor_left() -> None:
    """A served connection is closed. `close` ends the thread, and then the port refuses."""
    done = subprocess.run(
        [sys.executable, "-c", ACCEPTS], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.stdout, done.stderr) == ("refused\n", "")


def test_queue_drops_oldest_offers_of_slow_taker_and_those_that_wait_at_the_end() -> None:
    """Whoever offers does not wait for it."""
    taken: list[int] = []
    has_begun, may_go_on = threading.Semaphore(0), threading.Semaphore(0)

    def take(offer: int) -> None:
        taken.append(offer)
        has_begun.release()
        assert may_go_on.acquire(timeout=60)

    offers = OfferQueue("test", take)
    before = set(threading.enumerate())
    offers.start()
    threads = set(threading.enumerate()) - before
    assert threads
    offers.put(0)
    assert has_begun.acquire(timeout=60)
    for offer in range(1, MAX_OFFERS + 3):
        offers.put(offer)
    may_go_on.release()
    assert has_begun.acquire(timeout=60)
    assert taken == [0, 3]
    offers.close(timeout_s=0.01)
    assert offers.is_closing
    may_go_on.release()
    offers.close()
    assert taken == [0, 3]
    assert threads.isdisjoint(threading.enumerate())


def test_items_are_mapped_in_order_by_threads_that_end_with_the_process() -> None:
    """An exception is the caller's, and the items that wait are left."""
    daemons = []

    def double(number: int) -> int:
        daemons.append(threading.current_thread().daemon)
        if number < 0:
            raise ValueError(number)
        return 2 * number

    assert map_in_daemon_threads(double, range(20), 4) == [2 * number for number in range(20)]
    assert map_in_daemon_threads(double, [], 4) == []
    assert all(daemons)
    with pytest.raises(ValueError, match="-1"):
        map_in_daemon_threads(double, [-1, *range(1000)], 1)
    assert len(daemons) == 20 + 1
