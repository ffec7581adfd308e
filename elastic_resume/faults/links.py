"""Links that lose packets or are narrow: what is told to the kernel's packet filter and traffic control.

Pure text: `hosts.Namespaces` has it carried out, on the bridge that joins the nodes. Packets are lost there,
as in a switch: a sender whose own machine dropped them would be told (EPERM). A packet is what the kernel
hands over at once, which for TCP is up to 64 kB.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_PARTS = 100_000  # chances are counted in these
_BURST_S = 0.02
_LEAST_BURST = 3200  # two packets of Ethernet
_QUEUE_MS = 400  # what waits for longer than that is dropped, as a router does


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
