"""Poll the source of preemption notices, if there is one, and drain this node at the first notice."""

from __future__ import annotations

import logging
import time
from functools import partial

from elastic_resume.background import BackgroundThread
from elastic_resume.mechanisms.mechanism import AgentContext, AgentPart
from elastic_resume.mechanisms.preemption.sources import NoticeQueryError, NoticeSource
from elastic_resume.rendezvous.client import RendezvousClient

logger = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 0.5
"""A poll in progress may take longer."""


class NoticeWatcher(AgentPart):
    """Polls in a thread, from `start` until a notice or `close`. A failing source is named once."""

    def __init__(self, context: AgentContext) -> None:
        self._source: NoticeSource | None = context.settings["preemption_notice"]
        self._emit, self._drain = context.emit, context.drain
        self._has_failed = False
        self._thread: BackgroundThread | None = None

    def start(self, client: RendezvousClient) -> None:
        """Begin to poll."""
        del client
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
            "preemption notice (%s): %s%s: this node commits its newest step and leaves.",
            source.name,
            notice.reason,
            when,
        )
        self._drain("a preemption notice")
        return None

    def _log_error(self, source: NoticeSource, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            reason = str(error) if isinstance(error, NoticeQueryError) else repr(error)
            text = "preemption-notice %s: %s. It is polled again; further errors are not logged."
            logger.warning(text, source.name, reason)
