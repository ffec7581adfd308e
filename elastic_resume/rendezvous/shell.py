"""The thin shell around the core: sockets, a clock and a disk, in one thread with an event loop of its own.

It turns what happens into events, hands them to `core.Agent`, and carries out the effects. It decides
nothing. What it promises: a message reaches the core only after both sides have proved who they are; nothing
that a stranger sends grows memory beyond `Limits`; `Persisted` is said only after fsync. All times are
CLOCK_MONOTONIC: a jump of the wall clock changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import secrets
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from elastic_resume.rendezvous import wire
from elastic_resume.rendezvous.core import Agent
from elastic_resume.rendezvous.messages import Message
from elastic_resume.rendezvous.quorum import Incarnation
from elastic_resume.rendezvous.record import Record
from elastic_resume.rendezvous.steps import (
    Connect,
    Disconnect,
    Effect,
    Event,
    MessageArrived,
    PeerConnected,
    PeerLost,
    Persist,
    Persisted,
    Send,
    Settings,
    Tick,
)

# Errors that say "nobody lives there"; others (no route, time-out) are silence.
_REFUSED = {errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED}


@dataclass(frozen=True)
class Limits:
    """What others may make this process spend."""

    connections: int = 4096  # members of a large job, with room for calls
    unproven: int = 128  # connections that have not finished the handshake; the oldest goes first
    handshake_s: float = 5.0
    backlog_bytes: int = 64 * 1024 * 1024  # queued to a peer that does not read


@dataclass
class Conn:
    """One open connection."""

    number: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class Shell:
    """Runs a `core.Agent` in a thread. Give it events with `submit`; it gives effects to ``carry_out``."""

    def __init__(
        self,
        settings: Settings,
        me: Incarnation,
        *,
        listener: socket.socket,
        run_id: str,
        token: bytes,
        record: Record,
        carry_out: Callable[[Effect], None],
        limits: Limits | None = None,
    ) -> None:
        """``listener`` is bound and listening; ``carry_out`` is called in the thread and must not block."""
        self._settings = settings
        self._me = me
        self._listener = listener
        self._run_id = run_id
        self._token = token
        self._record = record
        self._carry_out = carry_out
        self._limits = limits or Limits()
        self._conns: dict[int, Conn] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._unproven: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._accepted = 0
        self._timer: asyncio.TimerHandle | None = None
        self._bodies: tuple[Message, bytes] | None = None
        self._loop = asyncio.new_event_loop()
        self._stopped: asyncio.Event | None = None
        self._agent: Agent | None = None
        self._early: list[Event] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="elastic-resume-rendezvous", daemon=True)

    # ---- called from any thread ----------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, event: Event) -> None:
        """Hand an event to the core."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(self._happen, event)

    def stop(self, linger_s: float = 1.0) -> None:
        """Send what is queued and end the thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end)
        self._thread.join(linger_s + 1.0)

    def _end(self) -> None:
        if self._stopped is not None:
            self._stopped.set()

    # ---- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._live())
        finally:
            self._loop.close()

    async def _live(self) -> None:
        self._stopped = asyncio.Event()
        server = await asyncio.start_server(self._greet, sock=self._listener, limit=1 << 16)
        self._agent = Agent(self._settings, self._me, self._record.memory, time.monotonic())
        for event in [Tick(), *self._early]:
            self._happen(event)
        try:
            await self._stopped.wait()
        finally:
            await self._close_all(server)

    async def _close_all(self, server: asyncio.Server) -> None:
        self._closing = True  # the core takes no part any more: it would dial those who are being left
        if self._timer is not None:
            self._timer.cancel()
        server.close()
        for conn in self._conns.values():
            conn.writer.close()  # what is queued goes out first
        tasks = [*self._tasks.values(), *self._unproven, *self._background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _happen(self, event: Event) -> None:
        if self._closing:
            return
        if self._agent is None:
            self._early.append(event)
            return
        for effect in self._agent.handle(event, time.monotonic()):
            self._do(effect)
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._agent.next_deadline if self._agent else float("inf")
        if due != float("inf"):
            self._timer = self._loop.call_later(max(0.0, due - time.monotonic()), self._happen, Tick())

    def _do(self, effect: Effect) -> None:
        if isinstance(effect, Send):
            self._send(effect)
        elif isinstance(effect, Connect):
            self._tasks[effect.conn] = self._loop.create_task(self._dial(effect.conn, effect.address))
        elif isinstance(effect, Disconnect):
            self._close(effect.conn)
        elif isinstance(effect, Persist):
            self._spawn(self._persist(effect))
        else:
            self._carry_out(effect)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _persist(self, effect: Persist) -> None:
        # In a thread of its own: a slow disk must not stop heartbeats.
        await self._loop.run_in_executor(None, functools.partial(self._record.write, effect.memory))
        self._happen(Persisted(effect.number))

    # ---- connections ---------------------------------------------------------------------------------

    def _send(self, effect: Send) -> None:
        conn = self._conns.get(effect.conn)
        if conn is None:
            return
        if self._bodies is None or self._bodies[0] is not effect.message:
            # One message to a thousand members is put into words once.
            self._bodies = (effect.message, wire.body_of(effect.message))
        conn.writer.write(wire.line_of(effect.stamp, self._bodies[1]))
        if conn.writer.transport.get_write_buffer_size() > self._limits.backlog_bytes:
            conn.writer.transport.abort()

    def _close(self, number: int) -> None:
        conn = self._conns.pop(number, None)
        task = self._tasks.pop(number, None)
        if conn is not None:
            conn.writer.close()  # sends what is queued first
        elif task is not None:
            task.cancel()

    async def _dial(self, number: int, address: str) -> None:
        try:
            conn = await asyncio.wait_for(self._call(number, address), self._limits.handshake_s)
        except (OSError, EOFError, wire.WireError, asyncio.TimeoutError) as error:
            closed = isinstance(error, OSError) and error.errno in _REFUSED
            self._lost(number, closed=closed, why=str(error) or type(error).__name__)
            return
        await self._converse(conn)

    async def _call(self, number: int, address: str) -> Conn:
        reader, writer = await open_connection(address)
        try:
            nonce = secrets.token_hex(32)
            writer.write(wire.greeting(self._run_id, nonce))
            line = await _line(reader)
            writer.write(wire.read_answer(line, self._token, self._run_id, nonce))
        except BaseException:
            writer.transport.abort()
            raise
        return Conn(number, reader, writer)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            return
        if len(self._conns) + len(self._unproven) >= self._limits.connections:
            writer.close()
            return
        if len(self._unproven) >= self._limits.unproven:
            next(iter(self._unproven.values())).transport.abort()
        self._unproven[task] = writer
        try:
            await asyncio.wait_for(self._check(reader, writer), self._limits.handshake_s)
        except (OSError, EOFError, wire.WireError, asyncio.TimeoutError):
            writer.transport.abort()
            return
        finally:
            self._unproven.pop(task, None)
        self._accepted -= 1
        self._tasks[self._accepted] = task
        await self._converse(Conn(self._accepted, reader, writer))

    async def _check(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hold the acceptor's side of the handshake; raise when the other does not belong to this job."""
        tune(writer)
        theirs, ours = wire.read_greeting(await _line(reader), self._run_id), secrets.token_hex(32)
        writer.write(wire.answer(self._token, self._run_id, theirs, ours))
        wire.read_proof(await _line(reader), self._token, self._run_id, theirs, ours)

    async def _converse(self, conn: Conn) -> None:
        """Read messages until the connection ends; whatever is not a message ends it."""
        self._conns[conn.number] = conn
        self._happen(PeerConnected(conn.number))
        closed, why = True, "closed"
        lines = wire.Lines(wire.MAX_LINE_BYTES)
        try:
            while data := await conn.reader.read(1 << 16):
                for line in lines.feed(data):
                    stamp, message = wire.decode(line)
                    self._happen(MessageArrived(conn.number, stamp, message))
        except wire.WireError as error:
            closed, why = False, str(error)
        except OSError as error:
            closed, why = error.errno in _REFUSED, str(error)
        if self._conns.pop(conn.number, None) is not None:
            conn.writer.transport.abort()
            self._lost(conn.number, closed=closed, why=why)

    def _lost(self, number: int, *, closed: bool, why: str) -> None:
        self._tasks.pop(number, None)
        self._happen(PeerLost(number, closed=closed, why=why))


async def open_connection(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to ``host:port``; names are looked up each time, since addresses change."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=1 << 16)
    tune(writer)
    return reader, writer


def tune(writer: asyncio.StreamWriter) -> None:
    """Send small messages at once, and let the kernel notice a peer that vanished while nothing is sent."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


async def _line(reader: asyncio.StreamReader) -> bytes:
    """Read a line of somebody who has proved nothing yet."""
    try:
        line = await reader.readuntil(b"\n")
    except asyncio.LimitOverrunError as error:
        raise wire.WireError("a line without an end") from error
    if len(line) > wire.MAX_GREETING_BYTES:
        raise wire.WireError(f"a line of more than {wire.MAX_GREETING_BYTES} bytes")
    return line[:-1]
