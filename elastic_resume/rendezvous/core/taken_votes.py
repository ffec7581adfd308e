"""The one exception of the rule: a dead follower's vote belongs to its leader, a dead leader's to its heir.

Without it, the second of two nodes could not continue when the process of the first is killed. It rests on
clocks and on refused calls, and nothing else in the rendezvous does. `Settings.is_strict` switches it off.
`docs/concepts/worlds.md` has the argument and what it trusts. In the slot of a view's successor:

1. The leader of the view takes the vote of a member that died while the leader's link to it was alive. Its
   heir, the lowest ranked other member, takes the leader's vote in the same way. Neither does so any more
   once it has followed, or voted for, another than that leader. See `may_take`.
2. A taken vote is durable before it is used. From then on the taker's vote counts for both, in every ballot
   and also after a restart. So the dead may have accepted only what the taker has accepted: a leader's
   acceptance is durable before it proposes, and the leader's own vote follows rule 3.
3. The leader's own vote counts in its ballots only together with the heir's, or when the heir cannot take it
   any more. See `find_counted`.
4. A member votes in another's ballot only when its leader cannot take its vote any more; the leader, when its
   heir cannot. See `may_vote`.
5. The vote of a member that has restarted counts if whoever may have taken it votes too and did not take it.
   See `find_restarted`.
6. A node that returns with an empty disk replaces the member of its name. If the votes of all others count,
   the view has a quorum, how few they may be. See `are_others_replaced`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet

from elastic_resume.rendezvous.core.world import Incarnation, View, Vote


def may_take(view: View, taker: Incarnation, dead: Incarnation) -> bool:
    """Return whether it is the part of `taker` in this view to take the vote of `dead`."""
    if taker == dead or view.rank(taker) is None or view.rank(dead) is None:
        return False
    return taker == view.leader or (taker == view.heir and dead == view.leader)


def may_vote(
    view: View, voter: Incarnation, proposer: Incarnation, *, is_free_of: Callable[[Incarnation], bool]
) -> bool:
    """Return whether `voter` may vote in a ballot of `proposer`.

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
    """Return the members that have restarted and whose votes surely nobody has taken, nor will.

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
    """Return the votes that count in a ballot of `proposer`, by disk. A taken vote equals its taker's.

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
    """Return whether each member's vote counts, or its node is back with an empty disk."""
    return bool(counted and view.members) and all(
        member.disk_id in counted or member.node in replaced_nodes for member in view.members
    )
