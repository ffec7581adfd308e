"""Run one agent's rendezvous: an event loop with sockets, a clock and a disk around the state machine.

`RendezvousServer` turns what happens into events, passes them to `core.node.RendezvousNode`, and carries out
the effects. It decides nothing. `RendezvousThread` runs it in a thread of its own.

- A message reaches the state machine only after both sides have authenticated each other.
- `Persisted` follows only after fsync, however often the disk fails.
- Times are CLOCK_BOOTTIME: a jump of the wall clock changes nothing, and leases run on during a suspend.
- An internal error ends the thread, so that no half of a state machine continues. `RendezvousThread.is_alive`
  is false then, and `threading.excepthook` reports the error. The listener stays open until the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from elastic_resume.errors import MachineError
from elastic_resume.policy.reasons import ErrorRaised
from elastic_resume.rendezvous.core.interface import (
    Connect,
    Disconnect,
    Effect,
    EmitEvent,
    Event,
    MessageReceived,
    PeerConnected,
    PeerDisconnected,
    Persist,
    Persisted,
    RendezvousSettings,
    Send,
    Tick,
)
from elastic_resume.rendezvous.core.node import RendezvousNode
from elastic_resume.rendezvous.core.world import Incarnation
from elastic_resume.rendezvous.endpoint import LISTEN_BACKLOG, ResolveFunction, resolve_name
from elastic_resume.rendezvous.net import protocol, view_delta
from elastic_resume.rendezvous.net.codec import pack_view
from elastic_resume.rendezvous.net.connection import (
    DEFAULT_LIMITS,
    Connection,
    ConnectionLimits,
    HandshakeLimiter,
    LogThrottle,
    cancel_lookups,
    connect,
)
from elastic_resume.rendezvous.net.durable_state import DurableStateFile
from elastic_resume.rendezvous.net.status_server import RendezvousStatus, StatusServer, build_status
from elastic_resume.rendezvous.net.view_delta import Base

DISK_RETRY_S = 1.0
"""Between two attempts to write the state file."""
DISK_LOG_INTERVAL_S = 60.0
"""Between two log lines about failed writes."""
MAX_IDLE_SWEEPS = 2
"""Sweeps without data before a peer is dropped. Counting sweeps ignores pauses of this process itself."""
LINGER_S = 1.0
"""How long a server that ends may send what is queued."""
RESERVED_DESCRIPTORS = 512
"""File descriptors for everything that is not a connection."""


def read_boottime_s() -> float:
    """Return the seconds since boot, suspends included: the clock of leases."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class RendezvousServer:
    """One agent on the running event loop; all methods are called on that loop.

    Effects that concern neither sockets nor the disk go to ``on_effect``.
    """

    def __init__(
        self,
        settings: RendezvousSettings,
        incarnation: Incarnation,
        *,
        listener: socket.socket,
        run_id: str,
        token: bytes,
        state_file: DurableStateFile,
        on_effect: Callable[[Effect], None],
        limits: ConnectionLimits = DEFAULT_LIMITS,
        on_core_change: Callable[[RendezvousNode], None] | None = None,
        max_generation: int = 0,
        resolve: ResolveFunction = resolve_name,
        render_status: Callable[[RendezvousStatus], bytes] | None = None,
    ) -> None:
        """Set up the server; `open` starts it.

        ``on_core_change`` is called after every event, before its effects are carried out. ``resolve``
        returns the addresses of a name, and ``render_status`` the line of JSON for status clients; both are
        called in threads. ``on_effect`` must not block.
        """
        self._resolve = resolve
        self._settings = settings
        self._listener = listener
        self._run_id = run_id
        self._token = token
        self._state_file = state_file
        self._on_effect = on_effect
        self._limits = limits
        self._on_core_change = on_core_change
        self._loop = asyncio.get_running_loop()
        self._core = RendezvousNode(
            settings, incarnation, state_file.state, read_boottime_s(), max_generation
        )
        self._connections: dict[int, Connection] = {}  # connections that the state machine knows
        self._open_connections: set[Connection] = set()  # all that have a socket, also closing ones
        self._all_sockets_closed = asyncio.Event()
        self._handshake_limiter = HandshakeLimiter(self._limits.max_unauthenticated)
        self._rejection_log = LogThrottle(
            self._limits.log_interval_s, self._log_rejected, self._loop.call_later
        )
        self._status_server = StatusServer(self._limits, render_status)
        self._tasks: set[asyncio.Task[None]] = set()
        self._dial_tasks: dict[Connection, asyncio.Task[None]] = {}
        self._last_accepted_id = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_s = math.inf
        self._idle_timer: asyncio.TimerHandle | None = None
        self._encoder = protocol.BodyEncoder()
        self._server: asyncio.Server | None = None
        self._closing = False
        self._disk_thread = ThreadPoolExecutor(1, "elastic-resume-state-file")
        self.failure: asyncio.Future[BaseException] = self._loop.create_future()
        """The internal error after which the agent cannot continue."""

    # ---- start and end ---------------------------------------------------------------------------------

    async def open(self) -> None:
        """Start to listen and to look for the other nodes."""
        raise_descriptor_limit(
            self._limits.max_connections + self._limits.max_unauthenticated + RESERVED_DESCRIPTORS
        )
        self._server = await self._loop.create_server(
            self._make_acceptor, sock=self._listener, backlog=LISTEN_BACKLOG
        )
        self._drop_idle()
        self.handle_event(Tick())

    async def close(self, linger_s: float) -> None:
        """Write and send what is queued for at most ``linger_s``; then close all sockets and tasks."""
        await self._wait_for_writes(linger_s)
        self._closing = True  # the state machine would reconnect to the peers
        for timer in (self._timer, self._idle_timer):
            if timer is not None:
                timer.cancel()
        if self.failure.done():
            # Workers may still run, and a refused call would prove the death of this process.
            self._loop.remove_reader(self._listener)
        elif self._server is not None:
            self._server.close()
        for connection in list(self._open_connections):
            connection.close()
        for task in (*self._tasks, *self._dial_tasks.values()):
            task.cancel()
        await self._status_server.close()
        await asyncio.gather(*self._tasks, *self._dial_tasks.values(), return_exceptions=True)
        await self._wait_for_sockets(linger_s)
        for connection in self._open_connections:
            connection.abort()
        await self._wait_for_sockets(linger_s)
        self._disk_thread.shutdown(wait=False)

    async def _wait_for_writes(self, timeout_s: float) -> None:
        """Finish pending writes: if the end were not recorded, the job's next start would wait for it."""
        deadline = self._loop.time() + timeout_s
        while self._tasks and not self._closing and self._loop.time() < deadline:
            await asyncio.wait(self._tasks, timeout=deadline - self._loop.time())

    async def _wait_for_sockets(self, timeout_s: float) -> None:
        if self._open_connections:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._all_sockets_closed.wait(), timeout_s)

    def handle_event(self, event: Event) -> None:
        """Pass an event to the state machine and carry out its effects."""
        if self._closing:
            return
        try:
            effects = self._core.handle(event, read_boottime_s())
            if self._on_core_change is not None:
                self._on_core_change(self._core)
            for effect in effects:
                self._carry_out(effect)
            self._set_timer()
        except Exception as error:  # noqa: BLE001  reported through `failure`
            self._set_failure(error)

    def _set_failure(self, error: BaseException) -> None:
        self._closing = True
        if not self.failure.done():
            self.failure.set_result(error)

    def _set_timer(self) -> None:
        """Keep a timer that never fires late. One that fires early costs less than a new one each time."""
        due = self._core.next_deadline
        if self._timer is not None and self._timer_due_s > due:
            self._timer.cancel()
            self._timer = None
        if self._timer is None and due != math.inf:
            # The loop's clock stops during a suspend, after which the timer is a heartbeat late at most.
            self._timer = self._loop.call_later(max(0.0, due - read_boottime_s()), self._on_timer)
            self._timer_due_s = due

    def _on_timer(self) -> None:
        self._timer = None
        if read_boottime_s() >= self._core.next_deadline:
            self.handle_event(Tick())
        else:
            self._set_timer()

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Send):
            self._send(effect)
        elif isinstance(effect, Connect):
            connection = self._make_dialler(effect.conn_id)
            self._connections[effect.conn_id] = connection
            self._dial_tasks[connection] = self._loop.create_task(
                self._dial(connection, effect.address, effect.ip_address)
            )
        elif isinstance(effect, Disconnect):
            self._disconnect(effect.conn_id)
        elif isinstance(effect, Persist):
            self._start_task(self._persist(effect))
        else:
            self._on_effect(effect)

    def _start_task(self, coroutine: Coroutine[object, object, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- the disk ------------------------------------------------------------------------------------

    async def _persist(self, effect: Persist) -> None:
        logged_at = -math.inf
        write = functools.partial(self._state_file.write, effect.persistent_state)
        while True:
            try:
                # Write in a thread, because a slow disk must not stop heartbeats.
                await self._loop.run_in_executor(self._disk_thread, write)
                break
            except MachineError as error:
                if self._loop.time() >= logged_at + DISK_LOG_INTERVAL_S:
                    logged_at = self._loop.time()
                    self._on_effect(EmitEvent("disk", ErrorRaised(type(error).__name__, str(error))))
            except Exception as error:  # noqa: BLE001  reported through `failure`
                # While the interpreter exits, executors refuse work.
                if not self._closing and threading.main_thread().is_alive():
                    self._set_failure(error)
                return
            await asyncio.sleep(DISK_RETRY_S)
        self.handle_event(Persisted(effect.version))

    # ---- connections: effects of the state machine ---------------------------------------------------

    def _send(self, effect: Send) -> None:
        connection = self._connections.get(effect.conn_id)
        if connection is None:
            return
        body = self._encoder.encode(effect.message, connection.sent_base)
        connection.sent_base = view_delta.next_base(effect.message, connection.sent_base)
        connection.send(protocol.encode_head(effect.header), body)
        if connection.queued_bytes > self._limits.max_queued_bytes:
            # Handle it later, because the remaining effects of this event come first.
            self._loop.call_soon(self._drop_slow_reader, connection)

    def _drop_slow_reader(self, connection: Connection) -> None:
        connection.drop(f"it has not read {connection.queued_bytes} bytes")

    def _disconnect(self, conn_id: int) -> None:
        connection = self._connections.pop(conn_id, None)
        if connection is not None:
            connection.close()
            self._release(connection)

    def _make_acceptor(self) -> Connection:
        base = self._find_base()
        handshake = protocol.accept(self._token, self._run_id, secrets.token_hex(32), view=base.digest)
        return Connection(self, handshake, self._limits.handshake_timeout_s, base=base)

    def _make_dialler(self, conn_id: int) -> Connection:
        base = self._find_base()
        handshake = protocol.dial(self._token, self._run_id, secrets.token_hex(32), view=base.digest)
        return Connection(self, handshake, self._limits.handshake_timeout_s, conn_id, base)

    def _find_base(self) -> Base:
        """Return the newest view that this node knows to be decided."""
        return view_delta.make_base(pack_view(self._core.state.view))

    async def _dial(self, connection: Connection, address: str, known_ip: str) -> None:
        try:
            await connect(connection, address, self._resolve, known_ip)
        except (OSError, ValueError) as error:
            connection.on_dial_failed(error)
        finally:
            self._dial_tasks.pop(connection, None)

    def _release(self, connection: Connection) -> None:
        """Stop what is under way for a connection that has ended."""
        self._handshake_limiter.remove(connection)
        task = self._dial_tasks.get(connection)
        if task is not None:
            task.cancel()

    # ---- connections: `ConnectionHandler` ------------------------------------------------------------

    def on_connected(self, connection: Connection) -> None:
        """Admit an incoming connection to the handshake, within the limits."""
        self._open_connections.add(connection)
        if self._closing:
            connection.abort()
        elif connection.conn_id == 0 and len(self._connections) >= self._limits.max_connections:
            connection.drop(f"{len(self._connections)} connections are open already")
        elif connection.conn_id == 0:
            self._handshake_limiter.add(connection)

    def on_authenticated(self, connection: Connection) -> None:
        """Report the peer to the state machine; serve a status client instead."""
        self._handshake_limiter.remove(connection)
        if connection.status_only:
            self._status_server.add(connection, functools.partial(build_status, self._core))
            return
        if connection.conn_id == 0:
            self._last_accepted_id -= 1
            connection.conn_id = self._last_accepted_id
            self._connections[connection.conn_id] = connection
        self.handle_event(PeerConnected(connection.conn_id, connection.peer_host))

    def on_line(self, connection: Connection, line: bytes) -> None:
        """Pass a message to the state machine."""
        if connection.status_only:
            raise protocol.ProtocolError("a status client sent a message")
        header, message = protocol.decode(line, connection.received_base)
        connection.received_base = view_delta.next_base(message, connection.received_base)
        self.handle_event(MessageReceived(connection.conn_id, header, message))

    def on_ended(self, connection: Connection, reason: str) -> None:
        """Report the end to the state machine, if it knew the connection."""
        self._release(connection)
        if self._connections.pop(connection.conn_id, None) is not None:
            refused, refusing_ips = connection.was_refused, frozenset(connection.refusing_ips)
            self.handle_event(PeerDisconnected(connection.conn_id, reason, refused, refusing_ips))

    def on_dropped(self, connection: Connection, reason: str) -> None:
        """Log the drop."""
        if connection in self._open_connections:
            self._rejection_log.add(connection.peer_address, reason)

    def on_socket_closed(self, connection: Connection) -> None:
        """Forget the connection."""
        self._open_connections.discard(connection)
        self._status_server.remove(connection)
        if not self._open_connections and self._closing:
            self._all_sockets_closed.set()

    def _log_rejected(self, text: str) -> None:
        if not self._closing:
            self._on_effect(EmitEvent("unauthenticated", ErrorRaised("ProtocolError", text)))

    def _drop_idle(self) -> None:
        """Drop authenticated peers that send nothing: members and waiting nodes send heartbeats."""
        timeout_s = max(self._limits.idle_timeout_s, 5 * self._settings.node_timeout_s)
        self._idle_timer = self._loop.call_later(timeout_s / MAX_IDLE_SWEEPS, self._drop_idle)
        accepted = [connection for conn_id, connection in self._connections.items() if conn_id < 0]
        for connection in accepted:
            connection.idle_sweeps += 1
            if connection.idle_sweeps > MAX_IDLE_SWEEPS:
                connection.drop(f"it has sent nothing for {timeout_s:g} s")


class RendezvousThread:
    """Runs a `RendezvousServer` in a thread; events go in by `submit`, effects come out by ``on_effect``."""

    def __init__(self, make_server: Callable[[], RendezvousServer]) -> None:
        """Prepare the thread; ``make_server`` is called in it, on its event loop."""
        self._make_server = make_server
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._server: RendezvousServer | None = None
        self._early_events: list[Event] = []
        self._thread = threading.Thread(target=self._run, name="elastic-resume-rendezvous", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, event: Event) -> None:
        """Pass an event to the state machine."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._handle_event, event)

    def stop(self) -> None:
        """Send what is queued, for at most `LINGER_S`, and end the thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(LINGER_S + 1.0)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve_until_stopped())
        finally:
            self._loop.close()

    async def _serve_until_stopped(self) -> None:
        self._server = server = self._make_server()
        try:
            await server.open()
            for event in self._early_events:
                server.handle_event(event)
            stopped = asyncio.ensure_future(self._stopped.wait())
            ends: list[asyncio.Future[Any]] = [stopped, server.failure]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
        finally:
            await server.close(LINGER_S)
            await cancel_lookups()
        if server.failure.done():
            raise server.failure.result()

    def _handle_event(self, event: Event) -> None:
        if self._server is None:
            self._early_events.append(event)
        else:
            self._server.handle_event(event)


def raise_descriptor_limit(needed: int) -> None:
    """Raise the limit of open files towards ``needed``, as far as the hard limit permits.

    systemd and many clusters start processes with 1,024, too few for the leader of a thousand members.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
