"""Time for many members to form a view, to notice a loss and to form the next view, over local TCP.

All members of a measurement live in one process, on one event loop. So one core does the work of a leader
with a thousand members and that of the members too. Times are an upper bound for a real job, in which only
the leader's part grows with the number of members.

"begin" is from the start of the first member until the last one has a view. A loss is a member, or the
leader, whose sockets close at once (as when its process is killed), or one that stays connected and sends
nothing more. "told" is from then until the last survivor knows that the view has ended, "begun" until the
last has the next view; survivors join at once. Detection is part of both: a closed connection is tried again
and must be refused, and an unreachable member must be so for the node timeout.

Each member makes the view durable before it starts. "disk": it writes a file and syncs it, all members to one
disk, where real nodes have one each. "memory": it does not. Stock is torchelastic's c10d rendezvous with a
process for each member. All join at once: twice with as many members as permitted, so that there is no
last-call timeout, and once without one that was killed. Stock does not notify members of a loss; here they
know it at once.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import gc
import heapq
import itertools
import json
import math
import multiprocessing
import os
import queue
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from elastic_resume.rendezvous.core.events import (
    Connect,
    Disconnect,
    Effect,
    Event,
    MessageReceived,
    PeerConnected,
    PeerDisconnected,
    Persist,
    Persisted,
    PersistentState,
    Send,
    Settings,
    StartWorkers,
    StopWorkers,
    Tick,
)
from elastic_resume.rendezvous.core.leader import Leader
from elastic_resume.rendezvous.core.messages import JoinRequest, JoinSpec
from elastic_resume.rendezvous.core.node import RendezvousNode
from elastic_resume.rendezvous.core.quorum import Incarnation
from elastic_resume.rendezvous.net import protocol
from elastic_resume.rendezvous.net.durable_state import DurableStateFile
from elastic_resume.rendezvous.net.server import RendezvousServer, raise_descriptor_limit

LIMIT_S = 60.0
STEADY_S = 3.0
PAUSE_S = 1.0
STOCK_LIMIT_S = 300.0
WORKERS = 8
WRITERS = 6
TOKEN = b"benchmark"
CANDIDATES = 3
MANY_MEMBERS = 1000
"""With more members the simulated node timeout is 30 s, or heartbeats alone would take all of a core."""
LATENCY_S = 1e-4
DISK_S = 2e-3
EFFECTS_AT_ONCE = 64
"""Sends that a simulated node makes before others run: 10,000 large lines would fill the memory."""
LOSSES = [("member closed", 0.5, False), ("leader closed", 0.0, False), ("member silent", 0.4, True)]
"""The name of a loss, its relative rank, and whether the member stays connected."""
ROWS = [
    ("start to begin", ("begin", "begun_s"), "s"),
    ("  of that, one core's time", ("begin", "cpu_s"), "s"),
    ("member closed: all told", ("member closed", "told_s"), "s"),
    ("member closed: next begun", ("member closed", "begun_s"), "s"),
    ("  of that, one core's time", ("member closed", "cpu_s"), "s"),
    ("leader closed: all told", ("leader closed", "told_s"), "s"),
    ("leader closed: next begun", ("leader closed", "begun_s"), "s"),
    ("member silent: all told", ("member silent", "told_s"), "s"),
    ("member silent: next begun", ("member silent", "begun_s"), "s"),
    ("stock: first round", ("round 1",), "s"),
    ("stock: second round", ("round 2",), "s"),
    ("stock: third, without one", ("round 3",), "s"),
    ("memory per member", ("begin", "kilobytes_of_memory"), "kB"),
    ("messages per member, first", ("begin", "messages"), ""),
    ("  bytes", ("begin", "kilobytes"), "kB"),
    ("messages per member, next", ("member closed", "messages"), ""),
    ("  bytes", ("member closed", "kilobytes"), "kB"),
    ("heartbeats per member and second", ("steady", "beats_per_s"), ""),
    ("cores busy with heartbeats", ("steady", "cores"), ""),
]


class MemoryStateFile(DurableStateFile):
    """A state file in memory: the cost of a member without its disk."""

    def write(self, state: PersistentState) -> None:
        """Keep it in memory."""
        self.state = state


class SharedThreads(ThreadPoolExecutor):
    """Writer threads for all members: a thousand threads in one process would distort the times."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ignore it: other members still write."""


class ImmediateExecutor(SharedThreads):
    """Runs a call at once: without a disk there is nothing to wait for."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the call."""
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


@dataclass
class Traffic:
    """Lines sent by all members, by type of message."""

    lines: collections.Counter[str] = field(default_factory=collections.Counter)
    bytes: collections.Counter[str] = field(default_factory=collections.Counter)

    def count(self) -> None:
        """Count all lines of this process from now on."""
        line_of = protocol.encode_line

        def counted(header: Any, body: bytes) -> bytes:
            line = line_of(header, body)
            kind = body[8 : body.index(b'"', 8)].decode()
            self.lines[kind] += 1
            self.bytes[kind] += len(line)
            return line

        protocol.encode_line = counted

    def take(self, members: int) -> dict[str, float]:
        """Return what was sent per member since the last call, heartbeats apart."""
        beats, beat_bytes = self.lines.pop("Heartbeat", 0), self.bytes.pop("Heartbeat", 0)
        said = {
            "messages": sum(self.lines.values()) / members,
            "kilobytes": sum(self.bytes.values()) / members / 1e3,
            "beats": beats / members,
            "beat_bytes": beat_bytes / max(1, beats),
        }
        self.lines.clear()
        self.bytes.clear()
        return said


class Member:
    """One node of the job, whose workers stop at once."""

    def __init__(self, job: Job, index: int) -> None:
        self.job = job
        self.index = index
        self.generation = 0
        self.rank = -1
        address = job.addresses[index]
        self.join = JoinRequest(JoinSpec(address, WORKERS, index))
        self.node = RendezvousServer(
            job.settings,
            Incarnation(f"node{index:05}", secrets.token_hex(8), address, index if index < 3 else None),
            listener=job.listeners[index],
            run_id="benchmark",
            token=TOKEN,
            state_file=job.record(index),
            on_effect=self.carry_out,
        )
        self.node._disk_thread = job.writers  # noqa: SLF001  jobs cannot choose it

    async def start(self) -> None:
        """Start, and ask for a view."""
        await self.node.open()
        self.node.handle_event(self.join)

    def carry_out(self, effect: Effect) -> None:
        """Record views; join again as soon as one ends."""
        if isinstance(effect, StartWorkers):
            self.generation, self.rank = effect.generation, effect.rank
            self.job.begun[effect.generation].add(self.index)
            self.job.changed.set()
        elif isinstance(effect, StopWorkers):
            self.job.told[effect.generation].add(self.index)
            self.job.changed.set()
            asyncio.get_running_loop().call_soon(self.node.handle_event, self.join)

    def fall_silent(self) -> None:
        """Keep every connection open and send nothing more."""
        self.node._closing = True  # noqa: SLF001  no public way to hang a node


class Job:
    """All members, on one event loop."""

    def __init__(self, members: int, directory: Path | None) -> None:
        self.listeners = [socket.create_server(("127.0.0.1", 0), backlog=1024) for _ in range(members)]
        self.addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in self.listeners]
        self.settings = Settings(candidates=tuple(self.addresses[:3]), max_nodes=members)
        self.directory = directory
        self.begun: dict[int, set[int]] = collections.defaultdict(set)
        self.told: dict[int, set[int]] = collections.defaultdict(set)
        self.changed = asyncio.Event()
        self.writers = ImmediateExecutor(1) if directory is None else SharedThreads(WRITERS)
        self.traffic = Traffic()
        self.members: dict[int, Member] = {}

    def record(self, index: int) -> DurableStateFile:
        """Return the state file of a member."""
        if self.directory is None:
            return MemoryStateFile(Path(tempfile.gettempdir()) / "no-such-directory")
        place = self.directory / str(index)
        place.mkdir()
        return DurableStateFile(place)

    async def wait_until(self, what: Callable[[], bool]) -> float:
        """Wait for a condition; return the time at which it was true."""
        limit = time.monotonic() + LIMIT_S
        while not what():
            self.changed.clear()
            if time.monotonic() > limit:
                raise SystemExit(f"not within {LIMIT_S:g} s: {self.state()}")
            await asyncio.wait_for(self.changed.wait(), LIMIT_S)
        return time.monotonic()

    def state(self) -> str:
        """Return how many members started each generation."""
        return ", ".join(f"generation {one}: {len(who)}" for one, who in self.begun.items())

    def all_in_one_view(self, newer_than: int) -> bool:
        """Return whether all remaining members are in one view."""
        newest = max(self.begun, default=0)
        return newest > newer_than and self.begun[newest] >= self.members.keys()

    @property
    def generation(self) -> int:
        """Return the newest generation."""
        return max(self.begun, default=0)

    async def begin(self) -> dict[str, float]:
        """Start all members."""
        size = psutil.Process().memory_info().rss
        self.traffic.count()
        start, cpu = time.monotonic(), time.process_time()
        for index in range(len(self.listeners)):
            self.members[index] = Member(self, index)
            await self.members[index].start()
        end = await self.wait_until(lambda: self.all_in_one_view(0))
        used = time.process_time() - cpu
        grown = psutil.Process().memory_info().rss - size
        count = len(self.members)
        return {
            "begun_s": end - start,
            "cpu_s": used,
            "kilobytes_of_memory": grown / count / 1e3,
            **self.traffic.take(count),
        }

    async def steady(self) -> dict[str, float]:
        """Let the view run, and measure the cost of heartbeats."""
        generation, cpu, start = self.generation, time.process_time(), time.monotonic()
        self.traffic.take(1)
        await asyncio.sleep(STEADY_S)
        elapsed = time.monotonic() - start
        if self.generation != generation or not self.all_in_one_view(generation - 1):
            raise SystemExit(f"the view ended: {self.state()}")
        said = self.traffic.take(len(self.members))
        return {"cores": (time.process_time() - cpu) / elapsed, "beats_per_s": said["beats"] / elapsed}

    async def lose(self, index: int, *, silently: bool = False) -> dict[str, float]:
        """Lose a member; all others continue."""
        generation = self.generation
        lost = self.members.pop(index)
        self.traffic.take(1)
        start, cpu = time.monotonic(), time.process_time()
        if silently:
            lost.fall_silent()
        else:
            await lost.node.close(0.0)
        told = await self.wait_until(lambda: self.told[generation] >= self.members.keys())
        end = await self.wait_until(lambda: self.all_in_one_view(generation))
        said = {
            "told_s": told - start,
            "begun_s": end - start,
            "cpu_s": time.process_time() - cpu,
            "generations": self.generation - generation,
            **self.traffic.take(len(self.members)),
        }
        if silently:
            await lost.node.close(0.0)
        return said

    def index_of_rank(self, rank: int) -> int:
        """Return the index of the member with a rank."""
        return next(one.index for one in self.members.values() if one.rank == rank)


async def measure(members: int, directory: Path | None) -> dict[str, Any]:
    """Measure one job."""
    gc.disable()  # it would walk the objects of a thousand agents; a real process has one
    job = Job(members, directory)
    said: dict[str, Any] = {"begin": await job.begin(), "steady": await job.steady()}
    for loss, rank, silently in LOSSES:
        said[loss] = await job.lose(job.index_of_rank(int(rank * (members - 1))), silently=silently)
        await asyncio.sleep(PAUSE_S)  # members that missed the last view join
    for one in job.members.values():
        one.fall_silent()  # otherwise the rest would form view after view
    for one in job.members.values():
        await one.node.close(0.0)
    return said


# ---- many members in simulated time --------------------------------------------------------------------


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
        self.handshake = start(TOKEN, "benchmark", nonce)
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
            f"node{index:05}", secrets.token_hex(8), address, index if index < CANDIDATES else None
        )
        self.core = RendezvousNode(job.settings, incarnation, None, job.now)
        self.ends: dict[int, SimulatedEnd] = {}
        self.inbox: collections.deque[tuple[Callable[..., None], tuple[Any, ...]]] = collections.deque()
        self.effects: collections.deque[Effect] = collections.deque()
        self.is_scheduled = self.is_lost = False
        self.now = job.now
        """Until when it is busy."""
        self.cpu_s = 0.0
        self.tick_at = math.inf
        self.accepted = 0
        self.last_body: tuple[Any, bytes] = (None, b"")

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
                if self.last_body[0] is not effect.message:
                    self.last_body = (effect.message, protocol.encode_body(effect.message))
                line = end.signer.sign(protocol.encode_line(effect.header, self.last_body[1]))
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
            self.job.note(self.job.told[effect.generation], self)
            self.receive(self.handle, self.join)

    def _dial(self, effect: Connect) -> None:
        target = self.job.nodes[int(effect.address[4:9])]
        self._charge(self.job.costs.connection_s)
        if target.is_lost:
            refused = PeerDisconnected(effect.conn_id, "Connection refused", refused=True)
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
            header, message = protocol.decode(end.verifier.verify(line[:-1]))
            self.handle(MessageReceived(end.conn_id, header, message))
            return
        try:
            self._send(end, end.handshake.send(line[:-1]))
        except StopIteration as stop:
            end.signer, end.verifier = stop.value.signer, stop.value.verifier
            if stop.value.final_line:
                self._send(end, stop.value.final_line)
            if not end.is_dialler:
                self.accepted -= 1
                end.conn_id = self.accepted
            self.ends[end.conn_id] = end
            self.handle(PeerConnected(end.conn_id, "10.0.0.1" if end.is_dialler else ""))

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
        self.settings = Settings(candidates=candidates, max_nodes=count, node_timeout_s=node_timeout_s)
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.order = itertools.count()
        self.started: dict[int, dict[int, float]] = collections.defaultdict(dict)
        self.told: dict[int, dict[int, float]] = collections.defaultdict(dict)
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
            return newest > newer_than and len(self.started[newest].keys() & self.remaining) == len(
                self.remaining
            )

        self.run_until(all_started)
        return max(self.started)

    def measure(self) -> dict[str, Any]:
        """Form a view, run it, lose a member, lose the leader."""
        leader, successor = self.nodes[0], self.nodes[1]
        for node in self.nodes:
            self.at(0.0, node.receive, node.handle, Tick())
            self.at(0.0, node.receive, node.handle, node.join)
        generation = self.wait_for_view(0)
        result: dict[str, Any] = {
            "forming": {
                "joined_s": self.joined_at,
                "joined_cpu_s": self.joined_cpu_s,
                "started_s": max(self.started[generation].values()) - self.joined_at,
                "started_cpu_s": leader.cpu_s - self.joined_cpu_s,
                "kilobytes": self.bytes_sent[0] / len(self.nodes) / 1e3,
                "generations": generation,
            }
        }
        start, cpu, until = self.now, leader.cpu_s, self.now + self.settings.node_timeout_s
        self.run_until(lambda: self.now >= until)
        beats = (self.now - start) / self.settings.heartbeat_interval_s * (len(self.nodes) - 1)
        used = leader.cpu_s - cpu
        result["steady"] = {"cores": used / (self.now - start), "beat_us": used / beats * 1e6}
        for name, index, leading in (
            ("member closed", len(self.nodes) // 2, leader),
            ("leader closed", 0, successor),
        ):
            start, cpu, sent = self.now, leading.cpu_s, self.bytes_sent[leading.index]
            self.nodes[index].fail()
            self.remaining.discard(index)
            before, generation = generation, self.wait_for_view(generation)
            result[name] = {
                "told_s": max(self.told[before].values()) - start,
                "begun_s": max(self.started[generation].values()) - start,
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
    gc.disable()  # it would walk the objects of thousands of agents; a real process has one
    costs = asyncio.run(measure_sockets())
    job = SimulatedJob(members, costs, 30.0 if members > MANY_MEMBERS else 3.0)
    return {**job.measure(), "costs": {key: value * 1e6 for key, value in vars(costs).items()}}


# ---- stock -------------------------------------------------------------------------------------------


def stock_member(index: int, members: int, port: int, ready: Any, told: Any) -> None:
    """Join three rounds as torchelastic's agent does; the last member is killed before the third."""
    from torch.distributed.elastic.rendezvous.api import RendezvousParameters  # noqa: PLC0415
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler  # noqa: PLC0415

    parameters = RendezvousParameters(
        "c10d", f"127.0.0.1:{port}", "benchmark", members - 1, members, "127.0.0.1", is_host=index == 0
    )
    rendezvous = get_rendezvous_handler(parameters)
    for turn in range(3):
        ready.wait()
        if turn == 2 and index == members - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        rendezvous.next_rendezvous()
        told.put((turn, start, time.monotonic()))
    time.sleep(STOCK_LIMIT_S)  # the host serves the store


def stock(members: int) -> dict[str, float]:
    """Return the seconds of torchelastic's rounds; rounds beyond the limit are left out."""
    # Imported once, before the fork.
    import torch.distributed.elastic.rendezvous.registry  # noqa: F401, PLC0415

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ready, told = fork.Barrier(members), fork.Queue()
    processes = [
        fork.Process(target=stock_member, args=(index, members, port, ready, told), daemon=True)
        for index in range(members)
    ]
    for process in processes:
        process.start()
    times: dict[int, list[tuple[float, float]]] = {0: [], 1: [], 2: []}
    limit = time.monotonic() + STOCK_LIMIT_S
    with contextlib.suppress(queue.Empty):
        while len(times[2]) < members - 1:
            turn, start, end = told.get(timeout=max(0.0, limit - time.monotonic()))
            times[turn].append((start, end))
    for process in processes:
        process.kill()
        process.join()
    return {
        f"round {turn + 1}": max(end for _, end in done) - min(start for start, _ in done)
        for turn, done in times.items()
        if len(done) >= members - (turn == 2)
    }


# ---- the table ---------------------------------------------------------------------------------------


def run_in_subprocess(what: str, members: int, directory: str) -> dict[str, Any]:
    """Measure in a process of its own, so that memory is measured separately."""
    command = [sys.executable, __file__, "--only", what, "--members", str(members), "--dir", directory]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {}
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def run_one(what: str, members: int, directory: str) -> dict[str, Any]:
    """Run one measurement in this process."""
    raise_descriptor_limit(6 * members + 512)
    if what == "stock":
        return stock(members)
    if what == "simulated":
        return simulate(members)
    if what == "memory":
        return asyncio.run(measure(members, None))
    with tempfile.TemporaryDirectory(dir=directory, prefix="rendezvous-scale-") as place:
        return asyncio.run(measure(members, Path(place)))


def median(runs: list[dict[str, Any]], *path: str) -> float | None:
    """Return the median of a value of the runs; None if a run did not finish."""
    found = []
    for run in runs:
        value: Any = run
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if value is None:
            return None
        found.append(float(value))
    return statistics.median(found)


def show(results: dict[str, list[dict[str, Any]]], stock_members: int) -> None:
    """Print a table with a column for each measurement."""
    names = list(results)
    print(
        f"{'median of ' + str(len(results[names[0]])) + ' runs':34}" + "".join(f"{one:>17}" for one in names)
    )
    for label, path, unit in ROWS:
        values = [median(results[name], *path) for name in names]
        cells = ["-" if value is None else f"{value:.{2 if unit == 's' else 1}f} {unit}" for value in values]
        print(f"{label:34}" + "".join(f"{cell:>17}" for cell in cells))
    for turn, words in (("round 2", "second round"), ("round 3", "round after a loss")):
        base = median(results.get("stock", []), turn) if results.get("stock") else None
        for name in names:
            ours = median(results[name], "member closed", "begun_s")
            if base and ours:
                ratio = f"{base / ours:.1f} times as long as {name}'s re-formation after a loss"
                print(f"stock's {words} with {stock_members} takes {ratio}, its detection included")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--members", type=int, default=1000, help="members of the large job")
    parser.add_argument("--stock", type=int, default=64, help="members of torchelastic's; 0: none")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each measurement")
    parser.add_argument("--dir", default=".", help="where the members' records are written")
    parser.add_argument("--json", type=Path, help="write every run's numbers there")
    parser.add_argument("--only", choices=["memory", "disk", "simulated", "stock"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        print(json.dumps(run_one(args.only, args.members, args.dir)))
        return
    plan = {f"{args.members} {kind}": (kind, args.members) for kind in ("memory", "disk")}
    if args.stock:
        plan[f"{args.stock} disk"] = ("disk", args.stock)
        plan["stock"] = ("stock", args.stock)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in plan}
    for _ in range(args.repeat):
        for name, (kind, members) in plan.items():
            results[name].append(run_in_subprocess(kind, members, args.dir))
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    show(results, args.stock)
    if args.json:
        machine = {"cpus": os.cpu_count(), "python": sys.version.split()[0], "load": os.getloadavg()}
        args.json.write_text(json.dumps({"machine": machine, "runs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
