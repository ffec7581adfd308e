"""Failures of the archive in a row: when to try again, what to log, and which of them time mends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastic_resume.errors import ArchiveError

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 2.0
MAX_PAUSE_S = 300.0
LOG_REPEAT_S = 60.0


def can_pass(error: Exception) -> bool:
    """Return whether waiting may mend it; wrong credentials or a missing bucket stay until a person acts."""
    return isinstance(error, ArchiveError) and error.kind.can_pass


def find_pause_s(count: int, max_pause_s: float = MAX_PAUSE_S) -> float:
    """Return how long to wait after so many failures in a row."""
    return min(FIRST_PAUSE_S * 2.0 ** min(count - 1, 20), max_pause_s)


@dataclass(frozen=True, slots=True)
class FailureSeries:
    """Failures without a success between them; times are of the monotonic clock."""

    count: int
    text: str
    began_at: float
    retry_at: float


class ArchiveFailures:
    """The present series while the job trains. One thread adds and clears; others read `series`."""

    def __init__(self, emit: Callable[..., Any]) -> None:
        """``emit`` takes the kind and the fields of an event: at the begin of a series, and at its end."""
        self._emit = emit
        self._logged_at = 0.0
        self.series: FailureSeries | None = None

    @property
    def count(self) -> int:
        """How many there are in a row."""
        return self.series.count if self.series else 0

    @property
    def is_pausing(self) -> bool:
        """Whether the archive is not to be asked yet."""
        return self.series is not None and time.monotonic() < self.series.retry_at

    def add(self, error: ArchiveError) -> None:
        """Note a failure, and log it unless a line about this series is recent."""
        now, text, before = time.monotonic(), str(error), self.series
        if before is None:
            self._logged_at = now
            logger.warning("%s Training continues, and this node tries again.", text)
            self._emit("archive-failed", error=text[:1000], error_kind=error.kind.value)
        elif now - self._logged_at >= LOG_REPEAT_S:
            self._logged_at = now
            logger.warning("uploads to the archive still fail: %s", text)
        count = self.count + 1
        began_at = before.began_at if before else now
        self.series = FailureSeries(count, text, began_at, now + find_pause_s(count))

    def clear(self) -> None:
        """Note a success."""
        if self.series is not None:
            seconds = round(time.monotonic() - self.series.began_at, 3)
            self.series = None
            logger.warning("uploads to the archive work again.")
            self._emit("archive-recovered", seconds=seconds)
