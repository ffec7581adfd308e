"""Start workers before their node joins a view, if they take long to start."""

from __future__ import annotations

from elastic_resume.mechanisms.mechanism import Mechanism
from elastic_resume.mechanisms.standbys.start_cost import START_COST, StartCostReporter

STANDBYS = Mechanism(topic=START_COST, make_agent_part=lambda _: StartCostReporter())
