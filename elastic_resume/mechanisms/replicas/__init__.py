"""Compare the replicas of a view while they train."""

from __future__ import annotations

from elastic_resume.mechanisms.mechanism import Mechanism
from elastic_resume.mechanisms.replicas.judge import DIGESTS

REPLICAS = Mechanism(topic=DIGESTS)
