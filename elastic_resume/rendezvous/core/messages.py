"""Define the messages that nodes exchange. The package's docstring lists which role sends which.

A node that receives a newer decided view adopts it (`state.NodeState.adopt_view`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from elastic_resume.policy.failure_classification import Failure
from elastic_resume.policy.reasons import DepartureReason, NodeArguments, Refusal, ViewEndReason, WaitReason
from elastic_resume.policy.restart import JobFailure
from elastic_resume.rendezvous.core.world import (
    Ballot,
    Incarnation,
    JobEnd,
    Proposal,
    ProposalAck,
    View,
    Vote,
)
from elastic_resume.rendezvous.facts import Fact


@dataclass(frozen=True, slots=True)
class Header:
    """Sequence numbers on every message, and the running generation on the leader's.

    `seq` is the message's number on this connection, `ack` the newest number received from the other side.
    `generation` is the one that runs, if the sender leads; 0 for none. It renews the receiver's lease, from
    when message `ack` was sent.
    """

    seq: int
    ack: int
    generation: int = 0


@dataclass(frozen=True, slots=True)
class JoinSpec:
    """What a node brings to the next view; its workers are stopped."""

    store_address: str
    """host:port at which this node serves the store if it gets rank 0."""
    num_workers: int
    node_order: int = 0
    """Place in the scheduler's order of nodes."""
    newest_step: int = 0
    """The newest step that workers of this node have finished since its agent started."""
    is_preparing: bool = False
    """New workers of the node take long to start. Others that could train do not wait for it."""
    script: str = ""
    """The training script's name and digest at the start of the agent; all nodes must have the same.

    A member keeps it, so an edit of the file in a running job expels no member. Empty: unknown.
    """
    arguments: str = ""
    """The script's arguments in one line, secrets masked. They may differ, and then every node logs them."""


class Workers(enum.Enum):
    """What a node's workers do, and what the node asks for."""

    STOPPED = "stopped"
    """None run, and the node has not joined yet: it has just begun, or waits after a failure."""
    RUNNING = "running"
    JOINED = "joined"
    """They have ended, and the node asks for the next view."""
    FINISHED = "finished"
    """All have succeeded."""
    LEAVING = "leaving"
    """They have ended, and the node asks for a view without it, for which it votes before it leaves."""
    FAILED = "failed"
    """They have ended, and the node asks for the end of the job."""


@dataclass(frozen=True, slots=True)
class WorkersStatus:
    """Report what the sender's workers do; a follower sends it when that changes."""

    workers: Workers = Workers.STOPPED
    generation: int = 0
    """The one that runs or has finished; else the newest that the sender knows to be started."""
    join: JoinSpec | None = None
    departure: DepartureReason | None = None

    @property
    def can_vote(self) -> bool:
        """Whether the workers have ended and will not begin again in this view, so that the node may vote."""
        # Not a set: hashing members of an enum is slow, and a leader asks this of 10,000 statuses.
        return self.workers is not Workers.STOPPED and self.workers is not Workers.RUNNING

    @property
    def is_preparing(self) -> bool:
        """Whether the node has joined, and new workers of it take long to start."""
        return self.join is not None and self.join.is_preparing

    def runs(self, view: View | None) -> bool:
        """Return whether the workers of a view run."""
        return self.workers is Workers.RUNNING and view is not None and self.generation == view.generation

    def has_finished(self, generation: int) -> bool:
        """Return whether the workers of a generation have succeeded."""
        return self.workers is Workers.FINISHED and self.generation == generation


NO_STATUS = WorkersStatus()
"""Of a node that has just begun."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Ask a node to lead, and describe the sender.

    `view` is the newest view that the sender knows to be decided, and `promised` its greatest ballot.
    The settings from `node_timeout_s` on must be equal on all nodes.
    """

    sender: Incarnation
    view: View
    promised: Ballot
    max_generation: int
    status: WorkersStatus = NO_STATUS
    node_timeout_s: float = 0.0
    min_nodes: int = 0
    max_nodes: int = 0
    candidates: tuple[str, ...] = ()
    is_strict: bool = False
    is_twin: bool = False
    """See `interface.PersistentState`."""
    failure_report: FailureReport | None = None
    """The sender's newest. A leader that leaves because of it has told no other node; so the receiver records
    it before it handles the status.
    """


@dataclass(frozen=True, slots=True)
class Welcome:
    """Accept the receiver as a follower. Its workers keep running until `EndView`."""

    leader: Incarnation
    view: View


@dataclass(frozen=True, slots=True)
class RequestVote:
    """Ask for a vote in a ballot of the sender, for the successor of the view of `generation`.

    `heir_cannot_take`: the heir of that view follows the sender, or has ended, so it takes no vote any more.
    """

    generation: int
    ballot: Ballot
    heir_cannot_take: bool = False


@dataclass(frozen=True, slots=True)
class VoteHeld:
    """Acknowledge that the sender holds the vote that the receiver has handed to it, on disk."""


@dataclass(frozen=True, slots=True)
class Redirect:
    """Send the receiver to the leader's address; without one, the sender is still searching: wait."""

    address: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """Refuse a node."""

    refusal: Refusal


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Renew leases by the header. A follower adds its new facts, the leader all verdicts (`facts`)."""

    facts: tuple[Fact, ...] = ()


@dataclass(frozen=True, slots=True)
class Propose:
    """Ask the voters to store a proposal for the successor of the view of `generation`, and to accept it."""

    generation: int
    proposal: Proposal


@dataclass(frozen=True, slots=True)
class StartView:
    """Start the workers of a decided view that was proposed to the receiver. Spares receive it too."""

    generation: int
    store_address: str
    workers_per_node: tuple[int, ...]
    """In rank order."""
    newest_step: int = 0
    """The greatest `JoinSpec.newest_step` of all joined nodes."""
    failures: tuple[Failure, ...] = ()
    """What ended the last view, in order of arrival at the leader; at most `MAX_FAILURES`."""
    arguments: tuple[NodeArguments, ...] = ()
    """The script's arguments of rank 0's node, and of some others that differ; empty if all are equal."""
    finished_nodes: tuple[str, ...] = ()
    """Nodes whose workers have succeeded; then this view may recompute steps, and take no further one."""
    preparing_nodes: tuple[str, ...] = ()
    """Members of the last view that are not in this one, because their workers take long to start."""


@dataclass(frozen=True, slots=True)
class Decided:
    """A view is decided that nobody will start, because a member was lost meanwhile."""

    view: View


@dataclass(frozen=True, slots=True)
class EndView:
    """End the view of that generation: stop the workers and join again."""

    generation: int
    reason: ViewEndReason


@dataclass(frozen=True, slots=True)
class Waiting:
    """Inform followers why no view is formed yet."""

    reason: WaitReason


@dataclass(frozen=True, slots=True)
class FailureReport:
    """Report the failure of a worker of the sender; each node reports one for each generation."""

    generation: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class FailJob:
    """Demand the end of the job on all nodes, because a restart would fail again."""

    failure: JobFailure


@dataclass(frozen=True, slots=True)
class LeaveNotice:
    """Report that the sender's workers have ended, and that its process ends now."""

    departure: DepartureReason


@dataclass(frozen=True, slots=True)
class LeaderAnnouncement:
    """Announce a leader. Of two leaders, the one with the lower `priority` steps down.

    `active_generation` is that of its active view (0: none), `known_generation` the newest view that it
    knows to be decided, `votes` how many of its voters follow the leader.
    """

    leader: Incarnation
    active_generation: int
    known_generation: int
    votes: int
    rank: int
    """Rank in the newest view; for other nodes, the number of its members."""
    history: str = ""
    """That of its newest view, if that has members."""

    @property
    def priority(self) -> tuple[int, int, int, int, int, str, str]:
        """Return a key that orders all leaders; the greatest leads."""
        index = self.leader.candidate_index
        return (
            self.active_generation,
            self.known_generation,
            self.votes,
            -self.rank,
            -index if index is not None else -(1 << 30),
            self.leader.node,
            self.leader.disk_id,
        )


Message = (
    Hello
    | Welcome
    | Redirect
    | Refused
    | WorkersStatus
    | Heartbeat
    | RequestVote
    | Vote
    | VoteHeld
    | Propose
    | ProposalAck
    | StartView
    | Decided
    | EndView
    | Waiting
    | FailureReport
    | FailJob
    | JobEnd
    | LeaveNotice
    | LeaderAnnouncement
)
