"""Test what launcher shims and those that answer them accept from whom, with real sockets and processes."""

from __future__ import annotations

import _socket
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from elastic_resume.agent.workers import worker_request

OTHER_USER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
REQUEST = json.dumps({"environ": {"A": "b"}}).encode()
SIZE = len(REQUEST).to_bytes(4, "big")
SENDER = f"""
import os, sys
from elastic_resume.agent.workers import worker_request
os.setuid(int(sys.argv[2]))
sys.exit(worker_request.send("\\0" + sys.argv[1], {REQUEST!r}) is None)
"""
LISTENER = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0" + sys.argv[1])
listener.listen()
print(flush=True)
connection, _ = listener.accept()
connection.sendall(b"y")
sys.stdin.read()
"""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Yield a listening socket with an abstract name."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0elastic_resume-test-{secrets.token_hex(8)}")
        listener.listen()
        listener.settimeout(60)
        yield listener


def accept(listener: socket.socket) -> _socket.socket:
    """Accept a connection as the supervisor does."""
    return _socket.socket(fileno=listener.accept()[0].detach())


@needs_root
@pytest.mark.parametrize("user", [0, OTHER_USER])
def test_receive_accepts_wellformed_request_of_own_user_only(user: int, listener: socket.socket) -> None:
    """The request is the same: only its sender's user decides."""
    name = listener.getsockname()[1:].decode()
    with subprocess.Popen(
        [sys.executable, "-c", SENDER, name, str(user)], stderr=subprocess.DEVNULL
    ) as sender:
        connection = accept(listener)
        with contextlib.closing(connection):
            if user == 0:
                request, streams = worker_request.receive(connection)
                assert request == {"environ": {"A": "b"}}
                for stream in streams:
                    os.close(stream)
                connection.send(b"y")
            else:
                with pytest.raises(worker_request.RequestRefusedError, match="another user"):
                    worker_request.receive(connection)
    assert sender.returncode == (user != 0)


@needs_root
@pytest.mark.parametrize("user", [0, OTHER_USER])
def test_send_gives_its_request_to_own_user_only(user: int) -> None:
    """A request has the environment of a worker, with its secrets."""
    name = f"elastic_resume-test-{secrets.token_hex(8)}"
    command = [sys.executable, "-I", "-c", LISTENER, name, str(user)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        connection = worker_request.send("\0" + name, REQUEST)
        assert (connection is not None) == (user == 0)
        if connection is not None:
            connection.close()


def send_data(address: str, data: bytes, *, streams: int = 3, keeps_open: bool = True) -> socket.socket:
    """Send data as a launcher shim does; return the connection, which has ended unless it ``keeps_open``."""
    client = socket.socket(socket.AF_UNIX)
    client.connect(address)
    socket.send_fds(client, [data[:4]], list(range(streams)))
    client.sendall(data[4:])
    if not keeps_open:
        client.close()
    return client


@pytest.mark.parametrize(
    ("data", "changes", "error"),
    [
        (SIZE + REQUEST, {"streams": 2}, "no whole message"),
        (SIZE + REQUEST, {"streams": 0}, "no streams"),
        (SIZE[1:], {"keeps_open": False}, "no whole message"),
        (b"\0\0\0\0" + REQUEST, {}, "no whole message"),
        ((worker_request.MAX_REQUEST_BYTES + 1).to_bytes(4, "big") + REQUEST, {}, "no whole message"),
        (SIZE + REQUEST[:-1], {"keeps_open": False}, "no whole message"),
        (SIZE + REQUEST, {"keeps_open": False}, "has ended"),
        (SIZE + REQUEST[:-1], {}, "timed out"),
    ],
)
def test_receive_refuses_incomplete_request_and_closes_its_streams(
    data: bytes,
    changes: dict[str, int],
    error: str,
    listener: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each refused request would otherwise cost its receiver three descriptors. An end is noticed at once."""
    timeout_s = 0.1 if changes.get("keeps_open", True) else 600
    monkeypatch.setattr(worker_request, "REQUEST_TIMEOUT_S", timeout_s)
    with contextlib.closing(send_data(listener.getsockname(), data, **changes)):  # type: ignore[arg-type]
        connection = accept(listener)
        with contextlib.closing(connection):
            before = os.listdir("/proc/self/fd")  # noqa: PTH208
            with pytest.raises((ValueError, OSError), match=error):
                worker_request.receive(connection)
            assert os.listdir("/proc/self/fd") == before  # noqa: PTH208


def test_request_that_trickles_in_is_refused_in_time(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes within the socket's timeout, but other shims wait meanwhile."""
    monkeypatch.setattr(worker_request, "REQUEST_TIMEOUT_S", 0.2)
    code = """
import socket, sys, time
client = socket.socket(socket.AF_UNIX)
client.connect("\\0" + sys.argv[1])
socket.send_fds(client, [(10_000).to_bytes(4, "big")], [0, 1, 2])
try:
    for _ in range(10_000):
        client.send(b" ")
        time.sleep(0.01)
except BrokenPipeError:
    pass
"""
    name = listener.getsockname()[1:].decode()
    with subprocess.Popen([sys.executable, "-I", "-c", code, name]) as process:
        connection = accept(listener)
        start = time.monotonic()
        with contextlib.closing(connection), pytest.raises(ConnectionError, match="no whole message"):
            worker_request.receive(connection)
        assert time.monotonic() - start < 60
    assert process.returncode == 0


def test_accepted_connection_waits_without_limit(listener: socket.socket) -> None:
    """The limit is for the request: what follows may take as long as its worker."""
    with (
        contextlib.closing(send_data(listener.getsockname(), SIZE + REQUEST)),
        contextlib.closing(accept(listener)) as connection,
    ):
        _, streams = worker_request.receive(connection)
        for stream in streams:
            os.close(stream)
        assert connection.gettimeout() is None


def test_request_replaces_environment_and_streams_of_its_receiver() -> None:
    """The kernel passes a variable without a name on, and one whose name has an equals sign."""
    code = """
import os
from elastic_resume.agent.workers import worker_request
worker_request.replace_environment({"": "x", "=A": "y", "B": "\\xff"})
print(os.environb, flush=True)
streams = [os.dup(1) for _ in range(3)]
worker_request.replace_streams(streams)
print([os.path.exists(f"/proc/self/fd/{stream}") for stream in streams])
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout
    assert found == "environ({b'B': b'\\xff'})\n[False, False, False]\n"


@pytest.mark.parametrize(("is_stopped", "kills_if_stopped"), [(True, True), (True, False), (False, True)])
def test_send_kills_only_stopped_supervisor_and_only_if_told_to(
    is_stopped: bool, kills_if_stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor that runs may answer late."""
    monkeypatch.setattr(worker_request, "STOPPED_CHECK_S", 0.05)
    name = f"elastic_resume-test-{secrets.token_hex(8)}"
    code = LISTENER.replace(
        'connection.sendall(b"y")', 'print(flush=True); sys.stdin.read(1); connection.send(b"y")'
    )
    command = [sys.executable, "-I", "-c", code, name, str(os.getuid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        sent: list[object] = []
        sender = threading.Thread(
            target=lambda: sent.append(
                worker_request.send("\0" + name, REQUEST, kills_if_stopped=kills_if_stopped)
            )
        )
        if is_stopped:
            process.send_signal(signal.SIGSTOP)
        sender.start()
        if is_stopped and kills_if_stopped:
            assert process.wait(60) == -signal.SIGKILL
        else:
            sender.join(0.3)
            assert sender.is_alive()
            process.send_signal(signal.SIGCONT)
            process.stdin.write(b"1")
            process.stdin.flush()
        sender.join(60)
        assert [connection is not None for connection in sent] == [not (is_stopped and kills_if_stopped)]
        for connection in sent:
            if connection is not None:
                connection.close()  # type: ignore[attr-defined]
