"""Define the reasons why a view ended, and why a node leaves, is refused, or waits.

A reason is a frozen value with a kind and fields. The code that detects a condition creates it. Messages
carry it as it is, events as JSON (`to_json`). Only `policy.wording` formats it as text, and no code decides
by that text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import heapq
import re
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NoReturn

MAX_NODES_NAMED = 16
"""Nodes named in one reason."""


class Loss(Enum):
    """How a node was lost."""

    DIED = "died"
    LEFT = "left"
    RESTARTED = "restarted"
    """It is back as a new process."""
    REPLACED = "replaced"
    """It is back with an empty disk."""
    UNREACHABLE = "unreachable"
    UNRESPONSIVE = "unresponsive"
    """It did not acknowledge a proposal."""
    REFUSED = "refused"
    """It has another script."""


class Departure(Enum):
    """Why a node leaves by itself, without a signal or an error."""

    EXCLUDED = "excluded"
    """The restart policy excluded it."""
    JOB_FAILED = "job-failed"
    NO_RENDEZVOUS = "no-rendezvous"
    """It found no view in time, or was refused."""


@dataclass(frozen=True, slots=True)
class Signalled:
    """A signal asked the agent to end, as before the end of its machine or job.

    ``cause``: why the agent has sent itself the signal: deadline, or what a mechanism names; else empty.
    """

    signal: str
    cause: str = ""


@dataclass(frozen=True, slots=True)
class ErrorRaised:
    """An error ended the agent, or a part of it."""

    type: str
    message: str


DepartureReason = Departure | Signalled | ErrorRaised


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node was lost; `departure` says why if it left."""

    node: str
    loss: Loss
    departure: DepartureReason | None = None


@dataclass(frozen=True, slots=True)
class NodesUnreachable:
    """A node cannot reach others."""

    node: str
    others: tuple[str, ...]


class ViewEnd(Enum):
    """Why a leader ended a view, or stepped down, by itself; or why a node's own workers stop."""

    NEWCOMERS = "newcomers"
    PAUSED = "paused"
    """The leader was paused for longer than its lease."""
    DISK_STUCK = "disk-stuck"
    """The leader's disk does not complete writes."""
    NO_QUORUM = "no-quorum"
    """Too few members follow the leader."""
    WORKERS_STUCK = "workers-stuck"
    """The leader's own workers do not stop, and others may train without them."""
    JOB_OVER = "job-over"
    LEADER_STEPPED_DOWN = "leader-stepped-down"
    """Or it continues without this node."""
    NOT_READMITTED = "not-readmitted"
    """The leader does not readmit this node after a broken connection."""
    LATER_VIEW_DECIDED = "later-view-decided"
    ENDED_MEANWHILE = "ended-meanwhile"
    """The view of a node ended while the node was reconnecting."""
    OTHER_LEADS = "other-leads"
    """The node at an address leads, with higher priority."""
    LEADER_IDLE = "leader-idle"
    """The leader starts no generation, and another node leads too."""
    LEASE_EXPIRED = "lease-expired"
    """No message of the leader renewed the lease of a node's workers."""


@dataclass(frozen=True, slots=True)
class WorkersStopped:
    """The workers of a node stopped: they failed, or never started."""

    node: str


@dataclass(frozen=True, slots=True)
class ViewEndOf:
    """A view's end and what it is about: the names of nodes, an address or a generation."""

    end: ViewEnd
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SettingDiffers:
    """A setting that must be equal on all nodes is not; asking again will not help."""

    setting: str
    here: str
    at_leader: str


@dataclass(frozen=True, slots=True)
class NameTaken:
    """A live agent has the node's name.

    If `is_alive`, it has answered since the node asked: two machines have one name.
    """

    node: str
    is_alive: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class DirectoryCopied:
    """Another process has the node's directory; if `is_certain`, it answers, or is a later one."""

    node: str
    is_certain: bool


@dataclass(frozen=True, slots=True)
class OtherJob:
    """A node's directory has worlds of another job that has the same run id.

    `members` names some nodes of that job's last world. If `is_running`, the leader's job runs.
    """

    node: str
    generation: int
    members: tuple[str, ...]
    is_running: bool


Refusal = SettingDiffers | NameTaken | DirectoryCopied | OtherJob


ViewEndReason = NodeLost | WorkersStopped | NodesUnreachable | ViewEnd | ViewEndOf | Refusal


class Wait(Enum):
    """Why no view is formed yet."""

    NOTHING_JOINED = "nothing-joined"
    LINK_BROKEN = "link-broken"


@dataclass(frozen=True, slots=True)
class WorkersRunning:
    """The workers of a node have not stopped."""

    node: str


@dataclass(frozen=True, slots=True)
class TooFewNodes:
    """Fewer nodes have joined than the job needs; those `left_out` cannot reach others."""

    joined: int
    min_nodes: int
    left_out: tuple[NodesUnreachable, ...] = ()


@dataclass(frozen=True, slots=True)
class VotesMissing:
    """Too few votes of members of the newest view count; `missing_nodes` names some that are missing."""

    generation: int
    votes: int
    needed: int
    missing_nodes: tuple[str, ...]
    missing_count: int


@dataclass(frozen=True, slots=True)
class AbsentCandidates:
    """Addresses of some candidates that are not here, and what the last call of each met."""

    addresses: tuple[str, ...]
    errors: tuple[str, ...]
    count: int


@dataclass(frozen=True, slots=True)
class CandidatesMissing:
    """Too few candidates have voted on the first view."""

    votes: int
    needed: int
    absent: AbsentCandidates


@dataclass(frozen=True, slots=True)
class MembersAbsent:
    """Members of the newest view may still come; `nodes` names `MAX_NODES_NAMED` of them."""

    nodes: tuple[str, ...]
    count: int


@dataclass(frozen=True, slots=True)
class LastCall:
    """The first view waits until no new node has joined for so long."""

    joined: int
    max_nodes: int
    timeout_s: float


WaitReason = Wait | WorkersRunning | TooFewNodes | VotesMissing | CandidatesMissing | MembersAbsent | LastCall


@dataclass(frozen=True, slots=True)
class LeaderWaits:
    """The leader started no generation with this node."""

    leader: str
    reason: WaitReason | None


@dataclass(frozen=True, slots=True)
class NoLeader:
    """No leader answers at the candidates, nor at any member of the newest view."""

    absent: AbsentCandidates


@dataclass(frozen=True, slots=True)
class NodeRefused:
    """The node at that address refuses this one."""

    address: str
    refusal: Refusal


class OwnObstacle(Enum):
    """What keeps a node from joining that lies in itself."""

    OWN_DISK_STUCK = "own-disk-stuck"
    THREAD_ENDED = "thread-ended"
    """An internal error of elastic_resume."""


JoinObstacle = WaitReason | LeaderWaits | NoLeader | NodeRefused | OwnObstacle


@dataclass(frozen=True, slots=True)
class JoinTimeout:
    """A node found no view within the join timeout; `obstacle` is what it waited for."""

    timeout_s: float
    obstacle: JoinObstacle | None


@dataclass(frozen=True, slots=True)
class JobFinished:
    """The workers of all nodes have succeeded, except those of absent ones."""

    unfinished: tuple[str, ...] = ()
    unfinished_count: int = 0


@dataclass(frozen=True, slots=True)
class NodeArguments:
    """The training script's arguments on a node, in one line with secrets masked."""

    node: str
    arguments: str


def name_nodes(nodes: Iterable[object]) -> tuple[str, ...]:
    """Return the names that a reason carries."""
    return tuple(heapq.nsmallest(MAX_NODES_NAMED, map(str, nodes)))


def to_json(fact: Any) -> Any:
    """Return a fact as plain JSON: its fields, and its class or the name of its member as ``kind``."""
    if isinstance(fact, Enum):
        return {"kind": fact.name.lower().replace("_", "-")}
    if dataclasses.is_dataclass(fact):
        fields = {field.name: to_json(getattr(fact, field.name)) for field in dataclasses.fields(fact)}
        fact_class: Any = type(fact)
        return {"kind": _kind_of(fact_class), **fields}
    return [to_json(item) for item in fact] if isinstance(fact, tuple) else fact


def from_json(hint: Any, value: Any) -> Any:
    """Return the fact of the type ``hint`` that `to_json` has turned into ``value``.

    Raises:
        ValueError: it is no such fact.

    """
    for option in typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,):
        with contextlib.suppress(ValueError):
            return _read_json(option, value)
    return _reject(hint, value)


def _read_json(hint: Any, value: Any) -> Any:
    if typing.get_origin(hint) is tuple and isinstance(value, list):
        return tuple(from_json(typing.get_args(hint)[0], item) for item in value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return next((member for member in hint if to_json(member) == value), None) or _reject(hint, value)
    fact_class: Any = hint if dataclasses.is_dataclass(hint) else None
    if fact_class and isinstance(value, dict):
        hints = _get_hints(fact_class)
        if "kind" in hints or value.get("kind") == _kind_of(fact_class):
            return fact_class(**{name: from_json(kind, value.get(name)) for name, kind in hints.items()})
    if hint is float and type(value) is int:
        return float(value)
    return value if type(value) is hint else _reject(hint, value)


def _reject(hint: Any, value: Any) -> NoReturn:
    raise ValueError(f"not {hint}: {value!r}")


def _kind_of(fact_class: type[Any]) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "-", fact_class.__name__).lower()


_get_hints: Any = functools.cache(typing.get_type_hints)
