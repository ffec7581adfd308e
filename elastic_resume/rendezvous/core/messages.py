"""The messages that nodes exchange. The package's docstring says which role sends which.

Every message that can make a node count as dead also carries what that node knew (rule 4).
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_resume.policy.divergence import Digest, DivergenceVerdict
from elastic_resume.policy.failure_classification import Failure
from elastic_resume.rendezvous.core.quorum import Incarnation, QuorumState, View
from elastic_resume.rendezvous.core.status import StatusUpdate


@dataclass(frozen=True, slots=True)
class Header:
    """Sequence numbers and lease on every message.

    `seq` is the message's number on this connection, `ack` the newest number received from the other side.
    The receiver may keep its workers of `generation` running for `lease_s` seconds from when it sent message
    `ack`; 0 grants no lease.
    """

    seq: int
    ack: int
    generation: int = 0
    lease_s: float = 0.0


@dataclass(frozen=True, slots=True)
class JoinSpec:
    """What a node brings to the next view; its workers are stopped."""

    store_address: str
    """host:port at which this node serves the store if it gets rank 0."""
    num_workers: int
    scheduler_order: int = 0
    """Place in the scheduler's order of nodes."""
    newest_step: int = 0
    """The newest step that workers of this node have finished since its agent started."""
    is_importing: bool = False
    """The node still imports modules for its workers. Others that could train do not wait for it."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Ask a node to lead, and describe the sender.

    `running_generation` is the generation whose workers run at the sender, `finished_generation` the one
    whose workers have all finished. Views with the sender may run elsewhere for `remaining_grace_s`. The last
    three members must be equal on all nodes: leases depend on the first, the leader's decisions on the
    others.
    """

    sender: Incarnation
    quorum_state: QuorumState
    max_generation: int
    join: JoinSpec | None = None
    running_generation: int = 0
    finished_generation: int = 0
    remaining_grace_s: float = 0.0
    node_timeout_s: float = 0.0
    min_nodes: int = 0
    max_nodes: int = 0


@dataclass(frozen=True, slots=True)
class Welcome:
    """Accept the receiver as a follower; with `resumes_view` its workers keep running."""

    leader: Incarnation
    quorum_state: QuorumState
    resumes_view: bool = False


@dataclass(frozen=True, slots=True)
class Redirect:
    """Send the receiver to the leader's address; without one, the sender is still searching: wait."""

    address: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """Refuse a node. The reason "dead" asks it to come back as a new incarnation; others are for people.

    If `is_permanent`, asking again will not help.
    """

    reason: str
    is_permanent: bool = False


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """Report that the sender's workers are stopped, and ask for the next view."""

    join: JoinSpec


@dataclass(frozen=True, slots=True)
class StateDigest:
    """The digest of one node's state after a step."""

    generation: int
    step: int
    digest: Digest


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Renew leases by the header. A follower adds a digest; `status_update` is for people."""

    state_digest: StateDigest | None = None
    status_update: StatusUpdate | None = None


@dataclass(frozen=True, slots=True)
class ReplicasDiverged:
    """Report that the replicas of a generation differ.

    If `continues_from_majority`, the wrong nodes take the majority's state. Their own copies of that
    generation are valid up to the verdict's `agreed_step` only.
    """

    generation: int
    verdict: DivergenceVerdict
    continues_from_majority: bool


@dataclass(frozen=True, slots=True)
class ProposeView:
    """First step of a view change: store this view and all that the leader knows, then acknowledge."""

    view: View
    quorum_state: QuorumState


@dataclass(frozen=True, slots=True)
class ProposalAck:
    """Acknowledge the proposal of that generation, which is durable at the sender."""

    generation: int


@dataclass(frozen=True, slots=True)
class InstallView:
    """Second step of a view change: start workers. Spares receive it too."""

    generation: int
    store_address: str
    workers_per_node: tuple[int, ...]
    """In rank order."""
    newest_step: int = 0
    """The greatest `JoinSpec.newest_step` of all joined nodes."""
    failures: tuple[Failure, ...] = ()
    """What ended the last view, in order of arrival at the leader; at most `state.MAX_FAILURES`."""


@dataclass(frozen=True, slots=True)
class EndView:
    """End the view of that generation: stop the workers and join again."""

    generation: int
    reason: str
    quorum_state: QuorumState


@dataclass(frozen=True, slots=True)
class WaitReason:
    """Inform followers why no view is formed yet."""

    reason: str


@dataclass(frozen=True, slots=True)
class FailureReport:
    """Report the failure of a worker of the sender; each node reports one for each generation."""

    generation: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class FailJob:
    """Demand the end of the job on all nodes, because a restart would fail again."""

    reason: str


@dataclass(frozen=True, slots=True)
class ForceQuorumRequest:
    """Declare the missing members of the newest view, of that generation, dead for good, for an operator."""

    generation: int


@dataclass(frozen=True, slots=True)
class NodeFinished:
    """Report that the sender's workers of that generation have all succeeded."""

    generation: int


@dataclass(frozen=True, slots=True)
class ImportsFinished:
    """Report that the sender, which has joined, imports nothing any more."""


@dataclass(frozen=True, slots=True)
class JobEnd:
    """End the job: the workers of every node have succeeded, or it failed for `failure_reason`.

    If `is_final`, no node outside the receivers can still run workers. So a new start of the job needs no
    vote of these views, whatever nodes it has. `unfinished_nodes` are members whose workers did not succeed.
    """

    generation: int
    failure_reason: str = ""
    is_final: bool = False
    unfinished_nodes: tuple[str, ...] = ()
    failures: tuple[Failure, ...] = ()
    """As in `InstallView`."""


@dataclass(frozen=True, slots=True)
class LeaveNotice:
    """Leave for good and count as dead; `sender` is set if the receiver does not know the link's peer."""

    reason: str
    quorum_state: QuorumState
    sender: Incarnation | None = None


@dataclass(frozen=True, slots=True)
class LeaderAnnouncement:
    """Announce a leader. Of two leaders, the one with the lower `priority` steps down.

    `active_generation` is that of its running view (0: none), `known_generation` the newest view or proposal
    that it knows.
    """

    leader: Incarnation
    active_generation: int
    known_generation: int
    rank: int
    """Rank in the newest installed view; for other nodes, the number of its members."""

    @property
    def priority(self) -> tuple[int, int, int, int, str, str]:
        """Return a key that orders all leaders; the greatest leads."""
        index = self.leader.candidate_index
        return (
            self.active_generation,
            self.known_generation,
            -self.rank,
            -index if index is not None else -(1 << 30),
            self.leader.node,
            self.leader.incarnation_id,
        )


Message = (
    Hello
    | Welcome
    | Redirect
    | Refused
    | JoinRequest
    | ImportsFinished
    | Heartbeat
    | ReplicasDiverged
    | ProposeView
    | ProposalAck
    | InstallView
    | EndView
    | WaitReason
    | FailureReport
    | FailJob
    | ForceQuorumRequest
    | NodeFinished
    | JobEnd
    | LeaveNotice
    | LeaderAnnouncement
)
