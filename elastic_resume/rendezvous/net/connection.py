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
from elastic_resume.rendezvous.endpoint import Resolve, lookup
from elastic_resume.rendezvous.net import protocol

# Errors that say "nobody lives there"; others (no route, time-out) are silence.
_REFUSED = {errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED}


_READ_BYTES = 1 << 18
_threads = threading.local()


class Owner(Protocol):
    """Who is told what happens to a connection."""

    def opened(self, channel: Channel) -> None:
        """Somebody connected; nothing is proved."""

    def proven(self, channel: Channel) -> None:
        """Both sides have proved that they hold the run's token."""

    def heard(self, channel: Channel, line: bytes) -> None:
        """A line arrived. Raises `wire.WireError` when it is no message; that ends the connection."""

    def ended(self, channel: Channel, *, closed: bool, why: str) -> None:
        """The connection is over, or could not be made. ``closed``: by the other side, or its kernel."""

    def dropped(self, channel: Channel, why: str) -> None:
        """It will be ended by our own decision."""

    def freed(self, channel: Channel) -> None:
        """The socket is closed: nothing of the connection is left."""


class Channel(asyncio.BufferedProtocol):
    """One connection; the owner's `number` for it is 0 until it has one."""

    def __init__(
        self,
        owner: Owner,
        handshake: protocol.Handshake,
        patience_s: float,
        number: int = 0,
        parting: bytes = b"",
    ) -> None:
        """``parting``: what a dialler says where it gives up before it has proved itself."""
        self.number = number
        self.is_proven = False
        self.looks = False
        """The other side wants to be told how the job stands, and nothing else."""
        self.greeted = False
        """The other side has said something that belongs in a handshake of this job."""
        self.mute = 0
        """For the owner to count in; 0 again whenever something arrives."""
        self.over = False
        self.refused = False
        """Nobody listened there."""
        self.peer = "an unknown address"
        self.host = ""
        """The IP address of the other side, once it is connected."""
        self._owner = owner
        self._handshake = handshake
        self._sends: protocol.Seal | None = None
        self._hears: protocol.Seal | None = None
        self._parting = parting
        self._dialled = bool(parting)
        self._lines = protocol.Lines(protocol.MAX_GREETING_BYTES)
        self._buffer = _buffer()
        self._transport: asyncio.Transport | None = None
        self._patience = asyncio.get_running_loop().call_later(patience_s, self._late, patience_s)

    # ---- what the owner does -------------------------------------------------------------------------

    def send(self, line: bytes) -> None:
        """Queue a line, signed, once the handshake is over; never blocks."""
        if self._sends is not None:
            self.write(self._sends.sign(line))

    def write(self, line: bytes) -> None:
        """Queue a line as it is; never blocks."""
        if self._transport is not None and not self.over and not self._transport.is_closing():
            self._transport.write(failpoints.passing("wire.line", line))

    @property
    def queued_bytes(self) -> int:
        """What the other side has not taken yet, beyond what the kernel holds."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    def close(self) -> None:
        """Send what is queued, then close; nothing more of it is reported but `Owner.freed`."""
        self._settle()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once; nothing more of it is reported but `Owner.freed`."""
        self._settle()
        if self._transport is not None:
            self._transport.abort()

    def part(self) -> None:
        """Give the connection up by our own decision; who dialled says so where the handshake is not over."""
        if not self.is_proven:
            self.write(self._parting)
        self.close() if self.is_proven or self._dialled else self.abort()

    def end(self, *, closed: bool, why: str) -> None:
        """Close at once and report it."""
        if not self.over:
            self.abort()
            self._owner.ended(self, closed=closed, why=why)

    def drop(self, why: str) -> None:
        """Close at once, by our own decision, and report it."""
        if not self.over:
            self._owner.dropped(self, why)
            self.end(closed=False, why=why)

    def failed(self, error: Exception) -> None:
        """The call was not answered, for that reason."""
        closed = isinstance(error, OSError) and error.errno in _REFUSED
        self.refused = isinstance(error, OSError) and error.errno == errno.ECONNREFUSED
        self.end(closed=closed, why=str(error) or type(error).__name__)

    def _settle(self) -> None:
        self.over = True
        self._patience.cancel()

    def _late(self, patience_s: float) -> None:
        self.drop(f"the handshake took more than {patience_s:g} s")

    # ---- what asyncio calls --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet the other side, or wait for its greeting."""
        self._transport = tcp = cast("asyncio.Transport", transport)
        if self.over:  # given up while the kernel connected
            tcp.abort()
            return
        host, port = (tcp.get_extra_info("peername") or ("an unknown address", 0))[:2]
        self.host = str(host)
        self.peer = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        # Let the kernel notice a peer that vanished while nothing is sent. (asyncio sets TCP_NODELAY.)
        tcp.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._owner.opened(self)
        self.write(next(self._handshake))

    def get_buffer(self, sizehint: int) -> bytearray:
        """Lend the kernel the thread's buffer: nothing stays in it, and a new one each time took 15 µs."""
        del sizehint
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Cut into lines, and hand each on until one ends the connection."""
        self.mute = 0
        if self.over:
            return
        try:
            for line in self._lines.feed(self._buffer[:nbytes]):
                if not self._take(line):
                    return
        except protocol.WireError as error:
            self.drop(str(error))

    def _take(self, line: bytes) -> bool:
        """Handle a line; return whether there is to be another."""
        if self._hears is not None:
            self._owner.heard(self, self._hears.check(line))
        else:
            self._shake(line)
        return not self.over

    def _shake(self, line: bytes) -> None:
        try:
            self.write(self._handshake.send(line))
            self.greeted = not self._dialled  # what answers our call need not be of this job
            self._parting = b""  # whoever dialled has proved itself by now: it cannot take that back
        except protocol.PartedError:
            self.greeted = False
            self.end(closed=True, why="it has changed its mind")
        except protocol.UnprovenError as error:
            self.write(error.last)
            self.drop(str(error))
        except StopIteration as stop:
            proof: protocol.Proof = stop.value
            self.write(proof.last)
            self._patience.cancel()
            self.looks, self.is_proven = proof.looks, True
            self._sends, self._hears = proof.sends, proof.hears
            if not self.looks:
                self._lines.limit = protocol.MAX_LINE_BYTES
            self._owner.proven(self)

    def eof_received(self) -> None:
        """Take half a close for a whole one: nobody here reads on alone."""
        self.end(closed=True, why="closed")

    def connection_lost(self, error: Exception | None) -> None:
        """Report the end, unless it was our doing."""
        if not self.over:
            refused = error is None or (isinstance(error, OSError) and error.errno in _REFUSED)
            self.end(closed=refused, why=str(error) if error else "closed")
        self._owner.freed(self)


def _buffer() -> bytearray:
    """Give the buffer of this thread, which runs one loop."""
    found: bytearray | None = getattr(_threads, "buffer", None)
    if found is None:
        found = _threads.buffer = bytearray(_READ_BYTES)
    return found


async def connect(channel: Channel, address: str, resolve: Resolve = lookup, known: str = "") -> None:
    """Connect to ``host:port``. Names are looked up each time, since addresses change.

    ``known`` is the IP address at which the same process answered before: no name is looked up then.

    Raises:
        OSError: not reached; that of the last address tried, but "refused" only if all refused.
        ValueError: not an address.

    """
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    error: OSError = OSError(errno.EADDRNOTAVAIL, f"{address} has no address")
    for found in await _addresses(known or host.strip("[]"), int(port), resolve):
        try:
            await loop.create_connection(lambda: channel, *found)
        except OSError as reason:
            # One refusal among time-outs proves nothing.
            if error.errno in _REFUSED | {errno.EADDRNOTAVAIL} or reason.errno not in _REFUSED:
                error = reason
        except OverflowError as reason:
            raise ValueError(f"{address} is not an address") from reason
        else:
            return
    raise error


_lookups: dict[tuple[asyncio.AbstractEventLoop, str], asyncio.Future[Sequence[str]]] = {}
"""Under way. A name server that hangs must not get a thread for every call that is given up meanwhile."""


async def _look_up(host: str, resolve: Resolve) -> Sequence[str]:
    loop = asyncio.get_running_loop()
    key = (loop, host)
    if key not in _lookups:
        answer: concurrent.futures.Future[Sequence[str]] = concurrent.futures.Future()
        answer.set_running_or_notify_cancel()
        # Not an executor's thread: the interpreter's end waits for these, for as long as DNS is silent.
        threading.Thread(target=_ask, args=(answer, resolve, host), daemon=True).start()
        task = asyncio.wrap_future(answer, loop=loop)
        task.add_done_callback(functools.partial(_looked_up, key))
        _lookups[key] = task
    return await asyncio.shield(_lookups[key])


def _looked_up(key: tuple[asyncio.AbstractEventLoop, str], task: asyncio.Future[Sequence[str]]) -> None:
    _lookups.pop(key, None)
    if not task.cancelled():
        task.exception()  # of a call that was given up nobody asks for it, and asyncio would print it


def _ask(answer: concurrent.futures.Future[Sequence[str]], resolve: Resolve, host: str) -> None:
    try:
        found = resolve(host)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the asker's
        give: Callable[[], None] = functools.partial(answer.set_exception, error)
    else:
        give = functools.partial(answer.set_result, found)
    with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody asks any more
        give()


async def end_lookups() -> None:
    """Leave none behind on this loop, which is about to end."""
    loop = asyncio.get_running_loop()
    tasks = [task for (where, *_), task in _lookups.items() if where is loop]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _addresses(host: str, port: int, resolve: Resolve) -> list[tuple[str, int]]:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except (OSError, ValueError):  # a name
            continue
        return [(host, port)]
    return [(found, port) for found in await _look_up(host, resolve)]
