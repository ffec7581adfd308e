"""Define views (worlds), ballots, proposals and votes. `sequence` has the rule by which votes decide.

A `View` names the members of one generation.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from elastic_resume.policy.failure_classification import Failure
from elastic_resume.policy.restart import JobFailure


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One process of an agent. Its address never changes.

    `disk_id` names its directory, which votes. `boot` grows with each process of that directory by a random
    number. So the processes of two copies of a directory differ.
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
    history: str = ""
    """That of the view which it ends."""


@dataclass(frozen=True, slots=True)
class View:
    """The members of one generation in rank order, and the leader that proposed it, or rank 0.

    Without members it stands for the end of the job, or with generation 0 for the time before the first view.
    The candidates decide its successor. `history` names the sequence, from its first view on: two jobs may
    have the same run id, and a directory of one may come to the other.
    """

    generation: int
    members: tuple[Incarnation, ...]
    leader: Incarnation | None = None
    history: str = ""
    is_strict: bool = False
    """Its successor is decided without the rules of `dead_leader`, whatever a later process was told."""

    def rank(self, member: Incarnation) -> int | None:
        """Return the rank of a member, or None."""
        rank = _index_disks(self).get(member.disk_id)
        return rank if rank is not None and self.members[rank] == member else None

    def find_disk(self, disk_id: str) -> Incarnation | None:
        """Return the member with that disk, which may have a later process now."""
        rank = _index_disks(self).get(disk_id)
        return None if rank is None else self.members[rank]

    def is_of_other_job(self, view: View) -> bool:
        """Return whether the two views are certainly of different sequences."""
        return bool(self.history and view.history and self.history != view.history)

    def find_replaced(self, nodes: Iterable[Incarnation]) -> set[str]:
        """Return the names of the members that another disk has among these nodes."""
        members = _index_names(self)
        return {
            node.node
            for node in nodes
            if (member := members.get(node.node)) and member.disk_id != node.disk_id
        }

    def find_node(self, name: str) -> Incarnation | None:
        """Return the member of that name."""
        return _index_names(self).get(name)

    @property
    def disks(self) -> AbstractSet[str]:
        """The disks of the members."""
        return _index_disks(self).keys()

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
    `accepted` is the newest proposal that it has accepted.
    """

    generation: int
    ballot: Ballot
    accepted: Proposal | None = None
    has_taken: bool = False
    """It has taken the vote of the view's leader: see `dead_leader.breaks_tie`."""
    held: frozenset[str] = frozenset()
    """Disks that have handed their votes to this one, as they left."""
    handed_to: str = ""
    """The disk to which this node has handed its vote."""


@dataclass(frozen=True, slots=True)
class ProposalAck:
    """Acknowledge the proposal of a ballot; with `is_accepted` it is accepted, on disk."""

    generation: int
    ballot: Ballot
    is_accepted: bool


@dataclass(frozen=True, slots=True)
class PersistentState:
    """What an agent keeps on disk for its next process."""

    incarnation: Incarnation
    view: View
    """The newest view known to be decided."""
    promised: Ballot
    """The greatest ballot that this node has promised; it accepts no earlier one."""
    accepted: Proposal | None
    """The newest proposal that it has accepted for the successor of `view`."""
    max_generation: int
    """The greatest generation known to this node."""
    has_taken: bool = False
    held: frozenset[str] = frozenset()
    handed_to: str = ""
    """As in `Vote`, for that successor."""
    is_twin: bool = False
    """Another machine of this name was alive, and this one was in no view since: it replaces none."""

    def with_view(self, view: View) -> PersistentState:
        """Return the state of a node that knows of the successor of `view` nothing yet."""
        return replace(self, view=view, accepted=None, has_taken=False, held=frozenset(), handed_to="")
