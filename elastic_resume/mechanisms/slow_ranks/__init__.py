"""Name the rank for which all others wait, and stop nothing.

`own_time` measures each rank in its worker, `reporter` sends the medians of a node, `judge` compares those of
all nodes at the leader, and `reporter` of the slow rank's node emits these events::

    slow-rank         generation, step, rank (of this node), own_s and others_s (medians of its own times and
                      of the others'), gpu (its UUID, or ""), load (the GPU's clock, temperature and
                      slowdowns, or "")
    slow-rank-ended   generation, step, rank; it is no longer slow
"""

from __future__ import annotations

from collections.abc import Callable

from elastic_resume.mechanisms.mechanism import AgentContext, AgentPart, Mechanism, StepObserver
from elastic_resume.mechanisms.slow_ranks import description, judge


def _make_observer(record: Callable[[int], None], count_collectives: Callable[[], int]) -> StepObserver:
    from elastic_resume.mechanisms.slow_ranks.own_time import OwnTime  # noqa: PLC0415 - needs torch

    return OwnTime(record, count_collectives)


def _make_agent_part(context: AgentContext) -> AgentPart:
    from elastic_resume.mechanisms.slow_ranks.reporter import SlowRankReporter  # noqa: PLC0415 - agents only

    return SlowRankReporter(context)


SLOW_RANKS = Mechanism(
    topic=judge.OWN_TIMES,
    make_observer=_make_observer,
    make_agent_part=_make_agent_part,
    alerts=description.ALERTS,
    status=description.STATUS,
    gauge=description.GAUGE,
)
