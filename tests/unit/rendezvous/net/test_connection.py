"""One connection over a real socket: peers that vanish, send too much, or are given up in between."""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
import struct
from collections.abc import Callable

import pytest

from elastic_resume.rendezvous.net import connection as connection_module
from elastic_resume.rendezvous.net import protocol
from elastic_resume.rendezvous.net.connection import Connection
from tests.support.rendezvous_nodes import (
    RUN,
    TIMEOUT_S,
    TOKEN,
    authenticate,
    listener_address,
    on_event_loop,
    read_line,
)
from tests.support.rendezvous_shell import count_timers

STATUS_KEY = protocol.derive_status_key(TOKEN)
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with which a close sends a reset."""


class Recorder:
    """A handler that keeps what it is told."""

    def __init__(self, *, closes_at_line: bool = False) -> None:
        self.calls: list[str] = []
        self.lines: list[bytes] = []
        self.reasons: list[str] = []
        self.closed = asyncio.Event()
        self.got_line = asyncio.Event()
        self._closes_at_line = closes_at_line

    def on_connected(self, _: Connection) -> None:
        """Keep it."""
        self.calls.append("connected")

    def on_authenticated(self, _: Connection) -> None:
        """Keep it."""
        self.calls.append("authenticated")

    def on_line(self, connection: Connection, line: bytes) -> None:
        """Keep it, and close the connection if told so."""
        self.lines.append(line)
        self.got_line.set()
        if self._closes_at_line:
            connection.close()

    def on_ended(self, _: Connection, reason: str) -> None:
        """Keep the reason."""
        self.calls.append("ended")
        self.reasons.append(reason)

    def on_dropped(self, _: Connection, reason: str) -> None:
        """Keep it."""
        del reason
        self.calls.append("dropped")

    def on_socket_closed(self, _: Connection) -> None:
        """Keep it."""
        self.calls.append("closed")
        self.closed.set()


async def accept(
    handler: Recorder, handshake_timeout_s: float = TIMEOUT_S
) -> tuple[Connection, socket.socket]:
    """Return the acceptor's connection over TCP, and the socket of its peer."""
    handshake = protocol.accept(TOKEN, RUN, secrets.token_hex(32))
    connection = Connection(handler, handshake, handshake_timeout_s)
    peer, taken = connect_sockets()
    await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, taken)
    return connection, peer


def connect_sockets() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = socket.create_connection(listener.getsockname(), timeout=TIMEOUT_S)
        taken, _ = listener.accept()
    return peer, taken


def make_dialler(handler: Recorder) -> Connection:
    """Return a connection that is not connected yet."""
    return Connection(handler, protocol.dial(TOKEN, RUN, secrets.token_hex(32)), TIMEOUT_S, 1)


def receive_all(peer: socket.socket) -> int:
    """Read until the end of the connection; return how many bytes there were."""
    return sum(map(len, iter(lambda: peer.recv(1 << 16), b"")))


def reset(peer: socket.socket) -> None:
    """Close a socket with a reset."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    peer.close()


@pytest.mark.parametrize("give_up", [Connection.close, Connection.abort], ids=["close", "abort"])
@on_event_loop
async def test_connection_given_up_while_it_connects_sends_nothing(
    give_up: Callable[[Connection], None],
) -> None:
    """It has no socket yet; the kernel finishes the connection, which is closed at once."""
    handler = Recorder()
    connection = make_dialler(handler)
    connection.write(b"too early\n")
    connection.send_line(b"too early\n")
    assert connection.queued_bytes == 0
    give_up(connection)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await connection_module.connect(connection, listener_address(listener))
        await handler.closed.wait()
        with listener.accept()[0] as taken:
            assert await asyncio.to_thread(receive_all, taken) == 0
    assert handler.calls == ["closed"]


@on_event_loop
async def test_close_sends_what_is_queued() -> None:
    """The peer reads late: more than the kernel takes is queued."""
    connection, peer = await accept(Recorder())
    with peer:
        proof = await asyncio.to_thread(authenticate, peer)
        line = b"x" * (16 << 20) + b"\n"
        connection.send_line(line)
        assert connection.queued_bytes
        connection.close()
        connection.send_line(b"after the end\n")
        assert await asyncio.to_thread(receive_all, peer) == len(proof.signer.sign(line))


@on_event_loop
async def test_reset_is_reported_once_and_later_writes_are_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A leader may send many messages before asyncio reports the loss; it logs each write after the fifth."""
    handler = Recorder()
    connection, peer = await accept(handler)
    reset(peer)
    for _ in range(20):
        connection.write(b"to nobody\n")
    await handler.closed.wait()
    assert handler.calls == ["connected", "ended", "closed"]
    assert any(text in handler.reasons[0] for text in ("reset", "Broken pipe"))
    assert not caplog.text


@on_event_loop
async def test_lines_behind_the_one_that_ends_the_connection_are_ignored() -> None:
    """They arrive in one packet."""
    handler = Recorder(closes_at_line=True)
    _, peer = await accept(handler)
    with peer:
        signer = (await asyncio.to_thread(authenticate, peer)).signer
        peer.sendall(b"".join(signer.sign(b"%d\n" % number) for number in range(3)))
        await handler.closed.wait()
    assert handler.lines == [b"0"]
    assert handler.calls == ["connected", "authenticated", "closed"], "the handler knows its own decision"


@on_event_loop
async def test_wrong_proof_is_answered_and_drops_the_connection() -> None:
    """The dialler can report the reason too."""
    handler = Recorder()
    connection, peer = await accept(handler)
    with peer:
        with pytest.raises(protocol.ProtocolError, match="does not hold the run's token"):
            await asyncio.to_thread(authenticate, peer, b"another token of 16 bytes")
        await handler.closed.wait()
    assert handler.calls == ["connected", "dropped", "ended", "closed"]
    assert connection.has_greeted


@on_event_loop
async def test_authentication_lifts_the_limits_of_the_handshake() -> None:
    """A peer may take longer than the handshake's timeout, and its lines may be long; keepalive is on."""
    handler = Recorder()
    connection, peer = await accept(handler, handshake_timeout_s=0.2)
    with peer:
        signer = (await asyncio.to_thread(authenticate, peer)).signer
        await asyncio.sleep(0.3)
        await asyncio.to_thread(peer.sendall, signer.sign(b"x" * 100_000 + b"\n"))
        await handler.got_line.wait()
        assert connection.peer_address == "{}:{}".format(*peer.getsockname())
        assert connection._transport is not None
        server_socket = connection._transport.get_extra_info("socket")
        assert server_socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    await handler.closed.wait()
    assert handler.reasons == ["closed"]


@on_event_loop
async def test_status_client_may_send_short_lines_only() -> None:
    """Its key is no member's."""
    handler = Recorder()
    _, peer = await accept(handler)
    with peer:
        await asyncio.to_thread(authenticate, peer, STATUS_KEY, status_only=True)
        peer.sendall(b"x" * (protocol.MAX_GREETING_BYTES + 1))
        await handler.closed.wait()
    assert handler.reasons == [f"a line of more than {protocol.MAX_GREETING_BYTES} bytes"]


@on_event_loop
async def test_peer_that_vanishes_before_its_address_is_known_is_reported() -> None:
    """The kernel names no peer after a reset."""
    handler = Recorder()
    connection = make_dialler(handler)
    peer, taken = connect_sockets()
    reset(taken)
    assert peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNRESET
    await asyncio.get_running_loop().create_connection(lambda: connection, sock=peer)
    await handler.closed.wait()
    assert handler.calls == ["connected", "ended", "closed"]
    assert connection.peer_address.startswith("an unknown address")


@on_event_loop
async def test_ended_connection_leaves_no_timer() -> None:
    """It would keep the connection and its incomplete line for seconds, and peers may connect without end."""
    timers = count_timers()
    handler = Recorder()
    _, peer = await accept(handler)
    assert count_timers() == timers + 1
    with peer:
        peer.sendall(b"x" * protocol.MAX_GREETING_BYTES)
        peer.shutdown(socket.SHUT_WR)
        await handler.closed.wait()
    assert count_timers() == timers


@pytest.mark.parametrize(
    ("error", "reason", "is_refused"),
    [
        (OSError(errno.ECONNREFUSED, "Connect call failed ('a', 1)"), "Connection refused", True),
        (OSError(errno.ENETUNREACH, "Connect call failed ('a', 1)"), "Network is unreachable", False),
        (socket.gaierror(socket.EAI_NONAME, "no such name"), "no such name", False),
        (TimeoutError(), "TimeoutError", False),
        (ValueError("a is not an address"), "a is not an address", False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
@on_event_loop
async def test_failure_to_connect_has_a_reason(error: Exception, reason: str, *, is_refused: bool) -> None:
    """Only a refusal proves the death of a process; the reason has no address."""
    handler = Recorder()
    connection = make_dialler(handler)
    connection.on_dial_failed(error)
    connection.on_dial_failed(error)
    assert connection.was_refused is is_refused
    assert handler.calls == ["ended"]
    assert reason in handler.reasons[0]
    assert "('a', 1)" not in handler.reasons[0]


@on_event_loop
async def test_wrong_answer_of_an_acceptor_is_reported() -> None:
    """The dialler sends its greeting, and no proof to another program."""
    handler = Recorder()
    connection = make_dialler(handler)
    peer, taken = connect_sockets()
    with taken:
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=peer)
        assert b"elastic_resume" in await asyncio.to_thread(read_line, taken)
        taken.sendall(b"220 mail.test ESMTP\r\n")
        await handler.closed.wait()
        assert await asyncio.to_thread(receive_all, taken) == 0
    assert handler.reasons == ["a line that is not JSON"]
