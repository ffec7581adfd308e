"""Random schedules of faults against the real core, with named checkers. A seed is a schedule.

`run(seed)` draws a job (3 to 9 nodes, candidates, limits, clocks), then faults, and lets it all happen in
simulated time. At the end the network heals, whole or in two clean parts, and what then has a quorum must
form a world. `python -m elastic_resume.rendezvous.simulate --seeds 2000`, `--seed 17` to see one in full.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from elastic_resume.rendezvous.checkers import BOUNDED, CALM, Checkers, Violation
from elastic_resume.rendezvous.quorum import ALL_RULES, Knowledge, Rules, has_quorum
from elastic_resume.rendezvous.simnet import Clock, Network, StormError
from elastic_resume.rendezvous.simnode import Node, Story
from elastic_resume.rendezvous.steps import Settings

RESETS_APART_S = 0.5
"""A network that resets a link and at once again the call that makes it anew cannot be told from a death:
rule 4 takes a closed connection and a refused call for knowledge. A firewall that rejects with resets, on
both sides of a partition, can defeat it; one that drops cannot."""
NAMES = "abcdefghi"
BOUND_S = 25.0
"""From the last fault to a world: a node timeout to notice, one of grace, the settle time, some calls."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens, and is over (if it ever is) after `for_s`.

    At a time; or, with `message`, when so many messages that form worlds have been sent.
    """

    at_s: float
    kind: str
    nodes: tuple[str, ...]
    for_s: float = 0.0
    message: int = 0

    def __str__(self) -> str:
        """One line of a schedule."""
        when = f"message {self.message}" if self.message else f"{self.at_s:.3f}"
        return f"{when:>12}  {self.kind} {' '.join(self.nodes)} for {self.for_s:.2f} s"


@dataclass(slots=True)
class Result:
    """What became of a schedule."""

    seed: int
    header: str
    faults: list[Fault]
    violations: list[Violation]
    worlds: int
    story: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """The schedule, what happened if it was recorded, and what was violated."""
        lines = [f"seed {self.seed}: {self.header}", *map(str, self.faults), *self.story]
        return "\n".join([*lines, *map(str, self.violations)])


class Simulation:
    """One job under one schedule."""

    def __init__(self, seed: int, rules: Rules) -> None:
        self.rng = rng = random.Random(seed)  # noqa: S311 - seeded on purpose
        self.clock = Clock()
        self.checkers = Checkers()
        self.net = Network(self.clock, rng)
        count = rng.choice((3, 3, 4, 5, 5, 6, 7, 9))
        names = NAMES[:count]
        candidates = tuple(names[: rng.choice((1, 2, 3, 3, count))])
        self.settings = Settings(
            candidates,
            min_nodes=rng.choice((1, 1, 1, 2)),
            max_nodes=rng.choice((count, count, count - 1, 2)),
            beats_per_timeout=4,
            rules=rules,
        )
        self.nodes = {name: Node(name, self.settings, self.net, self.checkers) for name in names}
        for place, node in enumerate(self.nodes.values()):
            node.order = place if rng.random() < 0.5 else 0
            node.origin = rng.uniform(-1e4, 1e4)
            node.rate = rng.uniform(0.99, 1.01)
        self.sent = 0
        self.healed = False
        self.reset_at = 0.0
        self.cuts: dict[int, set[tuple[str, str]]] = {}
        self.faults = draw_faults(rng, tuple(names))

    def header(self) -> str:
        """The job in one line."""
        s = self.settings
        return f"{len(self.nodes)} nodes, candidates {' '.join(s.candidates)}, {s.min_nodes}:{s.max_nodes}"

    def play(self) -> None:
        """Let the schedule happen, then heal and see."""
        for node in self.nodes.values():
            self.clock.at(self.rng.random() * 2, node.boot)
            node.forming = self._forming_message
        for number, fault in enumerate(self.faults):
            if not fault.message:
                self.clock.at(fault.at_s, self._strike, number, fault)
        end = max(fault.at_s + min(fault.for_s, 5) for fault in self.faults) + 1
        self.clock.run_until(end + (8 if any(fault.message for fault in self.faults) else 0))
        self._heal()

    def _forming_message(self) -> None:
        self.sent += 1
        for number, fault in enumerate(self.faults):
            if fault.message == self.sent:
                self.clock.at(self.clock.now, self._strike, number, fault)

    def _strike(self, number: int, fault: Fault) -> None:
        if self.healed:
            return
        later = self.clock.now + fault.for_s
        nodes = [self.nodes[name] for name in fault.nodes]
        if fault.kind in ("partition", "shift", "one-way"):
            ours = set(fault.nodes)
            rest = set(self.nodes) - ours
            cut = {(a, b) for a in ours for b in rest}
            if fault.kind != "one-way":
                cut |= {(b, a) for a, b in cut}
            if fault.kind == "shift":
                self.cuts.clear()
            self._cut(number, cut)
            self.clock.at(later, self._cut, number, set())
            return
        if fault.kind == "slow":
            self.net.slow_s = 0.6
            self.clock.at(later, setattr, self.net, "slow_s", 0.02)
        for node in nodes:
            self._strike_node(node, fault.kind, later)
        if fault.kind == "reset" and self.clock.now >= self.reset_at + RESETS_APART_S:
            self.reset_at = self.clock.now
            self.net.reset(*fault.nodes)

    def _strike_node(self, node: Node, kind: str, later: float) -> None:
        if kind in ("kill", "power"):
            node.die(power=kind == "power")
            self.clock.at(later, node.boot)
        elif kind == "pause":
            node.pause()
            self.clock.at(later, node.resume)
        elif kind == "disk":
            node.disk_s = 1.5
            self.clock.at(later, setattr, node, "disk_s", 0.01)
        elif kind == "worker":
            if node.agent and not node.paused and node.agent.running:
                node.ask_to_join(node.life)
        elif kind == "leave" and node.agent and not node.paused:
            node.leave()
            node.die()
            self.clock.at(later, node.boot)

    def _cut(self, number: int, cut: set[tuple[str, str]]) -> None:
        self.cuts[number] = cut
        self.net.set_cut(set().union(*self.cuts.values()))

    # The end: no more faults, and whoever may must go on.

    def _heal(self) -> None:
        rng = self.rng
        self.net.slow_s = 0.02
        names = list(self.nodes)
        ours = set(names if rng.random() < 0.6 else rng.sample(names, rng.randint(1, len(names) - 1)))
        whole = len(ours) == len(names)
        rest = set(names) - ours
        self.cuts.clear()
        self.healed = True
        self._cut(-1, {(a, b) for a in ours for b in rest} | {(b, a) for a in ours for b in rest})
        for node in self.nodes.values():
            node.disk_s = 0.01
            node.resume()
            if whole or rng.random() < 0.5:
                node.boot()
        self.clock.run_until(self.clock.now + 1)
        groups = [group for group in (ours, rest) if group]
        may = [group for group in groups if whole or self._has_quorum(group)]
        self.clock.run_until(self.clock.now + BOUND_S)
        for group in may:
            self._check_formed(group)

    def _alive(self, group: set[str]) -> list[Node]:
        """Agents of a part that the others there can hear of: newcomers find a job through addresses."""
        alive = [self.nodes[name] for name in sorted(group) if self.nodes[name].agent]
        up = {node.name for node in alive}
        known = {node.name: addresses(node) & up - {node.name} for node in alive}
        told = set().union(*known.values())
        return [node for node in alive if known[node.name] or node.name in told or len(alive) == 1]

    def _has_quorum(self, group: set[str]) -> bool:
        nodes = self._alive(group)
        known = Knowledge(len(self.settings.candidates))
        for node in nodes:
            if node.agent:
                known = known.merge(node.agent.body.known)
        here = {node.agent.body.me for node in nodes if node.agent}
        reachable = known.begun is not None or any(one.candidate is not None for one in here)
        return reachable and len(here) >= self.settings.min_nodes and has_quorum(here, known)

    def _check_formed(self, group: set[str]) -> None:
        alive = self._alive(group)
        live = [self.checkers.live[node.name] for node in alive if node.name in self.checkers.live]
        wanted = min(len(alive), self.settings.max_nodes)
        if len(live) == wanted and len({begin.generation for begin in live}) == 1:
            return
        state = ", ".join(describe(node) for node in alive)
        self.checkers.violate(BOUNDED, self.clock.now, f"{len(live)} of {wanted} run: {state}")


def addresses(node: Node) -> set[str]:
    """Where that node may call."""
    if node.agent is None:
        return set()
    known = node.agent.body.known
    return {m.address for w in known.worlds for m in known.alive(w)} | set(node.settings.candidates)


def describe(node: Node) -> str:
    """What a node is doing, for a violation's text."""
    agent = node.agent
    if agent is None:
        return f"{node.name} is down"
    role = type(agent.role).__name__ if agent.role else agent.over
    runs = f" runs {agent.running.generation}" if agent.running else ""
    return f"{node.name}{agent.body.me.life} {role}{runs}"


WILD = (
    "kill",
    "kill",
    "power",
    "pause",
    "partition",
    "shift",
    "shift",
    "one-way",
    "slow",
    "disk",
    "worker",
    "leave",
)
CALM_DAYS = ("reset", "worker", "reset", "kill")


def draw_faults(rng: random.Random, names: tuple[str, ...]) -> list[Fault]:
    """Draw a schedule. Resets by a middlebox come only where nothing else hides that they are resets."""
    kinds = CALM_DAYS if rng.random() < 0.15 else WILD
    aimed = rng.choice((0.0, 0.4, 0.8))
    faults = []
    at, message = rng.uniform(0.0, 7.0), rng.randint(0, 3 * len(names))
    for _ in range(rng.randint(2, 9)):
        kind = rng.choice(kinds)
        for_s = rng.choice((0.05, 0.3, 1.0, 3.5, 4.5, 8.0, 100.0)) * rng.uniform(0.7, 1.3)
        if kind in ("slow", "disk", "pause"):
            for_s = min(for_s, 8.0)
        nodes = tuple(rng.sample(names, _how_many(rng, kind, len(names))))
        if rng.random() < aimed:
            message += rng.choice((1, 1, 2, 3, len(names), 3 * len(names)))
            faults.append(Fault(at, kind, nodes, for_s, message))
        else:
            at += rng.choice((0.02, 0.1, 0.5, 2.0, 5.0)) * rng.uniform(0.5, 1.5)
            faults.append(Fault(at, kind, nodes, for_s))
    return faults


def _how_many(rng: random.Random, kind: str, count: int) -> int:
    if kind in ("partition", "shift", "one-way"):
        return rng.randint(1, count - 1)
    if kind == "reset":
        return 2
    return 2 if kind in ("kill", "power") and rng.random() < 0.3 else 1


def run(seed: int, rules: Rules = ALL_RULES, *, told: bool = False) -> Result:
    """Play one schedule; with `told`, record every event and effect."""
    simulation = Simulation(seed, rules)
    story: list[str] = []
    if told:
        tell = teller(simulation, story)
        for node in simulation.nodes.values():
            node.story = tell
    checkers = simulation.checkers
    try:
        simulation.play()
    except StormError as error:
        checkers.violate(CALM, simulation.clock.now, str(error))
    return Result(
        seed, simulation.header(), simulation.faults, checkers.violations, len(checkers.worlds), story
    )


def teller(simulation: Simulation, story: list[str]) -> Story:
    """Return what notes each event and effect as a line."""

    def tell(name: str, what: object) -> None:
        story.append(f"{simulation.clock.now:9.3f}  {name}  {what!r}")

    return tell


def first_violation(rules: Rules, seeds: range, checker: Callable[[Violation], bool]) -> Result | None:
    """Return the first schedule in which such a promise is broken."""
    for seed in seeds:
        result = run(seed, rules)
        if any(checker(violation) for violation in result.violations):
            return result
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run many seeds, or one in full; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="elastic-resume simulate rendezvous", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many schedules")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="play this one and print all that happened")
    args = parser.parse_args(argv)
    if args.seed is not None:
        result = run(args.seed, told=True)
        print(result)
        return 1 if result.violations else 0
    start = time.perf_counter()
    broken = worlds = 0
    for seed in range(args.first, args.first + args.seeds):
        result = run(seed)
        worlds += result.worlds
        if result.violations:
            broken += 1
            print(result, flush=True)
    took = time.perf_counter() - start
    rate = args.seeds / took
    print(f"{args.seeds} schedules, {worlds} worlds, {broken} broken promises, {rate:.0f} schedules/s")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
