"""Poll the source of preemption notices, if there is one, until the first notice."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

from elastic_resume.background import BackgroundThread
from elastic_resume.mechanisms.mechanism import AgentContext
from elastic_resume.mechanisms.preemption.sources import NoticeQueryError, NoticeSource, PreemptionNotice

logger = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 0.5
"""A poll in progress may take longer."""


class NoticeWatcher:
    """Polls in a thread, from `start` until a notice or `close`. A failing source is named once."""

    def __init__(self, context: AgentContext, on_notice: Callable[[PreemptionNotice], object]) -> None:
        """``on_notice`` is called once, in the thread."""
        self._source: NoticeSource | None = context.settings["preemption_notice"]
        self._emit, self._on_notice = context.emit, on_notice
        self._has_failed = False
        self._thread: BackgroundThread | None = None

    def start(self) -> None:
        """Begin to poll."""
        if source := self._source:
            log_error = partial(self._log_error, source)
            self._thread = BackgroundThread(
                "notice", partial(self._poll, source), retry_s=source.poll_interval_s, on_error=log_error
            )
            self._thread.start()

    def close(self) -> None:
        """Poll no more."""
        if self._thread is not None:
            self._thread.close(CLOSE_TIMEOUT_S)

    def _poll(self, source: NoticeSource) -> float | None:
        notice = source.poll()
        if notice is None:
            return source.poll_interval_s
        self._emit("preemption-notice", source=source.name, reason=notice.reason, deadline=notice.deadline)
        when = "" if notice.deadline is None else f", in {notice.deadline - time.time():.0f} s"
        logger.info(
            "preemption notice (%s): %s%s: this node commits its newest step and leaves.%s",
            source.name,
            notice.reason,
            when,
            source.hint,
        )
        self._on_notice(notice)
        return None

    def _log_error(self, source: NoticeSource, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            reason = str(error) if isinstance(error, NoticeQueryError) else repr(error)
            text = "preemption-notice %s: %s. It is polled again; further errors are not logged."
            logger.warning(text, source.name, reason)
