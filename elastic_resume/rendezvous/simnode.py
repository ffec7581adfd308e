"""A simulated node: the real core on a clock of its own, a disk, workers that start and stop, faults.

Local time runs at its own rate from its own origin. Workers watch the lease by themselves, as real ones do:
when the agent is stopped they end at `fence_at`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic_resume.rendezvous.checkers import Checkers
from elastic_resume.rendezvous.core import Agent
from elastic_resume.rendezvous.messages import Acknowledge, Begin, Join, Propose
from elastic_resume.rendezvous.quorum import Incarnation
from elastic_resume.rendezvous.simnet import End, Host, Network
from elastic_resume.rendezvous.steps import (
    BeginWorld,
    Connect,
    Disconnect,
    EndJob,
    Event,
    GiveUp,
    JoinRequested,
    Leave,
    Log,
    Memory,
    MessageArrived,
    PeerConnected,
    PeerLost,
    Persist,
    Persisted,
    RestartWorkers,
    Send,
    Settings,
    StopWorkers,
    Tick,
    WorkersFinished,
)

Story = Callable[[str, object], None]


class Node(Host):
    """One machine with at most one agent on it."""

    def __init__(self, name: str, settings: Settings, net: Network, checkers: Checkers) -> None:
        self.name = name
        self.settings = settings
        self.net = net
        self.clock = net.clock
        self.rng = net.rng
        self.checkers = checkers
        self.rate = 1.0
        self.origin = 0.0
        self.order = 0
        self.disk: Memory | None = None
        self.disk_s = 0.01
        self.stop_s = 0.02
        self.life = 0
        self.power = True
        self.process = False
        self.paused = False
        self.agent: Agent | None = None
        self.ends: dict[int, End] = {}
        self.backlog: list[tuple[Event, int]] = []
        self.story: Story | None = None
        self.forming: Callable[[], None] | None = None
        """Called before a message that forms a world is sent: where faults hurt most."""
        self.ended = ""
        self._accepted = 0
        self._alarm = float("inf")
        self._fence = 0
        net.hosts[name] = self

    def local(self) -> float:
        """This node's monotonic clock."""
        return self.origin + self.clock.now * self.rate

    def _real(self, local: float) -> float:
        return (local - self.origin) / self.rate

    # Lives.

    def boot(self) -> None:
        """Start an agent, with what the disk holds."""
        if self.process:
            return
        self.life += 1
        self.power = self.process = True
        self.paused = False
        self.ended = ""
        place = self.settings.candidates.index(self.name) if self.name in self.settings.candidates else None
        me = Incarnation(self.name, str(self.life), self.name, place)
        self.agent = Agent(self.settings, me, self.disk, self.local())
        self.ends, self.backlog, self._alarm = {}, [], float("inf")
        self._happen(Tick())
        self._join_soon(0.3)

    def die(self, *, power: bool = False) -> None:
        """Kill the agent and its workers with it; with the power, silently."""
        if self.process and not power:
            self.net.process_died(self.name)
        if power:
            self.net.power_lost(self.name)
            self.power = False
        self.process, self.agent = False, None
        self.checkers.ended(self.name)

    def pause(self) -> None:
        """Stop the agent in its tracks (SIGSTOP); its workers watch their lease."""
        if self.agent is None or self.paused:
            return
        self.paused = True
        if self.name in self.checkers.live:
            self.clock.at(self._real(self.agent.fence_at), self._self_fence, self.life, self.agent.fence_at)

    def _self_fence(self, life: int, fence_at: float) -> None:
        if self.paused and life == self.life and self.agent and self.agent.fence_at == fence_at:
            self.checkers.ended(self.name)

    def resume(self) -> None:
        """Let the agent go on: it reads what came meanwhile."""
        if self.agent is None or not self.paused:
            return
        self.paused = False
        backlog, self.backlog = self.backlog, []
        if not backlog:
            self._happen(Tick())
        for event, life in backlog:
            self._deliver(event, life)

    def ask_to_join(self, life: int) -> None:
        """Workers are stopped and torchelastic asks for a world; also when a worker failed."""
        if life == self.life and self.agent:
            self.checkers.ended(self.name)
            self._happen(JoinRequested(Join(f"{self.name}:store", 1, self.order)))

    def _join_soon(self, within_s: float) -> None:
        self.clock.at(self.clock.now + self.rng.random() * within_s, self.ask_to_join, self.life)

    def finish(self) -> None:
        """Every worker of this node succeeds."""
        self.checkers.ended(self.name)
        self._happen(WorkersFinished())

    def leave(self) -> None:
        """Drain this node."""
        self.checkers.ended(self.name)
        self._happen(Leave("drained"))

    # The network's side.

    def accept(self, end: End) -> None:
        """Number a connection that somebody else dialled."""
        self._accepted -= 1
        end.conn = self._accepted
        self.ends[end.conn] = end
        self._happen(PeerConnected(end.conn))

    def notice(self, end: End, kind: str, payload: Any) -> None:
        """Turn what the network says into an event of the process that holds that end."""
        if end.life != self.life or self.agent is None:
            return
        if kind == "message":
            self._happen(MessageArrived(end.conn, *payload))
        elif kind == "connected":
            self._happen(PeerConnected(end.conn))
        else:
            end.held = False
            self._happen(PeerLost(end.conn, closed=True))

    # The core.

    def _happen(self, event: Event) -> None:
        self._deliver(event, self.life)

    def _deliver(self, event: Event, life: int) -> None:
        if self.agent is None or life != self.life:
            return
        if self.paused:
            self.backlog.append((event, life))
            return
        if self.story and not isinstance(event, Tick):
            self.story(self.name, event)
        for effect in self.agent.handle(event, self.local()):
            if self.story:
                self.story(self.name, effect)
            self._carry_out(effect)
        if self.agent:
            due = self._real(self.agent.next_deadline) + 1e-6  # not a rounding error too early
            if due < self._alarm:
                self._alarm = max(due, self.clock.now)
                self.clock.at(self._alarm, self._ring, self._alarm, self.life)

    def _ring(self, alarm: float, life: int) -> None:
        if alarm == self._alarm and life == self.life:
            self._alarm = float("inf")
            if self.paused:
                return
            self._happen(Tick())

    def _carry_out(self, effect: object) -> None:
        if isinstance(effect, Send):
            end = self.ends.get(effect.conn)
            if end:
                if self.forming and isinstance(effect.message, (Propose, Acknowledge, Begin)):
                    self.forming()
                self.net.send(end, (effect.stamp, effect.message))
        elif isinstance(effect, Connect):
            end = End(self.name, self.life, effect.conn)
            self.ends[effect.conn] = end
            self.net.dial(end, effect.address)
        elif isinstance(effect, Disconnect):
            end = self.ends.pop(effect.conn, None)
            if end:
                self.net.close(end)
        elif isinstance(effect, Persist):
            delay = self.rng.random() * self.disk_s
            self.clock.at(self.clock.now + delay, self._written, effect, self.life)
        elif isinstance(effect, BeginWorld):
            if self.agent:
                self.checkers.began(self.name, self.agent.body.me, effect, self.clock.now)
        elif isinstance(effect, (RestartWorkers, StopWorkers)):
            self.clock.at(self.clock.now + self.rng.random() * self.stop_s, self._stopped, self.life)
        elif isinstance(effect, (EndJob, GiveUp)):
            self.ended = f"{type(effect).__name__}: {effect.reason}"
        elif not isinstance(effect, Log):
            raise TypeError(f"no way to carry out {effect!r}")

    def _stopped(self, life: int) -> None:
        if life == self.life and self.agent and not self.agent.running:
            self.checkers.ended(self.name)
            if not self.ended and not self.agent.body.join:
                self._join_soon(0.1)

    def _written(self, effect: Persist, life: int) -> None:
        if life == self.life and self.agent:
            self.disk = effect.memory
            self._happen(Persisted(effect.number))
