"""Let all nodes take a snapshot of each step before a planned end of the view, so that it costs no step.

A view ends as planned when a node is drained, or when newcomers join. `announcer` tells the leader that its
node is drained, and hands the leader's verdict to the workers. `judge` passes it on to all nodes. A drained
node trains on meanwhile, for two heartbeats: its last step is one of which the others have a snapshot too. If
its grace is too short for that, or no leader is there, the others go on from their newest snapshot. Newcomers
wait until the members report a snapshot of their newest step.
"""

from __future__ import annotations

from elastic_resume.mechanisms.mechanism import Mechanism, lazily
from elastic_resume.mechanisms.planned_ends.judge import ENDS

PLANNED_ENDS = Mechanism(
    topic=ENDS,
    make_agent_part=lazily("planned_ends.announcer", "EndAnnouncer"),
)
