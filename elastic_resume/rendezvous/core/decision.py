"""Run the proposer's side of Paxos: collect votes, propose one value per ballot and slot, count acceptances.

A ballot lasts over many slots, as in Multi-Paxos: a follower promises it once, on disk. Its vote in each slot
says that its workers have ended and what it has accepted there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet

from elastic_resume.rendezvous.core import messages
from elastic_resume.rendezvous.core.peers import PeerTable
from elastic_resume.rendezvous.core.quorum import (
    CastVotes,
    breaks_tie,
    find_counted,
    find_proposal_to_repeat,
    find_replacing_quorum,
)
from elastic_resume.rendezvous.core.state import NodeState
from elastic_resume.rendezvous.core.world import Ballot, Incarnation, JobEnd, Proposal, View, Vote


class Decision:
    """Decides one slot after another in ballots of this node."""

    def __init__(self, state: NodeState, peers: PeerTable) -> None:
        self.state = state
        self.peers = peers
        self.cast: dict[str, tuple[Incarnation, Vote]] = {}
        """The votes of this ballot and slot, by the voter's key."""
        self.accepts: set[str] = set()
        """The voters that have accepted the proposal."""
        self.proposal: Proposal | None = None
        self.sent: messages.Propose | None = None
        """The proposal as the followers have it. It is on this node's disk before."""
        self.is_repeated = False
        """The proposal is an earlier one that may have been decided."""
        self.ballot = Ballot()
        self.slot = 0
        """The generation of the view whose successor is voted on."""
        self.slot_since = state.now
        self.start_ballot()

    def start_ballot(self) -> None:
        """Begin a ballot greater than all known ones. All voters have to vote again."""
        state = self.state
        number = state.voter.newest_ballot.number + 1  # the promised ballot is not newer
        self.ballot = Ballot(number, state.incarnation.disk_id, state.incarnation.boot)
        state.voter.promise(self.ballot)
        self.clear()

    def clear(self) -> None:
        """Forget the votes, for a new ballot or slot."""
        if self.slot != self.state.view.generation:
            self.slot, self.slot_since = self.state.view.generation, self.state.now
        self.cast.clear()
        self.accepts.clear()
        self.proposal = self.sent = None
        self.is_repeated = False

    @property
    def request(self) -> messages.RequestVote:
        """What to ask of each voter."""
        view = self.state.view
        return messages.RequestVote(view.generation, self.ballot, self._cannot_take(view.heir))

    def _cannot_take(self, heir: Incarnation | None) -> bool:
        """Return whether the heir takes no vote any more: it has ended, or followed this node in this slot.

        It has acknowledged a message that was sent after the view. An earlier follower may have left, and may
        have learned of the view from another leader.
        """
        if heir in self.state.voter.ended:
            return True
        peer = self.peers.by_incarnation.get(heir) if heir else None
        return peer is not None and peer.link.acked_sent_at > self.slot_since

    def add_vote(self, voter: Incarnation, vote: Vote) -> None:
        """Count a vote of this ballot and slot."""
        key = self.state.voter.electorate.find_key(voter)
        is_current = (vote.generation, vote.ballot) == (self.state.view.generation, self.ballot)
        if key and is_current and key not in self.accepts:  # the vote that was accepted with stays
            self.cast[key] = voter, vote

    def take_over(self, giver: Incarnation, vote: Vote) -> bool:
        """Take over a vote that a node hands to this one as it leaves; return whether it is new."""
        voter, state = self.state.voter, self.state
        is_current = (vote.generation, vote.ballot) == (state.view.generation, self.ballot)
        if (
            not is_current
            or voter.known.promised != self.ballot
            or vote.handed_to != state.incarnation.disk_id
            or voter.known.handed_to
            or state.is_leaving
            or not (state.view.members and voter.is_voter)
        ):
            return False
        voter.take_over(giver, vote)
        return True

    def add_accept(self, voter: Incarnation, message: messages.ProposalAck) -> bool:
        """Count an accepted proposal; return whether the message is about this ballot and slot."""
        if (message.generation, message.ballot) != (self.state.view.generation, self.ballot):
            return False
        key = self.state.voter.electorate.find_key(voter)
        if key and message.is_accepted:
            self.accepts.add(key)
        return True

    def add_own(self, request: messages.RequestVote) -> bool:
        """Add this node's vote and acceptance, once they are durable; return whether the vote is new."""
        state = self.state
        key = state.voter.electorate.find_key(state.incarnation)
        if (
            key is None
            or not state.voter.is_durable
            or state.voter.known.promised != self.ballot
            or not state.status.has_stopped
        ):
            return False
        if not state.voter.may_vote_for(state.incarnation, request):
            return False
        state.voter.note_leader(state.incarnation)
        vote, before = (state.incarnation, state.voter.make_vote()), self.cast.get(key)
        self.cast[key] = vote
        if self.proposal and state.voter.known.accepted == self.proposal:
            self.accepts.add(key)
        return vote != before

    def remove(self, voter: Incarnation) -> None:
        """Forget the vote of a lost node: its next process may report more, unless it has accepted here."""
        key = self.state.voter.electorate.find_key(voter)
        if key and key in self.cast and self.cast[key][0] == voter and key not in self.accepts:
            del self.cast[key]

    def find_counted(self, keys: AbstractSet[str]) -> CastVotes:
        """Return the votes that count if these voters have cast theirs."""
        return find_counted({key: self.cast[key] for key in keys if key in self.cast})

    def find_quorum(
        self, keys: AbstractSet[str], list_replaced_nodes: Callable[[], AbstractSet[str]]
    ) -> Mapping[str, Vote] | None:
        """Return the votes of these voters that count; None if they do not suffice.

        `list_replaced_nodes` returns the members that are back with an empty disk.
        """
        state, electorate = self.state, self.state.voter.electorate
        counted = self.find_counted(keys)
        is_enough = electorate.has_quorum(counted.keys())
        if not state.view.is_strict and state.view.members:
            surplus = electorate.compare_with_half(len(counted))
            is_free = state.voter.is_free_of_heir
            is_enough = surplus > 0 or (
                surplus == 0 and breaks_tie(state.view, state.incarnation, counted, is_free_of_heir=is_free)
            )
            if not is_enough:
                cast = {key: self.cast[key] for key in keys if key in self.cast}
                replacing = find_replacing_quorum(electorate, cast, list_replaced_nodes())
                counted, is_enough = replacing or counted, replacing is not None
        return {key: vote for key, (_, vote) in counted.items()} if is_enough else None

    def find_proposal_to_repeat(self, votes: Mapping[str, Vote]) -> Proposal | None:
        """Return the proposal of an earlier ballot that has to be proposed again, if there is one."""
        accepted = {key: vote.accepted for key, vote in votes.items()}
        return find_proposal_to_repeat(self.state.voter.electorate, accepted)

    def propose(self, view: View, end: JobEnd | None, *, is_repeated: bool = False) -> None:
        """Propose a value in this ballot, once; it is sent when this node has accepted it on disk."""
        self.proposal, self.is_repeated = Proposal(self.ballot, view, end), is_repeated
        self.state.voter.accept(self.proposal)

    def finish_slot(self) -> Proposal:
        """Return the decided proposal, and go on to the next slot."""
        proposal = self.proposal
        if proposal is None:
            raise RuntimeError("nothing was proposed")
        self.state.adopt_view(proposal.view, proposal.view.leader)
        self.clear()
        return proposal
