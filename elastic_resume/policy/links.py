"""Whose link is slow: how long all nodes' heartbeats take to the leader and back in, slow links out. Pure.

A link is slow when they take `TIMES` as long as those of most nodes, and `LEAST_S` longer, in `LOOKS` looks
one after the other. That is also how lost packets show: TCP sends each again after a fifth of a second.

The leader's own link is every node's, so nobody is named for it, nor in a world of two. Does not know why.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

TIMES = 5.0
LEAST_S = 0.1
"""Below that it is a machine that has more to do than processors, or an acknowledgement that was put off."""
LOOKS = 4
"""A second each. It is over after as many."""


@dataclass(frozen=True, slots=True)
class SlowLink:
    """A node whose heartbeats take longer than others', or did; ``round_s`` is the longest since then."""

    node: str
    round_s: float
    others_s: float
    is_over: bool = False


class Links:
    """The slow links of a job, as far as who leads hears of it."""

    def __init__(self) -> None:
        self._generation = 0
        self._looks: dict[str, int] = {}  # in a row that differ from what is told
        self._slow: dict[str, SlowLink] = {}

    @property
    def slow(self) -> list[SlowLink]:
        """Those that are slow now, by node."""
        return [one for _, one in sorted(self._slow.items())]

    def take(self, generation: int, rounds_s: Mapping[str, float]) -> list[SlowLink]:
        """Take in what heartbeats take all nodes that tell; give what has become slow, or is so no more.

        A node that tells nothing for as long is slow no more. In a new generation, whose workers start, those
        that are not told begin anew.
        """
        if generation != self._generation:
            self._generation = generation
            self._looks.clear()
        usual_s = statistics.median_low(rounds_s.values()) if rounds_s else 0.0
        told = self._looks.keys() | self._slow.keys() | rounds_s.keys()
        news = [self._look(node, rounds_s.get(node, 0.0), usual_s) for node in sorted(told)]
        return [one for one in news if one is not None]

    def _look(self, node: str, round_s: float, usual_s: float) -> SlowLink | None:
        was = self._slow.get(node)
        is_slow = round_s >= TIMES * usual_s and round_s - usual_s >= LEAST_S
        looks = self._looks.get(node, 0) + 1
        if is_slow == (was is not None):
            self._looks.pop(node, None)
            if was is not None and round_s > was.round_s:
                self._slow[node] = SlowLink(node, round_s, usual_s)
            return None
        if looks < LOOKS:
            self._looks[node] = looks
            return None
        self._looks.pop(node, None)
        if was is not None:
            return replace(self._slow.pop(node), is_over=True)
        self._slow[node] = found = SlowLink(node, round_s, usual_s)
        return found


def describe(node: str, round_s: float, others_s: float) -> str:
    """Say it in words; without ``node`` where that stands beside it."""
    whose = f"the link of {node}" if node else "its link"
    return (
        f"{whose} is slow: a heartbeat takes {round_s:.2g} s to the leader and back, others' {others_s:.2g} s"
    )
