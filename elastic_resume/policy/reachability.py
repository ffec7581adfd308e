"""Choose which nodes a view leaves out, because not all that reach the leader reach each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


def choose_left_out(
    members: Sequence[str], newcomers: Sequence[str], pairs: Iterable[frozenset[str]]
) -> dict[str, list[str]]:
    """Return the nodes to leave out, each with those that it cannot reach; nodes are in rank order.

    `pairs` names nodes that cannot reach each other. First leave out, again and again, the member of the last
    view that is in the most pairs (on a tie, that of the highest rank), until no pair is left. Then leave out
    each newcomer that has a pair with a chosen node: it must not cost a member its place, or newcomers would
    end one view after the other. Without members the newcomers are treated like members. A pair with any
    other name does not count.
    """
    if not members:
        members, newcomers = newcomers, ()
    known = set(pairs)
    left_out = _leave_out_worst(members, known)
    chosen = [member for member in members if member not in left_out]
    for newcomer in newcomers:
        others = [node for node in chosen if frozenset((newcomer, node)) in known]
        if others:
            left_out[newcomer] = others
        else:
            chosen.append(newcomer)
    return left_out


def _leave_out_worst(nodes: Sequence[str], pairs: set[frozenset[str]]) -> dict[str, list[str]]:
    rank = {node: place for place, node in enumerate(nodes)}
    open_pairs = {pair for pair in pairs if len(pair) == 2 and pair <= rank.keys()}
    left_out: dict[str, list[str]] = {}
    while open_pairs:
        counts = Counter(node for pair in open_pairs for node in pair)
        worst = max(counts, key=lambda node: (counts[node], rank[node]))
        cut = {pair for pair in open_pairs if worst in pair}
        others = {node for pair in cut for node in pair if node != worst}
        left_out[worst] = sorted(others, key=rank.__getitem__)
        open_pairs -= cut
    return left_out
