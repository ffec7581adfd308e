"""Define views (worlds), votes and quorums, by which each world decides its successor.

A `View` names the members of one generation. The members of a view decide its successor by Paxos (Lamport,
"Paxos made simple", 2001). The reconfiguration is that of Lamport, Malkhi and Zhou, "Vertical Paxos and
primary-backup replication", PODC 2009. This module uses neither time nor messages; `docs/concepts/worlds.md`
has the argument.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from elastic_resume.policy.failure_classification import Failure
from elastic_resume.policy.restart import JobFailure


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One process of an agent. Its address never changes.

    `disk_id` names its directory, which votes. `boot` counts the processes of that directory.
    `candidate_index` is the place of its address in the list of candidates, or None.
    """

    node: str
    disk_id: str
    boot: int = 1
    address: str = field(default="", compare=False)
    candidate_index: int | None = field(default=None, compare=False)

    def __hash__(self) -> int:
        """Hash the disk's id alone: a leader of 10,000 members hashes them all for a vote."""
        return hash(self.disk_id)

    def __str__(self) -> str:
        """Return the node's name."""
        return self.node


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The end of the job: the workers of every node have succeeded, or it failed: `failure`.

    `unfinished_nodes` names some of the `unfinished_count` members whose workers did not succeed. `failures`
    ended the last view.
    """

    generation: int
    failure: JobFailure | None = None
    unfinished_nodes: tuple[str, ...] = ()
    unfinished_count: int = 0
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class View:
    """The members of one generation in rank order, and the leader that proposed it.

    Without members it stands for the end of the job, or with generation 0 for the time before the first view.
    The candidates decide its successor.
    """

    generation: int
    members: tuple[Incarnation, ...]
    leader: Incarnation | None = None

    def rank(self, member: Incarnation) -> int | None:
        """Return the rank of a member, or None."""
        rank = _index_disks(self).get(member.disk_id)
        return rank if rank is not None and self.members[rank] == member else None

    def find_disk(self, disk_id: str) -> Incarnation | None:
        """Return the member with that disk, which may have a later process now."""
        rank = _index_disks(self).get(disk_id)
        return None if rank is None else self.members[rank]

    def find_node(self, name: str) -> Incarnation | None:
        """Return the member of that name."""
        return _index_names(self).get(name)

    @property
    def heir(self) -> Incarnation | None:
        """The member of lowest rank besides the leader."""
        return next((member for member in self.members[:2] if member != self.leader), None)

    def __hash__(self) -> int:
        """Hash what distinguishes views; hashing every member would be slow."""
        return hash((self.generation, self.leader))


NO_VIEW = View(0, ())
"""Before the first view of a job."""


@functools.lru_cache(maxsize=8)
def _index_disks(view: View) -> dict[str, int]:
    """Index ranks by disk, once for each of the newest views."""
    return {member.disk_id: rank for rank, member in enumerate(view.members)}


@functools.lru_cache(maxsize=8)
def _index_names(view: View) -> dict[str, Incarnation]:
    return {member.node: member for member in view.members}


@dataclass(frozen=True, slots=True, order=True)
class Ballot:
    """A round of voting, and the process that proposes in it. The greatest ballot counts."""

    number: int = 0
    disk_id: str = ""
    boot: int = 0


@dataclass(frozen=True, slots=True)
class Proposal:
    """A proposal that a node has accepted: a view, or the end of the job if `end` is set."""

    ballot: Ballot
    view: View
    end: JobEnd | None = None


@dataclass(frozen=True, slots=True)
class Vote:
    """What a node promises for the successor of the view of `generation`.

    Its workers of that view have ended and will not begin again, and it accepts no ballot before `ballot`.
    `accepted` is the newest proposal that it has accepted, `taken` the disks whose votes it has taken.
    """

    generation: int
    ballot: Ballot
    accepted: Proposal | None = None
    taken: frozenset[str] = frozenset()


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
            return len(_index_disks(self.view).keys() & {node.disk_id for node in nodes})
        return len({self.find_key(node) for node in nodes} - {None})

    @property
    def keys(self) -> frozenset[str]:
        """The keys of all voters."""
        if self.view.members:
            return frozenset(_index_disks(self.view))
        return frozenset(f"candidate {index}" for index in range(self.candidate_count))

    @property
    def votes_needed(self) -> int:
        """How many votes are surely enough."""
        return (len(self.view.members) or self.candidate_count) // 2 + 1

    def has_quorum(self, voters: AbstractSet[str]) -> bool:
        """Return whether these keys, all of voters, are a quorum. Any two quorums share a voter.

        More than half are one. Of a view, exactly half are one too if rank 0 is among them.
        """
        members = self.view.members
        if not members:
            return 2 * len(voters) > self.candidate_count
        twice = 2 * len(voters) - len(members)
        return twice > 0 or (twice == 0 and members[0].disk_id in voters)


def find_proposal_to_repeat(
    electorate: Electorate, accepted: Mapping[str, Proposal | None]
) -> Proposal | None:
    """Return the proposal that has to be proposed again, because it may be decided; None if there is none.

    `accepted` has what voters have accepted. Only the proposal of the greatest ballot may be decided. It is
    not if they are a quorum, and those that report another or none leave no quorum for it.
    """
    proposals = [proposal for proposal in accepted.values() if proposal]
    if not proposals:
        return None
    newest = max(proposals, key=lambda proposal: proposal.ballot)
    others = {
        disk_id
        for disk_id, proposal in accepted.items()
        if proposal is None or (proposal.view, proposal.end) != (newest.view, newest.end)
    }
    if electorate.has_quorum(electorate.keys - others) or not electorate.has_quorum(accepted.keys()):
        return newest
    return None
