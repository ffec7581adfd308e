"""Wait in a test until a condition holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_for(condition: Callable[[], Any], description: str, timeout_s: float = 60.0) -> Any:
    """Return the first true value of ``condition``; fail after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {description}"
        time.sleep(0.02)
    return value
