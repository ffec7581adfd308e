"""A simulated node: the real core on a clock of its own, a disk, workers that start and stop, faults.

Local time runs at its own rate from its own origin. Workers watch the lease by themselves, as real ones do:
when the agent is stopped they end at `fence_at`. An agent whose part is over answers for `linger_s` and
exits; one that gave up is started again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from elastic_resume.policy.divergence import Digest
from elastic_resume.policy.failure_classification import SIGNAL, Failure
from elastic_resume.rendezvous.core.events import (
    BeginWorld,
    Connect,
    Digested,
    Disconnect,
    EndJob,
    Event,
    GiveUp,
    JobFailed,
    JoinRequested,
    Leave,
    Log,
    Memory,
    MessageArrived,
    PeerConnected,
    PeerLost,
    Persist,
    Persisted,
    ReplicasDiffer,
    RestartWorkers,
    Send,
    Settings,
    StopWorkers,
    Tick,
    WorkerFailed,
    WorkersFinished,
)
from elastic_resume.rendezvous.core.messages import Acknowledge, Begin, Claim, Diverged, Join, Print, Propose
from elastic_resume.rendezvous.core.node import Agent
from elastic_resume.rendezvous.core.quorum import Incarnation
from tests.support.rendezvous_sim.checkers import ALIVE, NEW_NUMBER, Checkers
from tests.support.rendezvous_sim.net import End, Host, Network

AGAIN_S = 1.0
"""When an agent that gave up is started again."""
FORMING = (Propose, Acknowledge, Begin)
DURABLE_S = 0.5
"""A disk that is not slowed down has written what it was given so long ago."""

Story = Callable[[str, object], None]


class Node(Host):
    """One machine with at most one agent on it."""

    def __init__(  # noqa: PLR0915 - one line for each thing that a node is
        self, name: str, settings: Settings, net: Network, checkers: Checkers
    ) -> None:
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
        self.suspended = False
        """The whole machine is, not only the agent."""
        self.asleep_s = 0.0
        """How long it has been suspended in all: seen by a clock that stands still meanwhile."""
        self._asleep_since = 0.0
        self.heard = 0
        """The greatest generation that a leader's claim has told this node of, while its disk took writes."""
        self.heard_at = 0.0
        self._writes = 0
        """The life whose write is under way; 0 while none is."""
        self.kept = 0
        """What of that is surely on its disk."""
        self._gone: frozenset[Incarnation] = frozenset()
        self.fenced = False
        """Its workers ended by themselves while it was paused."""
        self.buried = False  # by the operator of `word`
        self.agent: Agent | None = None
        self.ends: dict[int, End] = {}
        self.backlog: list[tuple[Event, int]] = []
        self.story: Story | None = None
        self.watch: Callable[[str], None] | None = None
        """Told of messages that form worlds, and of each new `world`: where faults hurt most."""
        self.ended = ""
        """What the agent said at the end of its part."""
        self.last = False
        """Once the job has ended here, nobody starts it again."""
        """What it can still tell of its state, by step, and the names of its tensors."""
        self.differed: list[Diverged] = []
        self.gave_up_at = float("-inf")
        self.linger_s = float("inf")
        self.doom = ""
        """How it will die: `unsent`, before it sends a message that forms a world, or `written`, before it
        hears that its write is on disk."""
        self.back_s = 0.0
        """Who dies of a doom comes back after so long."""
        self._accepted = 0
        self._alarm = float("inf")
        self._fence = 0
        net.hosts[name] = self

    clock_stops = False
    """Whether its clock stands still while it is suspended: CLOCK_MONOTONIC does, CLOCK_BOOTTIME does not."""

    def local(self) -> float:
        """The clock that this node's leases count in."""
        return self.origin + (self.clock.now - self._unseen_s()) * self.rate

    def _real(self, local: float) -> float:
        return (local - self.origin) / self.rate + self._unseen_s()

    def _unseen_s(self) -> float:
        return self.asleep_s if self.clock_stops else 0.0

    # Lives.

    def boot(self) -> None:
        """Start an agent, with what the disk holds."""
        if self.process or self.buried or (self.last and self.done):
            return
        self.life += 1
        self.power = self.process = True
        self.paused = self.suspended = self.fenced = False
        self.heard, self._gone, self._writes = self.kept, frozenset(), 0
        self.ended = self.doom = ""
        place = self.settings.candidates.index(self.name) if self.name in self.settings.candidates else None
        me = Incarnation(self.name, str(self.life), self.name, place)
        self.agent = Agent(self.settings, me, self.disk, self.local())
        self.ends, self.backlog, self._alarm = {}, [], float("inf")
        self._happen(Tick())
        self._join_soon(0.3)

    @property
    def running(self) -> bool:
        """Whether its agent has workers running."""
        return self.agent is not None and self.agent.running is not None

    @property
    def leads(self) -> bool:
        """Whether its agent leads."""
        return self.agent is not None and self.agent.leads

    @property
    def done(self) -> bool:
        """Whether its part in the job has ended for good."""
        return self.ended.startswith(EndJob.__name__)

    def addresses(self) -> set[str]:
        """Where its agent may call."""
        if self.agent is None:
            return set()
        known = self.agent.body.known
        return {m.address for w in known.worlds for m in known.alive(w)} | set(self.settings.candidates)

    def __str__(self) -> str:
        """What it is doing, for a violation's text."""
        agent = self.agent
        if agent is None:
            return f"{self.name} is down"
        role = type(agent.role).__name__ if agent.role else agent.over
        runs = f" runs {agent.running.generation}" if agent.running else ""
        why = f" ({agent.role.why_waiting()})" if agent.role and not agent.running else ""
        return f"{self.name}{agent.body.me.life} {role}{runs}{why}"

    def die(self, *, power: bool = False) -> None:
        """Kill the agent and its workers with it; with the power, silently."""
        if self.process and not power:
            self.net.process_died(self.name)
        if power:
            self.net.power_lost(self.name)
            self.power = False
        if self.clock.now >= self.heard_at + DURABLE_S and self.disk_s < DURABLE_S and not self._writes:
            self.kept = self.heard
        self.process, self.agent = False, None
        self.checkers.ended(self.name)

    def lose_power(self) -> None:
        """Die without a word."""
        self.die(power=True)

    def wipe(self) -> None:
        """Kill the agent and lose its disk."""
        self.die()
        self.disk, self.kept = None, 0
        self.checkers.forgot(self.name)

    def _meet_doom(self) -> None:
        self.die()
        self.clock.at(self.clock.now + self.back_s, self.boot)

    def _exit(self, life: int, *, again: bool) -> None:
        """The process of an agent whose part is over ends."""
        if life == self.life and self.process:
            self.die()
            if again:
                self.clock.at(self.clock.now + AGAIN_S, self.boot)

    def pause(self) -> None:
        """Stop the agent in its tracks (SIGSTOP); its workers watch their lease."""
        if self.agent is None or self.paused:
            return
        self.paused = True
        if self.name in self.checkers.live:
            self.clock.at(self._real(self.agent.fence_at), self._self_fence, self.life, self.agent.fence_at)

    def suspend(self) -> None:
        """Stop the whole machine, workers and all; calls from elsewhere are not answered."""
        if self.agent is None or self.paused:
            return
        self.paused = self.suspended = True
        self._asleep_since = self.clock.now
        self.checkers.suspended(self.name)

    def _wake(self) -> None:
        """Go on after a suspend: first of all the guards look whether the lease has run out."""
        self.suspended = False
        self.asleep_s += self.clock.now - self._asleep_since
        if self.agent and self.running:
            self.fenced = self.local() >= self.agent.fence_at
            self.checkers.woke(self.name, self.clock.now, fenced=self.fenced)

    def _self_fence(self, life: int, fence_at: float) -> None:
        if self.paused and life == self.life and self.agent and self.agent.fence_at == fence_at:
            self.checkers.ended(self.name)
            self.fenced = True

    def resume(self) -> None:
        """Let the agent go on: it reads what came meanwhile."""
        if self.agent is None or not self.paused:
            return
        if self.suspended:
            self._wake()
        self.paused = False
        backlog, self.backlog = self.backlog, []
        if not backlog:
            self._happen(Tick())
        for event, life in backlog:
            self.hear(event, life)
        if self.fenced and self.running:
            self.ask_to_join(self.life)  # as for any worker that has died
        self.fenced = False

    def fail_worker(self, text: str = "was killed by SIGKILL") -> None:
        """One of its workers fails: its agent tells of that, and asks for another world."""
        if self.agent and self.agent.body.last:
            failure = Failure(SIGNAL, self.name, self.agent.body.last.rank(self.agent.body.me), text)
            self._happen(WorkerFailed(self.agent.body.last.generation, failure))
        self.ask_to_join(self.life)

    def ask_to_join(self, life: int) -> None:
        """Workers are stopped and torchelastic asks for a world; also when a worker failed."""
        if life == self.life and self.agent:
            self.checkers.ended(self.name)
            self._happen(JoinRequested(Join(f"{self.name}:store", 1, self.order)))

    def _join_soon(self, within_s: float) -> None:
        self.clock.at(self.clock.now + self.rng.random() * within_s, self._join_unless_through, self.life)

    def _join_unless_through(self, life: int) -> None:
        """Workers may have succeeded in the moment in which they were to be stopped."""
        if self.agent and not (self.agent.body.finished and life == self.life):
            self.ask_to_join(life)

    def digest(self, step: int, state: str) -> None:
        """Its state after that step is digested."""
        if self.agent and self.agent.body.last:
            generation = self.agent.body.last.generation
            self._happen(Digested(Print(generation, step, Digest(_hex(state)))))

    def finish(self) -> None:
        """Every worker of this node succeeds."""
        self.checkers.finished(self.name)
        self._happen(WorkersFinished())

    def fail(self, reason: str) -> None:
        """Give the job up for all."""
        self.checkers.ended(self.name)
        self._happen(JobFailed(reason))

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
            self._happen(PeerLost(end.conn, refused=kind == "refused"))

    # The core.

    def _happen(self, event: Event) -> None:
        self.hear(event, self.life)

    def hear(self, event: Event, life: int) -> None:
        """Hand an event to the agent of that life."""
        if self.agent is None or life != self.life:
            return
        if self.paused:
            self.backlog.append((event, life))
            return
        if self.story and not isinstance(event, Tick):
            self.story(self.name, event)
        if isinstance(event, MessageArrived) and isinstance(event.message, Claim):
            self._hear_of(max(event.message.active, event.message.known))
        effects = self.agent.handle(event, self.local())
        self._look_for_false_deaths()
        for effect in effects:
            if self.story:
                self.story(self.name, effect)
            self._carry_out(effect)
            if not self.process:
                return  # it met its doom: the other effects never were
        due = self._real(self.agent.next_deadline)
        due = max(due, self.clock.now) + 1e-6  # not a rounding error too early
        if due < self._alarm:
            self._alarm = due
            self.clock.at(self._alarm, self._ring, self._alarm, self.life)

    def _hear_of(self, generation: int) -> None:
        if generation > self.heard:
            self.heard, self.heard_at = generation, self.clock.now

    def _look_for_false_deaths(self) -> None:
        known = self.agent.body.known.gone if self.agent else frozenset()
        if known is self._gone:
            return
        for one in known - self._gone:
            node = self.net.hosts[one.node]
            agent = node.agent if isinstance(node, Node) else None
            if agent and agent.body.me == one and not agent.over:
                text = f"{self.name} counts {one.node}{one.life} gone, which lives"
                self.checkers.violate(ALIVE, self.clock.now, text)
        self._gone = known

    def _ring(self, alarm: float, life: int) -> None:
        if alarm == self._alarm and life == self.life:
            self._alarm = float("inf")
            if self.paused:
                return
            self._happen(Tick())

    def _carry_out(self, effect: object) -> None:
        if isinstance(effect, Send):
            self._send(effect)
        elif isinstance(effect, Connect):
            end = End(self.name, self.life, effect.conn)
            self.ends[effect.conn] = end
            self.net.dial(end, effect.address)
        elif isinstance(effect, Disconnect):
            done = self.ends.pop(effect.conn, None)
            if done:
                self.net.close(done)
        elif isinstance(effect, Persist):
            self._writes = self.life
            delay = self.rng.random() * self.disk_s
            self.clock.at(self.clock.now + delay, self._written, effect, self.life)
        elif isinstance(effect, BeginWorld):
            self._begin(effect)
        elif isinstance(effect, (RestartWorkers, StopWorkers)):
            self.clock.at(self.clock.now + self.rng.random() * self.stop_s, self._stopped, self.life)
        elif isinstance(effect, ReplicasDiffer):
            self.differed.append(effect.told)
        elif isinstance(effect, (EndJob, GiveUp)):
            self._end(effect)
        elif not isinstance(effect, Log):
            raise TypeError(f"no way to carry out {effect!r}")

    def _send(self, effect: Send) -> None:
        end = self.ends.get(effect.conn)
        if end is None:
            return
        if isinstance(effect.message, Claim) and self.watch:
            self.watch("Claim")
        if isinstance(effect.message, FORMING):
            if self.watch:
                self.watch(type(effect.message).__name__)
            if self.doom == "unsent":
                self._meet_doom()
                return
        if isinstance(effect.message, Propose):
            self.checkers.proposed.add((effect.message.world.generation, effect.message.world.members))
        if isinstance(effect.message, Propose) and effect.message.world.generation <= self.heard:
            number = effect.message.world.generation
            self.checkers.violate(
                NEW_NUMBER, self.clock.now, f"{self.name} proposes {number} and has heard of {self.heard}"
            )
        self.net.send(end, (effect.stamp, effect.message))

    def _begin(self, effect: BeginWorld) -> None:
        if self.agent is None:
            return
        first = effect.generation not in self.checkers.worlds
        self.checkers.began(self.name, self.agent.body.me, effect, self.clock.now)
        if first and self.watch:
            self.watch("world")

    def _end(self, effect: EndJob | GiveUp) -> None:
        self.ended = f"{type(effect).__name__}: {effect.reason}"
        again = isinstance(effect, GiveUp)
        if again:
            self.last = False
        self.gave_up_at = self.clock.now
        if self.linger_s < float("inf"):
            self.clock.at(
                self.clock.now + self.linger_s, lambda life: self._exit(life, again=again), self.life
            )

    def _stopped(self, life: int) -> None:
        if life == self.life and self.agent and not self.agent.running:
            self.checkers.ended(self.name)
            if not self.ended and not self.agent.body.join:
                self._join_soon(0.1)

    def _written(self, effect: Persist, life: int) -> None:
        if life == self.life and self.agent:
            self._writes = 0
            self.disk = effect.memory
            if self.doom == "written":
                self._meet_doom()
            else:
                self._happen(Persisted(effect.number))


def _hex(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
