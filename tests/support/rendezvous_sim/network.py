"""A simulated network that delays, cuts and resets connections, with the clock that it runs by.

All chance is seeded. As in TCP, messages of one connection arrive in order or not at all. While a direction
is blocked they wait, as the kernel would retransmit them. A dying process closes its connections. A machine
without power is silent until it is back, and then answers with a reset.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from elastic_resume.rendezvous.net import protocol

MAX_STEPS_PER_NODE = 10_000
"""Several times the steps of the busiest schedule."""

MAX_DELAY_S = 0.02
"""The longest time that a packet takes between nodes that are not slowed down."""
SMALL_PATH_BYTES = 110
"""The largest message that passes a path which drops large packets: most that name three nodes are larger."""
RETRANSMIT_S = 0.4
"""When a lost first packet, or its answer, is sent again."""


LOSS_RETRANSMIT_S = 0.2
"""When a lost packet is sent again; each further loss of it doubles the time."""


def get_host_name(address: str) -> str:
    """Return the host's name from the address of an agent: `name`, or `name@port`."""
    return address.partition("@")[0]


class LivelockError(RuntimeError):
    """The agents keep each other busy without end."""


class Clock:
    """The simulated time and a queue of callbacks."""

    def __init__(self) -> None:
        self.now = 0.0
        self.steps = 0
        self.max_steps = 0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()

    def call_at(self, time_s: float, callback: Callable[..., None], *args: Any) -> None:
        """Schedule a callback; callbacks of one time run in the order of scheduling."""
        heapq.heappush(self._queue, (max(time_s, self.now), next(self._numbers), callback, args))

    def run_until(self, time_s: float) -> None:
        """Advance the time and run what is due."""
        due = self._queue
        while due and due[0][0] <= time_s:
            self.now, _, do, args = heapq.heappop(due)
            do(*args)
            self.steps += 1
            if self.steps > self.max_steps:
                raise LivelockError(f"{self.max_steps} steps by {self.now:.3f} s")
        self.now = time_s


@dataclass(slots=True)
class ConnectionEnd:
    """One end of a connection: its host, its number there, and whether that process still holds it."""

    host: str
    incarnation_id: int
    conn: int
    is_open: bool = True
    peer: ConnectionEnd | None = None
    next_arrival_s: float = 0.0
    """No message arrives before one that was sent earlier."""
    in_flight: deque[tuple[str, Any]] = field(default_factory=deque)
    blocked_count: int = 0
    """Messages that were due while the direction was blocked."""


class Host:
    """What the network needs of a node."""

    name: str
    address: str
    """Where its newest process listens."""
    ip_address = ""
    """Empty: it is called by its name alone."""
    incarnation_id: int
    has_process: bool
    has_power: bool
    is_suspended: bool

    def on_accepted(self, end: ConnectionEnd) -> None:
        """Accept a connection."""
        raise NotImplementedError

    def on_network_event(self, end: ConnectionEnd, kind: str, payload: Any) -> None:
        """Handle `connected`, `message`, `closed` or `refused` on a connection."""
        raise NotImplementedError


class Network:
    """Carries connections between hosts."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self.clock = clock
        self.rng = rng
        self.hosts: dict[str, Host] = {}
        self.blocked_links: set[tuple[str, str]] = set()
        self.lasting_cuts: set[tuple[str, str]] = set()
        """The links that stay blocked to the end of the run."""
        self.rejects_dials = False
        """Answer calls over blocked links with a refusal, as a rejecting firewall does; else drop them."""
        self.slow_delay_s: dict[str, float] = {}
        """The longest delay of packets to and from slow nodes, by name."""
        self.path_limits: dict[str, int] = {}
        """The largest message in bytes that reaches a node, if not all do."""
        self.loss = 0.0
        """The share of packets that are lost."""
        self.ends: list[ConnectionEnd] = []

    def draw_delay(self, source: str, target: str) -> float:
        """Draw the time that a packet takes."""
        slow = self.slow_delay_s
        longest = max(slow.get(source, MAX_DELAY_S), slow.get(target, MAX_DELAY_S)) if slow else MAX_DELAY_S
        delay_s, retransmit_s = self.rng.random() * longest, LOSS_RETRANSMIT_S
        while self.loss and self.rng.random() < self.loss and retransmit_s < 3:
            delay_s, retransmit_s = delay_s + retransmit_s, 2 * retransmit_s
        return delay_s

    def dial(self, end: ConnectionEnd, address: str, ip_address: str = "") -> None:
        """Send the first packet of a connection."""
        delay_s = self.draw_delay(end.host, get_host_name(address))
        self.clock.call_at(self.clock.now + delay_s, self._deliver_dial, end, address, ip_address)

    def _find_host(self, address: str, ip_address: str) -> Host | None:
        """Return the host that a call reaches; an IP address may be that of another machine by now."""
        host = self.hosts.get(get_host_name(address))
        if not ip_address or host is None or not host.ip_address:
            return host
        return next((other for other in self.hosts.values() if other.ip_address == ip_address), None)

    def _deliver_dial(self, end: ConnectionEnd, address: str, ip_address: str) -> None:
        host = self._find_host(address, ip_address)
        if host is None:
            return
        back_at = self.clock.now + self.draw_delay(host.name, end.host)
        if host.is_suspended:
            return
        if self._is_blocked(end.host, host.name):
            if self.rejects_dials:
                self.clock.call_at(back_at, self._deliver, end, end.host, "refused", None)
        elif host.has_power and not (host.has_process and host.address == address):
            self.clock.call_at(back_at, self._deliver, end, host.name, "refused", host.ip_address)
        elif host.has_power:
            other = ConnectionEnd(host.name, host.incarnation_id, 0, peer=end)
            end.peer = other
            self.ends += [end, other]
            self.clock.call_at(back_at, self._deliver_accept, end, other)

    def _deliver_accept(self, end: ConnectionEnd, other: ConnectionEnd) -> None:
        if self._is_blocked(other.host, end.host) or not other.is_open:
            return
        host = self.hosts[other.host]
        if host.incarnation_id != other.incarnation_id or not host.has_process:
            return
        host.on_accepted(other)
        self._deliver(end, other.host, "connected", None)

    def _is_blocked(self, source: str, target: str) -> bool:
        return (source, target) in self.blocked_links

    def _is_head_stuck(self, source: str, end: ConnectionEnd) -> bool:
        """Return whether the oldest message in flight cannot pass; those behind it wait for it."""
        if self._is_blocked(source, end.host):
            return True
        (kind, payload), limit = end.in_flight[0], self.path_limits.get(end.host)
        return limit is not None and kind == "message" and len(protocol.encode(*payload)) > limit

    def _deliver(self, end: ConnectionEnd, source: str, kind: str, payload: Any) -> None:
        """Deliver an event outside the stream; a lost packet is sent again."""
        if self._is_blocked(source, end.host):
            self.clock.call_at(self.clock.now + RETRANSMIT_S, self._deliver, end, source, kind, payload)
        elif end.is_open:
            self.hosts[end.host].on_network_event(end, kind, payload)

    def send(self, end: ConnectionEnd, payload: Any) -> None:
        """Queue a message to the other end."""
        self._enqueue(end, "message", payload)

    def close(self, end: ConnectionEnd) -> None:
        """Close this end after what was sent."""
        if end.is_open:
            end.is_open = False
            self._enqueue(end, "closed", None)

    def _enqueue(self, end: ConnectionEnd, kind: str, payload: Any) -> None:
        peer = end.peer
        if peer is None:
            return
        peer.in_flight.append((kind, payload))
        self._schedule_arrival(end.host, peer)

    def _schedule_arrival(self, source: str, end: ConnectionEnd) -> None:
        end.next_arrival_s = max(end.next_arrival_s, self.clock.now + self.draw_delay(source, end.host))
        self.clock.call_at(end.next_arrival_s, self._arrive, source, end)

    def _arrive(self, source: str, end: ConnectionEnd) -> None:
        """Deliver the oldest message in flight."""
        if self._is_head_stuck(source, end):
            end.blocked_count += 1
            return
        kind, payload = end.in_flight.popleft()
        if end.is_open:
            self.hosts[end.host].on_network_event(end, kind, payload)
        elif self.hosts[end.host].has_power and kind == "message" and end.peer and end.peer.is_open:
            back_at = self.clock.now + self.draw_delay(end.host, end.peer.host)
            self.clock.call_at(back_at, self._deliver, end.peer, end.host, "closed", None)

    def set_blocked_links(self, links: set[tuple[str, str]]) -> None:
        """Block these directions and no others; messages that waited on the others arrive."""
        self.blocked_links = links
        self.retransmit()

    def limit_path(self, name: str, limit_bytes: int = 10**6) -> None:
        """Drop larger messages to a node."""
        self.path_limits[name] = limit_bytes
        self.retransmit()

    def retransmit(self) -> None:
        """Send again what waited and may pass now."""
        for end in self.ends:
            if end.blocked_count and end.peer and not self._is_head_stuck(end.peer.host, end):
                held_up, end.blocked_count = end.blocked_count, 0
                for _ in range(held_up):
                    self._schedule_arrival(end.peer.host, end)
        self.ends = [e for e in self.ends if e.is_open or (e.peer and e.peer.is_open)]

    def close_process(self, name: str) -> None:
        """Close the connections of a dead process, as its kernel does."""
        for end in self.ends:
            if end.host == name:
                self.close(end)

    def lose_power(self, name: str) -> None:
        """Drop the connections of a machine without closing them."""
        for end in self.ends:
            if end.host == name:
                end.is_open = False

    def reset_connections(self, name: str, other: str, *, both: bool = True) -> None:
        """Break the connections between two hosts at both ends, or only at the first one's."""
        for end in list(self.ends):
            peer = end.peer
            if peer and (end.host, peer.host) == (name, other) and end.is_open and peer.is_open:
                end.is_open = False
                self.hosts[end.host].on_network_event(end, "closed", None)
                if both:
                    peer.is_open = False
                    self.hosts[peer.host].on_network_event(peer, "closed", None)
