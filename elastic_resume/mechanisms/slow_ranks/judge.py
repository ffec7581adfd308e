"""Find the rank for which all others wait, from the own times of a view's ranks (`own_time`)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from elastic_resume.mechanisms.mechanism import decode_body, encode_body
from elastic_resume.rendezvous.facts import Fact, Judge, Judgment, Scope, Topic

SLOW_FACTOR = 1.3
END_FACTOR = 1.15  # lower, so that a rank near the limit is not named again and again
MIN_EXCESS_US = 5_000  # a machine with more work than cores delays one rank by up to 4 ms
MIN_COMPARISONS = 3


@dataclass(frozen=True, slots=True)
class OwnTimes:
    """The median own time of each local rank of one node in microseconds; 0 if it is unknown."""

    times_us: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank that is slower than the others. It is named after `MIN_COMPARISONS` in a row."""

    node: str
    local_rank: int
    own_us: int
    """The median of its own times."""
    others_us: int
    """The median of the other ranks' medians."""
    comparisons: int = 1

    @property
    def is_named(self) -> bool:
        """Whether it has been slower for long enough."""
        return self.comparisons >= MIN_COMPARISONS


class SlowRankJudge(Judge):
    """Compares the own times of a view's ranks whenever all nodes have sent new ones: once a second."""

    def __init__(self, scope: Scope) -> None:
        self._members = scope.members
        self._own_times_us: dict[str, tuple[int, ...]] = {}
        self._last: SlowRank | None = None

    def add(self, node: str, fact: Fact, now: float) -> None:
        """Keep the newest own times of a node."""
        del now
        self._own_times_us[node] = decode_body(OwnTimes, fact.body).times_us

    def judge(self, now: float) -> Judgment:
        """Return the slow rank once it is named."""
        del now
        if len(self._own_times_us) == len(self._members):
            self._last = find_slow_rank(self._own_times_us, self._last)
            self._own_times_us = {}
        return Judgment(encode_body(self._last)) if self._last and self._last.is_named else Judgment()


OWN_TIMES = Topic("own-times", SlowRankJudge)


def find_slow_rank(own_times_us: Mapping[str, tuple[int, ...]], last: SlowRank | None) -> SlowRank | None:
    """Compare the ranks of all nodes; ``last`` is the result of the view's comparison before.

    ``own_times_us`` has each node's medians by local rank, 0 for an unknown one; if one is unknown, the
    result is None. A named rank stays named while it is slow, though another one may be slower.
    """
    ranks = {
        (node, local_rank): own_us
        for node, times_us in own_times_us.items()
        for local_rank, own_us in enumerate(times_us)
    }
    if len(ranks) < 2 or not all(ranks.values()):
        return None
    key, factor = max(ranks, key=lambda rank: ranks[rank]), SLOW_FACTOR
    if last is not None and last.is_named and (last.node, last.local_rank) in ranks:
        key, factor = (last.node, last.local_rank), END_FACTOR
    own_us = ranks.pop(key)
    others_us = int(statistics.median(ranks.values()))
    if own_us < factor * others_us or own_us - others_us < MIN_EXCESS_US:
        return None
    is_same = last is not None and (last.node, last.local_rank) == key
    comparisons = last.comparisons + 1 if last is not None and is_same else 1
    return SlowRank(*key, own_us, others_us, min(comparisons, MIN_COMPARISONS))
