"""Members of a rendezvous with a machine each, in simulated time; `rendezvous_scale.py` runs it.

State machine, codec, handshake and signatures of all members are real and run in this process. A member's
clock advances by the processor time that they take. What sockets cost is measured first, and charged for each
connection, message and byte. A message travels 0.1 ms, a write to disk takes 2 ms, and bandwidth has no
limit. Members share a cache of parsed views, which saves each of 10,000 members 40 ms.
"""

from __future__ import annotations

import asyncio
import collections
import gc
import heapq
import itertools
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastic_resume.rendezvous.core.interface import (
    Connect,
    Disconnect,
    Effect,
    Event,
    JoinRequest,
    MessageReceived,
    PeerConnected,
    PeerDisconnected,
    Persist,
    Persisted,
    RendezvousSettings,
    Send,
    StartWorkers,
    StopWorkers,
    Tick,
)
from elastic_resume.rendezvous.core.leader import Leader
from elastic_resume.rendezvous.core.messages import JoinSpec
from elastic_resume.rendezvous.core.node import RendezvousNode
from elastic_resume.rendezvous.core.world import Incarnation
from elastic_resume.rendezvous.net import protocol, view_delta
from elastic_resume.rendezvous.net.codec import pack_view

LIMIT_S = 60.0
WORKERS = 8
TOKEN = b"benchmark"
CANDIDATES = 3
MANY_MEMBERS = 1000
"""With more members the node timeout is 30 s, or heartbeats alone would take all of a core."""
LATENCY_S = 1e-4
DISK_S = 2e-3
EFFECTS_AT_ONCE = 64
"""Sends that a node makes before others run: 10,000 large lines would fill the memory."""


class SimulatedEnd:
    """One end of a simulated connection."""

    def __init__(self, node: SimulatedNode, conn_id: int) -> None:
        self.node = node
        self.conn_id = conn_id
        """The core's number; 0 for an accepted connection in the handshake."""
        self.is_dialler = conn_id != 0
        self.peer: SimulatedEnd | None = None
        nonce = secrets.token_hex(32)
        start = protocol.dial if self.is_dialler else protocol.accept
        self.own_base = view_delta.make_base(pack_view(node.core.state.view))
        self.sent_base = self.received_base = view_delta.NO_BASE
        self.handshake = start(TOKEN, "benchmark", nonce, view=self.own_base.digest)
        self.signer: protocol.LineAuthenticator | None = None
        self.verifier: protocol.LineAuthenticator | None = None
        self.is_open = True


class SimulatedNode:
    """A node with its real state machine, codec, handshake and signatures; sockets and disk are simulated.

    Its clock is the processor time that these take in this process, plus `SocketCosts`.
    """

    def __init__(self, job: SimulatedJob, index: int) -> None:
        self.job = job
        self.index = index
        address = f"node{index:05}.cluster:29400"
        self.join = JoinRequest(JoinSpec(address, WORKERS, index))
        incarnation = Incarnation(
            f"node{index:05}", secrets.token_hex(8), 1, address, index if index < CANDIDATES else None
        )
        self.core = RendezvousNode(job.settings, incarnation, None, job.now)
        self.ends: dict[int, SimulatedEnd] = {}
        self.inbox: collections.deque[tuple[Callable[..., None], tuple[Any, ...]]] = collections.deque()
        self.effects: collections.deque[Effect] = collections.deque()
        self.is_scheduled = self.is_lost = False
        self.now = job.now
        """The time until which it is busy."""
        self.cpu_s = 0.0
        self.tick_at = math.inf
        self.accepted = 0
        self.encoder = protocol.BodyEncoder()

    def receive(self, call: Callable[..., None], *arguments: Any) -> None:
        """Queue an event that arrives now."""
        self.inbox.append((call, arguments))
        self.schedule()

    def schedule(self) -> None:
        """Have `run` called as soon as this node is not busy."""
        if not self.is_scheduled and not self.is_lost:
            self.is_scheduled = True
            self.job.at(max(self.job.now, self.now), self.run)

    def run(self) -> None:
        """Handle one event, or carry out some effects of the last one."""
        self.is_scheduled = False
        if self.is_lost:
            return
        self.now = max(self.now, self.job.now)
        self._started_at = time.thread_time()
        if self.effects:
            for _ in range(min(len(self.effects), EFFECTS_AT_ONCE)):
                self._carry_out(self.effects.popleft())
        elif self.inbox:
            call, arguments = self.inbox.popleft()
            call(*arguments)
        self._charge(0.0)
        if self.core.next_deadline < self.tick_at:
            self.tick_at = self.core.next_deadline
            self.job.at(max(self.now, self.tick_at), self._tick, self.tick_at)
        if self.inbox or self.effects:
            self.schedule()

    def _charge(self, socket_s: float) -> None:
        """Advance the clock by the processor time since the last call, and by that of a socket."""
        until = time.thread_time()
        spent = until - self._started_at + socket_s
        self._started_at = until
        self.now += spent
        self.cpu_s += spent

    def _tick(self, tick_at: float) -> None:
        if tick_at == self.tick_at:
            self.tick_at = math.inf
            self.receive(self.handle, Tick())

    def handle(self, event: Event) -> None:
        """Pass an event to the state machine."""
        self.effects.extend(self.core.handle(event, self.now))
        if self.index == 0:
            self.job.watch_leader(self)

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Send):
            end = self.ends.get(effect.conn_id)
            if end and end.signer:
                body = self.encoder.encode(effect.message, end.sent_base)
                end.sent_base = view_delta.next_base(effect.message, end.sent_base)
                line = end.signer.sign_message(protocol.encode_head(effect.header), body)
                self._send(end, line)
        elif isinstance(effect, Connect):
            self._dial(effect)
        elif isinstance(effect, Disconnect):
            end = self.ends.pop(effect.conn_id, None)
            if end:
                self.close(end)
        elif isinstance(effect, Persist):
            self.job.at(self.now + DISK_S, self.receive, self.handle, Persisted(effect.version))
        elif isinstance(effect, StartWorkers):
            self.job.note(self.job.started[effect.generation], self)
        elif isinstance(effect, StopWorkers):
            self.job.note(self.job.informed[effect.generation], self)
            self.receive(self.handle, self.join)

    def _dial(self, effect: Connect) -> None:
        target = self.job.nodes[int(effect.address[4:9])]
        self._charge(self.job.costs.connection_s)
        if target.is_lost:
            ips = frozenset({"10.0.0.1"})
            refused = PeerDisconnected(effect.conn_id, "Connection refused", refused=True, refusing_ips=ips)
            self.job.at(self.now + 2 * LATENCY_S, self.receive, self.handle, refused)
            return
        end, other = SimulatedEnd(self, effect.conn_id), SimulatedEnd(target, 0)
        end.peer, other.peer = other, end
        self.ends[effect.conn_id] = end
        self.job.at(self.now + LATENCY_S, target.receive, target.accept, other)
        self.job.at(self.now + 2 * LATENCY_S, self.receive, self._greet, end)

    def accept(self, end: SimulatedEnd) -> None:
        """Accept a connection."""
        next(end.handshake)
        self._charge(self.job.costs.connection_s)

    def _greet(self, end: SimulatedEnd) -> None:
        self._send(end, next(end.handshake))

    def _send(self, end: SimulatedEnd, line: bytes) -> None:
        """Send a line; it arrives after the latency of the network."""
        self._charge(self.job.costs.message_s + len(line) * self.job.costs.byte_s)
        peer = end.peer
        self.job.bytes_sent[self.index] += len(line)
        if peer and end.is_open:
            self.job.at(self.now + LATENCY_S, peer.node.receive, peer.node.read, peer, line)

    def read(self, end: SimulatedEnd, line: bytes) -> None:
        """Handle a line that has arrived."""
        self._charge(self.job.costs.message_s + len(line) * self.job.costs.byte_s)
        if not end.is_open:
            return
        if end.verifier:
            header, message = protocol.decode(end.verifier.verify(line[:-1]), end.received_base)
            end.received_base = view_delta.next_base(message, end.received_base)
            self.handle(MessageReceived(end.conn_id, header, message))
            return
        try:
            self._send(end, end.handshake.send(line[:-1]))
        except StopIteration as stop:
            end.signer, end.verifier = stop.value.signer, stop.value.verifier
            if stop.value.peer_view == end.own_base.digest:
                end.sent_base = end.received_base = end.own_base
            if stop.value.final_line:
                self._send(end, stop.value.final_line)
            if not end.is_dialler:
                self.accepted -= 1
                end.conn_id = self.accepted
            self.ends[end.conn_id] = end
            self.handle(PeerConnected(end.conn_id, "10.0.0.1"))

    def close(self, end: SimulatedEnd) -> None:
        """Close a connection; the other end learns of it after the latency."""
        end.is_open = False
        if end.peer:
            peer = end.peer
            self.job.at(
                max(self.now, self.job.now) + LATENCY_S, peer.node.receive, peer.node.see_closed, peer
            )

    def see_closed(self, end: SimulatedEnd) -> None:
        """Report that the other end has closed a connection."""
        if end.is_open:
            end.is_open = False
            self.ends.pop(end.conn_id, None)
            self.handle(PeerDisconnected(end.conn_id, "closed"))

    def fail(self) -> None:
        """End this node, as if its process were killed."""
        self.is_lost = True
        for end in self.ends.values():
            self.close(end)


class SimulatedJob:
    """All members with a machine each, in simulated time."""

    def __init__(self, count: int, costs: SocketCosts, node_timeout_s: float) -> None:
        self.costs = costs
        candidates = tuple(f"node{index:05}.cluster:29400" for index in range(CANDIDATES))
        self.settings = RendezvousSettings(
            candidates=candidates, max_nodes=count, node_timeout_s=node_timeout_s
        )
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.order = itertools.count()
        self.started: dict[int, dict[int, float]] = collections.defaultdict(dict)
        self.informed: dict[int, dict[int, float]] = collections.defaultdict(dict)
        self.bytes_sent: collections.Counter[int] = collections.Counter()
        self.joined_at = 0.0
        self.joined_cpu_s = 0.0
        self.nodes = [SimulatedNode(self, index) for index in range(count)]
        self.remaining = set(range(count))

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call something at a time."""
        heapq.heappush(self.queue, (when, next(self.order), call, arguments))

    def note(self, times: dict[int, float], node: SimulatedNode) -> None:
        """Note what a node knows now."""
        times.setdefault(node.index, node.now)

    def watch_leader(self, node: SimulatedNode) -> None:
        """Note when all members have joined for the first time."""
        role = node.core.role
        if (
            not self.joined_at
            and isinstance(role, Leader)
            and len(role.peers.by_incarnation) == len(self.nodes) - 1
        ):
            self.joined_at, self.joined_cpu_s = node.now, node.cpu_s

    def run_until(self, is_over: Callable[[], bool]) -> None:
        """Advance the time until a condition is true."""
        limit = self.now + LIMIT_S
        for count in itertools.count():
            if count % 100 == 0 and is_over():
                return
            self.now, _, call, arguments = heapq.heappop(self.queue)
            if self.now > limit:
                raise SystemExit(
                    f"not within {LIMIT_S:g} s of simulated time: {[len(x) for x in self.started.values()]}"
                )
            call(*arguments)

    def wait_for_view(self, newer_than: int) -> int:
        """Return the newest generation once all remaining members have started it."""

        def all_started() -> bool:
            newest = max(self.started, default=0)
            enough = newest > newer_than and len(self.started[newest]) >= len(self.remaining)
            return enough and self.started[newest].keys() >= self.remaining

        self.run_until(all_started)
        return max(self.started)

    def measure(self) -> dict[str, Any]:
        """Start a view, run it, lose a member, lose the leader."""
        leader, successor = self.nodes[0], self.nodes[1]
        for node in self.nodes:
            self.at(0.0, node.receive, node.handle, Tick())
            self.at(0.0, node.receive, node.handle, node.join)
        generation = self.wait_for_view(0)
        result: dict[str, Any] = {
            "rendezvous": {
                "joined_s": self.joined_at,
                "joined_cpu_s": self.joined_cpu_s,
                "started_s": max(self.started[generation].values()) - self.joined_at,
                "started_cpu_s": leader.cpu_s - self.joined_cpu_s,
                "node_timeout_s": self.settings.node_timeout_s,
                "kilobytes": self.bytes_sent[0] / len(self.nodes) / 1e3,
                "generations": generation,
            }
        }
        start, cpu, until = self.now, leader.cpu_s, self.now + self.settings.node_timeout_s / 3
        self.run_until(lambda: self.now >= until)
        heartbeats = (self.now - start) / self.settings.heartbeat_interval_s * (len(self.nodes) - 1)
        used = leader.cpu_s - cpu
        result["steady"] = {"cores": used / (self.now - start), "heartbeat_us": used / heartbeats * 1e6}
        for name, index, leading in (
            ("member closed", len(self.nodes) // 2, leader),
            ("leader closed", 0, successor),
        ):
            start, cpu, sent = self.now, leading.cpu_s, self.bytes_sent[leading.index]
            self.nodes[index].fail()
            self.remaining.discard(index)
            before, generation = generation, self.wait_for_view(generation)
            result[name] = {
                "informed_s": max(self.informed[before].values()) - start,
                "started_s": max(self.started[generation].values()) - start,
                "cpu_s": leading.cpu_s - cpu,
                "kilobytes": (self.bytes_sent[leading.index] - sent) / len(self.nodes) / 1e3,
                "generations": generation - before,
            }
        return result


@dataclass
class SocketCosts:
    """Processor seconds of one side, with asyncio on this machine."""

    connection_s: float
    message_s: float
    byte_s: float


class Echo(asyncio.Protocol):
    """Sends as many bytes back as it has received, until enough were exchanged."""

    def __init__(self, size: int, count: int, first: bool, done: asyncio.Event) -> None:
        self.size, self.count, self.first, self.done = size, count, first, done
        self.received = 0

    def connection_made(self, transport: Any) -> None:
        """Begin."""
        self.transport = transport
        if self.first:
            transport.write(bytes(self.size))

    def data_received(self, data: bytes) -> None:
        """Answer when a message is complete."""
        self.received += len(data)
        if self.received >= self.size:
            self.received = 0
            self.count -= 1
            if self.count > 0:
                self.transport.write(bytes(self.size))
            else:
                self.done.set()


async def measure_sockets() -> SocketCosts:
    """Measure connections, small and large messages between two sockets of this process."""
    loop = asyncio.get_running_loop()

    async def exchange(size: int, count: int, connections: int) -> float:
        done = asyncio.Event()
        server = await loop.create_server(lambda: Echo(size, count, False, done), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        start = time.process_time()
        for _ in range(connections):
            done.clear()
            transport, _ = await loop.create_connection(
                lambda: Echo(size, count, True, done), "127.0.0.1", port
            )
            await done.wait()
            transport.close()
        used = time.process_time() - start
        server.close()
        return used / connections

    message_s = await exchange(100, 3000, 1) / (4 * 3000)
    connection_s = await exchange(100, 1, 300) / 2 - 2 * message_s
    byte_s = max(0.0, await exchange(200_000, 300, 1) / (4 * 300) - message_s) / 200_000
    return SocketCosts(connection_s, message_s, byte_s)


def simulate(members: int) -> dict[str, Any]:
    """Measure one job in simulated time."""
    gc.disable()  # it would walk the objects of thousands of agents; a real process has one agent
    costs = asyncio.run(measure_sockets())
    job = SimulatedJob(members, costs, 30.0 if members > MANY_MEMBERS else 3.0)
    costs_us = {"connection_us": costs.connection_s * 1e6, "message_us": costs.message_s * 1e6}
    return {**job.measure(), "sockets": {**costs_us, "megabyte_us": costs.byte_s * 1e12}}
