"""Run the proposer's side of Paxos: collect votes, propose one value per ballot and slot, count acceptances.

A ballot lasts over many slots, as in Multi-Paxos: a follower promises it once, on disk. Its vote in each slot
says that its workers have ended and what it has accepted there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet

from elastic_resume.rendezvous.core import messages, taken_votes
from elastic_resume.rendezvous.core.peers import PeerTable
from elastic_resume.rendezvous.core.state import NodeState
from elastic_resume.rendezvous.core.world import (
    Ballot,
    Incarnation,
    JobEnd,
    Proposal,
    View,
    Vote,
    find_proposal_to_repeat,
)


class Decision:
    """Decides one slot after another in ballots of this node."""

    def __init__(self, state: NodeState, peers: PeerTable) -> None:
        self.state = state
        self.peers = peers
        self.cast: dict[str, tuple[Incarnation, Vote]] = {}
        """The votes of this ballot and slot, by the voter's key."""
        self.taken: frozenset[str] = frozenset()
        """The disks whose votes these voters have taken."""
        self.accepts: set[str] = set()
        """The voters that have accepted the proposal."""
        self.proposal: Proposal | None = None
        self.sent: messages.Propose | None = None
        """The proposal as the followers have it. It is on this node's disk before."""
        self.restarted: set[str] | None = None
        """The restarted voters that counted when the proposal was made: see `taken_votes`.

        Those that vote later do not count for it, because the leader has not seen what they accepted.
        """
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
        self.taken = frozenset()
        self.accepts.clear()
        self.proposal = self.restarted = self.sent = None
        self.is_repeated = False

    @property
    def request(self) -> messages.RequestVote:
        """What to ask of each voter."""
        view = self.state.view
        cannot_take = frozenset(
            taker.disk_id
            for taker in (view.leader, view.heir)
            if taker and (taker.disk_id in self.taken or self._has_followed(taker))
        )
        return messages.RequestVote(view.generation, self.ballot, cannot_take)

    def _has_followed(self, taker: Incarnation) -> bool:
        """Return whether a member has followed this node in this slot, so that it takes no votes any more.

        It has acknowledged a message that was sent after the view. An earlier follower may have left, and may
        have learned of the view from another leader.
        """
        peer = self.peers.by_incarnation.get(taker)
        return peer is not None and peer.link.acked_sent_at > self.slot_since

    def add_vote(self, voter: Incarnation, vote: Vote) -> None:
        """Count a vote of this ballot and slot."""
        key = self.state.voter.electorate.find_key(voter)
        is_current = (vote.generation, vote.ballot) == (self.state.view.generation, self.ballot)
        if key and is_current and key not in self.accepts:  # the vote that was accepted with stays
            self.cast[key] = voter, vote
            self.taken |= vote.taken

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
            or not state.has_stopped()
        ):
            return False
        if not state.voter.may_vote_for(state.incarnation, request):
            return False
        state.voter.note_leader(state.incarnation)
        vote, before = (state.incarnation, state.voter.make_vote()), self.cast.get(key)
        self.cast[key] = vote
        self.taken |= vote[1].taken
        if self.proposal and state.voter.known.accepted == self.proposal:
            self.accepts.add(key)
        return vote != before

    def remove(self, voter: Incarnation) -> None:
        """Forget the vote of a lost node: its next process may report more, unless it has accepted here."""
        key = self.state.voter.electorate.find_key(voter)
        if key and key in self.cast and self.cast[key][0] == voter and key not in self.accepts:
            del self.cast[key]

    def find_counted(self, keys: AbstractSet[str], replaced_nodes: AbstractSet[str]) -> Mapping[str, Vote]:
        """Return the votes that count if these voters have cast theirs."""
        state, view = self.state, self.state.view
        cast = {key: self.cast[key] for key in keys if key in self.cast}
        if state.settings.is_strict or not view.members:
            return {key: vote for key, (_, vote) in cast.items()}
        restarted = self.restarted
        if restarted is None:
            restarted = taken_votes.find_restarted(view, cast, replaced_nodes)
        is_free = view.heir is None or state.voter.is_free_of(view.heir)
        return taken_votes.find_counted(view, state.incarnation, cast, restarted, is_free_of_heir=is_free)

    def find_quorum(
        self, keys: AbstractSet[str], list_replaced_nodes: Callable[[], AbstractSet[str]]
    ) -> Mapping[str, Vote] | None:
        """Return the votes of these voters that count; None if they do not suffice.

        `list_replaced_nodes` returns the members that are back with an empty disk.
        """
        state = self.state
        counted = self.find_counted(keys, frozenset())
        if state.voter.electorate.has_quorum(counted.keys()):
            return counted
        replaced_nodes = frozenset() if state.settings.is_strict else list_replaced_nodes()
        counted = self.find_counted(keys, replaced_nodes)
        if replaced_nodes and taken_votes.are_others_replaced(state.view, counted.keys(), replaced_nodes):
            return counted
        return None

    def find_proposal_to_repeat(self, votes: Mapping[str, Vote]) -> Proposal | None:
        """Return the proposal of an earlier ballot that has to be proposed again, if there is one."""
        accepted = {key: vote.accepted for key, vote in votes.items()}
        return find_proposal_to_repeat(self.state.voter.electorate, accepted)

    def propose(
        self, view: View, end: JobEnd | None, votes: Mapping[str, Vote], *, is_repeated: bool = False
    ) -> None:
        """Propose a value in this ballot, once; it is sent when this node has accepted it on disk.

        `votes` are the quorum's.
        """
        find_disk, cast = self.state.view.find_disk, self.cast
        self.restarted = {key for key in votes if key in cast and cast[key][0] != find_disk(key)}
        self.proposal, self.is_repeated = Proposal(self.ballot, view, end), is_repeated
        self.state.voter.accept(self.proposal)

    def finish_slot(self) -> Proposal:
        """Return the decided proposal, and go on to the next slot."""
        proposal = self.proposal
        if proposal is None:
            raise RuntimeError("nothing was proposed")
        # This node has followed nobody in the new slot, so it may take the vote of a leader that has died.
        self.state.adopt_view(proposal.view, proposal.view.leader)
        self.clear()
        return proposal
