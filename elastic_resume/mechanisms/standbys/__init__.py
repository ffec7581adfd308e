"""Start workers before their node joins a view, if they take long to start.

`judge` passes on what the workers of the leader's node have needed, and `workers` starts them on each node.
"""

from __future__ import annotations

from elastic_resume.mechanisms.mechanism import Mechanism, lazily
from elastic_resume.mechanisms.standbys.judge import START_COST

STANDBYS = Mechanism(topic=START_COST, make_agent_part=lazily("standbys.workers", "StandbyWorkers"))
