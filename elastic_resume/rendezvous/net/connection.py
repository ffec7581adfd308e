"""Run one TCP connection between agents: the handshake, then signed lines in both directions.

A connection calls its `ConnectionHandler`. `on_connected` comes first, then `on_authenticated` once both
sides have proved that they hold the token. `on_line` follows for each line, and `on_ended` once, unless the
handler closed it. It does not interpret lines. Before authentication a line may have
`protocol.MAX_GREETING_BYTES` at most.

The module also limits what unauthenticated peers cost. A flood of them must not lock members out, so only a
bounded number may wait (`HandshakeLimiter`), and it must not fill the log (`LogThrottle`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import functools
import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from elastic_resume import failpoints
from elastic_resume.rendezvous.endpoint import ResolveFunction, parse_address, resolve_name
from elastic_resume.rendezvous.net import protocol
from elastic_resume.rendezvous.net.view_delta import NO_BASE, Base
from elastic_resume.units import format_address

# A peer's kernel closed the connection. Other errors (no route, time-out) say nothing about the peer.
_CLOSED_ERRNOS = {errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED}
_READ_BYTES = 1 << 18
_thread_local = threading.local()

MAX_PAUSE_FACTOR = 64


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits on what peers can make this process spend."""

    max_connections: int = 16_384  # members of the largest job, with room to reconnect
    max_unauthenticated: int = 2048  # connections in the handshake: all of a large job, when its leader dies
    handshake_timeout_s: float = 5.0  # limit for the whole handshake
    max_queued_bytes: int = 64 * 1024 * 1024  # limit of bytes queued for a peer that does not read
    idle_timeout_s: float = 30.0  # an authenticated peer that sends nothing is disconnected after this time
    max_status_clients: int = 32
    log_interval_s: float = 10.0  # minimum time between two log lines about dropped connections


DEFAULT_LIMITS = ConnectionLimits()


class ConnectionHandler(Protocol):
    """The owner of connections."""

    def on_connected(self, connection: Connection) -> None:
        """Handle a new connection; the peer is not authenticated."""

    def on_authenticated(self, connection: Connection) -> None:
        """Handle the end of the handshake: both sides hold the token."""

    def on_line(self, connection: Connection, line: bytes) -> None:
        """Handle a line; `protocol.ProtocolError` drops the connection."""

    def on_ended(self, connection: Connection, reason: str) -> None:
        """Handle the end, or a failed attempt to connect."""

    def on_dropped(self, connection: Connection, reason: str) -> None:
        """Handle our decision to end the connection; `on_ended` follows."""

    def on_socket_closed(self, connection: Connection) -> None:
        """Handle the close of the socket."""


class Connection(asyncio.BufferedProtocol):
    """One connection. ``conn_id`` is the handler's number for it, 0 until it has one."""

    def __init__(
        self,
        handler: ConnectionHandler,
        handshake: protocol.Handshake,
        handshake_timeout_s: float,
        conn_id: int = 0,
        base: Base = NO_BASE,
    ) -> None:
        """Start the handshake's timer; ``conn_id`` is given for a connection that this side dials.

        ``base`` is the newest view of this side, whose digest is in the handshake.
        """
        self.conn_id = conn_id
        self.sent_base = self.received_base = NO_BASE
        """Views that both sides have (`view_delta`): of the lines from here, and of those to here."""
        self._own_base = base
        self.status_only = False
        """The peer is a status client."""
        self.has_greeted = False
        """The peer has sent its first line: if it connected to us, a valid greeting of this job."""
        self.idle_sweeps = 0
        """Counted by the handler; reset whenever data arrives."""
        self.is_ended = False
        self.was_refused = False
        """Nothing listened at the address."""
        self.refusing_ips: list[str] = []
        self.peer_address = "an unknown address"
        self.peer_host = ""
        """The peer's IP address, once connected."""
        self._handler = handler
        self._handshake = handshake
        self._signer: protocol.LineAuthenticator | None = None
        self._verifier: protocol.LineAuthenticator | None = None
        self._line_reader = protocol.LineReader(protocol.MAX_GREETING_BYTES)
        self._buffer = _get_thread_buffer()
        self._transport: asyncio.Transport | None = None
        self._handshake_timer = asyncio.get_running_loop().call_later(
            handshake_timeout_s, self.drop, f"the handshake took more than {handshake_timeout_s:g} s"
        )

    # ---- called by the handler -----------------------------------------------------------------------

    def send(self, head: bytes, body: protocol.Body) -> None:
        """Queue the signed line of a message if the handshake is over; never block."""
        if self._signer is not None:
            self.write(failpoints.mutate("rendezvous.line", self._signer.sign_message(head, body)))

    def send_line(self, line: bytes) -> None:
        """Queue a signed line that is no message, as `send`."""
        if self._signer is not None:
            self.write(self._signer.sign(line))

    def write(self, line: bytes | bytearray) -> None:
        """Queue a line unchanged; never block."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(line)

    @property
    def queued_bytes(self) -> int:
        """Return the bytes that the kernel has not taken yet."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    def close(self) -> None:
        """Send what is queued, then close; only `on_socket_closed` follows."""
        self._set_ended()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once; only `on_socket_closed` follows."""
        self._set_ended()
        if self._transport is not None:
            self._transport.abort()

    def abort_and_report(self, reason: str) -> None:
        """Close at once and report the end."""
        if not self.is_ended:
            self.abort()
            self._handler.on_ended(self, reason)

    def drop(self, reason: str) -> None:
        """Close at once because of what the peer did, and report it."""
        if not self.is_ended:
            self._handler.on_dropped(self, reason)
            self.abort_and_report(reason)

    def on_dial_failed(self, error: Exception) -> None:
        """Report that `connect` failed."""
        self.was_refused = isinstance(error, OSError) and error.errno == errno.ECONNREFUSED
        # asyncio's text has the address, which stands beside the reason.
        number = (
            error.errno if isinstance(error, OSError) and not isinstance(error, socket.gaierror) else None
        )
        reason = os.strerror(number) if number else str(error)
        self.abort_and_report(reason or type(error).__name__)

    def _set_ended(self) -> None:
        self.is_ended = True
        self._handshake_timer.cancel()

    # ---- called by asyncio ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the greeting, or wait for the peer's."""
        self._transport = tcp = cast("asyncio.Transport", transport)
        if self.is_ended:  # given up while the kernel connected
            tcp.abort()
            return
        host, port = (tcp.get_extra_info("peername") or (self.peer_address, 0))[:2]
        self.peer_host = str(host).removeprefix("::ffff:")  # an IPv6 socket names IPv4 peers so
        self.peer_address = format_address(host, port)
        # The kernel shall notice a vanished peer while nothing is sent. (asyncio sets TCP_NODELAY.)
        tcp.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._handler.on_connected(self)
        self.write(next(self._handshake))

    def get_buffer(self, sizehint: int) -> bytearray:
        """Lend asyncio the thread's buffer: allocating one for each read took 15 µs."""
        del sizehint
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Split the data into lines and handle each until one ends the connection."""
        self.idle_sweeps = 0
        try:
            for line in self._line_reader.feed(self._buffer[:nbytes]):
                if not self._process_line(line):
                    return
        except protocol.ProtocolError as error:
            self.drop(str(error))

    def _process_line(self, line: bytes) -> bool:
        """Handle a line; return whether the connection is still open."""
        if self._verifier is not None:
            self._handler.on_line(self, self._verifier.verify(line))
        else:
            self._advance_handshake(line)
        return not self.is_ended

    def _advance_handshake(self, line: bytes) -> None:
        try:
            self.write(self._handshake.send(line))
            self.has_greeted = True
        except protocol.AuthenticationError as error:
            self.write(error.rejection_line)
            self.drop(str(error))
        except StopIteration as stop:
            result: protocol.HandshakeResult = stop.value
            self.write(result.final_line)
            self._handshake_timer.cancel()
            self.status_only = result.status_only
            self._signer, self._verifier = result.signer, result.verifier
            if result.peer_view == self._own_base.digest:
                self.sent_base = self.received_base = self._own_base
            if not self.status_only:
                self._line_reader.max_line_bytes = protocol.MAX_LINE_BYTES
            self._handler.on_authenticated(self)

    def eof_received(self) -> None:
        """Treat a half-closed connection as closed."""
        self.abort_and_report("closed")

    def connection_lost(self, error: Exception | None) -> None:
        """Report the end, unless this side closed the connection."""
        self.abort_and_report(str(error) if error else "closed")
        self._handler.on_socket_closed(self)


def _get_thread_buffer() -> bytearray:
    """Return the read buffer of this thread, which runs one event loop."""
    buffer: bytearray | None = getattr(_thread_local, "buffer", None)
    if buffer is None:
        buffer = _thread_local.buffer = bytearray(_READ_BYTES)
    return buffer


# ---- connecting ----------------------------------------------------------------------------------------


async def connect(
    connection: Connection, address: str, resolve: ResolveFunction = resolve_name, known_ip: str = ""
) -> None:
    """Connect to ``host:port``. Names are resolved each time, since addresses change.

    ``known_ip`` is the IP address at which the same process answered before; then no name is resolved.

    Raises:
        OSError: no address could be reached. It is a refusal only if all addresses refused.
        ValueError: ``address`` is not an address.

    """
    host, _, port_text = address.rpartition(":")
    host, port = known_ip or host.strip("[]"), int(port_text)
    loop = asyncio.get_running_loop()
    error: OSError = OSError(errno.EADDRNOTAVAIL, f"{address} has no address")
    ip_addresses = [host] if parse_address(host) else await _resolve_shared(host, resolve)
    for ip_address in ip_addresses:
        try:
            await loop.create_connection(lambda: connection, ip_address, port)
        except OSError as reason:
            if reason.errno == errno.ECONNREFUSED:
                connection.refusing_ips.append(ip_address)
            # One refusal among time-outs proves nothing.
            if error.errno in _CLOSED_ERRNOS | {errno.EADDRNOTAVAIL} or reason.errno not in _CLOSED_ERRNOS:
                error = reason
        except OverflowError as reason:
            raise ValueError(f"{address} is not an address") from reason
        else:
            return
    raise error


_pending_lookups: dict[tuple[asyncio.AbstractEventLoop, str], asyncio.Future[Sequence[str]]] = {}
"""Lookups under way, shared: a name server that hangs must not get a thread for each attempt to connect."""


async def _resolve_shared(host: str, resolve: ResolveFunction) -> Sequence[str]:
    loop = asyncio.get_running_loop()
    key = (loop, host)
    if key not in _pending_lookups:
        result: concurrent.futures.Future[Sequence[str]] = concurrent.futures.Future()
        result.set_running_or_notify_cancel()
        # Not an executor's thread: the interpreter would wait for it at exit, while DNS does not answer.
        threading.Thread(target=_resolve_in_thread, args=(result, resolve, host), daemon=True).start()
        task = asyncio.wrap_future(result, loop=loop)
        task.add_done_callback(functools.partial(_remove_lookup, key))
        _pending_lookups[key] = task
    return await asyncio.shield(_pending_lookups[key])


def _remove_lookup(key: tuple[asyncio.AbstractEventLoop, str], task: asyncio.Future[Sequence[str]]) -> None:
    _pending_lookups.pop(key, None)
    if not task.cancelled():
        task.exception()  # asyncio prints an exception that nobody retrieves


def _resolve_in_thread(
    result: concurrent.futures.Future[Sequence[str]], resolve: ResolveFunction, host: str
) -> None:
    try:
        ip_addresses = resolve(host)
    except Exception as error:  # noqa: BLE001 - handed to the caller
        set_result: Callable[[], None] = functools.partial(result.set_exception, error)
    else:
        set_result = functools.partial(result.set_result, ip_addresses)
    with contextlib.suppress(RuntimeError):  # the event loop has ended
        set_result()


async def cancel_lookups() -> None:
    """Cancel all lookups of this event loop, which is about to end."""
    loop = asyncio.get_running_loop()
    tasks = [task for (lookup_loop, _), task in _pending_lookups.items() if lookup_loop is loop]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# ---- unauthenticated peers -------------------------------------------------------------------------------


class HandshakeLimiter:
    """Limits how many connections of one agent are in the handshake.

    Beyond the limit the oldest connection that has not greeted is dropped, else the oldest. Members greet as
    soon as they are connected and finish within a round trip, so a flood of others does not push them out.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiting: dict[Connection, None] = {}

    def add(self, connection: Connection) -> None:
        """Add a connection; drop one if there are too many."""
        self._waiting[connection] = None
        if len(self._waiting) > self._max_waiting:
            not_greeted = (
                waiting for waiting in self._waiting if not waiting.has_greeted and waiting is not connection
            )
            oldest = next(not_greeted, next(iter(self._waiting)))
            oldest.drop(f"more than {self._max_waiting} connections are in the handshake")

    def remove(self, connection: Connection) -> None:
        """Remove a connection that has ended or is authenticated."""
        self._waiting.pop(connection, None)


class LogThrottle:
    """Logs the first dropped connection at once, and the number of later ones after a pause.

    The pause doubles while connections keep being dropped: a port scanner may connect each second for months.
    """

    def __init__(
        self,
        pause_s: float,
        log: Callable[[str], None],
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        """``call_later`` calls a function after a number of seconds."""
        self._first_pause_s = self._pause_s = pause_s
        self._log = log
        self._call_later = call_later
        self._is_pausing = False
        self._suppressed = 0
        self._last_line = ""

    def add(self, peer: str, reason: str) -> None:
        """Log a drop of ``peer`` (host:port), or count it for the next summary."""
        self._last_line = f"{peer}: {reason}"
        if self._is_pausing:
            self._suppressed += 1
        else:
            self._log(self._last_line)
            self._start_pause()

    def _start_pause(self) -> None:
        self._is_pausing = True
        self._call_later(self._pause_s, self._log_summary)

    def _log_summary(self) -> None:
        self._is_pausing = False
        if not self._suppressed:
            self._pause_s = self._first_pause_s
            return
        self._log(f"{self._suppressed} more in the last {self._pause_s:g} s; the last: {self._last_line}")
        self._suppressed = 0
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_FACTOR * self._first_pause_s)
        self._start_pause()
