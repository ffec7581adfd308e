"""What agents say to each other. Every message that could make somebody gone carries what that one knew.

A connection is dialled by one agent and accepted by another; once the dialler is welcomed it is a member and
the other its leader. `Stamp` rides on every message, both ways: with it each side knows which of its own
messages the other has seen, and counts its lease from when it *sent* that one.

    searching → anyone     Hello                        and back    Welcome | Redirect | Refused
    member    → leader     Ready Acknowledge Finished Report Failed Force Beat Goodbye
    leader    → member     Propose Begin Restart Waiting JobEnd Beat Diverged Redirect Refused Goodbye
    ended     → anyone     JobEnd
    leader    → anyone     Claim                        and back    Claim | Redirect
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_resume.policy.divergence import Digest, DivergenceVerdict
from elastic_resume.policy.failure_classification import Failure
from elastic_resume.rendezvous.core.quorum import Incarnation, QuorumState, View
from elastic_resume.rendezvous.core.status import StatusUpdate


@dataclass(frozen=True, slots=True)
class Header:
    """On every message: its number on this connection, the newest number seen of the other side.

    `lease_s` is how long, from the sending of message `echo`, the receiver may keep its workers of
    `generation` running without hearing more; 0 when the sender grants none.
    """

    seq: int
    ack: int
    generation: int = 0
    lease_s: float = 0.0


@dataclass(frozen=True, slots=True)
class JoinSpec:
    """A node whose workers are stopped and that wants to be in the next world."""

    store_address: str
    """host:port where this node serves the store, should it get rank 0."""
    num_workers: int
    scheduler_order: int = 0
    """Place in the scheduler's own order of nodes."""
    newest_step: int = 0
    """The newest step that workers of this node have finished since its agent started."""


@dataclass(frozen=True, slots=True)
class Hello:
    """I look for the leader; this is all I know.

    `running` is the generation whose workers run here, `finished` the one whose workers all succeeded.
    `others_s`: worlds in which I had a part may run elsewhere for that long. What stands after it must be the
    same on all nodes: leases rest on the one, and what a leader does on the others.
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
    """I lead; you are one of mine. `resumed`: your running world is mine too, go on."""

    leader: Incarnation
    quorum_state: QuorumState
    resumes_view: bool = False


@dataclass(frozen=True, slots=True)
class Redirect:
    """I do not lead (any more). Ask at that address; none: I am searching too, stay and hear more."""

    address: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """You may not join: known `gone` (come back as a new incarnation), or what the reason says in words.

    `final`: asking again will not help.
    """

    reason: str
    is_permanent: bool = False


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """My workers are stopped; take me into the next world."""

    join: JoinSpec


@dataclass(frozen=True, slots=True)
class StateDigest:
    """The state of one node after that step, in short."""

    generation: int
    step: int
    digest: Digest


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """I am alive. The stamp says the rest, and from a member `told` how its state looks.

    `tidings` are for people: see `tidings.py`.
    """

    state_digest: StateDigest | None = None
    status_update: StatusUpdate | None = None


@dataclass(frozen=True, slots=True)
class ReplicasDiverged:
    """The replicas of that generation differ.

    `goes_on`: those that are `wrong` take the majority's state; their own copies of that generation count no
    later than `agreed_step`.
    """

    generation: int
    verdict: DivergenceVerdict
    continues_from_majority: bool


@dataclass(frozen=True, slots=True)
class ProposeView:
    """First step of forming: make this durable, with all I know, and acknowledge it."""

    view: View
    quorum_state: QuorumState


@dataclass(frozen=True, slots=True)
class ProposalAck:
    """The proposal of that generation is durable here."""

    generation: int


@dataclass(frozen=True, slots=True)
class InstallView:
    """Second step: everybody has acknowledged; start workers. A spare is told too."""

    generation: int
    store_address: str
    workers_per_node: tuple[int, ...]
    """Workers of each node, in rank order."""
    newest_step: int = 0
    """The greatest of what those who joined have said of theirs."""
    failures: tuple[Failure, ...] = ()
    """What ended the world before, as far as the leader heard, in the order in which it did: a few."""


@dataclass(frozen=True, slots=True)
class EndView:
    """The world of that generation is over: stop your workers and join again."""

    generation: int
    reason: str
    quorum_state: QuorumState


@dataclass(frozen=True, slots=True)
class WaitReason:
    """No world forms yet, for that reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class FailureReport:
    """A worker of mine failed in that generation, in this way; one is told of each node."""

    generation: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class FailJob:
    """The job is at fault, says my node: end it everywhere."""

    reason: str


@dataclass(frozen=True, slots=True)
class ForceQuorumRequest:
    """An operator declares the missing members of that generation, the newest, dead for good."""

    generation: int


@dataclass(frozen=True, slots=True)
class NodeFinished:
    """My workers of that generation have all succeeded."""

    generation: int


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The job is over: every node's workers have succeeded, or it failed for that reason.

    `settled`: nobody who is not told can still run workers. So this job's worlds need not be asked when it
    is started again, with whatever nodes there are then. `missing` are members whose workers did not succeed.
    """

    generation: int
    failure_reason: str = ""
    is_final: bool = False
    unfinished_nodes: tuple[str, ...] = ()
    failures: tuple[Failure, ...] = ()
    """As in `Begin`."""


@dataclass(frozen=True, slots=True)
class LeaveNotice:
    """I leave for good: count me gone. `who` says so to a leader that I do not follow."""

    reason: str
    quorum_state: QuorumState
    sender: Incarnation | None = None


@dataclass(frozen=True, slots=True)
class LeaderAnnouncement:
    """I lead. Of two that do, the one with the lesser claim steps down.

    `active` is the generation of its running world (0: none), `known` the newest world or proposal it knows.
    """

    leader: Incarnation
    active_generation: int
    known_generation: int
    rank: int
    """Rank in the newest begun world; one past the end for others."""

    @property
    def priority(self) -> tuple[int, int, int, int, str, str]:
        """What "greater claim" means; total over all agents."""
        place = self.leader.candidate_index
        seat = -place if place is not None else -(1 << 30)
        return (
            self.active_generation,
            self.known_generation,
            -self.rank,
            seat,
            self.leader.node,
            self.leader.incarnation_id,
        )


Message = (
    Hello
    | Welcome
    | Redirect
    | Refused
    | JoinRequest
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
