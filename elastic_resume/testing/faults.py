"""Define the kinds of faults and one fault, and draw random faults.

A `Fault` says what happens, to which target, and when. A ConfigError names a missing target or time; the
values of its settings are not checked. A fault happens once. A fault that ends by itself, such as a partition
or a full disk, has a default duration that a job can survive. `fault_runner` injects faults.

`draw_random_faults` draws faults for `chaos`. The seed decides all of them, so the same seed gives the same
faults on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_resume import setting_values
from elastic_resume.errors import ConfigError

WORKER, NODE, NODES = "worker", "node", "nodes"
TARGET_FIELDS = {WORKER: ("node", "rank", "role"), NODE: ("node", "role"), NODES: ("groups",)}
NAMESPACES = True  # the kind needs nodes with a network and a disk of their own


@dataclass(frozen=True)
class FaultKind:
    """One kind of fault.

    ``target`` is a worker, a node, or several nodes. ``settings`` maps fields of `Fault` to their defaults
    (None: for ever, or never). ``weight`` is the relative frequency among random faults; 0 excludes kinds
    that a job need not survive or that show no effect. ``method`` is that of `Cluster` which does it to a
    node, where one call is enough.
    """

    target: str
    description: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    needs_namespaces: bool = False
    weight: int = 0
    in_process: bool = False  # the fault happens in the process itself, at a failpoint
    method: str = ""


def _build_kinds() -> dict[str, FaultKind]:
    return {
        # Processes. What is killed is started again, as a cluster would; a disk survives.
        "kill-worker": FaultKind(WORKER, "the worker gets a signal", {"signal": "SIGKILL"}, weight=5),
        "kill-agent": FaultKind(
            NODE, "SIGKILL to the agent alone", {"back_after_s": 1.0}, weight=2, method="kill_agent"
        ),
        "kill-node": FaultKind(
            NODE, "SIGKILL to all of the node", {"back_after_s": 2.0}, weight=4, method="kill_node"
        ),
        "poweroff": FaultKind(
            NODE, "silence, then death", {"back_after_s": 6.0}, NAMESPACES, 2, method="poweroff"
        ),
        "stop-worker": FaultKind(WORKER, "SIGSTOP to the worker: a hang", {"for_s": None}),
        "stop-agent": FaultKind(NODE, "SIGSTOP to the agent", {"for_s": 6.0}, weight=1),
        "preemption": FaultKind(
            NODE,
            "a notice; the node saves and leaves, and comes back",
            {"back_after_s": 2.0},
            weight=2,
            method="give_notice",
        ),
        # Within a worker, at the step.
        "raise": FaultKind(WORKER, "an exception", {"error": "RuntimeError"}, weight=1, in_process=True),
        "exit": FaultKind(WORKER, "the process ends itself", {"code": 9}, weight=1, in_process=True),
        "hold-gil": FaultKind(
            WORKER, "a thread keeps the interpreter: a hang", {"for_s": None}, in_process=True
        ),
        "slow-rank": FaultKind(
            WORKER, "each step takes longer", {"delay_s": 0.2, "for_s": 5.0}, weight=1, in_process=True
        ),
        "skip-collective": FaultKind(WORKER, "one all-reduce without this rank", in_process=True),
        "wrong-gradients": FaultKind(WORKER, "one bit of its gradients, from then on", in_process=True),
        "out-of-memory": FaultKind(WORKER, "memory runs out", {"limit_bytes": 1 << 30}, in_process=True),
        # Links.
        "cut": FaultKind(NODE, "the node's link is silent, both ways", {"for_s": 6.0}, NAMESPACES, 2),
        "cut-out": FaultKind(NODE, "what the node sends is lost", {"for_s": 6.0}, NAMESPACES, 1),
        "cut-in": FaultKind(NODE, "what is sent to the node is lost", {"for_s": 6.0}, NAMESPACES, 1),
        "partition": FaultKind(NODES, "groups that cannot reach each other", {"for_s": 6.0}, NAMESPACES, 1),
        "packet-loss": FaultKind(NODE, "packets are lost", {"percent": 5.0, "for_s": 5.0}, NAMESPACES, 1),
        "slow-link": FaultKind(
            NODE, "the link carries less", {"bytes_per_s": 1_000_000, "for_s": 5.0}, NAMESPACES, 1
        ),
        # Disks.
        "disk-full": FaultKind(NODE, "no byte is left (ENOSPC)", {"for_s": 5.0}, NAMESPACES, 1),
        "disk-error": FaultKind(NODE, "the disk fails (EIO)", {"for_s": 5.0}, weight=1),
        "slow-disk": FaultKind(NODE, "each request takes longer", {"delay_s": 0.2, "for_s": 5.0}, weight=1),
        "torn-write": FaultKind(NODE, "the newest checkpoint loses its end", weight=1),
        "bit-flip": FaultKind(NODE, "one bit of the newest checkpoint", weight=1),
        "wipe-disk": FaultKind(NODE, "the node comes back with no disk", {"back_after_s": 2.0}, weight=1),
        # The rest.
        "corrupt-message": FaultKind(NODE, "a damaged message between agents", weight=1, in_process=True),
    }  # fmt: skip


KINDS = _build_kinds()
SETTING_NAMES = sorted({name for kind in KINDS.values() for name in kind.settings})

ROLES = {
    "leader": "the node whose agent is the leader",
    "rank-0": "rank 0, or the node that it is on",
    "all": "every one of them, in the same moment",
}


@dataclass(frozen=True)
class Fault:
    """One fault: what happens, to which target, and when.

    Args:
        what: one of ``KINDS``.
        node: index of the node; n0 is 0.
        rank: rank, for faults of workers.
        role: one of ``ROLES`` in place of a node or rank.
        groups: for a partition: groups of nodes that reach each other.
        step: inject as soon as any rank has finished this step.
        at_s: inject so many seconds after the job's first step.
        for_s: duration in seconds; None: until something else ends the fault.
        back_after_s: seconds until a killed node is restarted.
        signal: for kill-worker: name of the signal.
        error: for raise: a built-in exception.
        code: for exit: the exit code.
        delay_s: for slow-rank: per step; for slow-disk: per request.
        limit_bytes: for out-of-memory, where the kernel sets no limit.
        percent: for packet-loss.
        bytes_per_s: for slow-link.

    """

    what: str
    node: int | None = None
    rank: int | None = None
    role: str = ""
    groups: tuple[tuple[int, ...], ...] = ()
    step: int | None = None
    at_s: float | None = None
    for_s: float | None = None
    back_after_s: float | None = None
    signal: str | None = None
    error: str | None = None
    code: int | None = None
    delay_s: float | None = None
    limit_bytes: int | None = None
    percent: float | None = None
    bytes_per_s: int | None = None

    def __post_init__(self) -> None:
        if self.what not in KINDS:
            near = setting_values.suggest_similar(str(self.what), KINDS)
            raise ConfigError(f"there is no fault {self.what!r}.{near} There are: {', '.join(KINDS)}.")
        for name in SETTING_NAMES:
            given = getattr(self, name)
            if given is not None and name not in self.kind.settings:
                raise ConfigError(f"{self.what} has no {name}.{_describe_settings(self.what)}")
            if given is None:
                object.__setattr__(self, name, self.kind.settings.get(name))
        for name in ("at_s", "for_s", "back_after_s", "delay_s"):
            if getattr(self, name) is not None:  # failpoints and messages have milliseconds
                object.__setattr__(self, name, round(float(getattr(self, name)), 3))
        object.__setattr__(self, "groups", tuple(map(tuple, self.groups)))
        _check_target(self)
        if (self.step is None) == (self.at_s is None):
            raise ConfigError(f"{self.what}: say when, by one of step=20 and at_s=40.")

    @property
    def kind(self) -> FaultKind:
        """Return the kind, with all that holds for its faults."""
        return KINDS[self.what]

    def __str__(self) -> str:
        return f"{self.what} {self.target_text}{self.time_text}"

    @property
    def target_text(self) -> str:
        """Describe the target."""
        if self.kind.target == NODES:
            return " | ".join(" ".join(f"n{node}" for node in group) for group in self.groups)
        if self.rank is not None:
            return f"rank {self.rank}"
        return self.role or f"node {self.node}"

    @property
    def time_text(self) -> str:
        """Describe when the fault is due, after a space."""
        start = f"step {self.step}" if self.at_s is None else format_duration(self.at_s)
        ends = self.for_s is not None and self.for_s != self.kind.settings.get("for_s")
        lasting = f" for {format_duration(self.for_s)}" if ends and self.for_s is not None else ""
        return f" at {start}{lasting}"


def format_duration(seconds: float) -> str:
    """Format seconds: 6s, 0.25s."""
    return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"


def _check_target(fault: Fault) -> None:
    names = TARGET_FIELDS[fault.kind.target]
    given = [
        name for name in ("node", "rank", "role", "groups") if getattr(fault, name) not in (None, "", ())
    ]
    if len(given) != 1 or given[0] not in names:
        raise ConfigError(f"{fault.what}: give one of {', '.join(names)}, for its target.")
    if fault.role and fault.role not in ROLES:
        raise ConfigError(f"{fault.what}: there is no role {fault.role!r}. There are: {', '.join(ROLES)}.")
    if fault.role == "leader" and fault.kind.target == WORKER:
        raise ConfigError(f"{fault.what} hits a worker, and the leader is an agent: give a rank.")


def _describe_settings(kind_name: str) -> str:
    known = list(KINDS[kind_name].settings)
    return f" It has: {', '.join(known)}." if known else " Nothing of it can be set."


# ---- which faults a job can have ------------------------------------------------------------------------

MIN_RANDOM_GAP_S = 1.0  # with a shorter gap nothing could happen between two faults


@dataclass(frozen=True)
class JobShape:
    """The nodes of a job. With ``hosts="namespaces"`` each has a network and a disk of its own."""

    nodes: int
    workers_per_node: int = 1
    hosts: str = "loopback"

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.nodes * self.workers_per_node


def check_faults(faults: Iterable[Fault], shape: JobShape) -> None:
    """Raise a ConfigError for a fault that cannot happen on these nodes."""
    for number, fault in enumerate(faults, 1):
        reason = _find_obstacle(fault, shape)
        if reason:
            raise ConfigError(f"fault {number} ({fault}): {reason}")


def _find_obstacle(fault: Fault, shape: JobShape) -> str:
    nodes = shape.nodes
    if fault.node is not None and fault.node >= nodes:
        return f"there is no node {fault.node}: {nodes} nodes are 0 to {nodes - 1}."
    if fault.rank is not None and fault.rank >= shape.world_size:
        last = shape.world_size - 1
        return f"there is no rank {fault.rank}: {shape.world_size} workers are 0 to {last}."
    if fault.groups and sorted(node for group in fault.groups for node in group) != list(range(nodes)):
        return f"groups are lists of nodes that reach each other, each node once, 0 to {nodes - 1}."
    if fault.kind.needs_namespaces and shape.hosts != "namespaces":
        return 'it takes nodes with a network and a disk of their own: hosts="namespaces" (as root).'
    return ""


# ---- random faults -------------------------------------------------------------------------------------


def draw_random_faults(shape: JobShape, *, mtbf_s: float, until_s: float, seed: int) -> Iterator[Fault]:
    """Draw one fault per ``mtbf_s`` seconds on average, of the kinds that a job survives on these nodes."""
    rng = random.Random(seed)  # noqa: S311  no secret
    weights = default_weights(shape)
    at_s = 0.0
    while True:
        at_s += max(MIN_RANDOM_GAP_S, rng.expovariate(1 / mtbf_s))
        what = rng.choices(list(weights), list(weights.values()))[0]
        if at_s > until_s:
            return
        yield Fault(what, at_s=at_s, **_draw_target(what, shape, rng))


def default_weights(shape: JobShape) -> dict[str, float]:
    """Return the weights of the kinds that a job survives and the nodes support."""
    return {
        what: float(kind.weight)
        for what, kind in KINDS.items()
        if kind.weight
        and (shape.hosts == "namespaces" or not kind.needs_namespaces)
        and not (kind.target == NODES and shape.nodes < 3)
    }


def _draw_target(what: str, shape: JobShape, rng: random.Random) -> dict[str, Any]:
    target = KINDS[what].target
    if target == WORKER:
        return {"rank": rng.randrange(shape.world_size)}
    if target == NODE:
        return {"node": rng.randrange(shape.nodes)}
    order = list(range(shape.nodes))
    rng.shuffle(order)
    few = rng.randint(1, max(1, (shape.nodes - 1) // 2))
    return {"groups": (tuple(sorted(order[:few])), tuple(sorted(order[few:])))}
