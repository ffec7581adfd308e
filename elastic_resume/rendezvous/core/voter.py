"""Vote on views: the acceptor's side of Paxos, and what a node must keep on disk for it.

`Voter` promises ballots, accepts proposals, and adopts decided views. It also keeps what the exception of
`quorum` needs: the last contacts with leaders and followers, and which processes have ended for certain.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from elastic_resume.rendezvous.core import interface, messages
from elastic_resume.rendezvous.core.peers import Link
from elastic_resume.rendezvous.core.quorum import Electorate, may_take, may_vote
from elastic_resume.rendezvous.core.world import (
    NO_VIEW,
    Ballot,
    Incarnation,
    Proposal,
    View,
    Vote,
)

MIN_LINKS_KEPT = 64
ANSWER_HEARTBEATS = 3
"""A live process sends a message in each heartbeat interval."""


class Voter:
    """One node as a voter. Each change of what has to be on disk gives a new `version`."""

    def __init__(
        self,
        settings: interface.RendezvousSettings,
        incarnation: Incarnation,
        persistent_state: interface.PersistentState | None,
        now: float,
        max_generation: int,
    ) -> None:
        self.settings = settings
        self.incarnation = incarnation
        self.now = now
        former = persistent_state or interface.PersistentState(
            incarnation, NO_VIEW, Ballot(), None, max_generation=0
        )
        generation = max(max_generation, former.max_generation)
        if settings.single_node:
            # No other node exists, so nobody of an earlier view can vote.
            former = former.with_view(View(generation, (), history=former.view.history))
        self.known = replace(former, incarnation=incarnation, max_generation=generation)
        """What is to be on disk."""
        self.version = 1  # a process counts its boot on disk before it sends anything
        self.durable_version = 0
        """The newest version that is on disk."""
        self._writing_version = 0
        self._writing_since = now
        self.has_followed_another = False
        """Whether this process has followed, or voted for, a third besides the view's leader and itself."""
        self.newest_ballot = self.known.promised
        """The greatest ballot known, of any node."""
        self.leader_links: dict[Incarnation, Link] = {}
        """The newest link to each leader that this node has followed.

        A link stays here after it has ended, with the times of the last contact.
        """
        self.follower_links: dict[Incarnation, Link] = {}
        """The newest link to each node that has followed this one, in the same way."""
        self._forget_at = MIN_LINKS_KEPT
        """With so many links to followers, look for needless ones. A leader of many nodes does so rarely."""
        self.ended: set[Incarnation] = set()
        """Processes of members, and of others with a link, that have ended for certain."""
        self.mark_former_ended(incarnation)

    def _change(self, **fields: Any) -> None:
        self.known = replace(self.known, **fields)
        self.version += 1

    # What is on disk.

    def request_write(self) -> interface.Persist | None:
        """Return the write that is due; None while all is on disk, or one is in progress."""
        if not self._writing_version <= self.durable_version < self.version:
            return None
        self._writing_version, self._writing_since = self.version, self.now
        return interface.Persist(self.version, self.known)

    def handle_written(self, version: int) -> None:
        """Note that a version is on disk."""
        self.durable_version = max(self.durable_version, version)

    @property
    def is_durable(self) -> bool:
        """Whether all that this node knows is on disk."""
        return self.durable_version >= self.version

    @property
    def is_disk_stalled(self) -> bool:
        """Whether the write in progress takes so long that other nodes should not wait for this node."""
        return self.settings.max_nodes > 1 and self.now >= self.disk_stalls_at

    @property
    def disk_stalls_at(self) -> float:
        """When the write in progress will have taken too long; infinity without one."""
        if self._writing_version <= self.durable_version:
            return float("inf")
        return self._writing_since + self.settings.node_timeout_s

    # What is decided, promised and accepted.

    @property
    def view(self) -> View:
        """The newest view that is known to be decided."""
        return self.known.view

    @property
    def electorate(self) -> Electorate:
        """Who decides the successor of the newest view."""
        return Electorate(self.view, len(self.settings.candidates))

    @property
    def is_voter(self) -> bool:
        """Whether this node votes on the successor of the newest view."""
        return self.electorate.find_key(self.incarnation) is not None

    def adopt_view(self, view: View, source: Incarnation | None) -> None:
        """Learn from `source` that a view is decided; forget the votes on it."""
        generation = max(self.known.max_generation, view.generation)
        self.known = self.known.with_view(view)
        is_twin = self.known.is_twin and view.rank(self.incarnation) is None
        self._change(max_generation=generation, is_twin=is_twin)
        # Another leader may have decided it, and may lead this node in the next slot too.
        self.has_followed_another = source is None or source != view.leader
        self.ended = {member for member in self.ended if view.rank(member) is not None}
        self._forget_others()
        self.mark_former_ended(self.incarnation)

    def note_leader_link(self, process: Incarnation, link: Link) -> None:
        """Note the newest link to the leader."""
        self._forget_others()
        self.leader_links[process] = link

    def note_follower(self, process: Incarnation, link: Link) -> None:
        """Note the newest link to a follower; a spare may crash in a loop while one view lasts."""
        self.follower_links[process] = link
        if len(self.follower_links) >= self._forget_at:
            self._forget_others()

    def _forget_others(self) -> None:
        """Forget processes that are no members and have been silent for long."""
        kept_since = self.now - 2 * self.settings.node_timeout_s  # a role ends a silent link earlier
        for links in (self.leader_links, self.follower_links):
            for process, link in list(links.items()):
                if self.view.rank(process) is None and link.last_received_at <= kept_since:
                    del links[process]
                    self.ended.discard(process)
        self._forget_at = 2 * len(self.follower_links) + MIN_LINKS_KEPT

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
        """Take the vote of the view's leader if it has died and this node is the heir: see `quorum`."""
        leader, known = self.view.leader, self.known
        if self.view.is_strict or self.has_followed_another or known.has_taken or known.handed_to:
            return
        if leader is None or leader not in self.ended or not may_take(self.view, self.incarnation, leader):
            return
        if any(link.ended_in_contact for link in self._find_links(leader)):
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

    def may_vote_for(self, proposer: Incarnation, request: messages.RequestVote) -> bool:
        """Return whether this node may vote in a ballot of `proposer` now: see `quorum`."""
        is_free = self.view.is_strict or request.heir_cannot_take or self.is_free_of_heir
        return may_vote(self.view, self.incarnation, proposer, is_free_of_heir=is_free)

    def note_leader(self, proposer: Incarnation) -> None:
        """Note whom this node follows, or votes for: an heir that followed a third takes no vote."""
        if proposer not in {self.view.leader, self.incarnation}:
            self.has_followed_another = True

    def record_generation(self, generation: int) -> None:
        """Note that a generation is in use."""
        if generation > self.known.max_generation:
            self._change(max_generation=generation)

    def note_twin(self) -> None:
        """Note that another machine of this node's name is alive."""
        if not self.known.is_twin:
            self._change(is_twin=True)

    # Processes that have ended.

    def answers(self, process: Incarnation) -> bool:
        """Return whether a process has an open link to this node, and was heard just now."""
        heard_since = self.now - ANSWER_HEARTBEATS * self.settings.heartbeat_interval_s
        return any(link.is_open and link.last_received_at > heard_since for link in self._find_links(process))

    def _find_links(self, process: Incarnation) -> list[Link]:
        """Return the newest links on which a process has led this node, and has followed it."""
        links = self.leader_links.get(process), self.follower_links.get(process)
        return [link for link in links if link]

    @property
    def is_free_of_heir(self) -> bool:
        """Whether the heir cannot take the vote of this node, which leads the newest view, any more."""
        heir = self.view.heir
        if heir is None or heir in self.ended:
            return True
        silent_since = self.now - self.settings.node_timeout_s
        return all(link.last_received_at <= silent_since for link in self._find_links(heir))

    def mark_ended(self, process: Incarnation) -> None:
        """Note that a process has ended for certain, and whether that was soon after the last contact."""
        if process in self.ended or process == self.incarnation:
            return
        self.ended.add(process)
        for link in self._find_links(process):
            link.ended_in_contact = self.now < link.acked_sent_at + self.settings.lease_s

    def mark_former_ended(self, incarnation: Incarnation) -> None:
        """Note that the earlier processes of a node's disk have ended, unless the disk was copied."""
        member = self.view.find_disk(incarnation.disk_id)
        if member and member.boot < incarnation.boot and not self.answers(member):
            self.mark_ended(member)

    def mark_ended_at(self, call: Link) -> None:
        """Note that the processes at an address have ended, because it has refused a call.

        An agent listens at one address all its life. The answer may come late, so only processes count that
        this node knew when it dialled.
        """
        links = [*self.leader_links.items(), *self.follower_links.items()]
        known = {process for process, link in links if link.last_received_at <= call.dialled_at}
        if call.view_at_dial is self.view:
            # No vote passes over by a refusal at the name alone: a link is needed for that.
            known.update(self.view.members)
        proved = {process for process in known if process.address == call.address}
        proved -= {process for process, link in links if not call.proves_end(link.ip_address)}
        for process in proved:
            self.mark_ended(process)

    def find_absent_members(self, present: Iterable[Incarnation]) -> set[Incarnation]:
        """Return the members of the newest view that are not present and may come."""
        return set(self.view.members).difference(present) - self.ended
