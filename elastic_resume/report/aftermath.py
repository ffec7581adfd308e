"""What followed each fault: the incidents after it, before the next one that hit the same node. Pure.

Each incident follows from one fault at most; many faults have none. A fault that came when the failure had
been noticed did not cause it; what befell a node that no fault had hit is nobody's. Of several in one moment
the one that hit the very rank which ended is to blame, then one that can end something by itself.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from elastic_resume.policy.failures import NODE_LOST
from elastic_resume.policy.tally import JOB
from elastic_resume.report.incidents import Generation

SLACK_S = 0.1  # by which a node may tell of what befell it before its maker has done it
MOMENT_S = 1.0
SPOIL = frozenset({"torn-write", "bit-flip"})
"""Kinds of faults (`faults.kinds`) that hit a copy, which a later start sets aside: nothing ends of that."""
MILD = SPOIL | {
    *("slow-rank", "slow-link", "slow-disk", "packet-loss"),
    *("disk-full", "disk-error", "corrupt-message"),
}
"""Kinds that cost time at the most, as long as all is well: any other explains an end better."""


class Hit(NamedTuple):
    """When a fault came, and whom it hit; no node: all of them. ``what``: its kind."""

    t: float
    nodes: Sequence[str]
    rank: int | None = None
    what: str = ""


def of(faults: Sequence[Hit], rows: Sequence[Generation]) -> list[list[Generation]]:
    """For each fault the generations that ended of it."""
    order = sorted(range(len(faults)), key=lambda place: faults[place].t)
    ordered = [faults[place] for place in order]
    nodes = {row.end.node for row in rows}
    by_node: dict[str, list[int]] = defaultdict(list)  # places in that order
    for place, fault in enumerate(ordered):
        for node in set(fault.nodes) or nodes:
            by_node[node].append(place)
    found: list[list[Generation]] = [[] for _ in faults]
    for row, following in zip_longest(rows, rows[1:]):
        if not row.end.is_failure:
            continue
        same = by_node.get(row.end.node, []) if row.end.node else range(len(order))
        cause = _cause(row, same, ordered, following.began if following else math.inf)
        if cause is not None:
            found[order[cause]].append(row)
    return found


def _cause(row: Generation, same: Sequence[int], faults: Sequence[Hit], until: float) -> int | None:
    """Which of the faults at the places ``same`` ended it; None: none of them."""
    t = until if row.end.t is None else row.end.t

    def first_from(moment: float) -> int:
        return bisect.bisect_left(same, moment, key=lambda place: faults[place].t)

    def grave(places: Sequence[int]) -> Sequence[int]:
        there = set(row.nodes or ())
        apart = [place for place in places if there and there.isdisjoint(faults[place].nodes or there)]
        hit = [place for place in places if place not in apart] or places
        return [place for place in hit if faults[place].what not in MILD] or hit

    before = first_from(t + SLACK_S)
    since = same[first_from(t - SLACK_S) : first_from(math.nextafter(until, math.inf))]
    if row.end.kind in {NODE_LOST, JOB} and since:
        return grave(since)[0]  # it fell silent, and t is what it told last
    just = same[first_from(t - MOMENT_S) : before] or same[max(0, before - 1) : before]
    rank = row.end.rank
    its_own = [place for place in just if rank is not None and faults[place].rank == rank]
    return grave(its_own or just)[-1] if just else None
