"""Tell how much of the grace is left: the seconds that a node may take after a signal to stop."""

from __future__ import annotations

import os
import time

from elastic_resume import constants

DEFAULT_GRACE_S = 5.0


def find_left_s(stopping_at: float | None) -> float | None:
    """Return how long this node may take since ``stopping_at``, of the monotonic clock; None without one."""
    if stopping_at is None:
        return None
    try:
        grace_s = float(os.environ.get(constants.ENV_GRACE, ""))
    except ValueError:
        grace_s = DEFAULT_GRACE_S
    return stopping_at + grace_s - time.monotonic()
