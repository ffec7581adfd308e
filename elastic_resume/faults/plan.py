"""Faults as data: a plan of what befalls a job.

A plan is written in YAML (`plan_text.py`) or in Python, and a seed decides all that it leaves to chance, so
the same plan with the same seed is the same schedule on every machine.

Promise: a `Plan` that exists is valid; a fault that cannot come, in a job of some size or on nodes that have
no network or disk of their own, is refused by name before anything starts. Pure: no clock, process or file.
Does not know how a fault is done (`strike.py`).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from elastic_resume.errors import ConfigError
from elastic_resume.faults import kinds
from elastic_resume.faults.fault import GROUPS, Fault
from elastic_resume.faults.kinds import KINDS, NODES, WORKER

__all__ = ["Every", "Fault", "Plan", "mix"]

MAX_FAULTS = 10_000
DRAWN_LEAST_GAP_S = 1.0  # less, and two faults are one: nothing can have happened between them


@dataclass(frozen=True)
class Every:
    """Many faults, drawn: one each ``mtbf_s`` seconds on average, of these kinds.

    ``kinds``: each with its weight; empty: all that a job survives and the nodes can do. ``from_s``: seconds
    after the first step, like ``until_s`` (None: as long as faults are wanted); ``count``: so many at most.
    """

    mtbf_s: float
    kinds: tuple[tuple[str, float], ...] = ()
    from_s: float = 0.0
    until_s: float | None = None
    count: int | None = None

    def __post_init__(self) -> None:
        given = self.kinds.items() if isinstance(self.kinds, Mapping) else self.kinds
        object.__setattr__(self, "kinds", tuple((str(what), float(weight)) for what, weight in given))
        for what, weight in self.kinds:
            Fault(what, at_s=0.0)
            if not 0 < weight < float("inf"):
                raise ConfigError(f"the weight of {what} is {weight:g}: write a number above 0.")
        for name in ("mtbf_s", "from_s", "until_s"):
            given_s = getattr(self, name)
            if given_s is not None:
                object.__setattr__(self, name, round(float(given_s), 3))
        if not 0 < self.mtbf_s < float("inf"):
            raise ConfigError("mtbf, the mean time between faults, must be above 0, as in 15s.")
        if self.count is not None and not 1 <= self.count <= MAX_FAULTS:
            raise ConfigError(f"count is {self.count}: write 1 to {MAX_FAULTS}.")


@dataclass(frozen=True)
class Plan:
    """Faults, and a seed for what they leave open."""

    faults: tuple[Fault, ...] = ()
    every: Every | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            raise ConfigError(f"the seed is {self.seed!r}: write a whole number from 0 on.")

    @classmethod
    def of(cls, *faults: Fault | str, every: Every | None = None, seed: int = 0) -> Plan:
        """A plan of faults, each of which may be a line of text (`Fault.parse`)."""
        listed = (Fault.parse(one) if isinstance(one, str) else one for one in faults)
        return cls(tuple(listed), every, seed)

    def refuse(self, *, nodes: int, workers_per_node: int = 1, own: Iterable[str] = ()) -> None:
        """Raise a ConfigError for a fault that cannot come; ``own``: what each node has of its own."""
        able = {kinds.PROCESSES, *own}
        for number, fault in enumerate(self.faults, 1):
            why = _why_not(fault, nodes, nodes * workers_per_node) or _wants(fault.what, able)
            if why:
                raise ConfigError(f"fault {number} ({fault}): {why}")
        for what, _ in self.every.kinds if self.every else ():
            why = _wants(what, able) or _why_not(Fault(what, at_s=0.0), nodes, nodes * workers_per_node)
            if why:
                raise ConfigError(f"every: {what}: {why}")

    def schedule(
        self, *, nodes: int, workers_per_node: int = 1, until_s: float | None = None, own: Iterable[str] = ()
    ) -> tuple[Fault, ...]:
        """All faults, those written and then those drawn. Who has a role is all that is still open.

        ``until_s`` bounds what is drawn; what is written and cannot come by then is for `Course` to tell.
        """
        chance = random.Random(self.seed)  # noqa: S311  no secret
        written = [_draw(fault, nodes, nodes * workers_per_node, chance) for fault in self.faults]
        drawn = self._drawn(nodes, nodes * workers_per_node, until_s, {kinds.PROCESSES, *own}, chance)
        return (*written, *drawn)

    def _drawn(
        self, nodes: int, size: int, until_s: float | None, able: set[str], chance: random.Random
    ) -> Iterable[Fault]:
        every = self.every
        if every is None:
            return
        ends = [end for end in (every.until_s, until_s) if end is not None]
        if not ends and every.count is None:
            raise ConfigError("faults are drawn without an end: give --for, or until or count in `every`.")
        weights = dict(every.kinds) or mix(able, nodes)
        at, count = every.from_s, every.count or MAX_FAULTS
        for _ in range(count):
            at += max(DRAWN_LEAST_GAP_S, chance.expovariate(1 / every.mtbf_s))
            what = chance.choices(list(weights), list(weights.values()))[0]
            if at > min(ends, default=float("inf")):
                return
            yield _draw(Fault(what, at_s=at), nodes, size, chance)


def mix(own: Iterable[str], nodes: int) -> dict[str, float]:
    """What is drawn where nobody says what: faults that a job survives, as far as nodes can do them."""
    able = {kinds.PROCESSES, *own}
    return {
        what: float(kind.weight)
        for what, kind in KINDS.items()
        if kind.weight and kind.needs in able and not (kind.hits == NODES and nodes < 3)
    }


def _draw(fault: Fault, nodes: int, size: int, chance: random.Random) -> Fault:
    if not fault.is_drawn:
        return fault
    if fault.kind.hits == NODES:
        order = list(range(nodes))
        chance.shuffle(order)
        few = chance.randint(1, max(1, (nodes - 1) // 2))
        return replace(fault, groups=(tuple(sorted(order[:few])), tuple(sorted(order[few:]))))
    if fault.role == "lead" or fault.kind.hits != WORKER:
        return replace(fault, node=chance.randrange(nodes), role="lead" if fault.role == "lead" else "")
    return replace(fault, rank=chance.randrange(size), role="")


def _why_not(fault: Fault, nodes: int, size: int) -> str:
    if fault.node is not None and fault.node >= nodes:
        return f"there is no node {fault.node}: {nodes} nodes are 0 to {nodes - 1}."
    if fault.rank is not None and fault.rank >= size:
        return f"there is no rank {fault.rank}: {size} workers are 0 to {size - 1}."
    if fault.groups and sorted(node for group in fault.groups for node in group) != list(range(nodes)):
        return f"{GROUPS}, 0 to {nodes - 1}."
    if fault.kind.hits == NODES and nodes < 2:
        return "it takes two nodes at least."
    return ""


def _wants(what: str, able: set[str]) -> str:
    needs = KINDS[what].needs
    if needs in able:
        return ""
    return f"it takes nodes that have {needs} of their own, which is --hosts namespaces (as root)."
