"""Play one schedule of faults against the real core in simulated time, with named checkers.

`run_seed` draws the schedule of a seed and plays it. At the end the network heals, whole or in two parts,
but for single links that stay cut. Then every part with a quorum must form a view, and not many; and a
finished job must end. Only the core is real.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import combinations, permutations

from elastic_resume.rendezvous.core.dead_leader import breaks_tie, find_replacing_quorum
from elastic_resume.rendezvous.core.interface import RendezvousSettings
from elastic_resume.rendezvous.core.messages import Header, Heartbeat, Workers
from elastic_resume.rendezvous.core.sequence import Electorate, find_counted
from elastic_resume.rendezvous.core.world import Incarnation, View
from tests.support.rendezvous_sim.invariants import (
    EVENTUAL_VIEW,
    FEW_VIEWS,
    JOB_ENDS_EVERYWHERE,
    QUIESCENCE,
    InvariantChecker,
    Violation,
)
from tests.support.rendezvous_sim.network import (
    MAX_DELAY_S,
    SMALL_PATH_BYTES,
    Clock,
    LivelockError,
    Network,
    get_host_name,
)
from tests.support.rendezvous_sim.random_schedules import draw_schedule
from tests.support.rendezvous_sim.schedule import LEADER, OTHER_LEADER, PARTITION_KINDS, Fault, Schedule
from tests.support.rendezvous_sim.simulated_node import SimulatedNode, TraceFunction

VIEW_BOUND_S = 25.0
"""From the last fault to a view: a node timeout, a grace period, the last-call timeout and some calls."""
PARTIAL_VIEW_BOUND_S = 120.0
"""The same, while some links stay cut: leaders that reach no quorum have to step down first."""
MAX_VIEWS_AT_END = 5
"""Views that may be decided after the last fault, until one is stable."""
STABLE_S = 5.0
"""A view that lasts so long is stable: a node timeout, a lease or newcomers would have ended it."""
TRIGGER_WAIT_S = 15.0
"""How long to wait, after the last timed fault, for faults whose trigger may never occur."""
SLOW_DELAY_S = {"slow": 0.6, "slowish": 0.3}
"""The longest time that a packet takes to or from a slow node."""
POLL_INTERVAL_S = 0.5
MANY_CRASHES = 5
"""After so many generations without progress a node waits for longer than `VIEW_BOUND_S`."""
MAX_SHOWN = 4
"""Violations shown of one schedule; later ones follow from the first."""


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
        self.net.loss = schedule.job.loss
        job = schedule.job
        self.settings = job.settings
        self.nodes = {
            spec.name: SimulatedNode(spec.name, self.settings, self.net, self.checkers) for spec in job.nodes
        }
        for spec in job.nodes:
            node = self.nodes[spec.name]
            node.node_name = spec.same_name_as or spec.name
            node.settings = job.first_settings or self.settings
            node.settings = replace(node.settings, candidates=spec.candidates or node.settings.candidates)
            node.order, node.preparation_s = spec.order, spec.preparation_s
            node.clock_origin_s, node.clock_rate = spec.clock_origin_s, spec.clock_rate
            node.linger_s = job.linger_s
            node.max_stop_s = self.rng.choice(job.max_stop_s)
            node.has_new_addresses = job.has_new_addresses
            if spec.is_foreign:
                node.checkers = InvariantChecker()  # while it reaches no other node, it continues its own job
                node.adopt_foreign_directory()
            node.on_event = self._on_event
        self.event_counts: Counter[str] = Counter()
        self.faults_by_event: dict[tuple[str, int], list[int]] = {}
        self.pending_faults = len(schedule.faults)
        self.busy_until = 0.0
        self.healed = False
        crashes = Counter(f.nodes for f in schedule.faults if f.kind in ("kill", "power", "leave"))
        self.crash_loops = {nodes[0] for nodes, count in crashes.items() if count >= MANY_CRASHES}
        """Nodes that may have to wait as spares at the end: partitions.md says for how long."""
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
        if fault.kind == "links":
            self.net.lasting_cuts |= parse_links(fault.nodes)
            self._set_blocked(number, set())
            for name, start in self.checkers.running.items():
                self.nodes[name].call_probe(start.generation)
        elif fault.kind in PARTITION_KINDS:
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
        newest = views[max(views)] if views else ()
        members = [get_host_name(member.address) for member in newest] or list(self.nodes)
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
        self.net.set_blocked_links(self.net.lasting_cuts.union(*self.blocked_by_fault.values()))

    def _inject_node_fault(self, node: SimulatedNode, kind: str, duration_s: float) -> None:
        back_at = self.clock.now + duration_s
        if kind == "reconfigure":
            node.settings = self.settings
        elif kind in ("kill", "power", "wipe"):
            {"kill": node.die, "power": node.lose_power, "wipe": node.wipe}[kind]()
            self.clock.call_at(back_at, node.boot)
        elif kind in ("crash-before-send", "written"):
            node.planned_crash, node.restart_after_s = kind, duration_s
        elif kind in ("pause", "suspend", "stop-clock"):
            if kind == "pause":
                node.pause()
            else:
                node.suspend(stops_clock=kind == "stop-clock")
            self.clock.call_at(back_at, node.resume)
        elif kind == "small-path":
            self.net.limit_path(node.name, SMALL_PATH_BYTES)
            self.clock.call_at(back_at, self.net.limit_path, node.name)
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
            node.fail_job()
        elif kind == "leave":
            node.leave()
            self.clock.call_at(end_s, node.boot)

    # After the last fault every quorum must continue.

    def _heal_and_check(self) -> None:
        rng, names = self.rng, set(self.nodes)
        self.healed = True
        job = self.schedule.job
        is_whole = bool(self.net.lasting_cuts) or job.must_continue or rng.random() < 0.6
        ours = names if is_whole else set(rng.sample(sorted(names), rng.randint(1, len(names) - 1)))
        views_before = len(self.checkers.learned)
        self.net.slow_delay_s.clear()
        self.net.path_limits.clear()
        self.net.rejects_dials = False
        self.blocked_by_fault.clear()
        self._set_blocked(-1, links_between([sorted(ours)], names))
        if self.trace:
            self.trace("*", f"no more faults; {' '.join(sorted(ours))} | {' '.join(sorted(names - ours))}")
        for spec in self.schedule.job.nodes:
            node = self.nodes[spec.name]
            node.max_write_s, node.planned_crash, node.stays_ended = 0.01, "", True
            node.preparation_s = 0.0
            node.resume()
            node.finish_preparation()
            if spec.candidates:
                node.die()
                node.settings = self.settings
            if spec.same_name_as:
                self.nodes[spec.same_name_as].retire()
            if spec.is_foreign:
                node.retire()
            is_back = spec.start_s < float("inf") and spec.name not in job.stays_away
            if is_back and (ours == names or rng.random() < 0.5):
                node.boot()
        self.clock.run_until(self.clock.now + 1)
        parts = [part for part in (ours, names - ours) if part]
        if self.net.lasting_cuts:
            parts = self._list_cliques()
        quorums = [part for part in parts if self._must_form_view(part)]
        if self.net.lasting_cuts:
            quorums = quorums[:1]
        self._wait_until(lambda: not any(map(self._describe_shortfall, quorums)))
        for part in quorums:
            # A node that gives up no longer votes, so only a lasting quorum must form a view. (With a join
            # timeout below the last-call timeout, nodes may come and go without end.)
            lasted = self._must_form_view(part) and self.clock.now >= self._last_exit_s() + self.view_bound_s
            shortfall = self._describe_shortfall(part)
            if shortfall and lasted:
                self.checkers.add_violation(EVENTUAL_VIEW, self.clock.now, shortfall)
        views = len(self.checkers.learned) - views_before
        if views > MAX_VIEWS_AT_END * (2 if self.net.loss else 1):
            self.checkers.add_violation(FEW_VIEWS, self.clock.now, f"{views} views were decided")
        if self.schedule.job.finishes_at_end:
            # A part may have learned meanwhile of a later view, whose members are in the other.
            self._finish_job([part for part in quorums if self._must_form_view(part)])

    def _wait_until(self, done: Callable[[], bool]) -> None:
        """Wait until `done` has held for `STABLE_S`, but no longer than it may take."""
        start = since = self.clock.now
        bound_s = self.view_bound_s
        while self.clock.now < min(max(start, self._last_exit_s()) + bound_s, start + 3 * bound_s):
            self.clock.run_until(self.clock.now + POLL_INTERVAL_S)
            if not done():
                since = self.clock.now
            elif self.clock.now >= since + (3 * STABLE_S if self.net.lasting_cuts else STABLE_S):
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

    @property
    def view_bound_s(self) -> float:
        """How long it may take to form a view after the last fault."""
        bound_s = PARTIAL_VIEW_BOUND_S if self.net.lasting_cuts else VIEW_BOUND_S
        factor = max(1.0, self.settings.node_timeout_s / RendezvousSettings(()).node_timeout_s)
        factor *= 2 if self.net.loss else 1
        return bound_s * factor + 2 * max(self.schedule.job.max_stop_s)

    def _list_cliques(self) -> list[set[str]]:
        """Return the sets of nodes that are all connected with each other, the largest first."""
        sizes = range(len(self.nodes), 0, -1)
        groups = (group for size in sizes for group in combinations(self.nodes, size))
        return [set(group) for group in groups if not self.net.lasting_cuts & set(permutations(group, 2))]

    def _must_form_view(self, part: set[str]) -> bool:
        """Return whether all nodes are present in a part, or a quorum by what they know."""
        if self.schedule.job.must_continue:
            return True
        if any(node.has_ended for node in self.nodes.values()):
            return False  # ended nodes are dead, which the others may not know
        agents = [node.agent for node in self._list_connected(part) if node.agent]
        present = {agent.state.incarnation for agent in agents}
        if len(present) < self.settings.min_nodes:
            return False
        newest = max((agent.state.view for agent in agents), key=lambda view: view.generation)
        electorate = Electorate(newest, len(self.settings.candidates))
        cast = {
            key: (agent.state.incarnation, agent.state.acceptor.make_vote())
            for agent in agents
            if (key := electorate.find_key(agent.state.incarnation))
        }
        if not newest.members:
            return len(present) == len(self.nodes) or electorate.has_quorum(cast.keys())
        counted = find_counted(cast)
        surplus = electorate.compare_with_half(len(counted))
        if surplus > 0 or newest.is_strict:
            return electorate.has_quorum(counted.keys())
        disks = {member.node: member.disk_id for member in newest.members}
        replaced = {node.node for node in present if disks.get(node.node, node.disk_id) != node.disk_id}
        nobody = Incarnation("", "")
        is_broken = surplus == 0 and breaks_tie(newest, nobody, counted, is_free_of_heir=True)
        return is_broken or find_replacing_quorum(electorate, cast, replaced) is not None

    def _describe_shortfall(self, part: set[str]) -> str:
        """Describe what is missing for the required view; empty if nothing is."""
        alive = self._list_connected(part)
        if any(
            node.has_ended or (node.agent and node.agent.state.job_failure) for node in self.nodes.values()
        ):
            return ""  # `_finish_job` checks that
        if self.net.lasting_cuts:
            whole = [
                [get_host_name(member.address) for member in view[1]]
                for view in self.checkers.find_whole_views()
            ]
            is_connected = any(not self.net.lasting_cuts & set(permutations(view, 2)) for view in whole)
            return "" if is_connected else f"no connected view: {', '.join(map(str, alive))}"
        spares = self.crash_loops - self.checkers.running.keys()
        alive = [node for node in alive if node.name not in spares]
        live = [self.checkers.running[node.name] for node in alive if node.name in self.checkers.running]
        unfinished = [
            node for node in alive if node.agent and node.agent.state.status.workers is not Workers.FINISHED
        ]
        wanted = min(len(unfinished), self.settings.max_nodes)
        newest = {start.generation for start in live} or {max(self.checkers.views, default=0)}
        if len(newest) == 1 and (len(live) == wanted or newest <= self.checkers.finished_generations):
            return ""
        return f"{len(live)} of {wanted} run: {', '.join(map(str, alive))}"

    def _finish_job(self, parts: list[set[str]]) -> None:
        """Let all workers finish, and again after each restart; then check that the job ends everywhere."""
        nodes = [node for part in parts for node in self._list_connected(part)]
        newest = self.checkers.newest_decided

        def left() -> list[SimulatedNode]:
            return [node for node in nodes if node.agent and not node.agent.end_reason]

        def over() -> bool:
            for node in nodes:
                if node.running and node.name in self.checkers.running:
                    node.finish()
            return not left()

        self._wait_until(over)
        if left() and (self.checkers.newest_decided == newest or self._has_most_members(nodes)):
            self.checkers.add_violation(JOB_ENDS_EVERYWHERE, self.clock.now, ", ".join(map(str, left())))

    def _has_most_members(self, nodes: list[SimulatedNode]) -> bool:
        """Return whether these nodes are more than half of the newest decided view; fewer may wait."""
        newest = self.checkers.learned[self.checkers.newest_decided]
        members = {get_host_name(member.address) for member in newest}
        return 2 * len(members & {node.name for node in nodes}) > len(members)


def links_between(groups: list[list[str]], names: Iterable[str]) -> set[tuple[str, str]]:
    """Return every direction between nodes of different groups; nodes in no group form one more."""
    place = {name: number for number, group in enumerate(groups) for name in group}
    return {(a, b) for a in names for b in names if place.get(a, -1) != place.get(b, -1)}


def parse_links(links: Iterable[str]) -> set[tuple[str, str]]:
    """Parse `a-b`, both directions between two nodes, or `a>b`, one direction."""
    directions = set()
    for link in links:
        first, is_one_way, second = link.partition(">")
        if not is_one_way:
            first, _, second = link.partition("-")
            directions.add((second, first))
        directions.add((first, second))
    return directions


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
        return f"{item.node}{item.boot}"
    if isinstance(item, View):
        return f"{item.generation}{_describe_set(item.members)} of {describe(item.leader)}"
    if isinstance(item, Header):
        return f"{item.seq}/{item.ack}{f' of {item.generation}' if item.generation else ''}"
    if is_dataclass(item):
        values = [(field.name, getattr(item, field.name)) for field in fields(item)]
        texts = [f"{name}={describe(value)}" for name, value in values if value or value == 0]
        return f"{type(item).__name__}({' '.join(texts)})"
    if isinstance(item, (tuple, frozenset, set)):
        return _describe_set(item)
    return f"{item:.3f}" if isinstance(item, float) else str(item)


def _describe_set(items: Iterable[object]) -> str:
    return "{" + " ".join(map(describe, items)) + "}"
