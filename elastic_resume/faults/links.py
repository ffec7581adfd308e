"""Links: which of them are silent, and what the kernel is told of those that lose packets or are narrow.

Pure: `hosts.Namespaces` has it carried out, on the bridge that joins the nodes. Packets are lost there,
as in a switch: a sender whose own machine dropped them would be told (EPERM). A packet is what the kernel
hands over at once, which for TCP is up to 64 kB.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from elastic_resume.errors import UsageError

Pair = tuple[int, int]  # of nodes: who sends, and to whom

_PARTS = 100_000  # chances are counted in these
_BURST_S = 0.02
_LEAST_BURST = 3200  # two packets of Ethernet
_QUEUE_MS = 400  # what waits for longer than that is dropped, as a router does


@dataclass
class Silence:
    """What silences links. Each of these ends for itself: a link works when none of them names it."""

    side: list[int]  # of a partition, by node
    cut: set[int] = field(default_factory=set)  # nodes
    links: set[Pair] = field(default_factory=set)
    held: list[frozenset[Pair]] = field(default_factory=list)  # by whoever lets go of it later

    def pairs(self) -> set[Pair]:
        """Between whom nothing arrives."""
        named = self.links.union(*self.held)
        return {
            (sender, receiver)
            for sender, receiver in itertools.permutations(range(len(self.side)), 2)
            if (sender, receiver) in named
            or self.cut.intersection((sender, receiver))
            or self.side[sender] != self.side[receiver]
        }


def sides(groups: Sequence[Collection[int]], nodes: int) -> list[int]:
    """In which of these groups each node is.

    Raises:
        UsageError: one is in none, or in two.

    """
    if sorted(itertools.chain(*groups)) != list(range(nodes)):
        raise UsageError(f"a partition of nodes 0 to {nodes - 1} names each once; got {groups}.")
    return [next(side for side, group in enumerate(groups) if node in group) for node in range(nodes)]


@dataclass(frozen=True)
class Loss:
    """Which share of the packets to and from a node is lost, 0 to 1."""

    to: float
    off: float


def filter_rules(losses: Mapping[str, Loss]) -> Iterator[str]:
    """What `nft` reads: these losses, by port of the bridge, in place of all former ones, in one moment."""
    yield "table bridge losses"  # so that there is one to delete
    yield "delete table bridge losses"
    yield "table bridge losses {"
    yield "chain forward {"
    yield "type filter hook forward priority 0;"
    for port, loss in losses.items():
        for side, share in (("oifname", loss.to), ("iifname", loss.off)):
            parts = round(share * _PARTS)
            if parts:
                yield f'{side} "{port}" numgen random mod {_PARTS} <= {parts - 1} drop'
    yield "}"
    yield "}"


def shape(device: str, bytes_per_s: float) -> str:
    """What `tc` reads: send no more than this; 0: as fast as it goes."""
    if not bytes_per_s:
        return f"qdisc replace dev {device} root noqueue"
    burst = max(_LEAST_BURST, round(bytes_per_s * _BURST_S))
    rate = f"rate {round(bytes_per_s * 8)}bit burst {burst}b latency {_QUEUE_MS}ms"
    return f"qdisc replace dev {device} root tbf {rate}"
