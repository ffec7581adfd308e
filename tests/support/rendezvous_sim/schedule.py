"""A schedule: one job and its faults, as plain data that prints readably.

`random_schedules` draws it from a seed and `simulation` plays it. The family of a schedule says which
invariants it may violate: the known limits of the rendezvous, by name.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_resume.rendezvous.core.interface import RendezvousSettings
from tests.support.rendezvous_sim.invariants import (
    MONOTONIC_GENERATION,
    NO_FALSE_DEATH,
    NO_STEP_AFTER_SUCCESSOR,
    ONE_DECISION,
    ONE_VIEW_PER_GENERATION,
    ONE_WHOLE_VIEW,
    SAME_FAILURES,
)

ANY_FAULT = "any fault"
"""Any fault of nodes, disks and the network, at any time."""
MILD_FAULTS = "mild faults"
"""Middleboxes reset connections at one end or both, some nodes are slow, workers fail."""
RESETS = "resets"
"""Connections are reset while links are cut or slow, so that a reset may be mistaken for a death."""
LATE_READERS = "late readers"
"""Nodes that were paused or suspended for longer than the node timeout read outdated messages."""
VIEW_CHANGES = "view changes"
"""Faults during view changes, for which the quorum rules are needed."""
JOB_END = "job end"
"""Workers finish and nodes fail the job, among other faults; the job must end everywhere."""
SHORT_JOIN_TIMEOUT = "short join timeouts"
"""Short join timeouts, late nodes and some that never come."""
LOST_DISKS = "lost disks"
"""Disks are lost, but most candidates keep theirs and no node is unreachable."""
LOST_DISKS_AND_PARTITIONS = "lost disks and partitions"
"""Nodes that are no candidates lose their disks while others are cut off; strict, so no vote is taken."""
PARTIAL_PARTITIONS = "partial partitions"
"""Links between single nodes stay cut to the end, some in one direction; a majority stays connected."""
CROWDS = "crowds"
"""Hundreds of nodes, of which many restart or lose power at once."""
NEWCOMERS = "newcomers"
"""Late nodes that crash in a loop or prepare for long."""
RESTARTS = "restarts"
"""Some nodes are gone, and all others start again at once, in the first run of the job or in a second one."""
WRONG_SETUPS = "wrong setups"
"""A node has another list of candidates, or the name of a node that still runs behind a cut."""
LEAVERS = "leavers"
"""Several nodes leave in order at once and stay away; others of new names may replace them."""
FULL_STOPS = "full stops"
"""All nodes stop at once, and the smallest majority comes back."""
SECOND_RUNS = "second runs"
"""All nodes start again with other settings, some of them later than others."""
FOREIGN = "foreign directories"
"""A node comes with the directory of another job that has the same run id."""
MANY_NODES = "many nodes"
"""More nodes than a leader answers at once, with any fault."""
REJECTING_FIREWALL = "rejecting firewall"
"""Partitions in which every connection is reset and every call refused, as if all nodes there were dead."""

MAX_STOP_S = (0.02, 0.02, 0.02, 2.0)
"""The longest time that the workers of a node may take to end; one of these for each node."""

FORGOTTEN = frozenset({ONE_VIEW_PER_GENERATION, ONE_DECISION, MONOTONIC_GENERATION, SAME_FAILURES})
WAIVED_INVARIANTS = {
    # A node that knew the newest generation has forgotten it, so its number may be reused.
    # With all other disks lost, one member may decide what the others had decided otherwise.
    # Then nobody may know a later view that was decided either.
    LOST_DISKS: FORGOTTEN | {NO_STEP_AFTER_SUCCESSOR},
    # A refused call counts as proof of a death.
    REJECTING_FIREWALL: FORGOTTEN | {ONE_WHOLE_VIEW, NO_STEP_AFTER_SUCCESSOR, NO_FALSE_DEATH},
}
"""The invariants that a family may violate, and why."""


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One node of the job: when its first agent starts, its place in the scheduler's order, its clock."""

    name: str
    start_s: float = 0.0
    """Infinity: never."""
    order: int = 0
    clock_origin_s: float = 0.0
    clock_rate: float = 1.0
    preparation_s: float = 0.0
    """How long its new workers take to start: after its own start, and after the failure of one."""
    candidates: tuple[str, ...] = ()
    """Its own list of candidates, by mistake; empty: as all others."""
    same_name_as: str = ""
    """The node whose name it has too. That node is down in the end."""
    is_foreign: bool = False
    """Its directory is of another job with the same run id. It is down in the end."""

    def __str__(self) -> str:
        """Describe the node in one line."""
        start = "never starts" if self.start_s == float("inf") else f"starts at {self.start_s:.2f} s"
        words = [f"{self.name} {start}, order {self.order}, clock {self.clock_rate:.4f}"]
        words += [f"prepares for {self.preparation_s:.1f} s"] if self.preparation_s else []
        words += [f"candidates {' '.join(self.candidates)}"] if self.candidates else []
        words += [f"named {self.same_name_as}"] if self.same_name_as else []
        words += ["with the directory of another job"] if self.is_foreign else []
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The job of a schedule."""

    nodes: tuple[NodeSpec, ...]
    settings: RendezvousSettings
    linger_s: float = 1.0
    """How long an agent answers after the end of the job, or after it has left."""
    finishes_at_end: bool = False
    """All workers finish at the end."""
    max_stop_s: tuple[float, ...] = MAX_STOP_S
    loss: float = 0.0
    """The share of packets that are lost."""
    has_new_addresses: bool = False
    """A process that is no candidate listens at a new port, and some machines start with a new IP address."""
    stays_away: tuple[str, ...] = ()
    """Nodes that do not come back at the end."""
    first_settings: RendezvousSettings | None = None
    """Those of the first run, if another one with `settings` follows."""
    must_continue: bool = False
    """The others must form a view at the end, whatever the core's own rule says: see worlds.md."""

    @property
    def node_names(self) -> tuple[str, ...]:
        """The names of all nodes."""
        return tuple(node.name for node in self.nodes)

    def __str__(self) -> str:
        """Describe the settings in one line, then each node in one."""
        s = self.settings
        words = [f"{len(self.nodes)} nodes", f"candidates {' '.join(s.candidates)}"]
        words.append(f"nnodes {s.min_nodes}:{s.max_nodes}")
        if s.is_strict:
            words.append("strict")
        if s.join_timeout_s < RendezvousSettings(()).join_timeout_s:
            words.append(f"join timeout {s.join_timeout_s:g} s")
        if self.finishes_at_end:
            words.append("finishes at the end")
        if s.node_timeout_s != RendezvousSettings(()).node_timeout_s:
            words.append(f"node timeout {s.node_timeout_s:g} s")
        if self.max_stop_s != MAX_STOP_S:
            words.append(f"workers stop within {max(self.max_stop_s):g} s")
        words += [f"{100 * self.loss:g} % of packets lost"] if self.loss else []
        words += ["new addresses"] if self.has_new_addresses else []
        words += [f"without {' '.join(self.stays_away)} at the end"] if self.stays_away else []
        words += ["the others must continue"] if self.must_continue else []
        words += [f"at first {self.first_settings}"] if self.first_settings else []
        return "\n".join([", ".join(words), *(f"    {node}" for node in self.nodes)])


@dataclass(frozen=True, slots=True)
class Trigger:
    """When a fault occurs: `delay_s` after the start or after the `count`-th `event`.

    Events are `view` (a new view starts anywhere), `Propose`, `ProposalAck` and `StartView` (such a
    message is sent), `message` (any of the three) and `LeaderAnnouncement`. With `after_previous`, time and
    events count from the fault before.
    """

    delay_s: float
    event: str = ""
    count: int = 0
    after_previous: bool = False

    def __str__(self) -> str:
        """Format it, such as `then StartView 2 + 0.010 s`."""
        words = ["then"] if self.after_previous else []
        if self.event:
            words += [self.event, str(self.count)]
        if self.event or self.after_previous:
            words.append("+")
        return " ".join([*words, f"{self.delay_s:.3f} s"])


LEADER = "@"
"""Stands for the leader of the newest view."""
OTHER_LEADER = "%"
"""Stands for a leader in another part of a partition; without one, for the leader."""
PARTITION_KINDS = ("partition", "repartition", "one-way", "reject")


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, undone (if it can be) after `duration_s`.

    `nodes` are names; `#2` stands for rank 2 of the newest view at that time, `@` for its leader, `%` for
    another leader, `!0` for a live node outside that view. Kinds:

    - of nodes: `kill`, `power` (dies without closing connections), `wipe` (dies and loses its disk), `pause`
      (the agent), `suspend` (the machine), `stop-clock` (the machine and its clock), `leave`;
      `crash-before-send` (of its next view change message) and `written` (crashes when its next write is on
      disk). All restart after `duration_s`. `reconfigure` gives their next processes the second run's
      settings.
    - of disks: `disk` (slow), `stuck` (no write completes).
    - of workers: `worker` (one fails), `finish`, `fail` (the node fails the job for all).
    - of the network: `slow` (each way takes up to 0.6 s), `slowish` (0.3 s), `reset` (the connections between
      two nodes), `half-reset` (only at the first node's end), `small-path` (large messages to a node are
      lost), `links` (`a-b` is cut, or only `a>b`; to the end of the run).
    - cuts between the groups that `|` separates and all others: `partition`, `repartition` (replaces every
      earlier cut; without nodes all heals), `one-way` (messages of the named nodes are lost), `reject`
      (connections are reset and calls refused).
    """

    trigger: Trigger
    kind: str
    nodes: tuple[str, ...]
    duration_s: float = 0.0

    def __str__(self) -> str:
        """Return one line of a schedule."""
        nodes = " ".join(self.nodes) or "no node"
        return f"{self.trigger!s:>28}  {self.kind} {nodes} for {self.duration_s:.2f} s"


@dataclass(frozen=True, slots=True)
class Schedule:
    """One job and its faults."""

    seed: int
    family: str
    job: JobSpec
    faults: tuple[Fault, ...]

    @property
    def waived(self) -> frozenset[str]:
        """The invariants that this schedule may violate."""
        # A node whose clock stood still may read the start of an old view late, though not all members do.
        late = {MONOTONIC_GENERATION} if any(fault.kind == "stop-clock" for fault in self.faults) else set()
        return WAIVED_INVARIANTS.get(self.family, frozenset()) | late

    def __str__(self) -> str:
        """Format all that is decided before the first step."""
        return "\n".join([f"seed {self.seed} ({self.family}): {self.job}", *map(str, self.faults)])
