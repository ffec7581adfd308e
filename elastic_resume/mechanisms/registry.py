"""List the mechanisms. Without its line here, and its package, a mechanism is gone."""

from __future__ import annotations

from elastic_resume.mechanisms.mechanism import Mechanism
from elastic_resume.mechanisms.replicas import REPLICAS
from elastic_resume.mechanisms.slow_ranks import SLOW_RANKS
from elastic_resume.mechanisms.standbys import STANDBYS

MECHANISMS: tuple[Mechanism, ...] = (
    REPLICAS,
    SLOW_RANKS,
    STANDBYS,
)
TOPICS = tuple(mechanism.topic for mechanism in MECHANISMS if mechanism.topic)
