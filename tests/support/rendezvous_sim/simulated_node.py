"""A simulated node: the real core on its own clock, a disk, workers that start and stop, and faults.

Local time has its own rate and origin. Workers end at `lease_until` even if the agent is paused, as real ones
do. An agent that has left the rendezvous answers for `linger_s` and exits; one that gave up is started again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elastic_resume.mechanisms.mechanism import encode_body
from elastic_resume.mechanisms.registry import TOPICS
from elastic_resume.mechanisms.replicas.judge import DIGESTS, StateDigest
from elastic_resume.mechanisms.unreachable_peers.judge import UNREACHABLE, UnreachablePeers
from elastic_resume.policy.failure_classification import SIGNAL, Failure, WorkerEnd
from elastic_resume.policy.reasons import NodeLost, Signalled
from elastic_resume.policy.restart import GaveUp, NoProgress
from elastic_resume.rendezvous.core import interface, messages
from elastic_resume.rendezvous.core.leader import Leader
from elastic_resume.rendezvous.core.node import RendezvousNode
from elastic_resume.rendezvous.core.world import (
    Ballot,
    Incarnation,
    PersistentState,
    Proposal,
    ProposalAck,
    View,
)
from elastic_resume.rendezvous.facts import Fact
from tests.support.rendezvous_sim.invariants import NO_FALSE_DEATH, InvariantChecker
from tests.support.rendezvous_sim.network import (
    MAX_STEPS_PER_NODE,
    ConnectionEnd,
    Host,
    Network,
    get_host_name,
)

RESTART_DELAY_S = 1.0
"""When an agent that gave up is started again."""
COLLECTIVE_TIMEOUT_S = 2.0
"""After which workers fail that cannot reach a peer."""
VIEW_CHANGE_MESSAGES = (messages.Propose, ProposalAck, messages.StartView)

TraceFunction = Callable[[str, object], None]


class SimulatedNode(Host):
    """One machine with at most one agent on it."""

    topics = TOPICS
    unreachable: tuple[str, ...] = ()
    """The nodes that its agent has reported last."""
    has_failed_job = False
    delays_join = False
    """It waits before it joins again after a failure."""
    has_new_addresses = False
    """Each process of it listens elsewhere than the one before."""

    def __init__(
        self, name: str, settings: interface.RendezvousSettings, net: Network, checkers: InvariantChecker
    ) -> None:
        self.name = self.node_name = self.address = name
        """Its host name, and the name that its agent says. By mistake two machines may have the same."""
        self.settings = settings
        self.net = net
        self.clock = net.clock
        self.rng = net.rng
        self.checkers = checkers
        self.clock_rate = 1.0
        self.clock_origin_s = 0.0
        self.order = 0
        self.is_preparing, self.preparation_s = False, 0.0
        self.saved_state: PersistentState | None = None
        self.max_write_s = 0.01
        self.max_stop_s = 0.02
        self.incarnation_id = 0
        self.has_power = True
        self.has_process = False
        self.is_retired = False
        self.is_paused = False
        self.is_suspended = False
        """The whole machine is suspended, not only the agent."""
        self.stops_clock = False
        """Its clock stands still while it is suspended, as that of a paused virtual machine."""
        self.suspended_s = 0.0
        """Total time that its clock stood still."""
        self._suspended_since = 0.0
        self._known_ended: set[Incarnation] = set()
        self.workers_lost_lease = False
        """Its workers ended by themselves while it was paused."""
        self.agent: RendezvousNode | None = None
        self.ends: dict[int, ConnectionEnd] = {}
        self.queued_events: list[tuple[interface.Event, int]] = []
        self.trace: TraceFunction | None = None
        self.on_event: Callable[[str], None] | None = None
        """Called with the name of each view change message and with each new `view`."""
        self.end: interface.EndJob | interface.EndMembership | None = None
        """How the agent's part in the job has ended."""
        self.stays_ended = False
        """Do not start an agent again once the job has ended here."""
        self.exited_at = float("-inf")
        self.linger_s = float("inf")
        self.planned_crash = ""
        """How it will crash: `crash-before-send` of a view change message, or `written`, after its next
        write.
        """
        self.restart_after_s = 0.0
        """When it restarts after a planned crash."""
        self._last_accepted_id = 0
        self._timer_due_s = float("inf")
        net.hosts[name] = self
        self.clock.max_steps += MAX_STEPS_PER_NODE

    def local_time(self) -> float:
        """Return the clock of this node's leases."""
        return self.clock_origin_s + (self.clock.now - self.suspended_s) * self.clock_rate

    def _to_simulated_time(self, local: float) -> float:
        return (local - self.clock_origin_s) / self.clock_rate + self.suspended_s

    # Processes.

    def boot(self) -> None:
        """Start an agent with the state on disk."""
        if self.has_process or self.is_retired or (self.stays_ended and self.has_ended):
            return
        self.incarnation_id += 1
        self.has_power = self.has_process = True
        self.is_paused = self.is_suspended = self.workers_lost_lease = False
        self._known_ended = set()
        self.end, self.planned_crash = None, ""
        self.has_failed_job = False
        self.unreachable = ()
        candidates = self.settings.candidates
        index = candidates.index(self.name) if self.name in candidates else None
        saved = self.saved_state
        former = saved.incarnation if saved and not saved.is_twin else None
        # The processes of two copies of a directory differ.
        step = 1 if self.name == self.node_name else 2
        disk_id, boot = (
            (former.disk_id, former.boot + step) if former else (f"{self.name}{self.incarnation_id}", 1)
        )
        if self.has_new_addresses:
            self.draw_addresses(is_candidate=index is not None)
        incarnation = Incarnation(self.node_name, disk_id, boot, self.address, index)
        settings = replace(self.settings, topics=self.topics)
        self.agent = RendezvousNode(settings, incarnation, self.saved_state, self.local_time())
        self.ends, self.queued_events, self._timer_due_s = {}, [], float("inf")
        self._handle_event(interface.Tick())
        self._prepare_for_a_while()
        self._join_soon(0.3)

    def draw_addresses(self, *, is_candidate: bool) -> None:
        """Listen at a new port, unless this is a candidate; some machines start with another IP address."""
        self.address = self.name if is_candidate else f"{self.name}@{self.incarnation_id}"
        self.ip_address = self.ip_address or f"ip of {self.name}"
        if self.rng.random() < 0.3:
            other = self.net.hosts[self.rng.choice(sorted(self.net.hosts))]
            if not other.has_process and other.ip_address and self.rng.random() < 0.5:
                self.ip_address, other.ip_address = other.ip_address, self.ip_address
            else:
                self.ip_address = f"ip {self.incarnation_id} of {self.name}"

    def adopt_foreign_directory(self) -> None:
        """Have on disk what another job of the same run id has left."""
        own = Incarnation(self.node_name, f"{self.name} elsewhere", 1, self.name)
        view = View(self.rng.choice((1, 7)), (own,), own, "another job")
        promised = Ballot(self.rng.choice((1, 50)), own.disk_id, 1)
        self.saved_state = PersistentState(own, view, promised, None, view.generation)

    @property
    def running(self) -> bool:
        """Whether its agent has workers running."""
        return self.agent is not None and self.agent.running_view is not None

    @property
    def is_leader(self) -> bool:
        """Whether its agent leads."""
        return self.agent is not None and self.agent.is_leader

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended for its agent."""
        return isinstance(self.end, interface.EndJob)

    def known_addresses(self) -> set[str]:
        """Return the addresses that its agent may call."""
        if self.agent is None:
            return set()
        state = self.agent.state
        members = {member.address for member in state.view.members if member not in state.contacts.ended}
        hosts = {get_host_name(address): address for address in members | set(self.settings.candidates)}
        return {name for name, address in hosts.items() if self._listens_at(name, address)}

    def _listens_at(self, name: str, address: str) -> bool:
        host = self.net.hosts.get(name)
        return host is not None and host.address == address

    def __str__(self) -> str:
        """Describe the node's role and view, for a violation's text."""
        agent = self.agent
        if agent is None:
            return f"{self.name} is down"
        role = agent.end_reason or type(agent.role).__name__
        runs = f" runs {agent.running_view.generation}" if agent.running_view else ""
        why = "" if agent.running_view or agent.end_reason else f" ({agent.role.explain_wait()})"
        return f"{self.name}{agent.state.incarnation.boot} {role}{runs}{why}"

    def die(self, *, power: bool = False) -> None:
        """Kill the agent with its workers; with `power`, without closing connections."""
        if self.has_process and not power:
            self.net.close_process(self.name)
        if power:
            self.net.lose_power(self.name)
            self.has_power = False
        self.has_process, self.agent = False, None
        self.checkers.on_stop(self.name)

    def lose_power(self) -> None:
        """Kill the agent without closing connections."""
        self.die(power=True)

    def retire(self) -> None:
        """Kill the agent for good."""
        self.is_retired = True
        self.die()

    def wipe(self) -> None:
        """Kill the agent and clear its disk."""
        self.die()
        self.saved_state = None
        self.checkers.on_disk_lost(self.name)

    def _crash_as_planned(self) -> None:
        self.die()
        self.clock.call_at(self.clock.now + self.restart_after_s, self.boot)

    def _exit_process(self, incarnation_id: int, *, restart: bool = False) -> None:
        """End the process of an agent that has left the rendezvous."""
        if incarnation_id == self.incarnation_id and self.has_process:
            self.die()
            if restart:
                self.clock.call_at(self.clock.now + RESTART_DELAY_S, self.boot)

    def pause(self) -> None:
        """Stop the agent (SIGSTOP); its workers watch the lease."""
        if self.agent is None or self.is_paused:
            return
        self.is_paused = True
        if self.name in self.checkers.running:
            self.clock.call_at(
                self._to_simulated_time(self.agent.lease_until),
                self._expire_lease,
                self.incarnation_id,
                self.agent.lease_until,
            )

    def suspend(self, *, stops_clock: bool = False) -> None:
        """Suspend the whole machine with its workers; it answers no calls."""
        if self.agent is None or self.is_paused:
            return
        self.stops_clock = stops_clock
        self.is_paused = self.is_suspended = True
        self._suspended_since = self.clock.now
        self.checkers.on_suspend(self.name)

    def _wake(self) -> None:
        """Continue after a suspend; supervisors check the lease first."""
        self.is_suspended = False
        if self.stops_clock:
            self.suspended_s += self.clock.now - self._suspended_since
        if self.agent and self.running:
            self.workers_lost_lease = self.local_time() >= self.agent.lease_until
            self.checkers.on_wake(self.name, self.clock.now, lease_expired=self.workers_lost_lease)

    def _expire_lease(self, incarnation_id: int, lease_until: float) -> None:
        if (
            self.is_paused
            and incarnation_id == self.incarnation_id
            and self.agent
            and self.agent.lease_until == lease_until
        ):
            self.checkers.on_stop(self.name)
            self.workers_lost_lease = True

    def resume(self) -> None:
        """Let the agent continue; it handles the events that were queued."""
        if self.agent is None or not self.is_paused:
            return
        if self.is_suspended:
            self._wake()
        self.is_paused = False
        queued, self.queued_events = self.queued_events, []
        if not queued:
            self._handle_event(interface.Tick())
        for event, incarnation_id in queued:
            self.deliver_event(event, incarnation_id)
        if self.workers_lost_lease and self.running:
            self.request_join(self.incarnation_id)  # as for any worker that has died
        self.workers_lost_lease = False

    def fail_worker(self, signal: str = "SIGKILL") -> None:
        """Fail a worker: the agent reports it and joins again."""
        self.report_failure(signal)
        self._prepare_for_a_while()
        self.request_join(self.incarnation_id)

    def report_failure(self, signal: str = "SIGKILL") -> None:
        """Report that a worker has failed; the agent may wait before it joins again."""
        self.checkers.on_stop(self.name)
        if self.agent and self.agent.state.last_view:
            rank = self.agent.state.last_view.rank(self.agent.state.incarnation)
            failure = Failure(SIGNAL, self.name, rank, WorkerEnd(signal=signal))
            self._handle_event(messages.FailureReport(self.agent.state.last_view.generation, failure))

    def probe_members(self, incarnation_id: int, generation: int) -> None:
        """Fail the workers and report the members, if any, that these cannot reach for good.

        Of many pairs only one node finds out: the one that connects. The other waits to be called.
        """
        view = self.agent.running_view if self.agent and incarnation_id == self.incarnation_id else None
        if view and view.generation == generation and not self.is_paused:
            cuts = {address for link in self.net.lasting_cuts if self.name in link for address in link}
            lost = [
                member.node
                for member in view.members
                if get_host_name(member.address) in cuts - {self.name} and self._connects_to(member.node)
            ]
            if lost:
                # As the real probe, it continues to dial those that views left out before.
                nodes = {member.node for member in view.members}
                left_out = [node for node in self.unreachable if node not in nodes]
                self.report_unreachable((*left_out, *lost))
                self.fail_worker()

    def _connects_to(self, other: str) -> bool:
        kind = sum(map(ord, self.name + other)) % 3  # both, the first, or the second by name
        return kind == 0 or (self.name < other) == (kind == 1)

    def call_probe(self, generation: int) -> None:
        """Probe the members when collectives have had the time to fail."""
        self.clock.call_at(
            self.clock.now + COLLECTIVE_TIMEOUT_S, self.probe_members, self.incarnation_id, generation
        )

    def report_unreachable(self, nodes: tuple[str, ...]) -> None:
        """Let the agent report the members that it cannot reach."""
        if self.agent and self.agent.state.last_view:
            self.unreachable = nodes
            self.send_fact(UNREACHABLE.name, self.agent.state.last_view.generation, UnreachablePeers(nodes))

    def _report_again(self, incarnation_id: int, nodes: tuple[str, ...]) -> None:
        if incarnation_id == self.incarnation_id:
            self.report_unreachable(nodes)

    def join_now(self) -> None:
        """End the wait after a failure."""
        self.delays_join = False
        self.request_join(self.incarnation_id)

    def request_join(self, incarnation_id: int) -> None:
        """Stop the workers and request the next view, as torchelastic does."""
        if incarnation_id == self.incarnation_id and self.agent and not self.has_failed_job:
            self.checkers.on_stop(self.name)
            join = messages.JoinSpec(f"{self.name}:store", 1, self.order, is_preparing=self.is_preparing)
            self._handle_event(interface.JoinRequest(join))

    def _prepare_for_a_while(self) -> None:
        if self.preparation_s:
            self.begin_preparation()
            end_s = self.clock.now + self.preparation_s
            self.clock.call_at(end_s, self.finish_preparation, self.incarnation_id)

    def begin_preparation(self) -> None:
        """Let new workers take long to start from now on."""
        self.is_preparing = True
        if self.agent:
            self._handle_event(interface.Preparation(is_running=True))

    def finish_preparation(self, incarnation_id: int = 0) -> None:
        """Let new workers start at once from now on."""
        if incarnation_id in (0, self.incarnation_id):
            self.is_preparing = False
        if self.agent and not self.is_preparing:
            self._handle_event(interface.Preparation(is_running=False))

    def _join_soon(self, within_s: float) -> None:
        self.clock.call_at(
            self.clock.now + self.rng.random() * within_s, self._join_unless_finished, self.incarnation_id
        )

    def _join_unless_finished(self, incarnation_id: int) -> None:
        """Join, unless the workers succeeded just before they were to be stopped."""
        has_finished = self.agent and self.agent.state.status.workers is messages.Workers.FINISHED
        if not (has_finished and incarnation_id == self.incarnation_id):
            self.request_join(incarnation_id)

    def send_digest(self, step: int, state: str) -> None:
        """Deliver the digest of its state after a step."""
        if self.agent and self.agent.state.last_view:
            generation = self.agent.state.last_view.generation
            self.send_fact(DIGESTS.name, generation, StateDigest(step, _hash_text(state)))

    def send_fact(self, topic: str, generation: int, value: object) -> None:
        """Deliver a fact that this node sends to its leader."""
        self._handle_event(Fact(topic, generation, encode_body(value)))

    def finish(self) -> None:
        """Let every worker of this node succeed."""
        self.checkers.on_finish(self.name)
        self._handle_event(interface.WorkersFinished())

    def fail_job(self) -> None:
        """Fail the job for all nodes; a real agent does not join again."""
        self.checkers.on_stop(self.name)
        self.has_failed_job = True
        self._handle_event(messages.FailJob(GaveUp(self.name, NoProgress(None, 1, 0))))

    def leave(self) -> None:
        """Shut this node down in order."""
        self.checkers.on_stop(self.name)
        self._handle_event(interface.Leave(Signalled("SIGTERM")))

    # The network's side.

    def on_accepted(self, end: ConnectionEnd) -> None:
        """Number a connection that another node dialled."""
        self._last_accepted_id -= 1
        end.conn = self._last_accepted_id
        self.ends[end.conn] = end
        self._handle_event(interface.PeerConnected(end.conn, self._get_peer_ip(end)))

    def _get_peer_ip(self, end: ConnectionEnd) -> str:
        return self.net.hosts[end.peer.host].ip_address if end.peer else ""

    def on_network_event(self, end: ConnectionEnd, kind: str, payload: Any) -> None:
        """Turn a network event into an event of the process that owns that end."""
        if end.incarnation_id != self.incarnation_id or self.agent is None:
            return
        if kind == "message":
            self._handle_event(interface.MessageReceived(end.conn, *payload))
        elif kind == "connected":
            self._handle_event(interface.PeerConnected(end.conn, self._get_peer_ip(end)))
        else:
            end.is_open = False
            refusing = frozenset([payload] if kind == "refused" and payload else [])
            event = interface.PeerDisconnected(end.conn, refused=kind == "refused", refusing_ips=refusing)
            self._handle_event(event)

    # The core.

    def _handle_event(self, event: interface.Event) -> None:
        self.deliver_event(event, self.incarnation_id)

    def deliver_event(self, event: interface.Event, incarnation_id: int) -> None:
        """Hand an event to the agent of that incarnation."""
        if self.agent is None or incarnation_id != self.incarnation_id:
            return
        if self.is_paused:
            self.queued_events.append((event, incarnation_id))
            return
        if self.trace and not isinstance(event, interface.Tick):
            self.trace(self.name, event)
        before, role = self.agent.state.view, self.agent.role
        proposal = role.proposer.proposal if isinstance(role, Leader) else None
        effects = self.agent.handle(event, self.local_time())
        if self.agent.state.view is not before:
            decided = proposal or (role.proposer.proposal if isinstance(role, Leader) else None)
            self._note_decision(before.generation, decided)
        self._check_false_deaths()
        for effect in effects:
            if self.trace:
                self.trace(self.name, effect)
            self._carry_out(effect)
            if not self.has_process:
                return  # it crashed before the other effects
        if isinstance(self.agent.end_reason, NodeLost):
            self.clock.call_at(self.clock.now + 0.01, self._exit_process, self.incarnation_id)
        due = self._to_simulated_time(self.agent.next_deadline)
        due = max(due, self.clock.now) + 1e-6  # not a rounding error too early
        if due < self._timer_due_s:
            self._timer_due_s = due
            self.clock.call_at(self._timer_due_s, self._on_timer, self._timer_due_s, self.incarnation_id)

    def _note_decision(self, slot: int, proposal: Proposal | None) -> None:
        """Tell the checkers what this node has decided as a leader, or has learned."""
        if self.agent is None:
            return
        view = self.agent.state.view
        is_own = proposal is not None and proposal.view == view
        self.checkers.on_decided(slot if is_own else None, view, self.clock.now)

    def _check_false_deaths(self) -> None:
        known = self.agent.state.contacts.ended if self.agent else set()
        for member in known - self._known_ended:
            node = self.net.hosts.get(get_host_name(member.address))
            agent = node.agent if isinstance(node, SimulatedNode) else None
            is_copy = self.agent is not None and member.disk_id == self.agent.state.incarnation.disk_id
            if agent and agent.state.incarnation == member and not agent.end_reason and not is_copy:
                text = f"{self.name} counts {member.node}{member.boot} as ended, which is alive"
                self.checkers.add_violation(NO_FALSE_DEATH, self.clock.now, text)
        self._known_ended = set(known)

    def _on_timer(self, due_s: float, incarnation_id: int) -> None:
        if due_s == self._timer_due_s and incarnation_id == self.incarnation_id:
            self._timer_due_s = float("inf")
            if self.is_paused:
                return
            self._handle_event(interface.Tick())

    def _carry_out(self, effect: object) -> None:
        if isinstance(effect, interface.Send):
            self._send(effect)
        elif isinstance(effect, interface.Connect):
            end = ConnectionEnd(self.name, self.incarnation_id, effect.conn_id)
            self.ends[effect.conn_id] = end
            self.net.dial(end, effect.address, effect.ip_address)
        elif isinstance(effect, interface.Disconnect):
            if effect.conn_id in self.ends:
                self.net.close(self.ends.pop(effect.conn_id))
        elif isinstance(effect, interface.Persist):
            delay = self.rng.random() * self.max_write_s
            self.clock.call_at(self.clock.now + delay, self._on_written, effect, self.incarnation_id)
        elif isinstance(effect, interface.StartWorkers):
            self._start_workers(effect)
        elif isinstance(effect, interface.StopWorkers):
            self.clock.call_at(
                self.clock.now + self.rng.random() * self.max_stop_s,
                self._on_workers_stopped,
                self.incarnation_id,
            )
        elif isinstance(effect, (interface.EndJob, interface.EndMembership)):
            self._end_participation(effect)
        elif not isinstance(effect, interface.EmitEvent):
            raise TypeError(f"no way to carry out {effect!r}")

    def _send(self, effect: interface.Send) -> None:
        end = self.ends.get(effect.conn_id)
        if end is None:
            return
        if isinstance(effect.message, messages.LeaderAnnouncement) and self.on_event:
            self.on_event("LeaderAnnouncement")
        if isinstance(effect.message, VIEW_CHANGE_MESSAGES):
            if self.on_event:
                self.on_event(type(effect.message).__name__)
            if self.planned_crash == "crash-before-send":
                self._crash_as_planned()
                return
        self.net.send(end, (effect.header, effect.message))

    def _start_workers(self, effect: interface.StartWorkers) -> None:
        if self.agent is None:
            return
        if self.net.lasting_cuts:
            self.call_probe(effect.generation)
        if self.unreachable:
            members = {member.node for member in effect.members}
            others = tuple(node for node in self.unreachable if node not in members)
            self.clock.call_at(self.clock.now, self._report_again, self.incarnation_id, others)
        first = effect.generation not in self.checkers.views
        self.checkers.on_start(self.name, self.agent.state.incarnation, effect, self.clock.now)
        if first and self.on_event:
            self.on_event("view")

    def _end_participation(self, effect: interface.EndJob | interface.EndMembership) -> None:
        self.end = effect
        restarts = isinstance(effect, interface.EndMembership)
        if restarts:
            self.stays_ended = False
        self.exited_at = self.clock.now
        if self.linger_s < float("inf"):
            self.clock.call_at(
                self.clock.now + self.linger_s,
                lambda incarnation_id: self._exit_process(incarnation_id, restart=restarts),
                self.incarnation_id,
            )

    def _on_workers_stopped(self, incarnation_id: int) -> None:
        if incarnation_id == self.incarnation_id and self.agent and not self.agent.running_view:
            self.checkers.on_stop(self.name)
            is_waiting = self.end or self.agent.state.status.can_vote or self.delays_join
            if not is_waiting:
                self._join_soon(0.1)

    def _on_written(self, effect: interface.Persist, incarnation_id: int) -> None:
        if incarnation_id == self.incarnation_id and self.agent:
            self.saved_state = effect.persistent_state
            if self.planned_crash == "written":
                self._crash_as_planned()
            else:
                self._handle_event(interface.Persisted(effect.version))


def _hash_text(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
