"""Agree on one step boundary at which all ranks of a view get a notice, without a collective.

::

    noticed node --report with a reason--> leader       only if a script of the job asks for notices
    leader --verdict with a patience--> every agent     which stores it for its ranks
    agent --report with a bound--> leader               its ranks will have seen the patience by that boundary
    leader --verdict with a boundary--> every agent     the greatest bound, and the patience

Each rank counts its step boundaries. A rank that sees the patience at boundary b goes on, and waits at b +
patience unless it knows the agreed boundary, which is never an earlier one. So no rank passes the agreed
boundary without the notice. An agent needs no rank for its bound: a rank stores its count before it looks for
a patience, and the agent reads the counts after it has stored one. So ranks wait for agents and the leader,
never for ranks that may be in a collective.

Without all bounds in time the leader makes the notice void: no rank gets it. A view has one notice, the
first. With the view all of this ends, and the ranks of the next one have no notice. A rank that waits in vain
for boundary or void fails, which ends the view.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from elastic_resume.mechanisms.mechanism import decode_body, encode_body
from elastic_resume.rendezvous.facts import Fact, Judge, Judgment, Scope, Topic

VOID_NODE_TIMEOUTS = 2
"""After so many node timeouts without all bounds a notice is void."""
PATIENCE_NODE_TIMEOUTS = 0.4
"""Two verdicts wait for a heartbeat each, a tenth of a node timeout; the rest is for slow machines."""
MAX_PATIENCE = 100_000
HELD_NODE_TIMEOUTS, MIN_HELD_S = 3, 60.0
"""A rank waits so long at most: a leader makes a notice void earlier, and a lost leader ends the lease."""
END_RESERVE_S = 1.0
"""What a worker needs to keep its state, apart from the time of a step."""
MAX_UNANNOUNCED_S = 5.0
UNKNOWN_STEPS = 3
"""Step boundaries until a drain if no notice has come back from the leader yet."""


# ---- the leader ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NoticeReport:
    """What one node knows in a generation."""

    is_used: bool = False
    """A script of this node asks for notices."""
    reason: str = ""
    """Why this node is to stop; empty: it is not."""
    seconds: float = 0.0
    """Until then, when the report was made."""
    patience: int = 0
    bound: int = 0
    """Every rank of this node sees the verdict's patience at this boundary at the latest; 0: unknown."""


@dataclass(frozen=True, slots=True)
class NoticeVerdict:
    """What the leader has found. It is sent once a script of the job asks for notices."""

    node: str = ""
    """The node that is to stop."""
    reason: str = ""
    patience: int = 0
    """0: there is no notice."""
    boundary: int = 0
    """At which all ranks get the notice; 0: not agreed."""
    seconds: float = 0.0
    """That were left when the boundary was agreed."""
    is_void: bool = False


class NoticeJudge(Judge):
    """Announces the first notice of a view, and agrees on its boundary."""

    def __init__(self, scope: Scope) -> None:
        self._members = scope.members
        self._limit_s = VOID_NODE_TIMEOUTS * scope.node_timeout_s
        self._is_used = False
        self._bounds: dict[str, int] = {}
        self._verdict = NoticeVerdict()
        self._stops_at = self._void_at = 0.0

    def add(self, node: str, fact: Fact, now: float) -> None:
        """Take a node's report."""
        report = decode_body(NoticeReport, fact.body)
        self._is_used |= report.is_used
        if report.reason and not self._verdict.node:
            patience = min(max(1, report.patience), MAX_PATIENCE)
            self._verdict = NoticeVerdict(node, report.reason, patience)
            self._stops_at, self._void_at = now + report.seconds, now + self._limit_s
        if report.bound:
            self._bounds[node] = report.bound

    def judge(self, now: float) -> Judgment:
        """Return what all agents have to know, which does not change again once it is agreed or void."""
        found = self._verdict
        if found.node and not found.boundary and not found.is_void:
            if self._bounds.keys() >= set(self._members):
                boundary = max(self._bounds.values()) + found.patience
                left_s = round(max(0.0, self._stops_at - now), 1)
                found = NoticeVerdict(found.node, found.reason, found.patience, boundary, left_s)
            elif now >= self._void_at:
                found = NoticeVerdict(found.node, found.reason, found.patience, is_void=True)
            self._verdict = found
        return Judgment(encode_body(found)) if self._is_used or found.node else Judgment()


NOTICES = Topic("notices", NoticeJudge, is_urgent=True)


def find_patience(node_timeout_s: float, step_s: float) -> int:
    """Return for how many steps a rank goes on while the agents agree, so that it seldom waits."""
    return int(min(MAX_PATIENCE, 1 + PATIENCE_NODE_TIMEOUTS * node_timeout_s / max(step_s, 1e-6)))


def find_held_limit_s(node_timeout_s: float) -> int:
    """Return how long a rank waits for the agreed boundary until it fails."""
    return int(max(MIN_HELD_S, HELD_NODE_TIMEOUTS * node_timeout_s))


# ---- a rank ----------------------------------------------------------------------------------------------


class AgentWords(NamedTuple):
    """What an agent has stored for its ranks; see `NoticeVerdict`."""

    generation: int = 0
    is_used: int = 0
    patience: int = 0
    boundary: int = 0
    is_void: int = 0


class Action(enum.Enum):
    """What a rank does at a step boundary."""

    GO = "go"
    WAIT = "wait"
    TAKE = "take"  # the notice
    DROP = "drop"  # no notice comes any more


def decide_at_boundary(count: int, limit: int, words: AgentWords, generation: int) -> tuple[Action, int]:
    """Return what a rank does at its ``count``-th boundary, and where it has to wait.

    ``limit`` is that of the boundary before; 0 before a notice was seen.
    """
    if words.is_void or words.generation != generation:
        return Action.DROP, 0
    if words.boundary:
        return (Action.TAKE if count >= words.boundary else Action.GO), limit
    if words.patience and not limit:
        limit = count + words.patience
    return (Action.WAIT if limit and count >= limit else Action.GO), limit


def is_end_due(
    words: AgentWords, generation: int, count: int, *, step_s: float, waited_s: float, left_s: float
) -> bool:
    """Return whether a drained node's worker ends now, rather than after the agreed boundary.

    ``count`` is that of its last boundary, ``waited_s`` the time since the drain began, and ``left_s`` the
    rest of the grace.
    """
    if not words.is_used or words.is_void or words.generation != generation:
        return True
    if words.boundary:
        steps = words.boundary - count
    elif waited_s >= MAX_UNANNOUNCED_S and not words.patience:
        return True
    else:
        steps = words.patience + UNKNOWN_STEPS
    return steps <= 0 or left_s < (steps + 1) * step_s + END_RESERVE_S
