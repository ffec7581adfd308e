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
    BeginWorld,
    Effect,
    JoinRequested,
    Log,
    RestartWorkers,
    Settings,
    StopWorkers,
)
from elastic_resume.rendezvous.core.messages import Join, Message, Stamp
from elastic_resume.rendezvous.core.node import Agent
from elastic_resume.rendezvous.core.quorum import Incarnation
from elastic_resume.rendezvous.endpoint import Resolve, lookup
from elastic_resume.rendezvous.net import protocol
from elastic_resume.rendezvous.net.durable_state import Record
from elastic_resume.rendezvous.net.server import Limits, Shell
from elastic_resume.rendezvous.status_view import View

TOKEN = b"a token that nobody may read in a log"
RUN = "job"
PATIENCE_S = 30.0
NODE_TIMEOUT_S = 12.0
"""All nodes are threads of a process that may wait for a processor: seconds of silence are no death."""
BEAT_S = 0.3


def until(true: Callable[[], bool], what: str, *, patience_s: float = PATIENCE_S) -> None:
    """Wait for a condition."""
    limit = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < limit, f"not within {patience_s:g} s: {what}"
        time.sleep(0.005)


def address_of(listener: socket.socket, host: str = "127.0.0.1") -> str:
    """Where it listens."""
    return f"{host}:{listener.getsockname()[1]}"


class Station:
    """One node's shell."""

    def __init__(
        self,
        index: int,
        listeners: list[socket.socket],
        record: Record,
        *,
        limits: Limits,
        settings: Settings,
        host: str = "127.0.0.1",
        resolve: Resolve = lookup,
    ) -> None:
        self.name = f"n{index}"
        self.index = index
        self.address = address_of(listeners[index], host)
        place = settings.candidates.index(self.address) if self.address in settings.candidates else None
        self.me = Incarnation(self.name, f"life-of-{index}", self.address, place)
        self.worlds: queue.Queue[BeginWorld] = queue.Queue()
        self.ends: list[RestartWorkers | StopWorkers] = []
        self.logs: list[Log] = []
        self.fence_at = 0.0
        self.links = 0
        self.leads = False
        self.shell = Shell(
            settings,
            self.me,
            listener=listeners[index],
            run_id=RUN,
            token=TOKEN,
            record=record,
            carry_out=self.carry_out,
            watch=self.watch,
            limits=limits,
            resolve=resolve,
            show=self.show,
        )

    def start(self) -> None:
        """Start, and ask for a world."""
        self.shell.start()
        self.join()

    def join(self) -> None:
        """Ask for a world."""
        self.shell.submit(JoinRequested(Join(f"{self.address}/store", 1, self.index)))

    def carry_out(self, effect: Effect) -> None:
        """Keep worlds and logs; stop and join again when told to."""
        if isinstance(effect, BeginWorld):
            self.worlds.put(effect)
        elif isinstance(effect, (RestartWorkers, StopWorkers)):
            self.ends.append(effect)
            self.join()
        elif isinstance(effect, Log):
            self.logs.append(effect)

    def watch(self, agent: Agent) -> None:
        """Keep what the agent's owner reads."""
        self.fence_at, self.leads, self.links = agent.fence_at, agent.leads, len(agent.body.links)

    def show(self, view: View) -> bytes:
        """Answer those who look."""
        nodes = [one.node for one in view.world.members] if view.world else []
        return json.dumps({"node": view.me.node, "leads": view.leads, "nodes": nodes}).encode()

    def told(self, kind: str, words: str = "") -> list[str]:
        """The log lines of a kind with these words."""
        return [one.text for one in list(self.logs) if one.kind == kind and words in one.text]


class Stations:
    """All nodes of a job."""

    def __init__(self, directory: Path, limits: Limits) -> None:
        self.directory = directory
        self.limits = limits
        self.made: list[Station] = []

    def build(
        self,
        count: int,
        *,
        record: Callable[[Path], Record] = Record,
        station: type[Station] = Station,
        node_timeout_s: float = NODE_TIMEOUT_S,
        first: tuple[str, ...] = (),
        host: str = "127.0.0.1",
        resolve: Resolve = lookup,
    ) -> list[Station]:
        """Make and start that many nodes; ``first`` are candidates before them, where nobody lives.

        Others know them by the name ``host``, which ``resolve`` gives the addresses of.
        """
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        for one in listeners:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # the kernel queues little for us
        candidates = (*first, *(address_of(one, host) for one in listeners[:3]))
        settings = Settings(
            candidates,
            max_nodes=count,
            settle_s=PATIENCE_S,  # which a world of all does not wait
            node_timeout_s=node_timeout_s,
            beats_per_timeout=max(4, round(node_timeout_s / BEAT_S)),
        )
        for index in range(count):
            place = self.directory / f"n{index}"
            place.mkdir(exist_ok=True)
            made = station(
                index,
                listeners,
                record(place),
                limits=self.limits,
                settings=settings,
                host=host,
                resolve=resolve,
            )
            self.made.append(made)
        for made in self.made:
            made.start()
        return self.made

    def stop(self) -> None:
        """End all."""
        for one in self.made:
            one.shell.stop()


def descriptors() -> int:
    """How many files and sockets this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


# ---- strangers ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def calling(address: str) -> Iterator[socket.socket]:
    """Connect to a node."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as stranger:
        yield stranger


def read_line(stranger: socket.socket) -> bytes:
    """Read one line; empty when the other side is gone."""
    line = bytearray()
    with contextlib.suppress(ConnectionError):
        while not line.endswith(b"\n"):
            data = stranger.recv(1)
            if not data:
                return b""
            line += data
    return bytes(line[:-1])


def dropped(stranger: socket.socket, *, patience_s: float = PATIENCE_S / 3) -> bool:
    """Whether the other side hangs up, whatever it says before.

    The time is shorter than a handshake may take here, or its end would count as a refusal.
    """
    until_s = time.monotonic() + patience_s
    while (left_s := until_s - time.monotonic()) > 0:
        stranger.settimeout(left_s)
        try:
            if not stranger.recv(1 << 16):
                return True
        except ConnectionError:
            return True
        except TimeoutError:
            return False
    return False


_proofs: weakref.WeakKeyDictionary[socket.socket, protocol.Proof] = weakref.WeakKeyDictionary()


def prove(stranger: socket.socket, token: bytes = TOKEN, *, looks: bool = False) -> protocol.Proof:
    """Go through the handshake; what is said and heard from then on is signed."""
    side = protocol.call(token, RUN, secrets.token_hex(32), looks=looks)
    stranger.sendall(next(side))
    try:
        while True:
            stranger.sendall(side.send(read_line(stranger)))
    except StopIteration as stop:
        proof: protocol.Proof = stop.value
        _proofs[stranger] = proof
        return proof


def say(stranger: socket.socket, *messages: Message) -> None:
    """Send messages."""
    for seq, message in enumerate(messages, 1):
        stranger.sendall(_proofs[stranger].sends.sign(protocol.encode(Stamp(seq, 0), message)))


def hear(stranger: socket.socket) -> Message:
    """Read the next message that is not a heartbeat."""
    return protocol.decode(_proofs[stranger].hears.check(read_line(stranger)))[1]


class Babbler(threading.Thread):
    """Sends on and on, in a thread, until the other side has had enough."""

    def __init__(
        self, stranger: socket.socket, data: bytes | Callable[[], bytes], pause_s: float = 0.0
    ) -> None:
        super().__init__(daemon=True)
        self.stranger = stranger
        self.data = data
        self.pause_s = pause_s

    def run(self) -> None:
        """Send."""
        with contextlib.suppress(OSError):
            while True:
                self.stranger.sendall(self.data() if callable(self.data) else self.data)
                if self.pause_s:
                    time.sleep(self.pause_s)
