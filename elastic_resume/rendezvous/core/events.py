"""What goes into the core and what comes out of it, and its settings. Plain frozen data.

The shell of an agent turns what happens into `Event`s, hands each to `core.Agent.handle` with the time since
boot, carries out the `Effect`s in order, and calls again with a `Tick` at `Agent.next_deadline`. Connections
are numbered: the core numbers those it asks for (positive), the shell those it accepts (negative).
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_resume.policy.failure_classification import Failure
from elastic_resume.rendezvous.core.messages import Header, JoinSpec, Message, ReplicasDiverged, StateDigest
from elastic_resume.rendezvous.core.quorum import ALL_RULES, Incarnation, QuorumState, SafetyRules
from elastic_resume.rendezvous.core.status import NodeStatus, StatusUpdate

UNCROWDED_NODES = 64
"""So many members are answered before any of them could get impatient."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the core needs to know of the job; seconds are of this node's CLOCK_BOOTTIME."""

    candidates: tuple[str, ...]
    """Addresses that newcomers know, in order."""
    min_nodes: int = 1
    max_nodes: int = 1
    node_timeout_s: float = 3.0
    last_call_s: float = 3.0
    join_timeout_s: float = 600.0
    single_node: bool = False
    """There is no other node: worlds that this node took part in with others need not consent."""
    dial_stagger_s: float = 0.2
    """A search waits so long for an answer before it calls the next address too."""
    probe_interval_s: float = 0.05
    """Between two calls to a peer whose connection broke."""
    scale_up_delay_s: float = 1.0
    """A newcomer to a running world waits so long for others, for one restart instead of several."""
    heartbeats_per_timeout: int = 10
    announce_interval_s: float = 0.5
    """How often a leader calls at the candidates' addresses."""
    clock_drift: float = 0.05
    """Share of a lease kept back for clocks of different rates and the time it takes to kill workers."""
    resume_from_majority: bool = False
    """Where replicas differ and a majority is equal, the world restarts from that; else the job ends."""
    rules: SafetyRules = ALL_RULES

    @property
    def heartbeat_interval_s(self) -> float:
        """Time between heartbeats."""
        return self.node_timeout_s / self.heartbeats_per_timeout

    @property
    def lease_s(self) -> float:
        """How long workers may run on the strength of one acknowledged message, from its sending."""
        return self.node_timeout_s * (1 - self.clock_drift)

    @property
    def dial_timeout_s(self) -> float:
        """How long a call may take to be answered before the next address counts as the next best."""
        return self.node_timeout_s / 3 + self.crowd_delay_s

    @property
    def redial_timeout_s(self) -> float:
        """How long one call to a peer whose connection broke may take; a round trip may take 0.3 s."""
        return self.node_timeout_s / 2

    @property
    def crowd_delay_s(self) -> float:
        """How much longer a leader may take to answer when all members of a large job call it at once.

        It needs up to a millisecond for each. Those who went on to others meanwhile would call all of
        them, and a thousand members with a thousand calls each never come to an end.
        """
        return max(0, self.max_nodes - UNCROWDED_NODES) * 2e-3


# Events.


@dataclass(frozen=True, slots=True)
class PeerConnected:
    """A connection stands and both sides have proved that they hold the token.

    `host`: the IP address that answered, where this side dialled.
    """

    conn_id: int
    ip_address: str = ""


@dataclass(frozen=True, slots=True)
class PeerDisconnected:
    """A connection is over, or could not be made.

    `refused`: the host at the address that we dialled answered that nobody listens there, which proves that
    the process has ended. Everything else, a reset too, says only that the peer cannot be reached this way.
    """

    conn_id: int
    reason: str = ""
    refused: bool = False


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """One message, in the order in which the other side sent them on this connection."""

    conn_id: int
    header: Header
    message: Message


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class JoinRequested:
    """This node's workers are stopped and torchelastic asks for the next world."""

    join: JoinSpec


@dataclass(frozen=True, slots=True)
class WorkersFinished:
    """Every worker of this node succeeded."""


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker of this node failed in that generation. To be told before this node asks to join again."""

    generation: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class JobFailed:
    """This node gives the job up for all nodes: a restart would meet the same again."""

    reason: str


@dataclass(frozen=True, slots=True)
class StateDigested:
    """How this node's state looked after a step of the running world."""

    state_digest: StateDigest


@dataclass(frozen=True, slots=True)
class StatusPublished:
    """What this node has to tell people, through whoever leads."""

    status: NodeStatus | None
    event_lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Leave:
    """This node drains or fails for good; its workers are stopped."""

    reason: str


@dataclass(frozen=True, slots=True)
class ForceQuorum:
    """An operator declares the missing members of the newest world, of this generation, dead for good.

    Whoever leads judges it. It is ignored where a world runs, or where a later generation is known: other
    members may be missing by now.
    """

    generation: int


@dataclass(frozen=True, slots=True)
class Persisted:
    """What `Persist` of that number held is on disk, fsynced."""

    version: int


Event = (
    PeerConnected
    | PeerDisconnected
    | MessageReceived
    | Tick
    | JoinRequested
    | WorkersFinished
    | WorkerFailed
    | JobFailed
    | StateDigested
    | StatusPublished
    | Leave
    | ForceQuorum
    | Persisted
)


# Effects.


@dataclass(frozen=True, slots=True)
class Connect:
    """Dial that address; report `PeerConnected` or `PeerLost`. Nothing may be sent before.

    `host`: the IP address at which the same peer answered before; its name is not looked up again.
    """

    conn_id: int
    address: str
    ip_address: str = ""


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Send what is queued and close; report nothing more of it."""

    conn_id: int


@dataclass(frozen=True, slots=True)
class Send:
    """Queue a message; in order, never blocking."""

    conn_id: int
    header: Header
    message: Message


@dataclass(frozen=True, slots=True)
class PersistentState:
    """What an agent keeps on disk across its lives."""

    incarnation: Incarnation
    quorum_state: QuorumState
    max_generation: int
    """Greatest generation this node has heard of."""


@dataclass(frozen=True, slots=True)
class Persist:
    """Write this durably in place of the last, then report `Persisted`. At most one is under way."""

    version: int
    persistent_state: PersistentState


@dataclass(frozen=True, slots=True)
class StartWorkers:
    """Start workers: the answer to `JoinRequested`. `step` and `failures` are those of `Begin`."""

    generation: int
    rank: int
    members: tuple[Incarnation, ...]
    store_address: str
    workers_per_node: tuple[int, ...]
    newest_step: int = 0
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class RestartWorkers:
    """The world is over: stop workers at once and ask to join again."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class KillWorkers:
    """The lease ran out: kill workers at once, before anything else. Then as `RestartWorkers`."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReportDivergence:
    """All members are told so. What follows for the world comes by itself."""

    divergence: ReplicasDiverged


@dataclass(frozen=True, slots=True)
class DeliverPeerStatus:
    """What another node tells people: hand it on. ``newest``: generation that is known to have begun."""

    sender: Incarnation
    status_update: StatusUpdate
    installed_generation: int = 0


@dataclass(frozen=True, slots=True)
class EndJob:
    """The job is over on every node: done, or `failed`."""

    reason: str
    failed: bool = False
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No world within the join timeout, or no place for this node.

    `final`: this node's settings are wrong, and to start it again will not help.
    """

    reason: str
    is_permanent: bool = False


@dataclass(frozen=True, slots=True)
class EmitEvent:
    """A fact for the event log. `fields` are plain data."""

    kind: str
    text: str


Effect = (
    Connect
    | Disconnect
    | Send
    | Persist
    | StartWorkers
    | RestartWorkers
    | KillWorkers
    | ReportDivergence
    | DeliverPeerStatus
    | EndJob
    | GiveUp
    | EmitEvent
)
