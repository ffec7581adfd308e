"""One connection over TCP: the handshake, then lines, each way, until one side ends it.

It promises its owner, in this order: `proven` once both sides have proved who they are, `heard` for every
line after that, and `ended` once, unless the owner closed it. What the other side sends before it has proved
anything is held up to `wire.MAX_GREETING_BYTES`, and for as long as `patience_s` from the start of the call.

Does not know what a message is, nor whose connections count.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import functools
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from elastic_resume import failpoints
from elastic_resume.rendezvous.endpoint import ResolveFunction, resolve_name
from elastic_resume.rendezvous.net import protocol

# Errors that say "nobody lives there"; others (no route, time-out) are silence.
_CLOSED_ERRNOS = {errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED}


_READ_BYTES = 1 << 18
_thread_local = threading.local()


class ConnectionHandler(Protocol):
    """Who is told what happens to a connection."""

    def on_connected(self, connection: Connection) -> None:
        """Somebody connected; nothing is proved."""

    def on_authenticated(self, connection: Connection) -> None:
        """Both sides have proved that they hold the run's token."""

    def on_line(self, connection: Connection, line: bytes) -> None:
        """A line arrived. Raises `wire.WireError` when it is no message; that ends the connection."""

    def on_ended(self, connection: Connection, *, by_peer: bool, reason: str) -> None:
        """The connection is over, or could not be made. ``closed``: by the other side, or its kernel."""

    def on_dropped(self, connection: Connection, reason: str) -> None:
        """It will be ended by our own decision."""

    def on_socket_closed(self, connection: Connection) -> None:
        """The socket is closed: nothing of the connection is left."""


class Connection(asyncio.BufferedProtocol):
    """One connection; the owner's `number` for it is 0 until it has one."""

    def __init__(
        self,
        handler: ConnectionHandler,
        handshake: protocol.Handshake,
        handshake_timeout_s: float,
        conn_id: int = 0,
        abort_line: bytes = b"",
    ) -> None:
        """``parting``: what a dialler says where it gives up before it has proved itself."""
        self.conn_id = conn_id
        self.is_authenticated = False
        self.status_only = False
        """The other side wants to be told how the job stands, and nothing else."""
        self.has_greeted = False
        """The other side has said something that belongs in a handshake of this job."""
        self.idle_sweeps = 0
        """For the owner to count in; 0 again whenever something arrives."""
        self.is_ended = False
        self.was_refused = False
        """Nobody listened there."""
        self.peer_address = "an unknown address"
        self.peer_host = ""
        """The IP address of the other side, once it is connected."""
        self._handler = handler
        self._handshake = handshake
        self._signer: protocol.LineAuthenticator | None = None
        self._verifier: protocol.LineAuthenticator | None = None
        self._abort_line = abort_line
        self._is_dialler = bool(abort_line)
        self._line_reader = protocol.LineReader(protocol.MAX_GREETING_BYTES)
        self._buffer = _get_thread_buffer()
        self._transport: asyncio.Transport | None = None
        self._handshake_timer = asyncio.get_running_loop().call_later(
            handshake_timeout_s, self._on_handshake_timeout, handshake_timeout_s
        )

    # ---- what the owner does -------------------------------------------------------------------------

    def send(self, line: bytes) -> None:
        """Queue a line, signed, once the handshake is over; never blocks."""
        if self._signer is not None:
            self.write(self._signer.sign(line))

    def write(self, line: bytes) -> None:
        """Queue a line as it is; never blocks."""
        if self._transport is not None and not self.is_ended and not self._transport.is_closing():
            self._transport.write(failpoints.mutate("rendezvous.line", line))

    @property
    def queued_bytes(self) -> int:
        """What the other side has not taken yet, beyond what the kernel holds."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    def close(self) -> None:
        """Send what is queued, then close; nothing more of it is reported but `Owner.freed`."""
        self._set_ended()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once; nothing more of it is reported but `Owner.freed`."""
        self._set_ended()
        if self._transport is not None:
            self._transport.abort()

    def disconnect(self) -> None:
        """Give the connection up by our own decision; who dialled says so where the handshake is not over."""
        if not self.is_authenticated:
            self.write(self._abort_line)
        self.close() if self.is_authenticated or self._is_dialler else self.abort()

    def abort_and_report(self, *, by_peer: bool, reason: str) -> None:
        """Close at once and report it."""
        if not self.is_ended:
            self.abort()
            self._handler.on_ended(self, by_peer=by_peer, reason=reason)

    def drop(self, reason: str) -> None:
        """Close at once, by our own decision, and report it."""
        if not self.is_ended:
            self._handler.on_dropped(self, reason)
            self.abort_and_report(by_peer=False, reason=reason)

    def on_dial_failed(self, error: Exception) -> None:
        """The call was not answered, for that reason."""
        closed = isinstance(error, OSError) and error.errno in _CLOSED_ERRNOS
        self.was_refused = isinstance(error, OSError) and error.errno == errno.ECONNREFUSED
        self.abort_and_report(by_peer=closed, reason=str(error) or type(error).__name__)

    def _set_ended(self) -> None:
        self.is_ended = True
        self._handshake_timer.cancel()

    def _on_handshake_timeout(self, handshake_timeout_s: float) -> None:
        self.drop(f"the handshake took more than {handshake_timeout_s:g} s")

    # ---- what asyncio calls --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet the other side, or wait for its greeting."""
        self._transport = tcp = cast("asyncio.Transport", transport)
        if self.is_ended:  # given up while the kernel connected
            tcp.abort()
            return
        host, port = (tcp.get_extra_info("peername") or ("an unknown address", 0))[:2]
        self.peer_host = str(host)
        self.peer_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        # Let the kernel notice a peer that vanished while nothing is sent. (asyncio sets TCP_NODELAY.)
        tcp.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._handler.on_connected(self)
        self.write(next(self._handshake))

    def get_buffer(self, sizehint: int) -> bytearray:
        """Lend the kernel the thread's buffer: nothing stays in it, and a new one each time took 15 µs."""
        del sizehint
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Cut into lines, and hand each on until one ends the connection."""
        self.idle_sweeps = 0
        if self.is_ended:
            return
        try:
            for line in self._line_reader.feed(self._buffer[:nbytes]):
                if not self._process_line(line):
                    return
        except protocol.ProtocolError as error:
            self.drop(str(error))

    def _process_line(self, line: bytes) -> bool:
        """Handle a line; return whether there is to be another."""
        if self._verifier is not None:
            self._handler.on_line(self, self._verifier.verify(line))
        else:
            self._advance_handshake(line)
        return not self.is_ended

    def _advance_handshake(self, line: bytes) -> None:
        try:
            self.write(self._handshake.send(line))
            self.has_greeted = not self._is_dialler  # what answers our call need not be of this job
            self._abort_line = b""  # whoever dialled has proved itself by now: it cannot take that back
        except protocol.HandshakeAbortedError:
            self.has_greeted = False
            self.abort_and_report(by_peer=True, reason="it has changed its mind")
        except protocol.AuthenticationError as error:
            self.write(error.rejection_line)
            self.drop(str(error))
        except StopIteration as stop:
            proof: protocol.HandshakeResult = stop.value
            self.write(proof.final_line)
            self._handshake_timer.cancel()
            self.status_only, self.is_authenticated = proof.status_only, True
            self._signer, self._verifier = proof.signer, proof.verifier
            if not self.status_only:
                self._line_reader.max_line_bytes = protocol.MAX_LINE_BYTES
            self._handler.on_authenticated(self)

    def eof_received(self) -> None:
        """Take half a close for a whole one: nobody here reads on alone."""
        self.abort_and_report(by_peer=True, reason="closed")

    def connection_lost(self, error: Exception | None) -> None:
        """Report the end, unless it was our doing."""
        if not self.is_ended:
            refused = error is None or (isinstance(error, OSError) and error.errno in _CLOSED_ERRNOS)
            self.abort_and_report(by_peer=refused, reason=str(error) if error else "closed")
        self._handler.on_socket_closed(self)


def _get_thread_buffer() -> bytearray:
    """Give the buffer of this thread, which runs one loop."""
    found: bytearray | None = getattr(_thread_local, "buffer", None)
    if found is None:
        found = _thread_local.buffer = bytearray(_READ_BYTES)
    return found


async def connect(
    connection: Connection, address: str, resolve: ResolveFunction = resolve_name, known_ip: str = ""
) -> None:
    """Connect to ``host:port``. Names are looked up each time, since addresses change.

    ``known`` is the IP address at which the same process answered before: no name is looked up then.

    Raises:
        OSError: not reached; that of the last address tried, but "refused" only if all refused.
        ValueError: not an address.

    """
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    error: OSError = OSError(errno.EADDRNOTAVAIL, f"{address} has no address")
    for found in await _resolve_addresses(known_ip or host.strip("[]"), int(port), resolve):
        try:
            await loop.create_connection(lambda: connection, *found)
        except OSError as reason:
            # One refusal among time-outs proves nothing.
            if error.errno in _CLOSED_ERRNOS | {errno.EADDRNOTAVAIL} or reason.errno not in _CLOSED_ERRNOS:
                error = reason
        except OverflowError as reason:
            raise ValueError(f"{address} is not an address") from reason
        else:
            return
    raise error


_pending_lookups: dict[tuple[asyncio.AbstractEventLoop, str], asyncio.Future[Sequence[str]]] = {}
"""Under way. A name server that hangs must not get a thread for every call that is given up meanwhile."""


async def _resolve_shared(host: str, resolve: ResolveFunction) -> Sequence[str]:
    loop = asyncio.get_running_loop()
    key = (loop, host)
    if key not in _pending_lookups:
        answer: concurrent.futures.Future[Sequence[str]] = concurrent.futures.Future()
        answer.set_running_or_notify_cancel()
        # Not an executor's thread: the interpreter's end waits for these, for as long as DNS is silent.
        threading.Thread(target=_resolve_in_thread, args=(answer, resolve, host), daemon=True).start()
        task = asyncio.wrap_future(answer, loop=loop)
        task.add_done_callback(functools.partial(_remove_lookup, key))
        _pending_lookups[key] = task
    return await asyncio.shield(_pending_lookups[key])


def _remove_lookup(key: tuple[asyncio.AbstractEventLoop, str], task: asyncio.Future[Sequence[str]]) -> None:
    _pending_lookups.pop(key, None)
    if not task.cancelled():
        task.exception()  # of a call that was given up nobody asks for it, and asyncio would print it


def _resolve_in_thread(
    result: concurrent.futures.Future[Sequence[str]], resolve: ResolveFunction, host: str
) -> None:
    try:
        found = resolve(host)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the asker's
        give: Callable[[], None] = functools.partial(result.set_exception, error)
    else:
        give = functools.partial(result.set_result, found)
    with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody asks any more
        give()


async def cancel_lookups() -> None:
    """Leave none behind on this loop, which is about to end."""
    loop = asyncio.get_running_loop()
    tasks = [task for (where, *_), task in _pending_lookups.items() if where is loop]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _resolve_addresses(host: str, port: int, resolve: ResolveFunction) -> list[tuple[str, int]]:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except (OSError, ValueError):  # a name
            continue
        return [(host, port)]
    return [(found, port) for found in await _resolve_shared(host, resolve)]
