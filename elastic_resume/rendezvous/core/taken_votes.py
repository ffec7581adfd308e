"""Decide when a dead follower's vote passes to its leader, or a dead leader's vote to its heir.

This is the one exception to the rule that each voter casts its own vote. Without it, the second of two nodes
could not continue when the process of the first is killed. It relies on clocks and on refused connections; no
other part of the rendezvous does. `is_strict` switches it off.

`docs/concepts/worlds.md` has the exception's seven rules, the argument, and what they trust; the functions
below name their rules. A taken vote equals its taker's, in every ballot and also after a restart (rule 3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet

from elastic_resume.rendezvous.core.world import Incarnation, View, Vote


def may_take(view: View, taker: Incarnation, dead: Incarnation) -> bool:
    """Return whether it is the part of `taker` in this view to take the vote of `dead` (rules 1 and 2)."""
    if taker == dead or view.rank(taker) is None or view.rank(dead) is None:
        return False
    return taker == view.leader or (taker == view.heir and dead == view.leader)


def may_vote(
    view: View, voter: Incarnation, proposer: Incarnation, *, is_free_of: Callable[[Incarnation], bool]
) -> bool:
    """Return whether `voter` may vote in a ballot of `proposer` (rule 5).

    `is_free_of` tells whether a process cannot take the voter's vote any more.
    """
    taker = view.heir if voter == view.leader else view.leader
    if taker is None or view.rank(voter) is None or proposer == taker:
        return True
    return (voter == proposer == view.leader) or is_free_of(taker)


def find_restarted(
    view: View,
    cast: Mapping[str, tuple[Incarnation, Vote]],
    replaced_nodes: AbstractSet[str] = frozenset(),
) -> set[str]:
    """Return the members that have restarted and whose votes surely nobody has taken, nor will (rule 6).

    `cast` has the votes that arrived, by disk, with the processes that sent them.
    """
    restarted = set()
    for disk_id, (voter, _) in cast.items():
        member = view.find_disk(disk_id)
        if member is None or voter == member:
            continue
        taker = view.heir if member == view.leader else view.leader
        has_not_taken = taker and taker.disk_id in cast and disk_id not in cast[taker.disk_id][1].taken
        if taker is None or has_not_taken or taker.node in replaced_nodes:
            restarted.add(disk_id)
    return restarted


def find_counted(
    view: View,
    proposer: Incarnation,
    cast: Mapping[str, tuple[Incarnation, Vote]],
    restarted: AbstractSet[str],
    *,
    is_free_of_heir: bool,
) -> dict[str, Vote]:
    """Return the votes that count in a ballot of `proposer`, by disk (rules 3 and 4).

    `cast` is that of `find_restarted`, and `restarted` its result when the proposer had made no proposal yet.
    """
    counted = {
        disk_id: vote
        for disk_id, (voter, vote) in cast.items()
        if disk_id in restarted or voter == view.find_disk(disk_id)
    }
    own, heir = counted.get(proposer.disk_id), view.heir
    heir_may_take = heir is not None and proposer == view.leader and not is_free_of_heir
    if own and heir and heir_may_take and heir.disk_id not in counted.keys() | own.taken:
        del counted[proposer.disk_id]
    return counted | {taken: vote for vote in counted.values() for taken in vote.taken}


def are_others_replaced(view: View, counted: AbstractSet[str], replaced_nodes: AbstractSet[str]) -> bool:
    """Return whether each member's vote counts, or its node is back with an empty disk (rule 7).

    Then these votes are a quorum, however few they are.
    """
    return bool(counted and view.members) and all(
        member.disk_id in counted or member.node in replaced_nodes for member in view.members
    )
