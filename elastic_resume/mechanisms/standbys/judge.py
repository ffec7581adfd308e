"""Decide for which local ranks a node starts its workers before it joins a view.

Such a *standby* runs the script up to `er.resume()`, while the other nodes go on training without this node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from elastic_resume.constants import EXIT_NEEDS_GENERATION
from elastic_resume.events import Event, get_count, get_seconds
from elastic_resume.mechanisms.mechanism import decode_body
from elastic_resume.policy.wording import name_ranks
from elastic_resume.rendezvous.facts import Fact, Judge, Judgment, Scope, Topic

STANDBY_AFTER_S = 2.0  # a change of the world that takes the node in costs the others less than this


@dataclass(frozen=True, slots=True)
class StartCost:
    """What a new worker needs to reach `er.resume()`, as the job's workers have measured it."""

    start_s: float
    state_bytes: int = 0
    """The size of its training state; 0 if it is unknown."""


class StartCostJudge(Judge):
    """Passes on what the leader's own workers have needed; before, what the last leader has passed on."""

    def __init__(self, scope: Scope) -> None:
        self._leader, self._body = scope.leader, scope.last_body

    def add(self, node: str, fact: Fact, now: float) -> None:
        """Keep the newest cost of the leader's node."""
        del now
        decode_body(StartCost, fact.body)
        if node == self._leader:
            self._body = fact.body

    def judge(self, now: float) -> Judgment:
        """Return the cost, if it is known."""
        del now
        return Judgment(self._body)


START_COST = Topic("start-cost", StartCostJudge, is_of_job=True)


def find_start_cost(events: Iterable[Event]) -> StartCost | None:
    """Return the greatest cost among workers that can keep their process; None if there is none."""
    costs = [
        StartCost(get_seconds(event, "start_s") or 0.0, get_count(event, "state_bytes") or 0)
        for event in events
        if event["event"] == "restartable"
    ]
    return max(costs, key=lambda cost: cost.start_s, default=None)


def choose_standby_ranks(
    cost: StartCost | None, parked: Collection[int], local_world_size: int, *, is_possible: bool = True
) -> tuple[int, ...]:
    """Return the local ranks to start at once; none if the node joins before its workers start.

    Args:
        cost: that of the job's workers; None if it is unknown, or if the script is not restartable.
        parked: the local ranks whose process waits for its next generation.
        local_world_size: the number of workers of this node.
        is_possible: whether this agent can start a standby, and none has failed yet.

    """
    if cost is None or cost.start_s <= STANDBY_AFTER_S or not is_possible:
        return ()
    return tuple(rank for rank in range(local_world_size) if rank not in parked)


def describe_start(ranks: Sequence[int], kept: Sequence[int], start_s: float) -> str:
    """Return the line of a node that starts the workers of ``ranks`` before it joins."""
    keep = "keeps its process" if len(kept) == 1 else "keep their processes"
    start = "starts" if len(ranks) == 1 else "start"
    return (
        f"{f'local {name_ranks(kept)} {keep}; ' if kept else ''}local {name_ranks(ranks)} {start} before "
        f"this node joins, which takes about {start_s:.0f} s. Other nodes that are enough train meanwhile."
    )


def describe_failure(local_rank: int, exit_code: int) -> str:
    """Return the line of a node whose worker could not start before the node joined."""
    why = f"it was killed by signal {-exit_code}" if exit_code < 0 else f"it ended with exit code {exit_code}"
    if exit_code == EXIT_NEEDS_GENERATION:
        why = "no worker can start ahead, as its own line above says"
    return (
        f"local rank {local_rank} did not reach er.resume() before this node joined: {why}. Until this agent "
        "ends, the node joins first and the others wait for its workers' start."
    )
