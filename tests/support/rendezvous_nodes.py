"""Rendezvous nodes of one job in threads of this process, and test peers that connect to them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import queue
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from elastic_resume.policy.wording import describe_event
from elastic_resume.rendezvous.core.interface import (
    Effect,
    EmitEvent,
    JoinRequest,
    RendezvousSettings,
    StartWorkers,
    StopWorkers,
)
from elastic_resume.rendezvous.core.messages import Header, JoinSpec, Message
from elastic_resume.rendezvous.core.node import RendezvousNode
from elastic_resume.rendezvous.core.world import Incarnation
from elastic_resume.rendezvous.endpoint import ResolveFunction, resolve_name
from elastic_resume.rendezvous.net import protocol
from elastic_resume.rendezvous.net.connection import ConnectionLimits
from elastic_resume.rendezvous.net.durable_state import DurableStateFile
from elastic_resume.rendezvous.net.server import RendezvousServer, RendezvousThread
from elastic_resume.rendezvous.net.status_server import RendezvousStatus
from elastic_resume.rendezvous.net.view_delta import NO_BASE, Base, next_base
from tests.support.processes import wait_for

TOKEN = b"a token that nobody may read in a log"
RUN = "job"
TIMEOUT_S = 30.0
NODE_TIMEOUT_S = 12.0
"""All nodes are threads of one process, which may wait seconds for a processor."""
HEARTBEAT_S = 0.3


def on_event_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on an event loop, and fail if a callback of asyncio has failed."""

    async def run(**arguments: Any) -> None:
        failures: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        await asyncio.wait_for(test(**arguments), TIMEOUT_S)
        assert not failures

    @functools.wraps(test)
    def wrapper(**arguments: Any) -> None:
        asyncio.run(run(**arguments))

    return wrapper


def listener_address(listener: socket.socket, host: str = "127.0.0.1") -> str:
    """Return the address of a listener."""
    return f"{host}:{listener.getsockname()[1]}"


class SocketNode:
    """The rendezvous thread of one node."""

    def __init__(
        self,
        index: int,
        listeners: list[socket.socket],
        state_file: DurableStateFile,
        *,
        limits: ConnectionLimits,
        settings: RendezvousSettings,
        host: str = "127.0.0.1",
        resolve: ResolveFunction = resolve_name,
    ) -> None:
        self.name = f"n{index}"
        self.index = index
        self.address = listener_address(listeners[index], host)
        self.candidates = settings.candidates
        candidate_index = self.candidates.index(self.address) if self.address in self.candidates else None
        self.incarnation = Incarnation(self.name, f"disk-{index}", 1, self.address, candidate_index)
        self.worlds: queue.Queue[StartWorkers] = queue.Queue()
        self.stop_effects: list[StopWorkers] = []
        self.logs: list[EmitEvent] = []
        self.lease_expires_at = 0.0
        self.link_count = 0
        self.is_leader = False
        make_server = functools.partial(
            RendezvousServer,
            settings,
            self.incarnation,
            listener=listeners[index],
            run_id=RUN,
            token=TOKEN,
            state_file=state_file,
            on_effect=self.carry_out,
            on_core_change=self.watch,
            limits=limits,
            resolve=resolve,
            render_status=self.render_status,
        )
        self.thread = RendezvousThread(make_server)

    def start(self) -> None:
        """Start, and ask for a view."""
        self.thread.start()
        self.join()

    def join(self) -> None:
        """Ask for a view."""
        self.thread.submit(JoinRequest(JoinSpec(f"{self.address}/store", 1, self.index)))

    def carry_out(self, effect: Effect) -> None:
        """Keep views and log entries; join again when the view ends."""
        if isinstance(effect, StartWorkers):
            self.worlds.put(effect)
        elif isinstance(effect, StopWorkers):
            self.stop_effects.append(effect)
            self.join()
        elif isinstance(effect, EmitEvent):
            self.logs.append(effect)

    def watch(self, agent: RendezvousNode) -> None:
        """Store what an agent reads from the state machine."""
        self.lease_expires_at, self.is_leader, self.link_count = (
            agent.lease_until,
            agent.is_leader,
            len(agent.state.links),
        )

    def render_status(self, view: RendezvousStatus) -> bytes:
        """Render the status for status clients."""
        nodes = [member.node for member in view.view.members] if view.view else []
        return json.dumps({"node": view.incarnation.node, "leads": view.is_leader, "nodes": nodes}).encode()

    def log_lines(self, kind: str, text: str = "") -> list[str]:
        """Return the log lines of a kind that contain a text."""
        logged = [event for event in list(self.logs) if event.kind == kind]
        lines = [
            describe_event(kind, event.reason, node="a", generation=event.generation) for event in logged
        ]
        return [line for line in lines if text in line]


class RendezvousNodes:
    """All nodes of a job."""

    def __init__(self, directory: Path, limits: ConnectionLimits) -> None:
        self.directory = directory
        self.limits = limits
        self.nodes: list[SocketNode] = []

    def build(
        self,
        count: int,
        *,
        record: Callable[[Path], DurableStateFile] = DurableStateFile,
        node_class: type[SocketNode] = SocketNode,
        node_timeout_s: float = NODE_TIMEOUT_S,
        first_candidates: tuple[str, ...] = (),
        host: str = "127.0.0.1",
        resolve: ResolveFunction = resolve_name,
    ) -> list[SocketNode]:
        """Build and start nodes; nothing listens at ``first_candidates``, which precede them.

        The nodes know each other by the name ``host``, which ``resolve`` resolves.
        """
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        for listener in listeners:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # the kernel queues little
        addresses = (listener_address(listener, host) for listener in listeners[:3])
        candidates = (*first_candidates, *addresses)
        settings = RendezvousSettings(
            candidates,
            max_nodes=count,
            last_call_timeout_s=TIMEOUT_S,  # a view of all nodes does not wait for it
            node_timeout_s=node_timeout_s,
            heartbeats_per_timeout=max(4, round(node_timeout_s / HEARTBEAT_S)),
        )
        for index in range(count):
            node_dir = self.directory / f"n{index}"
            node_dir.mkdir(exist_ok=True)
            node = node_class(
                index,
                listeners,
                record(node_dir),
                limits=self.limits,
                settings=settings,
                host=host,
                resolve=resolve,
            )
            self.nodes.append(node)
        for node in self.nodes:
            node.start()
        return self.nodes

    def stop(self) -> None:
        """Stop all nodes."""
        for node in self.nodes:
            node.thread.stop()


def count_open_descriptors() -> int:
    """Return how many files and sockets this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


# ---- other peers -------------------------------------------------------------------------------------


@contextlib.contextmanager
def connect(address: str) -> Iterator[socket.socket]:
    """Connect to a node."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
        yield connection


def read_line(connection: socket.socket) -> bytes:
    """Read one line; empty when the peer has closed."""
    line = bytearray()
    with contextlib.suppress(ConnectionError):
        while not line.endswith(b"\n"):
            data = connection.recv(1)
            if not data:
                return b""
            line += data
    return bytes(line[:-1])


def is_disconnected(connection: socket.socket, *, timeout_s: float = TIMEOUT_S / 3) -> bool:
    """Return whether the peer closes the connection, whatever it sends before.

    The time is shorter than the handshake's timeout in these tests, which would also close it.
    """
    until_s = time.monotonic() + timeout_s
    while (left_s := until_s - time.monotonic()) > 0:
        connection.settimeout(left_s)
        try:
            if not connection.recv(1 << 16):
                return True
        except ConnectionError:
            return True
        except TimeoutError:
            return False
    return False


_results: weakref.WeakKeyDictionary[socket.socket, protocol.HandshakeResult] = weakref.WeakKeyDictionary()
_bases: weakref.WeakKeyDictionary[socket.socket, Base] = weakref.WeakKeyDictionary()


def authenticate(
    connection: socket.socket, token: bytes = TOKEN, *, status_only: bool = False
) -> protocol.HandshakeResult:
    """Run the dialler's handshake; later lines are signed."""
    handshake = protocol.dial(token, RUN, secrets.token_hex(32), status_only=status_only)
    connection.sendall(next(handshake))
    try:
        while True:
            connection.sendall(handshake.send(read_line(connection)))
    except StopIteration as stop:
        result: protocol.HandshakeResult = stop.value
        _results[connection] = result
        return result


def send_messages(connection: socket.socket, *messages: Message) -> None:
    """Send messages."""
    for seq, message in enumerate(messages, 1):
        connection.sendall(_results[connection].signer.sign(protocol.encode(Header(seq, 0), message)))


def receive_message(connection: socket.socket) -> Message:
    """Read the next message that is not a heartbeat."""
    base = _bases.get(connection, NO_BASE)
    message = protocol.decode(_results[connection].verifier.verify(read_line(connection)), base)[1]
    _bases[connection] = next_base(message, base)
    return message


class EndlessSender(threading.Thread):
    """Sends without end in a thread, until the peer closes the connection."""

    def __init__(
        self, connection: socket.socket, data: bytes | Callable[[], bytes], pause_s: float = 0.0
    ) -> None:
        super().__init__(daemon=True)
        self.connection = connection
        self.data = data
        self.pause_s = pause_s

    def run(self) -> None:
        """Send."""
        with contextlib.suppress(OSError):
            while True:
                self.connection.sendall(self.data() if callable(self.data) else self.data)
                if self.pause_s:
                    time.sleep(self.pause_s)


def check_undisturbed(running: list[SocketNode]) -> None:
    """Check that leases are renewed on all nodes, and that no view has ended or been installed."""
    leases = [one.lease_expires_at for one in running]
    wait_for(
        lambda: all(one.lease_expires_at > old for one, old in zip(running, leases, strict=True)),
        "leases are renewed",
    )
    assert not [end for one in running for end in one.stop_effects], "the view was disturbed"
    assert all(one.worlds.empty() and one.thread.is_alive for one in running)
