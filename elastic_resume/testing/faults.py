"""Define the kinds of faults, one fault, and plans of faults.

A `Fault` says what happens, to which target, and when. It is validated when it is made: a wrong value is a
ConfigError that says what to write. A fault happens once. A fault that ends by itself, such as a partition or
a full disk, has a default duration that a job can survive. `fault_runner` injects faults.

A `FaultPlan` is a list of faults, a rule for random faults, and a seed. The seed decides everything that the
plan leaves open, so the same plan with the same seed is the same schedule on every machine. Plans are
written in Python, or in YAML with the same names::

    seed: 7
    faults:
      - {what: kill-worker, rank: 1, step: 20}
      - {what: cut, node: 2, step: 35, for: 5s}
      - {what: kill-agent, role: leader, phase: in commit}
    every: {mtbf: 15s, kinds: [kill-worker, kill-node], count: 3}
"""

from __future__ import annotations

import builtins
import contextlib
import math
import random
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from elastic_resume import config
from elastic_resume.errors import ConfigError
from elastic_resume.units import parse_duration, parse_size

WORKER, NODE, NODES = "worker", "node", "nodes"
NAMESPACES = True  # the kind needs nodes with a network and a disk of their own


@dataclass(frozen=True)
class FaultKind:
    """One kind of fault.

    ``target`` is a worker, a node, or several nodes. ``settings`` maps fields of `Fault` to their defaults
    (None: for ever, or never). ``weight`` is the relative frequency in a random plan; 0 excludes kinds that a
    job need not survive or that show no effect.
    """

    target: str
    description: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    needs_namespaces: bool = False
    weight: int = 0
    in_process: bool = False  # the fault happens in the process itself, at a failpoint


def _build_kinds() -> dict[str, FaultKind]:
    return {
        # Processes. What is killed is started again, as a cluster would; a disk survives.
        "kill-worker": FaultKind(WORKER, "the worker gets a signal", {"signal": "SIGKILL"}, weight=5),
        "kill-agent": FaultKind(NODE, "SIGKILL to the agent alone", {"back_after_s": 1.0}, weight=2),
        "kill-node": FaultKind(NODE, "SIGKILL to all of the node", {"back_after_s": 2.0}, weight=4),
        "poweroff": FaultKind(NODE, "silence, then death", {"back_after_s": 6.0}, NAMESPACES, 2),
        "stop-worker": FaultKind(WORKER, "SIGSTOP to the worker: a hang", {"for_s": None}),
        "stop-agent": FaultKind(NODE, "SIGSTOP to the agent", {"for_s": 6.0}, weight=1),
        "preemption": FaultKind(
            NODE, "a notice; the node saves and leaves, and comes back", {"back_after_s": 2.0}, weight=2
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

# Names of moments for people -> the failpoints that they mean.
PHASES = {
    "in rendezvous": "rendezvous.record",
    "in resume": "resume.planned",
    "in transfer": "transfer.send",
    "in copy": "snapshot.copying",
    "in commit": "commit.after-data",
}
WORKER_FAILPOINTS = (
    "resume.planned",
    "resume.loaded",
    "transfer.send",
    "transfer.receive",
    "snapshot.started",
    "snapshot.written",
    "snapshot.copying",
    "snapshot.copied",
    "snapshot.confirmed",
)
AGENT_FAILPOINTS = (
    "rendezvous.record",
    "committer.written",
    "commit.after-data",
    "commit.before-manifest",
    "commit.before-rename",
    "commit.after-rename",
)


def failpoint_for_phase(phase: str) -> str:
    """Return the failpoint of a phase; a failpoint's own name stands for itself. Empty if there is none."""
    name = PHASES.get(phase, phase)
    return name if name in WORKER_FAILPOINTS or name in AGENT_FAILPOINTS else ""


GROUPS_HELP = "groups are lists of nodes that reach each other: [[0], [1, 2]], each node once"


@dataclass(frozen=True)
class Fault:
    """One fault: what happens, to which target, and when.

    Args:
        what: one of ``KINDS``.
        node: index of the node; n0 is 0.
        rank: rank, for faults of workers.
        role: one of ``ROLES`` in place of a node or rank. Without any target the seed chooses one.
        groups: for a partition: groups of nodes that reach each other.
        step: inject as soon as any rank has finished this step.
        at_s: inject so many seconds after the job's first step.
        phase: inject when a process first reaches this phase (after ``step`` or ``at_s``, if given): one of
            ``PHASES``, or the name of a failpoint.
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
    phase: str = ""
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
            near = config.suggest_similar(str(self.what), KINDS)
            raise ConfigError(f"there is no fault {self.what!r}.{near} There are: {', '.join(KINDS)}.")
        for name in SETTING_NAMES:
            given = getattr(self, name)
            if given is not None and name not in self.kind.settings:
                raise ConfigError(f"{self.what} has no {plan_key(name)}.{_describe_settings(self.what)}")
            if given is None:
                object.__setattr__(self, name, self.kind.settings.get(name))
        for name in ("at_s", "for_s", "back_after_s", "delay_s"):
            if getattr(self, name) is not None:  # round to milliseconds, the precision of plan files
                object.__setattr__(self, name, round(float(getattr(self, name)), 3))
                if not math.isfinite(getattr(self, name)):
                    raise ConfigError(f"{self.what}: {plan_key(name)} must be a time, as 5s.")
        groups = self.groups
        if not (isinstance(groups, Sequence) and all(isinstance(group, Sequence) for group in groups)):
            raise ConfigError(f"{self.what}: {GROUPS_HELP}.")
        object.__setattr__(self, "groups", tuple(tuple(group) for group in groups))
        _check_target(self)
        _check_time(self)
        _check_settings(self)

    @property
    def kind(self) -> FaultKind:
        """Return the kind, with all that holds for its faults."""
        return KINDS[self.what]

    @property
    def has_random_target(self) -> bool:
        """Whether the seed still has to choose the target."""
        if self.kind.target == NODES:
            return not self.groups
        return not self.role and self.node is None and self.rank is None

    @property
    def failpoint(self) -> str:
        """Return the failpoint of the phase; empty without one."""
        return failpoint_for_phase(self.phase) if self.phase else ""

    def __str__(self) -> str:
        return f"{self.what} {self.target_text}{self.time_text}"

    @property
    def target_text(self) -> str:
        """Describe the target."""
        if self.kind.target == NODES:
            return " | ".join(" ".join(f"n{node}" for node in group) for group in self.groups) or "random"
        if self.rank is not None:
            return f"rank {self.rank}"
        return self.role or ("random" if self.node is None else f"node {self.node}")

    @property
    def time_text(self) -> str:
        """Describe when the fault is due, after a space."""
        start = f"step {self.step}" if self.step is not None else ""
        start = start or ("" if self.at_s is None else format_duration(self.at_s))
        joint = " from " if self.phase else " at "
        ends = self.for_s is not None and self.for_s != self.kind.settings.get("for_s")
        return (
            (f" in {self.phase.removeprefix('in ')}" if self.phase else "")
            + (joint + start if start else "")
            + (f" for {format_duration(self.for_s)}" if ends and self.for_s is not None else "")
        )


def plan_key(name: str) -> str:
    """Return the name of a field in a plan file: ``for``, ``back-after``, ``rate``."""
    names = {"bytes_per_s": "rate", "limit_bytes": "limit"}
    return names.get(name, name.removesuffix("_s").replace("_", "-"))


PLAN_KEYS = {plan_key(field.name): field.name for field in fields(Fault)}


def format_duration(seconds: float) -> str:
    """Format seconds as a plan file has them: 6s, 0.25s."""
    return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"


def _check_target(fault: Fault) -> None:
    hits = fault.kind.target
    for name in ("node", "rank"):
        number = getattr(fault, name)
        if number is not None and (type(number) is not int or number < 0):
            raise ConfigError(f"{fault.what}: {name} is {number!r}: write a whole number from 0 on.")
    if fault.role and fault.role not in ROLES:
        raise ConfigError(f"{fault.what}: there is no role {fault.role!r}. There are: {', '.join(ROLES)}.")
    named = [fault.rank is not None, fault.node is not None, bool(fault.role), bool(fault.groups)]
    if sum(named) > 1:
        raise ConfigError(f"{fault.what}: give one of node, rank and role.")
    if fault.groups and hits != NODES:
        raise ConfigError(f"{fault.what}: groups are for partition.")
    if hits == NODES and sum(named[:3]):
        raise ConfigError(f"{fault.what} hits no single node; {GROUPS_HELP}.")
    if fault.rank is not None and hits != WORKER:
        raise ConfigError(f"{fault.what} hits a node: give its number as node, or role: rank-0.")
    if fault.role == "leader" and hits == WORKER:
        raise ConfigError(f"{fault.what} hits a worker, and the leader is an agent: give a rank.")
    if fault.groups:
        flat = [node for group in fault.groups for node in group]
        if any(type(node) is not int or node < 0 for node in flat) or len(set(flat)) < len(flat):
            raise ConfigError(f"{fault.what}: {GROUPS_HELP}.")
        if len(fault.groups) < 2 or not all(fault.groups):
            raise ConfigError(f"{fault.what}: {GROUPS_HELP}; two groups at least.")


def _check_time(fault: Fault) -> None:
    if fault.step is not None and (type(fault.step) is not int or fault.step < 1):
        raise ConfigError(f"{fault.what}: step is {fault.step!r}: steps begin with 1.")
    if fault.step is not None and fault.at_s is not None:
        raise ConfigError(f"{fault.what}: give a step or a time (at), not both.")
    if fault.step is None and fault.at_s is None and not fault.phase:
        raise ConfigError(f"{fault.what}: say when: step: 20, at: 40s, or phase: in commit.")
    if not fault.phase:
        return
    if not fault.failpoint:
        near = config.suggest_similar(fault.phase, [*PHASES, *WORKER_FAILPOINTS, *AGENT_FAILPOINTS])
        raise ConfigError(
            f"{fault.what}: there is no phase {fault.phase!r}.{near} There are: {', '.join(PHASES)}."
        )
    if fault.what in {"slow-rank", "skip-collective", "corrupt-message"}:
        raise ConfigError(f"{fault.what} has no phase: give a step or a time.")
    if fault.kind.in_process and fault.failpoint not in WORKER_FAILPOINTS:
        raise ConfigError(f"{fault.what} happens in a worker, and {fault.phase} is in the agent.")


def _check_settings(fault: Fault) -> None:
    def require(name: str, valid: bool, write: str) -> None:
        value = getattr(fault, name)
        if value is not None and not valid:
            raise ConfigError(f"{fault.what}: {plan_key(name)} is {value!r}: write {write}.")

    for name in ("for_s", "delay_s"):
        require(name, (getattr(fault, name) or 0) > 0, "a time above 0, as 5s")
    for name in ("at_s", "back_after_s"):
        require(name, (getattr(fault, name) or 0) >= 0, "a time, as 2s")
    for name in ("bytes_per_s", "limit_bytes"):
        require(name, (getattr(fault, name) or 0) > 0, "a size, as 1MB")
    is_number = isinstance(fault.percent, (int, float))
    require("percent", is_number and 0 < (fault.percent or 0) <= 100, "a share above 0 and up to 100")
    require("code", type(fault.code) is int and 0 < fault.code < 256, "an exit code, 1 to 255")
    require("signal", fault.signal in signal.Signals.__members__, "a signal's name, as SIGSEGV")
    require(
        "error",
        _is_raisable_exception(fault.error),
        "a built-in exception that takes one text, as ValueError",
    )


def _is_raisable_exception(name: str | None) -> bool:
    """Whether a failpoint can raise this exception."""
    kind = getattr(builtins, str(name), None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return False
    try:
        kind("text")
    except TypeError:  # some constructors need more arguments; UnicodeDecodeError needs five
        return False
    return True


def _describe_settings(kind_name: str) -> str:
    known = [plan_key(name) for name in KINDS[kind_name].settings]
    return f" It has: {', '.join(known)}." if known else " Nothing of it can be set."


# ---- plans ---------------------------------------------------------------------------------------------

MAX_RANDOM_FAULTS = 10_000
MIN_RANDOM_GAP_S = 1.0  # with a shorter gap nothing could happen between two faults


@dataclass(frozen=True)
class RandomFaults:
    """Random faults: one per ``mtbf_s`` seconds on average, at most ``count``.

    All ``kinds`` are equally likely. Without any, faults are drawn from all kinds that a job survives and the
    nodes support, by their weights.
    """

    mtbf_s: float
    kinds: tuple[str, ...] = ()
    count: int | None = None

    def __post_init__(self) -> None:
        for what in self.kinds:
            Fault(what, at_s=0.0)
        object.__setattr__(self, "mtbf_s", round(float(self.mtbf_s), 3))
        if not 0 < self.mtbf_s < float("inf"):
            raise ConfigError("mtbf, the mean time between faults, must be above 0, as in 15s.")
        if self.count is not None and not (type(self.count) is int and 1 <= self.count <= MAX_RANDOM_FAULTS):
            raise ConfigError(f"count is {self.count!r}: write 1 to {MAX_RANDOM_FAULTS}.")


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


@dataclass(frozen=True)
class FaultPlan:
    """Faults, random faults, and the seed that decides what they leave open."""

    faults: tuple[Fault, ...] = ()
    every: RandomFaults | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            raise ConfigError(f"the seed is {self.seed!r}: write a whole number from 0 on.")

    def validate(self, shape: JobShape) -> None:
        """Raise a ConfigError for a fault that cannot happen on these nodes."""
        for number, fault in enumerate(self.faults, 1):
            _require_possible(fault, shape, f"fault {number} ({fault})")
        for what in self.every.kinds if self.every else ():
            _require_possible(Fault(what, at_s=0.0), shape, f"every: {what}")

    def schedule(self, shape: JobShape, *, until_s: float | None = None) -> tuple[Fault, ...]:
        """Return all faults, the written and the random ones. Only roles are still unresolved.

        ``until_s`` bounds the random faults. The fault injector reports a written fault that is
        not due by then.
        """
        rng = random.Random(self.seed)  # noqa: S311  no secret
        written = [_draw_target(fault, shape, rng) for fault in self.faults]
        return (*written, *self._draw_random_faults(shape, until_s, rng))

    def _draw_random_faults(
        self, shape: JobShape, until_s: float | None, rng: random.Random
    ) -> Iterable[Fault]:
        every = self.every
        if every is None:
            return
        if until_s is None and every.count is None:
            raise ConfigError("faults are drawn without an end: give --for, or count in `every`.")
        weights = dict.fromkeys(every.kinds, 1.0) or default_weights(shape)
        at = 0.0
        for _ in range(every.count or MAX_RANDOM_FAULTS):
            at += max(MIN_RANDOM_GAP_S, rng.expovariate(1 / every.mtbf_s))
            what = rng.choices(list(weights), list(weights.values()))[0]
            if until_s is not None and at > until_s:
                return
            yield _draw_target(Fault(what, at_s=at), shape, rng)


def default_weights(shape: JobShape) -> dict[str, float]:
    """Return the weights of the kinds that a job survives and the nodes support."""
    return {
        what: float(kind.weight)
        for what, kind in KINDS.items()
        if kind.weight
        and (shape.hosts == "namespaces" or not kind.needs_namespaces)
        and not (kind.target == NODES and shape.nodes < 3)
    }


def _draw_target(fault: Fault, shape: JobShape, rng: random.Random) -> Fault:
    if not fault.has_random_target:
        return fault
    if fault.kind.target == NODES:
        order = list(range(shape.nodes))
        rng.shuffle(order)
        few = rng.randint(1, max(1, (shape.nodes - 1) // 2))
        return replace(fault, groups=(tuple(sorted(order[:few])), tuple(sorted(order[few:]))))
    if fault.kind.target == WORKER:
        return replace(fault, rank=rng.randrange(shape.world_size))
    return replace(fault, node=rng.randrange(shape.nodes))


def _require_possible(fault: Fault, shape: JobShape, where: str) -> None:
    nodes = shape.nodes
    reason = ""
    if fault.node is not None and fault.node >= nodes:
        reason = f"there is no node {fault.node}: {nodes} nodes are 0 to {nodes - 1}."
    elif fault.rank is not None and fault.rank >= shape.world_size:
        last = shape.world_size - 1
        reason = f"there is no rank {fault.rank}: {shape.world_size} workers are 0 to {last}."
    elif fault.groups and sorted(node for group in fault.groups for node in group) != list(range(nodes)):
        reason = f"{GROUPS_HELP}, 0 to {nodes - 1}."
    elif fault.kind.target == NODES and nodes < 2:
        reason = "it takes two nodes at least."
    elif fault.kind.needs_namespaces and shape.hosts != "namespaces":
        reason = "it takes nodes with a network and a disk of their own: --hosts namespaces (as root)."
    if reason:
        raise ConfigError(f"{where}: {reason}")


# ---- plan files ----------------------------------------------------------------------------------------

DURATION_FIELDS = ("at_s", "for_s", "back_after_s", "delay_s", "mtbf_s")
_SIZE_FIELDS = ("bytes_per_s", "limit_bytes")
_RANDOM_FAULTS_KEYS = {plan_key(field.name): field.name for field in fields(RandomFaults)}
_EXAMPLE = "{what: kill-worker, rank: 1, step: 20}"


def read_plan(path: Path) -> FaultPlan:
    """Read a plan from a file."""
    try:
        return parse_plan(path.read_text(), str(path))
    except OSError as error:
        raise ConfigError(f"the plan {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the plan {path} is not text.") from error


def parse_plan(text: str, source_name: str = "plan") -> FaultPlan:
    """Parse a plan; ``source_name`` names it in errors.

    An unknown key or a value of the wrong form is a ConfigError that names file and entry.
    """
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{source_name}: is not YAML: {' '.join(str(error).split())[:200]}") from error
    with _name_source(source_name):
        values = _read_mapping({} if content is None else content, dict.fromkeys(("seed", "faults", "every")))
        entries = values.get("faults") or []
        if not isinstance(entries, list):
            raise ConfigError(f"faults is a list: one line for each, with a dash, as - {_EXAMPLE}.")
        listed = []
        for number, entry in enumerate(entries, 1):
            with _name_source(f"fault {number}"):
                settings = _read_mapping(entry, PLAN_KEYS)
                if "what" not in settings:
                    raise ConfigError(f"say what: one of the faults, as in {_EXAMPLE}.")
                listed.append(Fault(**settings))
        every = None
        if values.get("every") is not None:
            with _name_source("every"):
                settings = _read_mapping(values["every"], _RANDOM_FAULTS_KEYS)
                if "mtbf_s" not in settings:
                    raise ConfigError("mtbf, the mean time between faults, is missing: write mtbf: 15s.")
                every = RandomFaults(**settings)
        return FaultPlan(tuple(listed), every, values.get("seed", 0))


def _read_mapping(content: object, known: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the values of a mapping by field name; a known key without a field stands for itself."""
    if not isinstance(content, dict):
        raise ConfigError(f"must be lines of the form NAME: VALUE, or {_EXAMPLE}.")
    values: dict[str, Any] = {}
    for given, value in content.items():
        key = str(given).replace("_", "-")
        if key not in known:
            similar = config.suggest_similar(key, known)
            raise ConfigError(f"there is no {key!r}.{similar} There are: {', '.join(known)}.")
        name = known[key] or key
        values[name] = _parse_value(name, key, value)
    return values


def _parse_value(name: str, key: str, value: Any) -> Any:
    if name in DURATION_FIELDS:
        return parse_duration(key, value)
    if name in _SIZE_FIELDS:
        return parse_size(key, str(value).removesuffix("/s"))
    if name == "kinds":
        if not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
            raise ConfigError("kinds is a list of faults, as [kill-worker, raise].")
        return tuple(value)
    if isinstance(value, (list, dict)) and name not in {"groups", "faults", "every"}:
        raise ConfigError(f"{key} must be one value.")
    return value


@contextlib.contextmanager
def _name_source(source: str) -> Iterator[None]:
    """Begin each ConfigError within the context with ``source``."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
