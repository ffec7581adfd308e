"""Name the rank for which all others wait."""

from __future__ import annotations

from elastic_resume.mechanisms.mechanism import Mechanism
from elastic_resume.mechanisms.slow_ranks.judge import OWN_TIMES

SLOW_RANKS = Mechanism(topic=OWN_TIMES)
