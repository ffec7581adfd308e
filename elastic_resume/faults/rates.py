"""How nodes fail, for `simulate.py`: kinds of failure, how often each comes, and a seeded schedule of them.

Pure but for the seed. The default figures are those of the field: failures for each 1,000 node-days were 6.5
and 2.3 on two clusters of Meta, 3.8 in Llama 3's training; of 778,000 jobs (ByteRobust) 10 % of the failures
were hangs, 39 % GPU and network faults, which take a node away, and 45 % what starting again cures (want of
memory, full disks, mounts, overload); 3 to 5 % were two at once. That one in ten of the nodes that go does
not come back is an assumption.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from elastic_resume import values
from elastic_resume.errors import ConfigError


@dataclass(frozen=True)
class Kind:
    """One kind of failure. ``away``: for how long its nodes go, as `Strike` says; nothing: they stay."""

    says: str
    away: str = ""
    several: str = ""  # "rack" or "cluster"


KINDS: Mapping[str, Kind] = {
    "worker": Kind("a worker dies, its node stays"),
    "hang": Kind("a worker stands still, its node stays"),
    "agent": Kind("the node's agent dies and is started again", "agent"),
    "node": Kind("a node dies and boots again, with its disk", "reboot"),
    "gone": Kind("a node dies for good; another one takes its place, with an empty disk", "replacement"),
    "rack": Kind("several nodes die in one moment and boot again", "reboot", "rack"),
    "cluster": Kind("every node dies in one moment and boots again", "reboot", "cluster"),
}
MIX: Mapping[str, float] = {"worker": 46.0, "node": 36.0, "hang": 10.0, "gone": 4.0, "rack": 4.0}


@dataclass(frozen=True)
class Strike:
    """One failure: when, which kind, and which machines (numbers from 0) it hits.

    ``away_s``: how long those are away, where that is known of this very failure.
    """

    at_s: float
    kind: str
    nodes: Sequence[int]
    away_s: float | None = None


def parse_mix(text: str) -> dict[str, float]:
    """Read ``worker=50,node=30,hang=20``: kinds and how often each comes, beside the others.

    Raises:
        ConfigError: anything else.

    """
    found: dict[str, float] = {}
    for word in text.split(","):
        name, _, weight = (part.strip() for part in word.partition("="))
        if name not in KINDS:
            raise ConfigError(
                f"mix: there is no failure {name!r}: {', '.join(KINDS)}.{values.near(name, KINDS)}"
            )
        if name in found:
            raise ConfigError(f"mix: {name} is there twice.")
        if not weight.replace(".", "", 1).isdecimal():
            raise ConfigError(f"mix: {word.strip()!r}: write how often it comes, as {name}=30.")
        found[name] = float(weight)
    if not sum(found.values()) > 0:
        raise ConfigError(
            "mix: all of its numbers are 0, so nothing would ever fail. Give --mtbf-node never."
        )
    return found


def strikes(
    *, nodes: int, spares: int = 0, mtbf_node_s: float, mix: Mapping[str, float], rack_nodes: int, seed: str
) -> Iterator[Strike]:
    """Yield failures without end, by time: one every ``mtbf_node_s`` for each machine.

    One that hits several machines counts once, and spares make it no more frequent: a power cut does not come
    twice as often because more machines stand by. The same nodes meet the same failures, whatever the spares.

    Of machines that are away when they are hit the schedule knows nothing; whoever plays it lets that pass,
    and those that are up still fail at their rate.
    """
    machines = nodes + spares
    blocks = [range(nodes)]
    # Each twice as wide as the one before, with a chance of its own: one more spare changes nothing for
    # those before it.
    while blocks[-1].stop < machines:
        blocks.append(range(blocks[-1].stop, blocks[-1].stop + (1 << len(blocks) - 1)))

    def drawn(number: int, block: range) -> Iterator[Strike]:
        chance = random.Random(f"{seed} {number}" if number else seed)  # noqa: S311  no secret
        kinds, weights = list(mix), list(mix.values())
        at_s = 0.0
        while True:
            at_s += chance.expovariate(len(block) / mtbf_node_s)
            kind = chance.choices(kinds, weights)[0]
            machine = first = chance.choice(block)
            end = first + 1
            if KINDS[kind].several == "cluster":
                first, end = 0, machines
            elif KINDS[kind].several:
                first -= first % rack_nodes
                end = min(first + rack_nodes, machines)
            counts = machine < machines and (number == 0 or first >= nodes)
            yield Strike(at_s, kind, range(first, end) if counts else ())

    merged = heapq.merge(*itertools.starmap(drawn, enumerate(blocks)), key=lambda one: one.at_s)
    return (one for one in merged if one.nodes)
