"""Decide one view after another by votes: who votes, what a quorum is, Paxos's acceptor and proposer.

The members of a view decide its successor by Paxos (Lamport, "Paxos made simple", 2001). The reconfiguration
is that of Lamport, Malkhi and Zhou, "Vertical Paxos and primary-backup replication", PODC 2009.
`docs/concepts/worlds.md` has the argument; the functions below name its rules. More than half of the members
are a quorum, and so is exactly half with the leader's vote. Nothing here uses time, links or settings. With
`View.is_strict` this module decides alone; `dead_leader` has what is added without it.

A ballot lasts over many slots, as in Multi-Paxos: a follower promises it once, on disk. Its vote in each slot
says that its workers have ended and what it has accepted there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

from elastic_resume.rendezvous.core.world import (
    Ballot,
    Incarnation,
    JobEnd,
    PersistentState,
    Proposal,
    ProposalAck,
    View,
    Vote,
)

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


class Acceptor:
    """One node as a voter, with what must be on its disk. Each change gives a new `version`."""

    def __init__(self, known: PersistentState, candidate_count: int) -> None:
        self.incarnation = known.incarnation
        self.candidate_count = candidate_count
        self.known = known
        """What is to be on disk."""
        self.version = 1  # a process counts its boot on disk before it sends anything
        self.durable_version = 0
        """The newest version that is on disk."""
        self.newest_ballot = self.known.promised
        """The greatest ballot known, of any node."""

    def _change(self, **fields: Any) -> None:
        self.known = replace(self.known, **fields)
        self.version += 1

    def handle_written(self, version: int) -> None:
        """Note that a version is on disk."""
        self.durable_version = max(self.durable_version, version)

    @property
    def is_durable(self) -> bool:
        """Whether all that this node knows is on disk."""
        return self.durable_version >= self.version

    @property
    def view(self) -> View:
        """The newest view that is known to be decided."""
        return self.known.view

    @property
    def electorate(self) -> Electorate:
        """Who decides the successor of the newest view."""
        return Electorate(self.view, self.candidate_count)

    @property
    def is_voter(self) -> bool:
        """Whether this node votes on the successor of the newest view."""
        return self.electorate.find_key(self.incarnation) is not None

    def adopt_view(self, view: View) -> None:
        """Learn that a view is decided; forget the votes on it."""
        generation = max(self.known.max_generation, view.generation)
        self.known = self.known.with_view(view)
        is_twin = self.known.is_twin and view.rank(self.incarnation) is None
        self._change(max_generation=generation, is_twin=is_twin)

    def promise(self, ballot: Ballot) -> None:
        """Accept no ballot before this one."""
        self.note_ballot(ballot)
        if ballot > self.known.promised:
            self._change(promised=ballot)

    def note_ballot(self, ballot: Ballot) -> None:
        """Note that a ballot is in use."""
        self.newest_ballot = max(self.newest_ballot, ballot)

    def accept(self, proposal: Proposal) -> None:
        """Accept a proposal of a ballot that is not before the promised one."""
        self.promise(proposal.ballot)
        self._change(accepted=proposal)

    def take_vote(self) -> None:
        """Take the vote of the view's leader, for good: see `dead_leader`."""
        self._change(has_taken=True)

    def hand_over(self, receiver: Incarnation) -> None:
        """Hand this node's vote to its leader, for good, before this node leaves.

        The vote of a restarted member may have been taken, so it stays.
        """
        view, known = self.view, self.known
        is_member = view.rank(self.incarnation) is not None or (view.is_strict and self.is_voter)
        if view.members and is_member and not known.handed_to and view.find_disk(receiver.disk_id):
            self._change(handed_to=receiver.disk_id)

    def take_over(self, giver: Incarnation, vote: Vote) -> None:
        """Take over a vote of this node's ballot that was handed to it, and what the giver has accepted."""
        known = self.known
        proposals = [proposal for proposal in (known.accepted, vote.accepted) if proposal]
        newest = max(proposals, key=lambda proposal: proposal.ballot, default=None)
        held = known.held | vote.held | {giver.disk_id}
        self._change(held=held, accepted=newest, has_taken=known.has_taken or vote.has_taken)

    def make_vote(self) -> Vote:
        """Return this node's vote for the ballot that it promised."""
        known = self.known
        return Vote(
            known.view.generation,
            known.promised,
            known.accepted,
            known.has_taken,
            known.held,
            known.handed_to,
        )

    def record_generation(self, generation: int) -> None:
        """Note that a generation is in use."""
        if generation > self.known.max_generation:
            self._change(max_generation=generation)

    def note_twin(self) -> None:
        """Note that another machine of this node's name is alive."""
        if not self.known.is_twin:
            self._change(is_twin=True)


class Proposer:
    """Decides one slot after another in ballots of this node."""

    def __init__(self, acceptor: Acceptor) -> None:
        self.acceptor = acceptor
        self.cast: dict[str, tuple[Incarnation, Vote]] = {}
        """The votes of this ballot and slot, by the voter's key."""
        self.accepts: set[str] = set()
        """The voters that have accepted the proposal."""
        self.proposal: Proposal | None = None
        """One for each ballot and slot. It is sent when this node has accepted it on disk."""
        self.is_repeated = False
        """The proposal is an earlier one that may have been decided."""
        self.ballot = Ballot()
        self.slot = 0
        """The generation of the view whose successor is voted on."""
        self.start_ballot()

    def start_ballot(self) -> None:
        """Begin a ballot greater than all known ones. All voters have to vote again."""
        acceptor = self.acceptor
        number = acceptor.newest_ballot.number + 1  # the promised ballot is not newer
        self.ballot = Ballot(number, acceptor.incarnation.disk_id, acceptor.incarnation.boot)
        acceptor.promise(self.ballot)
        self.clear()

    def clear(self) -> None:
        """Forget the votes, for a new ballot or slot."""
        self.slot = self.acceptor.view.generation
        self.cast.clear()
        self.accepts.clear()
        self.proposal = None
        self.is_repeated = False

    def _is_current(self, answer: Vote | ProposalAck) -> bool:
        return (answer.generation, answer.ballot) == (self.acceptor.view.generation, self.ballot)

    def add_vote(self, voter: Incarnation, vote: Vote) -> None:
        """Count a vote of this ballot and slot."""
        key = self.acceptor.electorate.find_key(voter)
        if key and self._is_current(vote) and key not in self.accepts:  # the vote accepted with stays
            self.cast[key] = voter, vote

    def take_over(self, giver: Incarnation, vote: Vote, quorum: CastVotes | None) -> bool:
        """Take over a vote that a node hands to this one as it leaves; return whether it is new.

        `quorum` has the votes of this ballot if they suffice, else None. If they allow this node to propose
        any view, no earlier proposal can be decided any more, and what the giver has accepted is left behind.
        This node would repeat it otherwise, as if all that have left had accepted it: a view with the giver.
        """
        acceptor = self.acceptor
        if (
            not self._is_current(vote)
            or acceptor.known.promised != self.ballot
            or vote.handed_to != acceptor.incarnation.disk_id
            or acceptor.known.handed_to
            or not (acceptor.view.members and acceptor.is_voter)
        ):
            return False
        if self.proposal is None and quorum is not None and self.find_proposal_to_repeat(quorum) is None:
            vote = replace(vote, accepted=None)
        acceptor.take_over(giver, vote)
        return True

    def add_accept(self, voter: Incarnation, message: ProposalAck) -> bool:
        """Count an accepted proposal; return whether the message is about this ballot and slot."""
        if not self._is_current(message):
            return False
        key = self.acceptor.electorate.find_key(voter)
        if key and message.is_accepted:
            self.accepts.add(key)
        return True

    def add_own(self) -> bool:
        """Add this node's vote and acceptance, once they are durable; return whether the vote is new."""
        acceptor = self.acceptor
        key = acceptor.electorate.find_key(acceptor.incarnation)
        if key is None or not acceptor.is_durable or acceptor.known.promised != self.ballot:
            return False
        vote, before = (acceptor.incarnation, acceptor.make_vote()), self.cast.get(key)
        self.cast[key] = vote
        if self.proposal and acceptor.known.accepted == self.proposal:
            self.accepts.add(key)
        return vote != before

    def remove(self, voter: Incarnation) -> None:
        """Forget the vote of a lost node: its next process may report more, unless it has accepted here."""
        key = self.acceptor.electorate.find_key(voter)
        if key and key in self.cast and self.cast[key][0] == voter and key not in self.accepts:
            del self.cast[key]

    def get_accepted(self) -> CastVotes:
        """Return the votes of those that have accepted the proposal."""
        return {key: self.cast[key] for key in self.accepts if key in self.cast}

    def find_proposal_to_repeat(self, votes: CastVotes) -> Proposal | None:
        """Return the proposal of an earlier ballot that has to be proposed again, if there is one."""
        accepted = {key: vote.accepted for key, (_, vote) in votes.items()}
        return find_proposal_to_repeat(self.acceptor.electorate, accepted)

    def propose(self, view: View, end: JobEnd | None, *, is_repeated: bool = False) -> None:
        """Propose a value in this ballot, once."""
        self.proposal, self.is_repeated = Proposal(self.ballot, view, end), is_repeated
        self.acceptor.accept(self.proposal)
