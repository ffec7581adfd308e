"""A network that delays, cuts and reorders connections, and the clock it runs by. Seeded; nothing is real.

Messages of one connection arrive in the order in which they were sent, or not at all: TCP. While a direction
is cut they wait, as the kernel would send them again. A process that dies closes its connections; a machine
that loses power says nothing until it is back and answers with a reset.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

STEPS_LIMIT = 40_000
"""Ten times what the busiest schedule takes."""

FAST_S = 0.02
"""The longest that a packet takes between nodes that nothing slows down."""
AGAIN_S = 0.4
"""When a lost first packet, or its answer, is sent again."""


class StormError(RuntimeError):
    """Agents keep each other busy without end."""


class Clock:
    """Simulated time and what is due."""

    def __init__(self) -> None:
        self.now = 0.0
        self.steps = 0
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, do: Callable[..., None], *args: Any) -> None:
        """Do something at a time, in the order of times and then of calls."""
        heapq.heappush(self._due, (max(when, self.now), next(self._numbers), do, args))

    def run_until(self, end: float) -> None:
        """Let time pass."""
        due = self._due
        while due and due[0][0] <= end:
            self.now, _, do, args = heapq.heappop(due)
            do(*args)
            self.steps += 1
            if self.steps > STEPS_LIMIT:
                raise StormError(f"{STEPS_LIMIT} steps by {self.now:.3f} s")
        self.now = end


@dataclass(slots=True)
class End:
    """One end of a connection: whose, by which number, and whether that process still holds it."""

    host: str
    life: int
    conn: int
    held: bool = True
    peer: End | None = None
    ready_at: float = 0.0
    """Nothing sent to here arrives before what was sent earlier."""
    waiting: deque[tuple[str, Any]] = field(default_factory=deque)
    held_up: int = 0
    """So many of those that wait were due while the direction was cut."""


class Host:
    """What the network needs of a node."""

    name: str
    life: int
    process: bool
    power: bool
    suspended: bool

    def accept(self, end: End) -> None:
        """A connection from elsewhere stands."""
        raise NotImplementedError

    def notice(self, end: End, kind: str, payload: Any) -> None:
        """`connected`, `message` or `closed` on a connection of this host."""
        raise NotImplementedError


class Network:
    """Carries connections between hosts."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self.clock = clock
        self.rng = rng
        self.hosts: dict[str, Host] = {}
        self.cut: set[tuple[str, str]] = set()
        self.rejects = False
        """What is cut answers calls with a refusal, as a firewall does that rejects; else with silence."""
        self.slow_s: dict[str, float] = {}
        """The nodes whose packets take up to so long."""
        self.ends: list[End] = []

    def delay(self, source: str, target: str) -> float:
        """How long a packet takes."""
        slow = self.slow_s
        longest = max(slow.get(source, FAST_S), slow.get(target, FAST_S)) if slow else FAST_S
        return self.rng.random() * longest

    def dial(self, end: End, address: str) -> None:
        """Send the first packet of a connection."""
        self.clock.at(self.clock.now + self.delay(end.host, address), self._knock, end, address)

    def _knock(self, end: End, address: str) -> None:
        host = self.hosts.get(address)
        if host is None:
            return
        back_at = self.clock.now + self.delay(host.name, end.host)
        if host.suspended:
            return
        if self._is_cut(end.host, host.name):
            if self.rejects:
                self.clock.at(back_at, self._tell, end, end.host, "refused", None)
        elif host.power and not host.process:
            self.clock.at(back_at, self._tell, end, host.name, "refused", None)
        elif host.power:
            other = End(host.name, host.life, 0, peer=end)
            end.peer = other
            self.ends += [end, other]
            self.clock.at(back_at, self._answer, end, other)

    def _answer(self, end: End, other: End) -> None:
        if self._is_cut(other.host, end.host) or not other.held:
            return
        host = self.hosts[other.host]
        if host.life != other.life or not host.process:
            return
        host.accept(other)
        self._tell(end, other.host, "connected", None)

    def _is_cut(self, source: str, target: str) -> bool:
        return (source, target) in self.cut

    def _tell(self, end: End, source: str, kind: str, payload: Any) -> None:
        """Deliver what is not part of the stream; a lost packet is sent again."""
        if self._is_cut(source, end.host):
            self.clock.at(self.clock.now + AGAIN_S, self._tell, end, source, kind, payload)
        elif end.held:
            self.hosts[end.host].notice(end, kind, payload)

    def send(self, end: End, payload: Any) -> None:
        """Queue a message to the other end."""
        self._queue(end, "message", payload)

    def close(self, end: End) -> None:
        """End a connection from this side, behind what was sent."""
        if end.held:
            end.held = False
            self._queue(end, "closed", None)

    def _queue(self, end: End, kind: str, payload: Any) -> None:
        peer = end.peer
        if peer is None:
            return
        peer.waiting.append((kind, payload))
        self._send_next(end.host, peer)

    def _send_next(self, source: str, end: End) -> None:
        end.ready_at = max(end.ready_at, self.clock.now + self.delay(source, end.host))
        self.clock.at(end.ready_at, self._arrive, source, end)

    def _arrive(self, source: str, end: End) -> None:
        """Deliver the oldest that waits."""
        if self._is_cut(source, end.host):
            end.held_up += 1
            return
        kind, payload = end.waiting.popleft()
        if end.held:
            self.hosts[end.host].notice(end, kind, payload)
        elif self.hosts[end.host].power and kind == "message" and end.peer and end.peer.held:
            back_at = self.clock.now + self.delay(end.host, end.peer.host)
            self.clock.at(back_at, self._tell, end.peer, end.host, "closed", None)

    def set_cut(self, cut: set[tuple[str, str]]) -> None:
        """Cut these directions and no others; what waited on the others arrives."""
        self.cut = cut
        for end in self.ends:
            if end.held_up and end.peer and (end.peer.host, end.host) not in cut:
                held_up, end.held_up = end.held_up, 0
                for _ in range(held_up):
                    self._send_next(end.peer.host, end)
        self.ends = [e for e in self.ends if e.held or (e.peer and e.peer.held)]

    def process_died(self, name: str) -> None:
        """Close what a dead process held, as its kernel does."""
        for end in self.ends:
            if end.host == name:
                self.close(end)

    def power_lost(self, name: str) -> None:
        """Forget what a machine held, without a word."""
        for end in self.ends:
            if end.host == name:
                end.held = False

    def reset(self, name: str, other: str, *, both: bool = True) -> None:
        """Break the connections between two hosts at both ends, or only at the first's."""
        for end in list(self.ends):
            peer = end.peer
            if peer and (end.host, peer.host) == (name, other) and end.held and peer.held:
                end.held = False
                self.hosts[end.host].notice(end, "closed", None)
                if both:
                    peer.held = False
                    self.hosts[peer.host].notice(peer, "closed", None)
