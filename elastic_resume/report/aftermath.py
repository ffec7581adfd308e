"""What followed each fault: the incidents after it, before the next one that hit the same node. Pure.

An incident of a node that no fault has hit is the last fault's, whomever that hit. So each incident follows
from one fault at most, and where a fault has none, training went on.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest

from elastic_resume.report.incidents import Generation


def of(faults: Sequence[tuple[float, Sequence[str]]], rows: Sequence[Generation]) -> list[list[Generation]]:
    """For each fault the generations that ended of it. Faults are times and the names of nodes they hit."""
    order = sorted(range(len(faults)), key=lambda place: faults[place][0])
    times = [faults[place][0] for place in order]
    by_node: dict[str, list[int]] = defaultdict(list)  # places in that order
    for place, fault in enumerate(order):
        for node in set(faults[fault][1]):
            by_node[node].append(place)
    found: list[list[Generation]] = [[] for _ in faults]
    for row, following in zip_longest(rows, rows[1:]):
        before = bisect.bisect_right(times, following.began if following else math.inf)
        if not row.end.is_failure or not before:
            continue
        same = by_node.get(row.end.node, [])
        hit = bisect.bisect_left(same, before)
        found[order[same[hit - 1] if hit else before - 1]].append(row)
    return found
