"""What followed each fault: the incidents after it, before the next one that hit the same node. Pure.

Each incident follows from one fault at most, and where a fault has none, training went on. A fault that came
when the failure had been noticed did not cause it; what befell a node that no fault had hit is nobody's.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest

from elastic_resume.report.incidents import Generation

SLACK_S = 0.1  # by which a node may tell of what befell it before its maker has done it


def of(faults: Sequence[tuple[float, Sequence[str]]], rows: Sequence[Generation]) -> list[list[Generation]]:
    """For each fault the generations that ended of it. Faults are times and the names of nodes they hit."""
    order = sorted(range(len(faults)), key=lambda place: faults[place][0])
    times = [faults[place][0] for place in order]
    nodes = {row.end.node for row in rows}
    by_node: dict[str, list[int]] = defaultdict(list)  # places in that order
    for place, fault in enumerate(order):
        for node in set(faults[fault][1]) or nodes:
            by_node[node].append(place)
    found: list[list[Generation]] = [[] for _ in faults]
    for row, following in zip_longest(rows, rows[1:]):
        if not row.end.is_failure:
            continue
        same = by_node.get(row.end.node, []) if row.end.node else range(len(order))
        cause = _cause(row, same, times, following.began if following else math.inf)
        if cause is not None:
            found[order[cause]].append(row)
    return found


def _cause(row: Generation, same: Sequence[int], times: Sequence[float], until: float) -> int | None:
    """Which of the faults at the places ``same`` ended it; None: none of them."""
    t = until if row.end.t is None else row.end.t
    after = bisect.bisect_left(same, bisect.bisect_left(times, t - SLACK_S))
    if row.end.kind == "node" and after < len(same) and times[same[after]] <= until:
        return same[after]  # it fell silent, and t is what it told last
    before = bisect.bisect_left(same, bisect.bisect_right(times, t + SLACK_S))
    return same[before - 1] if before else None
