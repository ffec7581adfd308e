"""Play one schedule of faults against the real core in simulated time, with named checkers.

`run_seed` draws the schedule of a seed and plays it. At the end the network heals, whole or in two parts.
Then every part with a quorum must form a view, and a finished job must end. Only the core is real.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass

from elastic_resume.rendezvous.core.leader import Leader
from elastic_resume.rendezvous.core.messages import ForceQuorumRequest, Header, Heartbeat
from elastic_resume.rendezvous.core.node import RendezvousNode
from elastic_resume.rendezvous.core.quorum import Incarnation, QuorumState, View, has_quorum
from elastic_resume.rendezvous.net.status import build_status
from tests.support.rendezvous_sim.invariants import (
    EVENTUAL_VIEW,
    JOB_ENDS_EVERYWHERE,
    QUIESCENCE,
    InvariantChecker,
    Violation,
)
from tests.support.rendezvous_sim.network import MAX_DELAY_S, Clock, LivelockError, Network
from tests.support.rendezvous_sim.random_schedules import draw_schedule
from tests.support.rendezvous_sim.schedule import LEADER, OTHER_LEADER, PARTITION_KINDS, Fault, Schedule
from tests.support.rendezvous_sim.simulated_node import SimulatedNode, TraceFunction

VIEW_BOUND_S = 25.0
"""From the last fault to a view: a node timeout, a grace period, the last-call timeout and some calls."""
STABLE_S = 5.0
"""A view that lasts so long is stable: a node timeout, a lease or newcomers would have ended it."""
TRIGGER_WAIT_S = 15.0
"""How long to wait, after the last timed fault, for faults whose trigger may never occur."""
SLOW_DELAY_S = {"slow": 0.6, "slowish": 0.3}
"""The longest time that a packet takes to or from a slow node."""
POLL_INTERVAL_S = 0.5
MAX_SHOWN = 4
"""Violations shown of one schedule; later ones follow from the first."""
OPERATOR_INTERVAL_S = (0.3, 3.0)
"""Range of the time between two checks of the job by the operator."""
MAX_COMMAND_DELAY_S = 2.0
"""The longest delay of the operator's command. No agent starts on a node declared dead within it."""


class Operator:
    """An operator who forces the quorum of simulated nodes at random moments.

    The operator does so only when every missing node is dead, and keeps the dead down until the network is
    whole.
    """

    def __init__(self, nodes: Mapping[str, SimulatedNode], clock: Clock, rng: random.Random) -> None:
        self.nodes = nodes
        self.clock = clock
        self.rng = rng

    def start(self) -> None:
        """Schedule the next check of the job."""
        self.clock.call_at(self.clock.now + self.rng.uniform(*OPERATOR_INTERVAL_S), self._poll)

    def allow_restarts(self) -> None:
        """Let nodes that were declared dead restart, because the network is whole."""
        for node in self.nodes.values():
            if node.declared_dead:
                self.clock.call_at(self.clock.now + MAX_COMMAND_DELAY_S, self._restart_node, node)

    @staticmethod
    def _restart_node(node: SimulatedNode) -> None:
        node.declared_dead = False
        node.boot()

    def _poll(self) -> None:
        for node in self.nodes.values():
            agent = None if node.is_paused else node.agent
            if agent and isinstance(agent.role, Leader) and build_status(agent).missing:
                self._force_quorum(agent, {node.name, *agent.role.peers.by_node})
        self.start()

    def _force_quorum(self, leader: RendezvousNode, present: set[str]) -> None:
        """Send the command to a random present node, which passes it to its leader."""
        missing = [node for node in self.nodes.values() if node.name not in present]
        if any(node.has_process for node in missing):
            return
        for node in missing:
            node.declared_dead = node.incarnation_id > 0
        receiver = self.nodes[self.rng.choice(sorted(present))]
        request = ForceQuorumRequest(leader.state.quorum_state.newest_generation)
        self.clock.call_at(
            self.clock.now + self.rng.random() * MAX_COMMAND_DELAY_S,
            receiver.deliver_event,
            request,
            receiver.incarnation_id,
        )


@dataclass(slots=True)
class Result:
    """The result of playing a schedule."""

    schedule: Schedule
    violations: list[Violation]
    view_count: int
    event_count: int
    trace: list[str] = field(default_factory=list)

    @property
    def violated(self) -> set[str]:
        """The violated invariants."""
        return {violation.invariant for violation in self.violations}

    def __str__(self) -> str:
        """Format the schedule, the trace if recorded, and the violations."""
        more = len(self.violations) - MAX_SHOWN
        lines = [*map(str, self.violations[:MAX_SHOWN]), *([f"{more:>9} more"] if more > 0 else [])]
        return "\n".join([str(self.schedule), *self.trace, *lines])


class Simulation:
    """One job under one schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.rng = random.Random(2 * schedule.seed + 1)
        self.clock = Clock()
        self.checkers = InvariantChecker(schedule.waived)
        self.net = Network(self.clock, self.rng)
        job = schedule.job
        self.settings = job.settings
        self.nodes = {
            spec.name: SimulatedNode(spec.name, self.settings, self.net, self.checkers) for spec in job.nodes
        }
        for spec in job.nodes:
            node = self.nodes[spec.name]
            node.order, node.clock_origin_s, node.clock_rate = (
                spec.order,
                spec.clock_origin_s,
                spec.clock_rate,
            )
            node.linger_s = job.linger_s
            node.on_event = self._on_event
        self.operator = Operator(self.nodes, self.clock, self.rng) if job.has_operator else None
        self.event_counts: Counter[str] = Counter()
        self.faults_by_event: dict[tuple[str, int], list[int]] = {}
        self.pending_faults = len(schedule.faults)
        self.busy_until = 0.0
        self.healed = False
        self.blocked_by_fault: dict[int, set[tuple[str, str]]] = {}
        self.trace: TraceFunction | None = None

    def record_trace(self, lines: list[str]) -> None:
        """Record every event, effect and fault as a line, except heartbeats."""

        def record(name: str, item: object) -> None:
            if not isinstance(getattr(item, "message", None), Heartbeat):
                lines.append(f"{self.clock.now:9.3f}  {name}  {describe(item)}")

        self.trace = record
        for node in self.nodes.values():
            node.trace = record

    # Playing the schedule.

    def run(self) -> None:
        """Play the schedule, then heal the network and check."""
        for spec in self.schedule.job.nodes:
            if spec.start_s < float("inf"):
                self.clock.call_at(spec.start_s, self.nodes[spec.name].boot)
        if self.operator:
            self.operator.start()
        faults = self.schedule.faults
        for number, fault in enumerate(faults):
            if not fault.trigger.after_previous:
                self._arm(number)
        timed = [
            fault.trigger.delay_s
            for fault in faults
            if not (fault.trigger.event or fault.trigger.after_previous)
        ]
        latest = max(timed, default=0.0) + TRIGGER_WAIT_S
        if any(fault.trigger.after_previous for fault in faults):
            latest += TRIGGER_WAIT_S
        while self.pending_faults and self.clock.now < latest:
            self.clock.run_until(self.clock.now + POLL_INTERVAL_S)
        self.clock.run_until(max(self.clock.now, self.busy_until) + 1)
        self._heal_and_check()

    def _arm(self, number: int) -> None:
        """Schedule a fault for its trigger."""
        when = self.schedule.faults[number].trigger
        if when.event:
            count = when.count + (self.event_counts[when.event] if when.after_previous else 0)
            self.faults_by_event.setdefault((when.event, count), []).append(number)
        else:
            start = self.clock.now if when.after_previous else 0.0
            self.clock.call_at(start + when.delay_s, self._inject, number)

    def _on_event(self, event: str) -> None:
        """Count an event and schedule the faults that it triggers."""
        for name in (event,) if event in ("view", "LeaderAnnouncement") else (event, "message"):
            self.event_counts[name] += 1
            for number in self.faults_by_event.pop((name, self.event_counts[name]), ()):
                after_s = self.schedule.faults[number].trigger.delay_s
                self.clock.call_at(self.clock.now + after_s, self._inject, number)

    def _inject(self, number: int) -> None:
        if self.healed:
            return
        faults = self.schedule.faults
        fault = faults[number]
        self.pending_faults -= 1
        self.busy_until = max(self.busy_until, self.clock.now + min(fault.duration_s, 5.0))
        back_at = self.clock.now + fault.duration_s
        if self.trace:
            self.trace(
                "*", f"{fault.kind} {' | '.join(' '.join(group) for group in self._resolve_groups(fault))}"
            )
        if fault.kind in PARTITION_KINDS:
            self._partition(number, fault, back_at)
        elif fault.kind in SLOW_DELAY_S:
            for name in self._resolve_names(fault.nodes):
                self.net.slow_delay_s[name] = SLOW_DELAY_S[fault.kind]
                self.clock.call_at(back_at, self.net.slow_delay_s.__setitem__, name, MAX_DELAY_S)
        elif fault.kind in ("reset", "half-reset"):
            names = self._resolve_names(fault.nodes)
            if len(names) == 2:
                self.net.reset_connections(*names, both=fault.kind == "reset")
        else:
            for name in self._resolve_names(fault.nodes):
                self._inject_node_fault(self.nodes[name], fault.kind, fault.duration_s)
        if number + 1 < len(faults) and faults[number + 1].trigger.after_previous:
            self._arm(number + 1)

    def _resolve_names(self, nodes: Iterable[str]) -> list[str]:
        """Replace ranks in the newest view, and leaders, by node names."""
        views = self.checkers.views
        members = [member.node for member in views[max(views)]] if views else list(self.nodes)
        outside = [node.name for node in self.nodes.values() if node.has_process and node.name not in members]
        leaders = [node.name for node in self.nodes.values() if node.is_leader]
        leaders.sort(key=lambda name: not self.nodes[name].running)

        def resolve(text: str) -> str:
            if text in (LEADER, OTHER_LEADER):
                return leaders[0 if text == LEADER else -1] if leaders else members[0]
            if text.startswith("!") and outside:
                return outside[int(text[1:]) % len(outside)]
            return members[int(text[1:]) % len(members)] if text[0] in "#!" else text

        return list(dict.fromkeys(map(resolve, nodes)))

    def _resolve_groups(self, fault: Fault) -> list[list[str]]:
        return [self._resolve_names(group.split()) for group in " ".join(fault.nodes).split("|")]

    def _partition(self, number: int, fault: Fault, end_s: float) -> None:
        groups = self._resolve_groups(fault)
        if fault.kind == "one-way":
            cut = {(a, b) for a in groups[0] for b in self.nodes if b not in groups[0]}
        else:
            cut = links_between(groups, self.nodes)
        if fault.kind == "repartition":
            self.blocked_by_fault.clear()
        if fault.kind == "reject":
            self.net.rejects_dials = True
            for source, target in sorted(cut):  # a set has another order in every process
                self.net.reset_connections(source, target)
        self._set_blocked(number, cut)
        self.clock.call_at(end_s, self._set_blocked, number, set())

    def _set_blocked(self, number: int, links: set[tuple[str, str]]) -> None:
        self.blocked_by_fault[number] = links
        self.net.set_blocked_links(set().union(*self.blocked_by_fault.values()))

    def _inject_node_fault(self, node: SimulatedNode, kind: str, duration_s: float) -> None:
        back_at = self.clock.now + duration_s
        if kind in ("kill", "power", "wipe"):
            {"kill": node.die, "power": node.lose_power, "wipe": node.wipe}[kind]()
            self.clock.call_at(back_at, node.boot)
        elif kind in ("crash-before-send", "written"):
            node.planned_crash, node.restart_after_s = kind, duration_s
        elif kind in ("pause", "suspend"):
            {"pause": node.pause, "suspend": node.suspend}[kind]()
            self.clock.call_at(back_at, node.resume)
        elif kind in ("disk", "stuck"):
            node.max_write_s = 1.5 if kind == "disk" else 20.0
            self.clock.call_at(back_at, setattr, node, "max_write_s", 0.01)
        elif node.agent and not node.is_paused and not node.agent.end_reason:
            self._inject_agent_fault(node, kind, back_at)

    def _inject_agent_fault(self, node: SimulatedNode, kind: str, end_s: float) -> None:
        if kind == "worker" and node.running:
            node.fail_worker()
        elif kind == "finish" and node.running:
            node.finish()
        elif kind == "fail":
            node.fail_job(f"node {node.name} gave up")
        elif kind == "leave":
            node.leave()
            node.die()
            self.clock.call_at(end_s, node.boot)

    # After the last fault every quorum must continue.

    def _heal_and_check(self) -> None:
        rng, names = self.rng, set(self.nodes)
        self.healed = True
        ours = names if rng.random() < 0.6 else set(rng.sample(sorted(names), rng.randint(1, len(names) - 1)))
        self.net.slow_delay_s.clear()
        self.net.rejects_dials = False
        self.blocked_by_fault.clear()
        self._set_blocked(-1, links_between([sorted(ours)], names))
        if self.trace:
            self.trace("*", f"no more faults; {' '.join(sorted(ours))} | {' '.join(sorted(names - ours))}")
        for spec in self.schedule.job.nodes:
            node = self.nodes[spec.name]
            node.max_write_s, node.planned_crash, node.stays_ended = 0.01, "", True
            node.resume()
            if spec.start_s < float("inf") and (ours == names or rng.random() < 0.5):
                node.boot()
        if self.operator and ours == names:
            self.operator.allow_restarts()
        self.clock.run_until(self.clock.now + 1)
        parts = [part for part in (ours, names - ours) if part]
        quorums = [part for part in parts if self._must_form_view(part)]
        self._wait_until(lambda: not any(map(self._describe_shortfall, quorums)))
        for part in quorums:
            # A node that gives up no longer votes, so only a lasting quorum must form a view. (With a join
            # timeout below the last-call timeout, nodes may come and go without end.)
            lasted = self._must_form_view(part) and self.clock.now >= self._last_exit_s() + VIEW_BOUND_S
            shortfall = self._describe_shortfall(part)
            if shortfall and lasted:
                self.checkers.add_violation(EVENTUAL_VIEW, self.clock.now, shortfall)
        if self.schedule.job.finishes_at_end:
            self._finish_job(quorums)

    def _wait_until(self, done: Callable[[], bool]) -> None:
        """Wait until `done` has held for `STABLE_S`, but no longer than it may take."""
        start = since = self.clock.now
        while self.clock.now < min(max(start, self._last_exit_s()) + VIEW_BOUND_S, start + 3 * VIEW_BOUND_S):
            self.clock.run_until(self.clock.now + POLL_INTERVAL_S)
            if not done():
                since = self.clock.now
            elif self.clock.now >= since + STABLE_S:
                return

    def _last_exit_s(self) -> float:
        return max(node.exited_at for node in self.nodes.values())

    def _list_connected(self, part: set[str]) -> list[SimulatedNode]:
        """Return the largest set of agents of a part that can find each other.

        Newcomers find a job by addresses; two views that share no address never meet.
        """
        up = {name for name in sorted(part) if (agent := self.nodes[name].agent) and not agent.end_reason}
        knows = {name: self.nodes[name].known_addresses() & up for name in up}
        largest: set[str] = set()
        while up:
            found = {min(up)}
            while more := {
                name
                for name in up - found
                if knows[name] & found or any(name in knows[other] for other in found)
            }:
                found |= more
            up -= found
            largest = max(largest, found, key=len)
        return [self.nodes[name] for name in sorted(largest)]

    def _must_form_view(self, part: set[str]) -> bool:
        """Return whether all nodes are present in a part, or a quorum by what they know."""
        if any(node.has_ended for node in self.nodes.values()):
            return False  # ended nodes are dead, which the others may not know
        agents = [node.agent for node in self._list_connected(part) if node.agent]
        present = {agent.state.incarnation for agent in agents}
        if len(present) == len(self.nodes):
            return True
        if len(present) < self.settings.min_nodes:
            return False
        # Of two views of one generation, which a family may waive, each agent keeps the one that it knows.
        for agent in agents:
            known = functools.reduce(
                QuorumState.merge, (other.state.quorum_state for other in agents), agent.state.quorum_state
            )
            members = {member for view in known.voting_views for member in known.live_members(view)}
            reachable = any(node.candidate_index is not None or node in members for node in present)
            if not (reachable and has_quorum(present, known)):
                return False
        return bool(agents)

    def _describe_shortfall(self, part: set[str]) -> str:
        """Describe what is missing for the required view; empty if nothing is."""
        alive = self._list_connected(part)
        if any(
            node.has_ended or (node.agent and node.agent.state.job_failure) for node in self.nodes.values()
        ):
            return ""  # `_finish_job` checks that
        live = [self.checkers.running[node.name] for node in alive if node.name in self.checkers.running]
        unfinished = [node for node in alive if node.agent and not node.agent.state.finished_generation]
        wanted = min(len(unfinished), self.settings.max_nodes)
        newest = {start.generation for start in live} or {max(self.checkers.views, default=0)}
        if len(newest) == 1 and (len(live) == wanted or newest <= self.checkers.finished_generations):
            return ""
        return f"{len(live)} of {wanted} run: {', '.join(map(str, alive))}"

    def _finish_job(self, parts: list[set[str]]) -> None:
        """Let all workers finish, and again after each restart; then check that the job ends everywhere."""
        nodes = [node for part in parts for node in self._list_connected(part)]

        def left() -> list[SimulatedNode]:
            return [node for node in nodes if node.agent and not node.agent.end_reason]

        def over() -> bool:
            for node in nodes:
                if node.running and node.name in self.checkers.running:
                    node.finish()
            return not left()

        self._wait_until(over)
        if left():
            self.checkers.add_violation(JOB_ENDS_EVERYWHERE, self.clock.now, ", ".join(map(str, left())))


def links_between(groups: list[list[str]], names: Iterable[str]) -> set[tuple[str, str]]:
    """Return every direction between nodes of different groups; nodes in no group form one more."""
    place = {name: number for number, group in enumerate(groups) for name in group}
    return {(a, b) for a in names for b in names if place.get(a, -1) != place.get(b, -1)}


def run_seed(seed: int, *, with_trace: bool = False) -> Result:
    """Play the schedule of a seed; with `with_trace`, record every event and effect."""
    return run_schedule(draw_schedule(seed), with_trace=with_trace)


def run_schedule(schedule: Schedule, *, with_trace: bool = False, strict: bool = False) -> Result:
    """Play a schedule; if `strict`, without waived invariants."""
    simulation = Simulation(schedule)
    checkers = simulation.checkers
    if strict:
        checkers.waived = frozenset()
    trace: list[str] = []
    if with_trace:
        simulation.record_trace(trace)
    try:
        simulation.run()
    except LivelockError as error:
        checkers.add_violation(QUIESCENCE, simulation.clock.now, str(error))
    return Result(schedule, checkers.violations, len(checkers.views), simulation.clock.steps, trace)


def describe(item: object) -> str:
    """Describe an event, effect or message in a few words for a trace."""
    if isinstance(item, Incarnation):
        return f"{item.node}{item.incarnation_id}"
    if isinstance(item, View):
        return f"{item.generation}{_describe_set(item.members)} of {describe(item.leader)}"
    if isinstance(item, QuorumState):
        return _describe_quorum_state(item)
    if isinstance(item, Header):
        lease = f" lease {item.lease_s:.2f} of {item.generation}" if item.generation else ""
        return f"{item.seq}/{item.ack}{lease}"
    if is_dataclass(item):
        values = [(field.name, getattr(item, field.name)) for field in fields(item)]
        texts = [f"{name}={describe(value)}" for name, value in values if value or value == 0]
        return f"{type(item).__name__}({' '.join(texts)})"
    if isinstance(item, (tuple, frozenset, set)):
        return _describe_set(item)
    return f"{item:.3f}" if isinstance(item, float) else str(item)


def _describe_quorum_state(state: QuorumState) -> str:
    parts = [f"installed {describe(state.installed)}" if state.installed else "none installed"]
    parts += [f"proposed {describe(view)}" for view in state.proposals]
    parts += [f"dead {_describe_set(state.dead)}"] if state.dead else []
    if state.aborted:
        parts.append(
            f"aborted {_describe_set(f'{number}{describe(leader)}' for number, leader in state.aborted)}"
        )
    return f"<{', '.join(parts)}>"


def _describe_set(items: Iterable[object]) -> str:
    return "{" + " ".join(map(describe, items)) + "}"
