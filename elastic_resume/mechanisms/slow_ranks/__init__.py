"""Name the rank for which all others wait, and stop nothing.

`own_time` measures each rank in its worker, `reporter` sends the medians of a node, `judge` compares those of
all nodes at the leader, and `reporter` of the slow rank's node emits these events::

    slow-rank         generation, step, rank (of this node), own_s and others_s (medians of its own times and
                      of the others'), gpu (its UUID, or ""), load (the GPU's clock, temperature and
                      slowdowns, or "")
    slow-rank-ended   generation, step, rank; it is no longer slow
"""

from __future__ import annotations

from elastic_resume.mechanisms.mechanism import Mechanism, lazily
from elastic_resume.mechanisms.slow_ranks import description, judge

SLOW_RANKS = Mechanism(
    topic=judge.OWN_TIMES,
    make_observer=lazily("slow_ranks.own_time", "observe"),
    is_measuring=True,
    make_agent_part=lazily("slow_ranks.reporter", "SlowRankReporter"),
    alerts=description.ALERTS,
    status=description.STATUS,
    gauge=description.GAUGE,
)
