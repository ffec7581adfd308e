"""A schedule of faults, played against the real core in simulated time, with named checkers.

`run(seed)` draws the schedule of that seed (`draw`) and lets it all happen. At the end the network heals,
whole or in two clean parts, and what then has a quorum must form a world; a job that is through must end.
`batch` plays many. Nothing here is real but the core.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from elastic_resume.rendezvous.core.messages import Beat
from elastic_resume.rendezvous.core.quorum import ALL_RULES, Knowledge, Rules, has_quorum
from tests.support.rendezvous_sim.checkers import BOUNDED, CALM, ENDS, Checkers, Violation
from tests.support.rendezvous_sim.draw import draw
from tests.support.rendezvous_sim.net import FAST_S, Clock, Network, StormError
from tests.support.rendezvous_sim.node import Node, Story
from tests.support.rendezvous_sim.schedule import CUTS, LEADER, OTHER_LEADER, Fault, Schedule
from tests.support.rendezvous_sim.tell import tell
from tests.support.rendezvous_sim.word import Operator

BOUND_S = 25.0
"""From the last fault to a world: a node timeout to notice, one of grace, the settle time, some calls."""
HOLD_S = 5.0
"""A world that lasts so long has formed: a node timeout, a lease or newcomers would have ended it."""
EVENTS_WAIT_S = 15.0
"""Faults that wait for events which do not come are waited for so long after those at times."""
SLOW_S = {"slow": 0.6, "slowish": 0.3}
"""The longest that a packet takes to or from a slow node."""
LOOK_S = 0.5
SHOWN = 4
"""The first violations tell the story; others follow from them."""


@dataclass(slots=True)
class Result:
    """What became of a schedule."""

    schedule: Schedule
    violations: list[Violation]
    worlds: int
    events: int
    story: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """The schedule, what happened if it was recorded, and what was violated."""
        more = len(self.violations) - SHOWN
        told = [*map(str, self.violations[:SHOWN]), *([f"{more:>9} more"] if more > 0 else [])]
        return "\n".join([str(self.schedule), *self.story, *told])


class Simulation:
    """One job under one schedule."""

    def __init__(self, schedule: Schedule, rules: Rules = ALL_RULES) -> None:
        self.schedule = schedule
        self.rng = random.Random(2 * schedule.seed + 1)
        self.clock = Clock()
        self.checkers = Checkers(schedule.waived)
        self.net = Network(self.clock, self.rng)
        job = schedule.job
        self.settings = replace(job.settings, rules=rules)
        self.nodes = {
            site.name: Node(site.name, self.settings, self.net, self.checkers) for site in job.sites
        }
        for site in job.sites:
            node = self.nodes[site.name]
            node.order, node.origin, node.rate = site.order, site.origin, site.rate
            node.linger_s = job.linger_s
            node.watch = self._saw
        self.operator = Operator(self.nodes, self.clock, self.rng) if job.operator else None
        self.seen: Counter[str] = Counter()
        self.awaited: dict[tuple[str, int], list[int]] = {}
        self.left = len(schedule.faults)
        self.busy_until = 0.0
        self.healed = False
        self.cuts: dict[int, set[tuple[str, str]]] = {}
        self.story: Story | None = None

    def tell(self, story: list[str]) -> None:
        """Note every event, effect and fault as a line, all but heartbeats."""

        def note(name: str, what: object) -> None:
            if not isinstance(getattr(what, "message", None), Beat):
                story.append(f"{self.clock.now:9.3f}  {name}  {tell(what)}")

        self.story = note
        for node in self.nodes.values():
            node.story = note

    # What happens, and when.

    def play(self) -> None:
        """Let the schedule happen, then heal and see."""
        for site in self.schedule.job.sites:
            if site.comes_s < float("inf"):
                self.clock.at(site.comes_s, self.nodes[site.name].boot)
        if self.operator:
            self.operator.start()
        faults = self.schedule.faults
        for number, fault in enumerate(faults):
            if not fault.when.then:
                self._arm(number)
        timed = [fault.when.after_s for fault in faults if not (fault.when.event or fault.when.then)]
        latest = max(timed, default=0.0) + EVENTS_WAIT_S
        if any(fault.when.then for fault in faults):
            latest += EVENTS_WAIT_S
        while self.left and self.clock.now < latest:
            self.clock.run_until(self.clock.now + LOOK_S)
        self.clock.run_until(max(self.clock.now, self.busy_until) + 1)
        self._heal()

    def _arm(self, number: int) -> None:
        """Have a fault strike when its moment comes."""
        when = self.schedule.faults[number].when
        if when.event:
            count = when.number + (self.seen[when.event] if when.then else 0)
            self.awaited.setdefault((when.event, count), []).append(number)
        else:
            start = self.clock.now if when.then else 0.0
            self.clock.at(start + when.after_s, self._strike, number)

    def _saw(self, event: str) -> None:
        """Something that faults may wait for has happened."""
        for one in (event,) if event in ("world", "Claim") else (event, "message"):
            self.seen[one] += 1
            for number in self.awaited.pop((one, self.seen[one]), ()):
                after_s = self.schedule.faults[number].when.after_s
                self.clock.at(self.clock.now + after_s, self._strike, number)

    def _strike(self, number: int) -> None:
        if self.healed:
            return
        faults = self.schedule.faults
        fault = faults[number]
        self.left -= 1
        self.busy_until = max(self.busy_until, self.clock.now + min(fault.for_s, 5.0))
        back_at = self.clock.now + fault.for_s
        if self.story:
            self.story("*", f"{fault.kind} {' | '.join(' '.join(group) for group in self._groups(fault))}")
        if fault.kind in CUTS:
            self._cut_off(number, fault, back_at)
        elif fault.kind in SLOW_S:
            for name in self._names(fault.nodes):
                self.net.slow_s[name] = SLOW_S[fault.kind]
                self.clock.at(back_at, self.net.slow_s.__setitem__, name, FAST_S)
        elif fault.kind in ("reset", "half-reset"):
            names = self._names(fault.nodes)
            if len(names) == 2:
                self.net.reset(*names, both=fault.kind == "reset")
        else:
            for name in self._names(fault.nodes):
                self._strike_node(self.nodes[name], fault.kind, fault.for_s)
        if number + 1 < len(faults) and faults[number + 1].when.then:
            self._arm(number + 1)

    def _names(self, nodes: Iterable[str]) -> list[str]:
        """Turn ranks in the newest world, and its leader, into names."""
        worlds = self.checkers.worlds
        members = [one.node for one in worlds[max(worlds)]] if worlds else list(self.nodes)
        outside = [node.name for node in self.nodes.values() if node.process and node.name not in members]
        leaders = [node.name for node in self.nodes.values() if node.leads]
        leaders.sort(key=lambda one: not self.nodes[one].running)

        def name(one: str) -> str:
            if one in (LEADER, OTHER_LEADER):
                return leaders[0 if one == LEADER else -1] if leaders else members[0]
            if one.startswith("!") and outside:
                return outside[int(one[1:]) % len(outside)]
            return members[int(one[1:]) % len(members)] if one[0] in "#!" else one

        return list(dict.fromkeys(map(name, nodes)))

    def _groups(self, fault: Fault) -> list[list[str]]:
        return [self._names(group.split()) for group in " ".join(fault.nodes).split("|")]

    def _cut_off(self, number: int, fault: Fault, back_at: float) -> None:
        groups = self._groups(fault)
        if fault.kind == "one-way":
            cut = {(a, b) for a in groups[0] for b in self.nodes if b not in groups[0]}
        else:
            cut = cut_between(groups, self.nodes)
        if fault.kind == "shift":
            self.cuts.clear()
        if fault.kind == "reject":
            self.net.rejects = True
            for one, other in sorted(cut):  # a set has another order in every process
                self.net.reset(one, other)
        self._set_cut(number, cut)
        self.clock.at(back_at, self._set_cut, number, set())

    def _set_cut(self, number: int, cut: set[tuple[str, str]]) -> None:
        self.cuts[number] = cut
        self.net.set_cut(set().union(*self.cuts.values()))

    def _strike_node(self, node: Node, kind: str, for_s: float) -> None:
        back_at = self.clock.now + for_s
        if kind in ("kill", "power", "wipe"):
            {"kill": node.die, "power": node.lose_power, "wipe": node.wipe}[kind]()
            self.clock.at(back_at, node.boot)
        elif kind in ("unsent", "written"):
            node.doom, node.back_s = kind, for_s
        elif kind in ("pause", "suspend"):
            {"pause": node.pause, "suspend": node.suspend}[kind]()
            self.clock.at(back_at, node.resume)
        elif kind in ("disk", "stuck"):
            node.disk_s = 1.5 if kind == "disk" else 20.0
            self.clock.at(back_at, setattr, node, "disk_s", 0.01)
        elif node.agent and not node.paused and not node.agent.over:
            self._strike_agent(node, kind, back_at)

    def _strike_agent(self, node: Node, kind: str, back_at: float) -> None:
        if kind == "worker" and node.running:
            node.fail_worker()
        elif kind == "finish" and node.running:
            node.finish()
        elif kind == "fail":
            node.fail(f"node {node.name} gave up")
        elif kind == "leave":
            node.leave()
            node.die()
            self.clock.at(back_at, node.boot)

    # The end: no more faults, and whoever may must go on.

    def _heal(self) -> None:
        rng, names = self.rng, set(self.nodes)
        self.healed = True
        ours = names if rng.random() < 0.6 else set(rng.sample(sorted(names), rng.randint(1, len(names) - 1)))
        self.net.slow_s.clear()
        self.net.rejects = False
        self.cuts.clear()
        self._set_cut(-1, cut_between([sorted(ours)], names))
        if self.story:
            self.story("*", f"no more faults; {' '.join(sorted(ours))} | {' '.join(sorted(names - ours))}")
        for site in self.schedule.job.sites:
            node = self.nodes[site.name]
            node.disk_s, node.doom, node.last = 0.01, "", True
            node.resume()
            if site.comes_s < float("inf") and (ours == names or rng.random() < 0.5):
                node.boot()
        if self.operator and ours == names:
            self.operator.release()
        self.clock.run_until(self.clock.now + 1)
        parts = [part for part in (ours, names - ours) if part]
        may = [part for part in parts if self._may_form(part)]
        self._wait_for(lambda: not any(map(self._lacks, may)))
        for part in may:
            # Who gives up takes its vote along: only a quorum that lasts must form a world. (With a join
            # timeout of less than the settle time for each node, nodes may come and go without end.)
            lasted = self._may_form(part) and self.clock.now >= self._gave_up_at() + BOUND_S
            lack = self._lacks(part)
            if lack and lasted:
                self.checkers.violate(BOUNDED, self.clock.now, lack)
        if self.schedule.job.ends:
            self._finish(may)

    def _wait_for(self, done: Callable[[], bool]) -> None:
        """Let the time pass in which it must have come true, but no more once it has lasted."""
        start = since = self.clock.now
        while self.clock.now < min(max(start, self._gave_up_at()) + BOUND_S, start + 3 * BOUND_S):
            self.clock.run_until(self.clock.now + LOOK_S)
            if not done():
                since = self.clock.now
            elif self.clock.now >= since + HOLD_S:
                return

    def _gave_up_at(self) -> float:
        return max(node.gave_up_at for node in self.nodes.values())

    def _alive(self, part: set[str]) -> list[Node]:
        """Agents of a part that can hear of each other: the largest such set.

        Newcomers find a job through addresses, and two worlds that share none never meet.
        """
        up = {name for name in sorted(part) if (agent := self.nodes[name].agent) and not agent.over}
        knows = {name: self.nodes[name].addresses() & up for name in up}
        largest: set[str] = set()
        while up:
            found = {min(up)}
            while more := {
                one for one in up - found if knows[one] & found or any(one in knows[it] for it in found)
            }:
                found |= more
            up -= found
            largest = max(largest, found, key=len)
        return [self.nodes[name] for name in sorted(largest)]

    def _may_form(self, part: set[str]) -> bool:
        """Whether those must form a world: they all are there, or have a quorum by what they know."""
        if any(node.done for node in self.nodes.values()):
            return False  # those who ended are gone for good, and nobody may have seen it
        agents = [node.agent for node in self._alive(part) if node.agent]
        here = {agent.body.me for agent in agents}
        if len(here) == len(self.nodes):
            return True
        if len(here) < self.settings.min_nodes:
            return False
        # Of two worlds of one generation (their family waives that) each agent keeps the one that it knows.
        for agent in agents:
            known = functools.reduce(Knowledge.merge, (one.body.known for one in agents), agent.body.known)
            members = {one for world in known.worlds for one in known.alive(world)}
            reachable = any(one.candidate is not None or one in members for one in here)
            if not (reachable and has_quorum(here, known)):
                return False
        return bool(agents)

    def _lacks(self, part: set[str]) -> str:
        """Say what is not as it must become; empty when all is well."""
        alive = self._alive(part)
        if any(node.done or (node.agent and node.agent.body.failed) for node in self.nodes.values()):
            return ""  # `_finish` looks at that
        live = [self.checkers.live[node.name] for node in alive if node.name in self.checkers.live]
        unfinished = [node for node in alive if node.agent and not node.agent.body.finished]
        wanted = min(len(unfinished), self.settings.max_nodes)
        newest = {begin.generation for begin in live} or {max(self.checkers.worlds, default=0)}
        if len(newest) == 1 and (len(live) == wanted or newest <= self.checkers.through):
            return ""
        return f"{len(live)} of {wanted} run: {', '.join(map(str, alive))}"

    def _finish(self, parts: list[set[str]]) -> None:
        """Have all workers finish, again when they are started again; then the job must end everywhere."""
        nodes = [node for part in parts for node in self._alive(part)]

        def left() -> list[Node]:
            return [node for node in nodes if node.agent and not node.agent.over]

        def over() -> bool:
            for node in nodes:
                if node.running and node.name in self.checkers.live:
                    node.finish()
            return not left()

        self._wait_for(over)
        if left():
            self.checkers.violate(ENDS, self.clock.now, ", ".join(map(str, left())))


def cut_between(groups: list[list[str]], names: Iterable[str]) -> set[tuple[str, str]]:
    """Every direction between nodes of different groups; who is in none belongs to one more."""
    place = {name: number for number, group in enumerate(groups) for name in group}
    return {(a, b) for a in names for b in names if place.get(a, -1) != place.get(b, -1)}


def run(seed: int, rules: Rules = ALL_RULES, *, told: bool = False) -> Result:
    """Play the schedule of a seed; with `told`, record every event and effect."""
    return play(draw(seed), rules, told=told)


def play(schedule: Schedule, rules: Rules = ALL_RULES, *, told: bool = False, strict: bool = False) -> Result:
    """Play a schedule; `strict`, with no promise waived."""
    simulation = Simulation(schedule, rules)
    checkers = simulation.checkers
    if strict:
        checkers.waived = frozenset()
    story: list[str] = []
    if told:
        simulation.tell(story)
    try:
        simulation.play()
    except StormError as error:
        checkers.violate(CALM, simulation.clock.now, str(error))
    return Result(schedule, checkers.violations, len(checkers.worlds), simulation.clock.steps, story)
