"""A schedule: one job and what befalls it, as plain data that prints the way it is read.

It is drawn from a seed (`draw`) and played by `simulate`; nothing in here happens. A schedule belongs to a
family, and the family says which promises it may defeat: the known limits of the rendezvous, each by name.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_resume.rendezvous.core.events import Settings
from tests.support.rendezvous_sim.checkers import (
    MONOTONIC_GENERATION,
    NO_FALSE_DEATH,
    ONE_RUNNING_VIEW,
    ONE_VIEW_PER_GENERATION,
    SAME_FAILURES,
)

ANY_FAULT = "any fault"
"""Whatever may happen to nodes, disks and the network, at any time."""
MILD_FAULTS = "mild faults"
"""Middleboxes reset connections at one end or both, some nodes are slow, workers fail."""
RESETS = "resets"
"""Connections are reset while links are cut or slow: faults aimed at whoever takes a reset for a death."""
LATE_READERS = "late readers"
"""Nodes paused or suspended for longer than the node timeout read messages that are long out of date."""
VIEW_CHANGES = "view changes"
"""Faults that follow each world as it forms: where the four rules of the quorum are needed."""
JOB_END = "job end"
"""Workers that finish and nodes that give the job up, among other faults: the job must end everywhere."""
SHORT_JOIN_TIMEOUT = "impatience"
"""Short join timeouts, late nodes and some that never come."""
LOST_DISKS = "lost disks"
"""Disks are lost, but most candidates keep theirs and nobody falls silent."""
LOST_DISKS_AND_PARTITIONS = "lost disks and partitions"
"""Any nodes lose their disks, while others are cut off, paused or without power."""
FORCED_QUORUM = "forced quorum"
"""An operator forces the quorum of the last who live, whatever happened before: see `word`."""
REJECTING_FIREWALL = "rejecting firewall"
"""Partitions in which every connection is reset and every call refused, as if all over there had died."""

SPLIT_BRAIN = frozenset({ONE_RUNNING_VIEW, ONE_VIEW_PER_GENERATION, MONOTONIC_GENERATION, SAME_FAILURES})
WAIVED_INVARIANTS = {
    # Who knew the newest generation has forgotten it: its number may be given again.
    LOST_DISKS: frozenset({ONE_VIEW_PER_GENERATION, MONOTONIC_GENERATION, SAME_FAILURES}),
    # Rule 2 rests on disks that keep what was acknowledged.
    LOST_DISKS_AND_PARTITIONS: SPLIT_BRAIN,
    # Rule 4 takes a closed connection and a refused call for knowledge of an end.
    REJECTING_FIREWALL: SPLIT_BRAIN | {NO_FALSE_DEATH},
}
"""What a family may defeat, and why."""


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One node of the job: when its first agent starts, its place in the scheduler's order, its clock."""

    name: str
    start_s: float = 0.0
    """`inf`: never."""
    order: int = 0
    clock_origin_s: float = 0.0
    clock_rate: float = 1.0

    def __str__(self) -> str:
        """One word or two."""
        comes = "never comes" if self.start_s == float("inf") else f"comes at {self.start_s:.2f} s"
        return f"{self.name} {comes}, order {self.order}, clock {self.clock_rate:.4f}"


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The job that is played."""

    nodes: tuple[NodeSpec, ...]
    settings: Settings
    linger_s: float = 1.0
    """How long an agent still answers after the end of the job, or its own."""
    finishes_at_end: bool = False
    """At last all workers finish."""
    has_operator: bool = False
    """An operator forces the quorum where all who are missing are dead."""

    @property
    def node_names(self) -> tuple[str, ...]:
        """The names of all nodes."""
        return tuple(site.name for site in self.nodes)

    def __str__(self) -> str:
        """The job's settings in one line, then a line for each node."""
        s = self.settings
        words = [f"{len(self.nodes)} nodes", f"candidates {' '.join(s.candidates)}"]
        words.append(f"nnodes {s.min_nodes}:{s.max_nodes}")
        if s.join_timeout_s < Settings(()).join_timeout_s:
            words.append(f"join timeout {s.join_timeout_s:g} s")
        if self.has_operator:
            words.append("an operator forces the quorum")
        if self.finishes_at_end:
            words.append("finishes at last")
        return "\n".join([", ".join(words), *(f"    {site}" for site in self.nodes)])


@dataclass(frozen=True, slots=True)
class Trigger:
    """When something happens: `after_s` after the start or after the `number`-th `event`.

    Events are `world` (one begins that never did before), `Propose`, `Acknowledge` and `Begin` (such a
    message is sent), `message` (any of the three) and `Claim` (a leader tells somebody that it leads). With
    `then`, time and events count from the fault before.
    """

    delay_s: float
    event: str = ""
    count: int = 0
    after_previous: bool = False

    def __str__(self) -> str:
        """Such as `then Begin 2 + 0.010 s`."""
        words = ["then"] if self.after_previous else []
        if self.event:
            words += [self.event, str(self.count)]
        if self.event or self.after_previous:
            words.append("+")
        return " ".join([*words, f"{self.delay_s:.3f} s"])


LEADER = "@"
"""Stands for the node that leads the newest world."""
OTHER_LEADER = "%"
"""Stands for a node that leads elsewhere, behind a cut, or for that leader where there is no other."""
PARTITION_KINDS = ("partition", "repartition", "one-way", "reject")


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens, and is over (if it ever is) after `for_s`.

    `nodes` are names; `#2` is whoever has rank 2 in the newest world then, `@` whoever leads it, `%` who
    leads elsewhere, `!0` a living node that is not in it. Kinds:

    - of nodes: `kill`, `power` (dies silently), `wipe` (dies and loses its disk), `pause` (the agent),
      `suspend` (the whole machine), `leave`; `unsent` and `written`: dies before it sends its next message
      that forms a world, or before it hears that its next write is on disk. All come back after `for_s`.
    - of disks: `disk` (slow), `stuck` (no write ends).
    - of workers: `worker` (one fails), `finish`, `fail` (the node gives the job up for all).
    - of the network: `slow` (each way takes up to 0.6 s), `slowish` (0.3 s), `reset` (the connections between
      two nodes), `half-reset` (only at the first's end); and cuts between the groups that
      `|` separates and all others: `partition`, `shift` (in place of every earlier cut; of nobody: all
      heals), `one-way` (what the named send is lost), `reject` (connections are reset, calls refused).
    """

    trigger: Trigger
    kind: str
    nodes: tuple[str, ...]
    duration_s: float = 0.0

    def __str__(self) -> str:
        """One line of a schedule."""
        return f"{self.trigger!s:>28}  {self.kind} {' '.join(self.nodes) or 'nobody'} for {self.duration_s:.2f} s"


@dataclass(frozen=True, slots=True)
class Schedule:
    """One job and what befalls it."""

    seed: int
    family: str
    job: JobSpec
    faults: tuple[Fault, ...]

    @property
    def waived(self) -> frozenset[str]:
        """The promises that such a schedule may defeat."""
        return WAIVED_INVARIANTS.get(self.family, frozenset())

    def __str__(self) -> str:
        """Everything that is decided before the first step."""
        return "\n".join([f"seed {self.seed} ({self.family}): {self.job}", *map(str, self.faults)])
