"""Nodes of one job on this machine, each a shell whose workers stop at once; and strangers who call them."""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from elastic_resume.rendezvous.core.events import (
    Effect,
    EmitEvent,
    JoinRequested,
    KillWorkers,
    RestartWorkers,
    Settings,
    StartWorkers,
)
from elastic_resume.rendezvous.core.messages import Header, JoinSpec, Message
from elastic_resume.rendezvous.core.node import RendezvousNode
from elastic_resume.rendezvous.core.quorum import Incarnation
from elastic_resume.rendezvous.endpoint import ResolveFunction, resolve_name
from elastic_resume.rendezvous.net import protocol
from elastic_resume.rendezvous.net.connection import ConnectionLimits
from elastic_resume.rendezvous.net.durable_state import DurableStateFile
from elastic_resume.rendezvous.net.server import RendezvousThread
from elastic_resume.rendezvous.net.status import RendezvousStatus

TOKEN = b"a token that nobody may read in a log"
RUN = "job"
TIMEOUT_S = 30.0
NODE_TIMEOUT_S = 12.0
"""All nodes are threads of a process that may wait for a processor: seconds of silence are no death."""
HEARTBEAT_S = 0.3


def wait_until(condition: Callable[[], bool], description: str, *, timeout_s: float = TIMEOUT_S) -> None:
    """Wait for a condition."""
    limit = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < limit, f"not within {timeout_s:g} s: {description}"
        time.sleep(0.005)


def listener_address(listener: socket.socket, host: str = "127.0.0.1") -> str:
    """Where it listens."""
    return f"{host}:{listener.getsockname()[1]}"


class SocketNode:
    """One node's shell."""

    def __init__(
        self,
        index: int,
        listeners: list[socket.socket],
        record: DurableStateFile,
        *,
        limits: ConnectionLimits,
        settings: Settings,
        host: str = "127.0.0.1",
        resolve: ResolveFunction = resolve_name,
    ) -> None:
        self.name = f"n{index}"
        self.index = index
        self.address = listener_address(listeners[index], host)
        place = settings.candidates.index(self.address) if self.address in settings.candidates else None
        self.incarnation = Incarnation(self.name, f"life-of-{index}", self.address, place)
        self.worlds: queue.Queue[StartWorkers] = queue.Queue()
        self.stop_effects: list[RestartWorkers | KillWorkers] = []
        self.logs: list[EmitEvent] = []
        self.lease_expires_at = 0.0
        self.link_count = 0
        self.is_leader = False
        self.shell = RendezvousThread(
            settings,
            self.incarnation,
            listener=listeners[index],
            run_id=RUN,
            token=TOKEN,
            state_file=record,
            on_effect=self.carry_out,
            on_core_change=self.watch,
            limits=limits,
            resolve=resolve,
            render_status=self.render_status,
        )

    def start(self) -> None:
        """Start, and ask for a world."""
        self.shell.start()
        self.join()

    def join(self) -> None:
        """Ask for a world."""
        self.shell.submit(JoinRequested(JoinSpec(f"{self.address}/store", 1, self.index)))

    def carry_out(self, effect: Effect) -> None:
        """Keep worlds and logs; stop and join again when told to."""
        if isinstance(effect, StartWorkers):
            self.worlds.put(effect)
        elif isinstance(effect, (RestartWorkers, KillWorkers)):
            self.stop_effects.append(effect)
            self.join()
        elif isinstance(effect, EmitEvent):
            self.logs.append(effect)

    def watch(self, agent: RendezvousNode) -> None:
        """Keep what the agent's owner reads."""
        self.lease_expires_at, self.is_leader, self.link_count = (
            agent.lease_until,
            agent.is_leader,
            len(agent.state.links),
        )

    def render_status(self, view: RendezvousStatus) -> bytes:
        """Answer those who look."""
        nodes = [one.node for one in view.view.members] if view.view else []
        return json.dumps({"node": view.incarnation.node, "leads": view.is_leader, "nodes": nodes}).encode()

    def log_lines(self, kind: str, text: str = "") -> list[str]:
        """The log lines of a kind with these words."""
        return [one.text for one in list(self.logs) if one.kind == kind and text in one.text]


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
        """Make and start that many nodes; ``first`` are candidates before them, where nobody lives.

        Others know them by the name ``host``, which ``resolve`` gives the addresses of.
        """
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        for one in listeners:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # the kernel queues little for us
        candidates = (*first_candidates, *(listener_address(one, host) for one in listeners[:3]))
        settings = Settings(
            candidates,
            max_nodes=count,
            last_call_s=TIMEOUT_S,  # which a world of all does not wait
            node_timeout_s=node_timeout_s,
            heartbeats_per_timeout=max(4, round(node_timeout_s / HEARTBEAT_S)),
        )
        for index in range(count):
            place = self.directory / f"n{index}"
            place.mkdir(exist_ok=True)
            made = node_class(
                index,
                listeners,
                record(place),
                limits=self.limits,
                settings=settings,
                host=host,
                resolve=resolve,
            )
            self.nodes.append(made)
        for made in self.nodes:
            made.start()
        return self.nodes

    def stop(self) -> None:
        """End all."""
        for one in self.nodes:
            one.shell.stop()


def count_open_descriptors() -> int:
    """How many files and sockets this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


# ---- strangers ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def connect(address: str) -> Iterator[socket.socket]:
    """Connect to a node."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as stranger:
        yield stranger


def read_line(connection: socket.socket) -> bytes:
    """Read one line; empty when the other side is gone."""
    line = bytearray()
    with contextlib.suppress(ConnectionError):
        while not line.endswith(b"\n"):
            data = connection.recv(1)
            if not data:
                return b""
            line += data
    return bytes(line[:-1])


def is_disconnected(connection: socket.socket, *, timeout_s: float = TIMEOUT_S / 3) -> bool:
    """Whether the other side hangs up, whatever it says before.

    The time is shorter than a handshake may take here, or its end would count as a refusal.
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


_proofs: weakref.WeakKeyDictionary[socket.socket, protocol.HandshakeResult] = weakref.WeakKeyDictionary()


def authenticate(
    connection: socket.socket, token: bytes = TOKEN, *, looks: bool = False
) -> protocol.HandshakeResult:
    """Go through the handshake; what is said and heard from then on is signed."""
    side = protocol.dial(token, RUN, secrets.token_hex(32), status_only=looks)
    connection.sendall(next(side))
    try:
        while True:
            connection.sendall(side.send(read_line(connection)))
    except StopIteration as stop:
        proof: protocol.HandshakeResult = stop.value
        _proofs[connection] = proof
        return proof


def send_messages(connection: socket.socket, *messages: Message) -> None:
    """Send messages."""
    for seq, message in enumerate(messages, 1):
        connection.sendall(_proofs[connection].signer.sign(protocol.encode(Header(seq, 0), message)))


def receive_message(connection: socket.socket) -> Message:
    """Read the next message that is not a heartbeat."""
    return protocol.decode(_proofs[connection].verifier.verify(read_line(connection)))[1]


class EndlessSender(threading.Thread):
    """Sends on and on, in a thread, until the other side has had enough."""

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
