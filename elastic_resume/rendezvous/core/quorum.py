"""Decide which votes are a quorum: the rule by which a view decides its successor.

The members of a view decide its successor by Paxos (Lamport, "Paxos made simple", 2001). The reconfiguration
is that of Lamport, Malkhi and Zhou, "Vertical Paxos and primary-backup replication", PODC 2009.
`docs/concepts/worlds.md` has the argument; the functions below name its rules. Nothing here uses time,
messages or links.

More than half of the members are a quorum. Exactly half are one with the leader's vote. The *exception*
(`breaks_tie`) says where that vote is when the leader has died. Without it, the second of two nodes could not
continue. It relies on clocks and on refused connections; no other part of the argument does.
`View.is_strict` switches it off: the rule belongs to the view, as its members do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from elastic_resume.rendezvous.core.world import Incarnation, Proposal, View, Vote

CastVotes = Mapping[str, tuple[Incarnation, Vote]]
"""By the voter's key: the process that voted, and its vote."""


@dataclass(frozen=True, slots=True)
class Electorate:
    """Who decides the successor of a view: its members, or the candidates if it has none.

    A voter is known by its key: its disk's id, or its place among the candidates.
    """

    view: View
    candidate_count: int

    def find_key(self, incarnation: Incarnation) -> str | None:
        """Return the key of a node that may vote, or None."""
        if self.view.members:
            return incarnation.disk_id if self.view.find_disk(incarnation.disk_id) else None
        index = incarnation.candidate_index
        return None if index is None or index >= self.candidate_count else f"candidate {index}"

    def count(self, nodes: Iterable[Incarnation]) -> int:
        """Return how many voters are among these nodes."""
        if self.view.members:
            return len(self.view.disks & {node.disk_id for node in nodes})
        return len({self.find_key(node) for node in nodes} - {None})

    @property
    def size(self) -> int:
        """How many voters there are."""
        return len(self.view.members) or self.candidate_count

    def compare_with_half(self, votes: int) -> int:
        """Return a positive number if so many votes are more than half, 0 if they are exactly half."""
        return 2 * votes - self.size

    def has_quorum(self, voters: AbstractSet[str]) -> bool:
        """Return whether these keys are a quorum without the exception. Any two quorums share a voter."""
        surplus, leader = self.compare_with_half(len(voters)), self.view.leader
        return surplus > 0 or (surplus == 0 and leader is not None and leader.disk_id in voters)


def find_counted(cast: CastVotes, lost_disks: AbstractSet[str] = frozenset()) -> CastVotes:
    """Return the votes that count: a vote that was handed over counts with its holder's.

    The vote of a node that has handed it over is its own again where the holder votes without it: then the
    holder has promised a later ballot, and takes it over no more. So it is for rule 7 if the holder's disk is
    among `lost_disks`, and no other voter has got it from there.
    """
    held = {key for _, vote in cast.values() for key in vote.held}
    counted = {
        key: (voter, vote)
        for key, (voter, vote) in cast.items()
        if not vote.handed_to
        or (vote.handed_to in cast and key not in cast[vote.handed_to][1].held)
        or (vote.handed_to in lost_disks - cast.keys() and key not in held)
    }
    return {key: entry for entry in counted.values() for key in entry[1].held} | counted


def may_take(view: View, taker: Incarnation, dead: Incarnation) -> bool:
    """Return whether it is the part of `taker` in this view to take the vote of `dead` (rule 2)."""
    return dead == view.leader and taker == view.heir


def may_vote(view: View, voter: Incarnation, proposer: Incarnation, *, is_free_of_heir: bool) -> bool:
    """Return whether `voter` may vote in a ballot of `proposer` (rule 5)."""
    is_leader = voter == view.leader and view.heir is not None
    return not is_leader or proposer in {voter, view.heir} or is_free_of_heir


def breaks_tie(view: View, proposer: Incarnation, counted: CastVotes, *, is_free_of_heir: bool) -> bool:
    """Return whether exactly half of the members are a quorum in a ballot of `proposer` (rules 1, 4 and 6).

    `is_free_of_heir` tells a proposer that leads the view whether its heir cannot take its vote any more.
    """
    leader, heir = view.leader, view.heir
    heirs = counted.get(heir.disk_id) if heir else None
    if heirs and heirs[1].has_taken:
        return True
    if leader is None or leader.disk_id not in counted:
        return False
    if heirs or heir is None:
        return True
    return counted[leader.disk_id][0] == leader and (proposer != leader or is_free_of_heir)


def find_replacing_quorum(
    electorate: Electorate, cast: CastVotes, replaced_nodes: AbstractSet[str]
) -> CastVotes | None:
    """Return the votes that count if all other members are back with empty disks; None if not (rule 7).

    Then these votes are a quorum, however few they are. A vote that was handed to a lost disk is its giver's
    again: all members are here or lost, so no other disk holds it.
    """
    view = electorate.view
    lost_disks = {member.disk_id for member in view.members if member.node in replaced_nodes}
    counted = find_counted(cast, lost_disks)
    keys = set(counted)
    if view.heir and view.heir.disk_id in counted and counted[view.heir.disk_id][1].has_taken and view.leader:
        keys.add(view.leader.disk_id)
    is_enough = (
        bool(counted and replaced_nodes)
        and all(member.disk_id in keys or member.node in replaced_nodes for member in view.members)
        and electorate.compare_with_half(len(counted) + len(replaced_nodes)) >= 0
    )
    return counted if is_enough else None


def find_proposal_to_repeat(
    electorate: Electorate, accepted: Mapping[str, Proposal | None]
) -> Proposal | None:
    """Return the proposal that has to be proposed again, because it may be decided; None if there is none.

    `accepted` has what voters have accepted. Only the proposal of the greatest ballot may be decided. It is
    not if those that report another or none leave less than half for it: with the exception, half may do.
    """
    proposals = [proposal for proposal in accepted.values() if proposal]
    if not proposals:
        return None
    newest = max(proposals, key=lambda proposal: proposal.ballot)
    others = sum(
        proposal is None or (proposal.view, proposal.end) != (newest.view, newest.end)
        for proposal in accepted.values()
    )
    return newest if electorate.compare_with_half(electorate.size - others) >= 0 else None
