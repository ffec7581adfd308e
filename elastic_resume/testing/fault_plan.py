"""Read and write fault plans.

A plan is a list of faults, a rule for random faults, and a seed. The seed decides everything that the plan
leaves open, so the same plan with the same seed is the same schedule on every machine. Plans are written in
Python, or in YAML::

    seed: 7
    faults:
      - worker 1 at step 20
      - {what: cut, node: 2, step: 35, for: 5s}
      - {what: kill-agent, role: leader, phase: in commit}
    every:
      mtbf: 15s
      kinds: {kill-worker: 3, kill-node: 1}

An unknown key, a key that is given twice, or a value of the wrong form is a ConfigError that names file, line
and entry. A fault that cannot happen in this job, or on these nodes, is refused before anything starts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from elastic_resume import config
from elastic_resume.errors import ConfigError
from elastic_resume.testing import faults
from elastic_resume.testing.faults import (
    GROUPS_HELP,
    KINDS,
    NODES,
    PLAN_KEYS,
    WORKER,
    Fault,
    format_duration,
    plan_key,
)
from elastic_resume.units import parse_duration

__all__ = ["Fault", "FaultPlan", "RandomFaults", "default_weights"]

MAX_FAULTS = 10_000
MIN_RANDOM_GAP_S = 1.0  # less, and two faults are one: nothing can have happened between them


@dataclass(frozen=True)
class RandomFaults:
    """Random faults: one per ``mtbf_s`` seconds on average.

    ``kinds`` gives a weight to each kind; empty means all kinds that a job survives and the nodes support.
    ``from_s`` and ``until_s`` are seconds after the first step (None: as long as faults are wanted);
    ``count`` limits the number.
    """

    mtbf_s: float
    kinds: tuple[tuple[str, float], ...] = ()
    from_s: float = 0.0
    until_s: float | None = None
    count: int | None = None

    def __post_init__(self) -> None:
        given = self.kinds.items() if isinstance(self.kinds, Mapping) else self.kinds
        object.__setattr__(self, "kinds", tuple((str(what), float(weight)) for what, weight in given))
        for what, weight in self.kinds:
            Fault(what, at_s=0.0)
            if not 0 < weight < float("inf"):
                raise ConfigError(f"the weight of {what} is {weight:g}: write a number above 0.")
        for name in ("mtbf_s", "from_s", "until_s"):
            given_s = getattr(self, name)
            if given_s is not None:
                object.__setattr__(self, name, round(float(given_s), 3))
        if not 0 < self.mtbf_s < float("inf"):
            raise ConfigError("mtbf, the mean time between faults, must be above 0, as in 15s.")
        if self.count is not None and not 1 <= self.count <= MAX_FAULTS:
            raise ConfigError(f"count is {self.count}: write 1 to {MAX_FAULTS}.")


@dataclass(frozen=True)
class FaultPlan:
    """Faults, random faults, and the seed that decides what they leave open."""

    faults: tuple[Fault, ...] = ()
    every: RandomFaults | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            raise ConfigError(f"the seed is {self.seed!r}: write a whole number from 0 on.")

    @classmethod
    def from_faults(cls, *faults: Fault | str, every: RandomFaults | None = None, seed: int = 0) -> FaultPlan:
        """Make a plan of faults; each may be a line of text (see `Fault.parse`)."""
        listed = (Fault.parse(one) if isinstance(one, str) else one for one in faults)
        return cls(tuple(listed), every, seed)

    def validate(self, *, nodes: int, workers_per_node: int = 1, node_resources: Iterable[str] = ()) -> None:
        """Raise a ConfigError for a fault that cannot happen on nodes of this kind and number."""
        able = {faults.PROCESSES, *node_resources}
        for number, fault in enumerate(self.faults, 1):
            why = _target_error(fault, nodes, nodes * workers_per_node) or _resource_error(fault.what, able)
            if why:
                raise ConfigError(f"fault {number} ({fault}): {why}")
        for what, _ in self.every.kinds if self.every else ():
            why = _resource_error(what, able) or _target_error(
                Fault(what, at_s=0.0), nodes, nodes * workers_per_node
            )
            if why:
                raise ConfigError(f"every: {what}: {why}")

    def schedule(
        self,
        *,
        nodes: int,
        workers_per_node: int = 1,
        until_s: float | None = None,
        node_resources: Iterable[str] = (),
    ) -> tuple[Fault, ...]:
        """Return all faults, the written and the random ones. Only roles are still unresolved.

        ``until_s`` bounds the random faults. A written fault that is not due by then is reported by
        `FaultInjector`.
        """
        chance = random.Random(self.seed)  # noqa: S311  no secret
        written = [_draw_target(fault, nodes, nodes * workers_per_node, chance) for fault in self.faults]
        drawn = self._draw_random_faults(
            nodes, nodes * workers_per_node, until_s, {faults.PROCESSES, *node_resources}, chance
        )
        return (*written, *drawn)

    def _draw_random_faults(
        self, nodes: int, world_size: int, until_s: float | None, resources: set[str], rng: random.Random
    ) -> Iterable[Fault]:
        every = self.every
        if every is None:
            return
        ends = [end for end in (every.until_s, until_s) if end is not None]
        if not ends and every.count is None:
            raise ConfigError("faults are drawn without an end: give --for, or until or count in `every`.")
        weights = dict(every.kinds) or default_weights(resources, nodes)
        at, count = every.from_s, every.count or MAX_FAULTS
        for _ in range(count):
            at += max(MIN_RANDOM_GAP_S, rng.expovariate(1 / every.mtbf_s))
            what = rng.choices(list(weights), list(weights.values()))[0]
            if at > min(ends, default=float("inf")):
                return
            yield _draw_target(Fault(what, at_s=at), nodes, world_size, rng)


def default_weights(node_resources: Iterable[str], nodes: int) -> dict[str, float]:
    """Return the weights of the kinds that a job survives and the nodes support."""
    able = {faults.PROCESSES, *node_resources}
    return {
        what: float(kind.weight)
        for what, kind in KINDS.items()
        if kind.weight and kind.required_resource in able and not (kind.target == NODES and nodes < 3)
    }


def _draw_target(fault: Fault, nodes: int, world_size: int, rng: random.Random) -> Fault:
    if not fault.has_random_target:
        return fault
    if fault.kind.target == NODES:
        order = list(range(nodes))
        rng.shuffle(order)
        few = rng.randint(1, max(1, (nodes - 1) // 2))
        return replace(fault, groups=(tuple(sorted(order[:few])), tuple(sorted(order[few:]))))
    if fault.role == "lead" or fault.kind.target != WORKER:
        return replace(fault, node=rng.randrange(nodes), role="lead" if fault.role == "lead" else "")
    return replace(fault, rank=rng.randrange(world_size), role="")


def _target_error(fault: Fault, nodes: int, world_size: int) -> str:
    if fault.node is not None and fault.node >= nodes:
        return f"there is no node {fault.node}: {nodes} nodes are 0 to {nodes - 1}."
    if fault.rank is not None and fault.rank >= world_size:
        return f"there is no rank {fault.rank}: {world_size} workers are 0 to {world_size - 1}."
    if fault.groups and sorted(node for group in fault.groups for node in group) != list(range(nodes)):
        return f"{GROUPS_HELP}, 0 to {nodes - 1}."
    if fault.kind.target == NODES and nodes < 2:
        return "it takes two nodes at least."
    return ""


def _resource_error(kind_name: str, resources: set[str]) -> str:
    needs = KINDS[kind_name].required_resource
    if needs in resources:
        return ""
    return f"it takes nodes that have {needs} of their own, which is --hosts namespaces (as root)."


T = TypeVar("T")

MAX_PLAN_BYTES = 1 << 20

_DURATION_FIELDS = ("at_s", "for_s", "back_after_s", "delay_s", "mtbf_s", "from_s", "until_s")
_SIZE_FIELDS = ("bytes_per_s", "limit_bytes")
_RANDOM_FAULTS_KEYS = {
    "mtbf": "mtbf_s",
    "kinds": "kinds",
    "from": "from_s",
    "until": "until_s",
    "count": "count",
}


def read(path: Path) -> FaultPlan:
    """Read a plan from a file."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_PLAN_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the plan {path} cannot be read: {error.strerror}.") from error
    if len(data) > MAX_PLAN_BYTES:
        raise ConfigError(f"the plan {path} has more than {MAX_PLAN_BYTES} bytes.")
    try:
        return parse(data.decode(), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"the plan {path} is not text.") from error


def parse(text: str, source_name: str = "plan") -> FaultPlan:
    """Parse a plan; ``where`` names its source in errors."""
    try:
        root = _add_location(lambda: yaml.compose(text, Loader=_Loader), source_name)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{source_name}: is not YAML: {' '.join(str(error).split())[:200]}") from error
    told = (
        _parse_mapping(root, source_name, {"seed": "seed", "faults": "faults", "every": "every"})
        if root
        else {}
    )
    listed = told.get("faults")
    found = []
    if listed is not None:
        if not isinstance(listed, yaml.SequenceNode):
            raise ConfigError(
                f"{_format_location(source_name, listed)}: faults is a list: one line for each, with a dash."
            )
        if len(listed.value) > MAX_FAULTS:
            raise ConfigError(f"{source_name}: {len(listed.value)} faults; there may be {MAX_FAULTS}.")
        found = [
            _parse_fault(one, f"{_format_location(source_name, one)}: fault {i}")
            for i, one in enumerate(listed.value, 1)
        ]
    seed = (
        _parse_whole_number(told["seed"], f"{_format_location(source_name, told['seed'])}: seed")
        if "seed" in told
        else 0
    )
    every = _parse_random_faults(told["every"], source_name) if "every" in told else None
    return _add_location(lambda: FaultPlan(tuple(found), every, seed), source_name)


def to_text(plan: FaultPlan) -> str:
    """Format a plan as YAML; `parse` returns an equal plan."""
    told: dict[str, Any] = {"seed": plan.seed}
    if plan.faults:
        told["faults"] = [_fault_to_mapping(fault) for fault in plan.faults]
    if plan.every is not None:
        told["every"] = {
            key: _format_value(name, getattr(plan.every, name))
            for key, name in _RANDOM_FAULTS_KEYS.items()
            if getattr(plan.every, name) not in (None, ())
        }
    return yaml.safe_dump(told, sort_keys=False, default_flow_style=None, width=100)


# ---- reading -------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """A YAML loader without aliases: nested aliases make 40 kB take minutes."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            line = event.start_mark.line + 1
            raise ConfigError(f"line {line}: *{event.anchor} stands for what is elsewhere: write it out.")
        return super().compose_node(parent, index)


def _parse_fault(node: yaml.Node, where: str) -> Fault:
    if isinstance(node, yaml.ScalarNode):
        return _add_location(lambda: Fault.parse(str(node.value)), where)
    told = _parse_mapping(node, where, PLAN_KEYS, numbered=False)
    given = {name: _parse_value(name, value, f"{where}: {plan_key(name)}") for name, value in told.items()}
    if "what" not in given:
        raise ConfigError(f"{where}: say what: one of the faults, as in {{what: kill-worker, step: 20}}.")
    return _add_location(lambda: Fault(**given), where)


def _parse_random_faults(node: yaml.Node, where: str) -> RandomFaults:
    told = _parse_mapping(
        node, f"{_format_location(where, node)}: every", _RANDOM_FAULTS_KEYS, numbered=False
    )
    where = f"{_format_location(where, node)}: every"
    given = {name: _parse_value(name, value, f"{where}: {name}") for name, value in told.items()}
    if "mtbf_s" not in given:
        raise ConfigError(f"{where}: mtbf, the mean time between faults, is missing: write mtbf: 15s.")
    return _add_location(lambda: RandomFaults(**given), where)


def _parse_value(name: str, node: yaml.Node, where: str) -> Any:
    if name == "groups":
        return tuple(
            tuple(_parse_whole_number(one, where) for one in _parse_list(group, where))
            for group in _parse_list(node, where)
        )
    if name == "kinds":
        if isinstance(node, yaml.SequenceNode):
            return tuple((_parse_scalar(one, where), 1.0) for one in node.value)
        return tuple(
            (what, _parse_number(one, f"{where}: {what}")) for what, one in _parse_pairs(node, where).items()
        )
    text = _parse_scalar(node, where)
    if name == "repeat":
        if text.lower() not in {"true", "false"}:
            raise ConfigError(f"{where} is {text!r}: write true or false.")
        return text.lower() == "true"
    if name in _DURATION_FIELDS:
        return parse_duration(where, text)
    if name in _SIZE_FIELDS:
        return config.parse_size(where, text.removesuffix("/s"))
    if name in {"node", "rank", "step", "code", "count"}:
        return _parse_whole_number(node, where)
    return _parse_number(node, where) if name in {"percent", "fraction"} else text


def _parse_mapping(
    node: yaml.Node, where: str, known: Mapping[str, str], *, numbered: bool = True
) -> dict[str, yaml.Node]:
    """Return the values of a mapping by field name; refuse unknown keys."""
    found: dict[str, yaml.Node] = {}
    for key, value in _parse_pairs(node, where).items():
        name = known.get(key.replace("_", "-"))
        at = _format_location(where, value) if numbered else where
        if name is None:
            near = config.suggest_similar(key, known)
            raise ConfigError(f"{at}: there is no {key!r}.{near} There are: {', '.join(known)}.")
        if name in found:
            raise ConfigError(f"{at}: {key!r} is given twice.")
        found[name] = value
    return found


def _parse_pairs(node: yaml.Node, where: str) -> dict[str, yaml.Node]:
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{where}: must be lines of the form NAME: VALUE.")
    found: dict[str, yaml.Node] = {}
    for key_node, value in node.value:
        key = _parse_scalar(key_node, f"{where}: a key")
        if key in found:
            raise ConfigError(f"{where}: {key!r} is given twice.")
        found[key] = value
    return found


def _parse_list(node: yaml.Node, where: str) -> list[yaml.Node]:
    if not isinstance(node, yaml.SequenceNode):
        raise ConfigError(f"{where} is a list of lists, as in [[0], [1, 2]].")
    return list(node.value)


def _parse_scalar(node: yaml.Node, where: str) -> str:
    if not isinstance(node, yaml.ScalarNode) or not node.value:
        raise ConfigError(f"{where} must be one value.")
    return str(node.value)


def _parse_whole_number(node: yaml.Node, where: str) -> int:
    text = _parse_scalar(node, where)
    if not text.isascii() or not text.isdecimal() or len(text) > 19:
        raise ConfigError(f"{where} is {text[:100]!r}: write a whole number.")
    return int(text)


def _parse_number(node: yaml.Node, where: str) -> float:
    text = _parse_scalar(node, where)
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"{where} is {text[:100]!r}: write a number.") from error


def _add_location(make: Callable[[], T], where: str) -> T:
    try:
        return make()
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _format_location(where: str, node: yaml.Node) -> str:
    return f"{where}:{node.start_mark.line + 1}"


# ---- writing -------------------------------------------------------------------------------------------


def _fault_to_mapping(fault: Fault) -> dict[str, Any]:
    defaults = {field.name: field.default for field in fields(Fault)} | dict(fault.kind.settings)
    return {
        key: _format_value(name, getattr(fault, name))
        for key, name in PLAN_KEYS.items()
        if name == "what" or getattr(fault, name) != defaults[name]
    }


def _format_value(name: str, value: Any) -> Any:
    if name in _DURATION_FIELDS and value is not None:
        return format_duration(value)
    if name == "groups":
        return [list(group) for group in value]
    return dict(value) if name == "kinds" else value
