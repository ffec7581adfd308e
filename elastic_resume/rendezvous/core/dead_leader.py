"""Find where the vote of a dead leader is: the exception of `docs/concepts/worlds.md`, and what it relies on.

Without it the second of two nodes could not continue. The first functions are its rules; `sequence` needs
none of them in a view that `View.is_strict`. `Contacts` is what a node knows of other processes by its links
and its clock. It tells whether this node may vote, whether it takes the leader's vote, and which votes count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet

from elastic_resume.rendezvous.core.interface import RendezvousSettings
from elastic_resume.rendezvous.core.peers import Link
from elastic_resume.rendezvous.core.sequence import Acceptor, CastVotes, Electorate, find_counted
from elastic_resume.rendezvous.core.world import Incarnation, View

MIN_LINKS_KEPT = 64
ANSWER_HEARTBEATS = 3
"""A live process sends a message in each heartbeat interval."""


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
    if not replaced_nodes:
        return None
    view = electorate.view
    lost_disks = {member.disk_id for member in view.members if member.node in replaced_nodes}
    counted = find_counted(cast, lost_disks)
    keys = set(counted)
    if view.heir and view.heir.disk_id in counted and counted[view.heir.disk_id][1].has_taken and view.leader:
        keys.add(view.leader.disk_id)
    is_enough = (
        bool(counted)
        and all(member.disk_id in keys or member.node in replaced_nodes for member in view.members)
        and electorate.compare_with_half(len(counted) + len(replaced_nodes)) >= 0
    )
    return counted if is_enough else None


class Contacts:
    """What one node knows of the processes of others: when they were heard, and which have ended."""

    def __init__(self, settings: RendezvousSettings, acceptor: Acceptor, now: float) -> None:
        self.settings = settings
        self.acceptor = acceptor
        self.now = now
        self.has_followed_another = False
        """Whether this process has followed, or voted for, a third besides the view's leader and itself."""
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
        self.mark_former_ended(acceptor.incarnation)

    @property
    def view(self) -> View:
        """The newest view that is known to be decided."""
        return self.acceptor.view

    # What it tells.

    def may_vote_for(self, proposer: Incarnation, *, heir_cannot_take: bool) -> bool:
        """Return whether this node may vote in a ballot of `proposer` now (rule 5)."""
        is_free = self.view.is_strict or heir_cannot_take or self.is_free_of_heir
        return may_vote(self.view, self.acceptor.incarnation, proposer, is_free_of_heir=is_free)

    def take_vote(self) -> None:
        """Take the vote of the view's leader if it has died and this node is the heir (rule 2)."""
        view, leader, known = self.view, self.view.leader, self.acceptor.known
        if view.is_strict or self.has_followed_another or known.has_taken or known.handed_to:
            return
        if leader is None or leader not in self.ended or not may_take(view, known.incarnation, leader):
            return
        if any(link.ended_in_contact for link in self._find_links(leader)):
            self.acceptor.take_vote()

    def find_quorum(
        self, cast: CastVotes, list_replaced_nodes: Callable[[], AbstractSet[str]]
    ) -> CastVotes | None:
        """Return those of the votes for this node that count; None if they do not suffice.

        `list_replaced_nodes` returns the members that are back with an empty disk.
        """
        electorate, view, counted = self.acceptor.electorate, self.view, find_counted(cast)
        if view.is_strict or not view.members:
            return counted if electorate.has_quorum(counted.keys()) else None
        surplus, own = electorate.compare_with_half(len(counted)), self.acceptor.incarnation
        is_free = self.is_free_of_heir
        if surplus > 0 or (surplus == 0 and breaks_tie(view, own, counted, is_free_of_heir=is_free)):
            return counted
        return find_replacing_quorum(electorate, cast, list_replaced_nodes())

    @property
    def is_free_of_heir(self) -> bool:
        """Whether the heir cannot take the vote of this node, which leads the view, any more (rule 4)."""
        heir = self.view.heir
        if heir is None or heir in self.ended:
            return True
        silent_since = self.now - self.settings.node_timeout_s
        return all(link.last_received_at <= silent_since for link in self._find_links(heir))

    # What it learns.

    def adopt_view(self, view: View, source: Incarnation | None) -> None:
        """Learn from `source` that a view is decided."""
        self.acceptor.adopt_view(view)
        # Another leader may have decided it, and may lead this node in the next slot too.
        self.has_followed_another = source is None or source != view.leader
        self.ended = {member for member in self.ended if view.rank(member) is not None}
        self._forget_others()
        self.mark_former_ended(self.acceptor.incarnation)

    def note_leader(self, proposer: Incarnation) -> None:
        """Note whom this node follows, or votes for: an heir that followed a third takes no vote."""
        if proposer not in {self.view.leader, self.acceptor.incarnation}:
            self.has_followed_another = True

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

    def answers(self, process: Incarnation) -> bool:
        """Return whether a process has an open link to this node, and was heard just now."""
        heard_since = self.now - ANSWER_HEARTBEATS * self.settings.heartbeat_interval_s
        return any(link.is_open and link.last_received_at > heard_since for link in self._find_links(process))

    def _find_links(self, process: Incarnation) -> list[Link]:
        """Return the newest links on which a process has led this node, and has followed it."""
        links = self.leader_links.get(process), self.follower_links.get(process)
        return [link for link in links if link]

    def mark_ended(self, process: Incarnation) -> None:
        """Note that a process has ended for certain, and whether that was soon after the last contact."""
        if process in self.ended or process == self.acceptor.incarnation:
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
        # By address first: each of 10,000 members calls its dead leader, and hashing them all took 8 ms.
        links = [
            (process, link)
            for known in (self.leader_links, self.follower_links)
            for process, link in known.items()
            if process.address == call.address
        ]
        proved = {process for process, link in links if link.last_received_at <= call.dialled_at}
        if call.view_at_dial is self.view:
            # No vote passes over by a refusal at the name alone: a link is needed for that.
            proved.update(member for member in self.view.members if member.address == call.address)
        proved -= {process for process, link in links if not call.proves_end(link.ip_address)}
        for process in proved:
            self.mark_ended(process)

    def find_absent_members(self, present: Iterable[Incarnation]) -> set[Incarnation]:
        """Return the members of the newest view that are not present and may come."""
        return set(self.view.members).difference(present) - self.ended
