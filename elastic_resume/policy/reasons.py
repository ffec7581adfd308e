"""Reasons, as facts: why a view ended, why a node leaves, is refused, or waits.

They are made where the fact is known, and messages carry them. `describe` puts them into words, for people
only: nothing decides by the words.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

MAX_NODES_NAMED = 16
"""Nodes named in one reason."""


class Loss(Enum):
    """How a node was lost."""

    DIED = "died"
    LEFT = "left"
    RESTARTED = "is back as a new process"
    REPLACED = "is back with an empty disk"
    UNREACHABLE = "is unreachable"
    SILENT = "did not acknowledge a proposal"


@dataclass(frozen=True, slots=True)
class Departure:
    """Why a node leaves by itself; `is_asked`: by a signal, which announces the end of its machine or job."""

    text: str
    is_asked: bool = False


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node was lost; `departure` says why if it left."""

    node: str
    loss: Loss
    departure: Departure | None = None


@dataclass(frozen=True, slots=True)
class WorkersStopped:
    """The workers of a node stopped: they failed, or never started."""

    node: str


@dataclass(frozen=True, slots=True)
class NodesUnreachable:
    """A node cannot reach others."""

    node: str
    others: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LaterViewDecided:
    """Others have decided a later view."""

    generation: int


@dataclass(frozen=True, slots=True)
class EndedMeanwhile:
    """The view of a node ended while the node was reconnecting."""

    generation: int


@dataclass(frozen=True, slots=True)
class OtherLeads:
    """The node at that address leads, with higher priority."""

    address: str


@dataclass(frozen=True, slots=True)
class JobOver:
    """The job ends: it failed for the reason that its workers gave, or every node has finished."""

    failure: str = ""


class LeaderReason(Enum):
    """Why a leader ended a view, or stepped down, by itself."""

    NEWCOMERS = "newcomers are here"
    PAUSED = "the leader was paused for longer than its lease"
    DISK_STUCK = "the leader's disk does not complete writes"
    NO_QUORUM = "too few members follow it, and perhaps more follow another"
    WORKERS_STUCK = "its workers do not stop, and others may train without them"


ViewEndReason = (
    NodeLost
    | WorkersStopped
    | NodesUnreachable
    | LaterViewDecided
    | EndedMeanwhile
    | OtherLeads
    | JobOver
    | LeaderReason
)


@dataclass(frozen=True, slots=True)
class SettingDiffers:
    """A setting that must be equal on all nodes is not; asking again will not help."""

    setting: str
    here: str
    at_leader: str


@dataclass(frozen=True, slots=True)
class NameTaken:
    """A live agent has the node's name."""

    node: str


Refusal = SettingDiffers | NameTaken


class Wait(Enum):
    """Why no view is formed yet."""

    NOTHING_JOINED = "no node has joined yet"
    LINK_BROKEN = "a connection has just broken"


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
class CandidatesMissing:
    """Too few candidates have voted on the first view; `missing` lists others, with what calls met."""

    votes: int
    needed: int
    missing: str


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


def name_nodes(nodes: Iterable[object]) -> tuple[str, ...]:
    """Return the names that a reason carries."""
    return tuple(heapq.nsmallest(MAX_NODES_NAMED, map(str, nodes)))


def format_node_names(names: Iterable[object], count: int = 0) -> str:
    """List node names for people, at most `MAX_NODES_NAMED`; `count` is their number if not all are given."""
    texts = list(map(str, names))
    more = max(count, len(texts)) - MAX_NODES_NAMED
    return ", ".join(heapq.nsmallest(MAX_NODES_NAMED, texts)) + (f" and {more} more" if more > 0 else "")


def describe(reason: ViewEndReason | Refusal | WaitReason) -> str:
    """Return one clause for people."""
    match reason:
        case LeaderReason() | Wait():
            return str(reason.value)
        case NodeLost(node):
            return f"{node} {describe_loss(reason)}"
        case WorkersStopped(node):
            return f"the workers of {node} stopped"
        case NodesUnreachable(node, others):
            return f"{node} cannot reach {format_node_names(others)}"
        case LaterViewDecided(generation):
            return f"generation {generation} was decided elsewhere"
        case EndedMeanwhile(generation):
            return f"generation {generation} ended while this node was reconnecting"
        case OtherLeads(address):
            return f"{address} leads"
        case JobOver(failure):
            return failure or "every node has finished"
        case SettingDiffers(setting, here, at_leader):
            return f"{setting} is {here} on this node and {at_leader} at the leader: give all nodes the same"
        case NameTaken(node):
            remedy = "give one of them a different name with ELASTIC_RESUME_NODE_NAME"
            return f"another live agent is called {node}: {remedy}"
        case WorkersRunning(node):
            return f"the workers of {node} have not stopped"
        case TooFewNodes(joined, min_nodes, left_out):
            reasons = [f"{describe(reason)}, and is left out until it can" for reason in left_out]
            return "; ".join([f"{joined} of at least {min_nodes} nodes have joined", *reasons])
        case VotesMissing(generation, votes, needed, missing, count):
            here = f"{votes} of the {needed} required votes count"
            nodes = format_node_names(missing, count)
            return f"generation {generation} may still run elsewhere: {here}; waiting for {nodes}"
        case CandidatesMissing(votes, needed, missing):
            return f"{votes} of the {needed} required votes are here; not here: {missing}"
        case MembersAbsent(nodes, count):
            return f"waiting for {format_node_names(nodes, count)}, which may be looking for this leader"
        case LastCall(joined, max_nodes, timeout_s):
            wait = f"waiting until no new node has joined for {timeout_s:g} s"
            return f"{joined} of at most {max_nodes} nodes have joined: {wait}"


def describe_loss(lost: NodeLost) -> str:
    """Say what happened to the node, without its name."""
    return f"{lost.loss.value} ({lost.departure.text})" if lost.departure else lost.loss.value
