"""Decide for which local ranks a node starts its workers before it joins a view.

Such a *standby* runs the script up to `er.resume()`, while the other nodes go on training without this node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from elastic_resume.events import Event, get_count, get_seconds

STANDBY_AFTER_S = 2.0  # a change of the world that takes the node in costs the others less than this


@dataclass(frozen=True, slots=True)
class StartCost:
    """What a new worker needs to reach `er.resume()`, as the job's workers have measured it."""

    start_s: float
    state_bytes: int = 0
    """The size of its training state; 0 if it is unknown."""


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
