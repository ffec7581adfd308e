"""Define the core's settings, inputs (`Event`) and outputs (`Effect`) as plain frozen data.

The shell in `rendezvous/net` turns each occurrence into an event and hands it to `node.RendezvousNode.handle`
with the time since boot. It carries out the returned effects in order, and sends a `Tick` at `next_deadline`.
The core numbers the connections that it requests (positive); the shell numbers those it accepts (negative).
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_resume.policy.failure_classification import Failure
from elastic_resume.policy.reasons import (
    DepartureReason,
    ErrorRaised,
    JobFinished,
    JoinTimeout,
    NodeArguments,
    NodeRefused,
    OwnObstacle,
    ViewEndReason,
    WaitReason,
)
from elastic_resume.policy.restart import JobFailure
from elastic_resume.rendezvous.core.messages import (
    FailJob,
    FailureReport,
    Header,
    JoinSpec,
    Message,
)
from elastic_resume.rendezvous.core.world import Incarnation, PersistentState
from elastic_resume.rendezvous.facts import Fact, Topic

UNCROWDED_NODES = 64
"""A leader answers so many nodes before any call times out."""


@dataclass(frozen=True, slots=True)
class RendezvousSettings:
    """The settings of the job's rendezvous; seconds are of this node's CLOCK_BOOTTIME."""

    candidates: tuple[str, ...]
    """Addresses that newcomers know, in order of priority."""
    min_nodes: int = 1
    max_nodes: int = 1
    node_timeout_s: float = 3.0
    last_call_timeout_s: float = 3.0
    """The first view waits until no newcomer has joined for so long."""
    join_timeout_s: float = 600.0
    single_node: bool = False
    """There is no other node, so earlier views with other nodes need not vote."""
    is_strict: bool = False
    """No vote of a dead node counts: see `dead_leader`."""
    dial_stagger_s: float = 0.2
    """How long a candidate waits for an answer before it also calls the next address."""
    probe_interval_s: float = 0.05
    """Between two calls to a peer whose connection broke."""
    scale_up_delay_s: float = 1.0
    """How long a newcomer to a running view waits for others, so that one restart admits all."""
    heartbeats_per_timeout: int = 10
    announce_interval_s: float = 0.5
    """Between two rounds of a leader's announcements."""
    lease_margin: float = 0.05
    """Share of a lease kept back for different clock rates and the time it takes to kill workers."""
    topics: tuple[Topic, ...] = ()
    """Of the facts that this node knows and, as leader, judges."""

    @property
    def heartbeat_interval_s(self) -> float:
        """The time between heartbeats."""
        return self.node_timeout_s / self.heartbeats_per_timeout

    @property
    def lease_s(self) -> float:
        """How long workers may run, and a vote may be taken, after the sending of an acknowledged message."""
        return self.node_timeout_s * (1 - self.lease_margin)

    @property
    def dial_timeout_s(self) -> float:
        """How long a call may stay unanswered before the next address has priority."""
        return self.node_timeout_s / 3 + self.crowd_delay_s

    @property
    def redial_timeout_s(self) -> float:
        """How long one call to a peer whose connection broke may take; a round trip may take 0.3 s."""
        return self.node_timeout_s / 2

    @property
    def crowd_delay_s(self) -> float:
        """How much longer a leader of a large job may take to answer when all members call at once.

        A leader needs up to a millisecond for each. Without this delay members would go on to call each
        other, and a thousand members with a thousand calls each never finish.
        """
        return max(0, self.max_nodes - UNCROWDED_NODES) * 2e-3


# Events.


@dataclass(frozen=True, slots=True)
class PeerConnected:
    """A connection is open and both sides have proved that they hold the token.

    `ip_address` is the peer's.
    """

    conn_id: int
    ip_address: str = ""


@dataclass(frozen=True, slots=True)
class PeerDisconnected:
    """A connection has ended, or could not be opened.

    `refused`: the dialled host answered that no process listens there, which proves that the process has
    ended. Any other end, a reset too, only means that the peer cannot be reached this way.
    `refusing_ips` are the IP addresses that answered so.
    """

    conn_id: int
    reason: str = ""
    refused: bool = False
    refusing_ips: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A message has arrived; messages of one connection arrive in order."""

    conn_id: int
    header: Header
    message: Message


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """The workers are stopped, and this node asks for the next view."""

    join: JoinSpec


@dataclass(frozen=True, slots=True)
class Preparation:
    """This node, which has joined, prepares its workers, or has done so."""

    is_running: bool


@dataclass(frozen=True, slots=True)
class WorkersFinished:
    """Every worker of this node has succeeded."""


@dataclass(frozen=True, slots=True)
class Leave:
    """This node shuts down or fails for good; its workers are stopped."""

    departure: DepartureReason


@dataclass(frozen=True, slots=True)
class Persisted:
    """The state of the `Persist` effect with that version is on disk, fsynced."""

    version: int


# A `FailureReport`, if any, precedes the `JoinRequest`.
Event = (
    PeerConnected
    | PeerDisconnected
    | MessageReceived
    | Tick
    | JoinRequest
    | Preparation
    | WorkersFinished
    | FailureReport
    | FailJob
    | Fact
    | Leave
    | Persisted
)


# Effects.


@dataclass(frozen=True, slots=True)
class Connect:
    """Dial the address; answer with `PeerConnected` or `PeerDisconnected`. Nothing is sent before.

    `ip_address` answered for the same peer before; with it, do not look the name up.
    """

    conn_id: int
    address: str
    ip_address: str = ""


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Send what is queued and close the connection; report nothing more about it."""

    conn_id: int


@dataclass(frozen=True, slots=True)
class Send:
    """Queue a message, in order and without blocking."""

    conn_id: int
    header: Header
    message: Message


@dataclass(frozen=True, slots=True)
class Persist:
    """Replace the state on disk durably, then answer with `Persisted`. At most one write is in progress."""

    version: int
    persistent_state: PersistentState


@dataclass(frozen=True, slots=True)
class StartWorkers:
    """Start workers, as `JoinRequest` asked; the fields from `newest_step` on are those of `StartView`."""

    generation: int
    rank: int
    members: tuple[Incarnation, ...]
    store_address: str
    workers_per_node: tuple[int, ...]
    newest_step: int = 0
    failures: tuple[Failure, ...] = ()
    arguments: tuple[NodeArguments, ...] = ()
    finished_nodes: tuple[str, ...] = ()
    preparing_nodes: tuple[str, ...] = ()


MembershipEnd = JoinTimeout | NodeRefused | OwnObstacle
"""Why this node can take no part any more."""
StopReason = ViewEndReason | MembershipEnd


@dataclass(frozen=True, slots=True)
class StopWorkers:
    """The view has ended: stop the workers, then join again.

    If `immediately`, the lease has expired: kill the workers before anything else.
    """

    generation: int
    reason: StopReason
    immediately: bool = False


@dataclass(frozen=True, slots=True)
class EndJob:
    """The job has ended on every node."""

    reason: JobFinished | JobFailure
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class EndMembership:
    """This node found no view within the join timeout, or others refuse it, now and later."""

    reason: MembershipEnd


EventReason = StopReason | WaitReason | ErrorRaised


@dataclass(frozen=True, slots=True)
class EmitEvent:
    """Write an event to the event log."""

    kind: str
    reason: EventReason | None = None
    generation: int = 0


Effect = (
    Connect | Disconnect | Send | Persist | StartWorkers | StopWorkers | EndJob | EndMembership | EmitEvent
)
